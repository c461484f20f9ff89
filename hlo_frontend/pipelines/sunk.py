"""Puts constants that loops carry where they are read, so that what is made of them in two loops is alike.

XLA computes what no iteration changes before a loop, in one loop and not in another, and before or after it
leaves out what changes nothing: a product with one, a sum with zero, as there are in random numbers between
two bounds. Here a loop's body, and those of loops in it, make such constants themselves, and have no such
products and sums. No value changes, but for the sign of zeros.
"""

from __future__ import annotations

from collections.abc import Callable

from ..graph import Instruction, Module, all_instructions
from ..schema import LiteralProto
from .constants import zero_constant
from .emit import Editor, carried_position
from .one_layer import is_flat, moves

# The bytes of 1 in types whose constants are bytes.
_ONES = {"f16s": b"\x00\x3c", "bf16s": b"\x80\x3f"}

_Stands = dict[Instruction, Instruction]


def with_constants(module: Module, name: str) -> Module:
    """The module, with the body of this loop so."""
    return _replaced(_replaced(module, name, _carried), name, _neutral)


def _replaced(module: Module, name: str, which: Callable[[Instruction], _Stands]) -> Module:
    """The module, with what ``which`` gives for a loop, this one or one in its body, in the place of
    instructions of that loop's body."""
    while True:
        loop = next(i for i in module.entry.instructions if i.name == name)
        stands = next((own for each in _loops(loop) if (own := which(each))), None)
        if stands is None:
            return module
        editor = Editor(module)
        b = editor.replace(next(iter(stands)))
        for value, other in stands.items():
            b.go_on_to(value)
            here = other.computation is value.computation
            b.stand_in(other.proto if here else b.clone([other], {})[other])
        module = Module.parse(editor.finish())


def _loops(loop: Instruction) -> list[Instruction]:
    """A loop, and those in its body, whatever calls them, the outer ones first."""
    return [i for i in (loop, *all_instructions(loop.called[0])) if is_flat(i)]


def _carried(loop: Instruction) -> _Stands:
    """By read of a carry in the body of a loop, the constant that it is."""
    body, init = loop.called[0], loop.operands[0].operands
    found = {}
    for read in body.instructions:
        position = carried_position(read)
        if position is not None and _is_constant(init[position]):
            given = body.root.operands[position]
            if carried_position(given) == position and any(
                read in i.operands for i in body.instructions if i is not body.root
            ):
                found[read] = init[position]
    return found


def _neutral(loop: Instruction) -> _Stands:
    """By product with one or sum with zero in the body of a loop, the other operand."""
    found: _Stands = {}
    for value in loop.called[0].instructions:
        if value.opcode in ("multiply", "add"):
            test = _is_one if value.opcode == "multiply" else zero_constant
            kept = [o for o in value.operands if not test(o)]
            if len(kept) == 1 and kept[0] not in found:
                found[value] = kept[0]
    return found


def _is_constant(value: Instruction) -> bool:
    """Whether a value is made of constants alone."""
    made = value.opcode in ("broadcast", "constant", "convert", "iota") or moves(value)
    return made and all(map(_is_constant, value.operands))


def _is_one(value: Instruction) -> bool:
    """Whether a value is a constant of ones, in f16, bf16, f32 or f64."""
    while value.opcode == "broadcast" or moves(value):
        value = value.operands[0]
    if value.opcode != "constant":
        return False
    fields = LiteralProto.FromString(value.proto.literal).ListFields()
    data = [(field.name, content) for field, content in fields if field.name != "shape"]
    if len(data) != 1:
        return False
    ((name, content),) = data
    if isinstance(content, bytes):
        one = _ONES.get(name, b"")
        return bool(one) and content == one * (len(content) // 2)
    return name in ("f32s", "f64s") and all(number == 1 for number in content)
