"""Rows of gathers and scatters: which blocks of its operands a block of one needs.

`jnp.take_along_axis`, with which a loss takes the score of a label or the probability of an action, is a
gather with an index vector for each element: numbers of its own row, which are iotas, and the label. Its
gradient is a scatter with the same indices. Rows of both are separate where the number of the row is known to
be the element's own, or where the row is a batching dimension. Then a row is the same gather or scatter on
blocks, with indices that are counted from where the block begins.

A scatter applies updates in the order in which they are; those of a row are next to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ..graph import Instruction
from ..passes.valid.known import is_row_major
from ..schema import PRIMITIVE_CODES
from .emit import Builder

_MOST = 1 << 22  # numbers of indices that are looked at


@dataclass(frozen=True)
class Indexed:
    """For each block of ``count`` index vectors along dimension ``at`` of the indices, one of ``unit``
    elements along dimension ``axis`` of what is gathered from or scattered to, ``shift`` blocks further.

    ``component``: that of index vectors which is a number along ``axis``; None for a batching dimension.
    """

    axis: int
    unit: int
    at: int
    count: int
    shift: int = 0
    component: int | None = None


def gathered(value: Instruction, axis: int, unit: int) -> tuple[int, Indexed | None]:
    """Of a gather of which blocks of dimension ``axis`` are wanted: that dimension of the indices, -1 if it
    is none of them, and what of the operand a block needs if that is known to be a block."""
    numbers = value.proto.gather_dimension_numbers
    operand, indices = value.operands
    batch = [d for d in range(len(value.shape.dimensions)) if d not in numbers.offset_dims]
    if axis not in batch:
        return -1, None
    at = _dimensions(indices, numbers.index_vector_dim)[batch.index(axis)]
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    for own, other in batching:
        if other == at:
            return at, Indexed(own, unit, at, unit)
    count = indices.shape.dimensions[at]
    for component, own in enumerate(numbers.start_index_map):
        length = operand.shape.dimensions[own]
        if value.proto.gather_slice_sizes[own] != 1 or length * unit % count:
            continue
        taken = length * unit // count
        shift = _shift(indices, numbers.index_vector_dim, component, at, unit, length, taken)
        if shift is not None:
            return at, Indexed(own, taken, at, unit, shift, component)
    return at, None


def scattered(value: Instruction, axis: int, unit: int) -> Indexed | None:
    """Of a scatter of one array of which blocks of dimension ``axis`` are wanted: the index vectors that it
    takes, if they are known to be a block."""
    numbers = value.proto.scatter_dimension_numbers
    if len(value.operands) != 3:
        return None
    operand, indices, updates = value.operands
    left = {*numbers.inserted_window_dims, *numbers.input_batching_dims}
    if axis not in left:
        windows = [d for d in range(len(operand.shape.dimensions)) if d not in left]
        if updates.shape.dimensions[numbers.update_window_dims[windows.index(axis)]] != 1:
            return None
    batching = zip(numbers.input_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    for own, at in batching:
        if own == axis:
            return Indexed(axis, unit, at, unit)
    if axis not in numbers.scatter_dims_to_operand_dims:
        return None
    component = list(numbers.scatter_dims_to_operand_dims).index(axis)
    length = operand.shape.dimensions[axis]
    for at in _dimensions(indices, numbers.index_vector_dim):
        size = indices.shape.dimensions[at]
        if size * unit % length:
            continue
        count = size * unit // length
        shift = _shift(indices, numbers.index_vector_dim, component, at, count, length, unit)
        if shift is not None:
            return Indexed(axis, unit, at, count, shift, component)
    return None


def updates_dimension(value: Instruction, at: int) -> int:
    """The dimension of a scatter's updates that is dimension ``at`` of its indices."""
    numbers = value.proto.scatter_dimension_numbers
    rank = len(value.operands[2].shape.dimensions)
    own = [d for d in range(rank) if d not in numbers.update_window_dims]
    return own[_dimensions(value.operands[1], numbers.index_vector_dim).index(at)]


def from_block(b: Builder, value: Instruction, found: Indexed, begin: Any, indices: Any) -> Any:
    """Indices of a gather or scatter on a block that begins at element ``begin``, an s32 scalar."""
    if found.component is None:
        return indices
    shape = indices.shape
    numbers = value.proto.gather_dimension_numbers
    if value.opcode == "scatter":
        numbers = value.proto.scatter_dimension_numbers
    begin = b.convert(begin, shape)
    where = numbers.index_vector_dim
    if where == len(shape.dimensions):  # index vectors of one number each
        begins = b.broadcast(begin, shape)
    else:
        ones = np.arange(shape.dimensions[where]) == found.component
        mask = b.convert(b.constant(ones.astype(np.int32)), shape)
        begins = b.add("multiply", mask.shape, [mask, b.broadcast(begin, mask.shape)])
        begins = b.broadcast(begins, shape, [where])
    return b.add("subtract", begins.shape, [indices, begins])


def counts_alone(indices: Instruction, vector: int, found: Indexed) -> bool:
    """Whether no other number of index vectors than that along ``found.axis`` is known to differ from one
    block to another one."""
    numbers, known = _numbers(indices)
    if vector == numbers.ndim:
        return True
    others = [c for c in range(numbers.shape[vector]) if c != found.component]
    numbers, known = (np.moveaxis(x.take(others, vector), found.at, 0) for x in (numbers, known))
    blocks, known = (x.reshape(-1, found.count, *x.shape[1:]) for x in (numbers, known))
    return not (known & (blocks != blocks[:1])).any()


def _dimensions(indices: Instruction, vector: int) -> list[int]:
    """Those of indices that are not that of index vectors."""
    return [d for d in range(len(indices.shape.dimensions)) if d != vector]


def _shift(
    indices: Instruction, vector: int, component: int, at: int, count: int, length: int, unit: int
) -> int | None:
    """How many blocks of ``unit`` further the numbers of a component of all index vectors lie than blocks of
    ``count`` of the vectors along dimension ``at``; None if that is not known, or not the same for all."""
    if prod(indices.shape.dimensions) > _MOST:
        return None
    numbers, known = _numbers(indices)
    if vector == numbers.ndim:
        numbers, known = numbers[..., None], known[..., None]
    # The dimension stays, so that `at` is the same.
    own, known = (x.take([component], vector) for x in (numbers, known))
    if not own.size or not known.all() or own.min() < 0 or own.max() >= length:
        return None
    place = np.arange(own.shape[at]).reshape([-1 if d == at else 1 for d in range(own.ndim)])
    shifts = own // unit - place // count
    first = int(shifts.flat[0])
    return first if (shifts == first).all() else None


def _numbers(value: Instruction) -> tuple[np.ndarray, np.ndarray]:
    """The elements of an array, and which of them are known, from iotas alone."""
    shape = tuple(value.shape.dimensions)
    nothing = np.zeros(shape, np.int64), np.zeros(shape, bool)
    if value.shape.element_type not in _WIDE:
        return nothing
    dimensions = list(value.proto.dimensions)
    match value.opcode:
        case "iota":
            numbers = np.arange(shape[dimensions[0]])
            return _spread(numbers, dimensions, shape), np.ones(shape, bool)
        case "concatenate":
            parts = zip(*map(_numbers, value.operands), strict=True)
            numbers, known = (np.concatenate(own, dimensions[0]) for own in parts)
        case "broadcast":
            numbers, known = (_spread(x, dimensions, shape) for x in _numbers(value.operands[0]))
        case "transpose":
            numbers, known = (x.transpose(dimensions) for x in _numbers(value.operands[0]))
        case "reshape" | "copy" | "convert":
            numbers, known = (x.reshape(shape) for x in _numbers(value.operands[0]))
        case "bitcast" if is_row_major(value.shape) and is_row_major(value.operands[0].shape):
            numbers, known = (x.reshape(shape) for x in _numbers(value.operands[0]))
        case _:
            return nothing
    return numbers, known


def _spread(array: np.ndarray, dimensions: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """An array as ``dimensions`` of a larger one, as a broadcast in HLO."""
    sizes = [1] * len(shape)
    for d, size in zip(dimensions, array.shape, strict=True):
        sizes[d] = size
    return np.broadcast_to(array.reshape(sizes), shape)


_WIDE = {PRIMITIVE_CODES[name] for name in ("s32", "s64")}
