"""Who waits for arrays that are lent, with a driver that only notes what it is asked."""

from __future__ import annotations

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


def test_streams_wait_for_what_is_lent_and_xla_for_what_was_written(lending: Lending) -> None:
    """Arrays that are deferred are there behind a mark, for which streams wait by themselves."""
    (room,) = lending.loans.rooms([F32], [0]).take(0)
    assert lending.lend(room, NCCL) == ([NCCL], [])
    mark = lending.loans.mark(0, NCCL)
    lending.loans.defer(0, mark, [room], [room.unsafe_buffer_pointer()])
    assert lending.driver.enqueued == [(RECORD, mark.event, NCCL), (WAIT, XLA, mark.event)]
    assert lending.lend(room, OTHER) == ([OTHER], [(WAIT, OTHER, mark.event)])
    assert lending.lend(lending.array(), OTHER) == ([OTHER], [])


def test_small_rooms_are_apart(lending: Lending) -> None:
    rooms = lending.loans.rooms([F32], [0])
    taken = [rooms.take(0)[0] for _ in range(9)]
    assert len({room.unsafe_buffer_pointer() for room in taken}) == 9
