"""Measured times of the segments of a program, on the devices of this process."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import Any

from stretto.collectives.ops import Kind

from ..engines.engine import Engine
from ..program import Program
from .frame import Hosted
from .lane import Lane

# Segments of loops are timed in each iteration, up to so many times in all.
MOST_TIMES = 4096

Seconds = tuple[float | None, ...]


class SegmentTimes:
    """Times of a program's segments, from the beginning of a run until it has ended on all local devices.

    Nothing else is under way meanwhile: a run begins when its operands are there, and the tasks of the
    streams are over. With sends and receives in the program the streams are left alone, since a peer may
    wait for a later one.
    """

    def __init__(self, program: Program, engine: Engine, lanes: Sequence[Lane]) -> None:
        self._engine = engine
        apart = any(c.kind in (Kind.SEND, Kind.RECV) for c in program.collectives)
        self._streams = [] if apart else [lane.stream for lane in lanes[: program.num_streams]]
        self._times: list[list[float]] = [[] for _ in program.segments]

    def seconds(self) -> Seconds:
        """The median of each segment."""
        return tuple(median(times) if times else None for times in self._times)

    def begin(self, registers: Sequence[Any]) -> float:
        """Wait until a segment can run undisturbed on these registers' arrays. Gives the time then."""
        for stream in self._streams:
            if not stream.idle:
                stream.wait(stream.submit(_nothing))
        self._await(registers)
        return perf_counter()

    def end(self, segment: int, began: float, registers: Sequence[Any]) -> None:
        """Wait until a segment with these results has ended on all devices, and note its time."""
        times = self._times[segment]
        if self._await(registers) and len(times) < MOST_TIMES:
            times.append(perf_counter() - began)

    def _await(self, registers: Sequence[Any]) -> bool:
        """Wait for arrays; whether there were any. Their errors arrive where they are used."""
        some = False
        for register in registers:
            if type(register) is Hosted:
                continue
            for array in register:
                if array is not None:
                    some = True
                    with suppress(Exception):
                        self._engine.block(array)
        return some


def _nothing() -> None:
    pass
