"""Loops that carry transfers under way into their next iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.handmade import F32, PRED, Rig, block, firsts, permute, program, segment
from support.program_parser import parse

from stretto.collectives.ops import Collective, Kind
from stretto.runtime.errors import InvalidProgramError, StrettoError
from stretto.runtime.program import (
    Block,
    Carried,
    Copy,
    Free,
    Instruction,
    Loop,
    Program,
    Run,
    Start,
    Wait,
    to_text,
)
from stretto.runtime.program.check import check
from stretto.runtime.program.codec import from_bytes, to_bytes
from stretto.testing import MemoryTransport, MemoryWorld, Recorder, run_processes

NOTHING = block((), [], ())
RING = permute((0, 1), (1, 0))


def ring(trips: int | None, body: list[Instruction] | None = None, **loop: object) -> Program:
    """x = x of the other device + 1, y = 2 * y + 1 meanwhile; carry 0 crosses into the next iteration."""
    steps = body or [
        Run(2, (3, 3), (4,)),  # beside what arrives
        Free((3,)),
        Wait(7),
        Run(0, (2,), (5,)),
        Free((2,)),
        Start(0, (5,), (6,), 7, 1),
        Free((5,)),
        Run(0, (4,), (10,)),  # beside what leaves
        Free((4,)),
    ]
    made = Loop(
        (0, 1),
        (8, 9),
        NOTHING,
        block((2, 3), steps, (6, 10)),
        trips,
        carried=(Carried(7, ((0, 0),)),),
    )
    made = replace(made, **loop)  # type: ignore[arg-type]
    found = program(
        [F32] * 11,
        block((0, 1), [made], (8, 9)),
        devices=2,
        segments=[segment("increment"), segment("halve", donated=(0,)), segment("add", (F32, F32))],
        collectives=[RING],
    )
    return replace(found, num_streams=2)


def by_hand(trips: int, x: list[float], y: list[float]) -> list[list[float]]:
    for _ in range(trips):
        x = [x[1] + 1, x[0] + 1]
        y = [2 * v + 1 for v in y]
    return [x, y]


@pytest.mark.parametrize("trips", [0, 1, 2, 5])
def test_results(trips: int) -> None:
    check(ring(trips))
    found = Rig(2).run(ring(trips), [1, 20], [3, 4])
    assert [firsts(row) for row in found] == by_hand(trips, [1, 20], [3, 4])


def test_what_is_awaited_is_what_the_iteration_before_has_started() -> None:
    """Starts and waits in their order: the last one is awaited by the loop itself."""

    class Watcher(Recorder):
        def collective_queued(self, collective: Collective, stream: int) -> None:
            self.events.append(("queued", collective.name, stream))

        def collective_awaited(
            self, collective: Collective, stream: int, queued: float, began: float
        ) -> None:
            assert 0.0 < queued <= began
            self.events.append(("awaited", collective.name, stream))

    watcher = Watcher()
    Rig(2, instrument=watcher).run(ring(3), [1, 2], [0, 0])
    names = {("segment", "add"): "beside", ("segment", "increment"): "stage"}
    seen = [e[0] if e[0] in ("queued", "awaited") else names.get(e[:2]) for e in watcher.events
            if e[-1] != 1 or e[0] in ("queued", "awaited")]  # fmt: skip
    each = ["stage", "queued", "stage"]
    assert [s for s in seen if s] == [
        "beside", *each, "beside", "awaited", *each, "beside", "awaited", *each, "awaited",
    ]  # fmt: skip


def test_on_processes() -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> list[list[float]]:
        rig = Rig(world=world, transport=transport)
        return [firsts(row) for row in rig.run(ring(4), [1, 20], [3, 4])]

    x, y = by_hand(4, [1, 20], [3, 4])
    assert run_processes(2, main) == [[[x[0]], [y[0]]], [[x[1]], [y[1]]]]


def while_loop() -> Program:
    """The same while y < limit, which devices of the two pairs may leave at different times."""
    condition = block((11, 12, 13), [Free((11,)), Run(3, (12, 13), (14,)), Free((12, 13))], (14,))
    body = block(
        (2, 3, 15),
        [
            Run(2, (3, 3), (4,)),
            Free((3,)),
            Wait(7),
            Run(0, (2,), (5,)),
            Free((2,)),
            Start(0, (5,), (6,), 7, 1),
            Free((5,)),
            Run(0, (4,), (10,)),
            Free((4,)),
        ],
        (6, 10, 15),
    )
    loop = Loop(
        (0, 1, 16), (8, 9, 17), condition, body, carried=(Carried(7, ((0, 0),)),), name="while.2"
    )
    types = [F32] * 18
    types[14] = PRED
    made = program(
        types,
        block((0, 1, 16), [loop], (8, 9)),
        devices=4,
        segments=[
            segment("increment"),
            segment("halve", donated=(0,)),
            segment("add", (F32, F32)),
            segment("below", (F32, F32), (PRED,)),
        ],
        collectives=[permute((0, 1), (1, 0), (2, 3), (3, 2))],
    )
    return replace(made, num_streams=2)


@pytest.mark.parametrize("limits", [(50, 50), (9, 100), (100, 9), (0, 20), (0, 0)])
def test_devices_leave_with_what_was_sent_to_them(limits: tuple[int, int]) -> None:
    check(while_loop())
    first, second = limits
    found = Rig(4).run(while_loop(), [1, 2, 3, 4], [1, 1, 1, 1], [first, first, second, second])

    def trips(limit: int) -> int:
        y, count = 1, 0
        while y < limit:
            y, count = 2 * y + 1, count + 1
        return count

    left = by_hand(trips(first), [1, 2], [1, 1])
    right = by_hand(trips(second), [3, 4], [1, 1])
    assert [firsts(row) for row in found] == [left[0] + right[0], left[1] + right[1]]


def test_a_loop_in_a_loop_starts_anew() -> None:
    inner = ring(2).body.instructions[0]
    assert isinstance(inner, Loop)
    inner = replace(inner, inputs=(20, 21), outputs=(22, 23))
    outer = Loop((0, 1), (8, 9), NOTHING, block((20, 21), [inner], (22, 23)), 3)
    made = replace(ring(2), slot_types=(F32,) * 24, body=block((0, 1), [outer], (8, 9)))
    check(made)
    found = Rig(2).run(made, [1, 20], [3, 4])
    assert [firsts(row) for row in found] == by_hand(6, [1, 20], [3, 4])


def test_an_error_under_way_fails_the_run() -> None:
    made = ring(3)
    boom = replace(made, segments=(segment("boom"), *made.segments[1:]))
    with pytest.raises(StrettoError, match="boom"):
        Rig(2).run(boom, [1, 2], [3, 4])


def test_text_and_bytes() -> None:
    made = ring(3)
    assert "carried 7 {{0,0}}" in to_text(made)
    assert parse(to_text(made)) == made
    assert from_bytes(to_bytes(made)) == made


START = Start(0, (5,), (6,), 7, 1)
COPY = Run(2, (3, 3), (10,))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([Wait(7), Run(0, (2,), (5,)), COPY], "carried, but not started"),
        ([Run(0, (3,), (5,)), START, Wait(7), COPY], "started before it is awaited"),
        ([Run(0, (2,), (5,)), Wait(7), START, COPY], r"%2 is not defined"),
        ([Wait(7), Run(0, (2,), (5,)), START, Run(1, (5,), (10,), (5,))], "is under way"),
        ([Wait(7), Run(0, (2,), (5,)), START, Wait(7), COPY], "awaited already"),
        ([Wait(7), Run(0, (2,), (5,)), START, Run(0, (6,), (10,))], r"%6 is not defined"),
    ],
)
def test_bodies_that_are_refused(body: list[Instruction], message: str) -> None:
    with pytest.raises(InvalidProgramError, match=message):
        check(ring(3, body))


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        ({"carried": (Carried(7, ((0, 1),)),)}, "%3 is not defined"),
        ({"carried": (Carried(7, ((1, 0),)),)}, "has no output 1"),
        ({"carried": (Carried(7, ((0, 5),)),)}, "not distinct positions"),
        ({"carried": (Carried(7, ()),)}, "carried twice, or by no carry"),
        ({"carried": ()}, "awaited|never started"),
        ({"carried": (Carried(7, ((0, 0),)), Carried(7, ((0, 1),)))}, "carried twice"),
    ],
)
def test_loops_that_are_refused(loop: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidProgramError, match=message):
        check(ring(3, **loop))


def test_the_condition_reads_nothing_that_is_under_way() -> None:
    made = while_loop()
    (loop,) = made.body.instructions
    assert isinstance(loop, Loop)
    reading = Block((11, 12, 13), (Run(3, (11, 13), (14,)), Free((11, 12, 13))), (14,))
    wrong = replace(made, body=block((0, 1, 16), [replace(loop, condition=reading)], (8, 9)))
    with pytest.raises(InvalidProgramError, match="condition reads a carry that is under way"):
        check(wrong)


def test_a_carry_that_is_overwritten_is_read_by_nobody_else() -> None:
    """What the start reads becomes the other carry, which the next iteration halves in place."""
    body = block(
        (2, 3),
        [Run(1, (3,), (4,), (3,)), Wait(7), Run(2, (2, 4), (5,)), Free((2, 4)), START],
        (6, 5),
    )
    loop = Loop((0, 11), (8, 9), NOTHING, body, 2, (11,), carried=(Carried(7, ((0, 0),)),))
    made = replace(ring(2), slot_types=(F32,) * 12, body=block((0, 1), [Copy(1, 11), loop], (8, 9)))
    with pytest.raises(InvalidProgramError, match="consumed while event 7 reads it"):
        check(made)


def test_sends_and_receives_are_not_carried() -> None:
    made = ring(2)
    receive = Collective(Kind.RECV, (), (F32,), pairs=((0, 1),), channel=1, name="recv")
    steps = [Wait(7), Free((2,)), Start(0, (), (6,), 7, 1), COPY]
    wrong = replace(ring(2, steps), collectives=(receive,))
    with pytest.raises(InvalidProgramError, match="which no loop carries"):
        check(wrong)
    assert made.collectives == (RING,)
