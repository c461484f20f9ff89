"""Ops to tasks: which instructions are one kernel, and what lies between kernels.

A post-SPMD module is unfused, so instructions are gathered into the kernels that a compiler would make of
them. Dots, convolutions, scatters, sorts and the like are kernels of their own. All other ops fuse with
those they are connected to, as far as no collective and no kernel of the first kind lies between; an op
whose readers are all in one kernel joins it. What is stacked by a `dynamic-update-slice` is written into its
place by the kernel that makes it. What stays inside a kernel takes no memory.

Why tasks form no cycle: ops that fuse have the same collectives above and below them and the same number of
single kernels above them in sequence. Anything on a path between two such ops has these in common with them
too, and is fused with them. An op that joins its readers has no way out but through them. An update joins
what it reads only where all else that it reads comes earlier in one topological order of the tasks, which
stays one.

Behind the barrier of a recomputation, collectives of nothing but parameters may run before what else enters,
with what they need: gathers of weights. The rest stays behind, or what recomputing saves would be spent. What
fuses has all of the above in common in two ways, as the module stands and with that freedom: so nothing that
a collective needs is fused with what only the barrier holds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from ..ops import op_of
from ..values import BlockGraph, Node, NodeKind
from .costs import CostTable
from .layout import lay_out
from .model import Buffer, Graph, Op, Task
from .pricing import price

# Ops that write no more compute indices, for all that matters to where updates can be placed.
_SCALAR_BYTES = 8


def build(
    block: BlockGraph,
    costs: CostTable,
    donated: Iterable[int] = (),
    opaque: Callable[[Node], float] = lambda node: 0.0,
) -> Graph:
    """The task graph of a block. ``donated`` are positions of parameters that may be freed.

    ``opaque`` tells the seconds of a loop or branch. Gathers of weights pass the barrier of a recomputation,
    which as HLO goes holds up all that comes of it.
    """
    ops, initial = lay_out(block, donated)
    return _tasks(ops, initial, costs, opaque)


def _predecessors(op: Op) -> Iterator[Op]:
    for ref in op.reads:
        yield from ref.before
    yield from op.order


def _tasks(
    ops: list[Op],
    initial: list[Buffer],
    costs: CostTable,
    opaque: Callable[[Node], float],
) -> Graph:
    single = [_is_single(op) for op in ops]
    before, behind = _before(ops, single)
    after = _reversed(before)
    cluster = _cluster(ops, before, after, behind, single)
    _place_updates(ops, before, cluster)
    # A kernel is numbered by its last op.
    ranked = _gather(ops, before, cluster, lambda task: task.ops[-1].index)
    graph = Graph(ranked, [], [], [], 0)
    _connect(graph, ops, before, initial)
    price(graph, costs, opaque)
    return graph


def _is_single(op: Op) -> bool:
    return op.node.kind is not NodeKind.COMPUTE or (
        not op_of(op.instruction.opcode).fuses or op.node.has_side_effect
    )


def _before(ops: list[Op], single: list[bool]) -> tuple[list[list[int]], list[set[int]]]:
    """By op: those that come before it, and those that do so in the module though they need not."""
    before: list[list[int]] = []
    behind: list[set[int]] = []
    free: list[bool] = []
    for op in ops:
        needed = {p.index for p in _predecessors(op)}
        held = {p.index for ref in op.reads for p in ref.behind}.union(*(behind[p] for p in needed))
        held -= needed
        moves_data = op.node.collective is not None and not op.node.collective.is_point_to_point
        may_pass = moves_data or not single[op.index]
        free.append(may_pass and all(free[p] for p in needed))
        if not free[-1]:
            needed |= held
            held = set()
        before.append(sorted(needed))
        behind.append(held)
    return before, behind


def _cluster(
    ops: list[Op],
    before: list[list[int]],
    after: list[list[int]],
    behind: list[set[int]],
    single: list[bool],
) -> list[int]:
    """Representative op of each op's task. ``behind``: those that come before an op in the module alone."""
    count = len(ops)
    shared, level = _related(ops, before, after, single)
    stood_after = after
    if any(behind):
        stood_before = [
            sorted({*needed, *held}) for needed, held in zip(before, behind, strict=True)
        ]
        stood_after = _reversed(stood_before)
        stood, level = _related(ops, stood_before, stood_after, single)
        shared = [(*own, *module) for own, module in zip(shared, stood, strict=True)]

    parent = list(range(count))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    key: list[object] = [None] * count
    for i in range(count - 1, -1, -1):
        if single[i]:
            continue
        level[i] = min(
            (level[s] for s in stood_after[i] if shared[s] == shared[i]), default=level[i]
        )
        if ops[i].instruction.opcode != "reduce":
            # An op that only one kernel reads is computed there.
            readers = {None if single[s] else key[s] for s in after[i]}
            if len(readers) == 1 and None not in readers and not any(b.kept for b in ops[i].writes):
                key[i] = readers.pop()
                for s in after[i]:
                    parent[find(i)] = find(s)
                continue
        key[i] = (shared[i], level[i])
        for s in after[i]:
            if not single[s] and shared[s] == shared[i] and key[s] == key[i]:
                parent[find(i)] = find(s)
    return [find(i) for i in range(count)]


def _related(
    ops: list[Op], before: list[list[int]], after: list[list[int]], single: list[bool]
) -> tuple[list[tuple[int, ...]], list[int]]:
    """By op: which runtime nodes are above and below it, as bits; single kernels above it in sequence."""
    count = len(ops)
    above, below, level = [0] * count, [0] * count, [0] * count
    bits = 0
    bit: dict[int, int] = {}
    for op in ops:
        if op.node.is_runtime:
            bit[op.index] = 1 << bits
            bits += 1
    for i in range(count):
        mask, deepest = 0, 0
        for p in before[i]:
            mask |= above[p] | bit.get(p, 0)
            deepest = max(deepest, level[p] + single[p])
        above[i], level[i] = mask, deepest
    for i in range(count - 1, -1, -1):
        mask = 0
        for s in after[i]:
            mask |= below[s] | bit.get(s, 0)
        below[i] = mask
    return list(zip(above, below, strict=True)), level


def _reversed(before: list[list[int]]) -> list[list[int]]:
    after: list[list[int]] = [[] for _ in before]
    for index, earlier in enumerate(before):
        for e in earlier:
            after[e].append(index)
    return after


def _gather(
    ops: list[Op], before: list[list[int]], cluster: Sequence[int], key: Callable[[Task], int]
) -> list[Task]:
    """A task of each cluster, in topological order, the smallest ``key`` first where that is free."""
    numbers: dict[int, int] = {}
    tasks: list[Task] = []
    for op in ops:
        root = cluster[op.index]
        if root not in numbers:
            numbers[root] = len(tasks)
            tasks.append(Task(len(tasks), []))
        op.task = numbers[root]
        tasks[op.task].ops.append(op)
    return _topological(tasks, ops, before, key)


def _place_updates(ops: list[Op], before: list[list[int]], cluster: list[int]) -> None:
    """Have kernels write what is stacked into its place, as far as clusters form no cycle.

    Others that read what was made read it there: it takes no memory and is written once.
    """
    updates = [op for op in ops if _is_placeable(op)]
    if not updates:
        return
    # An order in which updates and their indices stand as early as can be.
    early = {op.index for op in ops if op.written_bytes <= _SCALAR_BYTES or _updates(op)}
    _gather(ops, before, cluster, lambda t: 0 if t.ops[0].index in early else t.ops[0].index)
    for op in updates:
        made = op.reads[1].buffer
        producer = made.producer
        assert producer is not None
        others = (ops[p].task for p in before[op.index])
        if made.nbytes and all(other <= producer.task for other in others):
            op.task, cluster[op.index] = producer.task, cluster[producer.index]
            made.nbytes = producer.written_bytes = 0


def _updates(op: Op) -> bool:
    return op.instruction.opcode == "dynamic-update-slice"


def _is_placeable(op: Op) -> bool:
    """Whether an op updates in place with the whole of what one kernel makes for that."""
    if not _updates(op) or op.writes[0] is not op.reads[0].buffer:
        return False
    update = op.reads[1]
    made, producer = update.buffer, update.buffer.producer
    return (
        producer is not None
        and producer.node.kind is NodeKind.COMPUTE
        and not producer.node.has_side_effect
        and producer.writes == (made,)
        and not op_of(producer.instruction.opcode).in_place
        and not made.kept
        and made.nbytes == update.nbytes
    )


def _topological(
    tasks: list[Task], ops: list[Op], before: list[list[int]], key: Callable[[Task], int]
) -> list[Task]:
    """Number tasks so that each comes after those it needs, the smallest ``key`` first where that is free."""
    needs: list[set[int]] = [set() for _ in tasks]
    gives: list[set[int]] = [set() for _ in tasks]
    for op in ops:
        for p in before[op.index]:
            other = ops[p].task
            if other != op.task:
                needs[op.task].add(other)
                gives[other].add(op.task)
    waiting = [len(n) for n in needs]
    keys = [key(task) for task in tasks]
    ready = [(keys[i], i) for i in range(len(tasks)) if not waiting[i]]
    heapify(ready)
    ranked: list[Task] = []
    while ready:
        _, i = heappop(ready)
        ranked.append(tasks[i])
        for s in gives[i]:
            waiting[s] -= 1
            if not waiting[s]:
                heappush(ready, (keys[s], s))
    assert len(ranked) == len(tasks), "tasks form a cycle"
    renumber = {task.index: i for i, task in enumerate(ranked)}
    for task in ranked:
        old = task.index
        task.before = tuple(sorted(renumber[n] for n in needs[old]))
        task.after = tuple(sorted(renumber[n] for n in gives[old]))
    for i, task in enumerate(ranked):
        task.index = i
        for op in task.ops:
            op.task = i
    return ranked


def _connect(graph: Graph, ops: list[Op], before: list[list[int]], initial: list[Buffer]) -> None:
    """Number the buffers that lie between tasks; what stays inside a kernel takes no memory."""
    readers: dict[Buffer, set[int]] = {}
    for op in ops:
        for ref in op.reads:
            readers.setdefault(ref.buffer, set()).add(op.task)
    number: dict[Buffer, int] = {}

    def add(buffer: Buffer) -> int:
        if buffer not in number:
            number[buffer] = len(graph.buffers)
            graph.buffers.append(buffer.nbytes)
            graph.kept.append(buffer.kept)
        return number[buffer]

    for buffer in initial:
        graph.base_bytes += buffer.nbytes
        graph.initial.append(add(buffer))
    for task in graph.tasks:
        reads: dict[int, None] = {}
        writes: dict[int, None] = {}
        for op in task.ops:
            for buffer in op.writes:
                others = readers.get(buffer, set()) - {task.index}
                if others or buffer.kept or buffer.producer is not op:
                    op.escapes = True
                    if buffer.producer is op:
                        writes[add(buffer)] = None
        for op in task.ops:
            for ref in op.reads:
                buffer = ref.buffer
                outside = buffer.producer is None or buffer.producer.task != task.index
                if outside and buffer.nbytes:
                    reads[add(buffer)] = None
        task.reads, task.writes = tuple(reads), tuple(writes)
