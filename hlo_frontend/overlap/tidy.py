"""Removes cuts that gain less than the launch they cost, by moving their starts and waits to other cuts.

A *cut* is a group of starts and waits between two groups of compute steps. It ends a segment, and the next
one costs a launch. To remove a cut, its waits move to the cut before, and its starts to the cut before or to
the one after, whichever takes less time in the simulation. The cut stays if that takes longer.

A start moves to an earlier cut only if its inputs exist there. An earlier wait frees memory earlier, and a
later start takes memory later, so only earlier starts need more memory. The limit is checked at the end; if
it is exceeded, everything is done again without moving starts to earlier cuts. No cut is removed if compute
behind it would end later, even if the prediction has time for it: predictions are inexact.

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
    """The schedule without the cuts that cost more than they gain."""
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
    """Remove cuts. ``may_hurry``: whether starts may move to an earlier cut."""
    runs = _runs(steps)
    clock = _Clock(graph, launch_s)
    best = clock.seconds(runs)
    left = BUDGET
    position = 1 if runs and runs[0] and runs[0][0][1] is Phase.COMPUTE else 2
    while position < len(runs) - 1 and left > 0:
        clock.settle(runs, position - 2)  # runs before the previous cut do not change any more
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
                    position = 2  # there is a new cut before all compute
                break
        else:
            position += 2
    return [step for run in runs for step in run]


def _runs(steps: Sequence[Step]) -> list[Stretch]:
    """Groups of compute steps and cuts, in turn."""
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
    """The groups with one cut removed; None if dependences do not allow it. ``hurried``: whether its starts
    move to the cut before, and not to the one after."""
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
    """Simulates groups of steps. The state behind groups that do not change any more is kept."""

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
        """The first ``count`` groups do not change any more."""
        if count > self.passed:
            self.now = self._walk(runs[self.passed : count], self.end, self.free)
            self.passed = count

    def seconds(self, runs: Sequence[Stretch]) -> float:
        """The time of `replay`."""
        if self.repeats:
            steps = [step for run in runs for step in run]
            return replayed_seconds(self.graph, steps, self.launch_s)
        free = self.free.copy()
        return max([self._walk(runs[self.passed :], self.end.copy(), free), *free])

    def puts_off(self, runs: list[Stretch], tried: list[Stretch], position: int) -> bool:
        """Whether the compute behind the cut at ``position`` ends later in ``tried``, without the cut."""
        if self.repeats:
            return False  # an iteration has no begin to count from
        behind = len(runs) - position - 2  # groups behind the cut and the compute that follows it
        return self._reached(tried[: len(tried) - behind]) > self._reached(runs[: position + 2])

    def _reached(self, runs: Sequence[Stretch]) -> float:
        return self._walk(runs[self.passed :], self.end.copy(), self.free.copy())

    def _walk(self, runs: Sequence[Stretch], end: list[float], free: list[float]) -> float:
        """When compute ends. Sets ``end`` of each collective, and ``free`` of each stream."""
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
