"""Writes what the extension module is compiled with, from the table in `abi`.

`c_header` gives the C structs, `cython_declarations` the same for Cython and one C function for each
entry of ``PJRT_Api``. ``setup.py`` calls both at build time; this module imports nothing, since the
package is not installed then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_C = {
    "ptr": "void*",
    "str": "const char*",
    "fn": "void*",
    "size": "size_t",
    "iptr": "intptr_t",
    "uptr": "uintptr_t",
    "int": "int",
    "enum": "int",
    "i32": "int32_t",
    "i64": "int64_t",
    "u64": "uint64_t",
    "f32": "float",
    "bool": "bool",
}

Layouts = Mapping[str, Sequence[tuple[str, str]]]


def c_header(layouts: Layouts, unions: Mapping[str, str], functions: Sequence[str]) -> str:
    """``_pjrt_abi.h``: the structs and ``PJRT_Api``."""
    lines = [
        "#pragma once",
        "#include <stdbool.h>",
        "#include <stddef.h>",
        "#include <stdint.h>",
    ]
    for name, fields in layouts.items():
        keyword = "union" if name in unions else "struct"
        body = " ".join(f"{_C.get(kind, kind)} {field};" for kind, field in fields)
        lines.append(f"typedef {keyword} {name} {{ {body} }} {name};")
    entries = "\n".join(f"  void* (*{name})(void*);" for name in functions)
    lines.append(
        "typedef struct PJRT_Api {\n  size_t struct_size;\n  void* extension_start;\n"
        f"  PJRT_Api_Version pjrt_api_version;\n{entries}\n}} PJRT_Api;"
    )
    return "\n".join(lines) + "\n"


def cython_declarations(
    layouts: Layouts, unions: Mapping[str, str], functions: Sequence[str]
) -> str:
    """``_pjrt_abi.pxi``: declarations of the structs, an entry for each function, and the table's filling.

    Each entry hands its number and its arguments to ``dispatch``, which the including module defines.
    """
    lines = ['cdef extern from "_pjrt_abi.h" nogil:']
    for name, fields in layouts.items():
        keyword = "union" if name in unions else "struct"
        lines.append(f"    ctypedef {keyword} {name}:")
        kinds = {"bool": "bint"}
        for kind, field in fields:
            lines.append(f"        {kinds.get(kind) or _C.get(kind, kind)} {field}")
    lines.append("    ctypedef struct PJRT_Api:")
    lines.append("        size_t struct_size")
    lines.append("        void* extension_start")
    lines.append("        PJRT_Api_Version pjrt_api_version")
    lines.extend(f"        void* (*{name})(void*) noexcept nogil" for name in functions)
    for number, name in enumerate(functions):
        lines.append(f"cdef void* entry_{name}(void* args) noexcept nogil:")
        lines.append(f"    return dispatch({number}, args)")
    lines.append("cdef void fill(PJRT_Api* api) noexcept nogil:")
    lines.extend(f"    api.{name} = entry_{name}" for name in functions)
    return "\n".join(lines) + "\n"
