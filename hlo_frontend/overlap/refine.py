"""A local search over buckets: joins two buckets that follow each other, or removes the first or last member
of one, while that lowers the predicted time and a budget of tasks lasts.

It finds plans that `buckets` does not make, whose buckets are all about equally long. An example is the body
of a loop with a small first bucket, which the iteration waits for, and a large one behind it.

Joining two saves one latency, and at most the cuts in compute where one of them starts and is awaited. Where
that is less than the least step it is not tried: of a long step of unrolled layers no join is.

Invariant: the work is bounded by a count of tasks, not by time, so that all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf

from .bounds import least_merged_seconds
from .buckets import (
    Bucketed,
    Scheduler,
    ancestors,
    are_apart,
    bucket_key,
    close,
    is_worth_copies,
    merge,
)
from .costs import CostTable
from .model import Graph

# The share of its time by which a step must improve a schedule.
LEAST_STEP = 1e-3
# Kernels that a collective cuts in two: the one in which it starts, and the one in which it is awaited.
CUTS = 2.0


def refine(
    graph: Graph,
    found: Bucketed,
    costs: CostTable,
    scheduler: Scheduler,
    memory_limit: float,
    budget: int,
) -> Bucketed:
    """The buckets after all steps that lower the predicted time.

    ``scheduler``: a quick one. ``memory_limit``: in bytes. ``budget``: how many tasks may be scheduled in
    all. Buckets that a lower bound excludes count like those that are scheduled.
    """
    above = ancestors(graph)
    least = least_merged_seconds(graph)
    best = found
    again = True
    while again:
        again = False
        enough = best.order.timeline.seconds * (1.0 - LEAST_STEP)
        if least > enough:
            break
        for groups, saved in _neighbours(graph, best, costs, above):
            budget -= len(graph.tasks)
            if budget < 0:
                return best
            if best.order.timeline.seconds - saved > enough:
                continue
            tried, members = merge(graph, groups, costs)
            if max(tried.stream_seconds(), default=0.0) > enough:
                continue
            now = Bucketed(tried, scheduler(tried), members)
            timeline = now.order.timeline
            if timeline.peak_bytes > memory_limit:
                continue
            if timeline.seconds > enough:
                continue
            best, again = now, True
            break
    return best


def _neighbours(
    graph: Graph, found: Bucketed, costs: CostTable, above: list[int]
) -> Iterator[tuple[list[tuple[int, ...]], float]]:
    """Sets of buckets that are one step away, as groups of tasks of ``graph`` that form no cycle, and the
    most seconds that each saves."""
    begin = found.order.timeline.begin
    queues: dict[object, list[tuple[int, ...]]] = {}
    pairs = zip(found.graph.tasks, found.members, strict=True)
    for _, members in sorted(pairs, key=lambda pair: begin[pair[0].index]):
        key = bucket_key(graph.tasks[members[0]])
        if key is not None:
            queues.setdefault(key, []).append(members)
    groups = [unit for queue in queues.values() for unit in queue if len(unit) > 1]

    def but(*gone: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [group for group in groups if group not in gone]

    for queue in queues.values():
        for one, other in pairwise(queue):
            joined = tuple(sorted((*one, *other)))
            if is_worth_copies(graph, joined, costs) and are_apart(joined, above):
                plan = sorted([*but(one, other), joined])
                if _is_acyclic(graph, plan):
                    yield plan, graph.tasks[one[0]].latency_s + CUTS * costs.compute.launch_s
    for group in groups:
        for left in (group[:-1], group[1:]):
            yield sorted([*but(group), *([left] if len(left) > 1 else [])]), inf


def _is_acyclic(graph: Graph, groups: Sequence[tuple[int, ...]]) -> bool:
    above = ancestors(graph)
    for group in groups:
        if not are_apart(group, above):
            return False
        close(above, group)
    return True
