"""The declarations of XLA's FFI in the compiled handler against the C header that comes with jaxlib.

To be looked at again when jaxlib moves: fields that were added in front of those used here, and the numbers
of the stage and of the extension.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import jaxlib
import pytest

SOURCE = Path(__file__).parents[2] / "collectives" / "_ffi.pxi"
HEADER = Path(jaxlib.__file__).parent / "include" / "xla" / "ffi" / "api" / "c_api.h"
# Our type: the header's, and by field of ours the header's.
TYPES = {
    "ffi_extension": ("XLA_FFI_Extension_Base", {"type": "type", "next": "next"}),
    "ffi_version": ("XLA_FFI_Api_Version", {"major": "major_version", "minor": "minor_version"}),
    "ffi_metadata": (
        "XLA_FFI_Metadata",
        {"version": "api_version", "traits": "traits", "state": "state_type_id"},
    ),
    "ffi_metadata_extension": ("XLA_FFI_Metadata_Extension", {"metadata": "metadata"}),
    "ffi_buffer": ("XLA_FFI_Buffer", {"data": "data", "rank": "rank", "dims": "dims"}),
    "ffi_list": ("XLA_FFI_Args", {"count": "size", "types": "types", "items": "args"}),
    "ffi_attributes": ("XLA_FFI_Attrs", {"count": "size", "names": "names", "items": "attrs"}),
    "ffi_scalar": ("XLA_FFI_Scalar", {"value": "value"}),
    "ffi_error_args": ("XLA_FFI_Error_Create_Args", {"message": "message", "code": "errc"}),
    "ffi_future_args": ("XLA_FFI_Future_SetAvailable_Args", {"future": "future"}),
    "ffi_stream_args": ("XLA_FFI_Stream_Get_Args", {"context": "ctx", "stream": "stream"}),
    "ffi_future_error_args": (
        "XLA_FFI_Future_SetError_Args",
        {"future": "future", "error": "error"},
    ),
    "ffi_api": (
        "XLA_FFI_Api",
        {
            "error_create": "XLA_FFI_Error_Create",
            "stream_get": "XLA_FFI_Stream_Get",
            "error_destroy": "XLA_FFI_Error_Destroy",
            "future_create": "XLA_FFI_Future_Create",
            "future_set_available": "XLA_FFI_Future_SetAvailable",
            "future_set_error": "XLA_FFI_Future_SetError",
        },
    ),
    "ffi_frame": (
        "XLA_FFI_CallFrame",
        {
            "extension": "extension_start",
            "api": "api",
            "context": "ctx",
            "stage": "stage",
            "arguments": "args",
            "results": "rets",
            "attributes": "attrs",
            "future": "future",
        },
    ),
}


def test_declarations_are_those_of_the_header(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the header is read by a C compiler (cc), and there is none")
    declared = re.search(r'"""\n(    #include <stddef.h>.*?)"""', SOURCE.read_text(), re.DOTALL)
    assert declared is not None
    checks = [
        f"_Static_assert(offsetof({ours}, {field}) == offsetof({theirs}, {other}), "
        f'"{ours}.{field}");'
        for ours, (theirs, fields) in TYPES.items()
        for field, other in fields.items()
    ]
    # Smaller structs than the header's are fine where XLA reads them by their size; these it reads whole.
    checks += [
        f'_Static_assert(sizeof({ours}) == sizeof({TYPES[ours][0]}), "{ours}");'
        for ours in (
            "ffi_extension",
            "ffi_version",
            "ffi_list",
            "ffi_attributes",
            "ffi_scalar",
            "ffi_stream_args",
        )
    ]
    checks += [
        '_Static_assert(FFI_EXTENSION_METADATA == XLA_FFI_Extension_Metadata, "extension");',
        '_Static_assert(FFI_STAGE_EXECUTE == XLA_FFI_ExecutionStage_EXECUTE, "stage");',
        '_Static_assert(FFI_INTERNAL == XLA_FFI_Error_Code_INTERNAL, "code");',
        '_Static_assert(XLA_FFI_API_MAJOR == 0, "version");',
    ]
    # From version 0.5 of the header on, jaxlib 0.12, it has this name.
    renamed = "XLA_FFI_InternalExtension" in HEADER.read_text()
    prelude = "#define XLA_FFI_Extension_Base XLA_FFI_InternalExtension\n" if renamed else ""
    source = tmp_path / "check.c"
    source.write_text(
        f'#include <stddef.h>\n#include "{HEADER}"\n{prelude}{declared[1]}\n' + "\n".join(checks)
    )
    done = subprocess.run(
        [compiler, "-fsyntax-only", source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
