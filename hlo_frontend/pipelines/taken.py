"""Keeps what stages take where the backward pass makes it again of what they received.

With `jax.checkpoint` around a whole iteration, a scan keeps what each iteration began with, which is what a
stage received. What the stage takes is chosen again in the backward pass: a microbatch on the first stage,
zeros on padding, what was received elsewhere. Where a row of such a stack is read for nothing but that, and
the forward loop takes the same, proved iteration by iteration and device by device, the stack gets what
the stage took in place of what it received. No bits change, and no sizes: a stage is then as one that is
under `jax.checkpoint` itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..graph import LOGICAL_IDS, Instruction, Module
from ..likeness import Likeness
from ..values import Node, Value
from .alike import rows_read
from .chains import Execution, Followed
from .emit import Editor, carried_position
from .kept_stacks import Stack, is_row, stacks, users_of
from .one_layer import moved_from, moves
from .sameness import INTEGERS

# What may be other numbers where it is run again.
_NOT_ALIKE = frozenset({"custom-call", "rng", *LOGICAL_IDS})

# The most operations in a row by which numbers are compared, as those of a division.
_MOST_OPS = 16

_At = tuple[Node, Value, Execution]


class _Kept(NamedTuple):
    """``taken`` in the forward loop is, in the rows of ``stack``, what ``again`` are in the other one, which
    are made of ``row``."""

    stack: Stack
    taken: Instruction
    row: Instruction
    again: list[Instruction]


def as_taken(module: Module, nodes: Sequence[Node], followed: Followed) -> Module | None:
    """The module with what stages take in stacks of these loops, which were followed; None if none is made
    again."""
    by_loop = {node.instruction: node for node in nodes if node in followed.origins}
    kept = [
        found
        for loop, node in by_loop.items()
        for stack in stacks(loop)
        if stack.there in by_loop
        and (found := _Pair(followed, by_loop[stack.there], node).kept(stack)) is not None
    ]
    if not kept:
        return None
    editor = Editor(module)
    for stack, taken, row, again in kept:
        stack.put(editor, taken, dict.fromkeys(again, row))
    return Module.parse(editor.finish())


class _Pair:
    """A loop and one that goes back over its iterations."""

    def __init__(self, followed: Followed, there: Node, back: Node) -> None:
        self.followed, self.there, self.back = followed, there, back
        self.likeness = Likeness()
        self._equals: dict[tuple[_At, _At], bool] = {}
        self.nodes = {n.instruction: n for loop in (there, back) for n in loop.blocks[1].nodes}

    def kept(self, stack: Stack) -> _Kept | None:
        """None where rows are read for other things, or are not what a stage received, or it takes nothing
        else."""
        received = moved_from(stack.update.operands[1])
        wholes, rows = stack.wholes(), stack.rows()
        if (
            not _is_received(received)
            or len(rows) != 1
            or not is_row(rows[0], stack.update)
            or rows[0] not in self.nodes
            or not all(_is_handed(u, v, stack.position) for v in wholes for u in users_of(v))
        ):
            return None
        loops = self.there, self.back
        when = rows_read(self.followed, loops, self.nodes[stack.update], self.nodes[rows[0]])
        for taken in reversed(_chosen(received)) if when else ():
            if taken.opcode == "select":
                again = [v for v in _chosen(rows[0]) if self._same(taken, v, when)]
                if again and not any(map(_is_used, _chosen(rows[0], again))):
                    return _Kept(stack, taken, rows[0], again)
        return None

    def _same(
        self, taken: Instruction, again: Instruction, when: dict[Execution, Execution]
    ) -> bool:
        if (
            taken.shape.element_type != again.shape.element_type
            or taken not in self.nodes
            or again not in self.nodes
        ):
            return False
        (one,), (other,) = self.nodes[taken].results, self.nodes[again].results
        return all(
            self._equal((self.there, one, before), (self.back, other, at), _MOST_OPS)
            for at, before in when.items()
        )

    def _equal(self, one: _At, other: _At, most: int) -> bool:
        """Whether two values have the same bits: both are zeros, are from the same place, or whole numbers
        that are computed in the same way of such values, by at most so many operations in a row."""
        if (one, other) not in self._equals:
            self._equals[one, other] = self._are_equal(one, other, most)
        return self._equals[one, other]

    def _are_equal(self, one: _At, other: _At, most: int) -> bool:
        if all(self.followed.origins[loop].is_zero(value, at) for loop, value, at in (one, other)):
            return True
        a, b = self.followed.of(*one), self.followed.of(*other)
        if a.key == b.key:
            return True
        if a.made.node is None or b.made.node is None:
            return False
        (x, at), (y, there) = (a.made.node, a.made.at), (b.made.node, b.made.at)
        return (
            most > 0
            and (a.made.slot, a.made.leaf, a.made.plus) == (b.made.slot, b.made.leaf, b.made.plus)
            and all(map(_is_of_numbers, (x.instruction, y.instruction)))
            and self.likeness.instruction(x.instruction) == self.likeness.instruction(y.instruction)
            and len(x.operands) == len(y.operands)
            and all(
                self._equal((a.loop, v, at), (b.loop, w, there), most - 1)
                for v, w in zip(x.operands, y.operands, strict=True)
            )
        )


def _is_of_numbers(instruction: Instruction) -> bool:
    """Whether an instruction computes whole numbers of its operands and nothing else."""
    return instruction.shape.element_type in INTEGERS and not (
        instruction.has_side_effect or instruction.called or instruction.opcode in _NOT_ALIKE
    )


def _is_received(value: Instruction) -> bool:
    """Whether a value is what a permute has brought, in this iteration or in the one before."""
    position = carried_position(value)
    if position is not None:
        value = moved_from(value.computation.root.operands[position])
    return value.opcode == "collective-permute"


def _is_handed(user: Instruction, whole: Instruction, position: int) -> bool:
    """Whether a stack is only cut, copied, or handed on to the next iteration."""
    if user is user.computation.root:
        return [n for n, o in enumerate(user.operands) if o is whole] == [position]
    return user.opcode in ("copy", "dynamic-slice")


def _chosen(value: Instruction, but: Collection[Instruction] = ()) -> list[Instruction]:
    """A value, and what it is handed on as, be that chosen there, in the order of its computation, without
    what is handed on as one of ``but`` alone."""
    found = [value]
    for user in value.computation.instructions:
        data = user.operands[1:] if user.opcode == "select" else user.operands
        is_handed = (user.opcode == "select" or moves(user)) and any(o in found for o in data)
        if is_handed and user not in but:
            found.append(user)
    return found


def _is_used(value: Instruction) -> bool:
    """Whether a value is read for more than to be handed on."""
    return any(
        not moves(u) and (u.opcode != "select" or u.operands[0] is value) for u in users_of(value)
    )
