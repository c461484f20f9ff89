"""Tells which segment plans give equal modules, before the modules are built.

Equal layers give equal segments, and building a module only to find that it is there already takes several
times as long as comparing. The `key` of a plan says all that its module follows from: what each instruction
is, without names and places in the program, and what it reads. It goes through a plan as the builder of
modules does (`segments.ModuleBuilder`). Equal keys are equal modules. The converse does not hold: some plans
have no key.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any

from .builder import resized
from .carve import SegmentPlan
from .graph import Computation, Instruction
from .ops import op_of
from .schema import HloInstructionProto, LiteralProto
from .values import Barrier, Node, NodeKind, Value

# Ops whose backend_config is part of what they compute.
_KEEPS_CONFIG = frozenset({"custom-call"})
# Ops whose frontend attributes the importer needs.
_KEEPS_ATTRIBUTES = frozenset({"custom-call", "call"})
# Fields of an instruction that say nothing about what it computes.
_SAYS_NOTHING = ("metadata", "sharding", "statistics_viz", "original_value")
# Fields that say where in its module it stands; what it reads and calls is compared by itself.
_PLACE = ("name", "id", "operand_ids", "control_predecessor_ids", "called_computation_ids")

# By dimension, for slices and pads that get their offset from elsewhere: a number, or None if the offset in
# that dimension is the instruction's own.
Offsets = Mapping[Node, Sequence[int | None]]


def drop_what_says_nothing(proto: Any, opcode: str) -> None:
    """Clear the fields of an instruction that do not affect its result."""
    for field in _SAYS_NOTHING:
        proto.ClearField(field)
    if opcode not in _KEEPS_CONFIG:
        proto.ClearField("backend_config")
        proto.ClearField("backend_config_payload")
    if opcode not in _KEEPS_ATTRIBUTES:
        proto.ClearField("frontend_attributes")
    if opcode == "parameter":
        proto.shape.ClearField("layout")


def begin_at_zero(proto: Any, offsets: Sequence[int | None]) -> None:
    """Make the offset of a slice or pad 0 in dimensions in which ``offsets`` has a number."""
    for slice, offset in zip(proto.slice_dimensions, offsets, strict=False):
        if offset is not None:
            slice.limit -= slice.start
            slice.start = 0
    for pad, offset in zip(proto.padding_config.dimensions, offsets, strict=False):
        if offset is not None:
            pad.edge_padding_high += pad.edge_padding_low
            pad.edge_padding_low = 0


def entering(
    barrier: Barrier, there: Container[Value], inside: Container[Value], opened: Container[Value]
) -> dict[Value, Value]:
    """What enters an optimization barrier now, by root. ``there``: the values that the module has so far;
    ``inside``: inputs of the segment and results of its nodes; ``opened``: what went through it before."""
    return {
        v.root: v
        for v in barrier.operands
        if v.type is not None and v.root in there and v.root in inside and v.root not in opened
    }


def _without_ones(shape: Any) -> Any:
    """An array's shape without its dimensions of 1."""
    return resized(shape, [n for n in shape.dimensions if n != 1])


def is_loose(instruction: Instruction) -> bool:
    """Whether it computes the same elements in whatever dimensions of 1, of the same operands."""
    scalar = instruction.opcode == "broadcast" and not instruction.operands[0].shape.dimensions
    return scalar or op_of(instruction.opcode).elementwise


class Likeness:
    """Keys of the plans of one module. ``loosely``: whether what computes the same elements in the same way
    is alike, be it on another channel, or constants and elementwise ops with other dimensions of 1."""

    def __init__(self, *, loosely: bool = False) -> None:
        self._loosely = loosely
        self._instructions: dict[Hashable, int] = {}
        self._computations: dict[Computation, int] = {}
        self._numbers: dict[Hashable, int] = {}  # of what was seen
        self._scratch = HloInstructionProto()

    def key(self, plan: SegmentPlan, without_offsets: Offsets | None = None) -> Hashable | None:
        """Equal for plans with equal modules only; None if that is not known of this plan.

        ``without_offsets``: as in `segments.ModuleBuilder.plan`.
        """
        try:
            return _Reading(self, plan, without_offsets or {}).key()
        except _Unknown:
            return None

    def instruction(self, instruction: Instruction, offsets: Sequence[int | None] = ()) -> int:
        """A number for what it computes of its operands. ``offsets``: if they are from elsewhere."""
        memo = (instruction, *(k is None for k in offsets)) if offsets else instruction
        found = self._instructions.get(memo)
        if found is None:
            scratch = self._scratch
            scratch.CopyFrom(instruction.proto)
            for field in _PLACE:
                scratch.ClearField(field)
            drop_what_says_nothing(scratch, instruction.opcode)
            if self._loosely:
                scratch.channel_id = min(scratch.channel_id, 1)
                if is_loose(instruction):
                    scratch.shape.CopyFrom(_without_ones(instruction.shape))
                    scratch.ClearField("dimensions")
                elif instruction.opcode == "constant":
                    scratch.shape.CopyFrom(_without_ones(instruction.shape))
                    literal = LiteralProto.FromString(scratch.literal)
                    literal.shape.CopyFrom(_without_ones(literal.shape))
                    scratch.literal = literal.SerializeToString(deterministic=True)
            begin_at_zero(scratch, offsets)
            parts: list[Hashable] = [scratch.SerializeToString(deterministic=True)]
            parts += [self._computation(called) for called in instruction.called]
            if instruction.opcode == "bitcast":  # it follows from the memory that it reads
                shape = instruction.operands[0].shape
                parts.append(shape.SerializeToString(deterministic=True))
            found = self._instructions[memo] = self._number(tuple(parts))
        return found

    def _computation(self, computation: Computation) -> int:
        found = self._computations.get(computation)
        if found is None:
            position = {i: k for k, i in enumerate(computation.instructions)}
            parts: list[Hashable] = ["computation", position[computation.root]]
            for instruction in computation.instructions:
                read = [position[operand] for operand in instruction.operands]
                parts.append((self.instruction(instruction), *read))
            found = self._computations[computation] = self._number(tuple(parts))
        return found

    def _number(self, what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))


class _Unknown(Exception):
    """The plan has something of which no key is made."""


class _Reading:
    """One reading of a plan. Values are numbered in the order in which the module has them."""

    def __init__(self, likeness: Likeness, plan: SegmentPlan, without_offsets: Offsets) -> None:
        self._likeness, self._plan, self._without = likeness, plan, without_offsets
        self._said: list[Hashable] = [tuple([value.type for value in plan.inputs])]
        self._numbers: dict[Value, int] = {}
        self._count = 0
        self._opened: dict[Barrier, dict[Value, int]] = {}
        self._inside: set[Value] | None = None

    def key(self) -> Hashable:
        plan, numbers, likeness = self._plan, self._numbers, self._likeness
        for value in plan.inputs:
            self._give(value)
        for node in plan.nodes:
            instruction = node.instruction
            if len(instruction.operands) != len(node.operands):
                raise _Unknown  # a tuple, of which it matters how it is nested
            read = [
                numbers[value.root]
                if value.barrier is None and value.root in numbers
                else self._leaf(value)
                for value in node.operands
            ]
            at = plan.offsets.get(node)
            moved = at or self._without.get(node, ())
            self._said.append((likeness.instruction(instruction, moved), at, *read))
            for value in node.results:
                self._give(value)
        for new, value in plan.made:
            numbers[new] = self._leaf(value.root)
        self._said.append(tuple([numbers[value] for value in plan.outputs]))
        return tuple(self._said)

    def _give(self, value: Value) -> None:
        if value.type is None:
            raise _Unknown
        self._numbers[value] = self._count
        self._count += 1

    def _leaf(self, value: Value) -> int:
        root = value.root
        node = root.node
        if value.type is None:
            raise _Unknown
        if node is not None and node.kind is NodeKind.CHEAP:
            if root not in self._numbers:
                read = [self._leaf(operand.root) for operand in node.operands]
                self._said.append(("cheap", self._likeness.instruction(node.instruction), *read))
                self._give(root)
            return self._numbers[root]
        if value.barrier is not None:
            return self._behind(value.barrier, root)
        return self._numbers[root]

    def _behind(self, barrier: Barrier, root: Value) -> int:
        """See `ModuleBuilder._behind`."""
        opened = self._opened.setdefault(barrier, {})
        if root not in opened:
            if self._inside is None:
                self._inside = set(self._plan.inputs)
                for node in self._plan.nodes:
                    self._inside.update(node.results)
            known = entering(barrier, self._numbers, self._inside, opened)
            if root not in known:
                return self._numbers[root]
            self._said.append(("barrier", *[self._leaf(v) for v in known.values()]))
            for entered in known:
                opened[entered] = self._count
                self._count += 1
        return opened[root]
