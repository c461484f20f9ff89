"""Slack: moves starts forward and waits back as far as that costs nothing, since predictions are inexact.

The search starts collectives just in time, and awaits them as soon as that frees memory. If compute is then
faster than predicted, or a message slower, a stream idles although it has work, or compute waits for data
that it does not need yet. So each start moves forward to the first cut at which its inputs exist, and each
wait moves back to the last cut before the first reader. A *cut* is a place between two segments.

Invariants: the order of collectives on a stream does not change, and no new cut is made. Predicted time and
peak memory do not grow. The result depends on graph and schedule alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .model import Graph
from .replay import Phase, Step, memory, replay
from .search import IssueOrder


def loosen(graph: Graph, found: IssueOrder, launch_s: float) -> IssueOrder:
    """The schedule with slack around its collectives."""
    loose = _Steps(graph, found.steps, found.timeline.peak_bytes)
    loose.hurry()
    loose.delay()
    steps = loose.steps()
    timeline = replay(graph, steps, launch_s)
    if timeline.seconds > found.timeline.seconds or timeline.peak_bytes > found.timeline.peak_bytes:
        return found
    return replace(found, steps=steps, timeline=timeline)


class _Steps:
    """An issue order that changes. Steps keep their numbers, ``order`` has them as they are issued."""

    def __init__(self, graph: Graph, steps: list[Step], limit: int) -> None:
        self.graph, self.given, self.limit = graph, steps, limit
        self.order = np.arange(len(steps))
        self.position = np.arange(len(steps))
        self.is_compute = np.array([phase is Phase.COMPUTE for _, phase in steps], dtype=bool)
        self.live = np.array(
            memory(graph, steps), dtype=np.int64
        )  # while each step runs, as issued
        count = len(graph.tasks)
        self.issue, self.done = [-1] * count, [-1] * count  # steps that begin a task, and end it
        for number, (index, phase) in enumerate(steps):
            if phase is not Phase.WAIT:
                self.issue[index] = number
            if phase is not Phase.START:
                self.done[index] = number

    def steps(self) -> list[Step]:
        return [self.given[number] for number in self.order]

    def hurry(self) -> None:
        """Move starts forward, first those issued first."""
        ahead: dict[int, int] = {}  # the last start on each stream
        for number, (index, phase) in enumerate(self.given):
            if phase is not Phase.START:
                continue
            task = self.graph.tasks[index]
            needs = [self.done[i] for i in task.before]
            if task.stream in ahead:
                needs.append(ahead[task.stream])
            ahead[task.stream] = number
            if task.arrives or task.crosses or any(need < 0 for need in needs):
                continue
            made = sum(self.graph.buffers[b] for b in task.writes) + task.extra_bytes
            first = max((int(self.position[need]) + 1 for need in needs), default=0)
            self._forward(number, first, made)

    def delay(self) -> None:
        """Move waits back, first those issued last."""
        for number, (index, phase) in reversed(list(enumerate(self.given))):
            task = self.graph.tasks[index]
            if phase is not Phase.WAIT or task.arrives:
                continue
            held = sum(self.graph.buffers[b] for b in task.reads if not self.graph.kept[b])
            readers = [int(self.position[self.issue[i]]) for i in task.after if self.issue[i] >= 0]
            self._back(number, min(readers, default=len(self.order)) - 1, held + task.extra_bytes)

    def _phase(self, position: int) -> Phase:
        return self.given[self.order[position]][1]

    def _forward(self, number: int, first: int, nbytes: int) -> None:
        """Move a start to the first cut from position ``first`` on from which its results fit into memory."""
        start = int(self.position[number])
        if start <= first:
            return
        fits = np.flatnonzero(self.live[first:start] + nbytes > self.limit)
        if len(fits):
            first += int(fits[-1]) + 1
        # A start cuts no segment before all compute, and next to another start or wait.
        computes = self.is_compute[self.order[first - 1 : start]] if first else None
        if computes is not None:
            inside = computes[:-1] & computes[1:]
            free = np.flatnonzero(~inside)
            if not len(free):
                return
            first += int(free[0])
        while first < start and self._phase(first) is Phase.START:
            first += 1
        if first == start:
            return
        live = int(self.live[first - 1]) if first else self.graph.base_bytes
        if live + nbytes > self.limit:
            return
        self._move(start, first)
        self.live[first + 1 : start + 1] += nbytes
        self.live[first] = live + nbytes

    def _back(self, number: int, last: int, nbytes: int) -> None:
        """Move a wait to the last cut up to position ``last`` until which its operands fit into memory."""
        start = int(self.position[number])
        if start >= last:
            return
        fits = np.flatnonzero(self.live[start + 1 : last + 1] + nbytes > self.limit)
        if len(fits):
            last = start + int(fits[0])
        computes = self.is_compute[self.order[start + 1 : last + 2]]
        if len(computes) < last + 1 - start:
            computes = np.append(computes, False)  # a wait at the end cuts no segment
        inside = computes[:-1] & computes[1:]
        free = np.flatnonzero(~inside)
        if not len(free):
            return
        last = start + 1 + int(free[-1])
        while last > start and self._phase(last) is Phase.WAIT:
            last -= 1
        if last == start:
            return
        self._move(start, last)
        self.live[start:last] += nbytes
        self.live[last] = self.live[last - 1]

    def _move(self, source: int, target: int) -> None:
        """Move a step from position ``source`` to ``target``; steps in between shift, with their memory."""
        low, high = min(source, target), max(source, target)
        by = 1 if source > target else -1
        for array in (self.order, self.live):
            array[low : high + 1] = np.roll(array[low : high + 1], by)
        self.position[self.order[low : high + 1]] = np.arange(low, high + 1)
