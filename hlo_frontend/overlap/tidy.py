"""Fewer cuts: starts and waits that interrupt compute for less than a launch are moved to another cut.

A *cut* is a run of starts and waits between two runs of compute; it ends a segment and costs the launch of
the next. A cut is dissolved by moving its waits to the cut before and its starts to the one before or the
one after, whichever takes less time in the replay; it stays where that takes more.

A start moves forward only as far as its inputs are there, and a wait only backward: what is waited for
earlier frees memory earlier, what is started later takes it later. Starts that move forward take memory
earlier; the limit is checked in the end, and such moves are undone where it is not kept. No compute is put
off for it, even where there would be time for it later: that time may not come.

Invariant: the work is bounded by a count of steps visited, so that all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .model import Graph
from .replay import Phase, Step, replay, replayed_seconds
from .search import IssueOrder

# Steps that the replays of one schedule may visit in all.
BUDGET = 400_000


def tidy(graph: Graph, found: IssueOrder, launch_s: float, memory_limit: float) -> IssueOrder:
    """The schedule with the cuts dissolved that cost more than they gain."""
    for may_hurry in (True, False):
        steps = _dissolve(graph, found.steps, launch_s, may_hurry)
        timeline = replay(graph, steps, launch_s)
        fits = timeline.peak_bytes <= max(memory_limit, found.timeline.peak_bytes)
        if fits and timeline.seconds <= found.timeline.seconds:
            return replace(found, steps=steps, timeline=timeline)
    return found


# Steps that are all compute, or all starts and waits: a cut.
Stretch = list[Step]


def _dissolve(graph: Graph, steps: Sequence[Step], launch_s: float, may_hurry: bool) -> list[Step]:
    """``may_hurry``: whether starts may move forward."""
    runs = _runs(steps)
    clock = _Clock(graph, launch_s)
    best = clock.seconds(runs)
    left = BUDGET
    position = 1 if runs and runs[0] and runs[0][0][1] is Phase.COMPUTE else 2
    while position < len(runs) - 1 and left > 0:
        clock.settle(runs, position - 2)  # what is before the cut that comes before
        for hurried in (True, False) if may_hurry else (False,):
            tried = _without(graph, runs, position, hurried)
            if tried is None:
                continue
            left -= len(steps)
            if clock.puts_off(runs, tried, position):
                continue
            time = clock.seconds(tried)
            if time <= best:
                runs, best = tried, time
                if position == 1 < len(runs) and runs[1][0][1] is Phase.COMPUTE:
                    position = 2  # a cut was put before all compute
                break
        else:
            position += 2
    return [step for run in runs for step in run]


def _runs(steps: Sequence[Step]) -> list[Stretch]:
    """Runs of compute and cuts, in turn."""
    runs: list[Stretch] = []
    for step in steps:
        is_compute = step[1] is Phase.COMPUTE
        if not runs or (runs[-1][0][1] is Phase.COMPUTE) != is_compute:
            runs.append([])
        runs[-1].append(step)
    return runs


def _without(
    graph: Graph, runs: list[Stretch], position: int, hurried: bool
) -> list[Stretch] | None:
    """The runs with one cut dissolved; None where that cannot be."""
    before, cut, after = runs[position - 1], runs[position], runs[position + 1]
    inside = {index for index, _ in before}
    earlier: list[Step] = []
    later: list[Step] = []
    moved: set[int] = set()  # starts that go to the next cut
    for step in cut:
        index, phase = step
        needs = graph.tasks[index].before
        if phase is Phase.WAIT:
            if index in moved:
                if any(index in graph.tasks[i].before for i, _ in after):
                    return None
                later.append(step)
            else:
                earlier.append(step)
        elif hurried:
            if inside.intersection(needs) or moved.intersection(needs):
                return None
            earlier.append(step)
        else:
            moved.add(index)
            later.append(step)
    first, last = runs[: position - 1], runs[position + 2 :]
    merged = [*before, *after]
    if earlier:
        first = [*first[:-1], [*first[-1], *earlier]] if first else [earlier]
    if later:
        last = [[*later, *last[0]], *last[1:]] if last else [later]
    return [*first, merged, *last]


class _Clock:
    """When compute and the streams get through runs of steps. What has been passed for good is kept."""

    def __init__(self, graph: Graph, launch_s: float) -> None:
        self.graph, self.launch_s = graph, launch_s
        self.took = [task.seconds for task in graph.tasks]
        self.stream = [task.stream for task in graph.tasks]
        self.repeats = any(task.crosses for task in graph.tasks)
        self.passed = 0  # runs
        self.now = 0.0
        self.end = [0.0] * len(graph.tasks)
        self.free = [0.0] * len(graph.streams)

    def settle(self, runs: Sequence[Stretch], count: int) -> None:
        """The first ``count`` runs stay as they are from now on."""
        if count > self.passed:
            self.now = self._walk(runs[self.passed : count], self.end, self.free)
            self.passed = count

    def seconds(self, runs: Sequence[Stretch]) -> float:
        """The time of `replay`, without the rest of it."""
        if self.repeats:
            steps = [step for run in runs for step in run]
            return replayed_seconds(self.graph, steps, self.launch_s)
        free = self.free.copy()
        return max([self._walk(runs[self.passed :], self.end.copy(), free), *free])

    def puts_off(self, runs: list[Stretch], tried: list[Stretch], position: int) -> bool:
        """Whether compute on both sides of the cut at ``position`` ends later without it, in ``tried``."""
        if self.repeats:
            return False  # an iteration has no begin to count from
        behind = len(runs) - position - 2  # runs behind both, as many as before
        return self._reached(tried[: len(tried) - behind]) > self._reached(runs[: position + 2])

    def _reached(self, runs: Sequence[Stretch]) -> float:
        return self._walk(runs[self.passed :], self.end.copy(), self.free.copy())

    def _walk(self, runs: Sequence[Stretch], end: list[float], free: list[float]) -> float:
        """When compute gets through the runs; ``end`` is told of each collective, ``free`` of each stream."""
        took, stream, clock = self.took, self.stream, self.now
        for run in runs:
            if run[0][1] is Phase.COMPUTE:
                clock += self.launch_s
                for index, _ in run:
                    clock += took[index]
                continue
            for index, phase in run:
                if phase is Phase.WAIT:
                    if end[index] > clock:  # noqa: PLR1730, it is walked often
                        clock = end[index]
                else:
                    lane = stream[index]
                    begin = free[lane] if free[lane] > clock else clock
                    end[index] = free[lane] = begin + took[index]
        return clock
