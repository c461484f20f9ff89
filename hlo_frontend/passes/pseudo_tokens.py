"""Scalars that other front ends use for order become order; their arithmetic leaves the program.

Two forms are known. An all-reduce (or another collective that takes several operands) has one more operand
that is a zero, ``y, t' = all-reduce(x, t)``; or a zero is added to what a collective takes, ``x' = x + t``.
The zero is a constant or the product of a zero and one element of an earlier result, ``t = 0 * y[0, …]``,
perhaps converted, reshaped, broadcast, or carried through loops and branches. In arithmetic without
infinities and NaNs such a zero changes nothing; what it does is to make one collective come after another.

What is proven before anything is removed: the value is such a zero (`_Zeros`, optimistic for loop
carries), and nothing needs it but collectives and sums of these two forms (`_Liveness`: a fixpoint from the
program's results). A zero that anything else needs, a result of the program for one, stays with all its sums.

Invariant: every collective that came after another through a removed zero still does, by `Node.order`.
Because ``0 * y`` is NaN where y is not finite, a program whose pseudo-token would have spread that NaN does
not spread it after this pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stretto.collectives.ops import Kind

from ..ops import op_of
from ..schema import LiteralProto
from ..values import BlockGraph, Node, NodeKind, Value, all_blocks, number

_SUMS = frozenset({"add", "subtract"})
_SEPARATE_OPERANDS = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.PERMUTE)


def remove_pseudo_tokens(entry: BlockGraph) -> bool:
    """Turn the pseudo-tokens of a program into order, in place. Whether there were any."""
    zeros = _Zeros(entry)
    if not zeros.sums and not zeros.extra:
        return False
    liveness = _Liveness(entry, zeros)
    if not liveness.found:
        return False
    _Rewrite(liveness).block(entry)
    return True


def _branch_parameters(node: Node) -> Iterator[tuple[int, BlockGraph, int]]:
    """(position among the node's operands, block, position among its parameters) of a branch."""
    position = 1
    for block in node.blocks:
        for i in range(len(block.parameters)):
            yield position, block, i
            position += 1


class _Zeros:
    """Finds the zeros.

    ``thin[value]``: the root value is a zero; true if it depends on other values through single
    elements only. ``sums``: sums of a value and a thin zero, for collectives: node to (position of
    the value, position of the zero). ``extra``: positions of collectives' operands that are zeros.
    """

    def __init__(self, entry: BlockGraph) -> None:
        self.thin: dict[Value, bool] = {}
        self.sums: dict[Node, tuple[int, int]] = {}
        self.extra: dict[Node, set[int]] = {}
        self._refuted: set[Value] = set()
        self._entry_parameters = set(entry.parameters)
        self._again = True
        while self._again:
            self._again = False
            self.thin.clear()
            self.sums.clear()
            self.extra.clear()
            self._block(entry)
        if self.sums:
            feeding: set[Node] = set()
            for block in all_blocks(entry):
                feeding |= _feeding_collectives(block)
            self.sums = {node: at for node, at in self.sums.items() if node in feeding}

    def of(self, value: Value) -> bool | None:
        """Thin or not, for a zero; None for other values."""
        root = value.root
        found = self.thin.get(root)
        node = root.node
        if found is not None or node is None or node.kind is not NodeKind.CHEAP:
            return found
        return True if _is_zero_constant(node) else None

    def _block(self, block: BlockGraph) -> None:
        for node in block.nodes:
            if node.kind is NodeKind.COMPUTE:
                self._compute(node)
            elif node.kind is NodeKind.COLLECTIVE:
                self._collective(node)
            elif node.kind is NodeKind.LOOP:
                self._loop(node)
            elif node.kind is NodeKind.BRANCH:
                self._branch(node)

    def _compute(self, node: Node) -> None:
        opcode = node.instruction.opcode
        if len(node.results) != 1 or not node.operands:
            return
        (result,) = node.results
        if op_of(opcode).moves:
            thin = self.of(node.operands[0])
            if thin is not None:
                self.thin[result] = thin or _is_single(result)
        elif opcode == "multiply":
            self._product(node, result)
        elif opcode in _SUMS:
            left, right = map(self.of, node.operands)
            if left is not None and right is not None:
                self.thin[result] = left and right
            elif right:
                self.sums[node] = (0, 1)
            elif left and opcode == "add":
                self.sums[node] = (1, 0)

    def _product(self, node: Node, result: Value) -> None:
        left, right = node.operands
        zeros = self.of(left), self.of(right)
        if zeros == (None, None):
            return
        if None not in zeros:
            self.thin[result] = all(zeros)
            return
        other = left if zeros[0] is None else right
        if self._is_earlier(other):
            self.thin[result] = _is_single(other)

    def _is_earlier(self, value: Value) -> bool:
        """Whether this is one element of something, or comes element by element from what a
        collective, a loop or a branch gave.
        """
        todo, seen = [value.root], set()
        while todo:
            root = todo.pop()
            if root in seen:
                continue
            seen.add(root)
            node = root.node
            if node is None:
                if root not in self._entry_parameters:
                    return True
            elif node.is_runtime:
                return True
            elif node.kind is NodeKind.COMPUTE:
                op = op_of(node.instruction.opcode)
                if op.reads_part and _size(root) == 1:
                    return True
                if op.moves:
                    todo.append(node.operands[0].root)
                elif op.elementwise:
                    todo += [v.root for v in node.operands]
        return False

    def _collective(self, node: Node) -> None:
        collective = node.collective
        assert collective is not None
        if collective.kind not in _SEPARATE_OPERANDS or node.reducer is not None:
            return
        found = {
            i
            for i, (operand, result) in enumerate(zip(node.operands, node.results, strict=True))
            if self.of(operand) and 1 in (_size(operand), _size(result))
        }
        if found and len(found) < len(node.operands):
            self.extra[node] = found
            for i in found:
                self.thin[node.results[i]] = True

    def _loop(self, node: Node) -> None:
        condition, body = node.blocks
        for i, operand in enumerate(node.operands):
            if body.parameters[i] in self._refuted or _size(operand) != 1:
                continue
            if self.of(operand):
                self.thin[condition.parameters[i]] = True
                self.thin[body.parameters[i]] = True
        self._block(condition)
        self._block(body)
        for i, parameter in enumerate(body.parameters):
            if parameter not in self.thin:
                continue
            if self.of(body.results[i]):
                self.thin[node.results[i]] = True
            else:
                self._refuted.add(parameter)
                self._again = True

    def _branch(self, node: Node) -> None:
        for position, block, i in _branch_parameters(node):
            operand = node.operands[position]
            if _size(operand) == 1 and self.of(operand):
                self.thin[block.parameters[i]] = True
        for block in node.blocks:
            self._block(block)
        for i, result in enumerate(node.results):
            if _size(result) == 1 and all(self.of(b.results[i]) for b in node.blocks):
                self.thin[result] = True


def _feeding_collectives(block: BlockGraph) -> set[Node]:
    """Nodes that collectives of this block take operands from, directly or moved."""
    feeding: set[Node] = set()
    for node in reversed(block.nodes):
        moves = node in feeding and node.kind is NodeKind.COMPUTE
        moves = moves and op_of(node.instruction.opcode).moves
        taken: Sequence[Value] = ()
        if node.kind is NodeKind.COLLECTIVE:
            taken = node.operands
        elif moves:
            taken = node.operands[:1]
        elif node in feeding and node.instruction.opcode in _SUMS:
            taken = node.operands  # several tokens may be added to one operand
        feeding.update(v.root.node for v in taken if v.root.node is not None)
    return feeding


class _Liveness:
    """What is needed, if sums and extra operands whose zeros nobody else needs are left out.

    ``values``: root values that are needed. ``sums``: the sums that go. ``found``: whether any sum
    or extra operand goes.
    """

    def __init__(self, entry: BlockGraph, zeros: _Zeros) -> None:
        self.extra = {node: set(found) for node, found in zeros.extra.items()}
        self.sums = dict(zeros.sums)
        self._entry = entry
        self._parameters: dict[Value, tuple[Node, int]] = {}
        for block in all_blocks(entry):
            for node in block.nodes:
                if node.kind is NodeKind.LOOP:
                    for inner in node.blocks:
                        for i, parameter in enumerate(inner.parameters):
                            self._parameters[parameter] = node, i
                elif node.kind is NodeKind.BRANCH:
                    for position, inner, i in _branch_parameters(node):
                        self._parameters[inner.parameters[i]] = node, position
        while True:
            self.values: set[Value] = set()
            self._spread()
            if not self._keep_shared():
                break
        self.found = bool(self.sums) or any(
            node.results[i] not in self.values for node, found in self.extra.items() for i in found
        )

    def _keep_shared(self) -> bool:
        """Keep sums and operands whose zero is needed for something else. Whether there were any."""
        kept = [n for n, (_, zero) in self.sums.items() if self._is_needed(n.operands[zero])]
        for node in kept:
            del self.sums[node]
        shared = [
            (node, i)
            for node, found in self.extra.items()
            for i in found
            if node.results[i] not in self.values and self._is_needed(node.operands[i])
        ]
        for node, i in shared:
            self.extra[node].discard(i)
        return bool(kept or shared)

    def _is_needed(self, value: Value) -> bool:
        """Whether a zero, or what it was moved from, is needed. A constant is no one's in particular."""
        while True:
            root = value.root
            node = root.node
            if node is not None and node.kind is NodeKind.CHEAP:
                return False
            if root in self.values:
                return True
            if node is None or node.kind is not NodeKind.COMPUTE:
                return False
            if not op_of(node.instruction.opcode).moves:
                return False
            value = node.operands[0]

    def kept_operands(self, node: Node) -> list[int]:
        """Positions of the operands that a collective keeps."""
        extra = self.extra.get(node, ())
        positions = range(len(node.operands))
        return [i for i in positions if i not in extra or node.results[i] in self.values]

    def _spread(self) -> None:
        todo: list[Value] = []
        for block in all_blocks(self._entry):
            for node in block.nodes:
                if node.kind is NodeKind.COLLECTIVE:
                    extra = self.extra.get(node, ())
                    todo += [v for i, v in enumerate(node.operands) if i not in extra]
                elif node.kind is NodeKind.LOOP:
                    todo += node.blocks[0].results
                elif node.kind is NodeKind.BRANCH:
                    todo.append(node.operands[0])
                elif node.kind is NodeKind.COMPUTE and node.has_side_effect:
                    todo += node.operands
        todo += self._entry.results
        while todo:
            root = todo.pop().root
            if root not in self.values:
                self.values.add(root)
                todo += self._needed_by(root)

    def _needed_by(self, root: Value) -> list[Value]:
        node = root.node
        if node is None:
            if root not in self._parameters:
                return []
            owner, i = self._parameters[root]
            if owner.kind is NodeKind.BRANCH:
                return [owner.operands[i]]
            return self._carry(owner, i)
        if node.kind is NodeKind.COMPUTE:
            return [node.operands[self.sums[node][0]]] if node in self.sums else node.operands
        if node.kind is NodeKind.COLLECTIVE:
            i = _position(node, root)
            return [node.operands[i]] if i in self.extra.get(node, ()) else []
        if node.kind is NodeKind.LOOP:
            return self._carry(node, _position(node, root))
        if node.kind is NodeKind.BRANCH:
            i = _position(node, root)
            return [block.results[i] for block in node.blocks]
        return []

    @staticmethod
    def _carry(loop: Node, i: int) -> list[Value]:
        """A carry is needed as a whole: initial value, parameters, what comes back, result."""
        condition, body = loop.blocks
        return [
            loop.operands[i],
            condition.parameters[i],
            body.parameters[i],
            body.results[i],
            loop.results[i],
        ]


class _Rewrite:
    """Takes out of the blocks what is not needed, and puts order in its place."""

    def __init__(self, liveness: _Liveness) -> None:
        self.liveness = liveness
        self._ancestors: dict[Node, tuple[Node, ...]] = {}

    def block(self, block: BlockGraph) -> None:
        for node in block.nodes:
            self._order(node)
        kept = [node for node in block.nodes if self._is_kept(node)]
        for node in kept:
            node.operands = [self._resolved(v) for v in node.operands]
            for inner in node.blocks:
                self.block(inner)
            self._leave_out(node)
        block.nodes = kept
        number(kept)
        block.results = [self._resolved(v) for v in block.results]

    def _is_kept(self, node: Node) -> bool:
        if node.kind is not NodeKind.COMPUTE or node.has_side_effect:
            return True
        return node not in self.liveness.sums and any(
            v in self.liveness.values for v in node.results
        )

    def _order(self, node: Node) -> None:
        """Order that came through what is left out."""
        added: list[Node] = []
        live = self.liveness.values
        if node.kind is NodeKind.COLLECTIVE:
            keeps = set(self.liveness.kept_operands(node))
            added = [
                n for i, v in enumerate(node.operands) if i not in keeps for n in self._before(v)
            ]
        elif node.is_runtime:
            added = [n for v in node.operands if v.root not in live for n in self._before(v)]
        node.order = tuple(dict.fromkeys([*self._expanded(node.order), *added]))

    def _expanded(self, order: Sequence[Node]) -> list[Node]:
        return [
            n for node in order for n in ([node] if self._is_kept(node) else self._runtime(node))
        ]

    def _before(self, value: Value) -> list[Node]:
        """The runtime nodes that whoever reads this value comes after."""
        node = value.root.node
        before = self._expanded(value.order)
        return before if node is None else [*before, *self._runtime(node)]

    def _runtime(self, node: Node) -> tuple[Node, ...]:
        """The node if it stays whatever happens, else the nearest such nodes above it."""
        if node.is_runtime or (node.kind is NodeKind.COMPUTE and node.has_side_effect):
            return (node,)
        if node.kind is not NodeKind.COMPUTE:
            return ()
        todo, seen = [node], {node}
        found: dict[Node, None] = {}
        while todo:
            current = todo.pop()
            if current in self._ancestors:
                found.update(dict.fromkeys(self._ancestors[current]))
                continue
            above = [*current.order]
            for value in current.operands:
                above += value.order
                if value.root.node is not None:
                    above.append(value.root.node)
            for other in above:
                if other.is_runtime or other.has_side_effect:
                    found[other] = None
                elif other not in seen and other.kind is NodeKind.COMPUTE:
                    seen.add(other)
                    todo.append(other)
        self._ancestors[node] = tuple(sorted(found, key=lambda n: n.position))
        return self._ancestors[node]

    def _resolved(self, value: Value) -> Value:
        """The value with sums of a zero looked through, to be read after what the zero came after."""
        node = value.root.node
        if node is None or node not in self.liveness.sums:
            if value.order:
                value.order = tuple(dict.fromkeys(self._expanded(value.order)))
            return value
        kept, zero = self.liveness.sums[node]
        order = [*self._expanded(value.order), *node.order, *self._before(node.operands[zero])]
        return self._resolved(node.operands[kept]).view(tuple(dict.fromkeys(order)), value.barrier)

    def _leave_out(self, node: Node) -> None:
        live = self.liveness.values
        if node.kind is NodeKind.COLLECTIVE:
            keeps = self.liveness.kept_operands(node)
            if len(keeps) == len(node.operands):
                return
            assert node.collective is not None
            node.collective = replace(
                node.collective,
                operands=tuple(node.collective.operands[i] for i in keeps),
                results=tuple(node.collective.results[i] for i in keeps),
            )
            node.operands = [node.operands[i] for i in keeps]
            node.results = [node.results[i] for i in keeps]
        elif node.kind is NodeKind.LOOP:
            condition, body = node.blocks
            keeps = [i for i, parameter in enumerate(body.parameters) if parameter in live]
            for values in (condition.parameters, body.parameters, body.results):
                values[:] = [values[i] for i in keeps]
            node.operands = [node.operands[i] for i in keeps]
            node.results = [node.results[i] for i in keeps]
        elif node.kind is NodeKind.BRANCH:
            operands = node.operands[:1]
            for position, block, i in _branch_parameters(node):
                if block.parameters[i] in live:
                    operands.append(node.operands[position])
            keeps = [i for i, result in enumerate(node.results) if result in live]
            for block in node.blocks:
                block.parameters[:] = [p for p in block.parameters if p in live]
                block.results[:] = [block.results[i] for i in keeps]
            node.operands = operands
            node.results = [node.results[i] for i in keeps]
        else:
            return
        for index, result in enumerate(node.results):
            result.index = index


def _position(node: Node, result: Value) -> int:
    return next(i for i, value in enumerate(node.results) if value is result)


def _size(value: Value) -> int:
    return -1 if value.type is None else value.type.size


def _is_single(value: Value) -> bool:
    """Whether a value is one element, or copies of one."""
    while _size(value) != 1:
        node = value.root.node
        if node is None or node.is_runtime or not op_of(node.instruction.opcode).moves:
            return False
        value = node.operands[0]
    return True


def _is_zero_constant(node: Node) -> bool:
    """Whether a cheap node is a zero, or copies of one."""
    while node.instruction.opcode == "broadcast":
        source = node.operands[0].root.node
        if source is None:
            return False
        node = source
    if node.instruction.opcode != "constant":
        return False
    return is_zero_literal(node.instruction.proto.literal)


def is_zero_literal(literal: bytes) -> bool:
    """Whether the data of a serialized ``LiteralProto`` are zero bytes (so minus zero is no zero).

    Data of a type that `schema` does not list are taken for something else.
    """
    fields = LiteralProto.FromString(literal).ListFields()
    data = [value for field, value in fields if field.name != "shape"]
    return bool(data) and not any(map(_any_bit, data))


def _any_bit(data: Any) -> bool:
    """Whether a field of a literal, bytes or numbers, has a bit that is set."""
    return any(data if isinstance(data, bytes) else np.array(data).tobytes())
