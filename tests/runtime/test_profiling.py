"""Programs that are measured and then replaced: when, on whom, and what keeps them as they are."""

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
from stretto.runtime import statistics
from stretto.runtime.errors import CompileError, StrettoError
from stretto.runtime.loaded import LoadedProgram
from stretto.runtime.negotiation import Joint
from stretto.runtime.profiling import MEASURED, WARM_UP, NewPlan, Seconds
from stretto.runtime.program import Block, Loop, Program, Run, Start, Wait
from stretto.runtime.schedule import starts
from stretto.runtime.trace import Trace
from stretto.runtime.trace_file import Header, file_name, read
from stretto.testing import MemoryTransport, MemoryWorld, Recorder, run_processes

SUM = all_reduce((0, 1), name="sum")
FIRST = WARM_UP + MEASURED + 1  # the run that begins with the decision


def apart(begins_early: bool) -> Program:
    """x + 1 beside the sum of x over the devices, added: the sum awaited at once or after the segment."""
    middle: list[Any] = [Run(0, (0,), (2,)), Wait(0)]
    return program(
        [F32] * 4,
        block(
            (0,),
            [
                Start(0, (0,), (1,), 0),
                *(middle if begins_early else reversed(middle)),
                Run(1, (1, 2), (3,)),
            ],
            (3,),
        ),
        devices=2,
        segments=[segment("increment"), segment("add", (F32, F32))],
        collectives=[SUM],
    )


OLD, NEW = apart(False), apart(True)


class FixedPlanner:
    """Plans ``new`` in the place of whatever it is, and writes down what it was asked."""

    def __init__(self, new: Program | None = NEW, *, wanted: bool = True) -> None:
        self.new, self.wanted = new, wanted
        self.asked: list[tuple[Program, Seconds]] = []
        self.kept = 0

    def plan(self, program: Program, seconds: Seconds) -> NewPlan:
        self.asked.append((program, seconds))
        return NewPlan(self.new, 2.0, 1.0)

    def keep(self) -> None:
        self.kept += 1


def load(rig: Rig, made: Program, planner: FixedPlanner) -> LoadedProgram:
    return rig.executor.load(made, range(made.num_devices), planner=planner)


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


def test_it_is_replaced_at_the_run_after_the_last_measured_one() -> None:
    rig, planner = Rig(2), FixedPlanner()
    loaded = load(rig, OLD, planner)
    assert results(rig, loaded, runs=FIRST - 1) == expected(FIRST - 1)
    assert not planner.asked and loaded.walker.times is not None
    assert results(rig, loaded, runs=1, at=3) == expected(1, at=3)
    ((asked, seconds),) = planner.asked
    assert asked == OLD and len(seconds) == 2 and all(s is not None and s > 0 for s in seconds)
    assert loaded.program == loaded.walker.program == NEW
    assert loaded.joint is None and loaded.walker.times is None
    assert planner.kept == 1
    assert results(rig, loaded, runs=3) == expected(3)
    assert len(planner.asked) == 1
    done = statistics.profiles()[-1]
    assert (done.runs, done.segments, done.before, done.after, done.replanned) == (
        MEASURED, 2, 2.0, 1.0, True,
    )  # fmt: skip


def test_nothing_is_measured_without_a_planner_or_where_there_is_nothing_to_plan() -> None:
    for planner in (None, FixedPlanner(wanted=False)):
        rig = Rig(2)
        loaded = rig.executor.load(OLD, range(2), planner=planner)
        assert loaded.joint is None
        assert results(rig, loaded, runs=FIRST + 1) == expected(FIRST + 1)
        assert loaded.walker.times is None and loaded.program == OLD


def test_a_plan_that_is_kept_goes_on() -> None:
    rig, planner = Rig(2), FixedPlanner(None)
    loaded = load(rig, OLD, planner)
    walked = loaded.walker.program
    assert results(rig, loaded, runs=FIRST + 2) == expected(FIRST + 2)
    assert loaded.walker.program is walked and loaded.joint is None
    assert loaded.walker.times is None and planner.kept == 1
    assert not statistics.profiles()[-1].replanned


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
    rig, planner = Rig(2), FixedPlanner(None)
    loaded = load(rig, looping(3), planner)
    for _ in range(FIRST - 1):
        loaded.execute(rig.arguments(loaded, [1, 2]))[0][0].host_view()
        times = loaded.walker.times
        noted.append(0 if times is None else len(times._times[0]))
    assert noted == [0] * WARM_UP + [3 * i for i in range(1, MEASURED + 1)]


class Slow:
    """Computes like the null engine, and counts what it takes by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Sequence[float]) -> None:
        self.now = 0.0
        self.seconds = seconds
        monkeypatch.setattr("stretto.runtime.profiling.perf_counter", lambda: self.now)

    def __call__(self, made: Any, inputs: list[np.ndarray]) -> list[np.ndarray]:
        self.now += self.seconds[["increment", "add"].index(made.name)]
        return compute(made, inputs)


def test_a_segments_time_is_that_of_all_devices_and_of_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig, planner = Rig(2, rules=Slow(monkeypatch, (0.25, 4.0))), FixedPlanner()
    loaded = load(rig, OLD, planner)
    results(rig, loaded, runs=FIRST)
    assert planner.asked[0][1] == (0.5, 8.0)


def job(planners: Sequence[FixedPlanner], runs: int = FIRST + 3) -> list[tuple[Any, ...]]:
    """Two processes with one device each: what each has computed and what it runs in the end."""

    def main(world: MemoryWorld, transport: MemoryTransport) -> tuple[Any, ...]:
        rig = Rig(world=world, transport=transport)
        loaded = load(rig, OLD, planners[world.rank])
        found = results_of_rank(rig, loaded, runs)
        return found, loaded.walker.program, loaded.joint

    return run_processes(2, main)


def results_of_rank(rig: Rig, loaded: LoadedProgram, runs: int, at: int = 0) -> list[float]:
    arguments = [rig.arguments(loaded, [float(i), 10.0 * i]) for i in range(at, at + runs)]
    rows = [loaded.execute(a)[0] for a in arguments]
    return firsts([row[0].host_view() for row in rows])


def test_all_ranks_take_the_first_ones_times_and_change_at_one_run() -> None:
    planners = [FixedPlanner(), FixedPlanner()]
    for rank, (found, running, joint) in enumerate(job(planners)):
        assert found == expected(FIRST + 3, rank)
        assert running == NEW
        assert isinstance(joint, Joint)
    (first,), (second,) = planners[0].asked, planners[1].asked
    assert first == second


def test_where_one_rank_cannot_compile_all_keep_what_they_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(FixedPlanner):
        def plan(self, program: Program, seconds: Seconds) -> NewPlan:
            super().plan(program, seconds)
            raise CompileError("no memory for segment add")

    planners = [FixedPlanner(), Failing()]
    with caplog.at_level(logging.WARNING, "stretto"):
        for rank, (found, running, joint) in enumerate(job(planners)):
            assert found == expected(FIRST + 3, rank)
            assert running == OLD
            assert isinstance(joint, Joint)
    assert [p.kept for p in planners] == [0, 0]
    (line,) = [r.message for r in caplog.records if "keeps its plan" in r.message]
    assert "rank 1 cannot: CompileError: no memory for segment add" in line


@pytest.mark.parametrize(
    "second", [FixedPlanner(None), FixedPlanner(wanted=False)], ids=["another plan", "no plan"]
)
def test_ranks_that_come_to_different_plans_keep_the_old_one(second: FixedPlanner) -> None:
    for rank, (found, running, _) in enumerate(job([FixedPlanner(), second])):
        assert found == expected(FIRST + 3, rank)
        assert running == OLD


def test_runs_are_counted_for_the_program_and_not_for_what_is_loaded_of_it() -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> tuple[Any, ...]:
        rig = Rig(world=world, transport=transport)
        planner = FixedPlanner()
        found = results_of_rank(rig, load(rig, OLD, planner), 4)
        loaded = load(rig, OLD, planner)
        found += results_of_rank(rig, loaded, FIRST - 4, at=4)
        decided = loaded.walker.program
        loaded = load(rig, OLD, planner)  # follows what was decided
        found += results_of_rank(rig, loaded, 3, at=FIRST)
        return found, decided, loaded.walker.program, planner.asked

    for rank, (found, decided, running, asked) in enumerate(run_processes(2, main)):
        assert found == expected(FIRST + 3, rank)
        assert decided == running == NEW
        assert asked[0] == asked[1] and len(asked) == 2


def test_what_was_loaded_since_must_come_to_the_same_plan() -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> None:
        rig = Rig(world=world, transport=transport)
        results_of_rank(rig, load(rig, OLD, FixedPlanner()), FIRST)
        results_of_rank(rig, load(rig, OLD, FixedPlanner(None)), 1)

    with pytest.raises(StrettoError, match="does not come to the same plan"):
        run_processes(2, main)


def test_ranks_that_had_to_find_a_common_order_are_not_measured() -> None:
    other = permute((0, 1), (1, 0), name="shift")

    def of(order: Sequence[int]) -> Program:
        steps = [i for n in order for i in (Start(n, (0,), (1 + n,), n), Wait(n))]
        both = block((0,), steps, (1, 2))
        return program([F32] * 3, both, devices=2, collectives=[SUM, other])

    def main(world: MemoryWorld, transport: MemoryTransport) -> tuple[Any, ...]:
        rig = Rig(world=world, transport=transport)
        made = of((0, 1) if world.rank == 0 else (1, 0))
        planner = FixedPlanner()
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
            planner=planner,
        )
        found = results_of_rank(rig, loaded, FIRST + 1)
        return found, planner.asked, type(loaded.joint)

    for found, asked, kind in run_processes(2, main):
        assert found == [11.0 * i for i in range(FIRST + 1)]
        assert not asked and kind is Joint


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
        loaded = load(rig, made, FixedPlanner(None))
        found = results_of_rank(rig, loaded, FIRST - 1)
        times = loaded.walker.times
        return found, times is not None and times._streams, loaded

    for found, streams, _ in run_processes(2, main):
        assert found == [11.0 * i for i in range(FIRST - 1)]
        assert streams == []


def test_a_watcher_is_told_of_every_run_and_of_the_outcome(tmp_path: Path) -> None:
    recorder = Recorder()
    rig = Rig(2, instrument=recorder)
    loaded = load(rig, OLD, FixedPlanner())
    results(rig, loaded, runs=FIRST + 1)
    segments = [e for e in recorder.events if e[0] == "segment"]
    assert len(segments) == 2 * 2 * (FIRST + 1)
    header = Header(0, 1, "host", 7, 2, "null", 0.0, 0.0)
    trace = Trace(tmp_path, header, rig.engine)
    end = rig.executor.observe(trace)
    results(rig, load(rig, OLD, FixedPlanner()), runs=FIRST)
    end()
    trace.close()
    assert read(tmp_path / file_name(0)).profiles == [statistics.profiles()[-1]]
