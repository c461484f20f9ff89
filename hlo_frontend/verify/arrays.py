"""Rules for instructions that compute arrays, and for those that hand on their operands."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from stretto.collectives.types import ELEMENT_TYPES

from ..graph import Instruction
from ..ops import OPS
from ..schema import PRIMITIVE_TYPES, TUPLE
from .shapes import (
    PRED,
    array_operand,
    expect,
    expect_array,
    expect_called,
    expect_token,
    same_as_operand,
    spelled,
    words,
)


def _tuple(where: Instruction) -> None:
    parts = where.shape.tuple_shapes
    if where.shape.element_type != TUPLE or len(parts) != len(where.operands):
        raise where.invalid(
            f"its shape is {spelled(where.shape)}, for {len(where.operands)} operands"
        )
    for index, (part, operand) in enumerate(zip(parts, where.operands, strict=True)):
        expect(where, part, operand.shape, f"element {index} of its shape")


def _element(where: Instruction) -> None:
    shape, index = where.operands[0].shape, where.proto.tuple_index
    if shape.element_type != TUPLE or not 0 <= index < len(shape.tuple_shapes):
        raise where.invalid(f"there is no element {index} in {spelled(shape)}")
    expect(where, where.shape, shape.tuple_shapes[index], "its shape")


def _elementwise(where: Instruction) -> None:
    """All operands have the result's dimensions; scalars may stand for all elements where HLO allows."""
    expect_array(where)
    scalars = {"clamp": (0, 2), "select": (0,)}.get(where.opcode, ())
    for index in range(len(where.operands)):
        shape = array_operand(where, index)
        fits = list(shape.dimensions) == list(where.shape.dimensions)
        if not fits and not (index in scalars and not shape.dimensions):
            raise where.invalid(
                f"operand {index} is {spelled(shape)}, and its shape is {spelled(where.shape)}"
            )
    own = where.shape.element_type
    for index in _OWN_TYPE.get(where.opcode, ()):
        if where.operands[index].shape.element_type != own:
            raise where.invalid(
                f"operand {index} is {spelled(where.operands[index].shape)}, and its shape is "
                f"{spelled(where.shape)}"
            )
    if where.opcode == "compare":
        one, other = (o.shape.element_type for o in where.operands)
        if one != other or own != PRED:
            raise where.invalid("compares different types, or gives no pred")
    if where.opcode == "select" and where.operands[0].shape.element_type != PRED:
        raise where.invalid(f"selects by {spelled(where.operands[0].shape)}, not by pred")


def _reshape(where: Instruction) -> None:
    expect_array(where)
    shape = array_operand(where, 0)
    if (
        prod(shape.dimensions) != prod(where.shape.dimensions)
        or shape.element_type != where.shape.element_type
    ):
        raise where.invalid(f"cannot make {spelled(where.shape)} of {spelled(shape)}")


def _bitcast(where: Instruction) -> None:
    """A bitcast reinterprets memory: both shapes must take as many bytes."""
    expect_array(where)
    sizes = [_bits(shape) for shape in (array_operand(where, 0), where.shape)]
    if sizes[0] != sizes[1]:
        raise where.invalid(
            f"cannot make {spelled(where.shape)} of {spelled(where.operands[0].shape)}"
        )


def _bits(shape: Any) -> int:
    name = PRIMITIVE_TYPES.get(shape.element_type)
    return (ELEMENT_TYPES[name].bits if name else 0) * prod(shape.dimensions)


def _broadcast(where: Instruction) -> None:
    expect_array(where)
    shape, axes = array_operand(where, 0), list(where.proto.dimensions)
    fits = (
        shape.element_type == where.shape.element_type
        and len(axes) == len(shape.dimensions)
        and len(axes) == len(set(axes))
        and all(0 <= a < len(where.shape.dimensions) for a in axes)
        and all(where.shape.dimensions[a] == d for a, d in zip(axes, shape.dimensions, strict=True))
    )
    if not fits:
        raise where.invalid(
            f"cannot make {spelled(where.shape)} of {spelled(shape)} with dimensions {axes}"
        )


def _transpose(where: Instruction) -> None:
    expect_array(where)
    shape, axes = array_operand(where, 0), list(where.proto.dimensions)
    if sorted(axes) != list(range(len(shape.dimensions))) or (
        [shape.dimensions[a] for a in axes] != list(where.shape.dimensions)
        or shape.element_type != where.shape.element_type
    ):
        raise where.invalid(
            f"cannot make {spelled(where.shape)} of {spelled(shape)} with dimensions {axes}"
        )


def _slice(where: Instruction) -> None:
    expect_array(where)
    shape, bounds = array_operand(where, 0), where.proto.slice_dimensions
    sizes = [-(-(b.limit - b.start) // b.stride) if b.stride > 0 else -1 for b in bounds]
    inside = len(bounds) == len(shape.dimensions) and all(
        0 <= b.start <= b.limit <= d for b, d in zip(bounds, shape.dimensions, strict=True)
    )
    if not inside or sizes != list(where.shape.dimensions):
        raise where.invalid(f"cannot cut {spelled(where.shape)} out of {spelled(shape)}")


def _reverse(where: Instruction) -> None:
    same_as_operand(where)
    if any(not 0 <= a < len(where.shape.dimensions) for a in where.proto.dimensions):
        raise where.invalid(f"{spelled(where.shape)} lacks some of {list(where.proto.dimensions)}")


def _iota(where: Instruction) -> None:
    expect_array(where)
    axes = list(where.proto.dimensions)
    if where.shape.dimensions and (
        len(axes) != 1 or not 0 <= axes[0] < len(where.shape.dimensions)
    ):
        raise where.invalid(f"{spelled(where.shape)} has no dimension {axes}")


def _concatenate(where: Instruction) -> None:
    expect_array(where)
    axes, own = list(where.proto.dimensions), list(where.shape.dimensions)
    if len(axes) != 1 or not 0 <= axes[0] < len(own):
        raise where.invalid(f"{spelled(where.shape)} has no dimension {axes}")
    total = 0
    for index in range(len(where.operands)):
        shape = array_operand(where, index)
        size = list(shape.dimensions)
        if len(size) != len(own) or any(size[a] != own[a] for a in range(len(own)) if a != axes[0]):
            raise where.invalid(f"operand {index}, {spelled(shape)}, does not fit in")
        total += size[axes[0]]
    if total != own[axes[0]]:
        raise where.invalid(f"its operands have {total} rows, and {spelled(where.shape)} has not")


def _pad(where: Instruction) -> None:
    expect_array(where)
    shape, config = array_operand(where, 0), where.proto.padding_config.dimensions
    if array_operand(where, 1).dimensions or len(config) != len(shape.dimensions):
        raise where.invalid("its padding does not fit its operand")
    sizes = [
        d + c.edge_padding_low + c.edge_padding_high + max(d - 1, 0) * c.interior_padding
        for d, c in zip(shape.dimensions, config, strict=True)
    ]
    if sizes != list(where.shape.dimensions) or any(c.interior_padding < 0 for c in config):
        raise where.invalid(f"cannot make {spelled(where.shape)} of {spelled(shape)}")


def _dynamic_slice(where: Instruction) -> None:
    expect_array(where)
    shape, sizes = array_operand(where, 0), list(where.proto.dynamic_slice_sizes)
    if (
        sizes != list(where.shape.dimensions)
        or len(sizes) != len(shape.dimensions)
        or any(not 0 <= s <= d for s, d in zip(sizes, shape.dimensions, strict=True))
        or shape.element_type != where.shape.element_type
    ):
        raise where.invalid(f"cannot cut {spelled(where.shape)} out of {spelled(shape)}")
    _indices(where, 1, len(sizes))


def _dynamic_update_slice(where: Instruction) -> None:
    expect_array(where)
    same_as_operand(where)
    whole, update = array_operand(where, 0), array_operand(where, 1)
    if len(update.dimensions) != len(whole.dimensions) or any(
        u > d for u, d in zip(update.dimensions, whole.dimensions, strict=True)
    ):
        raise where.invalid(f"cannot put {spelled(update)} into {spelled(whole)}")
    _indices(where, 2, len(whole.dimensions))


def _indices(where: Instruction, first: int, rank: int) -> None:
    """A scalar for each dimension, or in an old form one vector of them."""
    shapes = [array_operand(where, i) for i in range(first, len(where.operands))]
    vector = len(shapes) == 1 and list(shapes[0].dimensions) == [rank]
    if not vector and (len(shapes) != rank or any(s.dimensions for s in shapes)):
        raise where.invalid(f"its {len(shapes)} indices do not fit {rank} dimensions")


def _dot(where: Instruction) -> None:
    """Batch dimensions, then those of the left and of the right operand that are not contracted."""
    expect_array(where)
    numbers = where.proto.dot_dimension_numbers
    sides = (
        (array_operand(where, 0), numbers.lhs_batch_dimensions, numbers.lhs_contracting_dimensions),
        (array_operand(where, 1), numbers.rhs_batch_dimensions, numbers.rhs_contracting_dimensions),
    )
    found: list[list[list[int]]] = []
    for shape, batch, contracted in sides:
        taken = [*batch, *contracted]
        if len(set(taken)) != len(taken) or any(not 0 <= a < len(shape.dimensions) for a in taken):
            raise where.invalid(f"{spelled(shape)} lacks some of the dimensions {taken}")
        free = [d for a, d in enumerate(shape.dimensions) if a not in taken]
        sizes = [[shape.dimensions[a] for a in axes] for axes in (batch, contracted)]
        found.append([*sizes, free])
    (batch, contracted, left), (other_batch, other_contracted, right) = found
    if (
        batch != other_batch
        or contracted != other_contracted
        or [*batch, *left, *right] != list(where.shape.dimensions)
    ):
        shapes = " and ".join(spelled(shape) for shape, _, _ in sides)
        raise where.invalid(f"cannot make {spelled(where.shape)} of {shapes}")


def _reduce(where: Instruction) -> None:
    """Arrays and then as many initial values; the result lacks the dimensions that are reduced."""
    expect_called(where, 1)
    number = len(where.operands) // 2
    if len(where.operands) != 2 * number or len(where.called[0].parameters) != 2 * number:
        raise where.invalid("has not one initial value, and two parameters, for each array")
    shape, axes = array_operand(where, 0), set(where.proto.dimensions)
    if any(not 0 <= a < len(shape.dimensions) for a in axes):
        raise where.invalid(f"{spelled(shape)} lacks some of the dimensions {sorted(axes)}")
    kept = [d for a, d in enumerate(shape.dimensions) if a not in axes]
    results = where.shape.tuple_shapes if where.shape.element_type == TUPLE else [where.shape]
    if len(results) != number or any(list(r.dimensions) != kept for r in results):
        raise where.invalid(f"cannot make {spelled(where.shape)} of {spelled(shape)}")
    for index in range(len(where.operands)):
        operand = array_operand(where, index)
        if list(operand.dimensions) != (list(shape.dimensions) if index < number else []):
            raise where.invalid(f"operand {index} is {spelled(operand)}")


def _map(where: Instruction) -> None:
    expect_called(where, 1)
    expect_array(where)
    if len(where.called[0].parameters) != len(where.operands):
        raise where.invalid("has not one parameter for each operand")
    for index in range(len(where.operands)):
        if list(array_operand(where, index).dimensions) != list(where.shape.dimensions):
            raise where.invalid(f"operand {index} has not the dimensions of its result")


_SAME_TYPE = words(
    "add and divide maximum minimum multiply or power remainder subtract xor shift-left "
    "shift-right-arithmetic shift-right-logical atan2"
)
# Operands whose element type is the result's.
_OWN_TYPE = {
    **dict.fromkeys(_SAME_TYPE, (0, 1)),
    **dict.fromkeys(("negate", "not", "sign"), (0,)),
    "select": (1, 2),
    "clamp": (0, 1, 2),
}

RULES: dict[str, Callable[[Instruction], None]] = {
    **{opcode: _elementwise for opcode, op in OPS.items() if op.elementwise},
    **dict.fromkeys(("copy", "opt-barrier", "add-dependency"), same_as_operand),
    **dict.fromkeys(("bitcast", "bitcast-convert"), _bitcast),
    "tuple": _tuple,
    "get-tuple-element": _element,
    "after-all": expect_token,
    "reshape": _reshape,
    "broadcast": _broadcast,
    "transpose": _transpose,
    "slice": _slice,
    "reverse": _reverse,
    "iota": _iota,
    "concatenate": _concatenate,
    "pad": _pad,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "dot": _dot,
    "reduce": _reduce,
    "map": _map,
}
