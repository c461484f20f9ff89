"""Collectives that are posted before their turn on the stream."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.handmade import F32, Rig, all_reduce, block, compute, firsts, program, segment

from stretto.collectives.communicator import Communicator
from stretto.collectives.hierarchy import create_communicator
from stretto.runtime.errors import StrettoError
from stretto.runtime.execution import stream as stream_module
from stretto.runtime.execution.executor import Executor
from stretto.runtime.options import Options
from stretto.runtime.program import Program, Run, Start, Wait
from stretto.testing import MemoryTransport, MemoryWorld, NullEngine, Recorder


class Pending:
    """Under way until everything that was started has been handed over, and some naps."""

    def __init__(self, link: Link, number: int, results: Any) -> None:
        self.link, self.number, self.results = link, number, results

    def test(self) -> bool:
        return False

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        assert meanwhile is not None
        assert self.link.handed_over.wait(30)
        for _ in range(3):
            meanwhile()
        self.link.log.append(f"arrived {self.number}")


class Link:
    """A communicator of one process that posts. Collective k is the k-th that is posted."""

    def __init__(self) -> None:
        self.handed_over = threading.Event()
        self.log: list[str] = []
        self.fails: set[int] = set()
        self.posted = 0
        self._local = create_communicator(None, 0)
        self.process, self.num_processes = 0, 1

    def bind(self, collective: Any, owner: Any, reducer: Any = None) -> Any:
        bound: Any = self._local.bind(collective, owner, reducer)
        outer = self

        class Bound:
            prompt, ahead = False, True
            messages, bytes = bound.messages, bound.bytes

            def run(self, operands: Any, **options: Any) -> Any:
                outer.log.append("ran")
                return bound.run(operands, **options)

            def post(self, operands: Any) -> Pending:
                number, outer.posted = outer.posted, outer.posted + 1
                if number in outer.fails:
                    raise ValueError("no route")
                outer.log.append(f"posted {number}")
                return Pending(outer, number, bound.run(operands))

        return Bound()

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


def rig(link: Link, recorder: Recorder | None = None) -> Rig:
    made = Rig.__new__(Rig)
    made.engine = NullEngine(2, compute=compute)
    made.world = MemoryWorld(MemoryTransport(1), 0, Options(local_devices=2))
    communicator: Communicator = link
    made.executor = Executor(
        made.engine, made.world, communicators=lambda stream: communicator, instrument=recorder
    )
    return made


def sums(count: int) -> Program:
    """2 devices: x summed, x + 1 summed, x + 2 summed …; all are started before one is awaited."""
    body: list[Any] = [Run(0, (k,), (k + 1,)) for k in range(count)]
    body += [Start(k, (k,), (count + 1 + k,), k) for k in range(count)]
    body.append(Run(1, (count,), (2 * count + 1,)))
    body += [Wait(k) for k in range(count)]
    return program(
        [F32] * (2 * count + 2),
        block((0,), body, tuple(range(count + 1, 2 * count + 1))),
        devices=2,
        segments=[segment("increment"), segment("increment")],
        collectives=[all_reduce((0, 1))] * count,
    )


def run(made: Rig, link: Link, count: int) -> list[list[float]]:
    loaded = made.load(sums(count))
    rows = loaded.execute(made.arguments(loaded, [1, 2]))
    link.handed_over.set()
    return [firsts([row[k].host_view() for row in rows]) for k in range(count)]


def test_the_next_ones_are_posted_while_one_is_awaited() -> None:
    link = Link()
    assert run(rig(link), link, 4) == [[3.0 + 2 * k] * 2 for k in range(4)]
    # Two at most are under way before their turn; none has overtaken another.
    assert link.log == [
        "posted 0", "posted 1", "posted 2", "arrived 0", "posted 3", "arrived 1", "arrived 2",
        "arrived 3",
    ]  # fmt: skip


def test_one_whose_operand_is_being_computed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = Link()
    made = rig(link)
    computed = {1.0, 2.0, 3.0}
    monkeypatch.setattr(
        made.engine,
        "is_ready",
        lambda array: float(np.asarray(made.engine.host_view(array)).flat[0]) in computed,
    )
    assert run(made, link, 3) == [[3.0] * 2, [5.0] * 2, [7.0] * 2]
    assert link.log == [
        "posted 0", "posted 1", "arrived 0", "arrived 1", "posted 2", "arrived 2",
    ]  # fmt: skip


def test_what_cannot_be_posted_fails_in_its_turn() -> None:
    link = Link()
    link.fails = {1}
    made = rig(link)
    loaded = made.load(sums(2))
    rows = loaded.execute(made.arguments(loaded, [1, 2]))
    link.handed_over.set()
    with pytest.raises(StrettoError, match="all-reduce %sum: ValueError: no route"):
        rows[0][1].host_view()
    assert link.log == ["posted 0", "arrived 0"]


def test_an_observer_sees_them_one_after_the_other() -> None:
    link, recorder = Link(), Recorder()
    made = rig(link, recorder)
    run(made, link, 3)
    seen = [e[0] for e in recorder.events if e[0] in ("start", "done")]
    assert seen == ["start", "done"] * 3
    assert made.executor.counters().collectives == 3


def test_the_number_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "LOOK_AHEAD", 0)
    link = Link()
    run(rig(link), link, 3)
    assert link.log == [f"{what} {k}" for k in range(3) for what in ("posted", "arrived")]


def test_an_operand_that_failed_fails_its_own_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link()
    made = rig(link)

    def is_ready(array: Any) -> bool:
        if float(np.asarray(made.engine.host_view(array)).flat[0]) == 3.0:
            raise ValueError("computed in vain")
        return True

    monkeypatch.setattr(made.engine, "is_ready", is_ready)
    loaded = made.load(sums(2))
    rows = loaded.execute(made.arguments(loaded, [1, 2]))
    link.handed_over.set()
    # The second sums 2 and 3; the first, which was awaited meanwhile, has its result.
    assert firsts([row[0].host_view() for row in rows]) == [3.0] * 2
    with pytest.raises(StrettoError, match="all-reduce %sum: ValueError: computed in vain"):
        rows[0][1].host_view()
