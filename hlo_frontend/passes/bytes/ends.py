"""Loops over batches that all devices leave together: each leaves such a loop when its own part is done.

``vmap`` of ``lax.while_loop`` runs until no batch goes on, and leaves those that are done as they are:

    while any(p(carries)):
        carries = select(p(carries), body(carries), carries)

If the batches are spread over devices, XLA reduces ``any`` over all of them in every iteration. Iterations
behind the last one of a device's own part change nothing there, so the device needs no word from others: the
loop has the same results, bit for bit, and becomes compute. This is proved from the loop's own instructions:
with all of p false, every carry is what it was before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from stretto.collectives.ops import Kind, Reduction

from ...edit import Editor
from ...graph import Computation, Instruction
from ...schema import TUPLE, HloComputationProto, HloInstructionProto
from ...values import BlockGraph, Node, NodeKind, Value, all_nodes

# Ops of one operand that give the same elements in another shape or order.
_MOVES = frozenset({"bitcast", "broadcast", "copy", "reshape", "transpose"})
# Fields of an instruction that say nothing of what it computes.
_NAMES = (
    "name",
    "id",
    "operand_ids",
    "called_computation_ids",
    "control_predecessor_ids",
    "metadata",
    "sharding",
)


def end_alone(block: BlockGraph) -> list[Node]:
    """Make loops of a block compute where their devices need not leave them together. Gives the reductions
    that go. Loops within loops are compute only if the outer one is."""
    gone: list[Node] = []
    editor = Editor(block)
    for node in block.nodes:
        ends = _ends(node) if node.kind is NodeKind.LOOP else None
        if ends is None or node in editor.ordered:
            continue
        made = Node(
            NodeKind.COMPUTE,
            _without(node.instruction, {end.instruction for end in ends}),
            -1,
            list(node.operands),
            node.order,
        )
        made.results = [Value(v.type, made, i) for i, v in enumerate(node.results)]
        editor.put_behind(node, [made])
        for old, new in zip(node.results, made.results, strict=True):
            editor.replace(old, new)
        editor.remove(node)
        gone += ends
    if gone:
        editor.commit()
    return gone


def _ends(loop: Node) -> list[Node] | None:
    """The reductions of a loop and of those in it, if all that it communicates is them; None if not."""
    inner = [node for part in loop.blocks for node in all_nodes(part)]
    if not _is_flat(loop) or any(node.kind is NodeKind.LOGICAL_ID for node in inner):
        return None
    if any(node.instruction.has_side_effect for node in inner if not node.is_runtime):
        return None
    found: list[Node] = []
    for node in (loop, *inner):
        if node.kind is NodeKind.LOOP:
            end = _end(node)
            if end is not None:
                found.append(end)
    communicates = {node for node in inner if node.kind is NodeKind.COLLECTIVE}
    return found if found and communicates == set(found) else None


def _is_flat(loop: Node) -> bool:
    """Whether it has carries that are arrays, one for each operand."""
    parts = loop.instruction.shape.tuple_shapes
    arrays = all(part.element_type != TUPLE for part in parts)
    return arrays and len(parts) == len(loop.operands) == len(loop.results)


def _end(loop: Node) -> Node | None:
    """The reduction over devices that the condition of a loop gives, if they need not leave it together."""
    condition, body = loop.blocks
    (result,) = condition.results
    end = result.node
    if end is None or end.kind is not NodeKind.COLLECTIVE or len(end.operands) != 1:
        return None
    collective = end.collective
    assert collective is not None
    if collective.kind is not Kind.ALL_REDUCE or collective.reduction is not Reduction.OR:
        return None
    if end.instruction.opcode != "all-reduce" or end.instruction.control_predecessors:
        return None
    some = _any_of(end.operands[0])
    if some is None or any(v.barrier is not None for n in condition.nodes for v in n.operands):
        return None
    keys = _Keys()
    for k, (given, carry, left) in enumerate(
        zip(loop.operands, body.parameters, body.results, strict=True)
    ):
        # XLA computes ahead of a loop what the body needs of what it does not change.
        same = left.root is carry.root and given.barrier is None
        number = keys.of(given) if same else keys.number(("carry", k))
        keys.known[carry] = keys.known[condition.parameters[k]] = number
    false = _False(keys, keys.of(some))
    kept = (
        false.keeps(value, parameter)
        for value, parameter in zip(body.results, body.parameters, strict=True)
    )
    return end if all(kept) else None


def _any_of(value: Value) -> Value | None:
    """The predicate of which ``value`` says whether it is true anywhere."""
    node = value.node
    if node is not None and node.instruction.opcode == "reduce" and len(node.operands) == 2:
        (reducer,) = node.instruction.called
        if reducer.root.opcode != "or":
            return None
        return _moved(node.operands[0])
    return _moved(value)


def _moved(value: Value) -> Value:
    """The value whose elements a value has, in another shape."""
    value = value.root
    while value.node is not None and value.node.instruction.opcode in _MOVES:
        if len(value.node.operands) != 1:
            break
        value = value.node.operands[0].root
    return value


@dataclass
class _Keys:
    """Numbers for values: equal only for those that the same instructions give of the same carries."""

    known: dict[Value, int] = field(default_factory=dict)
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    _computations: dict[Computation, Hashable] = field(default_factory=dict)

    def number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def of(self, value: Value) -> int:
        todo = [value.root]
        while todo:
            root = todo[-1]
            node = root.node
            if root in self.known:
                todo.pop()
            elif node is None or node.is_runtime:
                self.known[root] = self.number(root)
            else:
                missing = [v.root for v in node.operands if v.root not in self.known]
                todo += missing
                if not missing:
                    operands = tuple([self.known[v.root] for v in node.operands])
                    key = self._spelled(node.instruction), operands, root.index
                    self.known[root] = self.number(key)
        return self.known[value.root]

    def _spelled(self, instruction: Instruction) -> Hashable:
        proto = HloInstructionProto()
        proto.CopyFrom(instruction.proto)
        for name in _NAMES:
            proto.ClearField(name)
        called = tuple([self._computation(c) for c in instruction.called])
        return proto.SerializeToString(deterministic=True), called

    def _computation(self, computation: Computation) -> Hashable:
        if computation not in self._computations:
            place = {i: n for n, i in enumerate(computation.instructions)}
            self._computations[computation] = self.number(
                tuple(
                    (self._spelled(i), tuple([place[o] for o in i.operands]), i is computation.root)
                    for i in computation.instructions
                )
            )
        return self._computations[computation]


@dataclass(frozen=True)
class _False:
    """What follows from all of a predicate being false. ``predicate``: its number."""

    keys: _Keys
    predicate: int

    def keeps(self, value: Value, carry: Value) -> bool:
        """Whether ``value`` is then what the carry was. Elements that do not go on are all of its own."""
        return self._keeps(value, carry, _DEPTH)

    def _keeps(self, value: Value, carry: Value, depth: int) -> bool:
        if value.root is carry.root:
            return True
        node = value.node
        if node is None or value.barrier is not None or not depth:
            return False
        operands = node.operands
        match node.instruction.opcode:
            case "select":
                guard, yes, no = operands
                if self._is(guard, depth) and self._keeps(no, carry, depth - 1):
                    return True
                return self._is_not(guard, depth) and self._keeps(yes, carry, depth - 1)
            case "or":
                left, right = operands
                return any(
                    self._is(one, depth) and self._keeps(other, carry, depth - 1)
                    for one, other in ((left, right), (right, left))
                )
            case "and":
                left, right = operands
                return any(
                    self._is_not(one, depth) and self._keeps(other, carry, depth - 1)
                    for one, other in ((left, right), (right, left))
                )
        return False

    def _is(self, value: Value, depth: int) -> bool:
        """Whether all of ``value`` is false then."""
        value = _moved(value)
        if self.keys.of(value) == self.predicate:
            return True
        node = value.node
        if node is None or not depth:
            return False
        match node.instruction.opcode:
            case "and":
                return any(self._is(v, depth - 1) for v in node.operands)
            case "or":
                return all(self._is(v, depth - 1) for v in node.operands)
        return False

    def _is_not(self, value: Value, depth: int) -> bool:
        """Whether all of ``value`` is true then."""
        node = _moved(value).node
        return (
            node is not None
            and node.instruction.opcode == "not"
            and self._is(node.operands[0], depth - 1)
        )


# How deep selections may be nested.
_DEPTH = 8


def _without(instruction: Instruction, gone: set[Instruction]) -> Instruction:
    """The same instruction, which calls computations without those of ``gone``, whose readers read their
    operands."""
    made: dict[Computation, Computation] = {}
    for computation in _called_first(instruction):
        called = {c.proto.id: made.get(c, c) for i in computation.instructions for c in i.called}
        some = gone.intersection(computation.instructions)
        if some or any(made.get(c, c) is not c for i in computation.instructions for c in i.called):
            proto = _copied(computation.proto, some)
            made[computation] = computation.module.linked(proto, called)
    copy = Instruction(instruction.proto, instruction.computation)
    copy.operands = instruction.operands
    copy.called = tuple([made.get(c, c) for c in instruction.called])
    return copy


def _called_first(instruction: Instruction) -> Iterator[Computation]:
    """The computations that are called from an instruction, each behind those that it calls."""
    seen: set[Computation] = set()

    def walk(computation: Computation) -> Iterator[Computation]:
        if computation in seen:
            return
        seen.add(computation)
        for inner in computation.instructions:
            for called in inner.called:
                yield from walk(called)
        yield computation

    for called in instruction.called:
        yield from walk(called)


def _copied(proto: Any, gone: set[Instruction]) -> Any:
    """A copy of a computation without some instructions."""
    instead = {i.proto.id: i.operands[0].proto.id for i in gone}
    made = HloComputationProto()
    made.CopyFrom(proto)
    kept = [i for i in made.instructions if i.id not in instead]
    del made.instructions[:]
    for instruction in kept:
        ids = [instead.get(i, i) for i in instruction.operand_ids]
        after = [i for i in instruction.control_predecessor_ids if i not in instead]
        del instruction.operand_ids[:], instruction.control_predecessor_ids[:]
        instruction.operand_ids.extend(ids)
        instruction.control_predecessor_ids.extend(after)
        made.instructions.add().CopyFrom(instruction)
    made.root_id = instead.get(proto.root_id, proto.root_id)
    return made
