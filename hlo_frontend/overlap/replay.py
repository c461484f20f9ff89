"""What an issue order does: times on every stream, exposed waits, live memory.

The clock is the compute stream's. Compute steps run one after the other in issue order. A start begins
when its stream is free and everything issued to compute before it has run; streams are FIFO. A wait holds
compute until its collective has ended: the time held is exposed. Each run of compute steps that no start
or wait interrupts is a segment and costs one launch.

A value takes memory from the step that makes it (for collectives, the start) until the last step that
reads it (for collectives, the wait) is over. Times and orders are exact functions of their arguments.

In a loop's body, what a collective that crosses reads is kept until it arrives in the next iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from .model import Graph

# Iterations of a loop that are replayed at most, and the last ones of which the time of one is taken.
ITERATIONS, MEASURED = 9, 4
# What is left of transfers at the end of an iteration is the same to this share of its time.
STEADY = 1e-9


class Phase(StrEnum):
    COMPUTE = "compute"
    START = "start"
    WAIT = "wait"


Step = tuple[int, Phase]  # task, phase


@dataclass
class Timeline:
    """Times by task; ``exposed`` by collective; memory by step: bytes live while the step runs.

    ``held``: seconds that collectives take from compute beside them, as `shared_cores` has it.
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
        """Bytes live while each task is issued."""
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
    """Collectives that are not awaited right where they start. Each is given to its stream's thread and taken
    back from it, which costs about what a launch does; others run where the program is walked."""
    following = [*steps[1:], None]
    return sum(
        phase is Phase.START and after != (index, Phase.WAIT)
        for (index, phase), after in zip(steps, following, strict=True)
    )


def replay(graph: Graph, steps: Sequence[Step], launch_s: float = 0.0) -> Timeline:
    """Run ``steps`` against the clock; those of a loop's body with crossing collectives over and over, until
    every iteration takes the same time."""
    return timeline(Clock(graph, steps, launch_s), steps)


def timeline(run: Clock, steps: Sequence[Step]) -> Timeline:
    """What ``steps`` do by a clock of their own: `replay` with another idea of time."""
    crossings = run.graph.crossings()
    live = memory(run.graph, steps)
    if crossings:  # an iteration among others: seconds to the next, times from its begin on
        seconds, last = run.repeat(crossings)
    else:
        run.walk()
        seconds, last = max([run.clock, *run.free]), 0.0
    begin, end = ([at - last for at in times] if last else times for times in (run.begin, run.end))
    return Timeline(seconds, begin, end, run.exposed, live, max(live, default=0), run.held)


def replayed_seconds(graph: Graph, steps: Sequence[Step], launch_s: float = 0.0) -> float:
    """The seconds of `replay`, without the rest of it."""
    crossings = graph.crossings()
    run = Clock(graph, steps, launch_s)
    if crossings:
        return run.repeat(crossings)[0]
    run.walk()
    return max([run.clock, *run.free])


COMPUTE, WAIT, START, ARRIVING = range(4)  # what a `Clock` is to do


class Clock:
    """Tasks against the clock: when each began and ended last, and for how long it was waited for."""

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
        if arriving:  # what arrives was started by the iteration before
            self.program = [
                (ARRIVING if code == START and i in arriving else code, i, seconds)
                for code, i, seconds in self.program
            ]

    def walk(self) -> None:
        """Run all steps once, from where the clock stands."""
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
        """Run all steps over and over. Seconds from one iteration to the next, and when the last began.

        An iteration that leaves behind what the one before it did is like all that follow.
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
        # A stream with more work than that falls behind until its work is all that counts.
        return max([measured, *self.graph.stream_seconds()]), begins[-2]


def memory(graph: Graph, steps: Sequence[Step]) -> list[int]:
    """Bytes live while each step runs: what it and those before it made, less what is dead by then."""
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
