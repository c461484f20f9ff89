"""Tells where what a loop computes is computed again by a loop that goes back over its iterations.

`Again` compares values of two bodies, in all iterations and on all devices: both are zeros, or the same known
numbers, or are handed on from the same place, or are made by the same instructions of such values. Loops and
conditionals in them need not be the same as a whole: what else they give, as what is kept for a gradient, is
left out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np

from ..graph import COLLECTIVES, Instruction, leaf_count
from ..likeness import Likeness, is_loose
from ..ops import op_of
from ..passes.valid.known import spread
from ..schema import TUPLE
from ..values import Node, Value
from .chains import Execution, Followed, Origins
from .emit import carried_position
from .inline import handed_on
from .one_layer import is_flat, moved_from, moves
from .sameness import NEVER_SAME

# What gives others each time, and what is not looked into. Collectives of groups are computed again by all
# of their members, in the same iteration.
_NEVER_ALIKE = (NEVER_SAME - COLLECTIVES) | {
    "collective-permute",
    "opt-barrier",
    "parameter",
    "recv",
    "send",
}

# How many instructions in a row are looked at that stand before a loop or change in no iteration.
_MOST = 64

# Of what an instruction gives and reads: positions among arrays, of the one and of the other.
_Positions = set[tuple[int, int]]
_Pair = tuple[Value, Value]
_Made = tuple[tuple[Node, int], tuple[Node, int]]  # results of nodes


def rows_read(
    followed: Followed, loops: tuple[Node, Node], update: Node, row: Node
) -> dict[Execution, Execution]:
    """By execution of the body of the second one of two loops, of which ``row`` reads a row of a stack, the
    one of the first one in which ``update`` puts it there; empty where that is not known of all."""
    there, back = (followed.origins[loop] for loop in loops)
    put: dict[tuple[int, int], Execution] = {}
    for at in there.executions():
        slot = there.slot(update, at)
        if slot is None or (slot, at.device) in put:
            return {}
        put[slot, at.device] = at
    found: dict[Execution, Execution] = {}
    for at in back.executions():
        slot = back.slot(row, at)
        if slot is None or (slot, at.device) not in put:
            return {}
        found[at] = put[slot, at.device]
    return found


class Again:
    """Compares values of a loop ``there`` and of ``back``, which goes over its iterations again. ``when``: by
    execution of the body of ``back`` that of the body of ``there``, in the same iteration for all devices
    (see `rows_read`)."""

    def __init__(
        self, followed: Followed, there: Node, back: Node, when: Mapping[Execution, Execution]
    ) -> None:
        self.there, self.back = followed.origins[there], followed.origins[back]
        self._followed, self._loops = followed, (there, back)
        self._alike = _Alike()
        self._before: dict[Value, int | None] = {}
        self._numbers: dict[Hashable, int] = {}
        # By number of a concatenation of vectors: that of each, by its start, limit and stride there.
        self._joined: dict[int, dict[tuple[int, int, int], int]] = {}
        self.when = when

    def is_same(self, one: Value, other: Value) -> bool:
        """Whether a value of the body of ``there`` is that one of the body of ``back``, always, up to how an
        engine rounds."""
        todo: list[_Pair] = [(one.root, other.root)]
        seen: set[_Pair] = set()
        while todo:
            pair = todo.pop()
            if pair in seen:
                continue
            seen.add(pair)
            needs = self._needed(*pair)
            if needs is None:
                return False
            todo += needs
        return True

    def _needed(self, one: Value, other: Value) -> list[_Pair] | None:
        """What must be the same for these to be; None where they are not known to be, whatever is."""
        made = _made(one, other)
        if made is not None and all(is_computed(v) and not _is_chosen(v) for v in (one, other)):
            needs = self._needs(made)  # what is computed is not followed through all iterations
            if needs is not None:
                return needs
        left = [at for at in self.when if not self._is_known(one, other, at)]
        if not left:
            return []
        results = self._handed_on(one, other, left) or made
        return None if results is None else self._needs(results)

    def _is_known(self, one: Value, other: Value, at: Execution) -> bool:
        """Whether both are zeros in an iteration, or the same numbers, or come from the same place."""
        before = self.when[at]
        if self.there.is_zero(one, before) and self.back.is_zero(other, at):
            return True
        there, back = self._loops
        if self._followed.of(there, one, before).key == self._followed.of(back, other, at).key:
            return True
        made = self._made_before(there, one)
        if made is not None and made == self._made_before(back, other):
            return True
        numbers = self._known(self.there, one, before), self._known(self.back, other, at)
        return (
            numbers[0] is not None
            and numbers[1] is not None
            and np.array_equal(numbers[0], numbers[1])
        )

    def _made_before(self, loop: Node, value: Value, most: int = _MOST) -> int | None:
        """A number for what a value of a body is made of that no iteration changes, and how; None for others.
        It may be computed in one loop and before another one."""
        if value not in self._before:
            node = value.node
            if node is None:
                n = loop.blocks[1].parameters.index(value)
                same = _is_unchanged(loop, n)
                self._before[value] = self._in_entry(loop.operands[n].root, most) if same else None
            else:
                self._before[value] = self._made_of(
                    node, lambda v: self._made_before(loop, v, most - 1) if most else None
                )
        return self._before[value]

    def _in_entry(self, value: Value, most: int) -> int:
        """The same, of a value of the entry computation."""
        found = self._before.get(value)
        if found is None:
            node = value.node
            if node is not None and most:
                if node not in self._followed.origins:
                    found = self._made_of(node, lambda v: self._in_entry(v, most - 1))
                elif _is_unchanged(node, value.index):
                    found = self._in_entry(node.operands[value.index].root, most - 1)
            found = self._before[value] = self._number(value) if found is None else found
        return found

    def _made_of(self, node: Node, of: Callable[[Value], int | None]) -> int | None:
        if node.blocks or node.collective is not None or node.instruction.opcode in _NEVER_ALIKE:
            return None
        operands = []
        for operand in node.operands:
            number = of(operand.root)
            if number is None:
                return None
            operands.append(number)
        return self._number_of(node.instruction, operands) if len(node.results) == 1 else None

    def _number_of(self, instruction: Instruction, operands: Sequence[int]) -> int:
        if moves(instruction):
            return operands[0]
        shapes = [
            tuple(o.shape.dimensions) for o in instruction.operands if not is_loose(instruction)
        ]
        if instruction.opcode == "slice" and len(shapes[0]) == 1:
            (cut,) = instruction.proto.slice_dimensions
            part = self._joined.get(operands[0], {}).get((cut.start, cut.limit, cut.stride))
            if part is not None:
                return part
        found = self._number((self._alike.key(instruction), *shapes, *operands))
        if instruction.opcode == "concatenate" and len(shapes[0]) == 1:
            ends = list(accumulate(n for (n,) in shapes))
            bounds = zip([0, *ends], ends, operands, strict=False)
            self._joined[found] = {(start, end, 1): n for start, end, n in bounds}
        return found

    def _number(self, what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def _handed_on(self, one: Value, other: Value, every: Iterable[Execution]) -> set[_Made] | None:
        """What they are handed on from, of instructions of the same iteration; None if that is not known."""
        found = set()
        for at in every:
            before = self.when[at]
            x, y = self.there.of(one, before), self.back.of(other, at)
            if x.node is None or y.node is None or (x.at, y.at) != (before, at):
                return None
            if (x.slot, y.slot) != (None, None) or x.plus != y.plus:
                return None
            found.add(((x.node, x.leaf), (y.node, y.leaf)))
        return found

    def _needs(self, made: Iterable[_Made]) -> list[_Pair] | None:
        """What must be the same for these results to be; None where they are not made alike."""
        found: list[_Pair] = []
        for made_there, made_back in made:
            (x, i), (y, j) = made_there, made_back
            positions = self._alike.needs(x.instruction, i, y.instruction, j)
            if positions is None:
                return None
            found += [(x.operands[p].root, y.operands[q].root) for p, q in positions]
        return found

    def _known(self, origins: Origins, value: Value, at: Execution) -> np.ndarray | None:
        known = self._followed.forward.known(origins.iterations[at.iteration], value)
        return None if known is None else spread(known, 0)[at.device if len(known) > 1 else 0]


def _is_unchanged(loop: Node, n: int) -> bool:
    """Whether a loop carries a value that no iteration changes."""
    return loop.blocks[1].results[n].root is loop.blocks[1].parameters[n]


def is_computed(value: Value) -> bool:
    """Whether a value is floats that a node computes, and does not only move."""
    node = value.node
    if node is None or value.type is None or value.type.dtype[0] in "psu":
        return False
    return bool(node.instruction.called) or op_of(node.instruction.opcode).arithmetic


def _is_chosen(value: Value) -> bool:
    return value.node is not None and value.node.instruction.opcode == "select"


def _made(one: Value, other: Value) -> set[_Made] | None:
    if one.node is None or other.node is None:
        return None
    return {((one.node, one.index), (other.node, other.index))}


class _Alike:
    """Compares instructions and what they call."""

    def __init__(self) -> None:
        self._likeness = Likeness(loosely=True)
        self._found: dict[tuple[Instruction, int, Instruction, int], _Positions | None] = {}

    def key(self, instruction: Instruction) -> int:
        """A number for what an instruction computes of its operands."""
        return self._likeness.instruction(instruction)

    def needs(self, one: Instruction, i: int, other: Instruction, j: int) -> _Positions | None:
        """Result i of an instruction and result j of another one are the same if these of their operands
        are; None if that is not seen. Positions are those of arrays, whatever tuples they are in."""
        key = one, i, other, j
        if key not in self._found:
            self._found[key] = self._compared(*key)
        return self._found[key]

    def _compared(self, one: Instruction, i: int, other: Instruction, j: int) -> _Positions | None:
        if one.opcode != other.opcode or one.opcode in _NEVER_ALIKE:
            return None
        if one.opcode == "while":
            return self._loops(one, i, other, j)
        if one.opcode == "conditional":
            return self._branches(one, i, other, j)
        alike = (
            i == j
            and len(one.operands) == len(other.operands)
            and not any(o.shape.element_type == TUPLE for o in one.operands)
            and (is_loose(one) or all(map(_has_shape_of, one.operands, other.operands)))
            and not one.has_side_effect
            and self.key(one) == self.key(other)
        )
        return {(n, n) for n in range(len(one.operands))} if alike else None

    def _loops(self, one: Instruction, i: int, other: Instruction, j: int) -> _Positions | None:
        if not is_flat(one) or not is_flat(other):
            return None
        (body, test), (again, test_again) = one.called, other.called
        found = self._reads([(test.root, test_again.root)])
        if found is None:
            return None
        todo = [(i, j), *found]
        found = set()
        while todo:
            p, q = todo.pop()
            if (p, q) in found:
                continue
            found.add((p, q))
            reads = self._reads([(body.root.operands[p], again.root.operands[q])])
            if reads is None:
                return None
            todo += reads
        return found

    def _branches(self, one: Instruction, i: int, other: Instruction, j: int) -> _Positions | None:
        if len(one.called) != len(other.called):
            return None
        found: _Positions = {(0, 0)}
        first = first_again = 1
        for n, (branch, again) in enumerate(zip(one.called, other.called, strict=True), 1):
            root, root_again = _leaf(branch.root, i), _leaf(again.root, j)
            if root is None or root_again is None:
                return None
            reads = self._reads([(root, root_again)])
            if reads is None:
                return None
            found |= {(first + p, first_again + q) for p, q in reads}
            first += leaf_count(one.operands[n].shape)
            first_again += leaf_count(other.operands[n].shape)
        return found

    def _reads(self, pairs: Iterable[tuple[Instruction, Instruction]]) -> _Positions | None:
        """Of two computations, what of their parameters must be the same for these pairs to be."""
        todo, seen = list(pairs), set()
        found: _Positions = set()
        while todo:
            one, other = map(_source, todo.pop())
            if (one, other) in seen:
                continue
            seen.add((one, other))
            p, q = _position(one), _position(other)
            if p is not None and q is not None:
                found.add((p, q))
                continue
            more = self._within(one, other)
            if more is None:
                return None
            todo += more
        return found

    def _within(
        self, one: Instruction, other: Instruction
    ) -> list[tuple[Instruction, Instruction]] | None:
        """What must be the same in these computations for two values to be."""
        x, y, i, j = one, other, 0, 0
        if "get-tuple-element" == one.opcode == other.opcode:
            i, j = one.proto.tuple_index, other.proto.tuple_index
            x, y = one.operands[0], other.operands[0]
        needs = self.needs(x, i, y, j)
        if needs is None:
            return None
        found = []
        for p, q in needs:
            operand, again = _operand(x, p), _operand(y, q)
            if operand is None or again is None:
                return None
            found.append((operand, again))
        return found


def _source(value: Instruction) -> Instruction:
    """What a value is handed on from, in whatever dimensions."""
    while (before := moved_from(handed_on(value))) is not value:
        value = before
    return value


def _has_shape_of(one: Instruction, other: Instruction) -> bool:
    return list(one.shape.dimensions) == list(other.shape.dimensions)


def _position(value: Instruction) -> int | None:
    """Which array of the parameters of its computation a value is."""
    if value.opcode == "parameter" and value.shape.element_type != TUPLE:
        return 0 if len(value.computation.parameters) == 1 else None
    return carried_position(value)


def _leaf(root: Instruction, n: int) -> Instruction | None:
    """Array n of what a computation gives."""
    if root.shape.element_type != TUPLE:
        return root
    return root.operands[n] if root.opcode == "tuple" else None


def _operand(instruction: Instruction, position: int) -> Instruction | None:
    """The array at a position among all that an instruction takes, if it is there by itself or in a tuple
    that is made there."""
    for operand in instruction.operands:
        count = leaf_count(operand.shape)
        if position < count:
            if operand.shape.element_type != TUPLE:
                return operand
            flat = operand.opcode == "tuple" and len(operand.operands) == count
            return operand.operands[position] if flat else None
        position -= count
    return None
