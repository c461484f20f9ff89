"""A bound below which no order of these tasks can come.

Each resource (compute, each stream) does one task at a time. A task cannot begin before its *head*: the
heaviest path to it, and for each resource the work of its ancestors on that resource, counted from the
earliest any of them can begin. Its *tail* is the same seen from the end. For each resource and each
threshold h, the tasks whose heads are at least h take their whole work after h, and then the shortest of
their tails. The largest of these sums over all resources is the floor: the total work of the busiest
resource plus what dependencies keep it idle. `joint_bound` adds what neither resource says alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .joint_bound import joint_bound
from .model import Graph

# Ancestors are kept as bits of a matrix; beyond this many tasks only paths and totals are used.
MAX_MATRIX = 8_000


@dataclass(frozen=True)
class Floor:
    """Seconds. ``resource`` is what binds: compute, a stream, both together, or a path."""

    seconds: float
    resource: str
    resource_seconds: float

    @property
    def unhideable(self) -> float:
        """What dependencies add to the work of the busiest resource."""
        return self.seconds - self.resource_seconds


def floor(graph: Graph) -> Floor:
    """The floor of a graph. Takes time and memory of the square of the number of tasks."""
    tasks = graph.tasks
    seconds = np.array([task.seconds for task in tasks])
    stream = np.array([task.stream for task in tasks], dtype=np.int64)
    before = [task.before for task in tasks]
    heads, above = bounds(before, seconds, stream, len(graph.streams))
    flipped = [tuple(len(tasks) - 1 - s for s in task.after) for task in reversed(tasks)]
    from_end, below = bounds(flipped, seconds[::-1], stream[::-1], len(graph.streams))
    tails = from_end[::-1]
    binding = "path"
    best = float((heads + seconds + tails).max()) if tasks else 0.0
    names = ["compute", *graph.streams]
    totals = [float(seconds[stream == r - 1].sum()) for r in range(len(names))]
    for r, name in enumerate(names):
        mine = np.flatnonzero(stream == r - 1)
        bound = one_machine(heads[mine], seconds[mine], tails[mine])
        if bound > best:
            best, binding = bound, name
    if above is not None and below is not None:
        for r, name in enumerate(graph.streams):
            bound = max(
                joint_bound(r, seconds, stream, heads, tails, above),
                joint_bound(r, seconds[::-1], stream[::-1], from_end, heads[::-1], below),
            )
            if bound > best:
                best, binding = bound, f"compute and {name}"
    busiest = int(np.argmax(totals))
    return Floor(best, binding, totals[busiest])


def one_machine(heads: np.ndarray, work: np.ndarray, tails: np.ndarray) -> float:
    """The time one machine needs for jobs with heads and tails, preemption allowed: a lower bound.

    Always running the available job with the longest tail is optimal, so this is exact for one machine.
    """
    from heapq import heappop, heappush

    order = np.lexsort((-tails, heads))
    queue: list[list[float]] = []
    clock, best, position = 0.0, 0.0, 0
    while position < len(order) or queue:
        if not queue:
            clock = max(clock, float(heads[order[position]]))
        while position < len(order) and heads[order[position]] <= clock:
            job = order[position]
            heappush(queue, [-float(tails[job]), float(work[job])])
            position += 1
        until = float(heads[order[position]]) if position < len(order) else float("inf")
        job_tail, left = queue[0]
        ran = min(left, until - clock)
        clock += ran
        if ran >= left:
            heappop(queue)
            best = max(best, clock - job_tail)
        else:
            queue[0][1] = left - ran
    return best


def bounds(
    before: list[tuple[int, ...]], seconds: np.ndarray, stream: np.ndarray, num_streams: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Heads of all tasks: seconds before which each cannot begin.

    And for each a row of bits, one for each of its ancestors; None beyond `MAX_MATRIX` tasks.
    """
    count = len(before)
    heads = np.zeros(count)
    if count > MAX_MATRIX:
        for v in range(count):
            for p in before[v]:
                heads[v] = max(heads[v], heads[p] + seconds[p])
        return heads, None
    above = np.zeros((count, 8 * ((count + 63) // 64)), dtype=np.uint8)
    for v in range(count):
        row = above[v]
        head = 0.0
        for p in before[v]:
            np.bitwise_or(row, above[p], out=row)
            row[p >> 3] |= 1 << (p & 7)
            head = max(head, heads[p] + seconds[p])
        if before[v]:
            ancestors = np.flatnonzero(np.unpackbits(row, bitorder="little")[:v])
            lanes = stream[ancestors]
            for r in range(-1, num_streams):
                mine = ancestors[lanes == r]
                if len(mine) < 2:
                    continue
                order = mine[np.argsort(-heads[mine], kind="stable")]
                head = max(head, float((heads[order] + np.cumsum(seconds[order])).max()))
        heads[v] = head
    return heads, above


def independent_compute(graph: Graph) -> list[float]:
    """For each task, the seconds of kernels that neither come before it nor wait for it.

    Beyond `MAX_MATRIX` tasks, all kernels but the task's direct neighbours count.
    """
    count = len(graph.tasks)
    work = np.array([0.0 if task.is_collective else task.seconds for task in graph.tasks])
    if count > MAX_MATRIX:
        near = [sum(work[i] for i in (*t.before, *t.after)) for t in graph.tasks]
        return (work.sum() - work - np.array(near)).tolist()
    above = np.zeros((count, count), dtype=bool)
    for task in graph.tasks:
        row = above[task.index]
        for before in task.before:
            row |= above[before]
            row[before] = True
    related = np.zeros(count)
    for start in range(0, count, 512):
        block = above[start : start + 512].astype(np.float64)
        related[start : start + 512] += block @ work
        related += work[start : start + 512] @ block
    return (work.sum() - work - related).tolist()
