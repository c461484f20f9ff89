"""How much a program computes, by its text: runs of segments, and their floating point operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from . import ENDLESS, Block, Branch, Loop, Program, Run
from .valid import Bounds


@dataclass(frozen=True)
class Work:
    """Runs of segments on all devices and their floating point operations, and those of them left out.

    A loop of unknown length counts with the iterations that its runs name, once if they name none.
    """

    runs: int = 0
    skipped_runs: int = 0
    flops: float = 0.0
    skipped_flops: float = 0.0


def work(program: Program) -> Work:
    """The `Work` of one execution, from the program's text; all branches count."""
    found = Work()
    for run, iterations, entries in _repeated(program.body, 1, 1):
        flops = max(program.segments[run.segment].flops, 0.0)
        whole = iterations * entries * program.num_devices
        left = entries * sum(
            iterations - sum(lo <= i <= hi for i in range(iterations) for lo, hi in _pairs(bounds))
            for bounds in run.valid
        )
        found = Work(
            found.runs + whole,
            found.skipped_runs + left,
            found.flops + flops * whole,
            found.skipped_flops + flops * left,
        )
    return found


def _pairs(bounds: Bounds) -> list[tuple[int, int]]:
    return list(zip(bounds[::2], bounds[1::2], strict=True))


def _repeated(block: Block, iterations: int, entries: int) -> Iterator[tuple[Run, int, int]]:
    """Every `Run`, with the iterations of the loop around it and how often that loop is entered."""
    for instruction in block.instructions:
        if isinstance(instruction, Run):
            yield instruction, iterations, entries
        elif isinstance(instruction, Loop):
            trips = instruction.trip_count
            if trips is None:
                yield from _repeated(instruction.condition, 1, entries * iterations)
                trips = 1 + _last_named(instruction.body)
            yield from _repeated(instruction.body, trips, entries * iterations)
        elif isinstance(instruction, Branch):
            for branch in instruction.branches:
                yield from _repeated(branch, iterations, entries)


def _last_named(block: Block) -> int:
    """The last iteration that a `Run` of the block names in its ``valid``."""
    known = [
        last
        for instruction in block.instructions
        if isinstance(instruction, Run)
        for bounds in instruction.valid
        for last in bounds[1::2]
        if last < ENDLESS
    ]
    return max(known, default=0)
