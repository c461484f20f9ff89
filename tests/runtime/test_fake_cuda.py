"""The fake CUDA driver of ``support.cuda`` keeps the orders that CUDA's API promises, and no others."""

from __future__ import annotations

import ctypes
import shutil
import threading
from collections.abc import Iterator
from ctypes import byref, c_size_t, c_void_p

import pytest
from support import cuda

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
NO_CONTEXT, INVALID_HANDLE, NOT_READY = 201, 400, 600
Called = ctypes.CFUNCTYPE(None, c_void_p)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return ctypes.CDLL(str(cuda.build(tmp_path_factory.mktemp("cuda")) / "libcuda.so.1"))


def use(driver: ctypes.CDLL, device: int) -> None:
    """Make a device's context the thread's."""
    context = c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(byref(context), device) == 0
    assert driver.cuCtxSetCurrent(context) == 0


class Stream:
    """A stream that does nothing until it is `release`d, and an event."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self.driver, self.handle, self.event = driver, c_void_p(), c_void_p()
        use(driver, 0)
        assert driver.cuStreamCreate(byref(self.handle), 1) == 0
        assert driver.cuEventCreate(byref(self.event), 2) == 0
        self._gate = threading.Event()
        self.release = self._gate.set

        def wait(_: int) -> None:
            self._gate.wait(60)

        self._wait = Called(wait)  # kept: the stream calls it
        assert driver.cuLaunchHostFunc(self.handle, self._wait, None) == 0

    def copy(self, to: int, source: int, size: int) -> None:
        assert (
            self.driver.cuMemcpyAsync(c_void_p(to), c_void_p(source), c_size_t(size), self.handle)
            == 0
        )

    def record(self) -> None:
        assert self.driver.cuEventRecord(self.event, self.handle) == 0

    def wait_for(self, other: Stream) -> None:
        assert self.driver.cuStreamWaitEvent(self.handle, other.event, 0) == 0

    def synchronize(self) -> None:
        assert self.driver.cuStreamSynchronize(self.handle) == 0


@pytest.fixture
def streams(driver: ctypes.CDLL) -> Iterator[tuple[Stream, Stream]]:
    pair = Stream(driver), Stream(driver)
    yield pair
    for stream in pair:
        stream.release()
        stream.synchronize()
        driver.cuEventDestroy_v2(stream.event)
        driver.cuStreamDestroy_v2(stream.handle)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_stream_waits_for_events_alone(
    driver: ctypes.CDLL, streams: tuple[Stream, Stream], ordered: bool
) -> None:
    first, second = streams
    source, middle, end = (ctypes.create_string_buffer(text, 4) for text in (b"new", b"old", b""))
    first.copy(ctypes.addressof(middle), ctypes.addressof(source), 4)
    first.record()
    if ordered:
        second.wait_for(first)
    second.copy(ctypes.addressof(end), ctypes.addressof(middle), 4)
    second.release()
    if not ordered:
        second.synchronize()
    assert driver.cuEventQuery(first.event) == NOT_READY
    first.release()
    first.synchronize()
    second.synchronize()
    assert driver.cuEventQuery(first.event) == 0
    assert end.value == (b"new" if ordered else b"old")


def test_an_event_lives_until_its_last_use(
    streams: tuple[Stream, Stream], driver: ctypes.CDLL
) -> None:
    first, second = streams
    first.record()
    second.wait_for(first)
    assert driver.cuEventDestroy_v2(first.event) == 0
    assert driver.cuEventCreate(byref(first.event), 2) == 0
    second.release()
    assert driver.cuStreamQuery(second.handle) == NOT_READY
    first.release()
    second.synchronize()
    assert driver.cuStreamQuery(second.handle) == 0


def test_memory_is_freed_in_the_order_of_its_stream(
    driver: ctypes.CDLL, streams: tuple[Stream, Stream]
) -> None:
    stream, _ = streams
    block, kind = c_void_p(), ctypes.c_int()
    assert driver.cuMemAllocAsync(byref(block), c_size_t(64), stream.handle) == 0
    ctypes.memmove(block, b"content", 8)
    kept = ctypes.create_string_buffer(8)
    stream.copy(ctypes.addressof(kept), block.value or 0, 8)
    assert driver.cuMemFreeAsync(block, stream.handle) == 0
    inside = c_void_p((block.value or 0) + 63)
    assert driver.cuPointerGetAttribute(byref(kind), 2, inside) == 0
    assert kind.value == 2  # CU_MEMORYTYPE_DEVICE
    stream.release()
    stream.synchronize()
    assert kept.value == b"content"
    assert driver.cuPointerGetAttribute(byref(kind), 2, inside) != 0


def test_waits_of_the_host_are_counted(driver: ctypes.CDLL, streams: tuple[Stream, Stream]) -> None:
    stream, _ = streams
    stream.release()
    before = driver.fake_cuda_host_waits()
    stream.record()
    driver.cuStreamQuery(stream.handle)
    assert driver.fake_cuda_host_waits() == before
    driver.cuEventSynchronize(stream.event)
    stream.synchronize()
    assert driver.fake_cuda_host_waits() == before + 2


def test_events_belong_to_a_context(driver: ctypes.CDLL) -> None:
    """As CUDA says of ``cuEventRecord``: event and stream have the same one. Any stream may wait for it."""
    event, streams = c_void_p(), [c_void_p(), c_void_p()]
    assert driver.cuCtxSetCurrent(None) == 0
    assert driver.cuEventCreate(byref(event), 2) == NO_CONTEXT
    assert driver.cuStreamCreate(byref(streams[0]), 1) == NO_CONTEXT
    for device in (0, 1):
        use(driver, device)
        assert driver.cuStreamCreate(byref(streams[device]), 1) == 0
    assert driver.cuEventCreate(byref(event), 2) == 0
    assert driver.cuEventRecord(event, streams[0]) == INVALID_HANDLE
    assert driver.cuEventRecord(event, streams[1]) == 0
    assert driver.cuStreamWaitEvent(streams[0], event, 0) == 0
    for stream in streams:
        assert driver.cuStreamSynchronize(stream) == 0
        assert driver.cuStreamDestroy_v2(stream) == 0
    assert driver.cuEventDestroy_v2(event) == 0
