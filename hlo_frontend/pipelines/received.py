"""Keeps what stages received where the backward pass sends again what they handed on.

With `jax.checkpoint` around a whole iteration, a scan keeps what each iteration began with, and the backward
pass computes all of it again. Of stages that are one array that is what they gave an iteration before, and
the shift is computed again too: each stage sends, going back, what it had sent on the way there. Where a
stack of rows by iteration is read for nothing but such a permute, and the forward loop has the same permute
of what it puts there, it puts what was received there instead, and nothing is sent again. No bits change:
it is the same array.
"""

from __future__ import annotations

from typing import NamedTuple

from ..graph import Computation, Instruction, Module
from .constants import behind, zero_constant
from .emit import Editor, carried_position
from .inline import before_barrier, handed_on
from .one_layer import is_flat, moved_from, moves


class _Kept(NamedTuple):
    """``update`` puts a row of the stack there, of which the forward loop ``received`` what ``again``
    receive, in the body of the loop ``back``."""

    update: Instruction
    received: Instruction
    again: list[Instruction]
    back: Instruction


def received(serialized: bytes) -> bytes | None:
    """The module with what was received in stacks of the entry computation's loops; None if none is sent
    again."""
    found: bytes | None = None
    while True:
        module = Module.parse(serialized if found is None else found)
        loops = [i for i in module.entry.instructions if is_flat(i)]
        kept = next((k for loop in loops for k in map(_kept, _stacks(loop)) if k is not None), None)
        if kept is None:
            return found
        found = _written(module, kept)


class _Stack(NamedTuple):
    """An array that ``loop`` only reads, from its carry at ``position``."""

    loop: Instruction
    position: int


def _stacks(loop: Instruction) -> list[_Stack]:
    body = loop.called[0]
    return [
        _Stack(loop, n)
        for n, result in enumerate(body.root.operands)
        if carried_position(behind(result)) == n and not _reads(loop.called[1], n)
    ]


def _reads(computation: Computation, position: int) -> list[Instruction]:
    return [i for i in computation.instructions if carried_position(i) == position]


def _users(value: Instruction) -> list[Instruction]:
    return [i for i in value.computation.instructions if value in i.operands]


def _kept(stack: _Stack) -> _Kept | None:
    """None where it is read for other things, or is not what another loop has put there."""
    again = _sent_again(stack)
    made = handed_on(stack.loop.operands[0].operands[stack.position])
    if not again or made.opcode != "get-tuple-element" or not is_flat(made.operands[0]):
        return None
    there, position = made.operands[0], int(made.proto.tuple_index)
    body = there.called[0]
    update = behind(body.root.operands[position])
    begins = there.operands[0].operands[position]
    if (
        update.opcode != "dynamic-update-slice"
        or carried_position(behind(update.operands[0])) != position
        or not _is_row(update.operands[1], update)
        or not zero_constant(begins)  # a row of them is received as it is sent
        or _reads(there.called[1], position)
        or not _goes_only_to(made, stack)
        or not all(_goes_only_into(i, update) for i in _reads(body, position))
        or not _goes_only_into(update, body.root)
    ):
        return None
    put = moved_from(update.operands[1])
    sent = [i for i in body.instructions if _is_permute(i) and moved_from(i.operands[0]) is put]
    alike = [i for i in sent if all(_pairs(i) == _pairs(other) for other in again)]
    return _Kept(update, alike[0], again, stack.loop) if alike else None


def _sent_again(stack: _Stack) -> list[Instruction]:
    """The permutes of rows of a stack, if nothing else is done with them; otherwise none."""
    body = stack.loop.called[0]
    wholes = set(_reads(body, stack.position))
    rows: set[Instruction] = set()
    permutes: list[Instruction] = []
    for value in body.instructions:
        source = before_barrier(value) or (value.operands[0] if value.operands else None)
        if value is body.root:
            own = [n for n, o in enumerate(value.operands) if o in wholes | rows]
            if own != [stack.position]:
                return []
        elif value.opcode == "copy" and source in wholes:
            wholes.add(value)
        elif value.opcode == "dynamic-slice" and source in wholes:
            if not _is_row(value, value.operands[0]):
                return []
            rows.add(value)
        elif source in rows and (moves(value) or before_barrier(value) is not None):
            rows.add(value)
        elif source in rows and _is_permute(value):
            permutes.append(value)
        elif any(
            o in wholes or (o in rows and not _is_for_barriers(value)) for o in value.operands
        ):
            return []
    return permutes


def _is_for_barriers(value: Instruction) -> bool:
    """Whether a tuple goes only through barriers, from which its elements are taken."""
    barriers = _users(value)
    return value.opcode == "tuple" and all(
        b.opcode == "opt-barrier" and all(u.opcode == "get-tuple-element" for u in _users(b))
        for b in barriers
    )


def _is_row(part: Instruction, whole: Instruction) -> bool:
    return list(part.shape.dimensions) == [1, *whole.shape.dimensions[1:]]


def _is_permute(value: Instruction) -> bool:
    return value.opcode == "collective-permute" and not value.shape.tuple_shapes


def _pairs(permute: Instruction) -> list[tuple[int, int]]:
    return sorted((p.source, p.target) for p in permute.proto.source_target_pairs)


def _goes_only_to(made: Instruction, stack: _Stack) -> bool:
    """Whether a result of a loop goes only into a stack that another one reads."""
    loop, index = made.operands[0], made.proto.tuple_index
    todo = [
        i for i in _users(loop) if i.opcode != "get-tuple-element" or i.proto.tuple_index == index
    ]
    while todo:
        value = todo.pop()
        for user in _users(value):
            own = [n for n, o in enumerate(user.operands) if o is value]
            if user.opcode == "copy":
                todo.append(user)
            elif user is not stack.loop.operands[0] or own != [stack.position]:
                return False
    return _users(stack.loop.operands[0]) == [stack.loop]


def _goes_only_into(value: Instruction, last: Instruction) -> bool:
    todo = [value]
    while todo:
        for user in _users(todo.pop()):
            if user.opcode == "copy":
                todo.append(user)
            elif user is not last:
                return False
    return True


def _written(module: Module, kept: _Kept) -> bytes:
    editor = Editor(module)
    body = kept.update.computation
    b = editor.within(body)
    row = b.reshape(b.own(kept.received), list(kept.update.operands[1].shape.dimensions))
    b.own(kept.update).operand_ids[1] = row.id
    editor.sweep(body)
    body = kept.back.called[0]
    b = editor.within(body)
    stands = {p: b.reshape(b.own(p.operands[0]), list(p.shape.dimensions)) for p in kept.again}
    editor.redirect(body, stands, body.instructions)
    editor.sweep(body)
    return editor.finish()
