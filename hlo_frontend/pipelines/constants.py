"""Values of a loop's body that are the same in every iteration, and the instructions that compute them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..graph import Instruction
from ..passes.pseudo_tokens import is_zero_literal
from .emit import slice_of
from .refusal import Refusal
from .sameness import INTEGERS


@dataclass(frozen=True, eq=False)
class Constant:
    """A value that does not change: in the body of ``loop``, or in the entry computation if that is None."""

    value: Instruction
    loop: Instruction | None


def constants(found: Mapping[int, object]) -> list[tuple[int, Constant]]:
    """Those among these values that do not change."""
    return [(i, c) for i, c in found.items() if isinstance(c, Constant)]


class Constants:
    """The constants of one loop. ``inits``: the initial value of each element of the carry that no iteration
    changes, by the instruction that reads it."""

    def __init__(self, loop: Instruction) -> None:
        body = loop.called[0]
        parameter = body.parameters[0]
        self.loop = loop
        # By read of the carry: its position.
        self.reads: dict[Instruction, int] = {
            i: i.proto.tuple_index for i in body.instructions if parameter in i.operands
        }
        init = loop.operands[0].operands
        self.inits = {
            read: init[n] for read, n in self.reads.items()
            if self.reads.get(behind(body.root.operands[n])) == n
        }  # fmt: skip

    def computed_by(self, wanted: Instruction) -> Sequence[Instruction]:
        """The instructions of the body that compute the value. Raises `Refusal` if it may change."""
        inner = slice_of([wanted], set(self.inits))
        for instruction in inner:
            if instruction in self.reads or _is_work(instruction):
                raise Refusal(
                    f"{wanted.describe()}, which its layers take, changes from iteration to iteration"
                )
        return inner

    def has(self, wanted: Instruction) -> bool:
        """Whether the value is the same in every iteration."""
        try:
            self.computed_by(wanted)
        except Refusal:
            return False
        return True


def _is_work(instruction: Instruction) -> bool:
    """Whether it is a permute, or a loop that a device does not do by itself over numbers alone, as one over
    layers."""
    if instruction.opcode != "while":
        return instruction.opcode == "collective-permute"
    own = instruction.has_side_effect or any(c.needs_runtime for c in instruction.called)
    return own or any(p.element_type not in INTEGERS for p in instruction.shape.tuple_shapes)


def behind(instruction: Instruction) -> Instruction:
    """The instruction of which this one is a copy, or itself."""
    while instruction.opcode == "copy":
        instruction = instruction.operands[0]
    return instruction


def zero_constant(value: Instruction) -> bool:
    """Whether a value is a constant of positive zeros."""
    while value.opcode in ("broadcast", "copy", "reshape", "bitcast"):
        value = value.operands[0]
    return value.opcode == "constant" and is_zero_literal(value.proto.literal)
