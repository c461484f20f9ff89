"""Segment plans to segments: an HLO module for each, then StableHLO, equal ones made once.

Invariants: two plans that compute the same with the same donation give byte-equal HLO (ids are
renumbered, names, metadata and shardings dropped), hence one segment. Every instruction moves
verbatim except for what is listed in `_move`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxlib import _jax

from stretto.collectives.types import TensorType
from stretto.runtime.errors import UnsupportedError
from stretto.runtime.program import Segment

from . import stablehlo
from .carve import SegmentPlan
from .flops import arithmetic, flops_of
from .graph import Computation, Instruction
from .schema import PRIMITIVE_CODES, PRIMITIVE_TYPES, TUPLE, HloModuleProto, LiteralProto
from .values import Barrier, Node, NodeKind, Value, operand_shape

# Ops whose backend_config is part of what they compute.
_KEEPS_CONFIG = frozenset({"custom-call"})
# Ops whose frontend attributes the importer needs.
_KEEPS_ATTRIBUTES = frozenset({"custom-call", "call"})
# Ops that hand on what their operand is, or will be: inside of a segment nothing is asynchronous.
_HANDED_ON = frozenset({"copy", "copy-start", "copy-done", "async-update", "async-done"})


class SegmentPool:
    """Makes segments, each distinct one once."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._index: dict[tuple[bytes, tuple[tuple[int, int], ...]], int] = {}

    def add(self, plan: SegmentPlan, aliases: Mapping[int, int]) -> int:
        """Index of the plan's segment; input i of ``aliases`` is donated to output aliases[i]."""
        builder = ModuleBuilder()
        hlo = builder.plan(plan)
        name = segment_name(plan)
        instructions = [node.instruction for node in plan.nodes]
        inputs = [v.type for v in plan.inputs if v.type is not None]
        outputs = [v.type for v in plan.outputs if v.type is not None]
        return self._intern(hlo, inputs, outputs, aliases, name, instructions, plan)

    def add_reducer(self, computation: Computation, operands: Sequence[TensorType]) -> int:
        """Index of the segment that combines two members' operands by ``computation``."""
        hlo = ModuleBuilder().reducer(computation, operands)
        doubled = [*operands, *operands]
        name = f"reducer.{computation.name}"
        return self._intern(hlo, doubled, operands, {}, name, computation.instructions)

    def _intern(
        self,
        hlo: Any,
        inputs: Sequence[TensorType],
        outputs: Sequence[TensorType],
        aliases: Mapping[int, int],
        name: str,
        instructions: Sequence[Instruction],
        plan: SegmentPlan | None = None,
    ) -> int:
        serialized = hlo.SerializeToString(deterministic=True)
        key = (serialized, tuple(sorted(aliases.items())))
        if key not in self._index:
            self._index[key] = len(self.segments)
            self.segments.append(
                Segment(
                    tuple(inputs),
                    tuple(outputs),
                    _to_stablehlo(serialized, instructions, aliases, plan),
                    donated=tuple(sorted(aliases)),
                    arithmetic=arithmetic(instructions),
                    flops=flops_of(instructions),
                    name=name,
                )
            )
        return self._index[key]


def _cheap_instructions(plan: SegmentPlan) -> list[Instruction]:
    """Constants and the like that the segment has copies of."""
    found: dict[Node, None] = {}
    left = [v for node in plan.nodes for v in node.operands] + [cheap for _, cheap in plan.made]
    while left:
        node = left.pop().root.node
        if node is not None and node.kind is NodeKind.CHEAP and node not in found:
            found[node] = None
            left += node.operands
    return [node.instruction for node in found]


def segment_name(plan: SegmentPlan) -> str:
    """From the first and last operation that the program's source names."""
    named = [n.instruction.proto.metadata.op_name for n in plan.nodes]
    short = [name.rsplit("/", 1)[-1] for name in named if name]
    if not short:
        return plan.nodes[0].instruction.opcode if plan.nodes else "constants"
    return short[0] if short[0] == short[-1] else f"{short[0]}…{short[-1]}"


def _to_stablehlo(
    hlo: bytes,
    instructions: Sequence[Instruction],
    aliases: Mapping[int, int],
    plan: SegmentPlan | None,
) -> bytes:
    """The module with its aliases. Raises `UnsupportedError` naming the instruction that is to blame."""
    try:
        return stablehlo.with_aliases(_jax.mlir.hlo_to_stablehlo(hlo), aliases)
    except Exception as error:
        reason = str(error)
    made = [] if plan is None else _cheap_instructions(plan)
    for instruction in [*made, *instructions]:
        alone = ModuleBuilder().single(instruction)
        try:  # what the importer lets pass, the reader may still refuse: shapes that do not fit
            stablehlo.parse(_jax.mlir.hlo_to_stablehlo(alone.SerializeToString()))
        except Exception as error:
            raise instruction.unsupported(f"cannot be written as StableHLO: {error}") from None
    raise UnsupportedError(f"a segment cannot be written as StableHLO: {reason}")


class ModuleBuilder:
    """Builds the HLO module of one segment."""

    def __init__(self) -> None:
        self.proto = HloModuleProto(name="segment", entry_computation_name="main")
        self._next = 1
        self._computations: dict[Computation, int] = {}
        self._values: dict[Value, int] = {}
        self._tuples: dict[tuple[int, ...], int] = {}
        self._barriers: dict[Barrier, dict[Value, int]] = {}
        self._inside: set[Value] = set()
        self._offsets: Mapping[Node, tuple[int | None, ...]] = {}
        self._vector: int = 0  # the input that they are in
        self._scalars: dict[tuple[int, bool], int] = {}  # its elements, and constants
        self._without_offsets: Mapping[Node, tuple[int | None, ...]] = {}
        # The computation being filled: instructions are added to `_entry`.
        self._entry: Any = None

    def plan(
        self,
        plan: SegmentPlan,
        without_offsets: Mapping[Node, tuple[int | None, ...]] | None = None,
    ) -> Any:
        """The module of a segment plan. ``without_offsets``: slices and pads that are to begin at 0 in all
        dimensions but those with None, to compare plans."""
        self._without_offsets = without_offsets or {}
        self._offsets = plan.offsets
        self._inside = set(plan.inputs)
        for node in plan.nodes:
            self._inside.update(node.results)
        for node in plan.nodes:
            for called in node.instruction.called:
                self._computation(called)
        self._begin("main")
        for number, value in enumerate(plan.inputs):
            self._values[value] = self._parameter(number, value.type)
        if plan.offsets:
            self._vector = self._values[plan.inputs[-1]]
        for node in plan.nodes:
            self._node(node)
        for made, cheap in plan.made:
            self._values[made] = self._cheap(cheap)
        self._finish([(self._values[v], v.type) for v in plan.outputs])
        return self.proto

    def single(self, instruction: Instruction) -> Any:
        """A module with one instruction, whose operands are parameters. For naming culprits."""
        for called in instruction.called:
            self._computation(called)
        self._begin("main")
        ids = []
        for number, operand in enumerate(instruction.operands):
            proto = self._add("parameter")
            proto.shape.CopyFrom(operand.shape)
            proto.parameter_number = number
            ids.append(proto.id)
        self._close(self._move(instruction, ids))
        return self.proto

    def reducer(self, computation: Computation, operands: Sequence[TensorType]) -> Any:
        """Elementwise: operand i of both members goes through ``computation``.

        A computation of two scalars is applied to each operand, one of 2n scalars to all at once.
        """
        n = len(operands)
        together = len(computation.parameters) == 2 * n and n > 1
        if not together and len(computation.parameters) != 2:
            raise computation.root.unsupported(
                f"a reducer with {len(computation.parameters)} parameters for {n} operands"
            )
        picks = [self._computation(computation, root=i if together else None) for i in range(n)]
        self._begin("main")
        ids = [self._parameter(i, t) for i, t in enumerate([*operands, *operands])]
        outputs = []
        for i, operand in enumerate(operands):
            taken = list(range(2 * n)) if together else [i, n + i]
            results = [operands[k % n] for k in taken]
            if len({t.shape for t in results}) != 1:
                raise computation.root.unsupported("a reducer over operands of different shapes")
            scalars = [p.shape.element_type for p in computation.parameters]
            arguments = [
                self._converted(ids[k], operands[k % n], scalar)
                for k, scalar in zip(taken, scalars, strict=True)
            ]
            root = computation.root.operands[i] if together else computation.root
            proto = self._add("map")
            proto.operand_ids.extend(arguments)
            proto.dimensions.extend(range(len(operand.shape)))
            proto.called_computation_ids.append(picks[i])
            set_shape(proto.shape, operand, code=root.shape.element_type)
            outputs.append(
                (self._converted(proto.id, operand, None, root.shape.element_type), operand)
            )
        self._finish(outputs)
        return self.proto

    def _converted(
        self, id: int, type: TensorType, to: int | None, source: int | None = None
    ) -> int:
        """Convert an array of ``type`` to element type code ``to``, or from ``source`` to its own."""
        own = PRIMITIVE_CODES[type.dtype]
        target = own if to is None else to
        if (own if source is None else source) == target:
            return id
        proto = self._add("convert")
        proto.operand_ids.append(id)
        set_shape(proto.shape, type, code=target)
        return proto.id

    # Instructions.

    def _add(self, opcode: str) -> Any:
        proto = self._entry.instructions.add()
        proto.id = self._next
        proto.name = f"i{self._next}"
        proto.opcode = opcode
        self._next += 1
        return proto

    def _parameter(self, number: int, type: TensorType | None) -> int:
        assert type is not None
        proto = self._add("parameter")
        proto.parameter_number = number
        set_shape(proto.shape, type)
        return proto.id

    def _move(self, instruction: Instruction, operand_ids: Sequence[int]) -> int:
        """Copy an instruction under a new id, without what is not part of what it computes."""
        if instruction.opcode == "bitcast":
            return self._bitcast(instruction, operand_ids[0])
        proto = self._entry.instructions.add()
        proto.CopyFrom(instruction.proto)
        proto.id = self._next
        proto.name = f"i{self._next}"
        self._next += 1
        opcode = instruction.opcode
        for field in ("metadata", "sharding", "statistics_viz", "original_value"):
            proto.ClearField(field)
        del proto.control_predecessor_ids[:]
        del proto.operand_ids[:]
        proto.operand_ids.extend(operand_ids)
        if instruction.called:
            del proto.called_computation_ids[:]
            proto.called_computation_ids.extend(self._computations[c] for c in instruction.called)
        if opcode not in _KEEPS_CONFIG:
            proto.ClearField("backend_config")
            proto.ClearField("backend_config_payload")
        elif proto.backend_config_payload.WhichOneof("one_of") == "id":
            payloads = instruction.computation.module.proto.payloads
            proto.backend_config_payload.value = payloads[proto.backend_config_payload.id]
        if opcode not in _KEEPS_ATTRIBUTES:
            proto.ClearField("frontend_attributes")
        if opcode == "fusion":
            proto.opcode = "call"
            proto.ClearField("fusion_kind")
        elif opcode == "async-start":
            proto.opcode = "call"
            proto.shape.CopyFrom(instruction.shape.tuple_shapes[1])
        elif opcode == "parameter":
            proto.shape.ClearField("layout")
        return proto.id

    def _node(self, node: Node) -> None:
        leaves = iter([self._leaf(v) for v in node.operands])
        operands = [self._tree(operand.shape, leaves) for operand in node.instruction.operands]
        if node in self._offsets:
            is_slice = node.instruction.opcode == "slice"
            id = self._slice_at(node, *operands) if is_slice else self._pad_at(node, *operands)
        else:
            id = self._move(node.instruction, operands)
        if node in self._without_offsets:
            _begin_at_zero(self._entry.instructions[-1], self._without_offsets[node])
        if node.instruction.shape.element_type == TUPLE:
            leaf_ids = iter(self._untuple(id, node.instruction.shape))
        else:
            leaf_ids = iter([id])
        for value in node.results:
            self._values[value] = next(leaf_ids)

    def _slice_at(self, node: Node, operand: int) -> int:
        """A slice that is told where."""
        proto, shape = node.instruction.proto, node.instruction.shape
        starts = [
            self._scalar(d.start, is_constant=True) if k is None else self._scalar(k)
            for k, d in zip(self._offsets[node], proto.slice_dimensions, strict=True)
        ]
        made = self._add("dynamic-slice")
        made.operand_ids.extend([operand, *starts])
        made.shape.CopyFrom(shape)
        made.dynamic_slice_sizes.extend(shape.dimensions)
        return made.id

    def _pad_at(self, node: Node, operand: int, filler: int) -> int:
        """A pad that is told where: the operand, wherever an index is that of its only element.

        Unlike an update of an array this is computed element by element, inside of what reads it.
        """
        moved = [d for d, k in enumerate(self._offsets[node]) if k is not None]
        (type,) = (result.type for result in node.results)
        assert type is not None
        code = node.instruction.shape.element_type
        sizes = list(type.shape)
        for d in moved:
            sizes[d] = 1
        if tuple(sizes) != operand_shape(node):
            padded = self._add("pad")
            padded.operand_ids.extend([operand, filler])
            padded.padding_config.CopyFrom(node.instruction.proto.padding_config)
            for d in moved:
                padded.padding_config.dimensions[d].edge_padding_low = 0
                padded.padding_config.dimensions[d].edge_padding_high = 0
            set_shape(padded.shape, TensorType(type.dtype, tuple(sizes)), code)
            operand = padded.id
        others = [d for d in range(len(sizes)) if d not in moved]
        flat = self._reshaped("reshape", operand, code, [sizes[d] for d in others])
        inside = self._broadcast(flat, type, others)
        outside = self._broadcast(filler, type, ())
        numbers, found = TensorType("s32", type.shape), TensorType("pred", type.shape)
        here: int | None = None
        for d in moved:
            index = self._add("iota")
            index.dimensions.append(d)
            set_shape(index.shape, numbers)
            k = self._offsets[node][d]
            assert k is not None
            wanted = self._broadcast(self._scalar(k), numbers, ())
            same = self._operation("compare", [index.id, wanted], found)
            self._entry.instructions[-1].comparison_direction = "EQ"
            here = same if here is None else self._operation("and", [here, same], found)
        assert here is not None
        return self._operation("select", [here, inside, outside], type)

    def _operation(self, opcode: str, operands: Sequence[int], type: TensorType) -> int:
        proto = self._add(opcode)
        proto.operand_ids.extend(operands)
        set_shape(proto.shape, type)
        return proto.id

    def _broadcast(self, operand: int, type: TensorType, dimensions: Sequence[int]) -> int:
        id = self._operation("broadcast", [operand], type)
        self._entry.instructions[-1].dimensions.extend(dimensions)
        return id

    def _scalar(self, value: int, *, is_constant: bool = False) -> int:
        """A constant of s32, or an element of the offsets."""
        key = value, is_constant
        if key not in self._scalars:
            type = TensorType("s32", ())
            if is_constant:
                literal = LiteralProto(s32s=[value])
                set_shape(literal.shape, type)
                made = self._add("constant")
                for shape in (literal.shape, made.shape):
                    shape.layout.SetInParent()
                made.literal = literal.SerializeToString()
            else:
                one = self._add("slice")
                one.operand_ids.append(self._vector)
                one.slice_dimensions.add(start=value, limit=value + 1, stride=1)
                set_shape(one.shape, TensorType("s32", (1,)))
                made = self._add("reshape")
                made.operand_ids.append(one.id)
            set_shape(made.shape, type)
            self._scalars[key] = made.id
        return self._scalars[key]

    def _leaf(self, value: Value) -> int:
        root = value.root
        if value.type is None:
            return self._token(value)
        if root.node is not None and root.node.kind is NodeKind.CHEAP:
            return self._cheap(root)
        if value.barrier is not None:
            return self._behind(value.barrier, root)
        return self._values[root]

    def _token(self, value: Value) -> int:
        """The token itself where its producer is in this segment, else a new one."""
        if value.root in self._values:
            return self._values[value.root]
        proto = self._add("after-all")
        proto.shape.element_type = 17
        self._values[value.root] = proto.id
        return proto.id

    def _cheap(self, value: Value) -> int:
        node = value.root.node
        assert node is not None
        if value.root not in self._values:
            operands = [self._cheap(v) for v in node.operands]
            self._values[value.root] = self._move(node.instruction, operands)
        return self._values[value.root]

    def _behind(self, barrier: Barrier, root: Value) -> int:
        """A value seen through an optimization barrier: the barrier over all that is known here.

        What is made behind it though it enters too, which a plan may do to a barrier that is no fence,
        goes through another one.
        """
        opened = self._barriers.setdefault(barrier, {})
        if root not in opened:
            known = {
                v.root: v
                for v in barrier.operands
                if v.type is not None
                and v.root in self._values
                and v.root in self._inside
                and v.root not in opened
            }
            if root not in known:
                return self._values[root]
            ids = [self._leaf(v) for v in known.values()]
            packed = self._pack(ids, [v.type for v in known.values()])
            proto = self._add("opt-barrier")
            proto.operand_ids.append(packed)
            _tuple_shape(proto.shape, [v.type for v in known.values()])
            opened |= zip(known, self._untuple(proto.id, proto.shape), strict=True)
        return opened[root]

    def _tree(self, shape: Any, leaves: Any) -> int:
        """The leaves put together again as ``shape``."""
        if shape.element_type != TUPLE:
            return next(leaves)
        parts = tuple(self._tree(part, leaves) for part in shape.tuple_shapes)
        if parts not in self._tuples:
            proto = self._add("tuple")
            proto.operand_ids.extend(parts)
            proto.shape.CopyFrom(shape)
            self._tuples[parts] = proto.id
        return self._tuples[parts]

    def _untuple(self, id: int, shape: Any) -> list[int]:
        leaves: list[int] = []
        for index, part in enumerate(shape.tuple_shapes):
            proto = self._add("get-tuple-element")
            proto.operand_ids.append(id)
            proto.tuple_index = index
            proto.shape.CopyFrom(part)
            own = proto.id
            leaves += self._untuple(own, part) if part.element_type == TUPLE else [own]
        return leaves

    def _pack(self, ids: Sequence[int], types: Sequence[TensorType | None]) -> int:
        proto = self._add("tuple")
        proto.operand_ids.extend(ids)
        _tuple_shape(proto.shape, types)
        return proto.id

    def _bitcast(self, instruction: Instruction, operand: int) -> int:
        """A bitcast reads memory anew: transpose into memory order, reshape, transpose out of it."""
        source, target = instruction.operands[0].shape, instruction.shape
        code = target.element_type
        if source.element_type != code:
            if list(source.layout.minor_to_major) != list(target.layout.minor_to_major):
                raise instruction.unsupported("a bitcast of both type and layout")
            return self._reshaped("bitcast-convert", operand, code, target.dimensions)
        into = list(source.layout.minor_to_major)[::-1]
        out = list(target.layout.minor_to_major)[::-1]
        if into != sorted(into):
            dimensions = [source.dimensions[i] for i in into]
            operand = self._reshaped("transpose", operand, code, dimensions, into)
        memory = [target.dimensions[i] for i in out]
        operand = self._reshaped("reshape", operand, code, memory)
        if out != sorted(out):
            back = [out.index(i) for i in range(len(out))]
            operand = self._reshaped("transpose", operand, code, target.dimensions, back)
        return operand

    def _reshaped(
        self,
        opcode: str,
        operand: int,
        code: int,
        shape: Sequence[int],
        permutation: Sequence[int] = (),
    ) -> int:
        proto = self._add(opcode)
        proto.operand_ids.append(operand)
        proto.dimensions.extend(permutation)
        set_shape(proto.shape, TensorType(PRIMITIVE_TYPES[code], tuple(shape)))
        return proto.id

    # Computations.

    def _begin(self, name: str) -> None:
        number = len(self.proto.computations) + 1
        self._entry = self.proto.computations.add(name=name, id=number)

    def _finish(self, outputs: Sequence[tuple[int, TensorType | None]]) -> None:
        self._close(self._pack([id for id, _ in outputs], [t for _, t in outputs]))

    def _close(self, root: int) -> None:
        self._shape_computation(self._entry, root)
        self.proto.entry_computation_id = self._entry.id
        self.proto.host_program_shape.CopyFrom(self._entry.program_shape)

    def _shape_computation(self, computation: Any, root: int) -> None:
        computation.root_id = root
        shape = computation.program_shape
        parameters = [p for p in computation.instructions if p.opcode == "parameter"]
        for parameter in sorted(parameters, key=lambda p: p.parameter_number):
            shape.parameters.add().CopyFrom(parameter.shape)
            shape.parameter_names.append(parameter.name)
        (result,) = (p for p in computation.instructions if p.id == root)
        shape.result.CopyFrom(result.shape)

    def _computation(self, computation: Computation, root: int | None = None) -> int:
        """Add a called computation, after those it calls. ``root`` picks one part of its tuple."""
        if root is None and computation in self._computations:
            return self._computations[computation]
        for instruction in computation.instructions:
            for called in instruction.called:
                self._computation(called)
        number = len(self.proto.computations) + 1
        if root is None:
            self._computations[computation] = number
        outer = self._entry
        self._entry = self.proto.computations.add(name=f"c{number}", id=number)
        ids: dict[Instruction, int] = {}
        for instruction in computation.instructions:
            if instruction.opcode in _HANDED_ON:
                ids[instruction] = ids[instruction.operands[0]]
            else:
                ids[instruction] = self._move(instruction, [ids[o] for o in instruction.operands])
        end = computation.root if root is None else computation.root.operands[root]
        self._shape_computation(self._entry, ids[end])
        self._entry = outer
        return number


def _begin_at_zero(proto: Any, starts: Sequence[int | None]) -> None:
    """Have a slice or pad begin at 0 where ``starts`` has a number."""
    for slice, start in zip(proto.slice_dimensions, starts, strict=False):
        if start is not None:
            slice.limit -= start
            slice.start = 0
    for pad, start in zip(proto.padding_config.dimensions, starts, strict=False):
        if start is not None:
            pad.edge_padding_high += start
            pad.edge_padding_low = 0


def set_shape(shape: Any, type: TensorType, code: int | None = None) -> None:
    """Fill in a ShapeProto, dense row-major."""
    shape.element_type = PRIMITIVE_CODES[type.dtype] if code is None else code
    shape.dimensions.extend(type.shape)
    shape.is_dynamic_dimension.extend([False] * len(type.shape))


def _tuple_shape(shape: Any, types: Sequence[TensorType | None]) -> None:
    shape.element_type = TUPLE
    for type in types:
        assert type is not None
        set_shape(shape.tuple_shapes.add(), type)
