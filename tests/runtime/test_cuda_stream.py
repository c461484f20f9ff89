"""The declarations of `cuda_stream` against the C header of XLA's FFI that comes with jaxlib."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import jaxlib
import pytest

from stretto.runtime.engines import cuda_stream

HEADER = Path(jaxlib.__file__).parent / "include" / "xla" / "ffi" / "api" / "c_api.h"
# Ours: the header's, and by field of ours the header's.
TYPES = {
    cuda_stream.Extension: ("XLA_FFI_Extension_Base", {"type": "type"}),
    cuda_stream.Version: (
        "XLA_FFI_Api_Version",
        {"major": "major_version", "minor": "minor_version"},
    ),
    cuda_stream.Metadata: ("XLA_FFI_Metadata", {"version": "api_version"}),
    cuda_stream.MetadataExtension: ("XLA_FFI_Metadata_Extension", {"metadata": "metadata"}),
    cuda_stream.StreamArguments: (
        "XLA_FFI_Stream_Get_Args",
        {"context": "ctx", "stream": "stream"},
    ),
    cuda_stream.Api: ("XLA_FFI_Api", {"stream_get": "XLA_FFI_Stream_Get"}),
    cuda_stream.Frame: (
        "XLA_FFI_CallFrame",
        {"extension": "extension_start", "api": "api", "context": "ctx", "stage": "stage"},
    ),
}


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_declarations_are_those_of_the_header(tmp_path: Path) -> None:
    checks = [
        f"_Static_assert(offsetof({theirs}, {other}) == {getattr(ours, field).offset}, "
        f'"{theirs}.{other}");'
        for ours, (theirs, fields) in TYPES.items()
        for field, other in fields.items()
    ]
    size = ctypes.sizeof(cuda_stream.StreamArguments)
    checks += [
        f'_Static_assert(sizeof(XLA_FFI_Stream_Get_Args) == {size}, "arguments");',
        f'_Static_assert(XLA_FFI_Extension_Metadata == {cuda_stream._METADATA}, "extension");',
        f'_Static_assert(XLA_FFI_ExecutionStage_EXECUTE == {cuda_stream._EXECUTE}, "stage");',
    ]
    # From version 0.5 of the header on, jaxlib 0.12, they have these names.
    text = HEADER.read_text()
    renamed = [
        f"#define {old} {new}"
        for old, new in (
            ("XLA_FFI_Extension_Base", "XLA_FFI_InternalExtension"),
            ("XLA_FFI_ExecutionContext", "XLA_FFI_InvokeContext"),
        )
        if new in text
    ]
    source = tmp_path / "check.c"
    head = ["#include <stddef.h>", f'#include "{HEADER}"', *renamed]
    source.write_text("\n".join([*head, *checks]))
    done = subprocess.run(
        ["cc", "-fsyntax-only", source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
