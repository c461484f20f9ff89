"""Shapes in the rules of all kinds of instructions: comparing them, and spelling them in errors."""

from __future__ import annotations

from math import prod
from typing import Any

from ..graph import Instruction
from ..schema import PRIMITIVE_TYPES, TOKEN, TUPLE

# No array has more elements: its bytes must fit into 63 bits, in any type.
_MOST_ELEMENTS = 1 << 58
PRED, S32 = 1, 4


def spelled(shape: Any) -> str:
    """A shape in HLO's syntax, without the layout."""
    if shape.element_type == TUPLE:
        return f"({', '.join(map(spelled, shape.tuple_shapes))})"
    if shape.element_type == TOKEN:
        return "token[]"
    name = PRIMITIVE_TYPES.get(shape.element_type, f"type {shape.element_type}")
    return f"{name}[{','.join(map(str, shape.dimensions))}]"


def same(one: Any, other: Any) -> bool:
    """Whether two shapes are equal but for layouts."""
    if one.element_type != other.element_type:
        return False
    if one.element_type == TUPLE:
        parts, others = one.tuple_shapes, other.tuple_shapes
        return len(parts) == len(others) and all(map(same, parts, others))
    return list(one.dimensions) == list(other.dimensions)


def check_possible(shape: Any, where: Instruction) -> None:
    if shape.element_type == TUPLE:
        for part in shape.tuple_shapes:
            check_possible(part, where)
        return
    if any(d < 0 for d in shape.dimensions) or prod(shape.dimensions) > _MOST_ELEMENTS:
        raise where.invalid(f"has the impossible shape {spelled(shape)}")
    memory = shape.layout.minor_to_major
    if memory and sorted(memory) != list(range(len(shape.dimensions))):
        raise where.invalid(f"has the impossible layout {list(memory)} of {spelled(shape)}")


def expect(where: Instruction, found: Any, expected: Any, what: str) -> None:
    if not same(found, expected):
        raise where.invalid(f"{what} is {spelled(found)}, and should be {spelled(expected)}")


def array_operand(where: Instruction, operand: int) -> Any:
    """The shape of an operand, which must be an array."""
    shape = where.operands[operand].shape
    if shape.element_type in (TUPLE, TOKEN):
        raise where.invalid(f"operand {operand} is {spelled(shape)}, which is no array")
    return shape


def expect_array(where: Instruction) -> None:
    if where.shape.element_type in (TUPLE, TOKEN):
        raise where.invalid(f"its shape is {spelled(where.shape)}, which is no array")


def same_as_operand(where: Instruction) -> None:
    expect(where, where.shape, where.operands[0].shape, "its shape")


def expect_token(where: Instruction) -> None:
    if where.shape.element_type != TOKEN:
        raise where.invalid(f"its shape is {spelled(where.shape)}, and should be token[]")


def expect_scalar(where: Instruction, shape: Any, type: int, what: str) -> None:
    if shape.element_type != type or shape.dimensions:
        raise where.invalid(f"{what} is {spelled(shape)}, and should be {PRIMITIVE_TYPES[type]}[]")


def expect_called(where: Instruction, number: int) -> None:
    if len(where.called) != number:
        raise where.invalid(f"calls {len(where.called)} computations, not {number}")


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())
