"""New nodes for parts: copies of nodes on smaller arrays, and what cuts arrays and puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stretto.collectives.ops import Collective
from stretto.collectives.types import TensorType

from ...builder import array_shape, fill, shape_of
from ...graph import Computation, Instruction
from ...schema import HloInstructionProto, LiteralProto
from ...values import Node, NodeKind, Value
from ..bytes.batches import Batch
from ..bytes.cut import cut_node
from ..bytes.loops import cut_loop
from ..bytes.steps import part_of


class Maker:
    """Makes nodes and keeps them in ``nodes``, in their order. ``like``: gives them its source line and its
    computation; ``name``: the name of those that are no copies."""

    def __init__(self, like: Instruction, name: str) -> None:
        self.like, self.name = like, name
        self.nodes: list[Node] = []

    def add(
        self, opcode: str, type: TensorType, operands: Sequence[Value] = (), **fields: Any
    ) -> Value:
        """The result of a new compute node."""
        proto = HloInstructionProto(name=self.name)
        proto.metadata.CopyFrom(self.like.proto.metadata)
        return self._node(fill(proto, opcode, shape_of(type), **fields), [type], operands)[0]

    def _node(
        self,
        proto: Any,
        types: Sequence[TensorType],
        operands: Sequence[Value],
        shapes: Sequence[Any] | None = None,
        kind: NodeKind = NodeKind.COMPUTE,
        called: tuple[Computation, ...] = (),
    ) -> list[Value]:
        instruction = Instruction(proto, self.like.computation)
        instruction.called = called
        # Readers ask only for the shapes of operands: parameters have them.
        instruction.operands = tuple(
            Instruction(
                fill(HloInstructionProto(name=proto.name), "parameter", shape),
                self.like.computation,
            )
            for shape in (shapes or [shape_of(v.type) for v in operands])
        )
        node = Node(kind, instruction, -1, list(operands))
        node.results = [Value(type, node, i) for i, type in enumerate(types)]
        if kind is not NodeKind.CHEAP:
            self.nodes.append(node)
        return node.results

    # Numbers and constants, which are copied into each segment.

    def constant(self, numbers: Sequence[int], shape: Sequence[int]) -> Value:
        """A constant of s32."""
        type = TensorType("s32", tuple(shape))
        literal = LiteralProto(shape=shape_of(type), s32s=numbers)
        proto = fill(HloInstructionProto(name=self.name), "constant", shape_of(type))
        proto.literal = literal.SerializeToString()
        return self._node(proto, [type], (), kind=NodeKind.CHEAP)[0]

    def zeros(self, type: TensorType) -> Value:
        """An array of zeros, of any type that s32 can be converted to."""
        zero = self.constant([0], ())
        if type.dtype != "s32":
            scalar = TensorType(type.dtype, ())
            proto = fill(HloInstructionProto(name=self.name), "convert", shape_of(scalar))
            (zero,) = self._node(proto, [scalar], [zero], kind=NodeKind.CHEAP)
        proto = fill(HloInstructionProto(name=self.name), "broadcast", shape_of(type))
        return self._node(proto, [type], [zero], kind=NodeKind.CHEAP)[0]

    def element(self, vector: Value, index: int) -> Value:
        """An element of a vector of s32."""
        one = self.slice(vector, 0, index, 1)
        return self.add("reshape", TensorType("s32", ()), [one])

    def scaled(self, number: Value, by: int) -> Value:
        """A scalar of s32 times a constant."""
        if by == 1:
            return number
        return self.add("multiply", TensorType("s32", ()), [number, self.constant([by], ())])

    # Cutting and putting together.

    def slice(self, value: Value, dimension: int, start: int, size: int) -> Value:
        """The elements from ``start`` on along a dimension."""
        assert value.type is not None
        shape = list(value.type.shape)
        shape[dimension] = size
        made = self.add("slice", TensorType(value.type.dtype, tuple(shape)), [value])
        assert made.node is not None
        for d, whole in enumerate(value.type.shape):
            first = start if d == dimension else 0
            limit = start + size if d == dimension else whole
            made.node.instruction.proto.slice_dimensions.add(start=first, limit=limit, stride=1)
        return made

    def slice_at(self, value: Value, dimension: int, start: Value, size: int) -> Value:
        """The same from a start that is computed, a scalar of s32."""
        assert value.type is not None
        shape = list(value.type.shape)
        shape[dimension] = size
        type = TensorType(value.type.dtype, tuple(shape))
        starts = self._starts(len(shape), dimension, start)
        return self.add("dynamic-slice", type, [value, *starts], dynamic_slice_sizes=shape)

    def put_at(self, whole: Value, part: Value, dimension: int, start: Value) -> Value:
        """``whole`` with ``part`` from ``start`` on."""
        assert whole.type is not None
        starts = self._starts(len(whole.type.shape), dimension, start)
        return self.add("dynamic-update-slice", whole.type, [whole, part, *starts])

    def _starts(self, rank: int, dimension: int, start: Value) -> list[Value]:
        return [start if d == dimension else self.constant([0], ()) for d in range(rank)]

    def concatenated(self, parts: Sequence[Value], dimension: int) -> Value:
        if len(parts) == 1:
            return parts[0]
        first = parts[0].type
        assert first is not None
        shape = list(first.shape)
        shape[dimension] = sum(p.type.shape[dimension] for p in parts if p.type is not None)
        type = TensorType(first.dtype, tuple(shape))
        return self.add("concatenate", type, parts, dimensions=[dimension])

    # Copies.

    def part(self, node: Node, cut: Batch, parts: int, operands: Sequence[Value]) -> list[Value]:
        """The results of a compute node for one of ``parts`` parts."""
        cutter = cut_loop if node.instruction.opcode == "while" else cut_node
        made = cutter(node, cut, operands, parts)
        made.instruction.proto.name = self.name
        self.nodes.append(made)
        return made.results

    def cheap_part(self, value: Value, dimension: int, parts: int) -> Value | None:
        """A part of a broadcast that is copied into segments; None for another array."""
        node = value.root.node
        if node is None or node.kind is not NodeKind.CHEAP or value.type is None:
            return None
        if node.instruction.opcode != "broadcast" or dimension in node.instruction.proto.dimensions:
            return None
        type = part_of(value.type, dimension, parts)
        proto = HloInstructionProto()
        proto.CopyFrom(node.instruction.proto)
        del proto.operand_ids[:]
        proto.shape.dimensions[dimension] //= parts
        return self._node(proto, [type], node.operands, kind=NodeKind.CHEAP)[0]

    # Devices.

    def row(self, table: Sequence[Sequence[int]], num_replicas: int, num_partitions: int) -> Value:
        """The device's row of a table of integers, by flattened logical id: a vector of s32."""
        count = len(table[0])
        flat = TensorType("s32", (count,))
        one = TensorType("s32", ())
        ids = []
        for opcode, wanted in (
            ("replica-id", num_replicas > 1),
            ("partition-id", num_partitions > 1),
        ):
            if wanted:
                proto = fill(HloInstructionProto(name=self.name), opcode, array_shape("u32"))
                (id,) = self._node(proto, [TensorType("u32", ())], (), kind=NodeKind.LOGICAL_ID)
                ids.append(self.add("convert", one, [id]))
        device = ids[-1]
        if len(ids) > 1:
            device = self.add("add", one, [self.scaled(ids[0], num_partitions), ids[1]])
        numbers = self.constant([n for row in table for n in row], (len(table), count))
        row = self.slice_at(numbers, 0, device, 1)
        return self.add("reshape", flat, [row])


def collective_like(node: Node, collective: Collective, operands: Sequence[Value]) -> Node:
    """A node for a collective that comes from that of another node, with the source line of that node and the
    name of the new collective."""
    proto = HloInstructionProto()
    proto.CopyFrom(node.instruction.proto)
    proto.name = collective.name
    instruction = Instruction(proto, node.instruction.computation)
    instruction.operands = node.instruction.operands
    instruction.called = node.instruction.called
    made = Node(NodeKind.COLLECTIVE, instruction, -1, list(operands), collective=collective)
    made.results = [Value(type, made, i) for i, type in enumerate(collective.results)]
    return made


def name_of(node: Node) -> str:
    """The name of a node's collective."""
    assert node.collective is not None
    return node.collective.name or node.instruction.name
