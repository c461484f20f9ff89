"""Keeps what stages take where the backward pass makes it again of what they received.

With `jax.checkpoint` around a whole iteration, a scan keeps what each iteration began with, which is what a
stage received. What the stage takes is chosen again in the backward pass: a microbatch on the first stage,
zeros on padding, what was received elsewhere. Where a row of such a stack is read for nothing but that, and
the forward loop takes the same, proved iteration by iteration and device by device, the stack gets what
the stage took in place of what it received. No bits change, and no sizes: a stage is then as one that is
under `jax.checkpoint` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..graph import Instruction, Module
from ..values import Node
from .chains import Execution, Followed, Origins
from .emit import Editor, carried_position
from .kept_stacks import Stack, is_row, stacks, users_of
from .one_layer import moved_from, moves


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
        b = editor.within(stack.update.computation)
        put = b.reshape(b.own(taken), list(stack.update.operands[1].shape.dimensions))
        b.own(stack.update).operand_ids[1] = put.id
        b = editor.within(row.computation)
        stands = {v: b.reshape(b.own(row), list(v.shape.dimensions)) for v in again}
        editor.redirect(row.computation, stands, row.computation.instructions)
    for computation in {c for k in kept for c in (k.stack.update.computation, k.row.computation)}:
        editor.sweep(computation)
    return Module.parse(editor.finish())


class _Pair:
    """A loop and one that goes back over its iterations."""

    def __init__(self, followed: Followed, there: Node, back: Node) -> None:
        self.followed, self.there, self.back = followed, there, back
        self.nodes = {n.instruction: n for loop in (there, back) for n in loop.blocks[1].nodes}

    def kept(self, stack: Stack) -> _Kept | None:
        """None where rows are read for other things, or are not what a stage received, or it takes nothing
        else."""
        received = moved_from(stack.update.operands[1])
        sources = [v for read in stack.reads() for v in (read, *_copies(read))]
        rows = [u for v in sources for u in users_of(v) if u.opcode == "dynamic-slice"]
        if (
            not _is_received(received)
            or len(rows) != 1
            or not is_row(rows[0], stack.update)
            or rows[0] not in self.nodes
        ):
            return None
        again = [v for v in _chosen(rows[0]) if _is_used(v)]
        if not again or any(moved_from(v).opcode != "select" for v in again):
            return None
        when = self._when(stack, rows[0])
        for taken in reversed(_chosen(received)) if when else ():
            if taken.opcode == "select" and all(self._same(taken, v, when) for v in again):
                return _Kept(stack, taken, rows[0], again)
        return None

    def _when(self, stack: Stack, row: Instruction) -> dict[Execution, Execution]:
        """By execution of the body of ``back`` the one that put the row there that it reads; empty where
        that is not known of all."""
        put: dict[tuple[int, int], Execution] = {}
        for at in _executions(self.followed.origins[self.there], self._devices):
            slot = self.followed.origins[self.there].slot(self.nodes[stack.update], at)
            if slot is None or (slot, at.device) in put:
                return {}
            put[slot, at.device] = at
        found = {}
        for at in _executions(self.followed.origins[self.back], self._devices):
            slot = self.followed.origins[self.back].slot(self.nodes[row], at)
            if slot is None or (slot, at.device) not in put:
                return {}
            found[at] = put[slot, at.device]
        return found

    @property
    def _devices(self) -> int:
        return self.followed.forward.num_devices

    def _same(
        self, taken: Instruction, again: Instruction, when: dict[Execution, Execution]
    ) -> bool:
        if (
            taken.shape.element_type != again.shape.element_type
            or taken not in self.nodes
            or again not in self.nodes
        ):
            return False
        return all(
            (self._is_zero(self.there, taken, before) and self._is_zero(self.back, again, at))
            or self._source(self.there, taken, before) == self._source(self.back, again, at)
            for at, before in when.items()
        )

    def _is_zero(self, loop: Node, instruction: Instruction, at: Execution) -> bool:
        (value,) = self.nodes[instruction].results
        return self.followed.origins[loop].is_zero(value, at)

    def _source(self, loop: Node, instruction: Instruction, at: Execution) -> tuple[object, ...]:
        """Where a value is from; equal ones have the same bits."""
        (value,) = self.nodes[instruction].results
        found = self.followed.of(loop, value, at)
        made = found.made
        if made.node is None:
            return found.begin, at.device, made.slot, made.plus
        return found.loop, made


def _is_received(value: Instruction) -> bool:
    """Whether a value is what a permute has brought, in this iteration or in the one before."""
    position = carried_position(value)
    if position is not None:
        value = moved_from(value.computation.root.operands[position])
    return value.opcode == "collective-permute"


def _executions(origins: Origins, devices: int) -> Iterable[Execution]:
    return (Execution(t, d) for t in range(len(origins.iterations)) for d in range(devices))


def _copies(value: Instruction) -> Iterator[Instruction]:
    for user in users_of(value):
        if user.opcode == "copy":
            yield user
            yield from _copies(user)


def _chosen(value: Instruction) -> list[Instruction]:
    """A value, and what it is handed on as, be that chosen there, in the order of its computation."""
    found = [value]
    for user in value.computation.instructions:
        data = user.operands[1:] if user.opcode == "select" else user.operands
        if (user.opcode == "select" or moves(user)) and any(o in found for o in data):
            found.append(user)
    return found


def _is_used(value: Instruction) -> bool:
    """Whether a value is read for more than to be handed on."""
    return any(
        not moves(u) and (u.opcode != "select" or u.operands[0] is value) for u in users_of(value)
    )
