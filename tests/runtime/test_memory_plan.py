"""Planned memory against what arrays really take on the null engine, and against hand-computed bytes."""

from __future__ import annotations

import pytest
from support.handmade import F32, PRED, S32, Rig, block, program, segment

from stretto.runtime.program import Branch, Copy, Free, Loop, Program, Run
from stretto.runtime.program.memory_plan import MemoryPlan, plan

STEP, ADD = segment("increment"), segment("add", (F32, F32))
IN_PLACE = segment("increment", donated=(0,))
BELOW = segment("below", (F32, F32), (PRED,))
PARITY = segment("parity", (F32,), (S32,))

CHAIN = program(
    [F32] * 3,
    block((0,), [Run(0, (0,), (1,)), Run(0, (1,), (2,)), Free((1,))], (2,)),
    segments=[STEP],
)
GIVEN_AWAY = program(
    [F32] * 3,
    block((0,), [Run(0, (0,), (1,), (0,)), Run(0, (1,), (2,), (1,))], (2,)),
    segments=[IN_PLACE],
    donated=(0,),
)
# The carry is a copy, updated in place; 4 is what an iteration adds to it for a moment.
COUNTED = program(
    [F32] * 6,
    block(
        (0,),
        [
            Copy(0, 1),
            Loop(
                (1,),
                (5,),
                block((), (), ()),
                block(
                    (2,),
                    [Run(0, (2,), (4,)), Run(1, (2, 4), (3,), (2,)), Free((4,))],
                    (3,),
                ),
                trip_count=5,
                donated=(1,),
            ),
        ],
        (5,),
    ),
    segments=[STEP, segment("add", (F32, F32), donated=(0,))],
)
# Not in place: from the second iteration on, old and new carry live beside the argument.
COPYING = program(
    [F32] * 7,
    block(
        (0, 1),
        [
            Loop(
                (0, 1),
                (5, 6),
                block((), (), ()),
                block((2, 3), [Run(0, (2, 3), (4,)), Free((2,))], (4, 3)),
                trip_count=4,
            ),
            Free((6,)),
        ],
        (5,),
    ),
    segments=[ADD],
)
UNKNOWN = program(
    [F32, F32, F32, F32, PRED, F32, F32, F32, F32, F32],
    block(
        (0, 1),
        [
            Loop(
                (0, 1),
                (8, 9),
                block((2, 3), [Run(0, (2, 3), (4,)), Free((2, 3))], (4,)),
                block((5, 6), [Run(1, (5,), (7,)), Free((5,))], (7, 6)),
            ),
            Free((9,)),
        ],
        (8,),
    ),
    segments=[BELOW, STEP],
)
# The second branch needs more than the others.
BRANCHES = program(
    [F32, S32, F32, F32, F32, F32, F32, F32, F32],
    block(
        (0,),
        [
            Run(0, (0,), (1,)),
            Branch(
                1,
                ((0,), (0,), (0,)),
                (8,),
                (
                    block((2,), [Run(1, (2,), (3,))], (3,)),
                    block(
                        (4,),
                        [Run(1, (4,), (5,)), Run(1, (5,), (6,)), Free((5,))],
                        (6,),
                    ),
                    block((7,), [], (7,)),
                ),
            ),
            Free((1,)),
        ],
        (8,),
    ),
    segments=[PARITY, STEP],
)


@pytest.mark.parametrize(
    ("made", "hosts", "expected"),
    [
        (CHAIN, [[1]], MemoryPlan(16, 16, 0, 48)),
        (GIVEN_AWAY, [[1]], MemoryPlan(16, 16, 16, 16)),
        (COUNTED, [[1]], MemoryPlan(16, 16, 0, 48)),
        (COPYING, [[1], [2]], MemoryPlan(32, 16, 0, 64)),
        (UNKNOWN, [[1], [9]], MemoryPlan(32, 16, 0, 64)),
        (BRANCHES, [[1]], MemoryPlan(16, 16, 0, 52)),
    ],
    ids=["chain", "given away", "counted", "copying", "unknown", "branches"],
)
def test_what_is_planned_is_what_is_taken(
    made: Program, hosts: list[list[int]], expected: MemoryPlan
) -> None:
    assert plan(made) == expected
    rig = Rig()
    loaded = rig.load(made)
    arguments = rig.arguments(loaded, *hosts)
    ((result,),) = loaded.execute(arguments)
    result.block()
    assert rig.engine.memory_stats(0)["peak_bytes_in_use"] == expected.peak
    assert loaded.compiled.memory() == expected


def test_scratch_memory_is_taken_while_its_segment_runs() -> None:
    made = program(
        [F32] * 3,
        block((0,), [Run(0, (0,), (1,)), Run(1, (1,), (2,)), Free((1,))], (2,)),
        segments=[STEP, segment("halve")],
    )
    assert plan(made, [100, 0]).peak == 16 + 16 + 100
    assert plan(made, [0, 100]).peak == 48 + 100
    assert plan(made, [0, 100]).temporary == 16 + 100


def test_a_result_that_is_an_argument_is_copied() -> None:
    made = program([F32], block((0,), [], (0,)))
    assert plan(made) == MemoryPlan(16, 16, 0, 32)
    assert plan(program([F32], block((0,), [], (0,)), donated=(0,))) == MemoryPlan(16, 16, 16, 16)
