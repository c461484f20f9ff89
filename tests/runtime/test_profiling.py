"""Programs that are measured: when, on whom, what is handed on, and that they stay as they are."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
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
    permute,
    program,
    segment,
)

from stretto.collectives.ops import Collective, Kind
from stretto.collectives.order import Schedule
from stretto.plugin import _capi
from stretto.runtime.errors import CompileError
from stretto.runtime.execution.loaded import LoadedProgram
from stretto.runtime.execution.negotiation import Negotiation
from stretto.runtime.execution.profiling import MEASURED, WARM_UP, Seconds
from stretto.runtime.program import Block, Loop, Program, Run, Start, Wait
from stretto.runtime.program.communicated import starts
from stretto.runtime.recording import statistics
from stretto.runtime.recording.trace import Trace
from stretto.runtime.recording.trace_file import Header, file_name, read
from stretto.testing import MemoryTransport, MemoryWorld, Recorder, run_processes

SUM = all_reduce((0, 1), name="sum")
FIRST = WARM_UP + MEASURED + 1  # the run before which what was measured is handed on


# x + 1 beside the sum of x over the devices, added.
MADE = program(
    [F32] * 4,
    block(
        (0,),
        [Start(0, (0,), (1,), 0), Wait(0), Run(0, (0,), (2,)), Run(1, (1, 2), (3,))],
        (3,),
    ),
    devices=2,
    segments=[segment("increment"), segment("add", (F32, F32))],
    collectives=[SUM],
)


class Kept:
    """Takes what is measured, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.given: list[tuple[Program, Seconds]] = []
        self.error = error

    def __call__(self, program: Program, seconds: Seconds) -> tuple[float, float]:
        self.given.append((program, seconds))
        if self.error is not None:
            raise self.error
        return 2.0, 3.0


def load(rig: Rig, made: Program, kept: Kept | None) -> LoadedProgram:
    return rig.executor.load(made, range(made.num_devices), keep=kept)


def results(rig: Rig, loaded: LoadedProgram, *, runs: int, at: int = 0) -> list[float]:
    """First elements of what so many runs give, none of which is awaited before the last is asked for."""
    rows = [
        loaded.execute(rig.arguments(loaded, [at + i, 10.0 * (at + i)]))[0] for i in range(runs)
    ]
    return firsts([row[0].host_view() for row in rows])


def expected(runs: int, of: int = 0, at: int = 0) -> list[float]:
    """x + 1 + the sum of both devices' x."""
    own = (1.0, 10.0)[of]
    return [11.0 * i + own * i + 1.0 for i in range(at, at + runs)]


def test_what_was_measured_is_handed_on_at_the_run_after_the_last_measured_one() -> None:
    rig, kept = Rig(2), Kept()
    loaded = load(rig, MADE, kept)
    walked = loaded.walker.program
    assert results(rig, loaded, runs=FIRST - 1) == expected(FIRST - 1)
    assert not kept.given and loaded.walker.context.times is not None
    assert results(rig, loaded, runs=1, at=3) == expected(1, at=3)
    ((given, seconds),) = kept.given
    assert given == MADE and len(seconds) == 2 and all(s is not None and s > 0 for s in seconds)
    assert loaded.program == MADE and loaded.walker.program is walked
    assert loaded.negotiation is None and loaded.walker.context.times is None
    assert results(rig, loaded, runs=3) == expected(3)
    assert len(kept.given) == 1
    done = statistics.profiles()[-1]
    assert (done.runs, done.segments, done.predicted, done.measured) == (MEASURED, 2, 2.0, 3.0)


def test_nothing_is_measured_that_nobody_keeps() -> None:
    rig = Rig(2)
    loaded = load(rig, MADE, None)
    assert loaded.negotiation is None
    assert results(rig, loaded, runs=FIRST + 1) == expected(FIRST + 1)
    assert loaded.walker.context.times is None


def test_a_failure_to_keep_is_told_and_the_program_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig, kept = Rig(2), Kept(CompileError("no memory"))
    before = statistics.profiles()
    loaded = load(rig, MADE, kept)
    with caplog.at_level(logging.WARNING, "stretto"):
        assert results(rig, loaded, runs=FIRST + 2) == expected(FIRST + 2)
    (line,) = [r.message for r in caplog.records]
    assert "is not kept: CompileError: no memory" in line
    assert statistics.profiles() == before and len(kept.given) == 1


def looping(trips: int) -> Program:
    """x + trips, with a sum of the argument beside."""
    body = Block((1,), (Run(0, (1,), (2,)),), (2,))
    loop = Loop((0,), (3,), Block((), (), ()), body, trip_count=trips)
    return program(
        [F32] * 5,
        block((0,), [Start(0, (0,), (4,), 0), loop, Wait(0)], (3, 4)),
        devices=2,
        segments=[segment("increment")],
        collectives=[SUM],
    )


def test_each_iteration_of_a_measured_run_is_timed_once_for_all_devices() -> None:
    noted: list[int] = []
    rig = Rig(2)
    loaded = load(rig, looping(3), Kept())
    for _ in range(FIRST - 1):
        loaded.execute(rig.arguments(loaded, [1, 2]))[0][0].host_view()
        times = loaded.walker.context.times
        noted.append(0 if times is None else len(times._times[0]))
    assert noted == [0] * WARM_UP + [3 * i for i in range(1, MEASURED + 1)]


class Slow:
    """Computes like the null engine, and counts what it takes by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float]) -> None:
        self.now = 0.0
        self.seconds = seconds
        monkeypatch.setattr(
            "stretto.runtime.execution.segment_times.perf_counter", lambda: self.now
        )

    def __call__(self, made: Any, inputs: list[np.ndarray]) -> list[np.ndarray]:
        self.now += self.seconds[["increment", "add"].index(made.name)]
        return compute(made, inputs)


def test_a_segments_time_is_that_of_all_devices_and_of_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, kept = Rig(2, rules=Slow(monkeypatch, (0.25, 4.0))), Kept()
    loaded = load(rig, MADE, kept)
    results(rig, loaded, runs=FIRST)
    assert kept.given[0][1] == (0.5, 8.0)


def results_of_rank(rig: Rig, loaded: LoadedProgram, runs: int, at: int = 0) -> list[float]:
    arguments = [rig.arguments(loaded, [float(i), 10.0 * i]) for i in range(at, at + runs)]
    rows = [loaded.execute(a)[0] for a in arguments]
    return firsts([row[0].host_view() for row in rows])


def test_one_rank_measures_and_all_go_on_as_they_were() -> None:
    kept = Kept()

    def main(world: MemoryWorld, transport: MemoryTransport) -> tuple[Any, ...]:
        rig = Rig(world=world, transport=transport)
        loaded = load(rig, MADE, kept if world.rank == 0 else None)
        found = results_of_rank(rig, loaded, 4)
        again = load(rig, MADE, kept if world.rank == 0 else None)  # counts its runs anew
        found += results_of_rank(rig, again, FIRST - 1, at=4)
        found += results_of_rank(rig, loaded, FIRST, at=FIRST + 3)
        return found, loaded.walker.program, type(loaded.negotiation)

    for rank, (found, running, negotiation) in enumerate(run_processes(2, main)):
        assert found == expected(2 * FIRST + 3, rank)
        assert running == MADE and negotiation is Negotiation
    ((given, seconds),) = kept.given
    assert given == MADE and all(s is not None and s > 0 for s in seconds)


def test_ranks_that_had_to_find_a_common_order_are_not_measured() -> None:
    other = permute((0, 1), (1, 0), name="shift")

    def of(order: Sequence[int]) -> Program:
        steps = [i for n in order for i in (Start(n, (0,), (1 + n,), n), Wait(n))]
        both = block((0,), steps, (1, 2))
        return program([F32] * 3, both, devices=2, collectives=[SUM, other])

    def main(world: MemoryWorld, transport: MemoryTransport) -> tuple[Any, ...]:
        rig = Rig(world=world, transport=transport)
        made = of((0, 1) if world.rank == 0 else (1, 0))
        kept = Kept()
        loaded = rig.executor.load(
            made,
            range(2),
            schedule=Schedule(tuple(replace(e, after=()) for e, _ in starts(made))),
            with_order=lambda order: of(
                [
                    [i.collective for i in made.body.instructions if isinstance(i, Start)][p]
                    for p in order[()]
                ]
            ),
            keep=kept,
        )
        found = results_of_rank(rig, loaded, FIRST + 1)
        return found, kept.given, type(loaded.negotiation)

    for found, asked, kind in run_processes(2, main):
        assert found == [11.0 * i for i in range(FIRST + 1)]
        assert not asked and kind is Negotiation


def test_measured_runs_of_a_program_that_sends_leave_its_streams_alone() -> None:
    ring = ((0, 1), (1, 0))
    send = Collective(Kind.SEND, (F32,), (), pairs=ring, channel=1, name="send")
    receive = Collective(Kind.RECV, (), (F32,), pairs=ring, channel=1, name="receive")
    steps = [
        Start(2, (0,), (1,), 0),
        Start(0, (0,), (), 1),
        Run(0, (0,), (2,)),
        Start(1, (), (3,), 2),
        *(Wait(2), Wait(0), Wait(1)),
    ]

    def main(world: MemoryWorld, transport: MemoryTransport) -> Any:
        rig = Rig(world=world, transport=transport)
        made = program(
            [F32] * 4,
            block((0,), steps, (1, 2, 3)),
            devices=2,
            segments=[segment("increment")],
            collectives=[send, receive, SUM],
        )
        loaded = load(rig, made, Kept())
        found = results_of_rank(rig, loaded, FIRST - 1)
        times = loaded.walker.context.times
        return found, times is not None and times._streams, loaded

    for found, streams, _ in run_processes(2, main):
        assert found == [11.0 * i for i in range(FIRST - 1)]
        assert streams == []


def test_a_watcher_is_told_of_every_run_and_of_the_outcome(tmp_path: Path) -> None:
    recorder = Recorder()
    rig = Rig(2, instrument=recorder)
    loaded = load(rig, MADE, Kept())
    results(rig, loaded, runs=FIRST + 1)
    segments = [e for e in recorder.events if e[0] == "segment"]
    assert len(segments) == 2 * 2 * (FIRST + 1)
    header = Header(0, 1, "host", 7, 2, "null", 0.0, 0.0)
    trace = Trace(tmp_path, header, rig.engine, _capi.Rows)
    end = rig.executor.observe(trace)
    results(rig, load(rig, MADE, Kept()), runs=FIRST)
    end()
    trace.close()
    assert read(tmp_path / file_name(0)).profiles == [statistics.profiles()[-1]]
