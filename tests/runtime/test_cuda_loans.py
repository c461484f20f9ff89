"""Which streams wait for which arrays, and how often, with a driver that only notes what it is asked."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stretto.collectives.cuda import RECORD, WAIT
from stretto.collectives.types import TensorType
from stretto.runtime.engines import cuda_loans
from stretto.runtime.engines.xla_cpu import XlaCpuEngine

F32 = TensorType("f32", (4,))
XLA, NCCL, OTHER = 1, 2, 3  # streams


class Driver:
    """Events are numbers from 100 on; what is enqueued is kept."""

    def __init__(self) -> None:
        self.events = 100
        self.enqueued: list[tuple[int, ...]] = []

    def use(self, device: int) -> None:
        assert device == 0

    def event(self) -> int:
        self.events += 1
        return self.events

    def enqueue(self, device: int, calls: list[tuple[int, ...]]) -> None:
        assert device == 0
        self.enqueued += calls

    def passed(self, event: int) -> bool:
        return True


class Lending:
    """Loans of an engine, and by which streams XLA was asked to have its arrays waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.driver = XlaCpuEngine(1), Driver()
        self.exported: list[int] = []
        self.loans = cuda_loans.Loans(self.driver, [0], [XLA], self.engine.compile)  # type: ignore[arg-type]
        note = SimpleNamespace(buffer_to_dlpack_managed_tensor=self._export)
        monkeypatch.setattr(cuda_loans, "_jax", note)

    def _export(self, array: Any, stream: int) -> None:
        self.exported.append(stream)

    def lend(self, array: Any, stream: int) -> tuple[list[int], list[tuple[int, ...]]]:
        """Streams that XLA makes wait, and what comes into the queue."""
        self.exported = []
        queue: list[tuple[int, ...]] = []
        assert self.loans.lend(array, stream, queue) == array.unsafe_buffer_pointer()
        return self.exported, queue

    def array(self) -> Any:
        return self.engine.put(np.ones(4, np.float32), F32, 0)


@pytest.fixture
def lending(monkeypatch: pytest.MonkeyPatch) -> Lending:
    return Lending(monkeypatch)


def test_a_stream_waits_once_for_rooms_that_were_made_at_once(lending: Lending) -> None:
    rooms = lending.loans.rooms([F32], [0])
    taken = [rooms.take(0)[0] for _ in range(9)]
    assert len({room.unsafe_buffer_pointer() for room in taken}) == 9
    lent = [lending.lend(room, NCCL)[0] for room in taken]
    assert lent == [[NCCL], *[[]] * 7, [NCCL]]  # eight are made at once
    assert lending.lend(taken[3], OTHER)[0] == [OTHER]
    assert lending.lend(taken[4], OTHER)[0] == []


def test_a_stream_does_not_wait_for_what_it_wrote_and_others_wait_for_its_mark(
    lending: Lending,
) -> None:
    (room,) = lending.loans.rooms([F32], [0]).take(0)
    lending.lend(room, NCCL)
    mark = lending.loans.mark(0, NCCL)
    lending.loans.defer(0, mark, [room], [room.unsafe_buffer_pointer()])
    assert lending.driver.enqueued == [(RECORD, mark.event, NCCL), (WAIT, XLA, mark.event)]
    assert lending.lend(room, NCCL) == ([], [])
    assert lending.lend(room, OTHER) == ([OTHER], [(WAIT, OTHER, mark.event)])
    assert lending.lend(room, OTHER) == ([], [])


def test_rooms_of_one_run_that_are_written_by_two_streams_are_told_apart(lending: Lending) -> None:
    rooms = lending.loans.rooms([F32], [0])
    (first,), (second,) = rooms.take(0), rooms.take(0)
    for room, stream in ((first, NCCL), (second, OTHER)):
        lending.lend(room, stream)
        mark = lending.loans.mark(0, stream)
        lending.loans.defer(0, mark, [room], [room.unsafe_buffer_pointer()])
    assert lending.lend(first, NCCL) == ([], [])
    exported, queue = lending.lend(second, NCCL)
    assert exported == [NCCL] and queue == [(WAIT, NCCL, mark.event)]


def test_arrays_of_runs_are_waited_for_each_time_they_are_new(lending: Lending) -> None:
    """Also one that is where another was, in Python's memory."""
    known = lending.array()
    lending.loans.awaited([known], {NCCL})
    assert lending.lend(known, NCCL) == ([], [])
    place, others = id(known), []
    del known
    gc.collect()
    for _ in range(10000):
        others.append(lending.array())
        if id(others[-1]) == place:
            break
    assert lending.lend(others[-1], NCCL)[0] == [NCCL]
    assert lending.lend(others[-1], NCCL)[0] == [NCCL]  # no run's array is remembered
