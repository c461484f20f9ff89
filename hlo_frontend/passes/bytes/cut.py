"""Nodes that compute one part of what another node computes, and that exchange parts of one dimension for
parts of another.

An array is *cut* along a dimension into as many parts as a group has members; each device has one. Where the
dimension does not divide, the last parts are filled up: what is computed there, nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from stretto.collectives.ops import Collective, Kind
from stretto.collectives.types import TensorType

from ...builder import array_shape, fill, shape_of
from ...graph import Instruction
from ...schema import TUPLE, HloInstructionProto, LiteralProto
from ...values import Node, NodeKind, Value
from .batches import Batch
from .device_values import DeviceValues
from .rows import window_sizes
from .steps import Step, emit


def cut_type(type: TensorType, dimension: int | None, parts: int) -> TensorType:
    """The type of a part; the whole array's where ``dimension`` is None."""
    if dimension is None:
        return type
    size = -(-type.shape[dimension] // parts)
    return TensorType(type.dtype, (*type.shape[:dimension], size, *type.shape[dimension + 1 :]))


def cut_node(node: Node, batch: Batch, operands: Sequence[Value], parts: int) -> Node:
    """The node for one part of its results along a batch. ``operands``: parts, and whole arrays."""
    instruction = cut_instruction(node.instruction, batch, parts)
    made = Node(NodeKind.COMPUTE, instruction, -1, list(operands), node.order)
    made.results = [
        Value(cut_type(_type(v), d, parts), made, i)
        for i, (v, d) in enumerate(zip(node.results, batch.results, strict=True))
    ]
    return made


def cut_instruction(instruction: Instruction, batch: Batch, parts: int) -> Instruction:
    """The instruction for parts. Its operands have only shapes."""
    proto = cut_proto(instruction, batch, parts)
    made = Instruction(proto, instruction.computation)
    made.called = instruction.called
    dimensions = iter(batch.operands)
    made.operands = tuple(
        [_placeholder(operand, dimensions, parts) for operand in instruction.operands]
    )
    return made


def cut_proto(instruction: Instruction, batch: Batch, parts: int) -> Any:
    """A copy of an instruction's proto, with the shapes of a part."""
    proto = HloInstructionProto()
    proto.CopyFrom(instruction.proto)
    proto.ClearField("sharding")
    cut_shape(proto.shape, iter(batch.results), parts)
    _FIELDS.get(instruction.opcode, _nothing)(proto, instruction, batch, parts)
    return proto


def _placeholder(operand: Instruction, dimensions: Any, parts: int) -> Instruction:
    """Readers ask only for the operand's shape: a parameter has it."""
    proto = HloInstructionProto(name=operand.name)
    fill(proto, "parameter", operand.shape)
    cut_shape(proto.shape, dimensions, parts)
    return Instruction(proto, operand.computation)


def cut_shape(shape: Any, dimensions: Iterator[int | None], parts: int) -> None:
    """Make a shape that of a part, each of its arrays along the next of these dimensions."""
    if shape.element_type == TUPLE:
        for part in shape.tuple_shapes:
            cut_shape(part, dimensions, parts)
        return
    d = next(dimensions)
    if d is not None:
        shape.dimensions[d] = -(-shape.dimensions[d] // parts)


# Fields beside the shapes that tell sizes.


def _nothing(proto: Any, instruction: Instruction, batch: Batch, parts: int) -> None:
    pass


def _slice(proto: Any, instruction: Instruction, batch: Batch, parts: int) -> None:
    (d,) = batch.results
    proto.slice_dimensions[d].limit = proto.shape.dimensions[d]


def _dynamic_slice(proto: Any, instruction: Instruction, batch: Batch, parts: int) -> None:
    (d,) = batch.results
    proto.dynamic_slice_sizes[d] = proto.shape.dimensions[d]


def _gather(proto: Any, instruction: Instruction, batch: Batch, parts: int) -> None:
    d = batch.operands[0]
    if d is not None and d not in proto.gather_dimension_numbers.operand_batching_dims:
        proto.gather_slice_sizes[d] = -(-proto.gather_slice_sizes[d] // parts)


def _convolution(proto: Any, instruction: Instruction, batch: Batch, parts: int) -> None:
    if None not in batch.operands:
        proto.feature_group_count //= parts


def _custom_call(proto: Any, instruction: Instruction, batch: Batch, parts: int) -> None:
    dimensions = iter(batch.operands)
    for shape in proto.operand_shapes_with_layout:
        cut_shape(shape, dimensions, parts)


_FIELDS = {
    "convolution": _convolution,
    "custom-call": _custom_call,
    "dynamic-slice": _dynamic_slice,
    "gather": _gather,
    "slice": _slice,
}


# Parts of arrays that every device has.


class Slicer:
    """Cuts out a device's own part of arrays. ``places``: its number, by the device's flattened id, which is
    what ``own`` gives, a partition's or a replica's number."""

    def __init__(self, like: Instruction, places: Sequence[int], own: Value) -> None:
        self._like = like
        self._places = places
        self.own = own

    @classmethod
    def of(
        cls, known: DeviceValues, place: Mapping[int, int], like: Instruction
    ) -> tuple[Slicer, Node]:
        """One with a node of its own that gives the id. ``place``: the number of each device."""
        opcode, type = known.id_opcode, TensorType("u32", ())
        proto = fill(HloInstructionProto(name=opcode), opcode, shape_of(type))
        node = Node(NodeKind.LOGICAL_ID, Instruction(proto, like.computation), -1)
        node.results = [Value(type, node)]
        return cls(like, [place[d] for d in range(len(place))], node.results[0]), node

    def part(self, value: Value, dimension: int, parts: int) -> tuple[list[Node], Value]:
        """Nodes, and the part that the last of them gives."""
        smaller = self._broadcast(value, dimension, parts)
        smaller = smaller or self._scattered(value, dimension, parts)
        if smaller is not None:
            return smaller
        whole = _type(value)
        size = -(-whole.shape[dimension] // parts)
        filled = TensorType(
            whole.dtype,
            (*whole.shape[:dimension], size * parts, *whole.shape[dimension + 1 :]),
        )
        nodes: list[Node] = []
        view = value
        if filled != whole:
            more, value = emit([Step("pad", whole, filled, self._like)], value.root)
            nodes += more
        starts, start = self.start(size)
        zero = constant(np.int32(0), self._like)
        proto = HloInstructionProto(name=self._like.name)
        part = cut_type(whole, dimension, parts)
        fill(proto, "dynamic-slice", shape_of(part), dynamic_slice_sizes=list(part.shape))
        indices = [start if d == dimension else zero for d in range(len(part.shape))]
        sources = [placeholder(v, self._like) for v in (value, *indices)]
        made = _node(proto, self._like, sources, [value, *indices], part)
        made.order = tuple(view.order)
        return [*nodes, *starts, made], made.results[0]

    def _broadcast(
        self, value: Value, dimension: int, parts: int
    ) -> tuple[list[Node], Value] | None:
        """A smaller broadcast of a constant."""
        node = value.node
        if node is None or node.instruction.opcode != "broadcast" or node.operands[0].order:
            return None
        if dimension in node.instruction.proto.dimensions or value.order or value.barrier:
            return None
        batch = Batch((None,) * len(node.operands), (dimension,))
        made = cut_node(node, batch, node.operands, parts)
        made.kind = node.kind
        cheap = node.kind is NodeKind.CHEAP
        return [] if cheap else [made], made.results[0]

    def _scattered(
        self, value: Value, dimension: int, parts: int
    ) -> tuple[list[Node], Value] | None:
        """A scatter into a smaller broadcast of a constant, with indices that begin at the part: what is
        outside of it is left out."""
        node = value.node
        if node is None or node.instruction.opcode != "scatter" or len(node.operands) != 3:
            return None
        array, indices, _ = node.operands
        numbers = node.instruction.proto.scatter_dimension_numbers
        size, rest = divmod(_type(value).shape[dimension], parts)
        if rest or dimension not in numbers.scatter_dims_to_operand_dims:
            return None
        if numbers.input_batching_dims or window_sizes(node)[dimension] != 1:
            return None
        if node.order or any(v.order or v.barrier for v in (value, *node.operands)):
            return None
        spread = self._broadcast(array, dimension, parts)
        if spread is None:
            return None
        starts, start = self.start(size)
        column = list(numbers.scatter_dims_to_operand_dims).index(dimension)
        moved = shifted(indices, numbers.index_vector_dim, column, start, self._like)
        operands = [spread[1], moved[-1].results[0], node.operands[2]]
        made = cut_node(node, Batch((dimension, None, None), (dimension,)), operands, parts)
        return [*spread[0], *starts, *moved, made], made.results[0]

    def start(self, size: int) -> tuple[list[Node], Value]:
        """Where the part begins whose size this is: an entry of a table."""
        table = constant(np.array([p * size for p in self._places], np.int32), self._like)
        one = TensorType("s32", (1,))
        proto = HloInstructionProto(name=self._like.name)
        fill(proto, "dynamic-slice", shape_of(one), dynamic_slice_sizes=[1])
        sources = [placeholder(v, self._like) for v in (table, self.own)]
        entry = _node(proto, self._like, sources, [table, self.own], one)
        scalar = TensorType("s32", ())
        nodes, start = emit([Step("reshape", one, scalar, self._like)], entry.results[0])
        return [entry, *nodes], start


def placeholder(value: Value, like: Instruction) -> Instruction:
    """An instruction with the shape of a value."""
    proto = fill(HloInstructionProto(name=like.name), "parameter", shape_of(value.type))
    return Instruction(proto, like.computation)


def _node(
    proto: Any,
    like: Instruction,
    sources: Sequence[Instruction],
    operands: Sequence[Value],
    type: TensorType,
) -> Node:
    proto.metadata.CopyFrom(like.proto.metadata)
    instruction = Instruction(proto, like.computation)
    instruction.operands = tuple(sources)
    node = Node(NodeKind.COMPUTE, instruction, -1, list(operands))
    node.results = [Value(type, node)]
    return node


def op(
    opcode: str, operands: Sequence[Value], type: TensorType, like: Instruction, **fields: Any
) -> Node:
    """A node of one result, with the name and the source line of ``like``."""
    proto = fill(HloInstructionProto(name=like.name), opcode, shape_of(type), **fields)
    return _node(proto, like, [placeholder(v, like) for v in operands], operands, type)


def shifted(
    indices: Value, vector: int, column: int, start: Value, like: Instruction
) -> list[Node]:
    """Nodes that subtract ``start`` (s32) from one of the numbers that make an index. ``vector``: the
    dimension of those."""
    type = _type(indices)
    count = type.shape[vector] if vector < len(type.shape) else 1
    one = constant(np.eye(count, dtype=np.int32)[column], like)
    many = op("broadcast", [start], TensorType("s32", (count,)), like)
    offsets = op("multiply", [many.results[0], one], TensorType("s32", (count,)), like)
    made = [many, offsets]
    if type.dtype != "s32":
        made.append(op("convert", offsets.results, TensorType(type.dtype, (count,)), like))
    if vector == len(type.shape):
        made.append(op("reshape", made[-1].results, TensorType(type.dtype, ()), like))
    along = [vector] if vector < len(type.shape) else []
    made.append(op("broadcast", made[-1].results, type, like, dimensions=along))
    made.append(op("subtract", [indices, made[-1].results[0]], type, like))
    return made


def constant(array: np.ndarray | np.int32 | np.uint32, like: Instruction) -> Value:
    """A constant of s32 or u32."""
    values = np.asarray(array)
    dtype = "u32" if values.dtype.kind == "u" else "s32"
    shape = array_shape(dtype, values.shape)
    literal = LiteralProto(shape=shape, **{f"{dtype}s": values.reshape(-1).tolist()})
    proto = fill(HloInstructionProto(name=like.name), "constant", shape)
    proto.literal = literal.SerializeToString()
    node = Node(NodeKind.CHEAP, Instruction(proto, like.computation), -1)
    node.results = [Value(TensorType(dtype, values.shape), node)]
    return node.results[0]


def plus_zero(value: Value, own: Value, like: Instruction) -> tuple[list[Node], Value]:
    """Nodes that add 0.0 to floats, as a sum with others' zeros does: it makes 0.0 of -0.0. Compilers do not
    know that it is zero: it follows from ``own``, the device's id."""
    type, scalar = _type(value), TensorType("u32", ())
    shifted = op("shift-right-logical", [own, constant(np.uint32(31), like)], scalar, like)
    zero = op("convert", shifted.results, TensorType(type.dtype, ()), like)
    spread = op("broadcast", zero.results, type, like)
    added = op("add", [value, spread.results[0]], type, like)
    return [shifted, zero, spread, added], added.results[0]


# Exchanges.


def recut(
    whole: TensorType, given: int, wanted: int, parts: int, like: Instruction
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Steps around an all-to-all along the first dimension that gives a device its part along ``wanted`` for
    that along ``given``."""
    ahead: list[Step] = []
    behind: list[Step] = []

    def add(steps: list[Step], opcode: str, shape: Sequence[int], *more: Any) -> tuple[int, ...]:
        source = steps[-1].target if steps else TensorType(whole.dtype, here)
        target = TensorType(whole.dtype, tuple(shape))
        if target != source or opcode == "transpose":
            steps.append(Step(opcode, source, target, like, *more))
        return target.shape

    here = cut_type(whole, given, parts).shape
    cut = -(-whole.shape[wanted] // parts)
    size = cut * parts
    here = add(ahead, "pad", (*here[:wanted], size, *here[wanted + 1 :]))
    here = add(ahead, "reshape", (*here[:wanted], parts, cut, *here[wanted + 1 :]))
    order = (wanted, *(d for d in range(len(here)) if d != wanted))
    here = add(ahead, "transpose", [here[d] for d in order], order)
    # Now each device has, one behind the other, what all devices had of its part.
    order = (*range(1, 1 + given), 0, *range(1 + given, len(here)))
    here = add(behind, "transpose", [here[d] for d in order], order)
    together = parts * here[given + 1]
    here = add(behind, "reshape", (*here[:given], together, *here[given + 2 :]))
    add(behind, "slice", (*here[:given], whole.shape[given], *here[given + 1 :]))
    return tuple(ahead), tuple(behind)


def exchanged(collective: Collective, operand: Value) -> Collective:
    """The all-to-all of an operand along its first dimension."""
    types = (_type(operand),)
    return replace(collective, kind=Kind.ALL_TO_ALL, operands=types, results=types, dimension=0)


def gathered(collective: Collective, operand: Value, dimension: int, parts: int) -> Collective:
    """The all-gather of an operand."""
    type = _type(operand)
    shape = list(type.shape)
    shape[dimension] *= parts
    whole = TensorType(type.dtype, tuple(shape))
    return replace(
        collective,
        kind=Kind.ALL_GATHER,
        operands=(type,),
        results=(whole,),
        dimension=dimension,
    )


def _type(value: Value) -> TensorType:
    assert value.type is not None
    return value.type
