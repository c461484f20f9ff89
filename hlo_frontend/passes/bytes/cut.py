"""Nodes that compute one part of what another node computes, and that exchange parts of one dimension for
parts of another.

An array is *cut* along a dimension into as many parts as a group has members; each device has one. Where the
dimension does not divide, the last parts are filled up: what is computed there, nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    proto = HloInstructionProto()
    proto.CopyFrom(instruction.proto)
    proto.ClearField("sharding")
    results = iter(batch.results)
    _cut_shape(proto.shape, results, parts)
    made = Instruction(proto, instruction.computation)
    made.called = instruction.called
    dimensions = iter(batch.operands)
    made.operands = tuple(
        [_placeholder(operand, dimensions, parts) for operand in instruction.operands]
    )
    _FIELDS.get(instruction.opcode, _nothing)(proto, instruction, batch, parts)
    return made


def _placeholder(operand: Instruction, dimensions: Any, parts: int) -> Instruction:
    """Readers ask only for the operand's shape: a parameter has it."""
    proto = HloInstructionProto(name=operand.name)
    fill(proto, "parameter", operand.shape)
    _cut_shape(proto.shape, dimensions, parts)
    return Instruction(proto, operand.computation)


def _cut_shape(shape: Any, dimensions: Any, parts: int) -> None:
    if shape.element_type == TUPLE:
        for part in shape.tuple_shapes:
            _cut_shape(part, dimensions, parts)
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
        _cut_shape(shape, dimensions, parts)


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
        self._own = own

    def part(self, value: Value, dimension: int, parts: int) -> tuple[list[Node], Value]:
        """Nodes, and the part that the last of them gives."""
        spread = self._broadcast(value, dimension, parts)
        if spread is not None:
            return spread
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
        starts, start = self._start(size)
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

    def _start(self, size: int) -> tuple[list[Node], Value]:
        """Where the part begins whose size this is: an entry of a table."""
        table = constant(np.array([p * size for p in self._places], np.int32), self._like)
        one = TensorType("s32", (1,))
        proto = HloInstructionProto(name=self._like.name)
        fill(proto, "dynamic-slice", shape_of(one), dynamic_slice_sizes=[1])
        sources = [placeholder(v, self._like) for v in (table, self._own)]
        entry = _node(proto, self._like, sources, [table, self._own], one)
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


def constant(array: np.ndarray | np.int32, like: Instruction) -> Value:
    """A constant of s32."""
    values = np.asarray(array)
    shape = array_shape("s32", values.shape)
    literal = LiteralProto(shape=shape, s32s=values.reshape(-1).tolist())
    proto = fill(HloInstructionProto(name=like.name), "constant", shape)
    proto.literal = literal.SerializeToString()
    node = Node(NodeKind.CHEAP, Instruction(proto, like.computation), -1)
    node.results = [Value(TensorType("s32", values.shape), node)]
    return node.results[0]


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
