"""Building HLO: the shapes of arrays and tuples, and instructions that are added to a computation.

Used wherever stretto writes HLO: modules of segments (`segments`), nodes that passes put into a graph
(`passes.bytes`), and modules that are rewritten as a whole (`pipelines`). Arrays are row-major.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from stretto.collectives.types import TensorType

from .graph import Instruction
from .schema import PRIMITIVE_CODES, TUPLE, LiteralProto, ShapeProto


def array_shape(dtype: str, dimensions: Sequence[int] = ()) -> Any:
    """The ShapeProto of an array."""
    shape = ShapeProto(element_type=PRIMITIVE_CODES[dtype], dimensions=dimensions)
    shape.is_dynamic_dimension.extend([False] * len(dimensions))
    shape.layout.SetInParent()
    shape.layout.minor_to_major.extend(range(len(dimensions))[::-1])
    return shape


def shape_of(type: TensorType | None) -> Any:
    """The ShapeProto of a value that is an array."""
    assert type is not None
    return array_shape(type.dtype, type.shape)


def resized(shape: Any, dimensions: Sequence[int]) -> Any:
    """The shape of an array whose elements have the type of those of ``shape``."""
    other = array_shape("s32", dimensions)
    other.element_type = shape.element_type
    return other


def tuple_shape(parts: Iterable[Any]) -> Any:
    """The ShapeProto of a tuple of arrays or tuples."""
    return ShapeProto(element_type=TUPLE, tuple_shapes=parts)


def fill(proto: Any, opcode: str, shape: Any, operands: Sequence[Any] = (), **fields: Any) -> Any:
    """Make an empty instruction this operation. ``operands``: instructions, as protos; ``fields``: the other
    fields of its proto."""
    proto.opcode = opcode
    proto.shape.CopyFrom(shape)
    proto.operand_ids.extend(o.id for o in operands)
    for name, value in fields.items():
        if isinstance(value, (list, tuple)):
            getattr(proto, name).extend(value)
        else:
            setattr(proto, name, value)
    return proto


class Builder:
    """Adds instructions to a computation. Instructions are protos; operands refer to them by their ids.

    Subclasses say which ids and names new instructions have.
    """

    def __init__(self, proto: Any) -> None:
        self.proto = proto

    @property
    def id(self) -> int:
        """The id of the computation."""
        found: int = self.proto.id
        return found

    def identify(self, proto: Any, opcode: str, copied: Instruction | None = None) -> None:
        """Give a new instruction its id and its name. ``copied``: the instruction that it is a copy of."""
        raise NotImplementedError

    def add(self, opcode: str, shape: Any, operands: Sequence[Any] = (), **fields: Any) -> Any:
        """A new instruction; see `fill`."""
        proto = fill(self.proto.instructions.add(), opcode, shape, operands, **fields)
        self.identify(proto, opcode)
        return proto

    def copy(self, instruction: Instruction, operands: Sequence[Any]) -> Any:
        """The same instruction on other operands, without its control dependencies."""
        proto = self.proto.instructions.add()
        proto.CopyFrom(instruction.proto)
        del proto.operand_ids[:]
        del proto.control_predecessor_ids[:]
        proto.operand_ids.extend(o.id for o in operands)
        self.identify(proto, instruction.opcode, instruction)
        return proto

    def parameter(self, shape: Any) -> Any:
        """The computation's next parameter."""
        number = sum(i.opcode == "parameter" for i in self.proto.instructions)
        return self.add("parameter", shape, parameter_number=number)

    def tuple(self, parts: Sequence[Any], shape: Any = None) -> Any:
        """A tuple. ``shape``: where its parts are to be taken for arrays in another layout."""
        return self.add("tuple", shape or tuple_shape(p.shape for p in parts), parts)

    def element(self, of: Any, index: int) -> Any:
        return self.add("get-tuple-element", of.shape.tuple_shapes[index], [of], tuple_index=index)

    def elements(self, of: Any) -> list[Any]:
        return [self.element(of, i) for i in range(len(of.shape.tuple_shapes))]

    def constant(self, array: np.ndarray | int) -> Any:
        """A constant of s32."""
        values = np.asarray(array)
        shape = array_shape("s32", values.shape)
        literal = LiteralProto(shape=shape, s32s=values.reshape(-1).tolist())
        return self.add("constant", shape, literal=literal.SerializeToString())

    def convert(self, array: Any, like: Any) -> Any:
        """The array with elements of the type that the shape ``like`` has; itself if it has them already."""
        if array.shape.element_type == like.element_type:
            return array
        return self.add("convert", resized(like, array.shape.dimensions), [array])

    def broadcast(self, array: Any, shape: Any, dimensions: Sequence[int] = ()) -> Any:
        """``dimensions``: those of ``shape`` that are dimensions of the array, none if that is a scalar."""
        made = resized(array.shape, shape.dimensions)
        return self.add("broadcast", made, [array], dimensions=dimensions)

    def reshape(self, array: Any, dimensions: Sequence[int]) -> Any:
        return self.add("reshape", resized(array.shape, dimensions), [array])

    def transpose(self, array: Any, permutation: Sequence[int]) -> Any:
        shape = resized(array.shape, [array.shape.dimensions[d] for d in permutation])
        return self.add("transpose", shape, [array], dimensions=permutation)

    def reinterpret(self, array: Any, source: Any, target: Any) -> Any:
        """A bitcast of an array of shape ``source`` to one of shape ``target``, which takes as many bytes:
        bits of another type, transpose into memory order, reshape, transpose out of it. Elements of another
        size are made where the array is in memory order."""
        other_type = source.element_type != target.element_type
        sizes = prod(array.shape.dimensions), prod(target.dimensions)
        if other_type and sizes[0] == sizes[1]:
            array = self.add("bitcast-convert", resized(target, array.shape.dimensions), [array])
        into = list(source.layout.minor_to_major)[::-1]
        out = list(target.layout.minor_to_major)[::-1]
        if into != sorted(into):
            array = self.transpose(array, into)
        if other_type and sizes[0] != sizes[1]:
            array = self._resize(array, *sizes, target)
        array = self.reshape(array, [target.dimensions[i] for i in out])
        if out != sorted(out):
            array = self.transpose(array, [out.index(i) for i in range(len(out))])
        return array

    def _resize(self, array: Any, given: int, left: int, target: Any) -> Any:
        """An array of ``given`` elements as one of ``left`` elements of the type of ``target``, in a row."""
        wider = given > left
        array = self.reshape(array, [left, given // left] if wider else [given])
        parts = [left] if wider else [given, left // given]
        return self.add("bitcast-convert", resized(target, parts), [array])

    def dynamic_slice(self, array: Any, starts: Sequence[Any], sizes: Sequence[int]) -> Any:
        """``starts``: a scalar for each dimension."""
        shape = resized(array.shape, sizes)
        return self.add("dynamic-slice", shape, [array, *starts], dynamic_slice_sizes=list(sizes))

    def finish(self, root: Any) -> None:
        """End the computation: it has a root, and the types of its parameters and its result."""
        self.proto.root_id = root.id
        parameters = [i for i in self.proto.instructions if i.opcode == "parameter"]
        program = self.proto.program_shape
        program.Clear()
        for parameter in sorted(parameters, key=lambda p: p.parameter_number):
            program.parameters.add().CopyFrom(parameter.shape)
            program.parameter_names.append(parameter.name)
        program.result.CopyFrom(root.shape)
