"""A trace's rows by runs of a program: what each run took, and how much of it was exposed.

Rows do not say to which run they belong. Where every run of a program does the same, each of its segments and
collectives occurs equally often in all of them, in the order of the runs; where not, there is no result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from .trace_events import Covered, Interval, Measured, union
from .trace_file import Kind


@dataclass(frozen=True)
class RunTimes:
    """Seconds. ``seconds``: from the beginning of the walk, or the end of the run before, to the end of all
    that the run does; ``exposed``: communication without compute."""

    seconds: float
    exposed: float


def runs_of(rank: Measured, number: int) -> list[RunTimes]:
    """The runs of ``rank.trace.programs[number]``, in their order; none where they differ in what they do."""
    program, events = rank.trace.programs[number], rank.trace.events
    walks = events[(events[:, 0] == Kind.PROGRAM) & (events[:, 1] == number)]
    begins = sorted(walks[:, 4].tolist())
    own = {id(item) for item in (*program.segments, *program.collectives)}
    compute: dict[Hashable, list[Interval]] = defaultdict(list)
    communication: dict[Hashable, list[Interval]] = defaultdict(list)
    for _, segment, ordinal, begin, end in rank.segments:
        if id(segment) in own:
            compute[id(segment), ordinal].append((begin, end))
    for t in rank.transfers:
        if id(t.collective) in own:
            communication[id(t.collective), t.stream].append((t.begin, t.end))
    computed, moved = ([sorted(listed) for listed in r.values()] for r in (compute, communication))
    if not begins or any(len(listed) % len(begins) for listed in computed + moved):
        return []
    hidden = Covered(rank.compute)
    found, last = [], 0.0
    for run, begin in enumerate(begins):
        moving = _of(run, len(begins), moved)
        ends = [end for _, end in moving + _of(run, len(begins), computed)]
        end = max(ends, default=begin)
        exposed = sum(e - b - hidden.of((b, e)) for b, e in union(moving))
        found.append(RunTimes(max(0.0, end - max(begin, last)), max(0.0, exposed)))
        last = max(last, end)
    return found


def _of(run: int, runs: int, rows: list[list[Interval]]) -> list[Interval]:
    """What belongs to a run, of rows in order of which each run has equally many."""
    found = []
    for listed in rows:
        each = len(listed) // runs
        found += listed[run * each : (run + 1) * each]
    return found
