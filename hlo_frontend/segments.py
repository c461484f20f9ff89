"""Makes segments of segment plans: an HLO module for each, converted to StableHLO; equal ones are one.

Invariants: two plans with the same computation and donation give byte-equal HLO (ids are numbered anew;
names, metadata and shardings are dropped), hence one segment. Instructions are copied verbatim, with the
exceptions in `_move`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from jaxlib import _jax

from stretto.collectives.types import TensorType
from stretto.runtime.errors import UnsupportedError
from stretto.runtime.program import Segment

from . import stablehlo
from .builder import Builder, array_shape, resized, shape_of, tuple_shape
from .carve import SegmentPlan
from .flops import arithmetic, flops_of, iterations
from .graph import Computation, Instruction
from .imported import with_aliases
from .likeness import Likeness, begin_at_zero, drop_what_says_nothing, entering
from .schema import TOKEN, TUPLE, HloModuleProto, ShapeProto
from .values import Barrier, Node, NodeKind, Value, operand_shape

# Targets of custom calls of which it is known that they compute and do nothing else: LAPACK's, XLA's `TopK`.
_PURE = ("lapack_", "TopK")
# Ops whose result is their operand: nothing inside a segment is asynchronous.
_HANDED_ON = frozenset({"copy", "copy-start", "copy-done", "async-update", "async-done"})


class SegmentPool:
    """Makes segments, each distinct one once."""

    def __init__(self, likeness: Likeness) -> None:
        """``likeness``: by which plans of their module are compared."""
        self.segments: list[Segment] = []
        self._index: dict[tuple[bytes, tuple[tuple[int, int], ...]], int] = {}
        self._likeness = likeness
        self._alike: dict[tuple[Hashable, tuple[tuple[int, int], ...]], int] = {}

    def add(self, plan: SegmentPlan, aliases: Mapping[int, int]) -> int:
        """Index of the plan's segment; input i of ``aliases`` is donated to output aliases[i]."""
        key = self._likeness.key(plan)
        if key is None:
            return self._build(plan, aliases)
        alike = key, tuple(sorted(aliases.items()))
        if alike not in self._alike:
            self._alike[alike] = self._build(plan, aliases)
        return self._alike[alike]

    def _build(self, plan: SegmentPlan, aliases: Mapping[int, int]) -> int:
        hlo = ModuleBuilder().plan(plan)
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
                    once=any(map(_is_of_the_user, _instructions_of(hlo))),
                    iterations=iterations(instructions),
                )
            )
        return self._index[key]


def _instructions_of(hlo: Any) -> Iterator[Any]:
    return (i for computation in hlo.computations for i in computation.instructions)


def _is_of_the_user(instruction: Any) -> bool:
    """Whether an instruction calls code that neither JAX nor XLA brings along."""
    return instruction.opcode == "custom-call" and not instruction.custom_call_target.startswith(
        _PURE
    )


def _cheap_instructions(plan: SegmentPlan) -> list[Instruction]:
    """The constants and other cheap instructions of which the segment has copies."""
    found: dict[Node, None] = {}
    left = [v for node in plan.nodes for v in node.operands] + [cheap for _, cheap in plan.made]
    while left:
        node = left.pop().root.node
        if node is not None and node.kind is NodeKind.CHEAP and node not in found:
            found[node] = None
            left += node.operands
    return [node.instruction for node in found]


def segment_name(plan: SegmentPlan) -> str:
    """A name for a segment, from the first and the last operation that the program's source names."""
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
        return with_aliases(_jax.mlir.hlo_to_stablehlo(hlo), aliases)
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


class _Numbered(Builder):
    """Fills a computation of a segment's module. Names say nothing: equal segments are equal bytes."""

    def __init__(self, proto: Any, ids: Iterator[int]) -> None:
        super().__init__(proto)
        self._ids = ids

    def identify(self, proto: Any, opcode: str, copied: Instruction | None = None) -> None:
        proto.id = next(self._ids)
        proto.name = f"i{proto.id}"


class ModuleBuilder:
    """Builds the HLO module of one segment."""

    def __init__(self) -> None:
        self.proto = HloModuleProto(name="segment", entry_computation_name="main")
        self._ids = count(1)
        self._computations: dict[Computation, int] = {}
        # The instructions, as protos, that give values, and tuples of values.
        self._values: dict[Value, Any] = {}
        self._tuples: dict[tuple[int, ...], Any] = {}
        self._barriers: dict[Barrier, dict[Value, Any]] = {}
        self._inside: set[Value] = set()
        self._offsets: Mapping[Node, tuple[int | None, ...]] = {}
        self._vector: Any = None  # the input that has the offsets
        self._scalars: dict[tuple[int, bool], Any] = {}  # elements of it, and constants
        self._without_offsets: Mapping[Node, tuple[int | None, ...]] = {}

    def plan(
        self,
        plan: SegmentPlan,
        without_offsets: Mapping[Node, tuple[int | None, ...]] | None = None,
    ) -> Any:
        """The module of a segment plan. ``without_offsets``: slices and pads whose offsets become 0 in all
        dimensions but those with None, so that plans can be compared."""
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
            self._values[value] = self._parameter(number, shape_of(value.type))
        if plan.offsets:
            self._vector = self._values[plan.inputs[-1]]
        for node in plan.nodes:
            self._node(node)
        for made, cheap in plan.made:
            self._values[made] = self._cheap(cheap)
        return self._finish([(self._values[v], v.type) for v in plan.outputs])

    def single(self, instruction: Instruction) -> Any:
        """A module with one instruction whose operands are parameters, to find out whether it can be
        converted."""
        for called in instruction.called:
            self._computation(called)
        self._begin("main")
        operands = [self._parameter(i, o.shape) for i, o in enumerate(instruction.operands)]
        return self._close(self._move(instruction, operands))

    def reducer(self, computation: Computation, operands: Sequence[TensorType]) -> Any:
        """A module that combines the operands of two members element by element by ``computation``.

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
        both = [*operands, *operands]
        taken = [self._parameter(i, shape_of(t)) for i, t in enumerate(both)]
        outputs = []
        for i, operand in enumerate(operands):
            numbers = range(2 * n) if together else (i, n + i)
            if len({both[k].shape for k in numbers}) != 1:
                raise computation.root.unsupported("a reducer over operands of different shapes")
            arguments = [
                self._to.convert(taken[k], scalar.shape)
                for k, scalar in zip(numbers, computation.parameters, strict=True)
            ]
            root = computation.root.operands[i] if together else computation.root
            mapped = self._to.add(
                "map",
                resized(root.shape, operand.shape),
                arguments,
                dimensions=list(range(len(operand.shape))),
                called_computation_ids=[picks[i]],
            )
            outputs.append((self._to.convert(mapped, shape_of(operand)), operand))
        return self._finish(outputs)

    # Instructions.

    def _parameter(self, number: int, shape: Any) -> Any:
        return self._to.add("parameter", shape, parameter_number=number)

    def _move(self, instruction: Instruction, operands: Sequence[Any]) -> Any:
        """Copy an instruction, without fields that do not affect its result."""
        if instruction.opcode == "bitcast":
            return self._bitcast(instruction, operands[0])
        proto = self._to.copy(instruction, operands)
        opcode = instruction.opcode
        drop_what_says_nothing(proto, opcode)
        if instruction.called:
            del proto.called_computation_ids[:]
            proto.called_computation_ids.extend(self._computations[c] for c in instruction.called)
        if proto.backend_config_payload.WhichOneof("one_of") == "id":
            payloads = instruction.computation.module.proto.payloads
            proto.backend_config_payload.value = payloads[proto.backend_config_payload.id]
        if opcode == "fusion":
            proto.opcode = "call"
            proto.ClearField("fusion_kind")
        elif opcode == "async-start":
            proto.opcode = "call"
            proto.shape.CopyFrom(instruction.shape.tuple_shapes[1])
        return proto

    def _node(self, node: Node) -> None:
        leaves = iter([self._leaf(v) for v in node.operands])
        operands = [self._tree(operand.shape, leaves) for operand in node.instruction.operands]
        if node in self._offsets:
            is_slice = node.instruction.opcode == "slice"
            made = self._slice_at(node, *operands) if is_slice else self._pad_at(node, *operands)
        else:
            made = self._move(node.instruction, operands)
        if node in self._without_offsets:
            begin_at_zero(made, self._without_offsets[node])
        shape = node.instruction.shape
        parts = self._untuple(made, shape) if shape.element_type == TUPLE else [made]
        self._values |= zip(node.results, parts, strict=True)

    def _slice_at(self, node: Node, operand: Any) -> Any:
        """A slice whose offsets are an input."""
        proto = node.instruction.proto
        starts = [
            self._scalar(d.start, is_constant=True) if k is None else self._scalar(k)
            for k, d in zip(self._offsets[node], proto.slice_dimensions, strict=True)
        ]
        sizes = list(proto.shape.dimensions)
        return self._to.add(
            "dynamic-slice", proto.shape, [operand, *starts], dynamic_slice_sizes=sizes
        )

    def _pad_at(self, node: Node, operand: Any, filler: Any) -> Any:
        """A pad whose offsets are an input: selects the operand at its index, the filler elsewhere.

        Unlike an update of an array this is elementwise, so XLA can fuse it with its readers.
        """
        moved = {d: k for d, k in enumerate(self._offsets[node]) if k is not None}
        assert moved
        whole = shape_of(node.results[0].type)
        sizes = [1 if d in moved else size for d, size in enumerate(whole.dimensions)]
        to = self._to
        if tuple(sizes) != operand_shape(node):
            operand = to.add("pad", resized(whole, sizes), [operand, filler])
            operand.padding_config.CopyFrom(node.instruction.proto.padding_config)
            for d in moved:
                operand.padding_config.dimensions[d].edge_padding_low = 0
                operand.padding_config.dimensions[d].edge_padding_high = 0
        others = [d for d in range(len(sizes)) if d not in moved]
        flat = to.reshape(operand, [sizes[d] for d in others])
        inside = to.broadcast(flat, whole, others)
        outside = to.broadcast(filler, whole)
        numbers = array_shape("s32", whole.dimensions)
        found = array_shape("pred", whole.dimensions)
        here: Any = None
        for d, k in moved.items():
            index = to.add("iota", numbers, dimensions=[d])
            wanted = to.broadcast(self._scalar(k), numbers)
            same = to.add("compare", found, [index, wanted], comparison_direction="EQ")
            here = same if here is None else to.add("and", found, [here, same])
        return to.add("select", whole, [here, inside, outside])

    def _scalar(self, value: int, *, is_constant: bool = False) -> Any:
        """A constant of s32, or an element of the offsets."""
        key = value, is_constant
        if key not in self._scalars:
            if is_constant:
                made = self._to.constant(value)
            else:
                one = self._to.add("slice", array_shape("s32", [1]), [self._vector])
                one.slice_dimensions.add(start=value, limit=value + 1, stride=1)
                made = self._to.reshape(one, ())
            self._scalars[key] = made
        return self._scalars[key]

    def _leaf(self, value: Value) -> Any:
        root = value.root
        if value.type is None:
            return self._token(value)
        if root.node is not None and root.node.kind is NodeKind.CHEAP:
            return self._cheap(root)
        if value.barrier is not None:
            return self._behind(value.barrier, root)
        return self._values[root]

    def _token(self, value: Value) -> Any:
        """The token itself if its producer is in this segment, else a new one."""
        if value.root not in self._values:
            self._values[value.root] = self._to.add("after-all", ShapeProto(element_type=TOKEN))
        return self._values[value.root]

    def _cheap(self, value: Value) -> Any:
        node = value.root.node
        assert node is not None
        if value.root not in self._values:
            operands = [self._cheap(v) for v in node.operands]
            self._values[value.root] = self._move(node.instruction, operands)
        return self._values[value.root]

    def _behind(self, barrier: Barrier, root: Value) -> Any:
        """A value that is read through an optimization barrier: a barrier over all its values that exist
        here.

        A plan may compute a value that enters a barrier only after others were read through it. Such a value
        goes through a second barrier.
        """
        opened = self._barriers.setdefault(barrier, {})
        if root not in opened:
            known = entering(barrier, self._values, self._inside, opened)
            if root not in known:
                return self._values[root]
            parts = [self._leaf(v) for v in known.values()]
            shape = tuple_shape(shape_of(v.type) for v in known.values())
            made = self._to.add("opt-barrier", shape, [self._to.tuple(parts, shape)])
            opened |= zip(known, self._untuple(made, shape), strict=True)
        return opened[root]

    def _tree(self, shape: Any, leaves: Iterator[Any]) -> Any:
        """A tuple of this shape, made of the leaves."""
        if shape.element_type != TUPLE:
            return next(leaves)
        parts = [self._tree(part, leaves) for part in shape.tuple_shapes]
        key = tuple(part.id for part in parts)
        if key not in self._tuples:
            self._tuples[key] = self._to.tuple(parts, shape)
        return self._tuples[key]

    def _untuple(self, made: Any, shape: Any) -> list[Any]:
        """The leaves of a tuple of this shape, which may have tuples in it."""
        leaves: list[Any] = []
        for index, part in enumerate(shape.tuple_shapes):
            own = self._to.add("get-tuple-element", part, [made], tuple_index=index)
            leaves += self._untuple(own, part) if part.element_type == TUPLE else [own]
        return leaves

    def _bitcast(self, instruction: Instruction, operand: Any) -> Any:
        source, target = instruction.operands[0].shape, instruction.shape
        if source.element_type != target.element_type:
            ways = [(list(s.dimensions), list(s.layout.minor_to_major)) for s in (source, target)]
            if ways[0] == ways[1]:
                return self._to.add("bitcast-convert", resized(target, ways[1][0]), [operand])
        return self._to.reinterpret(operand, source, target)

    # Computations.

    def _begin(self, name: str) -> None:
        """Begin a computation, to which instructions are added from now on."""
        number = len(self.proto.computations) + 1
        self._to = _Numbered(self.proto.computations.add(name=name, id=number), self._ids)

    def _finish(self, outputs: Sequence[tuple[Any, TensorType | None]]) -> Any:
        shape = tuple_shape(shape_of(type) for _, type in outputs)
        return self._close(self._to.tuple([made for made, _ in outputs], shape))

    def _close(self, root: Any) -> Any:
        """End the entry computation; the module is done."""
        self._to.finish(root)
        self.proto.entry_computation_id = self._to.id
        self.proto.host_program_shape.CopyFrom(self._to.proto.program_shape)
        return self.proto

    def _computation(self, computation: Computation, root: int | None = None) -> int:
        """The id of a called computation, which is added if need be. ``root`` picks a part of its tuple."""
        if root is None and computation in self._computations:
            return self._computations[computation]
        for instruction in computation.instructions:
            for called in instruction.called:
                self._computation(called)
        self._begin(f"c{len(self.proto.computations) + 1}")
        if root is None:
            self._computations[computation] = self._to.id
        made: dict[Instruction, Any] = {}
        for instruction in computation.instructions:
            operands = [made[o] for o in instruction.operands]
            handed_on = instruction.opcode in _HANDED_ON
            made[instruction] = operands[0] if handed_on else self._move(instruction, operands)
        self._to.finish(made[computation.root if root is None else computation.root.operands[root]])
        return self._to.id
