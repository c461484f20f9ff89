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

from ..graph import Instruction, Module
from .constants import zero_constant
from .emit import Editor
from .inline import before_barrier
from .kept_stacks import Stack, is_row, stacks, users_of
from .one_layer import is_flat, moved_from, moves, pairs_of


class _Kept(NamedTuple):
    """Of a stack the forward loop ``received`` what ``again`` receive in the other one."""

    stack: Stack
    received: Instruction
    again: list[Instruction]


def received(serialized: bytes) -> bytes | None:
    """The module with what was received in stacks of the entry computation's loops; None if none is sent
    again."""
    found: bytes | None = None
    while True:
        module = Module.parse(serialized if found is None else found)
        loops = [i for i in module.entry.instructions if is_flat(i)]
        kept = next((k for loop in loops for k in map(_kept, stacks(loop)) if k is not None), None)
        if kept is None:
            return found
        editor = Editor(module)
        kept.stack.put(editor, kept.received, {p: p.operands[0] for p in kept.again})
        found = editor.finish()


def _kept(stack: Stack) -> _Kept | None:
    """None where it is read for other things, or is not sent where it is put there."""
    again = _sent_again(stack)
    if not again or not zero_constant(stack.begin):  # a row of them is received as it is sent
        return None
    put = moved_from(stack.update.operands[1])
    body = stack.there.called[0]
    sent = [i for i in body.instructions if _is_permute(i) and moved_from(i.operands[0]) is put]
    alike = [i for i in sent if all(pairs_of(i) == pairs_of(other) for other in again)]
    return _Kept(stack, alike[0], again) if alike else None


def _sent_again(stack: Stack) -> list[Instruction]:
    """The permutes of rows of a stack, if nothing else is done with them; otherwise none."""
    body = stack.back.called[0]
    wholes = set(stack.reads())
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
            if not is_row(value, value.operands[0]):
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
    barriers = users_of(value)
    return value.opcode == "tuple" and all(
        b.opcode == "opt-barrier" and all(u.opcode == "get-tuple-element" for u in users_of(b))
        for b in barriers
    )


def _is_permute(value: Instruction) -> bool:
    return value.opcode == "collective-permute" and not value.shape.tuple_shapes
