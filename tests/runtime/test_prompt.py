"""Programs whose collectives are small: begun in the caller's thread, which waits for no other process."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support.handmade import (
    F32,
    Rig,
    all_reduce,
    block,
    compute,
    firsts,
    program,
    segment,
)

from stretto.collectives.communicator import Communicator
from stretto.collectives.hierarchy import create_communicator
from stretto.runtime.errors import StrettoError
from stretto.runtime.execution.executor import Executor
from stretto.runtime.options import Options
from stretto.runtime.program import Free, Program, Run, Start, Wait
from stretto.testing import MemoryTransport, MemoryWorld, NullEngine, Recorder

CALLER = threading.get_ident()


class Pending:
    """What the other processes hold up.

    ``test`` is true once ``there`` is set, which ``wait`` does itself where it ``comes``.
    """

    def __init__(
        self, there: threading.Event, results: Any, log: list[str], comes: bool = False
    ) -> None:
        self.there, self.results, self.log, self.comes = there, results, log, comes

    def test(self) -> bool:
        return self.there.is_set()

    def wait(self) -> None:
        assert threading.get_ident() != CALLER, "the caller's thread has waited"
        self.log.append("waited")
        if self.comes:
            self.there.set()
        assert self.there.wait(30)


class Posting:
    """A communicator of one process whose collectives are done when ``there`` is set."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.log: list[str] = []
        self.fails = self.comes = False
        self._local = create_communicator(None, 0)
        self.process, self.num_processes = 0, 1

    def bind(self, collective: Any, owner: Any, reducer: Any = None) -> Any:
        bound: Any = self._local.bind(collective, owner, reducer)
        outer = self

        class Bound:
            prompt = True
            messages, bytes = bound.messages, bound.bytes

            def run(self, operands: Any, **options: Any) -> Any:
                outer.log.append("ran")
                return bound.run(operands, **options)

            def post(self, operands: Any, **options: Any) -> Pending:
                if outer.fails:
                    raise ValueError("no route")
                here = "caller" if threading.get_ident() == CALLER else "dispatch"
                outer.log.append(f"posted by {here}")
                results = bound.run(operands, **options)
                return Pending(outer.there, results, outer.log, outer.comes)

        return Bound()

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def rig(posting: Posting, devices: int = 2, recorder: Recorder | None = None) -> Rig:
    made = Rig.__new__(Rig)
    made.engine = NullEngine(devices, compute=compute)
    made.world = MemoryWorld(MemoryTransport(1), 0, Options(local_devices=devices))
    communicator: Communicator = posting
    made.executor = Executor(
        made.engine, made.world, communicators=lambda stream: communicator, instrument=recorder
    )
    return made


def summing(donated: tuple[int, ...] = ()) -> Program:
    """2 devices: sum of (x + 1), then + 1."""
    body = block(
        (0,),
        [
            Run(0, (0,), (1,)),
            Start(0, (1,), (2,), 0),
            Free((1,)),
            Wait(0),
            Run(0, (2,), (3,)),
        ],
        (3, 2),
    )
    return program(
        [F32] * 4,
        body,
        devices=2,
        segments=[segment("increment")],
        collectives=[all_reduce((0, 1))],
        donated=donated,
    )


def test_what_is_there_already_is_done_when_the_call_returns() -> None:
    posting = Posting()
    posting.there.set()
    made = rig(posting)
    loaded = made.load(summing())
    rows, completion = loaded.execute_with_completion(made.arguments(loaded, [1, 2]))
    assert completion is None
    assert all(value.is_ready() for row in rows for value in row)
    assert [firsts([v.host_view() for v in row]) for row in rows] == [[6.0, 5.0]] * 2
    assert posting.log == ["posted by caller"]
    # What one run gives, which has landed, the next one takes.
    (again, _) = loaded.execute([[row[1]] for row in rows])
    assert firsts([v.host_view() for v in again]) == [13.0, 12.0]
    assert posting.log == ["posted by caller"] * 2
    assert made.executor.counters().collectives == 2


def test_what_is_not_there_is_left_to_the_dispatch_thread_and_later_runs_queue_behind() -> None:
    posting = Posting()
    made = rig(posting)
    loaded = made.load(summing())
    arguments = made.arguments(loaded, [1, 2])
    first, event = loaded.execute_with_completion(arguments)
    second, _ = loaded.execute_with_completion(arguments)
    assert event is not None and not event.done
    assert not any(v.is_ready() for row in (*first, *second) for v in row)
    assert "ran" not in posting.log  # the second has not overtaken
    posting.there.set()
    for rows in (first, second):
        assert [firsts([v.host_view() for v in row]) for row in rows] == [[6.0, 5.0]] * 2
    assert posting.log == ["posted by caller", "waited", "ran"]
    # Once all is over, the caller begins again.
    loaded.execute(arguments)
    assert posting.log[3:] == ["posted by caller"]


def test_a_caller_that_has_fallen_behind_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each of many calls in a row would wait for the dispatch thread, which runs the one before."""
    monkeypatch.setattr(MemoryWorld, "patience_of_callers", 30.0)
    posting = Posting()
    posting.comes = True
    made = rig(posting)
    loaded = made.load(summing())
    late = loaded.execute(made.arguments(loaded, [1, 2]))
    rows, completion = loaded.execute_with_completion([[row[1]] for row in late])
    assert completion is None
    assert posting.log == ["posted by caller", "waited", "posted by caller"]
    assert [firsts([v.host_view() for v in row]) for row in rows] == [[13.0, 12.0]] * 2


def test_an_operand_that_is_being_computed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    posting = Posting()
    posting.there.set()
    made = rig(posting)
    ready = False
    monkeypatch.setattr(made.engine, "is_ready", lambda array: ready)
    loaded = made.load(summing())
    rows, event = loaded.execute_with_completion(made.arguments(loaded, [1, 2]))
    assert event is not None
    ready = True
    assert [firsts([v.host_view() for v in row]) for row in rows] == [[6.0, 5.0]] * 2
    assert posting.log == ["ran"]


def test_donated_arguments_are_deleted_either_way() -> None:
    for there in (True, False):
        posting = Posting()
        made = rig(posting)
        loaded = made.load(summing(donated=(0,)))
        arguments = made.arguments(loaded, [1, 2])
        if there:
            posting.there.set()
        rows = loaded.execute(arguments)
        assert all(row[0].is_deleted for row in arguments)
        posting.there.set()
        assert firsts([row[0].host_view() for row in rows]) == [6.0, 6.0]


def test_an_error_arrives_at_the_outputs() -> None:
    posting = Posting()
    posting.fails = True
    made = rig(posting)
    loaded = made.load(summing())
    rows = loaded.execute(made.arguments(loaded, [1, 2]))
    with pytest.raises(StrettoError, match="all-reduce %sum: ValueError: no route"):
        rows[0][0].host_view()
    posting.fails = False
    posting.there.set()
    rows = loaded.execute(made.arguments(loaded, [1, 2]))
    assert firsts([row[0].host_view() for row in rows]) == [6.0, 6.0]


def test_an_observer_sees_the_same_events() -> None:
    seen = []
    for there in (True, False):
        posting, recorder = Posting(), Recorder()
        made = rig(posting, recorder=recorder)
        loaded = made.load(summing())
        if there:
            posting.there.set()
        rows = loaded.execute(made.arguments(loaded, [1, 2]))
        posting.there.set()
        rows[0][0].host_view()
        made.executor.dispatcher.stream.run(lambda: None)
        seen.append([event[0] if isinstance(event, tuple) else event for event in recorder.events])
    assert seen[0] == seen[1]
    assert seen[0]


def test_a_collective_within_the_process_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryWorld, "patience_of_callers", 30.0)
    made = Rig.__new__(Rig)
    made.engine = NullEngine(2, compute=compute)
    made.world = MemoryWorld(MemoryTransport(1), 0, Options(local_devices=2))
    made.executor = Executor(
        made.engine, made.world, communicators=lambda s: create_communicator(None, s)
    )
    loaded = made.load(summing())
    rows, completion = loaded.execute_with_completion(made.arguments(loaded, [1, 2]))
    assert completion is None and made.executor.dispatcher.stream.thread_id is None
    assert firsts([row[0].host_view() for row in rows]) == [6.0, 6.0]
    assert np.shares_memory(rows[0][1].host_view(), rows[1][1].host_view())
