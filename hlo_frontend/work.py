"""What a run of instructions computes, in all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from stretto.runtime.program import Branch, Instruction, Loop, Program, Run


class Work(NamedTuple):
    """What a run does, as of `Segment`: of branches the most; -1 for what is not known."""

    arithmetic: int
    flops: float
    iterations: int


def work_of(program: Program, instructions: Iterable[Instruction]) -> Work:
    """What a run of these instructions of a program does."""
    found = [_work(program, i) for i in instructions if isinstance(i, Run | Loop | Branch)]
    return Work(*map(_total, zip(*found, strict=True))) if found else Work(0, 0.0, 0)


def _work(program: Program, instruction: Run | Loop | Branch) -> Work:
    if isinstance(instruction, Run):
        segment = program.segments[instruction.segment]
        return Work(segment.arithmetic, segment.flops, segment.iterations)
    if isinstance(instruction, Branch):
        branches = [work_of(program, b.instructions) for b in instruction.branches]
        return Work(*(-1 if min(b) < 0 else max(b) for b in zip(*branches, strict=True)))
    once, trips = work_of(program, instruction.body.instructions), instruction.trip_count
    if trips is None:
        return once._replace(iterations=-1)
    arithmetic, flops, iterations = (-1 if w < 0 else w * trips for w in once)
    return Work(int(arithmetic), flops, int(_total([iterations, trips])))


def _total(numbers: Sequence[Any]) -> Any:
    """Their sum; -1, if one of them is not known."""
    return -1 if min(numbers, default=0) < 0 else sum(numbers)
