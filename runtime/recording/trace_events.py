"""The rows of a trace, resolved: which segment ran where and when, which collective, what was left out.

Times of one rank. *Compute* is the time in which a segment runs on any of its devices, *communication* that
in which a collective is under way on any of its streams; communication without compute is *exposed*, the
rest *overlapped*. A collective's own exposed time is that part of it; where several are exposed at once,
each has it. A segment runs from when it was handed over, or the one before it on the device ended.

Where the end of a stretch of segments was not seen as it came, the stretch is taken to be as long as the
median of those of the same segments of which it was: within what was seen of this one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, isnan
from statistics import median

import numpy as np

from stretto.collectives.ops import Collective

from ..program import Program, Segment
from .trace_file import ALL_ACTIVE, SET_UNIT, RankTrace
from .trace_file import Kind as Event

Interval = tuple[float, float]
# Places of marks that are no streams: programs that were walked, and called without (perhaps beside) a walk.
WALKED, CALLED = -1, -2


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

    @property
    def moves(self) -> bool:
        """Whether anything is sent or received here: a permute of which all pairs here are skipped is not."""
        here = {
            k
            for k, (source, target) in enumerate(self.collective.pairs)
            if source != target and (source in self.devices or target in self.devices)
        }
        return not here or not here <= self.skip


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
    by_device: dict[int, list[_SegmentRow]] = defaultdict(list)
    transfers = []
    for kind, program_number, number, where, begin, end, extra in events.tolist():
        if not 0 <= int(program_number) < len(trace.programs):
            continue
        program = trace.programs[int(program_number)]
        local = trace.local[int(program_number)]
        index, place = int(number), int(where)
        match int(kind):
            case Event.SEGMENT:
                by_device[place].append(_SegmentRow(program, index, begin, end, extra))
            case Event.CALLED:
                by_device[place].append(_SegmentRow(program, index, begin, end, 0.0))
                found.marks.append((program.name, program.name, CALLED, begin, end))
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
            case Event.AWAITED:
                name, queued = program.collectives[index].name, begin - extra
                found.marks.append((f"start {name}", program.name, place, queued, queued))
                found.marks.append((f"wait {name}", program.name, place, begin, end))
            case Event.PROGRAM:
                name = f"{program.name}{' (failed)' if extra else ''}"
                found.marks.append((name, program.name, CALLED if place else WALKED, begin, end))
    found.segments = _ended(by_device)
    hidden = Covered(found.compute)
    found.transfers = [
        replace(t, exposed=max(0.0, t.end - t.begin - hidden.of((t.begin, t.end))))
        for t in transfers
    ]
    return found


@dataclass(slots=True)
class _SegmentRow:
    """A segment's row. ``unseen``: how long before its end it was last seen to run."""

    program: Program
    index: int
    begin: float
    end: float
    unseen: float

    @property
    def segment(self) -> Segment:
        return self.program.segments[self.index]


def _ended(
    by_device: Mapping[int, Sequence[_SegmentRow]],
) -> list[tuple[str, Segment, int, float, float]]:
    """When each segment ran, of the rows of each device in the order in which they were handed over."""
    stretches = {ordinal: _stretches(runs) for ordinal, runs in by_device.items()}
    lengths: dict[tuple[tuple[int, int], ...], list[float]] = defaultdict(list)
    for listed in stretches.values():
        last, seen = 0.0, True
        for stretch in listed:
            end, begin = stretch[-1].end, stretch[0].begin
            if not stretch[-1].unseen and (seen or begin >= last):
                lengths[_name(stretch)].append(end - max(begin, last))
            last, seen = end, not stretch[-1].unseen
    usual = {name: median(known) for name, known in lengths.items()}
    found = []
    for ordinal, listed in stretches.items():
        last = 0.0
        for stretch in listed:
            end, unseen = stretch[-1].end, stretch[-1].unseen
            if unseen:
                likely = max(stretch[0].begin, last) + usual.get(_name(stretch), inf)
                end = min(max(likely, end - unseen), end)
            for ran in stretch:  # of all but the last no end is known: no later than that
                begin = min(max(ran.begin, last), end)
                found.append((ran.program.name, ran.segment, ordinal, begin, end))
                last = end
    return found


def _stretches(runs: Sequence[_SegmentRow]) -> list[list[_SegmentRow]]:
    """Stretches of rows, each up to a known end. Rows behind the last are taken to end as they begin."""
    found: list[list[_SegmentRow]] = [[]]
    for ran in runs:
        found[-1].append(ran)
        if not isnan(ran.end):
            found.append([])
    if not found[-1]:
        return found[:-1]
    last = found[-1][-1]
    last.end, last.unseen = last.begin, inf
    return found


def _name(stretch: Sequence[_SegmentRow]) -> tuple[tuple[int, int], ...]:
    return tuple((id(ran.program), ran.index) for ran in stretch)
