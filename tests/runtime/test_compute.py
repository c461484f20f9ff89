"""Runs of segments that some devices leave out in some iterations."""

from __future__ import annotations

import numpy as np
import pytest
from support.handmade import F32, Rig, block, firsts, program, segment
from support.program_parser import parse

from stretto.collectives.types import TensorType
from stretto.runtime.engines.null import NullEngine
from stretto.runtime.errors import InvalidProgramError
from stretto.runtime.execution import compute
from stretto.runtime.execution.absent import Absent, zeros
from stretto.runtime.options import Options
from stretto.runtime.program import Copy, Free, Loop, Program, Run, to_text
from stretto.runtime.program.check import check
from stretto.runtime.program.codec import from_bytes, to_bytes
from stretto.runtime.program.valid import left_out
from stretto.runtime.recording.statistics import Counters
from stretto.testing import MemoryTransport, MemoryWorld, Recorder

NOTHING = block((), [], ())


def adding(*valid: tuple[int, ...], trips: int = 4) -> Program:
    """Each device: total += x + 1 in every iteration, with x + 1 only made in those of ``valid``."""
    body = block(
        (2, 3),
        [Run(0, (2,), (4,), (), valid), Run(1, (3, 4), (5,)), Free((3, 4))],
        (2, 5),
    )
    return program(
        [F32] * 8,
        block((0, 1), [Loop((0, 1), (6, 7), NOTHING, body, trips)], (7,)),
        devices=len(valid),
        segments=[segment("increment"), segment("add", (F32, F32))],
    )


def test_devices_of_a_process_leave_out_different_iterations() -> None:
    made = adding((0, 3), (1, 2), (0, 0, 3, 3), (1, 0))
    check(made)
    recorder = Recorder()
    rig = Rig(4, instrument=recorder)
    (total,) = rig.run(made, [1, 2, 3, 4], [0, 0, 0, 0])
    assert firsts(total) == [4 * 2, 2 * 3, 2 * 4, 0]
    runs = [e[2] for e in recorder.events if e[:2] == ("segment", "increment")]
    assert runs == [0, 2, 0, 1, 0, 1, 0, 2]
    left = [e[2] for e in recorder.events if e[:2] == ("skipped", "increment")]
    assert left == [1, 3, 2, 3, 2, 3, 1, 3]
    counters = rig.executor.counters()
    assert counters.skipped_runs == len(left)


def test_a_single_device() -> None:
    rig = Rig()
    (total,) = rig.run(adding((1, 2)), [1], [0])
    assert firsts(total) == [4]
    assert rig.executor.counters() == Counters(skipped_runs=2)


def test_outside_of_loops_all_is_iteration_0() -> None:
    made = program(
        [F32] * 2,
        block((0,), [Run(0, (0,), (1,), (), ((0, 7), (1, 0)))], (1,)),
        devices=2,
        segments=[segment("increment")],
    )
    (result,) = Rig(2).run(made, [1, 2])
    assert firsts(result) == [2, 0]


def test_an_inner_loop_counts_its_own_iterations() -> None:
    inner = block((4, 5), [Run(0, (4, 5), (6,), (), ((1, 1),)), Free((5,))], (4, 6))
    outer = block((2, 3), [Loop((2, 3), (7, 8), NOTHING, inner, 3)], (7, 8))
    made = program(
        [F32] * 11,
        block((0, 1), [Loop((0, 1), (9, 10), NOTHING, outer, 2)], (10,)),
        segments=[segment("add", (F32, F32))],
    )
    check(made)
    recorder = Recorder()
    Rig(instrument=recorder).run(made, [5], [1])
    kinds = [e[0] for e in recorder.events if e[0] in ("segment", "skipped")]
    assert kinds == ["skipped", "segment", "skipped"] * 2


def test_what_is_donated_is_dropped_where_the_run_is_left_out() -> None:
    """x is given up every iteration; where it is not halved there are zeros."""
    body = block((1,), [Copy(1, 2), Run(0, (2,), (3,), (2,), ((0, 0), (1, 1)))], (3,))
    made = program(
        [F32] * 5,
        block((0,), [Loop((0,), (4,), NOTHING, body, 2)], (4,)),
        devices=2,
        segments=[segment("halve", donated=(0,))],
    )
    check(made)
    rig = Rig(2)
    (result,) = rig.run(made, [8, 8])
    assert firsts(result) == [0, 0]
    before = rig.engine.memory_stats(0)["bytes_in_use"]
    for _ in range(5):
        rig.run(made, [8, 8])
    assert rig.engine.memory_stats(0)["bytes_in_use"] == before


def test_poison_stands_where_zeros_would() -> None:
    world = MemoryWorld(MemoryTransport(1), 0, Options(poison_skipped=True))
    rig = Rig(world=world)
    (total,) = rig.run(adding((0, 2)), [1], [0])
    assert np.isnan(total[0]).all()


def test_absent_arrays_are_made_once() -> None:
    engine = NullEngine(2)
    absent = Absent(engine, zeros)
    s8 = TensorType("s8", (2,))
    assert absent.array(F32, 0) is absent.array(F32, 0)
    assert absent.array(F32, 1) is not absent.array(F32, 0)
    assert engine.host_view(absent.array(s8, 1)).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("valid", "missing"),
    [
        (((0, 1), (1, 0)), [{1}, {1}, {0, 1}, {0, 1}]),
        (((1, 1, 3, 3), (0, 9)), [{0}, set(), {0}, set()]),
    ],
)
def test_left_out(valid, missing) -> None:
    assert [left_out(valid)(i) for i in range(4)] == missing


@pytest.mark.parametrize("valid", [((0, 1),), ((0, 1), (2, 1)), ((0, 1), ()), ((0, 1), (-1, 1))])
def test_valid_iterations_that_make_no_sense(valid) -> None:
    made = program(
        [F32] * 2,
        block((0,), [Run(0, (0,), (1,), (), valid)], (1,)),
        devices=2,
        segments=[segment("increment")],
    )
    with pytest.raises(InvalidProgramError, match="valid iterations"):
        check(made)


def test_what_may_be_left_out_is_never_donated() -> None:
    """Whoever leaves the run out shares what stands for its outputs with others."""
    donates = program(
        [F32] * 3,
        block((0,), [Run(0, (0,), (1,), (), ((0, 0),)), Run(1, (1,), (2,), (1,))], (2,)),
        segments=[segment("increment"), segment("halve", donated=(0,))],
    )
    with pytest.raises(InvalidProgramError, match="donated, though its run may be left out"):
        check(donates)
    body = block((1,), [Run(1, (1,), (2,), (1,)), Run(0, (2,), (3,), (), ((0, 0),))], (3,))
    carried = program(
        [F32] * 6,
        block((0,), [Copy(0, 4), Loop((4,), (5,), NOTHING, body, 2, (4,))], (5,)),
        segments=[segment("increment"), segment("halve", donated=(0,))],
    )
    with pytest.raises(InvalidProgramError, match="becomes a carry that is consumed"):
        check(carried)


def test_text_and_bytes() -> None:
    made = adding((0, 3), (1, 0), (0, 0, 2, 3))
    assert "valid {{0,3},{1,0},{0,0,2,3}}" in to_text(made)
    assert parse(to_text(made)) == made
    assert from_bytes(to_bytes(made)) == made


@pytest.mark.parametrize(
    ("length", "until", "looks"), [(0.0, 1.0, 1), (4e-3, 1.0, 59), (4e-3, 2e-3, 48)]
)
def test_a_caller_looks_ever_more_seldom(monkeypatch, length, until, looks) -> None:
    """Whether a run of some seconds is over; 4 ms were 200 looks, 20 us apart."""
    now, seen = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def is_ready(array: object) -> bool:
        seen.append(now)
        return now >= length

    monkeypatch.setattr(compute, "perf_counter", lambda: now)
    monkeypatch.setattr(compute, "sleep", sleep)
    assert compute.over_in_time([["array"]], is_ready, until) == (length <= until)
    assert len(seen) == looks
    # It is known late by a sixteenth of its length at most.
    assert seen[-1] <= min(length, until) * (1 + compute.LOOKS) + compute.LOOK
