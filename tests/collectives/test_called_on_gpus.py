"""Collectives that code on a GPU calls itself: what the handler puts onto which stream, and how runs fail.

XLA, CUDA and NCCL are Python here: a frame of XLA's FFI is made by hand, as its C header has it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_ubyte,
    c_void_p,
    cast,
    pointer,
)
from typing import Any

import pytest
from support.nccl_in_python import Library

from stretto.collectives._launches import (
    ALL_REDUCE,
    CLEARS,
    COPIES,
    RECEIVE,
    SEND,
    Called,
    place,
)
from stretto.collectives.called_on_gpus import handler, stream_found, stream_handler
from stretto.collectives.gpus import Offer, serve_all
from stretto.collectives.native import refusal
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType

STREAM, CONTEXT, EVENT = 0xA0, 0xD0, 0xE0
NOT_READY = 600


class ErrorArgs(Structure):
    _fields_ = (("size", c_size_t), ("next", c_void_p), ("message", c_char_p), ("code", c_int32))


class StreamArgs(Structure):
    _fields_ = (("size", c_size_t), ("next", c_void_p), ("context", c_void_p), ("stream", c_void_p))


class Api(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("next", c_void_p),
        ("version", c_size_t * 3),
        ("internal", c_void_p),
        ("error_create", CFUNCTYPE(c_void_p, POINTER(ErrorArgs))),
        ("error_message", c_void_p),
        ("error_destroy", c_void_p),
        ("handler_register", c_void_p),
        ("stream_get", CFUNCTYPE(c_void_p, POINTER(StreamArgs))),
    )


class Buffer(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("next", c_void_p),
        ("dtype", c_int32),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", c_void_p),
    )


class Listed(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("next", c_void_p),
        ("count", c_int64),
        ("types", c_void_p),
        ("items", POINTER(c_void_p)),
    )


class Scalar(Structure):
    _fields_ = (("dtype", c_int32), ("value", c_void_p))


class Attributes(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("next", c_void_p),
        ("count", c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("items", POINTER(c_void_p)),
    )


class Frame(Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("api", POINTER(Api)),
        ("context", c_void_p),
        ("stage", c_int32),
        ("arguments", Listed),
        ("results", Listed),
        ("attributes", Attributes),
        ("future", c_void_p),
    )


class Rows(Structure):
    """``CUDA_MEMCPY2D``."""

    _fields_ = (
        ("source", c_size_t * 7),
        ("target", c_size_t * 7),
        ("width", c_size_t),
        ("height", c_size_t),
    )


def function_of(capsule: object) -> Any:
    """The handler whose address is in a capsule."""
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = c_void_p, [ctypes.py_object, c_char_p]
    return CFUNCTYPE(c_void_p, POINTER(Frame))(address(capsule, None))


class Gpu:
    """Stands for XLA, CUDA and NCCL; ``called`` has what they were asked for, in order."""

    def __init__(self, stream: int = 0) -> None:
        self.library = Library()
        self.called = self.library.called
        self.errors: list[str] = []
        self.pending = False
        kept = [
            CFUNCTYPE(c_int, c_void_p, c_ubyte, c_size_t, c_void_p)(self._kept("clear")),
            CFUNCTYPE(c_int, c_void_p, c_void_p, c_size_t, c_void_p)(self._kept("copy")),
            CFUNCTYPE(c_int, POINTER(Rows), c_void_p)(self._rows),
            CFUNCTYPE(c_int, c_void_p, c_void_p)(self._kept("record")),
            CFUNCTYPE(c_int, c_void_p)(lambda event: NOT_READY if self.pending else 0),
            CFUNCTYPE(c_int, c_void_p)(self._kept("synchronize")),
        ]
        self._functions = kept
        addresses = [cast(f, c_void_p).value for f in kept]
        self.table = Called(self.library.launches, addresses, CONTEXT, EVENT, stream)
        self._api = Api()
        self._api.error_create = type(self._api.error_create)(self._error)
        self._api.stream_get = type(self._api.stream_get)(self._stream)
        self._handle = function_of(handler())

    def _kept(self, name: str) -> Callable[..., int]:
        def called(*arguments: int) -> int:
            self.called.append((name, *arguments))
            return self.library.answers.get(name, 0)

        return called

    def _rows(self, rows: Any, stream: int) -> int:
        given = rows.contents
        source, target = (list(each) for each in (given.source, given.target))
        # Position, kind, the host's address, address, array, pitch.
        assert source[:2] == target[:2] == [0, 0] and source[2] & 0xFFFF == target[2] & 0xFFFF == 2
        pitches = target[6], source[6]
        self.called.append(
            ("rows", target[4], source[4], *pitches, given.width, given.height, stream)
        )
        return 0

    def _error(self, arguments: Any) -> int:
        self.errors.append(arguments.contents.message.decode())
        return 0xBAD

    def _stream(self, arguments: Any) -> int:
        assert arguments.contents.context == 0xC7
        arguments.contents.stream = STREAM
        return 0

    def call(
        self, site: int, operands: list[int], results: list[int], handle: Any = None
    ) -> int | None:
        """A custom call of a device's code, of the handler or another one; gives the error that XLA is
        told."""
        keep: list[Any] = []

        def listed(addresses: list[int]) -> Listed:
            buffers = [Buffer(ctypes.sizeof(Buffer), data=a) for a in addresses]
            items = (c_void_p * len(buffers))(*(ctypes.addressof(b) for b in buffers))
            keep.extend([buffers, items])
            return Listed(count=len(buffers), items=cast(items, POINTER(c_void_p)))

        number = c_int64(site)
        scalar = Scalar(0, ctypes.addressof(number))
        items = (c_void_p * 1)(ctypes.addressof(scalar))
        frame = Frame(
            api=pointer(self._api),
            context=0xC7,
            stage=3,
            arguments=listed([0x1, 0x2, *operands]),  # the context and the chain first
            results=listed([0x3, *results]),
            attributes=Attributes(count=1, items=cast(items, POINTER(c_void_p))),
        )
        return (handle or self._handle)(pointer(frame))


SUM = [(ALL_REDUCE, place(False, 0), place(True, 0), 4, 7, 0, 0xC0)]


def test_a_collective_comes_onto_the_stream_of_the_code_that_calls_it() -> None:
    gpu = Gpu()
    gpu.table.add([], SUM, [], "all-reduce %sum")
    gpu.table.begin()
    assert gpu.call(0, [0x1000], [0x2000]) is None
    assert gpu.call(0, [0x3000], [0x4000]) is None
    assert not gpu.table.wait(0.0)
    assert gpu.call(-1, [], []) is None
    assert gpu.table.wait(0.0)
    one = [
        ("use", CONTEXT),
        ("use", CONTEXT),
        ("ncclAllReduce", 0x1000, 0x2000, 4, 7, 0, 0xC0, STREAM),
    ]
    two = [
        ("use", CONTEXT),
        ("use", CONTEXT),
        ("ncclAllReduce", 0x3000, 0x4000, 4, 7, 0, 0xC0, STREAM),
    ]
    recorded = ("record", EVENT, STREAM)
    assert gpu.called == [*one, recorded, *two, recorded]
    assert (gpu.table.calls(), gpu.table.executed) == ([2], 2)
    assert gpu.library.asked == [0xC0, 0xC0]  # whether NCCL has put it there


def test_places_are_operands_results_and_addresses_with_offsets() -> None:
    """Several operands; copies before and behind NCCL's calls, which are a group."""
    gpu = Gpu()
    before = [
        (COPIES, 0x9000, 16, place(False, 1) + 8, 32, 16, 4),
        (CLEARS, place(True, 0), 24),
    ]
    calls = [
        (SEND, 0x9000, 0, 64, 1, 3, 0xC0),
        (RECEIVE, 0, place(True, 1) + 128, 64, 1, 2, 0xC0),
    ]
    behind = [(COPIES, place(True, 2), 8, 0x9040, 8, 8, 1)]
    gpu.table.add(before, calls, behind, "all-to-all %x")
    gpu.table.begin()
    assert gpu.call(0, [0x1000, 0x2000], [0x3000, 0x4000, 0x5000]) is None
    assert [c for c in gpu.called if c[0] not in ("use", "record")] == [
        ("rows", 0x9000, 0x2008, 16, 32, 16, 4, STREAM),
        ("clear", 0x3000, 0, 24, STREAM),
        ("start",),
        ("ncclSend", 0x9000, 64, 1, 3, 0xC0, STREAM),
        ("ncclRecv", 0x4080, 64, 1, 2, 0xC0, STREAM),
        ("end",),
        ("copy", 0x5000, 0x9040, 8, STREAM),
    ]


def test_code_on_the_host_waits_for_each() -> None:
    gpu = Gpu(stream=0xB0)
    gpu.table.add([], SUM, [], "all-reduce %sum")
    gpu.table.begin()
    gpu.call(0, [0x1000], [0x2000])
    assert gpu.called[-2:] == [("record", EVENT, 0xB0), ("synchronize", 0xB0)]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("ncclAllReduce", "all-reduce %sum: NCCL's error 6"),
        ("clear", "all-reduce %sum: CUDA's error 6 in a copy"),
    ],
)
def test_what_fails_is_named_and_nothing_is_called_after_it(what: str, told: str) -> None:
    gpu = Gpu()
    gpu.library.answers[what] = 6
    gpu.table.add([(CLEARS, place(True, 0), 16)], SUM, [], "all-reduce %sum")
    gpu.table.begin()
    assert gpu.call(0, [0x1000], [0x2000]) == 0xBAD
    assert gpu.table.wait(0.0) and gpu.table.failure == told
    count = len(gpu.called)
    assert gpu.call(0, [0x1000], [0x2000]) == 0xBAD
    assert gpu.errors == [told, told] and len(gpu.called) == count
    gpu.library.answers.clear()
    gpu.table.begin()
    assert gpu.table.failure == "" and gpu.call(0, [0x1000], [0x2000]) is None


def test_an_aborted_run_calls_nothing_any_more() -> None:
    gpu = Gpu()
    gpu.table.add([], SUM, [], "all-reduce %sum")
    gpu.table.begin()
    gpu.table.abort("rank 1 left")
    assert gpu.call(0, [0x1000], [0x2000]) == 0xBAD
    assert gpu.errors == ["rank 1 left"] and gpu.called == []


def test_communicators_that_are_given_up_are_not_called() -> None:
    gpu = Gpu()
    gpu.table.add([], SUM, [], "all-reduce %sum")
    gpu.table.begin()
    gpu.library.launches.stop()
    assert gpu.call(0, [0x1000], [0x2000]) == 0xBAD
    assert gpu.called == [] and gpu.errors == ["the job has failed"]


def test_code_that_runs_without_its_program_is_told_so() -> None:
    gpu = Gpu()
    gpu.table.add([], SUM, [], "all-reduce %sum")
    gpu.table.begin()
    gpu.table.end()
    assert gpu.call(0, [0x1000], [0x2000]) == 0xBAD
    assert gpu.errors == ["code that calls collectives runs without its program"]


def test_who_looks_sees_what_is_under_way_on_the_gpu() -> None:
    gpu = Gpu()
    for name in ("a", "b"):
        gpu.table.add([], SUM, [], f"all-reduce %{name}")
    gpu.table.begin(True)
    assert gpu.table.waiting() is None
    gpu.call(1, [0x1000], [0x2000])
    gpu.pending = True
    site, began = gpu.table.waiting()
    ((row, _, row_began, row_ended),), dropped = gpu.table.rows()
    assert site == row == 1 and began == row_began <= row_ended and dropped == 0
    gpu.pending = False
    assert gpu.table.waiting() is None


def test_the_stream_of_code_is_told_once() -> None:
    gpu, handle = Gpu(), function_of(stream_handler())
    stream_found()
    assert gpu.call(0, [], [], handle) is None
    assert (stream_found(), stream_found()) == (STREAM, 0)
    assert gpu.called == []


def _offer(host: str, *gpus: bytes, **more: Any) -> Offer:
    return Offer("", host, gpus, **more)


def test_nccl_serves_ranks_that_have_a_gpu_each() -> None:
    two, own = [_offer("h", b"0", b"1")] * 2, [_offer("h", b"0"), _offer("h", b"1")]
    assert serve_all(two)  # they take turns
    assert serve_all(own)  # each is shown its own
    assert serve_all([_offer("h", b"0"), _offer("i", b"0")])
    shared = [_offer("h", b"0")] * 2
    assert not serve_all(shared)
    assert serve_all([_offer("h", b"0", shares=True)] * 2)
    assert not serve_all([_offer("h", b"0", shares=True), *shared[:1]])
    assert not serve_all([*own, Offer("no driver", "h")])
    assert not serve_all([_offer("h", b"0", b"1", devices=2)])


def test_what_nccl_has_no_way_for_is_refused() -> None:
    def reduces(dtype: str, reduction: Reduction) -> Collective:
        x = TensorType(dtype, (4,))
        return Collective(Kind.ALL_REDUCE, (x,), (x,), groups=((0, 1),), reduction=reduction)

    assert refusal(reduces("f32", Reduction.SUM), on_gpus=True) == ""
    assert refusal(reduces("bf16", Reduction.SUM), on_gpus=True) == ""  # is called as f32
    assert refusal(reduces("s32", Reduction.MAX), on_gpus=True) == ""
    for dtype, reduction in (
        ("f32", Reduction.MAX),
        ("c64", Reduction.SUM),
        ("s32", Reduction.AND),
    ):
        assert "NCCL" in refusal(reduces(dtype, reduction), on_gpus=True)
        assert refusal(reduces(dtype, reduction)) == ""
