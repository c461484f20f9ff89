"""Simulates an issue order: gives times on every stream, exposed waits, and live memory.

The clock is that of compute. Compute steps run one after the other in issue order. A collective begins when
its stream is free and all compute issued before its start has run; a stream is first in, first out. A wait
stops compute until its collective has ended; that time is exposed. Consecutive compute steps without a start
or a wait in between are one segment, which costs one launch.

A value takes memory from the step that makes it (for a collective, the start) until the end of the last step
that reads it (for a collective, the wait). The result depends on the arguments alone.

In a loop's body, the operands of a collective that crosses are kept until it arrives in the next iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from .model import Graph

# How many iterations of a loop are simulated at most, and over how many of the last ones time is averaged.
ITERATIONS, MEASURED = 9, 4
# The simulation ends when the time left of collectives at the end of an iteration changes by no more than
# this share of the iteration's time.
STEADY = 1e-9


class Phase(StrEnum):
    COMPUTE = "compute"
    START = "start"
    WAIT = "wait"


Step = tuple[int, Phase]  # task, phase


@dataclass
class Timeline:
    """``begin``, ``end`` and ``exposed`` are by task, in seconds; ``live``: bytes in use while each step
    runs.

    ``held``: seconds that collectives take from compute beside them (`shared_cores`).
    """

    seconds: float
    begin: list[float]
    end: list[float]
    exposed: list[float]
    live: list[int]
    peak_bytes: int
    held: float = 0.0

    @property
    def exposed_seconds(self) -> float:
        return sum(self.exposed)

    def live_by_task(self, graph: Graph, steps: Sequence[Step]) -> list[int]:
        """Bytes in use when each task is issued."""
        by_task = [0] * len(graph.tasks)
        for (index, phase), live in zip(steps, self.live, strict=True):
            if phase is not Phase.WAIT:
                by_task[index] = live
        return by_task


def unscheduled(graph: Graph) -> list[Step]:
    """The module's own order, every collective waited for where it starts."""
    steps: list[Step] = []
    for task in graph.tasks:
        if task.crosses:
            steps.append((task.index, Phase.START))
        elif task.is_collective:
            steps += [(task.index, Phase.START), (task.index, Phase.WAIT)]
        else:
            steps.append((task.index, Phase.COMPUTE))
    return steps


def handed_over(steps: Sequence[Step]) -> int:
    """The number of collectives that are not awaited where they start. Each of them is handed to its stream's
    thread and back, which costs about a launch; the others run in the thread that walks the program."""
    following = [*steps[1:], None]
    return sum(
        phase is Phase.START and after != (index, Phase.WAIT)
        for (index, phase), after in zip(steps, following, strict=True)
    )


def replay(graph: Graph, steps: Sequence[Step], launch_s: float = 0.0) -> Timeline:
    """Simulate ``steps``; those of a loop's body with crossing collectives repeatedly, until every iteration
    takes the same time."""
    return timeline(Clock(graph, steps, launch_s), steps)


def timeline(run: Clock, steps: Sequence[Step]) -> Timeline:
    """Simulate ``steps`` by the clock ``run``, which was made for them."""
    crossings = run.graph.crossings()
    live = memory(run.graph, steps)
    if crossings:  # the time from one iteration to the next; other times count from its begin
        seconds, last = run.repeat(crossings)
    else:
        run.walk()
        seconds, last = max([run.clock, *run.free]), 0.0
    begin, end = ([at - last for at in times] if last else times for times in (run.begin, run.end))
    return Timeline(seconds, begin, end, run.exposed, live, max(live, default=0), run.held)


COMPUTE, WAIT, START, ARRIVING = range(4)  # the kinds of steps of a `Clock`


class Clock:
    """The simulation: when each task last began and ended, and for how long compute waited for it."""

    def __init__(self, graph: Graph, steps: Sequence[Step], launch_s: float) -> None:
        count = len(graph.tasks)
        self.graph, self.launch_s = graph, launch_s
        self.begin, self.end, self.exposed = [0.0] * count, [0.0] * count, [0.0] * count
        self.free = [0.0] * len(graph.streams)
        self.clock = self.held = 0.0
        compute, wait = Phase.COMPUTE, Phase.WAIT  # to look them up in a mapping takes longer
        tasks = graph.tasks
        self.program = [
            (
                COMPUTE if phase is compute else WAIT if phase is wait else START,
                i,
                tasks[i].seconds,
            )
            for i, phase in steps
        ]
        arriving = {task.index for task in tasks if task.arrives}
        if arriving:  # the iteration before has started these
            self.program = [
                (ARRIVING if code == START and i in arriving else code, i, seconds)
                for code, i, seconds in self.program
            ]

    def walk(self) -> None:
        """Run all steps once, from the present time on."""
        tasks, launch_s, clock, free = self.graph.tasks, self.launch_s, self.clock, self.free
        begin, end, exposed = self.begin, self.end, [0.0] * len(self.graph.tasks)
        interrupted = True
        for code, index, seconds in self.program:
            if code == COMPUTE:
                if interrupted:
                    clock += launch_s
                    interrupted = False
                begin[index] = clock
                clock += seconds
                end[index] = clock
                continue
            if code == WAIT:
                if end[index] > clock:
                    exposed[index] = end[index] - clock
                    clock = end[index]
            elif code == START:
                stream = tasks[index].stream
                begin[index] = max(clock, free[stream])
                end[index] = free[stream] = begin[index] + seconds
            interrupted = True
        self.clock, self.exposed = clock, exposed

    def repeat(self, crossings: dict[int, int]) -> tuple[float, float]:
        """Run all steps repeatedly. Gives the seconds from one iteration to the next, and when the last
        began.

        Ends when an iteration leaves as much in flight as the one before: all later ones are then equal.
        """
        begin, end = self.begin, self.end
        begins = [0.0]
        left: list[float] = []
        measured = 0.0
        for number in range(1, ITERATIONS + 1):
            for index, arrival in crossings.items():
                begin[arrival], end[arrival] = begin[index], end[index]
            self.walk()
            clock = self.clock
            begins.append(clock)
            span = min(number, MEASURED)
            measured = (clock - begins[-1 - span]) / span
            now = [max(0.0, end[index] - clock) for index in crossings]
            now += [max(0.0, free - clock) for free in self.free]
            least = STEADY * measured
            if left and all(abs(a - b) <= least for a, b in zip(now, left, strict=True)):
                measured = clock - begins[-2]
                break
            left = now
        # A stream with more work than that falls behind in every iteration, so that its work decides.
        return max([measured, *self.graph.stream_seconds()]), begins[-2]


def memory(graph: Graph, steps: Sequence[Step]) -> list[int]:
    """Bytes in use while each step runs: all results so far, without those that nobody reads any more."""
    count, use = len(steps), graph.memory_use
    start, wait = Phase.START, Phase.WAIT
    tasks = np.array([index for index, _ in steps], dtype=np.intp)
    begins = np.array([phase is not wait for _, phase in steps], dtype=bool)
    ends = np.array([phase is not start for _, phase in steps], dtype=bool)
    ended = np.full(len(graph.tasks), -1)  # by task, the step that ends it
    ended[tasks[ends]] = np.flatnonzero(ends)
    last = np.full(len(graph.buffers), -1)  # by buffer, the last step that needs it
    if len(use.tasks):
        last[use.buffers] = np.maximum.reduceat(ended[use.tasks], use.first)
    last[use.held] = count
    change = np.zeros(count + 1, dtype=np.int64)
    change[:-1][begins] += use.made[tasks[begins]]
    change[1:][ends] -= use.extra[tasks[ends]]
    freed = (last >= 0) & (last < count) & ~use.kept
    np.subtract.at(change, last[freed] + 1, use.sizes[freed])
    live: list[int] = (graph.base_bytes + np.cumsum(change[:-1])).tolist()
    return live
