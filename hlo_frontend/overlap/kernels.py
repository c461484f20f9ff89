"""Groups ops into tasks: predicts which instructions an engine compiles into one kernel.

A module behind the SPMD partitioner is not fused yet, so ops are grouped into the kernels that a compiler
would make of them. Dots, convolutions, scatters, sorts and the like are kernels of their own (*single* ones).
All other ops are fused with the ops that they are connected to, unless a collective or a single kernel lies
in between. An op whose readers are all in one kernel is fused into that kernel. A kernel whose result is
stacked by a `dynamic-update-slice` writes it into its place. Values inside a kernel take no memory.

Why tasks form no cycle: ops that are fused have the same collectives above and below them, and the same
number of single kernels above them in sequence. An op on a path between two of them has these in common with
them too, so it is fused with them. If an op is fused into its readers, every path from it leads through them.
An update is fused with the kernel that makes its update only if everything else that it reads comes earlier
in one topological order of the tasks; the order then remains topological.

The barrier of a recomputation is special: collectives whose operands come from parameters alone (gathers of
weights), and the ops that these need, may run before the other values that enter the barrier. All other ops
stay behind it, since recomputing them early would not save memory. The conditions for fusing are checked
twice, with the barrier as the module has it and with this freedom. So no op that such a collective needs is
fused with an op that must stay behind the barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..ops import op_of
from ..topological import topological
from ..values import BlockGraph, Node, NodeKind
from .costs import CostTable
from .layout import lay_out
from .model import Buffer, Graph, Op, Task
from .pricing import price

# Ops that write no more than this are taken for indices of updates, or for tables of them (`passes.split`).
_SCALAR_BYTES = 512


def build(
    block: BlockGraph,
    costs: CostTable,
    donated: Iterable[int] = (),
    opaque: Callable[[Node], float] = lambda node: 0.0,
) -> Graph:
    """The task graph of a block. ``donated``: positions of parameters whose memory may be freed.

    ``opaque``: gives the seconds of a loop or branch. Gathers of weights may pass the barrier of a
    recomputation, although HLO orders everything behind a barrier after all that enters it.
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
    """For each op: the ops before it, and those that only a barrier puts before it, which it may pass."""
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
    """A representative op for the task of each op. ``before``, ``behind``: see `_before`."""
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
    """For each op: the runtime nodes above and below it, as bits, and the longest sequence of single kernels
    above it."""
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
    """A task for each cluster, in the topological order that takes the smallest ``key`` first."""
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
    """Have kernels write values that are stacked into their place in the stack, if clusters form no cycle.

    Other readers of such a value read it there, so it takes no memory of its own and is written once.
    """
    updates = [op for op in ops if _is_placeable(op)]
    if not updates:
        return
    # Tasks in an order in which updates and their indices come as early as possible.
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
    """Whether an op updates in place, and its update is the whole result of one kernel and nothing else."""
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
    """Number the tasks in a topological order, the smallest ``key`` first."""
    needs: list[set[int]] = [set() for _ in tasks]
    gives: list[set[int]] = [set() for _ in tasks]
    for op in ops:
        for p in before[op.index]:
            other = ops[p].task
            if other != op.task:
                needs[op.task].add(other)
                gives[other].add(op.task)
    order = topological(dict(enumerate(needs)), key=lambda i: (key(tasks[i]), i))
    ranked = [tasks[i] for i in order]
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
    """Number the buffers that are passed between tasks. Values inside a kernel take no memory."""
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
