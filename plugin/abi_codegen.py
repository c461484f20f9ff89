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
Extensions = Mapping[str, tuple[int, Sequence[str]]]


def c_header(
    layouts: Layouts,
    unions: Mapping[str, str],
    functions: Sequence[str],
    extensions: Extensions,
) -> str:
    """``_pjrt_abi.h``: the structs, ``PJRT_Api`` and the extensions."""
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
    for name, (_, members) in extensions.items():
        body = " ".join(f"void* (*{member})(void*);" for member in members)
        lines.append(f"typedef struct {name} {{ PJRT_Extension_Base base; {body} }} {name};")
    return "\n".join(lines) + "\n"


def cython_declarations(
    layouts: Layouts,
    unions: Mapping[str, str],
    functions: Sequence[str],
    extensions: Extensions,
    others: Sequence[str],
) -> str:
    """``_pjrt_abi.pxi``: declarations of the structs, an entry for each function, and the tables' filling.

    ``others`` are functions with entries that the including module puts where they belong. Each entry hands
    its number and its arguments to ``dispatch``, which the including module defines.
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
    for extension, (_, members) in extensions.items():
        lines.append(f"    ctypedef struct {extension}:")
        lines.append("        PJRT_Extension_Base base")
        lines.extend(f"        void* (*{name})(void*) noexcept nogil" for name in members)
    everything = [*functions, *(name for _, members in extensions.values() for name in members)]
    everything += others
    for number, name in enumerate(everything):
        lines.append(f"cdef void* entry_{name}(void* args) noexcept nogil:")
        lines.append(f"    return dispatch({number}, args)")
    lines.append("cdef void fill(PJRT_Api* api) noexcept nogil:")
    lines.extend(f"    api.{name} = entry_{name}" for name in functions)
    lines.extend(f"cdef {extension} table_{extension}" for extension in extensions)
    lines.append("cdef void fill_extensions(PJRT_Api* api) noexcept nogil:")
    for extension, (type, members) in extensions.items():
        table = f"table_{extension}"
        lines.append(f"    {table}.base.struct_size = sizeof({extension})")
        lines.append(f"    {table}.base.type = {type}")
        lines.append(f"    {table}.base.next = api.extension_start")
        lines.append(f"    api.extension_start = &{table}")
        lines.extend(f"    {table}.{name} = entry_{name}" for name in members)
    return "\n".join(lines) + "\n"
