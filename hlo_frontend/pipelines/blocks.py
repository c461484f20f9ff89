"""Which blocks of its operands a block of what an op gives needs, op by op: see `rows`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from ..graph import Instruction
from ..ops import op_of
from ..schema import TUPLE
from . import indexed
from .emit import needed_by
from .refusal import Refusal

ROW_BY_ROW = (
    "Compute what the backward pass begins with row by row, by microbatch along the first dimension (indices "
    "along others, as of jnp.take_along_axis), or the loss within the loop"
)


@dataclass(frozen=True)
class Block:
    """Of row s: elements ``(s + shift) * unit … (s + shift + 1) * unit - 1`` of dimension ``axis``."""

    axis: int
    unit: int
    shift: int = 0


Part = tuple[Instruction, Block | None]  # a block of a value, or all of it


def blocks_of(value: Instruction, block: Block) -> tuple[Part, ...]:
    """The blocks of its operands that a block of what an op gives needs; None for all of an operand. Raises
    `Refusal`."""
    if not has_rule(value) or _is_mixed(value):
        raise mixed(value)
    return _RULES.get(value.opcode, _elementwise)(value, block)


def has_rule(value: Instruction) -> bool:
    return value.opcode in _RULES or op_of(value.opcode).elementwise


def _is_mixed(value: Instruction) -> bool:
    """Whether it is a tuple whose elements need not have rows alike, as those of a reduce have."""
    return value.shape.element_type == TUPLE and value.opcode != "reduce"


def mixed(value: Instruction) -> Refusal:
    if value.opcode == "get-tuple-element":
        value = value.operands[0]
    return Refusal(
        f"between the forward pass and the backward pass, the rows of microbatches are not separate in "
        f"{value.describe()}. {ROW_BY_ROW}"
    )


def _elementwise(value: Instruction, block: Block) -> tuple[Part, ...]:
    rank = len(value.shape.dimensions)
    return tuple((o, block if len(o.shape.dimensions) == rank else None) for o in value.operands)


def _broadcast(value: Instruction, block: Block) -> tuple[Part, ...]:
    (operand,) = value.operands
    where = list(value.proto.dimensions)
    if block.axis not in where:
        return ((operand, None),)
    return ((operand, Block(where.index(block.axis), block.unit, block.shift)),)


def _reduce(value: Instruction, block: Block) -> tuple[Part, ...]:
    """Of any number of arrays, which are reduced together, as values and their indices for an argmax."""
    count = len(value.operands) // 2
    arrays, begins = value.operands[:count], value.operands[count:]
    kept = [d for d in range(len(arrays[0].shape.dimensions)) if d not in value.proto.dimensions]
    own = Block(kept[block.axis], block.unit, block.shift)
    return *((a, own) for a in arrays), *((b, None) for b in begins)


def _transpose(value: Instruction, block: Block) -> tuple[Part, ...]:
    axis = value.proto.dimensions[block.axis]
    return ((value.operands[0], Block(axis, block.unit, block.shift)),)


def _reshape(value: Instruction, block: Block) -> tuple[Part, ...]:
    """A block stays one where the dimensions before it are as many elements, and those behind it fit; for a
    bitcast, in the order in which they lie in memory."""
    (operand,) = value.operands
    if value.shape.element_type != operand.shape.element_type:
        raise mixed(value)
    axes, inner_axes = (_ordered(v, value.opcode == "bitcast") for v in (value, operand))
    here = [value.shape.dimensions[d] for d in axes]
    there = [operand.shape.dimensions[d] for d in inner_axes]
    at = axes.index(block.axis)
    before = prod(here[:at])
    size = block.unit * prod(here[at + 1 :])
    for place, length in enumerate(there):
        inner = prod(there[place + 1 :])
        if prod(there[:place]) == before and length > 1 and size % inner == 0:
            return ((operand, Block(inner_axes[place], size // inner, block.shift)),)
    raise mixed(value)


def _ordered(value: Instruction, in_memory: bool) -> list[int]:
    """The dimensions of a value, from major to minor."""
    if in_memory:
        return list(value.shape.layout.minor_to_major)[::-1]
    return list(range(len(value.shape.dimensions)))


def _slice(value: Instruction, block: Block) -> tuple[Part, ...]:
    bounds = value.proto.slice_dimensions[block.axis]
    if bounds.stride != 1 or bounds.start % block.unit:
        raise mixed(value)
    shift = block.shift + bounds.start // block.unit
    return ((value.operands[0], Block(block.axis, block.unit, shift)),)


def _concatenate(value: Instruction, block: Block) -> tuple[Part, ...]:
    if block.axis == value.proto.dimensions[0]:
        raise mixed(value)
    return tuple((o, block) for o in value.operands)


def _pad(value: Instruction, block: Block) -> tuple[Part, ...]:
    own = value.proto.padding_config.dimensions[block.axis]
    if own.interior_padding or own.edge_padding_low % block.unit:
        raise mixed(value)
    shift = block.shift - own.edge_padding_low // block.unit
    return (value.operands[0], Block(block.axis, block.unit, shift)), (value.operands[1], None)


def _reverse(value: Instruction, block: Block) -> tuple[Part, ...]:
    if block.axis in value.proto.dimensions:
        raise mixed(value)
    return ((value.operands[0], block),)


def _dot(value: Instruction, block: Block) -> tuple[Part, ...]:
    numbers = value.proto.dot_dimension_numbers
    left, right = value.operands
    batch = list(zip(numbers.lhs_batch_dimensions, numbers.rhs_batch_dimensions, strict=True))
    unit, shift, axis = block.unit, block.shift, block.axis
    if axis < len(batch):
        at = batch[axis]
        return (left, Block(at[0], unit, shift)), (right, Block(at[1], unit, shift))
    axis -= len(batch)
    taken = {*numbers.lhs_batch_dimensions, *numbers.lhs_contracting_dimensions}
    free = [d for d in range(len(left.shape.dimensions)) if d not in taken]
    if axis < len(free):
        return (left, Block(free[axis], unit, shift)), (right, None)
    axis -= len(free)
    taken = {*numbers.rhs_batch_dimensions, *numbers.rhs_contracting_dimensions}
    free = [d for d in range(len(right.shape.dimensions)) if d not in taken]
    return (left, None), (right, Block(free[axis], unit, shift))


def _gather(value: Instruction, block: Block) -> tuple[Part, ...]:
    """Of all of the operand where it is not known to need a block of it alone."""
    operand, indices = value.operands
    at, found = indexed.gathered(value, block.axis, block.unit)
    if at < 0:
        raise mixed(value)
    own = None
    if found is not None:
        own = Block(found.axis, found.unit, block.shift + found.shift)
    return (operand, own), (indices, Block(at, block.unit, block.shift))


def _scatter(value: Instruction, block: Block) -> tuple[Part, ...]:
    found = indexed.scattered(value, block.axis, block.unit)
    if found is None:
        raise mixed(value)
    operand, indices, updates = value.operands
    count, shift = found.count, block.shift - found.shift
    at = indexed.updates_dimension(value, found.at)
    return (
        (operand, block),
        (indices, Block(found.at, count, shift)),
        (updates, Block(at, count, shift)),
    )


def _element(value: Instruction, block: Block) -> tuple[Part, ...]:
    """An element of a tuple that is made in this computation, or one result of a reduce."""
    source = needed_by(value)[0]
    if source is value.operands[0] and source.opcode != "reduce":
        raise mixed(value)
    return ((source, block),)


_RULES: dict[str, Callable[[Instruction, Block], tuple[Part, ...]]] = {
    "bitcast": _reshape,
    "broadcast": _broadcast,
    "concatenate": _concatenate,
    "copy": _elementwise,
    "dot": _dot,
    "gather": _gather,
    "get-tuple-element": _element,
    "pad": _pad,
    "reduce": _reduce,
    "reshape": _reshape,
    "reverse": _reverse,
    "scatter": _scatter,
    "select": _elementwise,
    "slice": _slice,
    "transpose": _transpose,
}
