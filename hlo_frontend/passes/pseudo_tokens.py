"""Replaces scalars that other front ends use as tokens by order, and removes their arithmetic.

Two forms are known. An all-reduce (or another collective that takes several operands) has one more operand
that is a zero, ``y, t' = all-reduce(x, t)``; or a zero is added to what a collective takes, ``x' = x + t``.
The zero is a constant or the product of a zero and one element of an earlier result, ``t = 0 * y[0, …]``,
perhaps converted, reshaped, broadcast, or carried through loops and branches. In arithmetic without
infinities and NaNs such a zero changes nothing; its only purpose is to order one collective after another.

Before anything is removed, two things are proved: the value is such a zero (`_Zeros`, optimistic for loop
carries), and only collectives and sums of these two forms need it (`_Liveness`: a fixpoint from the program's
results). A zero that anything else needs, as a result of the program does, stays with all its sums.

Invariant: a collective that came after another one through a removed zero still does, by `Node.order`.
Because ``0 * y`` is NaN where y is not finite, a program whose pseudo-token would have spread that NaN does
not spread it after this pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stretto.collectives.ops import Kind

from ..edit import Editor, restricted
from ..ops import op_of
from ..schema import LiteralProto
from ..values import BlockGraph, Node, NodeKind, Value, all_blocks

_SUMS = frozenset({"add", "subtract"})
_SEPARATE_OPERANDS = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.PERMUTE)


def remove_pseudo_tokens(entry: BlockGraph) -> bool:
    """Replace the pseudo-tokens of a program by order, in place. Whether there were any."""
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
        """Whether this is one element of an array, or computed element by element from a result of a
        collective, a loop or a branch.
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
    """The nodes whose results are operands of this block's collectives, directly or through moving ops."""
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
    """The values that are needed if sums and extra operands go whose zeros nothing else needs.

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
        """Keep sums and operands whose zeros something else needs. Whether there were any."""
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
        """Whether a zero, or the value that it was moved from, is needed. Constants are not asked for."""
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
        """All values of a carry, which are needed together: initial value, parameters, result of the body."""
        condition, body = loop.blocks
        return [
            loop.operands[i],
            condition.parameters[i],
            body.parameters[i],
            body.results[i],
            loop.results[i],
        ]


class _Rewrite:
    """Removes the values that nobody needs, according to `_Liveness`.

    What came after a removed node comes after the nearest runtime nodes above it (`_runtime_above`), not
    after the compute in between: a collective that is ordered after compute starts a level later (see
    `order`) than one that is ordered after a collective.
    """

    def __init__(self, liveness: _Liveness) -> None:
        self.liveness = liveness
        self._above: dict[Node, tuple[Node, ...]] = {}

    def block(self, block: BlockGraph) -> None:
        """Rewrite a block and the blocks inside it."""
        editor = Editor(block)
        sums, live = self.liveness.sums, self.liveness.values
        for node in block.nodes:
            if node.is_runtime:
                self._leave_out_operands(editor, node)
                for inner in node.blocks:
                    self.block(inner)
            elif node in sums:
                kept, zero = sums[node]
                order = (*node.order, *self._before(node.operands[zero]))
                editor.replace(node.results[0], node.operands[kept].view(order))
                editor.leave_out(node, self._runtime_above(node))
            elif (
                node.kind is NodeKind.COMPUTE
                and not node.has_side_effect
                and not any(v in live for v in node.results)
            ):
                editor.leave_out(node, self._runtime_above(node))
        editor.commit()

    def _leave_out_operands(self, editor: Editor, node: Node) -> None:
        """Remove operands of a runtime node that nobody needs, and the results that belong to them."""
        live = self.liveness.values
        if node.kind is NodeKind.COLLECTIVE:
            kept = kept_results = self.liveness.kept_operands(node)
            left_out = [v for i, v in enumerate(node.operands) if i not in kept]
        else:
            left_out = [v for v in node.operands if v.root not in live]
            if node.kind is NodeKind.LOOP:
                condition, body = node.blocks
                kept = kept_results = [i for i, p in enumerate(body.parameters) if p in live]
                for values in (condition.parameters, body.parameters, body.results):
                    values[:] = [values[i] for i in kept]
            else:
                kept = [0] + [p for p, b, i in _branch_parameters(node) if b.parameters[i] in live]
                kept_results = [i for i, result in enumerate(node.results) if result in live]
                for block in node.blocks:
                    block.parameters[:] = [p for p in block.parameters if p in live]
                    block.results[:] = [block.results[i] for i in kept_results]
        before = [n for v in left_out for n in self._before(v)]
        node.order = tuple(dict.fromkeys([*node.order, *before]))
        if len(kept) == len(node.operands) and len(kept_results) == len(node.results):
            return
        collective = node.collective
        if collective is not None:
            collective = restricted(collective, kept)
        operands = [node.operands[i] for i in kept]
        editor.change(node, operands, [node.results[i] for i in kept_results], collective)

    def _before(self, value: Value) -> tuple[Node, ...]:
        """The nodes that a reader of this value comes after."""
        node = value.root.node
        return value.order if node is None else (*value.order, *self._runtime_above(node))

    def _runtime_above(self, node: Node) -> tuple[Node, ...]:
        """The node itself if it is a runtime node or has a side effect, else the nearest such nodes above."""
        if node.has_side_effect:
            return (node,)
        if node.kind is not NodeKind.COMPUTE:
            return ()
        todo, seen = [node], {node}
        found: dict[Node, None] = {}
        while todo:
            current = todo.pop()
            if current in self._above:
                found.update(dict.fromkeys(self._above[current]))
                continue
            above = [*current.order]
            for value in current.operands:
                above += value.order
                if value.root.node is not None:
                    above.append(value.root.node)
            for other in above:
                if other.has_side_effect:
                    found[other] = None
                elif other not in seen and other.kind is NodeKind.COMPUTE:
                    seen.add(other)
                    todo.append(other)
        self._above[node] = tuple(sorted(found, key=lambda n: n.position))
        return self._above[node]


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
    """Whether all bytes of a serialized ``LiteralProto``'s data are zero (so minus zero is no zero).

    False for data of a type that `schema` does not list.
    """
    fields = LiteralProto.FromString(literal).ListFields()
    data = [value for field, value in fields if field.name != "shape"]
    return bool(data) and not any(map(_any_bit, data))


def _any_bit(data: Any) -> bool:
    """Whether a field of a literal, bytes or numbers, has a bit that is set."""
    return any(data if isinstance(data, bytes) else np.array(data).tobytes())
