"""The table of structs against the C header, compiled.

The header comes with the tensorflow-cpu wheel (2.21 has API 0.90); STRETTO_PJRT_HEADER may name another copy.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from stretto.plugin import abi, abi_codegen
from stretto.plugin.structs import STRUCTS, NamedValues, read_named_values

_IN_WHEEL = "include/xla/pjrt/c/pjrt_c_api.h"


def _compiler() -> str:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return name
    pytest.skip("no C compiler to read the header with")


@pytest.fixture(scope="module")
def header() -> Path:
    named = os.environ.get("STRETTO_PJRT_HEADER")
    if named:
        return Path(named)
    spec = find_spec("tensorflow")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(place) / _IN_WHEEL).exists():
            return path
    pytest.skip(
        "no pjrt_c_api.h: pip install tensorflow-cpu==2.21.0, or set STRETTO_PJRT_HEADER to the file"
    )


def _run_c(tmp_path: Path, source: str) -> list[str]:
    file, program = tmp_path / "probe.c", tmp_path / "probe"
    file.write_text(source)
    subprocess.run([_compiler(), "-std=c11", "-o", program, file], check=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()


def _c_field(struct: str, kind: str, field: str) -> str:
    """The field's name in the header, where unions have no name: that of their first member."""
    return abi.fields(abi.UNIONS[kind])[0][1] if kind in abi.UNIONS else field


def test_layouts(header: Path, tmp_path: Path) -> None:
    expected, lines = [], []
    for name, fields in abi.layouts().items():
        if name in (abi.UNIONS | abi.EXTENSION_STRUCTS | abi.EXTENSION_PLAIN):
            continue  # those of extensions are in headers that the wheel lacks
        struct = STRUCTS[name]
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        expected += [name, str(ctypes.sizeof(struct))]
        for kind, field in fields:
            c_field = _c_field(name, kind, field)
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof(struct {name}, {c_field}));')
            expected += [f"{name}.{field}", str(getattr(struct, field).offset)]
    found = _run_c(
        tmp_path,
        f'#include <stdio.h>\n#include "{header}"\nint main(void) {{\n' + "\n".join(lines) + "}\n",
    )
    assert found == expected


def test_functions_and_version(header: Path, tmp_path: Path) -> None:
    lines = [f'printf("%zu\\n", offsetof(PJRT_Api, {name}));' for name in abi.FUNCTIONS]
    lines.append('printf("%d %d %zu\\n", PJRT_API_MAJOR, PJRT_API_MINOR, sizeof(PJRT_Api));')
    found = _run_c(
        tmp_path,
        f'#include <stdio.h>\n#include "{header}"\nint main(void) {{\n' + "\n".join(lines) + "}\n",
    )
    head = 2 * ctypes.sizeof(ctypes.c_void_p) + ctypes.sizeof(STRUCTS["PJRT_Api_Version"])
    pointer = ctypes.sizeof(ctypes.c_void_p)
    offsets = [head + i * pointer for i in range(len(abi.FUNCTIONS) + 1)]
    *places, major, minor, size = map(int, found)
    assert [*places, size] == offsets
    # 0.91 has the functions of 0.90; it tells of an extension.
    assert major == abi.MAJOR and abi.MINOR in (minor, minor + 1)


def test_codes(header: Path, tmp_path: Path) -> None:
    names = [f"PJRT_Buffer_Type_{name.upper()}" for name in abi.BUFFER_TYPES]
    names += [f"PJRT_Error_Code_{name}" for name in abi.ERROR_CODES]
    names += [
        "PJRT_NamedValue_kString",
        "PJRT_NamedValue_kInt64",
        "PJRT_NamedValue_kInt64List",
        "PJRT_NamedValue_kFloat",
        "PJRT_NamedValue_kBool",
        "PJRT_HostBufferSemantics_kImmutableOnlyDuringCall",
        "PJRT_HostBufferSemantics_kImmutableUntilTransferCompletes",
        "PJRT_HostBufferSemantics_kImmutableZeroCopy",
        "PJRT_HostBufferSemantics_kMutableZeroCopy",
        "PJRT_Buffer_MemoryLayout_Type_Tiled",
        "PJRT_Buffer_MemoryLayout_Type_Strides",
    ]
    here = [*abi.BUFFER_TYPES.values(), *abi.ERROR_CODES.values()]
    here += [abi.STRING, abi.INT64, abi.INT64_LIST, abi.FLOAT, abi.BOOL]
    here += [abi.ONLY_DURING_CALL, abi.UNTIL_TRANSFER_COMPLETES, abi.ZERO_COPY]
    here += [abi.MUTABLE_ZERO_COPY, abi.TILED, abi.STRIDES]
    lines = "".join(f'printf("%d\\n", (int){name});' for name in names)
    found = _run_c(
        tmp_path, f'#include <stdio.h>\n#include "{header}"\nint main(void) {{ {lines} }}\n'
    )
    assert [int(code) for code in found] == here


def test_generated_header_has_the_layout_of_the_ctypes_classes(tmp_path: Path) -> None:
    """What Cython compiles with, and what the handlers read, lie in the same places."""
    text = abi_codegen.c_header(abi.layouts(), abi.UNIONS, abi.FUNCTIONS, abi.EXTENSIONS)
    expected, lines = [], []
    for name, fields in abi.layouts().items():
        lines.append(f'printf("%zu\\n", sizeof({name}));')
        expected.append(ctypes.sizeof(STRUCTS[name]))
        for _, field in fields:
            lines.append(f'printf("%zu\\n", offsetof({name}, {field}));')
            expected.append(getattr(STRUCTS[name], field).offset)
    found = _run_c(
        tmp_path, f"#include <stdio.h>\n{text}\nint main(void) {{\n" + "\n".join(lines) + "}\n"
    )
    assert [int(n) for n in found] == expected


def test_named_values_round_trip() -> None:
    values = {"a": "text", "b": -5, "c": [1, 2, 3], "d": 0.5, "e": True, "": ""}
    array = NamedValues(values)
    assert read_named_values(array.address, array.count) == values
    assert read_named_values(None, 0) == {}
