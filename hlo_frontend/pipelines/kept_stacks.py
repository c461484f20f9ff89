"""Stacks that one loop of the entry computation fills, a row in each iteration, for another one to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..builder import resized
from ..graph import Computation, Instruction
from .constants import behind
from .emit import Builder, Editor, carried_position
from .inline import handed_on
from .one_layer import is_flat


@dataclass(frozen=True, eq=False)
class Stack:
    """``update`` puts a row into an array that ``there`` carries, which ``back`` only reads, from its carry
    at ``position``, and nothing else does."""

    there: Instruction
    update: Instruction
    back: Instruction
    position: int

    @property
    def begin(self) -> Instruction:
        """What the array begins with."""
        body = self.there.called[0]
        index = next(n for n, r in enumerate(body.root.operands) if behind(r) is self.update)
        return self.there.operands[0].operands[index]

    def reads(self) -> list[Instruction]:
        """The reads of the carry in the body of ``back``."""
        return reads_of(self.back.called[0], self.position)

    def wholes(self) -> list[Instruction]:
        """The array in the body of ``back``, and its copies."""
        return [v for read in self.reads() for v in (read, *_copies(read))]

    def rows(self) -> list[Instruction]:
        """What is cut out of it there."""
        return [u for v in self.wholes() for u in users_of(v) if u.opcode == "dynamic-slice"]

    def put(
        self, editor: Editor, value: Instruction, rows: Mapping[Instruction, Instruction]
    ) -> None:
        """Have ``value`` put there instead. ``rows``: by value of the body of ``back`` that is it then, the
        row as it is read there."""
        b = editor.within(self.update.computation)
        row = b.reshape(b.own(value), list(self.update.operands[1].shape.dimensions))
        b.own(self.update).operand_ids[1] = row.id
        editor.sweep(self.update.computation)
        body = self.back.called[0]
        b = editor.within(body)
        stands = {v: b.reshape(b.own(read), list(v.shape.dimensions)) for v, read in rows.items()}
        editor.redirect(body, stands, body.instructions)
        editor.sweep(body)


def beside(
    editor: Editor,
    stack: Stack,
    row: Instruction,
    kept: Mapping[Instruction, Sequence[Instruction]],
) -> None:
    """Have the loops of a stack keep other values too, in stacks of the same length. ``row``: as it is read.
    ``kept``: by value of the body of ``there`` those of the body of ``back`` that it is, in the iterations
    that put a row and read it; it is read in their place."""
    entry = editor.within(stack.there.computation)
    count = stack.update.shape.dimensions[0]
    empty = [entry.zeros(resized(v.shape, [count, *v.shape.dimensions])) for v in kept]
    filled, b = _carrying(editor, entry, stack.there, empty)
    root, start = b.own(stack.update.computation.root), b.own(stack.update.operands[2])
    for value, whole in zip(kept, _last(b, stack.there, len(kept)), strict=True):
        part = b.reshape(b.own(value), [1, *value.shape.dimensions])
        root.operand_ids.append(b.update(whole, part, _first(b, start, value)).id)
    b.finish(root)
    editor.sweep(stack.update.computation)
    _, b = _carrying(editor, entry, stack.back, filled)
    root, start = b.own(row.computation.root), b.own(row.operands[1])
    stands: dict[Instruction, Any] = {}
    for (value, again), whole in zip(kept.items(), _last(b, stack.back, len(kept)), strict=True):
        part = b.dynamic_slice(whole, _first(b, start, value), [1, *value.shape.dimensions])
        stands |= dict.fromkeys(again, b.reshape(part, value.shape.dimensions))
        root.operand_ids.append(whole.id)
    editor.redirect(row.computation, stands, row.computation.instructions)
    b.finish(root)
    editor.sweep(row.computation)
    editor.sweep(stack.there.computation)


def _carrying(
    editor: Editor, entry: Builder, loop: Instruction, more: Sequence[Any]
) -> tuple[list[Any], Builder]:
    """What a loop gives of arrays that it carries too, and what adds to its body, which is to give them."""
    init = [*(o.proto for o in loop.operands[0].operands), *more]
    proto = editor.carry(entry, loop, init)
    b = editor.within(loop.called[0])
    for end in (loop.called[0].parameters[0], loop.called[0].root):
        b.own(end).shape.CopyFrom(proto.shape)
    return [entry.element(proto, n) for n in range(len(init) - len(more), len(init))], b


def _last(b: Builder, loop: Instruction, count: int) -> list[Any]:
    """The last arrays that the body of a loop is given, beside those of the module."""
    first = len(loop.called[0].root.operands)
    parameter = b.own(loop.called[0].parameters[0])
    return [b.element(parameter, n) for n in range(first, first + count)]


def _first(b: Builder, start: Any, value: Instruction) -> list[Any]:
    """Where the row of a value begins, of which ``start`` is the number, in all dimensions."""
    return [start, *[b.convert(b.constant(0), start.shape)] * len(value.shape.dimensions)]


def _copies(value: Instruction) -> Iterator[Instruction]:
    for user in users_of(value):
        if user.opcode == "copy":
            yield user
            yield from _copies(user)


def stacks(back: Instruction) -> list[Stack]:
    """The stacks that a loop reads."""
    found = (
        _stack(back, n)
        for n, result in enumerate(back.called[0].root.operands)
        if carried_position(behind(result)) == n and not reads_of(back.called[1], n)
    )
    return [stack for stack in found if stack is not None]


def _stack(back: Instruction, position: int) -> Stack | None:
    made = handed_on(back.operands[0].operands[position])
    if made.opcode != "get-tuple-element" or not is_flat(made.operands[0]):
        return None
    there, index = made.operands[0], int(made.proto.tuple_index)
    body = there.called[0]
    update = behind(body.root.operands[index])
    if (
        update.opcode != "dynamic-update-slice"
        or carried_position(behind(update.operands[0])) != index
        or not is_row(update.operands[1], update)
        or reads_of(there.called[1], index)
        or not all(_goes_only_into(i, update) for i in reads_of(body, index))
        or not _goes_only_into(update, body.root)
    ):
        return None
    stack = Stack(there, update, back, position)
    return stack if _goes_only_to(made, stack) else None


def is_row(part: Instruction, whole: Instruction) -> bool:
    """Whether an array has the shape of one row of another one."""
    return list(part.shape.dimensions) == [1, *whole.shape.dimensions[1:]]


def reads_of(computation: Computation, position: int) -> list[Instruction]:
    """The reads of what a loop carries at a position, in its body or condition."""
    return [i for i in computation.instructions if carried_position(i) == position]


def users_of(value: Instruction) -> list[Instruction]:
    """What reads a value in its computation."""
    return [i for i in value.computation.instructions if value in i.operands]


def _goes_only_to(made: Instruction, stack: Stack) -> bool:
    """Whether a result of a loop goes only into a stack that another one reads."""
    loop, index = made.operands[0], made.proto.tuple_index
    todo = [
        i for i in users_of(loop) if i.opcode != "get-tuple-element" or i.proto.tuple_index == index
    ]
    while todo:
        value = todo.pop()
        for user in users_of(value):
            own = [n for n, o in enumerate(user.operands) if o is value]
            if user.opcode == "copy":
                todo.append(user)
            elif user is not stack.back.operands[0] or own != [stack.position]:
                return False
    return users_of(stack.back.operands[0]) == [stack.back]


def _goes_only_into(value: Instruction, last: Instruction) -> bool:
    todo = [value]
    while todo:
        for user in users_of(todo.pop()):
            if user.opcode == "copy":
                todo.append(user)
            elif user is not last:
                return False
    return True
