"""The CUDA driver by its C functions: streams, events and copies; integers in and out.

``libcuda.so.1`` comes with the GPU's driver. It is called through `ctypes`, which lets go of the GIL, and
where a walk calls it through `_driver`, which takes less time. Pointers, streams and events are addresses.
What is used of it has had the same binary interface since CUDA 11.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p, cast
from functools import cache
from typing import Any

from ._driver import COPY, RECORD, WAIT, Calls

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the default stream
_PORTABLE, _MAPPED = 1, 2  # CU_MEMHOSTALLOC_…
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE


# A call for `Cuda.enqueue`: one of ``RECORD``, ``WAIT``, ``COPY``, ``WRITE_NUMBER``, and the arguments that
# `_driver` names.
Queued = tuple[int, ...]


class CudaError(RuntimeError):
    """A function of CUDA or NCCL failed; the message names it. Not worth catching: the job ends."""


class _Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D``."""

    _fields_ = (
        ("source_x", c_size_t),
        ("source_y", c_size_t),
        ("source_kind", c_int),
        ("source_host", c_void_p),
        ("source", c_void_p),
        ("source_array", c_void_p),
        ("source_pitch", c_size_t),
        ("target_x", c_size_t),
        ("target_y", c_size_t),
        ("target_kind", c_int),
        ("target_host", c_void_p),
        ("target", c_void_p),
        ("target_array", c_void_p),
        ("target_pitch", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class Cuda:
    """The CUDA driver: streams, events, copies. A thread names its device (`use`) before it calls others."""

    def __init__(self) -> None:
        """Raises ``OSError`` without a driver, `CudaError` if it cannot be used."""
        self._library = ctypes.CDLL("libcuda.so.1")
        found = self.addresses(Calls.NAMES)
        self._calls = Calls(*found)
        # The address of ``cuCtxSetCurrent``.
        self.set_current = found[0]
        self._query = self._calls.query
        self._contexts: dict[int, int] = {}
        self._call("cuInit", c_uint(0))

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, error: int) -> None:
        if error:
            text = c_char_p()
            self._library.cuGetErrorString(error, byref(text))
            raise CudaError(f"{name} failed: {(text.value or b'?').decode()} ({error})")

    def addresses(self, names: Sequence[str]) -> list[int]:
        """Of functions of the driver."""
        return [cast(getattr(self._library, name), c_void_p).value or 0 for name in names]

    def version(self) -> int:
        """Of CUDA that the driver supports: 13000 is 13.0."""
        version = c_int()
        self._call("cuDriverGetVersion", byref(version))
        return version.value

    def device_count(self) -> int:
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return count.value

    def device_name(self, device: int) -> str:
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, c_int(256), c_int(device))
        return name.value.decode()

    def device_uuid(self, device: int) -> bytes:
        """What tells GPUs of a host apart, in all processes alike."""
        uuid = (c_char * 16)()
        self._call("cuDeviceGetUuid", byref(uuid), c_int(device))
        return uuid.raw

    def use(self, device: int) -> None:
        """Have this thread's calls be about a device."""
        self._check("cuCtxSetCurrent", self._calls.set_current(self.context(device)))

    def context(self, device: int) -> int:
        """The context of a device that all of its users share."""
        context = self._contexts.get(device)
        if context is None:
            made = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(made), c_int(device))
            context = self._contexts[device] = made.value or 0
        return context

    def enqueue(self, device: int, calls: list[Queued]) -> None:
        """Put calls onto streams of a device, in their order, and `use` it. Where one fails, those behind it
        are left out."""
        self._run(self.context(device), calls)

    def _run(self, context: int, calls: list[Queued]) -> None:
        failed = self._calls.run(context, calls)
        if failed is not None:
            kind, error = failed
            self._check(Calls.KINDS[kind] if kind >= 0 else "cuCtxSetCurrent", error)

    def stream(self) -> int:
        made = c_void_p()
        self._call("cuStreamCreate", byref(made), c_uint(_NON_BLOCKING))
        return made.value or 0

    def event(self, timed: bool = False) -> int:
        made = c_void_p()
        self._call("cuEventCreate", byref(made), c_uint(0 if timed else _DISABLE_TIMING))
        return made.value or 0

    def destroy_event(self, event: int) -> None:
        """Give up an event, even one that a stream has yet to come to."""
        self._call("cuEventDestroy_v2", c_void_p(event))

    def elapsed(self, begin: int, end: int) -> float:
        """Seconds between two timed events of one device that have passed."""
        milliseconds = ctypes.c_float()
        call = "cuEventElapsedTime"
        self._call(call, byref(milliseconds), c_void_p(begin), c_void_p(end))
        return milliseconds.value * 1e-3

    def record(self, event: int, stream: int) -> None:
        """The event will have passed when all is done that is on the stream now."""
        self._run(0, [(RECORD, event, stream)])

    def wait(self, stream: int, event: int) -> None:
        """What comes onto the stream from now on waits for the event. The host does not."""
        self._run(0, [(WAIT, stream, event)])

    def passed(self, event: int) -> bool:
        error = self._query(event)
        if error != _NOT_READY:
            self._check("cuEventQuery", error)
        return error == 0

    def synchronize(self, stream: int) -> None:
        """Wait, on the host, for all that is on the stream."""
        self._call("cuStreamSynchronize", c_void_p(stream))

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._run(0, [(COPY, target, source, nbytes, stream)])

    def copy_rows(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        height: int,
        stream: int,
    ) -> None:
        """Copy ``height`` rows of ``width`` bytes; the pitches are from row to row."""
        copy = _Copy2D(
            source_kind=_DEVICE_MEMORY,
            source=source,
            source_pitch=source_pitch,
            target_kind=_DEVICE_MEMORY,
            target=target,
            target_pitch=target_pitch,
            width=width,
            height=height,
        )
        self._call("cuMemcpy2DAsync_v2", byref(copy), c_void_p(stream))

    def allocate_pinned(self, nbytes: int) -> int:
        """Page-locked memory of the host, which all devices may copy from and to."""
        made = c_void_p()
        self._call("cuMemHostAlloc", byref(made), c_size_t(nbytes), c_uint(_PORTABLE | _MAPPED))
        return made.value or 0

    def mapped(self, address: int) -> int:
        """Where this thread's device sees page-locked memory."""
        mapped = c_void_p()
        self._call("cuMemHostGetDevicePointer_v2", byref(mapped), c_void_p(address), c_uint(0))
        return mapped.value or 0

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        """Fill with zeros."""
        self._call(
            "cuMemsetD8Async",
            c_ulonglong(target),
            ctypes.c_ubyte(0),
            c_size_t(nbytes),
            c_void_p(stream),
        )


@cache
def cuda() -> Cuda:
    """The process's driver. Raises as `Cuda` does."""
    return Cuda()
