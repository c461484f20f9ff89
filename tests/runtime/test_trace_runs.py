"""Rows of a trace taken apart by runs: what each took, by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from support.handmade import F32, block, permute, program, segment

from stretto.runtime.program import Program, Run, Start, Wait
from stretto.runtime.recording.trace_events import Measured, measure
from stretto.runtime.recording.trace_file import ALL_ACTIVE, Header, Kind, RankTrace
from stretto.runtime.recording.trace_runs import RunTimes, runs_of

Row = tuple[Kind, int, int, int, float, float, float]


def step() -> Program:
    body = block((0,), [Run(0, (0,), (1,)), Start(0, (1,), (2,), 0, 0), Wait(0)], (2,))
    shift = permute((0, 1), (1, 0), name="shift")
    return program([F32] * 3, body, devices=2, segments=[segment("work")], collectives=[shift])


def measured(*rows: Row) -> Measured:
    """A rank with one device, which loaded the same program twice."""
    header = Header(0, 2, "host", 7, 1, "null", 0.0, 0.0)
    local = [((0, 0),), ((0, 0),)]
    return measure(RankTrace(header, [step(), step()], local, events=np.array(rows, "<f8")))


def run(number: int, at: float, compute: float, moves: Sequence[tuple[float, float]]) -> list[Row]:
    """A walk that begins at ``at``, computes from there on, and communicates at these times."""
    return [
        (Kind.PROGRAM, number, 1, 0, at, at + 0.5, 0),
        (Kind.SEGMENT, number, 0, 0, at, at + compute, 0),
        *((Kind.COLLECTIVE, number, 0, 0, at + b, at + e, ALL_ACTIVE) for b, e in moves),
    ]


def test_runs_of_two_programs_are_told_apart() -> None:
    found = measured(
        *run(0, 0.0, 2.0, [(1.0, 4.0)]),
        *run(1, 5.0, 1.0, [(1.0, 2.0)]),
        *run(0, 10.0, 3.0, [(1.0, 3.5)]),
    )
    assert runs_of(found, 0) == [RunTimes(4.0, 2.0), RunTimes(3.5, 0.5)]
    assert runs_of(found, 1) == [RunTimes(2.0, 1.0)]


def test_a_run_that_was_walked_before_the_last_one_ended_begins_with_its_end() -> None:
    found = measured(*run(0, 0.0, 2.0, [(2.0, 6.0)]), *run(0, 4.0, 3.0, [(3.0, 5.0)]))
    # Of the first one's message 2 to 4 is exposed, of the second one's all.
    assert runs_of(found, 0) == [RunTimes(6.0, 2.0), RunTimes(3.0, 2.0)]


def test_a_collective_that_is_made_twice_in_each_run() -> None:
    found = measured(
        *run(0, 0.0, 1.0, [(1.0, 2.0), (2.0, 3.0)]), *run(0, 10.0, 1.0, [(0.0, 1.0), (1.0, 3.0)])
    )
    assert runs_of(found, 0) == [RunTimes(3.0, 2.0), RunTimes(3.0, 2.0)]


def test_nothing_is_told_of_runs_that_differ() -> None:
    found = measured(*run(0, 0.0, 1.0, [(1.0, 2.0), (2.0, 3.0)]), *run(0, 10.0, 1.0, [(0.0, 1.0)]))
    assert runs_of(found, 0) == [] == runs_of(found, 1)
