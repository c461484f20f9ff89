"""Steps: ops that commute with cutting an array into equal parts along a dimension.

A `Step` transposes, reshapes or converts (`steps_of`), or is a Fourier transform of other dimensions than
that of the cut (`batched_of`). A row-major reshape keeps parts together if the dimensions before the cut have
the same number of elements on both sides. `emit` makes nodes for the same steps on arrays of other shapes or
types; they have the name and the source line of the original instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from stretto.collectives.types import TensorType

from ...builder import fill, shape_of
from ...graph import Instruction
from ...schema import HloInstructionProto, LiteralProto
from ...values import Node, NodeKind, Value
from .batches import memory_order, same_cut


class Transform(IntEnum):
    """Kinds of Fourier transforms, by their numbers in HLO's protos."""

    FFT = 0
    IFFT = 1
    RFFT = 2
    IRFFT = 3


@dataclass(frozen=True)
class Step:
    """``opcode``: transpose (by ``permutation``), reshape, convert, fft, or pad and slice at the ends of
    dimensions, of ``source`` to ``target``.

    ``like``: the instruction that it comes from. ``transform`` (a `Transform`) and ``lengths`` are those of
    an fft, which works on as many of the last dimensions as there are lengths.
    """

    opcode: str
    source: TensorType
    target: TensorType
    like: Instruction
    permutation: tuple[int, ...] = ()
    transform: int = 0
    lengths: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        fourier = self.transform, self.lengths
        return self.opcode, self.source, self.target, self.permutation, fourier


def batched_of(node: Node) -> tuple[Step, ...] | None:
    """The steps of a node as of `steps_of`; also what works on the parts of its operand one by one."""
    if node.kind is NodeKind.COMPUTE and node.instruction.opcode == "fft":
        source, target = node.operands[0].type, node.results[0].type
        assert source is not None and target is not None
        proto = node.instruction.proto
        transform, lengths = proto.fft_type, tuple(proto.fft_length)
        return (
            Step("fft", source, target, node.instruction, transform=transform, lengths=lengths),
        )
    return steps_of(node)


def steps_of(node: Node) -> tuple[Step, ...] | None:
    """The steps of a node that only moves or converts its one operand, or None if it is something else."""
    if node.kind is not NodeKind.COMPUTE or len(node.operands) != 1 or len(node.results) != 1:
        return None
    source, target = node.operands[0].type, node.results[0].type
    instruction = node.instruction
    if source is None or target is None or not source.size:
        return None
    if instruction.opcode in ("convert", "reshape"):
        return (Step(instruction.opcode, source, target, instruction),)
    if instruction.opcode == "transpose":
        permutation = tuple(instruction.proto.dimensions)
        return (Step("transpose", source, target, instruction, permutation),)
    if instruction.opcode == "bitcast" and source.dtype == target.dtype:
        return _bitcast(instruction, source, target)
    return None


def _bitcast(instruction: Instruction, source: TensorType, target: TensorType) -> tuple[Step, ...]:
    """A transpose into the order of memory, a reshape, and a transpose out of it (as in `segments`)."""
    steps: list[Step] = []
    into = memory_order(instruction.operands[0].shape, len(source.shape))
    out = memory_order(instruction.shape, len(target.shape))
    memory = TensorType(source.dtype, tuple(source.shape[i] for i in into))
    if into != sorted(into):
        steps.append(Step("transpose", source, memory, instruction, tuple(into)))
    other = TensorType(target.dtype, tuple(target.shape[i] for i in out))
    if other != memory:
        steps.append(Step("reshape", memory, other, instruction))
    if out != sorted(out):
        back = tuple(out.index(i) for i in range(len(out)))
        steps.append(Step("transpose", other, target, instruction, back))
    return tuple(steps)


def backward(step: Step, dimension: int, parts: int) -> int | None:
    """The dimension of the source whose parts are the parts of the target along ``dimension``."""
    if step.opcode == "transpose":
        return step.permutation[dimension]
    if step.opcode == "reshape":
        return _divided(step.target.shape, step.source.shape, dimension, parts)
    return dimension if dimension < len(step.source.shape) - len(step.lengths) else None


def forward(step: Step, dimension: int, parts: int) -> int | None:
    """The dimension of the target whose parts are the parts of the source along ``dimension``."""
    if step.opcode == "transpose":
        return step.permutation.index(dimension)
    if step.opcode == "reshape":
        return _divided(step.source.shape, step.target.shape, dimension, parts)
    return dimension if dimension < len(step.source.shape) - len(step.lengths) else None


def _divided(given: Sequence[int], other: Sequence[int], dimension: int, parts: int) -> int | None:
    """`same_cut`, for parts that are equal."""
    found = same_cut(given, other, dimension, parts)
    return found if found is not None and other[found] % parts == 0 else None


def part_of(type: TensorType, dimension: int, parts: int) -> TensorType:
    """The type of one of ``parts`` equal parts along a dimension."""
    shape = list(type.shape)
    shape[dimension] //= parts
    return TensorType(type.dtype, tuple(shape))


def of_part(steps: Sequence[Step], dimension: int, parts: int) -> tuple[Step, ...]:
    """The same steps for one part, along ``dimension``, of the first one's operand."""
    cut: list[Step] = []
    for step in steps:
        to = forward(step, dimension, parts)
        assert to is not None  # the way back has been found before
        source, target = part_of(step.source, dimension, parts), part_of(step.target, to, parts)
        cut.append(replace(step, source=source, target=target))
        dimension = to
    return tuple(cut)


def of_type(steps: Sequence[Step], dtype: str) -> tuple[Step, ...]:
    """Steps that only move data, for elements of another type."""
    return tuple(
        replace(
            step,
            source=TensorType(dtype, step.source.shape),
            target=TensorType(dtype, step.target.shape),
        )
        for step in steps
    )


def emit(steps: Sequence[Step], value: Value) -> tuple[list[Node], Value]:
    """New nodes that apply the steps to a value, and the result of the last one."""
    nodes: list[Node] = []
    for step in steps:
        nodes += _nodes(step, value)
        (value,) = nodes[-1].results
    return nodes, value


def _nodes(step: Step, operand: Value) -> list[Node]:
    like = step.like
    proto = HloInstructionProto(name=like.name)
    proto.metadata.CopyFrom(like.proto.metadata)
    fill(proto, step.opcode, shape_of(step.target), dimensions=step.permutation)
    if step.lengths:
        proto.fft_type = step.transform
        proto.fft_length.extend(step.lengths)
    for given, wanted in zip(step.source.shape, step.target.shape, strict=False):
        if step.opcode == "slice":
            proto.slice_dimensions.add(start=0, limit=wanted, stride=1)
        elif step.opcode == "pad":
            proto.padding_config.dimensions.add(edge_padding_high=wanted - given)
    instruction = Instruction(proto, like.computation)
    # Readers ask only for the operand's shape: a parameter has it.
    source = fill(HloInstructionProto(name=like.name), "parameter", shape_of(step.source))
    instruction.operands = (Instruction(source, like.computation),)
    node = Node(NodeKind.COMPUTE, instruction, -1, [operand])
    node.results = [Value(step.target, node)]
    if step.opcode != "pad":
        return [node]
    zero = zero_of(step.source.dtype, step.like)
    node.operands.append(zero.results[0])
    instruction.operands = (*instruction.operands, zero.instruction)
    return [zero, node]


_LITERALS = {"f32": "f32s", "f64": "f64s", "c64": "c64s", "c128": "c128s", "s32": "s32s"}


def zero_of(dtype: str, like: Instruction) -> Node:
    """The constant that a pad fills in: of its type, or converted to it."""
    type = TensorType(dtype, ())
    written = type if type.dtype in _LITERALS else TensorType("s32", ())
    literal = LiteralProto(shape=shape_of(written))
    zero = 0 if written.dtype == "s32" else 0.0
    getattr(literal, _LITERALS[written.dtype]).extend([zero] * (1 + type.dtype.startswith("c")))
    proto = fill(HloInstructionProto(name=like.name), "constant", shape_of(written))
    proto.literal = literal.SerializeToString()
    node = Node(NodeKind.CHEAP, Instruction(proto, like.computation), -1)
    node.results = [Value(written, node)]
    if type == written:
        return node
    (converted,) = _nodes(Step("convert", written, type, like), node.results[0])
    converted.kind = NodeKind.CHEAP
    return converted
