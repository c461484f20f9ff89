"""Blocks to ops: the nodes of a block with the buffers that they read and write.

A loop or a branch is one op. Loops, branches and ops with unknown side effects are fences: the ops before one
in the module stay before it, those after it stay after it.

Nodes that only rename data (reshapes, layout changes, contiguous slices) and broadcasts become no ops. An op
that reads one reads its source instead, through a `Ref` that lists the renaming ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..graph import Instruction
from ..ops import op_of
from ..values import Barrier, BlockGraph, Node, NodeKind, Value, carried_results
from .model import Buffer, Op, Ref


def lay_out(block: BlockGraph, donated: Iterable[int]) -> tuple[list[Op], list[Buffer]]:
    """The ops of a block and the buffers of its parameters. Only buffers of donated parameters are freed."""
    layout = _Layout()
    given_up = set(donated)
    env: dict[Value, Ref] = {}
    initial: list[Buffer] = []
    arriving = {
        block.parameters[k]: node
        for node in block.crossing
        for _, k in carried_results(node, block.results)
    }
    for position, parameter in enumerate(block.parameters):
        assert parameter.type is not None
        buffer = Buffer(parameter.type.nbytes, None, position not in given_up)
        initial.append(buffer)
        before = (layout.arrival(arriving[parameter]),) if parameter in arriving else ()
        env[parameter] = Ref(before, buffer, buffer.nbytes)
    for ref in layout.lay_out(block, env):
        ref.buffer.kept = True
    return layout.ops, initial


class _Layout:
    """Walks a block and makes ops; renaming nodes become part of the references to their sources."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.fence: Op | None = None
        self.since_fence: list[Op] = []
        self.arrivals: dict[Node, Op] = {}
        self._before_parameters: dict[Barrier, list[Op]] = {}

    def arrival(self, node: Node) -> Op:
        """The op that stands for the arrival of a collective that the iteration before has started."""
        if node not in self.arrivals:
            self.arrivals[node] = Op(len(self.ops), node, arrives=True)
            self.ops.append(self.arrivals[node])
        return self.arrivals[node]

    def lay_out(self, block: BlockGraph, env: dict[Value, Ref]) -> list[Ref]:
        """Append the block's ops; gives its results."""
        done: dict[Node, tuple[Op, ...]] = {}
        materialized = _materialized_broadcasts(block)
        for node in block.nodes:
            order = self._order(node, done)
            reads = [
                self._read(value, env, done) for value in node.operands if value.type is not None
            ]
            source = reads[0] if reads and _renames(node, node in materialized) else None
            if source is not None:
                before = tuple(dict.fromkeys([*(o for r in reads for o in r.before), *order]))
                op = Op(-1, node, renames=tuple(o for r in reads for o in r.renames))
                (result,) = node.results
                assert result.type is not None
                nbytes = min(result.type.nbytes, source.nbytes)
                behind = tuple(dict.fromkeys(o for r in reads for o in r.behind))
                env[result] = Ref(before, source.buffer, nbytes, (op,), behind)
                done[node] = before
                continue
            op = self._append(node, reads, order)
            done[node] = (op,)
            for result in node.results:
                if result.type is None:
                    continue
                buffer = self._written(op, result, reads)
                env[result] = Ref((op,), buffer, result.type.nbytes)
        return [self._read(value, env, done) for value in block.results]

    def _append(self, node: Node, reads: Sequence[Ref], order: tuple[Op, ...]) -> Op:
        fences = node.blocks or (node.kind is NodeKind.COMPUTE and node.has_side_effect)
        if fences:
            order = (*order, *self.since_fence)
        if self.fence is not None:
            order = (*order, self.fence)
        if node in self.arrivals:
            order = (*order, self.arrivals[node])  # nothing is started anew before it was awaited
        op = Op(
            len(self.ops),
            node,
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
        """The buffer of a result: the operand's for an update in place, unless that is a kept input."""
        assert result.type is not None
        opcode = op.instruction.opcode
        if op_of(opcode).in_place and reads and not _is_kept_input(reads[0].buffer):
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
        fence = value.fence
        if fence is not None:
            extra += self._entering(fence, env)
        behind: list[Op] = []
        if value.barrier is not None and value.barrier is not fence:
            behind = [op for node in value.comes_after() for op in done.get(node, ())]
            behind += self._entering(value.barrier, env)
        if extra or behind:
            ref = Ref(
                tuple(dict.fromkeys([*ref.before, *extra])),
                ref.buffer,
                ref.nbytes,
                ref.renames,
                tuple(dict.fromkeys([*ref.behind, *behind])),
            )
        return ref

    def _entering(self, barrier: Barrier, env: dict[Value, Ref]) -> Sequence[Op]:
        """The ops before the parameters of the block that enter a barrier; parameters have no node."""
        found = self._before_parameters.get(barrier)
        if found is None:
            entering = (v.root for v in barrier.operands if v.root.node is None)
            found = [op for v in entering if v.type is not None for op in env[v].before]
            self._before_parameters[barrier] = found
        return found

    def _order(self, node: Node, done: dict[Node, tuple[Op, ...]]) -> tuple[Op, ...]:
        if not node.order:
            return ()
        return tuple(op for before in node.order for op in done.get(before, ()))


def _materialized_broadcasts(block: BlockGraph) -> set[Node]:
    """Broadcasts and slices that a collective, a loop or the block's result takes as arrays."""
    found: set[Node] = set()
    wanted = {v.root for v in block.results}
    for node in block.nodes:
        if node.is_runtime:
            wanted.update(v.root for v in node.operands)
    for node in reversed(block.nodes):
        if any(result in wanted for result in node.results):
            found.add(node)
            if _renames(node, True):
                wanted.add(node.operands[0].root)
    return found


def _is_kept_input(buffer: Buffer) -> bool:
    return buffer.producer is None and buffer.kept


def _nothing() -> Buffer:
    return Buffer(0, None, True)


def _renames(node: Node, materialized: bool) -> bool:
    """Whether a node's result is its first operand under another name."""
    if node.kind is not NodeKind.COMPUTE or len(node.results) != 1:
        return False
    instruction = node.instruction
    opcode = instruction.opcode
    if op_of(opcode).renames:
        return True
    if op_of(opcode).reads_part and op_of(opcode).moves:  # and so a slice
        return _is_contiguous_slice(instruction)
    if opcode == "broadcast":
        return not materialized
    if opcode == "transpose":
        return _keeps_layout(instruction)
    if opcode == "reduce-precision":
        # To bf16 (XLA's code 16) it changes nothing: XLA gives bf16's own 8 and 7 bits.
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
