"""Programs as text and bytes, and the checker: exact round trips, and a message for each violation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.handmade import F32, PRED, S32, U32, all_reduce, block, permute, program, segment
from support.program_parser import ProgramTextError, parse

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import ELEMENT_TYPES, TensorType
from stretto.runtime.errors import InvalidProgramError
from stretto.runtime.program import (
    Block,
    Branch,
    Copy,
    Free,
    LogicalId,
    Loop,
    Prediction,
    Program,
    Run,
    Segment,
    Start,
    Wait,
    to_text,
)
from stretto.runtime.program.check import check
from stretto.runtime.program.codec import VERSION, from_bytes, to_bytes

TYPES = st.builds(
    TensorType,
    st.sampled_from(sorted(ELEMENT_TYPES)),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
NAMES = st.text(max_size=8)
COUNTS = st.integers(0, 2**40)
INDICES = st.lists(st.integers(0, 20), max_size=4).map(tuple)
PAIRS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple)
TYPE_LISTS = st.lists(TYPES, max_size=3).map(tuple)
SEGMENTS = st.builds(
    Segment,
    TYPE_LISTS,
    TYPE_LISTS,
    st.one_of(st.binary(max_size=20), st.text(max_size=20).map(str.encode)),
    INDICES,
    st.integers(-1, 99),
    st.floats(allow_nan=False),
    NAMES,
)
COLLECTIVES = st.builds(
    Collective,
    st.sampled_from(Kind),
    TYPE_LISTS,
    TYPE_LISTS,
    st.lists(INDICES, max_size=3).map(tuple),
    PAIRS,
    st.none() | st.sampled_from(Reduction),
    st.none() | st.integers(0, 5),
    st.integers(-1, 3),
    st.booleans(),
    st.booleans(),
    COUNTS,
    PAIRS,
    NAMES,
    NAMES,
)


@st.composite
def _programs(draw: st.DrawFn) -> Program:
    """Programs of any form, sensible or not, whose every slot is numbered."""
    types: list[TensorType] = []

    def new() -> int:
        types.append(draw(TYPES))
        return len(types) - 1

    def slots(count: int = 3) -> tuple[int, ...]:
        return tuple(new() for _ in range(draw(st.integers(0, count))))

    def blocks(depth: int) -> Block:
        made = [instruction(depth) for _ in range(draw(st.integers(0, 3)))]
        return Block(slots(), tuple(made), draw(INDICES))

    def instruction(depth: int) -> Any:
        kind = draw(st.integers(0, 7 if depth else 5))
        if kind == 0:
            return Run(draw(COUNTS), draw(INDICES), slots(), draw(INDICES))
        if kind == 1:
            return Start(draw(COUNTS), draw(INDICES), slots(), draw(COUNTS), draw(COUNTS))
        if kind == 2:
            return Wait(draw(COUNTS))
        if kind == 3:
            return Copy(draw(COUNTS), new())
        if kind == 4:
            return LogicalId(draw(NAMES), new())
        if kind == 5:
            return Free(draw(INDICES))
        if kind == 6:
            trip_count = draw(st.none() | COUNTS)
            return Loop(
                draw(INDICES),
                slots(),
                blocks(depth - 1),
                blocks(depth - 1),
                trip_count,
                draw(INDICES),
                draw(NAMES),
                draw(NAMES),
            )
        branches = tuple(blocks(depth - 1) for _ in range(draw(st.integers(0, 2))))
        return Branch(
            draw(COUNTS),
            tuple(draw(INDICES) for _ in branches),
            slots(),
            branches,
            draw(NAMES),
            draw(NAMES),
        )

    body = blocks(2)
    slots()
    return Program(
        draw(NAMES),
        draw(COUNTS),
        draw(COUNTS),
        tuple(types),
        tuple(draw(st.lists(SEGMENTS, max_size=2))),
        tuple(draw(st.lists(COLLECTIVES, max_size=2))),
        body,
        draw(INDICES),
        draw(COUNTS),
        draw(st.none() | st.builds(Prediction, *[st.floats(0.0, 1e9)] * 3)),
    )


def _exactly(left: Program, right: Program) -> None:
    """Equal, names of segments and the prediction included (which ``==`` leaves out)."""
    assert left == right
    assert [s.name for s in left.segments] == [s.name for s in right.segments]
    assert left.predicted == right.predicted


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(_programs())
def test_text_round_trip(made: Program) -> None:
    _exactly(parse(to_text(made)), made)


def sample() -> Program:
    """A program with one of everything, that passes the checks."""
    loop = Loop(
        (2,),
        (8,),
        block((3,), [Run(1, (3,), (4,)), Free((3,))], (4,)),
        block(
            (5,), [Run(0, (5,), (6,), (5,)), Start(0, (6,), (7,), 1, 1), Wait(1), Free((6,))], (7,)
        ),
        None,
        (2,),
        "while.1",
        "train.py:3",
    )
    branch = Branch(
        9,
        ((8,), ()),
        (13,),
        (block((10,), [Copy(10, 11)], (11,)), block((), [], (1,))),
        "cond",
    )
    return program(
        [F32, F32, F32, F32, PRED, F32, F32, F32, F32, S32, F32, F32, U32, F32],
        block(
            (0,),
            [
                Start(1, (0,), (1,), 0),
                Copy(0, 2),
                Wait(0),
                loop,
                Run(2, (8,), (9,)),
                LogicalId("partition", 12),
                branch,
                Free((8, 9)),
            ],
            (13, 12),
        ),
        devices=2,
        segments=[
            segment("increment", donated=(0,)),
            segment("below", (F32,), (PRED,)),
            segment("parity", (F32,), (S32,)),
            dataclasses.replace(segment("halve"), sites=(0,), iterations=3, calls=(3,)),
        ],
        collectives=[all_reduce((0, 1)), permute((0, 1), valid_iterations=((0, 3),))],
        streams=2,
    )


def test_the_sample_is_right() -> None:
    check(sample())
    _exactly(parse(to_text(sample())), sample())
    _exactly(from_bytes(to_bytes(sample())), sample())


def test_equal_programs_give_equal_bytes() -> None:
    assert to_bytes(sample()) == to_bytes(parse(to_text(sample())))


def test_text_is_readable() -> None:
    body = block(
        (0,), [Run(0, (0,), (1,), (0,)), Start(0, (1,), (2,), 0), Wait(0), Free((1,))], (2,)
    )
    made = program(
        [F32] * 3,
        body,
        devices=4,
        segments=[segment("half", donated=(0,))],
        collectives=[all_reduce((0, 1, 2, 3), name="psum.1")],
        donated=(0,),
        name="step",
    )
    assert to_text(made) == (
        'program "step" replicas 1 partitions 4 streams 1 donated (0)\n'
        'segment "half" (f32[4]) -> (f32[4]) donated (0) module text "half"\n'
        'collective all-reduce "psum.1" (f32[4]) -> (f32[4]) groups {{0,1,2,3}} reduction add\n'
        "body (%0:f32[4]) {\n"
        "  run 0 (%0) -> (%1:f32[4]) donated (%0)\n"
        "  start 0 (%1) -> (%2:f32[4]) event 0 stream 0\n"
        "  wait 0\n"
        "  free (%1)\n"
        "  yield (%2)\n"
        "}\n"
    )
    assert 'module omitted "4 bytes, sha256 ' in str(made)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.replace("wait 0", "wiat 0"), "line 7: expected an instruction, found wiat"),
        (lambda t: t.replace("-> (%1", "(%1"), "line 5: expected '->', found ("),
        (lambda t: t.replace("f32[4]", "f99[4]"), r"expected a type, found f99\[4\]"),
        (lambda t: t[:-4], "expected .*, found the end"),
        (lambda t: t + "more", "expected the end, found more"),
        (lambda t: t.replace("%3", "%30"), "not numbered from 0 without gaps"),
        (lambda t: t.replace("wait 0", "wait x"), "expected a number, found x"),
        (lambda t: "", "line 1: expected 'program', found the end"),
    ],
)
def test_text_that_is_wrong(change: Callable[[str], str], message: str) -> None:
    with pytest.raises(ProgramTextError, match=message.replace("found (", r"found \(")):
        parse(change(to_text(_simple())))


def _simple() -> Program:
    return program(
        [F32] * 4,
        block(
            (0,),
            [Run(0, (0,), (1,)), Start(0, (1,), (2,), 0), Wait(0), Run(0, (2,), (3,))],
            (3,),
        ),
        devices=2,
        segments=[segment("increment")],
        collectives=[all_reduce((0, 1))],
    )


@given(st.integers(min_value=0), st.integers(1, 255))
@settings(max_examples=50, deadline=None)
def test_damaged_bytes_are_refused(position: int, flip: int) -> None:
    data = bytearray(to_bytes(_simple()))
    data[position % len(data)] ^= flip
    with pytest.raises(InvalidProgramError):
        from_bytes(bytes(data))


def test_bytes_of_another_format_or_cut_off() -> None:
    data = to_bytes(_simple())
    other = data[:4] + (VERSION + 1).to_bytes(2, "little") + data[6:]
    with pytest.raises(InvalidProgramError, match=f"has format {VERSION + 1}, this stretto reads"):
        from_bytes(other)
    for length in (0, 3, 9, 40, len(data) - 1):
        with pytest.raises(InvalidProgramError):
            from_bytes(data[:length])


def test_bytes_of_a_program_that_is_wrong_are_refused() -> None:
    with pytest.raises(InvalidProgramError, match="%1 is not defined"):
        from_bytes(to_bytes(_with([])))


def _with(
    instructions: list[Any],
    results: tuple[int, ...] = (1,),
    parameters: tuple[int, ...] = (0,),
    **more: Any,
) -> Program:
    """A program of this body, over two segments, two collectives and some slots."""
    made = program(
        [F32, F32, F32, F32, PRED, S32, U32, TensorType("f32", (9,))],
        block(parameters, instructions, results),
        devices=2,
        segments=[segment("increment"), segment("halve", donated=(0,)), segment("add", (F32, F32))],
        collectives=[all_reduce((0, 1)), permute((0, 1))],
    )
    return dataclasses.replace(made, **more)


def _loop(body: Block, donated: tuple[int, ...] = (), inputs: tuple[int, ...] = (0,)) -> Loop:
    return Loop(inputs, (1, 7)[: len(inputs)], Block((), (), ()), body, 3, donated)


_RUN = Run(0, (0,), (1,))
_SUM = all_reduce((0, 1))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (_with([]), "body: %1 is not defined"),
        (_with([Run(0, (2,), (1,))]), r"instruction 0 \(run\): %2 is not defined"),
        (_with([Run(0, (99,), (1,))]), "there is no slot %99"),
        (_with([Run(7, (0,), (1,))]), "there is no segment 7"),
        (_with([_RUN, Run(0, (0,), (1,))]), "%1 is written twice, first by .*instruction 0"),
        (_with([Run(0, (0,), (0,))]), "%0 is written twice, first by a parameter of body"),
        (_with([Free((0,)), _RUN]), "%0 is read after it was freed"),
        (_with([Free((0, 0))]), "%0 is read after it was freed"),
        (_with([_RUN, Free((1,))]), "body: %1 is read after it was freed"),
        (_with([Run(0, (0,), (7,))]), r"outputs are \(f32\[9\]\), not \(f32\[4\]\)"),
        (_with([Run(2, (0,), (1,))]), r"inputs are \(f32\[4\]\), not \(f32\[4\], f32\[4\]\)"),
        (_with([Run(1, (0,), (1,))]), "donates nothing, but its segment %0"),
        (_with([Run(1, (0,), (1,), (0,))]), "parameter %0 is consumed, but the caller does not"),
        (
            _with([Run(1, (0,), (1,), (0,)), Run(0, (0,), (2,))], donated=(0,)),
            "%0 is read after it was donated",
        ),
        (
            _with(
                [Run(0, (0, 0), (1,), (0,))],
                segments=(segment("add", (F32, F32), donated=(0,)),),
                donated=(0,),
            ),
            "%0 is donated and used by another input as well",
        ),
        (_with([Start(0, (0,), (1,), 0)]), "event 0 is started but not awaited in this block"),
        (_with([Wait(3)]), "event 3 was never started"),
        (
            _with([Start(0, (0,), (1,), 0), Wait(0), Wait(0)]),
            "event 0 was awaited already, or started in another block",
        ),
        (
            _with([Start(0, (0,), (1,), 0), Run(0, (1,), (2,)), Wait(0)]),
            r"instruction 1 \(run\): %1 is not defined",
        ),
        (
            _with([Start(0, (0,), (1,), 0), Free((0,)), Wait(0)]),
            "%0 is freed before the wait of event 0, which reads it",
        ),
        (
            _with([Start(0, (0,), (1,), 0), Wait(0), Start(0, (0,), (2,), 0), Wait(0)]),
            "event 0 is started twice",
        ),
        (_with([Start(5, (0,), (1,), 0), Wait(0)]), "there is no collective 5"),
        (_with([Start(0, (0,), (1,), 0, 1), Wait(0)]), "there is no stream 1"),
        (_with([Copy(0, 7)], (7,)), r"outputs are \(f32\[9\]\), not \(f32\[4\]\)"),
        (_with([LogicalId("device", 6)], (6,)), "unknown kind of id 'device'"),
        (_with([LogicalId("replica", 5)], (5,)), r"outputs are \(s32\[\]\), not \(u32\[\]\)"),
        (_with([Block((), (), ())]), "unknown instruction"),
        (_with([_RUN], num_replicas=0), "must be at least 1"),
        (_with([_RUN], donated=(3,)), r"donated inputs \(3,\) are not distinct positions among 1"),
        (_with([_RUN], slot_types=(TensorType("f31", ()),)), "slot %0 has the impossible type"),
        (_with([_RUN], collectives=(all_reduce((0, 5)),)), "names device 5, but there are 2"),
        (_with([_RUN], collectives=(all_reduce((0, 1), (1,)),)), "a device is in two groups"),
        (_with([_RUN], collectives=(all_reduce(()),)), "has an empty group"),
        (
            _with([_RUN], collectives=(dataclasses.replace(_SUM, pairs=((0, 1),)),)),
            "must be described by groups",
        ),
        (
            _with([_RUN], collectives=(dataclasses.replace(_SUM, reduction=None),)),
            "needs either a reduction or a reducer",
        ),
        (
            _with([_RUN], collectives=(dataclasses.replace(_SUM, reduction=None, reducer=9),)),
            "there is no reducer segment 9",
        ),
        (
            _with([_RUN], collectives=(dataclasses.replace(_SUM, reduction=None, reducer=0),)),
            r"its reducer is \(f32\[4\]\) -> \(f32\[4\]\), not \(f32\[4\], f32\[4\]\)",
        ),
        (
            _with([_RUN], collectives=(permute((0, 1), valid_iterations=((0, 1), (0, 1))),)),
            "has 2 valid iterations for 1 pairs",
        ),
        (
            _with([_RUN], segments=(dataclasses.replace(segment("increment"), sites=(0,)),)),
            "has 0 counts of calls for 1 sites",
        ),
        (_with([_loop(block((2,), [], (5,)))]), "results of the body are"),
        (_with([_loop(block((5,), [], (5,)))]), "parameters of the body are"),
        (
            _with([_loop(block((2,), [Free((0,))], (2,)))]),
            "%0 belongs to a block around this one and cannot be freed here",
        ),
        (
            _with([_loop(block((2,), [Run(1, (2,), (3,), (2,))], (3,)))]),
            "its body consumes %0, which it does not donate",
        ),
        (
            _with([_loop(block((2,), [Run(1, (2,), (3,), (2,))], (0,)), (0,))], donated=(0,)),
            "%0, from outside the body, becomes a carry that is consumed",
        ),
        (_with([_loop(block((2,), [], (2,)), (3,))]), "donates %3, which are not all among"),
        (
            _with(
                [
                    Loop(
                        (0, 0),
                        (1, 6),
                        Block((), (), ()),
                        block((2, 3), [Run(1, (2,), (5,), (2,))], (5, 3)),
                        3,
                        (0,),
                    )
                ],
                slot_types=(F32,) * 8,
                donated=(0,),
            ),
            "%0 enters a consumed carry and another one as well",
        ),
        (
            _with(
                [
                    Loop(
                        (0, 4),
                        (1, 6),
                        Block((), (), ()),
                        block((2, 3), [Run(1, (2,), (5,), (2,))], (5, 5)),
                        3,
                        (0,),
                    )
                ],
                parameters=(0, 4),
                slot_types=(F32,) * 8,
                donated=(0,),
            ),
            "%5 leaves the body for a consumed carry and another one as well",
        ),
        (
            _with([Loop((0,), (1,), block((2,), [], (2,)), block((3,), [], (3,)))]),
            r"results of the condition are \(f32\[4\]\), not \(pred\[\]\)",
        ),
        (
            _with([Loop((0,), (1,), Block((), (), ()), block((3,), [], (3,)), -2)]),
            "trip count -2",
        ),
        (_with([Branch(0, ((),), (1,), (block((), [], (0,)),))]), r"is f32\[4\], not pred\[\] or"),
        (
            _with([Branch(4, ((),), (1,), (block((), [], (0,)),))], parameters=(0, 4)),
            "a pred.. selector needs 2 branches, there are 1",
        ),
        (
            _with([Branch(5, (), (1,), (block((), [], (0,)),))], parameters=(0, 5)),
            "1 branches, inputs for 0",
        ),
        (
            _with(
                [Branch(5, ((0,),), (1,), (block((2,), [Run(1, (2,), (3,), (2,))], (3,)),))],
                parameters=(0, 5),
            ),
            "its branch 0 consumes its parameter %2",
        ),
        (
            _with([Branch(5, ((0,),), (1,), (block((4,), [], (0,)),))], parameters=(0, 5)),
            "parameters of branch 0 are",
        ),
    ],
)
def test_violations(made: Program, message: str) -> None:
    with pytest.raises(InvalidProgramError, match=message):
        check(made)


def test_slots_of_a_block_end_with_it() -> None:
    inner = block((2,), [Run(0, (2,), (3,))], (3,))
    with pytest.raises(InvalidProgramError, match="body: %3 is not defined"):
        check(_with([_loop(inner)], (3,)))
