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

from .model import Graph

# Iterations of a loop that are replayed, and the last ones of which the time of one is taken.
ITERATIONS, MEASURED = 9, 4


class Phase(StrEnum):
    COMPUTE = "compute"
    START = "start"
    WAIT = "wait"


Step = tuple[int, Phase]  # task, phase


@dataclass
class Timeline:
    """Times by task; ``exposed`` by collective; memory by step: bytes live while the step runs."""

    seconds: float
    begin: list[float]
    end: list[float]
    exposed: list[float]
    live: list[int]
    peak_bytes: int

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


def held_up(graph: Graph, timeline: Timeline) -> float:
    """Seconds that the collectives of a replay take from compute beside them: of each, its link's ``busy``
    share of what is not exposed. No replay counts them, so that steps keep their lengths."""
    crossings = graph.crossings()
    total = 0.0
    for task in graph.tasks:
        if task.busy and not task.arrives:
            exposed = timeline.exposed[crossings.get(task.index, task.index)]
            total += task.busy * max(0.0, task.seconds - exposed)
    return total


def replay(graph: Graph, steps: Sequence[Step], launch_s: float = 0.0) -> Timeline:
    """Run ``steps`` against the clock; those of a loop's body with crossing collectives over and over, until
    every iteration takes the same time."""
    crossings = graph.crossings()
    if crossings:
        return _repeated(graph, steps, launch_s, crossings)
    run = _Run(graph, launch_s)
    run.walk(steps)
    live = memory(graph, steps)
    seconds = max([run.clock, *run.free])
    return Timeline(seconds, run.begin, run.end, run.exposed, live, max(live, default=0))


class _Run:
    """Tasks against the clock: when each began and ended last, and for how long it was waited for."""

    def __init__(self, graph: Graph, launch_s: float) -> None:
        count = len(graph.tasks)
        self.graph, self.launch_s = graph, launch_s
        self.begin, self.end, self.exposed = [0.0] * count, [0.0] * count, [0.0] * count
        self.free = [0.0] * len(graph.streams)
        self.clock = 0.0

    def walk(self, steps: Sequence[Step]) -> None:
        """Run all steps once, from where the clock stands."""
        tasks, launch_s, clock, free = self.graph.tasks, self.launch_s, self.clock, self.free
        begin, end, exposed = self.begin, self.end, [0.0] * len(tasks)
        interrupted = True
        for index, phase in steps:
            task = tasks[index]
            if phase is Phase.COMPUTE:
                if interrupted:
                    clock += launch_s
                begin[index] = clock
                clock += task.seconds
                end[index] = clock
            elif phase is Phase.WAIT:
                if end[index] > clock:
                    exposed[index] = end[index] - clock
                    clock = end[index]
            elif not task.arrives:  # what arrives was started by the iteration before
                begin[index] = max(clock, free[task.stream])
                end[index] = free[task.stream] = begin[index] + task.seconds
            interrupted = phase is not Phase.COMPUTE
        self.clock, self.exposed = clock, exposed


def _repeated(
    graph: Graph, steps: Sequence[Step], launch_s: float, crossings: dict[int, int]
) -> Timeline:
    """An iteration among others: times from its begin on, ``seconds`` from one to the next."""
    run = _Run(graph, launch_s)
    begin, end = run.begin, run.end
    begins = [0.0]
    for _ in range(ITERATIONS):
        for index, arrival in crossings.items():
            begin[arrival], end[arrival] = begin[index], end[index]
        run.walk(steps)
        begins.append(run.clock)
    measured = (begins[-1] - begins[-1 - MEASURED]) / MEASURED
    # A stream with more work than that falls behind until its work is all that counts.
    seconds = max([measured, *graph.stream_seconds()])
    last = begins[-2]
    live = memory(graph, steps)
    return Timeline(
        seconds,
        [b - last for b in begin],
        [e - last for e in end],
        run.exposed,
        live,
        max(live, default=0),
    )


def memory(graph: Graph, steps: Sequence[Step]) -> list[int]:
    """Bytes live while each step runs: what it and those before it made, less what is dead by then."""
    sizes, kept = graph.buffers, graph.kept
    last = [-1] * len(sizes)
    for position, (index, phase) in enumerate(steps):
        if phase is not Phase.START:
            for buffer in graph.tasks[index].reads:
                last[buffer] = position
            for buffer in graph.tasks[index].writes:
                last[buffer] = max(last[buffer], position)
    for task in graph.tasks:
        if task.crosses:
            for buffer in task.reads:
                last[buffer] = len(steps)
    freed = [0] * (len(steps) + 1)
    for buffer, position in enumerate(last):
        if 0 <= position < len(steps) and not kept[buffer]:
            freed[position + 1] += sizes[buffer]
    live: list[int] = []
    current = graph.base_bytes
    for position, (index, phase) in enumerate(steps):
        task = graph.tasks[index]
        current -= freed[position]
        if phase is not Phase.WAIT:
            current += sum(sizes[buffer] for buffer in task.writes) + task.extra_bytes
        if phase is not Phase.START:
            freed[position + 1] += task.extra_bytes
        live.append(current)
    return live
