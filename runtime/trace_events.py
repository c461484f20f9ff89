"""The rows of a trace, resolved: which segment ran where and when, which collective, what was left out.

Times of one rank. *Compute* is the time in which a segment runs on any of its devices, *communication* that
in which a collective is under way on any of its streams; communication without compute is *exposed*, the
rest *overlapped*. A collective's own exposed time is that part of it; where several are exposed at once,
each has it. A segment runs from when it was handed over, or the one before it on the device ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isnan
from typing import Any

import numpy as np

from stretto.collectives.ops import Collective

from .program import Segment
from .trace_file import ALL_ACTIVE, SET_UNIT, RankTrace
from .trace_file import Kind as Event

Interval = tuple[float, float]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > begin:
            found.append((begin, end))
    return found


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


class Covered:
    """How much of an interval is covered by disjoint intervals in order."""

    def __init__(self, disjoint: Sequence[Interval]) -> None:
        ends = np.array([end for _, end in disjoint])
        self._begins = np.array([begin for begin, _ in disjoint])
        self._ends = ends
        self._sums = np.concatenate([[0.0], np.cumsum(ends - self._begins)])

    def _until(self, at: float) -> float:
        index = int(np.searchsorted(self._begins, at))
        if not index:
            return 0.0
        return float(self._sums[index] - max(0.0, self._ends[index - 1] - at))

    def of(self, interval: Interval) -> float:
        return self._until(interval[1]) - self._until(interval[0])


@dataclass(frozen=True)
class Transfer:
    """A call of a collective: its times, the devices of this rank in it, the pairs that moved nothing."""

    program: str
    collective: Collective
    stream: int
    begin: float
    end: float
    devices: tuple[int, ...]
    skip: frozenset[int]
    exposed: float = 0.0

    @cached_property
    def pairs(self) -> list[tuple[int, tuple[int, int]]]:
        """Pairs, by number, that send from a device of this rank to another device."""
        return [
            (k, pair)
            for k, pair in enumerate(self.collective.pairs)
            if pair[0] in self.devices and pair[0] != pair[1]
        ]


@dataclass
class Measured:
    """One rank's trace with times resolved. Seconds on rank 0's clock."""

    trace: RankTrace
    segments: list[tuple[str, Segment, int, float, float]] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    left_out: list[tuple[str, Segment, int, float]] = field(default_factory=list)
    marks: list[tuple[str, str, int, float, float]] = field(default_factory=list)

    @cached_property
    def compute(self) -> list[Interval]:
        return union([(begin, end) for *_, begin, end in self.segments])

    @cached_property
    def communication(self) -> list[Interval]:
        return union([(t.begin, t.end) for t in self.transfers])

    @property
    def exposed(self) -> float:
        hidden = Covered(self.compute)
        return sum(end - begin - hidden.of((begin, end)) for begin, end in self.communication)

    def times(self) -> dict[str, float]:
        """Milliseconds."""
        whole = [t for i in (*self.compute, *self.communication) for t in i]
        communication = length(self.communication)
        return {
            "wall_ms": (max(whole) - min(whole)) * 1e3 if whole else 0.0,
            "compute_ms": length(self.compute) * 1e3,
            "communication_ms": communication * 1e3,
            "exposed_ms": self.exposed * 1e3,
            "overlapped_ms": (communication - self.exposed) * 1e3,
        }


def measure(trace: RankTrace) -> Measured:
    """Resolve a rank's events."""
    found = Measured(trace)
    events = trace.events[np.argsort(trace.events[:, 4], kind="stable")]
    by_device: dict[int, list[Any]] = defaultdict(list)
    transfers = []
    for kind, program_number, number, where, begin, end, extra in events.tolist():
        if not 0 <= int(program_number) < len(trace.programs):
            continue
        program = trace.programs[int(program_number)]
        local = trace.local[int(program_number)]
        index, place = int(number), int(where)
        match int(kind):
            case Event.SEGMENT:
                by_device[place].append([program, index, begin, end])
            case Event.LEFT_OUT:
                found.left_out.append((program.name, program.segments[index], place, begin))
            case Event.COLLECTIVE:
                sets, active = divmod(int(extra), SET_UNIT)
                transfers.append(
                    Transfer(
                        program.name,
                        program.collectives[index],
                        place,
                        begin,
                        end,
                        tuple(
                            logical
                            for position, (logical, _) in enumerate(local)
                            if active == ALL_ACTIVE or active >> position & 1
                        ),
                        trace.sets[sets - 1] if sets else frozenset(),
                    )
                )
            case Event.QUEUED | Event.AWAITED:
                what = "start" if int(kind) == Event.QUEUED else "wait"
                name = program.collectives[index].name
                found.marks.append((f"{what} {name}", program.name, place, begin, end))
            case Event.PROGRAM:
                name = f"{program.name}{' (failed)' if extra else ''}"
                found.marks.append((name, program.name, -1, begin, end))
    for ordinal, runs in by_device.items():
        ends = float("nan")
        for run in reversed(runs):  # no end is known: no later than the next one's
            run[3] = ends = ends if isnan(run[3]) else run[3]
        last = 0.0
        for program, index, begin, end in runs:
            end = begin if isnan(end) else end  # noqa: PLW2901
            found.segments.append(
                (program.name, program.segments[index], ordinal, min(max(begin, last), end), end)
            )
            last = max(last, end)
    hidden = Covered(found.compute)
    found.transfers = [
        replace(t, exposed=max(0.0, t.end - t.begin - hidden.of((t.begin, t.end))))
        for t in transfers
    ]
    return found
