"""The stream of CUDA's on which XLA's client runs what it computes on a device.

jaxlib does not tell it. XLA tells it to custom calls: so a program of one custom call, whose function is
written here with `ctypes`, is run once on each device. The declarations are those of XLA's FFI
(``xla/ffi/api/c_api.h``, version 0.1 or later), which `collectives/_native.pyx` uses too; a test compares
them with the header that comes with jaxlib.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

TARGET = "stretto_compute_stream"
MODULE = f"""module @stream {{
  func.func public @main() -> tensor<i32> {{
    %0 = stablehlo.custom_call @{TARGET}() {{api_version = 4 : i32, has_side_effect = true}}
        : () -> tensor<i32>
    return %0 : tensor<i32>
  }}
}}"""
_METADATA = 1  # XLA_FFI_Extension_Metadata
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
_found: list[int] = []


class Extension(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("type", c_int32), ("next", c_void_p))


class Version(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("next", c_void_p), ("major", c_int32), ("minor", c_int32))


class Metadata(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("version", Version),
        ("traits", c_uint32),
        ("state", c_int64),
    )


class MetadataExtension(ctypes.Structure):
    _fields_ = (("base", Extension), ("metadata", POINTER(Metadata)))


class StreamArguments(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("next", c_void_p),
        ("context", c_void_p),
        ("stream", c_void_p),
    )


class Api(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("next", c_void_p),
        ("version", Version),
        ("internal", c_void_p),
        ("error_create", c_void_p),
        ("error_message", c_void_p),
        ("error_destroy", c_void_p),
        ("handler_register", c_void_p),
        ("stream_get", ctypes.CFUNCTYPE(c_void_p, POINTER(StreamArguments))),
    )


class Frame(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", POINTER(Extension)),
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int32),
    )


@ctypes.CFUNCTYPE(c_void_p, POINTER(Frame))
def _handle(frame: Any) -> int | None:
    """XLA asks for the version that this is written for, and later calls it in a run."""
    called = frame.contents
    if called.extension and called.extension.contents.type == _METADATA:
        asked = ctypes.cast(called.extension, POINTER(MetadataExtension)).contents
        asked.metadata.contents.version.major = 0
        asked.metadata.contents.version.minor = 1
        return None
    if called.stage != _EXECUTE:
        return None
    arguments = StreamArguments(ctypes.sizeof(StreamArguments), None, called.context, None)
    error = called.api.contents.stream_get(ctypes.byref(arguments))
    _found.append(arguments.stream or 0)
    return error


def handler() -> Any:
    """The function's address in a capsule, as ``register_custom_call_target`` takes it."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [c_void_p, ctypes.c_char_p, c_void_p]
    return new(ctypes.cast(_handle, c_void_p), None, None)


def find(run: Callable[[], object]) -> int:
    """The stream on which ``run()`` runs `MODULE`."""
    _found.clear()
    run()
    (stream,) = _found
    return stream
