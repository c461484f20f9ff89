"""Buckets: small collectives of one kind are merged into one, if that lowers the predicted time.

The members of a bucket have the same kind, stream (groups), dtype, native reduction and dimension. The bucket
saves all their latencies but one, and costs copies: every operand into a packed buffer, every result out of
it, at the rate of memory, on the bucket's stream. The packed buffers take memory while it is in flight.

Members follow each other in the best schedule found so far. They are merged only if none depends on another,
directly or through other buckets. Since a bucket depends on everything that its members depend on, two
collectives are not merged if a kernel in between needs one and is needed by the other.

In a loop's body, collectives that cross into the next iteration are merged only with others that cross; the
tasks that stand for their arrival are merged in the same way.

Buckets are kept only if their schedule takes less time. They may expose a collective that was hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stretto.collectives.ops import Kind

from ..topological import topological
from .costs import CostTable
from .model import Graph, Task
from .search import IssueOrder

MERGED_KINDS = frozenset({Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE})
# Floats that are summed in a wider type, whose partial sums travel as one or the other by their size.
NARROW = ("bf16", "f16", "f8", "f4")
# Sizes of buckets tried, in multiples of the time that a link's latency takes.
SIZES = (32.0, 4.0)


@dataclass
class Bucketed:
    """A graph with buckets, its schedule, and the tasks of the original graph in each new task."""

    graph: Graph
    order: IssueOrder
    members: list[tuple[int, ...]]


Scheduler = Callable[[Graph], IssueOrder]


def bucket(
    graph: Graph,
    first: IssueOrder,
    costs: CostTable,
    scheduler: Scheduler,
    memory_limit: float,
) -> Bucketed:
    """The best of several sets of buckets that fit into memory, or none.

    ``first``: the schedule without buckets. ``scheduler``: schedules a graph. ``memory_limit``: in bytes.
    """
    best = Bucketed(graph, first, [(task.index,) for task in graph.tasks])
    tried: list[list[tuple[int, ...]]] = [[]]
    for size in SIZES:
        merged = plan(graph, first, costs, size)
        if merged in tried:
            continue
        tried.append(merged)
        bucketed, members = merge(graph, merged, costs)
        enough = best.order.timeline.seconds
        if max(bucketed.stream_seconds()) >= enough:
            continue  # no order takes less time
        found = scheduler(bucketed)
        if found.timeline.seconds < enough and found.timeline.peak_bytes <= memory_limit:
            best = Bucketed(bucketed, found, members)
    return best


def plan(graph: Graph, found: IssueOrder, costs: CostTable, size: float) -> list[tuple[int, ...]]:
    """Groups of tasks to merge, each about as long as ``size`` latencies of its link."""
    begin = found.timeline.begin
    queues: dict[object, list[int]] = {}
    for task in graph.tasks:
        key = bucket_key(task)
        if key is not None:
            queues.setdefault(key, []).append(task.index)
    above = ancestors(graph)
    crossings = graph.crossings()
    groups: list[tuple[int, ...]] = []
    for queue in queues.values():
        queue.sort(key=lambda i: (begin[i], i))
        current: list[int] = []
        for index in [*queue, -1]:
            if index >= 0 and _may_join(graph, current, index, above, costs, size):
                current.append(index)
                continue
            if len(current) > 1:
                groups.append(tuple(sorted(current)))
                close(above, current)
                arriving = [crossings[i] for i in current if i in crossings]
                if arriving:
                    close(above, arriving)
            current = [index]
    return sorted(groups)


def bucket_key(task: Task) -> object:
    """A key that all members of a bucket share; None for tasks that are never merged."""
    collective = task.collective
    if collective is None or collective.kind not in MERGED_KINDS or not task.latency_s:
        return None
    if task.arrives:
        return None  # merged if the collectives whose arrival it is are merged
    if collective.kind is not Kind.ALL_GATHER and collective.reduction is None:
        return None
    dtypes = {operand.dtype for operand in collective.operands}
    if len(dtypes) != 1:
        return None
    (dtype,) = dtypes
    if collective.kind is Kind.ALL_REDUCE and dtype.startswith(NARROW):
        return None  # merging would change bits
    how = collective.kind, dtype, collective.reduction, collective.dimension
    return task.stream, task.crosses, *how


def _copied_bytes(task: Task) -> int:
    assert task.collective is not None
    return sum(t.nbytes for t in (*task.collective.operands, *task.collective.results))


def _may_join(
    graph: Graph,
    current: Sequence[int],
    index: int,
    above: list[int],
    costs: CostTable,
    size: float,
) -> bool:
    if not current:
        return True
    together = (*current, index)
    tasks = [graph.tasks[i] for i in together]
    moved = sum(task.seconds - task.latency_s for task in tasks)
    if moved > size * tasks[0].latency_s or not is_worth_copies(graph, together, costs):
        return False
    return are_apart(together, above)


def is_worth_copies(graph: Graph, group: Sequence[int], costs: CostTable) -> bool:
    """Whether the latencies that a bucket saves take longer than its copies."""
    tasks = [graph.tasks[i] for i in group]
    copies = 2.0 * sum(_copied_bytes(task) for task in tasks) / costs.compute.bytes_per_s
    return copies < tasks[0].latency_s * (len(group) - 1)


def ancestors(graph: Graph) -> list[int]:
    """Bits of the tasks above each task."""
    above: list[int] = []
    for task in graph.tasks:
        mask = 0
        for before in task.before:
            mask |= above[before] | 1 << before
        above.append(mask)
    return above


def close(above: list[int], group: Sequence[int]) -> None:
    """Merge the ancestors of a group: what depends on one member now depends on all of them."""
    members = sum(1 << i for i in group)
    union = members
    for index in group:
        union |= above[index]
    for index, mask in enumerate(above):
        if mask & members:
            above[index] = mask | union
    for index in group:
        above[index] = (above[index] | union) & ~members


def are_apart(group: Sequence[int], above: list[int]) -> bool:
    """Whether none of these tasks depends on another."""
    mask = sum(1 << i for i in group)
    return not any(above[i] & mask for i in group)


def merge(
    graph: Graph, groups: Sequence[Sequence[int]], costs: CostTable
) -> tuple[Graph, list[tuple[int, ...]]]:
    """The graph with each group as one task, and the original tasks in each new one."""
    home = list(range(len(graph.tasks)))
    crossings = graph.crossings()
    arriving = [[crossings[i] for i in group if i in crossings] for group in groups]
    for group in (*groups, *(group for group in arriving if group)):
        for index in group:
            home[index] = group[0]
    members: dict[int, list[int]] = {}
    for index, root in enumerate(home):
        members.setdefault(root, []).append(index)
    before = {
        root: {home[b] for m in ms for b in graph.tasks[m].before} - {root}
        for root, ms in members.items()
    }
    order = topological(before, key=lambda root: root)
    assert len(order) == len(before), "buckets depend on each other"
    number = {root: i for i, root in enumerate(order)}
    tasks: list[Task] = []
    for root in order:
        task = graph.tasks[root]
        mine = [graph.tasks[m] for m in members[root]]
        after = {home[a] for t in mine for a in t.after} - {root}
        whole = task if len(mine) == 1 else _packed(mine, costs)
        tasks.append(
            whole.moved(
                number[root],
                tuple(sorted([number[b] for b in before[root]])),
                tuple(sorted([number[a] for a in after])),
            )
        )
    found = replace(graph, tasks=tasks)
    return found, [tuple(members[root]) for root in order]


def _packed(tasks: Sequence[Task], costs: CostTable) -> Task:
    """The bucket of these tasks. If they arrive, its time and bytes are what the last iteration left."""
    collectives = [task.collective for task in tasks if task.collective is not None]
    copied = sum(_copied_bytes(task) for task in tasks)
    arrives = tasks[0].arrives
    latency = max(task.latency_s for task in tasks)
    moving = sum(task.seconds - task.latency_s for task in tasks)
    seconds = latency + moving + 2.0 * copied / costs.compute.bytes_per_s
    return replace(
        tasks[0],
        ops=[op for task in tasks for op in task.ops],
        seconds=max(task.seconds for task in tasks) if arrives else seconds,
        moved_bytes=sum(task.moved_bytes for task in tasks),
        collective=replace(
            collectives[0],
            operands=tuple(t for c in collectives for t in c.operands),
            results=tuple(t for c in collectives for t in c.results),
        ),
        reads=tuple(dict.fromkeys(b for task in tasks for b in task.reads)),
        writes=tuple(dict.fromkeys(b for task in tasks for b in task.writes)),
        extra_bytes=copied + (sum(task.extra_bytes for task in tasks) if arrives else 0),
    )
