"""Simulates an issue order if collectives slow down compute, because the same cores move the data.

Each collective in flight takes its link's ``busy`` share of the cores. Compute beside collectives runs at 1
minus the sum of their shares, at worst not at all. Collectives take as long as in `replay`, so less of them
is exposed, since compute beside them takes longer.

The search for an order uses `replay` instead; decisions between orders and all reports use this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .model import Graph
from .replay import COMPUTE, START, WAIT, Clock, Step, Timeline, replay, timeline
from .search import IssueOrder


def replay_shared(graph: Graph, steps: Sequence[Step], launch_s: float) -> Timeline:
    """`replay` with compute slowed down by collectives in flight; ``Timeline.held``: by how many seconds."""
    if not any(task.busy for task in graph.tasks):
        return replay(graph, steps, launch_s)
    return timeline(_SharedClock(graph, steps, launch_s), steps)


def timeline_of(graph: Graph, found: IssueOrder, launch_s: float) -> Timeline:
    """The same for a schedule."""
    busy = any(task.busy for task in graph.tasks)
    return replay_shared(graph, found.steps, launch_s) if busy else found.timeline


class _SharedClock(Clock):
    """``flights``: by stream, begin, end and share of collectives that may still be in flight."""

    def __init__(self, graph: Graph, steps: Sequence[Step], launch_s: float) -> None:
        super().__init__(graph, steps, launch_s)
        self.flights: list[deque[tuple[float, float, float]]] = [deque() for _ in graph.streams]

    def walk(self) -> None:
        tasks, launch_s, free = self.graph.tasks, self.launch_s, self.free
        begin, end, exposed = self.begin, self.end, [0.0] * len(self.graph.tasks)
        interrupted, worked, began, waited = True, 0.0, self.clock, 0.0
        for code, index, seconds in self.program:
            if code == COMPUTE:
                if interrupted:
                    self._work(launch_s)
                    worked += launch_s
                    interrupted = False
                begin[index] = self.clock
                self._work(seconds)
                worked += seconds
                end[index] = self.clock
                continue
            if code == WAIT:
                if end[index] > self.clock:
                    exposed[index] = end[index] - self.clock
                    waited += exposed[index]
                    self.clock = end[index]
            elif code == START:
                task = tasks[index]
                begin[index] = max(self.clock, free[task.stream])
                end[index] = free[task.stream] = begin[index] + seconds
                if task.busy:
                    self.flights[task.stream].append((begin[index], end[index], task.busy))
            interrupted = True
        self.exposed = exposed
        self.held = max(0.0, self.clock - began - worked - waited)

    def _work(self, work: float) -> None:
        """Advance the clock by ``work`` seconds of compute."""
        while work > 0.0:
            lost, until = 0.0, float("inf")
            for flights in self.flights:
                while flights and flights[0][1] <= self.clock:
                    flights.popleft()
                if flights:
                    first_begin, first_end, share = flights[0]
                    if first_begin <= self.clock:
                        lost += share
                        until = min(until, first_end)
                    else:
                        until = min(until, first_begin)
            rate = max(0.0, 1.0 - lost)
            if work <= rate * (until - self.clock):
                self.clock += work / rate
                return
            work -= rate * (until - self.clock)
            self.clock = until
