"""What an issue order does where collectives take time from compute, because the same cores move the data.

Of each collective under way compute loses the link's ``busy`` share: beside them it goes on at 1 minus the
sum of their shares, at worst not at all, and takes so much longer. What is longer under way hides more: of a
collective less is exposed than in `replay`. Collectives take as long as ever.

The search for an order does not count this (`replay`); what is decided and told of an order does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .model import Graph
from .replay import COMPUTE, START, WAIT, Clock, Step, Timeline, replay, timeline
from .search import IssueOrder


def replay_shared(graph: Graph, steps: Sequence[Step], launch_s: float = 0.0) -> Timeline:
    """`replay` with compute held back by what is under way. ``Timeline.held`` tells for how long in all."""
    if not any(task.busy for task in graph.tasks):
        return replay(graph, steps, launch_s)
    return timeline(_SharedClock(graph, steps, launch_s), steps)


def timeline_of(graph: Graph, found: IssueOrder, launch_s: float = 0.0) -> Timeline:
    """The same of a schedule, whose own timeline it is where nothing keeps cores busy."""
    busy = any(task.busy for task in graph.tasks)
    return replay_shared(graph, found.steps, launch_s) if busy else found.timeline


class _SharedClock(Clock):
    """``flights``: by stream, what was started there and is not known to be over: begin, end, share."""

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
        """Advance the clock by so much compute."""
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
