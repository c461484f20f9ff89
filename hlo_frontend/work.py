"""What a run of instructions computes, in all, and how often it starts what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from stretto.runtime.program import Branch, Instruction, Loop, Program, Run, Start


class Work(NamedTuple):
    """What a run does, as of `Segment`: of branches the most; -1 for what is not known."""

    arithmetic: int
    flops: float
    iterations: int


def work_of(program: Program, instructions: Iterable[Instruction]) -> Work:
    """What a run of these instructions of a program does."""
    found = [_work(program, i) for i in instructions if isinstance(i, Run | Loop | Branch)]
    return Work(*map(_total, zip(*found, strict=True))) if found else Work(0, 0.0, 0)


def calls_of(instructions: Iterable[Instruction], entered: int = 1) -> Iterator[tuple[Start, int]]:
    """Every start, and how often it is made, at most, where these instructions are ``entered`` so often; -1
    if that is not known."""
    for instruction in instructions:
        if isinstance(instruction, Start):
            yield instruction, entered
        elif isinstance(instruction, Branch):
            for branch in instruction.branches:
                yield from calls_of(branch.instructions, entered)
        elif isinstance(instruction, Loop):
            known = instruction.trip_count is not None and entered >= 0
            times = entered * (instruction.trip_count or 0) if known else -1
            for block in (instruction.condition, instruction.body):
                yield from calls_of(block.instructions, times)


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
