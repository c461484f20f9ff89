"""What there is to schedule: a block as a graph of tasks, each a kernel or a collective.

Loops whose trip count is known are laid out iteration after iteration, so that work may move across
their boundaries; loops that cannot be, and branches, are one opaque task each. Opaque tasks and kernels
with unknown side effects are fences: what stands before one in the module stays before it, what stands
after it stays after it.

*Kernels.* A post-SPMD module is unfused, so instructions are gathered into the kernels that a compiler
would make of them. Ops that only rename data (reshapes, layout changes, contiguous slices) and
broadcasts cost nothing: whoever reads them reads their source. Dots, convolutions, scatters, sorts and
the like are kernels of their own. All other ops fuse with those they are connected to, as far as no
collective and no kernel of the first kind lies between; an op whose readers are all in one kernel
joins it. A kernel reads each of its inputs once and writes each of its outputs once.

Invariants: tasks are numbered in a topological order, the module's own; two instructions are put in one
task only where no path between them leaves it, so tasks form no cycle; cutting a task in two could let
no collective start earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from stretto.collectives.ops import Collective

from ..graph import Instruction
from ..values import BlockGraph, Node, NodeKind, Value
from .costs import CostTable, flops, span
from .loops import trips_of

# Loops are laid out up to this many instructions in all; longer ones in part.
MAX_LAID_OUT = 60_000

# Ops that rename data. A slice is one where it is contiguous, a transposition where the layouts agree.
_VIEWS = frozenset({"reshape", "bitcast", "bitcast-convert"})
_SLICES = frozenset({"slice", "dynamic-slice"})
_KERNELS = frozenset(
    {
        "dot", "convolution", "scatter", "sort", "fft", "cholesky", "triangular-solve", "custom-call",
        "reduce-window", "select-and-scatter", "while", "conditional", "call", "fusion", "topk",
        "rng-bit-generator", "rng", "scaled-dot", "dynamic-update-slice",
    }
)  # fmt: skip

_IN_PLACE = ("dynamic-update-slice", "scatter")


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory of one array. ``kept`` buffers are never freed: results, and inputs not given up."""

    nbytes: int
    producer: Op | None
    kept: bool = False


@dataclass(eq=False, slots=True)
class Ref:
    """An array as somebody reads it: who must have run before, where it lies, how much is read."""

    before: tuple[Op, ...]
    buffer: Buffer
    nbytes: int
    renames: tuple[Op, ...] = ()


@dataclass(eq=False, slots=True)
class Op:
    """A node in one place: the iterations of the loops around it are in ``iteration``."""

    index: int
    node: Node
    iteration: tuple[int, ...]
    reads: tuple[Ref, ...] = ()
    order: tuple[Op, ...] = ()
    writes: tuple[Buffer, ...] = ()
    written_bytes: int = 0
    # Renaming ops that this one reads through; they are issued right before it.
    renames: tuple[Op, ...] = ()
    escapes: bool = False
    task: int = -1

    @property
    def instruction(self) -> Instruction:
        return self.node.instruction


@dataclass(eq=False, slots=True)
class Task:
    """A kernel, a collective, or an opaque loop or branch.

    ``seconds`` is its time on ``stream``; stream -1 is compute. ``moved_bytes`` go over the wire or to and
    from memory. ``latency_s`` is the part of a collective's time that does not grow with its size.
    ``extra_bytes`` are used while the task runs or is in flight. A bucket has an op for each member.
    """

    index: int
    ops: list[Op]
    seconds: float = 0.0
    stream: int = -1
    moved_bytes: float = 0.0
    latency_s: float = 0.0
    collective: Collective | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    extra_bytes: int = 0

    @property
    def is_collective(self) -> bool:
        return self.collective is not None

    @property
    def name(self) -> str:
        """The instruction that stands for the task: the collective, or the kernel's last op."""
        op = self.ops[0] if self.is_collective else self.ops[-1]
        return op.instruction.name


@dataclass(eq=False)
class Graph:
    """Tasks of a block. ``buffers[i]`` has the size of buffer i; ``kept`` those never freed.

    ``streams`` names each stream of collectives; ``base_bytes`` are live from the start.
    """

    tasks: list[Task]
    buffers: list[int]
    kept: list[bool]
    streams: list[str]
    base_bytes: int
    initial: list[int] = field(default_factory=list)  # buffers alive from the start

    @property
    def compute_seconds(self) -> float:
        return sum(task.seconds for task in self.tasks if not task.is_collective)

    def stream_seconds(self) -> list[float]:
        totals = [0.0] * len(self.streams)
        for task in self.tasks:
            if task.is_collective:
                totals[task.stream] += task.seconds
        return totals


def build(
    block: BlockGraph,
    costs: CostTable,
    donated: Iterable[int] = (),
    opaque: Callable[[Node], float] = lambda node: 0.0,
) -> Graph:
    """The task graph of a block. ``donated`` are positions of parameters that may be freed.

    ``opaque`` tells the seconds of a loop or branch that is not laid out.
    """
    layout = _Layout(costs)
    given_up = set(donated)
    env: dict[Value, Ref] = {}
    initial: list[Buffer] = []
    for position, parameter in enumerate(block.parameters):
        assert parameter.type is not None
        buffer = Buffer(parameter.type.nbytes, None, position not in given_up)
        initial.append(buffer)
        env[parameter] = Ref((), buffer, buffer.nbytes)
    results = layout.lay_out(block, env, ())
    for ref in results:
        ref.buffer.kept = True
    return _tasks(layout.ops, initial, costs, opaque)


class _Layout:
    """Walks blocks and makes ops; renaming nodes become part of the references to their sources."""

    def __init__(self, costs: CostTable) -> None:
        self.costs = costs
        self.ops: list[Op] = []
        self.fence: Op | None = None
        self.since_fence: list[Op] = []
        self._materialized: dict[int, set[Node]] = {}

    def lay_out(
        self,
        block: BlockGraph,
        env: dict[Value, Ref],
        iteration: tuple[int, ...],
        outer: tuple[Op, ...] = (),
    ) -> list[Ref]:
        """Append the block's ops; gives its results. ``outer`` come before all of them."""
        done: dict[Node, tuple[Op, ...]] = {}
        materialized = self._materialized_broadcasts(block)
        for node in block.nodes:
            order = self._order(node, done) + outer
            reads = [
                self._read(value, env, done) for value in node.operands if value.type is not None
            ]
            if node.kind is NodeKind.LOOP:
                last = self._loop(node, reads, order, iteration, env)
                if last is not None:
                    done[node] = last
                    continue
            source = reads[0] if reads and _renames(node, node in materialized) else None
            if source is not None:
                before = tuple(dict.fromkeys([*(o for r in reads for o in r.before), *order]))
                op = Op(-1, node, iteration, renames=tuple(o for r in reads for o in r.renames))
                (result,) = node.results
                assert result.type is not None
                nbytes = min(result.type.nbytes, source.nbytes)
                env[result] = Ref(before, source.buffer, nbytes, (op,))
                done[node] = before
                continue
            op = self._append(node, reads, order, iteration)
            done[node] = (op,)
            for result in node.results:
                if result.type is None:
                    continue
                buffer = self._written(op, result, reads)
                env[result] = Ref((op,), buffer, result.type.nbytes)
        return [self._read(value, env, done) for value in block.results]

    def _append(
        self, node: Node, reads: Sequence[Ref], order: tuple[Op, ...], iteration: tuple[int, ...]
    ) -> Op:
        fences = node.blocks or (node.kind is NodeKind.COMPUTE and node.has_side_effect)
        if fences:
            order = (*order, *self.since_fence)
        if self.fence is not None:
            order = (*order, self.fence)
        op = Op(
            len(self.ops),
            node,
            iteration,
            tuple(reads),
            tuple(dict.fromkeys(order)),
            renames=tuple(dict.fromkeys(o for r in reads for o in r.renames)),
        )
        self.ops.append(op)
        if fences:
            self.fence, self.since_fence = op, []
        else:
            self.since_fence.append(op)
        return op

    def _written(self, op: Op, result: Value, reads: Sequence[Ref]) -> Buffer:
        """The buffer of a result. An update in place stays where it is unless that is an input."""
        assert result.type is not None
        opcode = op.instruction.opcode
        if opcode in _IN_PLACE and reads and reads[0].buffer.producer is not None:
            op.writes = (*op.writes, reads[0].buffer)
            op.written_bytes += sum(r.nbytes for r in reads[1:])
            return reads[0].buffer
        buffer = Buffer(result.type.nbytes, op)
        op.writes = (*op.writes, buffer)
        op.written_bytes += buffer.nbytes
        return buffer

    def _read(self, value: Value, env: dict[Value, Ref], done: dict[Node, tuple[Op, ...]]) -> Ref:
        root = value.root
        if root.node is not None and root.node.kind is NodeKind.CHEAP:
            ref = Ref((), _nothing(), 0)
        else:
            ref = env[root]
        extra = [op for node in value.order for op in done.get(node, ())]
        if extra:
            ref = Ref(
                tuple(dict.fromkeys([*ref.before, *extra])), ref.buffer, ref.nbytes, ref.renames
            )
        return ref

    def _order(self, node: Node, done: dict[Node, tuple[Op, ...]]) -> tuple[Op, ...]:
        if not node.order:
            return ()
        return tuple(op for before in node.order for op in done.get(before, ()))

    def _materialized_broadcasts(self, block: BlockGraph) -> set[Node]:
        """Broadcasts and slices that a collective, a loop or the block's result takes as arrays."""
        found = self._materialized.get(id(block))
        if found is None:
            found = set()
            wanted = {v.root for v in block.results}
            for node in block.nodes:
                if node.is_runtime:
                    wanted.update(v.root for v in node.operands)
            for node in reversed(block.nodes):
                if any(result in wanted for result in node.results):
                    found.add(node)
                    if _renames(node, True):
                        wanted.add(node.operands[0].root)
            self._materialized[id(block)] = found
        return found

    def _loop(
        self,
        node: Node,
        reads: list[Ref],
        order: tuple[Op, ...],
        iteration: tuple[int, ...],
        env: dict[Value, Ref],
    ) -> tuple[Op, ...] | None:
        """Lay out a loop of known length. Gives its last iteration's ops, or None if it is opaque."""
        trips = trips_of(node)
        body = node.blocks[1]
        if trips is None or trips * len(body.nodes) > MAX_LAID_OUT - len(self.ops):
            return None
        carried = reads
        first = len(self.ops)
        for step in range(trips):
            first = len(self.ops)
            inner: dict[Value, Ref] = dict(zip(body.parameters, carried, strict=True))
            carried = self.lay_out(body, inner, (*iteration, step), order)
        for result, ref in zip(node.results, carried, strict=True):
            env[result] = ref
        return tuple(op for op in self.ops[first:] if op.node.is_runtime) + tuple(
            op for ref in carried for op in ref.before
        )


def _nothing() -> Buffer:
    return Buffer(0, None, True)


def _renames(node: Node, materialized: bool) -> bool:
    """Whether a node's result is its first operand under another name."""
    if node.kind is not NodeKind.COMPUTE or len(node.results) != 1:
        return False
    instruction = node.instruction
    opcode = instruction.opcode
    if opcode in _VIEWS:
        return True
    if opcode in _SLICES:
        return _is_contiguous_slice(instruction)
    if opcode == "broadcast":
        return not materialized
    if opcode == "transpose":
        return _keeps_layout(instruction)
    if opcode == "reduce-precision":
        # XLA's code of bf16, whose own 8 and 7 bits this spells out.
        return instruction.shape.element_type == 16
    return False


def _is_contiguous_slice(instruction: Instruction) -> bool:
    """Whether all dimensions below the outermost cut one are taken whole (row-major)."""
    taken = instruction.shape.dimensions
    whole = instruction.operands[0].shape.dimensions
    cut = [i for i, (a, b) in enumerate(zip(taken, whole, strict=True)) if a != b]
    return not cut or all(taken[i] == 1 for i in range(cut[-1]))


def _keeps_layout(instruction: Instruction) -> bool:
    """Whether a transposition leaves every element where it is: its layout is permuted alike."""
    before = list(instruction.operands[0].shape.layout.minor_to_major)
    after = list(instruction.shape.layout.minor_to_major)
    permutation = list(instruction.proto.dimensions)
    if len(before) != len(permutation) or len(after) != len(permutation):
        return False
    return [permutation[d] for d in after] == before


@dataclass(eq=False, slots=True)
class _Keys:
    """What decides which ops may share a task, by op index."""

    above: list[int]
    below: list[int]
    level: list[int]


def _predecessors(op: Op) -> Iterator[Op]:
    for ref in op.reads:
        yield from ref.before
    yield from op.order


def _tasks(
    ops: list[Op], initial: list[Buffer], costs: CostTable, opaque: Callable[[Node], float]
) -> Graph:
    before = [sorted({p.index for p in _predecessors(op)}) for op in ops]
    after: list[list[int]] = [[] for _ in ops]
    for index, earlier in enumerate(before):
        for e in earlier:
            after[e].append(index)
    cluster = _cluster(ops, before, after)

    numbers: dict[int, int] = {}
    tasks: list[Task] = []
    for op in ops:
        root = cluster[op.index]
        if root not in numbers:
            numbers[root] = len(tasks)
            tasks.append(Task(len(tasks), []))
        op.task = numbers[root]
        tasks[op.task].ops.append(op)
    # A kernel is numbered by its last op, so that tasks are in topological order.
    ranked = _topological(tasks, ops, before)
    graph = Graph(ranked, [], [], [], 0)
    _connect(graph, ops, before, initial)
    _price(graph, costs, opaque)
    return graph


def _is_single(op: Op) -> bool:
    return op.node.kind is not NodeKind.COMPUTE or (
        op.instruction.opcode in _KERNELS or op.node.has_side_effect
    )


def _cluster(ops: list[Op], before: list[list[int]], after: list[list[int]]) -> list[int]:
    """Representative op of each op's task."""
    count = len(ops)
    above, below, level = [0] * count, [0] * count, [0] * count
    single = [_is_single(op) for op in ops]
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
        alike = [s for s in after[i] if above[s] == above[i] and below[s] == below[i]]
        level[i] = min((level[s] for s in alike), default=level[i])
        if ops[i].instruction.opcode != "reduce":
            # An op that only one kernel reads is computed there.
            readers = {None if single[s] else key[s] for s in after[i]}
            if len(readers) == 1 and None not in readers and not any(b.kept for b in ops[i].writes):
                key[i] = readers.pop()
                for s in after[i]:
                    parent[find(i)] = find(s)
                continue
        key[i] = (above[i], below[i], level[i])
        for s in alike:
            if not single[s] and key[s] == key[i]:
                parent[find(i)] = find(s)
    return [find(i) for i in range(count)]


def _topological(tasks: list[Task], ops: list[Op], before: list[list[int]]) -> list[Task]:
    """Number tasks so that each comes after those it needs, in the module's order where free."""
    from heapq import heapify, heappop, heappush

    needs: list[set[int]] = [set() for _ in tasks]
    gives: list[set[int]] = [set() for _ in tasks]
    for op in ops:
        for p in before[op.index]:
            other = ops[p].task
            if other != op.task:
                needs[op.task].add(other)
                gives[other].add(op.task)
    waiting = [len(n) for n in needs]
    last = [task.ops[-1].index for task in tasks]
    ready = [(last[i], i) for i in range(len(tasks)) if not waiting[i]]
    heapify(ready)
    ranked: list[Task] = []
    while ready:
        _, i = heappop(ready)
        ranked.append(tasks[i])
        for s in gives[i]:
            waiting[s] -= 1
            if not waiting[s]:
                heappush(ready, (last[s], s))
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


def _price(graph: Graph, costs: CostTable, opaque: Callable[[Node], float]) -> None:
    streams: dict[object, int] = {}
    for task in graph.tasks:
        node = task.ops[0].node
        if node.collective is not None:
            collective = node.collective
            charge = costs.collective(collective)
            key, label = _stream_of(collective)
            if key not in streams:
                streams[key] = len(streams)
                taken = sum(name.split("#")[0] == label for name in graph.streams)
                graph.streams.append(f"{label}#{taken}" if taken else label)
            task.collective = collective
            task.stream = streams[key]
            task.seconds = charge.seconds
            task.moved_bytes = charge.wire_bytes
            task.latency_s = charge.link.latency_s if charge.link else 0.0
        elif node.is_runtime:
            task.seconds = opaque(node)
        else:
            flops_needed, task.moved_bytes = kernel_cost(task)
            task.seconds = costs.compute.seconds(flops_needed, task.moved_bytes)


def _stream_of(collective: Collective) -> tuple[object, str]:
    """What a stream is: a set of groups, or the point-to-point transfers over a set of devices."""
    stride, size = span(collective)
    if collective.is_point_to_point:
        members = tuple(sorted({m for pair in collective.pairs for m in pair}))
        return ("p2p", members), "p2p"
    return collective.groups, f"stride{stride}x{size}"


def kernel_cost(task: Task) -> tuple[float, float]:
    """(flops, bytes moved) of a kernel: each input read once, each output written once."""
    total = sum(flops(op.instruction) for op in task.ops)
    read: dict[Buffer, int] = {}
    moved = 0
    inside = {op.index for op in task.ops}
    for op in task.ops:
        partial = op.instruction.opcode in ("gather", "slice", "dynamic-slice")
        in_place = op.instruction.opcode in _IN_PLACE
        for position, ref in enumerate(op.reads):
            producer = ref.buffer.producer
            if producer is not None and producer.index in inside and producer is not op:
                continue
            nbytes = ref.nbytes
            if partial and position == 0:
                nbytes = min(nbytes, op.written_bytes)
            elif in_place and position == 0:
                nbytes = 0
            whole = max(ref.buffer.nbytes, nbytes)
            read[ref.buffer] = min(whole, read.get(ref.buffer, 0) + nbytes)
        if op.escapes:
            moved += op.written_bytes
    return total, float(moved + sum(read.values()))
