"""Ops of which a device computes its part by its place in the group: `batches` knows no places.

- An update of some rows (``x.at[2:5].set(u)``, or ``.add``): the device writes those that are its own.
- A scatter of rows by numbers: the device subtracts its first row from them, so that those of other devices
  are outside of its part, and left out.
- Rows by numbers of which those in each part are in the same part (``x[arange(n), i]``, and what
  ``jax.numpy.linalg`` makes of pivots): the device has the rows that it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from stretto.collectives.types import TensorType

from ...builder import array_shape, fill, shape_of
from ...edit import Editor
from ...graph import Instruction
from ...ops import op_of
from ...schema import HloInstructionProto
from ...values import Node, NodeKind, Value
from ..valid.known import starts_of, strides
from .batches import Batch
from .cut import Slicer, constant, cut_node, cut_type, op, placeholder, shifted
from .device_values import DeviceValues
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
    node: Node,
    batch: Batch,
    operands: Sequence[Value],
    slicer: Slicer,
    parts: int,
    windows: set[Node],
) -> list[Node]:
    """The nodes for a part of a node's result: the last of them gives it. ``operands``: parts, and whole
    arrays. ``windows``: those of `windows_read`."""
    d = batch.operands[0]
    assert d is not None
    size = -(-_shape(node.operands[0])[d] // parts)
    starts, start = slicer.start(size)
    if node.instruction.opcode == "dynamic-update-slice":
        made = _Update(node, d, operands, windows)
        made.write(start, parts)
        return [*starts, *made.nodes]
    proto = node.instruction.proto
    is_gather = node.instruction.opcode == "gather"
    numbers = proto.gather_dimension_numbers if is_gather else proto.scatter_dimension_numbers
    moved = shifted(
        operands[1], numbers.index_vector_dim, _column(numbers, d), start, node.instruction
    )
    given = [operands[0], moved[-1].results[0], *operands[2:]]
    return [*starts, *moved, cut_node(node, batch, given, parts)]


def windows_read(
    editor: Editor, node: Node, known: DeviceValues, derived: set[Value]
) -> set[Node] | None:
    """The nodes that make an update of rows from the same rows of the array, element by element, as in
    ``x.at[2:5].add(u)``; None if it is made otherwise, or one of them is read elsewhere."""
    shape = _shape(node.operands[1])
    found: set[Node] = set()
    todo = [node.operands[1]]
    while todo:
        value = todo.pop()
        if value.root not in derived:
            continue
        inner = value.node
        if inner is None or inner.kind is not NodeKind.COMPUTE or len(inner.results) != 1:
            return None
        if inner.has_side_effect or inner.order or value.order or value.barrier:
            return None
        if inner in found:
            continue
        found.add(inner)
        if _is_same_window(node, inner, known):
            continue
        if not op_of(inner.instruction.opcode).elementwise:
            return None
        if any(v.type is None or v.type.shape not in ((), shape) for v in inner.operands):
            return None
        todo += inner.operands
    readers = {use.node for made in found for use in editor.uses(made.results[0])}
    return found if readers <= {node, *found} else None


def _is_same_window(update: Node, node: Node, known: DeviceValues) -> bool:
    """Whether a slice takes what an update of its operand will replace."""
    opcode = node.instruction.opcode
    if opcode not in ("slice", "dynamic-slice"):
        return False
    if node.operands[0].root is not update.operands[0].root:
        return False
    if _shape(node.results[0]) != _shape(update.operands[1]):
        return False
    written = starts_of(update, [None, None, *(known.of(v) for v in update.operands[2:])], 2)
    if opcode == "slice":
        cuts = strides(node)
        begins = np.array([[c.start for c in cuts]])
        return written is not None and all(c.step == 1 for c in cuts) and _alike(written, begins)
    pairs = zip(node.operands[1:], update.operands[2:], strict=False)
    if len(node.operands) == len(update.operands) - 1 and all(a.root is b.root for a, b in pairs):
        return True
    read = starts_of(node, [None, *(known.of(v) for v in node.operands[1:])], 1)
    return written is not None and read is not None and _alike(written, read)


def _alike(starts: np.ndarray, others: np.ndarray) -> bool:
    return bool((starts == others).all())


class _Update:
    """The rows of a part that an update changes, chosen from it and from the part. ``nodes``: those made."""

    def __init__(self, node: Node, d: int, operands: Sequence[Value], windows: set[Node]) -> None:
        self._node, self._d, self._windows = node, d, windows
        self._own, update, *self._indices = operands
        self._size, self._count = _shape(self._own)[d], _shape(update)[d]
        shape = list(_shape(update))
        shape[d] = self._size
        self._shape = tuple(shape)
        self._made: dict[Value, Value] = {}
        self.nodes: list[Node] = []

    def write(self, start: Value, parts: int) -> None:
        """``start``: the part's first row."""
        d, like, scalar = self._d, self._node.instruction, TensorType("s32", ())
        begin = self._indices[d]
        given = begin if _type(begin) == scalar else self._add("convert", [begin], scalar)
        last = constant(np.int32(_shape(self._node.operands[0])[d] - self._count), like)
        first = self._add("clamp", [constant(np.int32(0), like), given, last], scalar)
        # The row of the update that is the part's first one: below zero if it begins behind that.
        first = self._add("subtract", [start, first], scalar)
        size = constant(np.int32(self._size), like)
        self._at = self._add("add", [first, size], scalar)
        none = constant(np.int32(0), like)
        if _type(begin) != scalar:
            none = zero_of(_type(begin).dtype, like).results[0]
        self._others = [none if e == d else v for e, v in enumerate(self._indices)]
        window = TensorType(_type(self._own).dtype, self._shape)
        self._old = self._add(
            "dynamic-slice", [self._own, *self._others], window, dynamic_slice_sizes=self._shape
        )
        new = self._aligned(self._node.operands[1])
        chosen = self._add("select", [self._inside(first), new, self._old], window)
        result = cut_type(_type(self._node.results[0]), d, parts)
        self._add("dynamic-update-slice", [self._own, chosen, *self._others], result)

    def _aligned(self, value: Value) -> Value:
        """An array of the update's shape, with its rows where those of the part are."""
        root, node = value.root, value.node
        if root in self._made or not _shape(value):
            return self._made.get(root, value)
        if node is None or node not in self._windows:
            made = self._window(value)
        elif node.instruction.opcode in ("slice", "dynamic-slice"):
            made = self._old
        else:
            made = self._again(node, [self._aligned(v) for v in node.operands])
        self._made[root] = made
        return made

    def _again(self, node: Node, operands: list[Value]) -> Value:
        """The same op on rows of the part."""
        like = node.instruction
        type = TensorType(_type(node.results[0]).dtype, self._shape)
        proto = HloInstructionProto()
        proto.CopyFrom(like.proto)
        proto.ClearField("sharding")
        proto.shape.CopyFrom(shape_of(type))
        instruction = Instruction(proto, like.computation)
        instruction.operands = tuple([placeholder(v, like) for v in operands])
        instruction.called = like.called
        made = Node(NodeKind.COMPUTE, instruction, -1, operands)
        made.results = [Value(type, made)]
        self.nodes.append(made)
        return made.results[0]

    def _window(self, value: Value) -> Value:
        type, like = _type(value), self._node.instruction
        shape = list(type.shape)
        shape[self._d] = self._count + 2 * self._size
        zero = zero_of(type.dtype, like).results[0]
        padded = self._add("pad", [value, zero], TensorType(type.dtype, tuple(shape)))
        for e in range(len(shape)):
            around = self._size if e == self._d else 0
            self.nodes[-1].instruction.proto.padding_config.dimensions.add(
                edge_padding_low=around, edge_padding_high=around
            )
        nothing = constant(np.int32(0), like)
        at = [self._at if e == self._d else nothing for e in range(len(shape))]
        window = TensorType(type.dtype, self._shape)
        return self._add("dynamic-slice", [padded, *at], window, dynamic_slice_sizes=self._shape)

    def _inside(self, first: Value) -> Value:
        """Which rows of the part are the update's."""
        like, line = self._node.instruction, TensorType("s32", (self._size,))
        row = self._add(
            "add", [_iota(self._size, like), self._add("broadcast", [first], line)], line
        )
        preds = TensorType("pred", line.shape)
        bounds = [
            self._add("broadcast", [constant(np.int32(n), like)], line) for n in (0, self._count)
        ]
        low, high = (
            self._add("compare", [row, bound], preds, comparison_direction=direction)
            for bound, direction in zip(bounds, ("GE", "LT"), strict=True)
        )
        inside = self._add("and", [low, high], preds)
        whole = TensorType("pred", self._shape)
        return self._add("broadcast", [inside], whole, dimensions=[self._d])

    def _add(self, opcode: str, given: Sequence[Value], of: TensorType, **fields: object) -> Value:
        self.nodes.append(op(opcode, given, of, self._node.instruction, **fields))
        return self.nodes[-1].results[0]


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
