"""A lower bound of the time of every order of a graph's tasks.

Each resource (compute, each stream) does one task at a time. A task cannot begin before its *head*: the
heaviest path to it, and for each resource the work of its ancestors on that resource, counted from the
earliest any of them can begin. Its *tail* is the same seen from the end. For each resource and each
threshold h, the tasks whose heads are at least h run after h, one after the other, and at least the shortest
of their tails follows. The largest of these sums over all resources is the floor: the work of the busiest
resource plus the time for which dependencies keep it idle. `stream_bound` adds a bound from compute and a
stream together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .model import Graph
from .stream_bound import stream_bound

# Ancestors are kept as bits of a matrix; beyond this many tasks only paths and totals are used.
MAX_MATRIX = 8_000


@dataclass(frozen=True)
class Floor:
    """A floor in seconds. ``resource``: where it comes from: compute, a stream, both together, or a path."""

    seconds: float
    resource: str
    resource_seconds: float

    @property
    def unhideable(self) -> float:
        """The seconds that dependencies add to the work of the busiest resource."""
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
                stream_bound(r, seconds, stream, heads, tails, above),
                stream_bound(r, seconds[::-1], stream[::-1], from_end, heads[::-1], below),
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
    above = ancestors(before)
    words = above.view(np.uint64)
    lanes = range(-1, num_streams)
    on_lane = np.zeros((len(lanes), above.shape[1]), dtype=np.uint8)
    on_lane[:, : (count + 7) // 8] = [np.packbits(stream == r, bitorder="little") for r in lanes]
    tasks_of = on_lane.view(np.uint64)
    by_head = [_ByHead(int((stream == r).sum())) for r in lanes]
    for v in range(count):
        head = max((heads[p] + seconds[p] for p in before[v]), default=0.0)
        if len(before[v]) > 1:
            # If all ancestors on a resource are one direct predecessor and its ancestors, the resource bounds
            # the head by no more than the end of that predecessor.
            more = np.ones(len(lanes), dtype=bool)
            for p in before[v]:
                beside = words[v] & ~words[p]
                beside.view(np.uint8)[p >> 3] &= ~(1 << (p & 7)) & 0xFF
                more &= (tasks_of & beside).any(axis=1)
            if more.any():
                chosen = np.unpackbits(above[v], bitorder="little")
                for r in np.flatnonzero(more):
                    head = max(head, by_head[r].bound(chosen))
        heads[v] = head
        by_head[stream[v] + 1].add(v, head, seconds[v])
    return heads, above


def ancestors(before: list[tuple[int, ...]]) -> np.ndarray:
    """For each task a row of bits, the lowest first, one for each of its ancestors; in whole words."""
    count = len(before)
    above = np.zeros((count, 8 * ((count + 63) // 64)), dtype=np.uint8)
    words = above.view(np.uint64)
    for v in range(count):
        row = words[v]
        for p in before[v]:
            np.bitwise_or(row, words[p], out=row)
            above[v, p >> 3] |= 1 << (p & 7)
    return above


class _ByHead:
    """Tasks of one resource by their heads, the last first; those of one head in the order they are added."""

    def __init__(self, most: int) -> None:
        self._tasks = np.empty(most, dtype=np.intp)
        self._heads, self._seconds = np.empty(most), np.empty(most)
        self._size = 0

    def add(self, task: int, head: float, seconds: float) -> None:
        size = self._size
        at = size - int(np.searchsorted(self._heads[:size][::-1], head))
        for column, value in (
            (self._tasks, task),
            (self._heads, head),
            (self._seconds, seconds),
        ):
            column[at + 1 : size + 1] = column[at:size]
            column[at] = value
        self._size = size + 1

    def bound(self, chosen: np.ndarray) -> float:
        """The earliest time at which all tasks with a 1 in ``chosen`` (by task, 0 or 1) can be over."""
        size = self._size
        if not size:
            return 0.0
        mine = chosen[self._tasks[:size]]
        ends = self._heads[:size] + np.cumsum(self._seconds[:size] * mine)
        return float((ends * mine).max())


def independent_compute(graph: Graph) -> list[float]:
    """For each collective, the seconds of kernels that neither come before it nor wait for it; else 0.

    Beyond `MAX_MATRIX` tasks, all kernels but the collective's direct neighbours count.
    """
    tasks, count = graph.tasks, len(graph.tasks)
    work = np.array([0.0 if task.is_collective else task.seconds for task in tasks])
    collectives = [task for task in tasks if task.is_collective]
    result = [0.0] * count
    if count > MAX_MATRIX:
        for task in collectives:
            result[task.index] = float(work.sum()) - sum(
                work[i] for i in (*task.before, *task.after)
            )
        return result
    above = ancestors([task.before for task in tasks])
    below = ancestors([tuple(count - 1 - s for s in task.after) for task in reversed(tasks)])
    for task in collectives:
        v = task.index
        earlier = np.unpackbits(above[v], count=count, bitorder="little")
        later = np.unpackbits(below[count - 1 - v], count=count, bitorder="little")
        result[v] = float(work[(earlier | later[::-1]) == 0].sum())
    return result
