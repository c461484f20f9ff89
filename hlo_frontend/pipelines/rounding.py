"""What an engine may round otherwise where other instructions stand beside it, or in another loop."""

from __future__ import annotations

from collections.abc import Iterable

from stretto.collectives.ops import Reduction

from ..collectives import native_reduction
from ..graph import Instruction
from ..schema import PRIMITIVE_CODES

_EXACT = (Reduction.MAX, Reduction.MIN)
_FLOATS = {code for name, code in PRIMITIVE_CODES.items() if name[0] in "bcf"}


def rounds(instructions: Iterable[Instruction]) -> bool:
    """Whether an engine may round these otherwise among other instructions: it may make one operation of a
    product and a sum, and add up in another order."""
    opcodes = _rounding(instructions)
    return contracts(instructions) or bool(opcodes & {"dot", "reduce", "scatter"})


def contracts(instructions: Iterable[Instruction]) -> bool:
    """Whether an engine may make one operation of a product and a sum among these, and so round otherwise
    where others stand beside them."""
    opcodes = _rounding(instructions)
    return bool(opcodes & {"multiply", "dot"} and opcodes & {"add", "subtract", "reduce"})


def _rounding(instructions: Iterable[Instruction]) -> set[str]:
    """The opcodes of what computes with floats, but for reductions that are exact."""
    return {
        i.opcode for i in instructions
        if any(s.element_type in _FLOATS for s in i.shape.tuple_shapes or [i.shape])
        and not (i.opcode == "reduce" and native_reduction(i.called[0]) in _EXACT)
    }  # fmt: skip
