"""Ops of which a device computes its part by its place in the group: `batches` knows no places.

- An update of some rows (``x.at[2:5].set(u)``): the device writes those rows of the update that are its own.
- A scatter of rows by numbers: the device subtracts its first row from them, so that those of other devices
  are outside of its part, and left out.
- Rows by numbers of which those in each part are in the same part (``x[arange(n), i]``, and what
  ``jax.numpy.linalg`` makes of pivots): the device has the rows that it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stretto.collectives.types import TensorType

from ...builder import array_shape, fill
from ...graph import Instruction
from ...schema import HloInstructionProto
from ...values import Node, NodeKind, Value
from .batches import Batch
from .cut import Slicer, constant, cut_node, cut_type, op, shifted
from .rows import Rows, index_dims, window_sizes
from .steps import zero_of


def placed_batches(node: Node, rows: Rows) -> Iterator[Batch]:
    """Batches of a node beside those of `batches`: `placed_nodes` has the nodes for a part."""
    match node.instruction.opcode:
        case "dynamic-update-slice":
            whole, update = _shape(node.operands[0]), _shape(node.operands[1])
            for d, (size, part) in enumerate(zip(whole, update, strict=True)):
                if size != part:
                    yield Batch((d, *(None,) * (len(node.operands) - 1)), (d,))
        case "scatter" if len(node.operands) == 3:
            numbers = node.instruction.proto.scatter_dimension_numbers
            if numbers.input_batching_dims:
                return
            vector = numbers.index_vector_dim
            for d in numbers.scatter_dims_to_operand_dims:
                if window_sizes(node)[d] != 1:
                    continue
                yield Batch((d, None, None), (d,))
                size, column = _shape(node.operands[0])[d], _column(numbers, d)
                for index, written in index_dims(node):
                    if rows.apart(node.operands[1], column, size, index, vector):
                        yield Batch((d, index, written), (d,))
        case "gather":
            yield from _gathers(node, rows)


def _gathers(node: Node, rows: Rows) -> Iterator[Batch]:
    proto = node.instruction.proto
    numbers = proto.gather_dimension_numbers
    rank = len(_shape(node.results[0]))
    of_indices = [d for d in range(len(_shape(node.operands[1]))) if d != numbers.index_vector_dim]
    of_result = [d for d in range(rank) if d not in numbers.offset_dims]
    for d in numbers.start_index_map:
        if proto.gather_slice_sizes[d] != 1 or d in numbers.operand_batching_dims:
            continue
        size = _shape(node.operands[0])[d]
        for index, result in zip(of_indices, of_result, strict=True):
            vector = numbers.index_vector_dim
            if rows.within(node.operands[1], _column(numbers, d), size, index, vector):
                yield Batch((d, index), (result,))


def is_placed(node: Node, batch: Batch) -> bool:
    match node.instruction.opcode:
        case "dynamic-update-slice":
            return batch.operands[1] is None
        case "scatter":
            numbers = node.instruction.proto.scatter_dimension_numbers
            d, index = batch.operands[0], batch.operands[len(batch.operands) // 2]
            return d in numbers.scatter_dims_to_operand_dims and (
                index is not None or batch.operands[-1] is None
            )
        case "gather":
            numbers = node.instruction.proto.gather_dimension_numbers
            d, index = batch.operands
            return d is not None and index is not None and d not in numbers.operand_batching_dims
    return False


def placed_nodes(
    node: Node, batch: Batch, operands: Sequence[Value], slicer: Slicer, parts: int
) -> list[Node]:
    """The nodes for a part of a node's result: the last of them gives it. ``operands``: parts, and whole
    arrays."""
    d = batch.operands[0]
    assert d is not None
    size = -(-_shape(node.operands[0])[d] // parts)
    starts, start = slicer.start(size)
    if node.instruction.opcode == "dynamic-update-slice":
        return [*starts, *_updated(node, d, operands, start, parts)]
    proto = node.instruction.proto
    is_gather = node.instruction.opcode == "gather"
    numbers = proto.gather_dimension_numbers if is_gather else proto.scatter_dimension_numbers
    moved = shifted(
        operands[1], numbers.index_vector_dim, _column(numbers, d), start, node.instruction
    )
    given = [operands[0], moved[-1].results[0], *operands[2:]]
    return [*starts, *moved, cut_node(node, batch, given, parts)]


def _updated(node: Node, d: int, operands: Sequence[Value], start: Value, parts: int) -> list[Node]:
    """The rows of a part that an update changes, chosen from it and from the part."""
    own, update, *indices = operands
    whole, like = _shape(node.operands[0]), node.instruction
    type, scalar = _type(update), TensorType("s32", ())
    size, count = _shape(own)[d], type.shape[d]
    nodes: list[Node] = []

    def add(opcode: str, given: Sequence[Value], of: TensorType, **fields: object) -> Value:
        nodes.append(op(opcode, given, of, like, **fields))
        return nodes[-1].results[0]

    # The first row of the update that is the part's first one: below zero where the update begins behind it.
    first = add("convert", [indices[d]], scalar) if _type(indices[d]) != scalar else indices[d]
    last = constant(np.int32(whole[d] - count), like)
    first = add("clamp", [constant(np.int32(0), like), first, last], scalar)
    first = add("subtract", [start, first], scalar)
    shape = list(type.shape)
    shape[d] = count + 2 * size
    zero = zero_of(type.dtype, like).results[0]
    padded = add("pad", [update, zero], TensorType(type.dtype, tuple(shape)))
    for e in range(len(shape)):
        around = size if e == d else 0
        nodes[-1].instruction.proto.padding_config.dimensions.add(
            edge_padding_low=around, edge_padding_high=around
        )
    shape[d] = size
    window = TensorType(type.dtype, tuple(shape))
    nothing = constant(np.int32(0), like)
    begin = add("add", [first, constant(np.int32(size), like)], scalar)
    at = [begin if e == d else nothing for e in range(len(shape))]
    new = add("dynamic-slice", [padded, *at], window, dynamic_slice_sizes=shape)
    dtype = _type(indices[d]).dtype
    none = nothing if dtype == "s32" else zero_of(dtype, like).results[0]
    others = [none if e == d else v for e, v in enumerate(indices)]
    old = add("dynamic-slice", [own, *others], window, dynamic_slice_sizes=shape)
    line = TensorType("s32", (size,))
    row = add("add", [_iota(size, like), add("broadcast", [first], line)], line)
    preds = TensorType("pred", (size,))
    bounds = [add("broadcast", [constant(np.int32(n), like)], line) for n in (0, count)]
    low, high = (
        add("compare", [row, bound], preds, comparison_direction=direction)
        for bound, direction in zip(bounds, ("GE", "LT"), strict=True)
    )
    inside = add("and", [low, high], preds)
    mask = add("broadcast", [inside], TensorType("pred", window.shape), dimensions=[d])
    chosen = add("select", [mask, new, old], window)
    add("dynamic-update-slice", [own, chosen, *others], cut_type(_type(node.results[0]), d, parts))
    return nodes


def _iota(size: int, like: Instruction) -> Value:
    proto = fill(
        HloInstructionProto(name=like.name), "iota", array_shape("s32", (size,)), dimensions=[0]
    )
    node = Node(NodeKind.CHEAP, Instruction(proto, like.computation), -1)
    node.results = [Value(TensorType("s32", (size,)), node)]
    return node.results[0]


def _column(numbers: object, d: int) -> int:
    """The place of a dimension's number in an index."""
    name = (
        "start_index_map" if hasattr(numbers, "start_index_map") else "scatter_dims_to_operand_dims"
    )
    return list(getattr(numbers, name)).index(d)


def _type(value: Value) -> TensorType:
    assert value.type is not None
    return value.type


def _shape(value: Value) -> tuple[int, ...]:
    return _type(value).shape
