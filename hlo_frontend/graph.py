"""HLO modules as graphs: instructions that point at their operands, computations at each other.

Invariants: ids are opaque 64-bit numbers (they are composites from jaxlib 0.12 on) and are looked up,
never computed with; instructions of a computation are in topological order; protos are only read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

from stretto.collectives.types import TensorType
from stretto.runtime.errors import InvalidProgramError, UnsupportedError

from .ops import op_of
from .schema import PRIMITIVE_TYPES, TOKEN, TUPLE, HloModuleProto

# Opcodes that move data between devices, or are the wrapper or the end of such an op.
SYNC_COLLECTIVES = frozenset(
    {
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
        "collective-broadcast",
        "ragged-all-to-all",
    }
)
START_COLLECTIVES = frozenset({"all-reduce-start", "all-gather-start", "collective-permute-start"})
DONE_COLLECTIVES = frozenset({"all-reduce-done", "all-gather-done", "collective-permute-done"})
POINT_TO_POINT = frozenset({"send", "recv"})
COLLECTIVES = SYNC_COLLECTIVES | START_COLLECTIVES | POINT_TO_POINT
ASYNC_WRAPPERS = frozenset({"async-start", "async-update", "async-done"})
LOGICAL_IDS = {"partition-id": "partition", "replica-id": "replica"}


class Instruction:
    """An instruction: its proto, and its operands and called computations as objects."""

    __slots__ = (
        "_has_side_effect",
        "called",
        "computation",
        "control_predecessors",
        "opcode",
        "operands",
        "proto",
    )

    def __init__(self, proto: Any, computation: Computation) -> None:
        self.proto = proto
        self.opcode: str = proto.opcode
        self.computation = computation
        self.operands: tuple[Instruction, ...] = ()
        self.control_predecessors: tuple[Instruction, ...] = ()
        self.called: tuple[Computation, ...] = ()
        self._has_side_effect: bool | None = None  # until somebody asks

    @property
    def name(self) -> str:
        return self.proto.name

    @property
    def shape(self) -> Any:
        return self.proto.shape

    @property
    def has_side_effect(self) -> bool:
        """Whether it does something besides giving results, itself or in what it calls."""
        if self._has_side_effect is None:
            self._has_side_effect = (
                self.proto.custom_call_has_side_effect
                or op_of(self.opcode).stateful
                or any(called.has_side_effect for called in self.called)
            )
        return self._has_side_effect

    @property
    def source(self) -> str:
        """``file:line`` of the program's source, or an empty string."""
        return self.computation.module.source(self.proto.metadata)

    @property
    def attributes(self) -> Any:
        """Frontend attributes, a map of strings to strings."""
        return self.proto.frontend_attributes.map

    def describe(self) -> str:
        """How errors name it: name, opcode, source line."""
        source = self.source
        return f"{self.name} ({self.opcode}{', ' + source if source else ''})"

    def __repr__(self) -> str:
        return f"<{self.describe()}>"

    def unsupported(self, why: str) -> UnsupportedError:
        return UnsupportedError(f"{self.describe()}: {why}")

    def invalid(self, why: str) -> InvalidProgramError:
        return InvalidProgramError(f"{self.describe()}: {why}")


@dataclass(eq=False)
class Computation:
    """A computation: instructions in topological order, parameters by number, root."""

    module: Module = field(repr=False)
    proto: Any = field(repr=False)
    name: str
    instructions: list[Instruction] = field(default_factory=list, repr=False)
    parameters: list[Instruction] = field(default_factory=list, repr=False)
    root: Instruction = field(default=None, repr=False)  # type: ignore[assignment]

    @cached_property
    def dones(self) -> dict[Instruction, Instruction]:
        """By each start, send and receive of the computation: its done."""
        ends: dict[Instruction, Instruction] = {}
        for instruction in self.instructions:
            if instruction.opcode.endswith("-done") and len(instruction.operands) == 1:
                (begun,) = instruction.operands
                while begun.opcode == "async-update":
                    (begun,) = begun.operands
                ends[begun] = instruction
        return ends

    @cached_property
    def needs_runtime(self) -> bool:
        """Whether a collective or a device's own id occurs here or in anything called from here.

        Such computations cannot be given to an engine as they are.
        """
        return any(
            i.opcode in COLLECTIVES or i.opcode in LOGICAL_IDS for i in all_instructions(self)
        )

    @cached_property
    def has_side_effect(self) -> bool:
        """Whether one of its instructions does something besides giving results."""
        return any(instruction.has_side_effect for instruction in self.instructions)


def all_instructions(
    computation: Computation, seen: set[Computation] | None = None
) -> Iterator[Instruction]:
    """The instructions of a computation, each followed by those of what it calls, no computation twice.

    ``seen``: computations to leave out; those that are walked are added.
    """
    seen = set() if seen is None else seen
    if computation in seen:
        return
    seen.add(computation)
    for instruction in computation.instructions:
        yield instruction
        for called in instruction.called:
            yield from all_instructions(called, seen)


class Module:
    """An HLO module. Raises `InvalidProgramError` where references inside it lead nowhere."""

    def __init__(self, proto: Any) -> None:
        self.proto = proto
        self.name: str = proto.name
        self._frames: dict[int, str] = {}
        by_id: dict[int, Computation] = {}
        for computation_proto in proto.computations:
            computation = Computation(self, computation_proto, computation_proto.name)
            by_id[computation_proto.id] = computation
        for computation in by_id.values():
            self._link(computation, by_id)
        self.computations = list(by_id.values())
        try:
            self.entry = by_id[proto.entry_computation_id]
        except KeyError:
            raise InvalidProgramError(f"HLO module {self.name} has no entry computation") from None
        self._refuse_recursion()
        for computation in self.computations:
            for instruction in computation.instructions:
                if instruction.opcode in _CALLS:
                    _check_call(instruction)

    @classmethod
    def parse(cls, serialized: bytes) -> Module:
        """From a serialized ``HloModuleProto``."""
        try:
            proto = HloModuleProto.FromString(serialized)
        except Exception as error:
            raise InvalidProgramError(f"not a serialized HloModuleProto: {error}") from error
        return cls(proto)

    def linked(self, proto: Any, called: dict[int, Computation]) -> Computation:
        """A computation that a pass has made. ``called``: the computations that it calls, by their ids."""
        computation = Computation(self, proto, proto.name)
        self._link(computation, called)
        return computation

    def _link(self, computation: Computation, by_id: dict[int, Computation]) -> None:
        seen: dict[int, Instruction] = {}
        parameters: dict[int, Instruction] = {}
        for proto in computation.proto.instructions:
            instruction = Instruction(proto, computation)
            try:
                if proto.operand_ids:
                    instruction.operands = tuple([seen[i] for i in proto.operand_ids])
                if proto.control_predecessor_ids:
                    instruction.control_predecessors = tuple(
                        [seen[i] for i in proto.control_predecessor_ids]
                    )
                if proto.called_computation_ids:
                    instruction.called = tuple([by_id[i] for i in proto.called_computation_ids])
            except KeyError as missing:
                raise instruction.invalid(
                    f"refers to {missing}, which is not defined before it in {computation.name}"
                ) from None
            seen[proto.id] = instruction
            computation.instructions.append(instruction)
            if instruction.opcode == "parameter":
                parameters[proto.parameter_number] = instruction
        if sorted(parameters) != list(range(len(parameters))):
            raise InvalidProgramError(f"parameters of {computation.name} are not numbered 0, 1, …")
        computation.parameters = [parameters[i] for i in range(len(parameters))]
        try:
            computation.root = seen[computation.proto.root_id]
        except KeyError:
            raise InvalidProgramError(f"computation {computation.name} has no root") from None

    def _refuse_recursion(self) -> None:
        calls = {c: [d for i in c.instructions for d in i.called] for c in self.computations}
        try:
            TopologicalSorter(calls).prepare()
        except CycleError as error:
            raise InvalidProgramError(f"computation {error.args[1][0].name} calls itself") from None

    def source(self, metadata: Any) -> str:
        """``file:line`` of either form of metadata: spelled out, or an index into the frames."""
        if metadata.source_file:
            return f"{metadata.source_file}:{metadata.source_line}"
        frame_id = metadata.stack_frame_id
        if not frame_id:
            return ""
        if frame_id not in self._frames:
            self._frames[frame_id] = self._frame(frame_id)
        return self._frames[frame_id]

    def _frame(self, frame_id: int) -> str:
        """Ids count from 1; a frame names a location, which names a file and a line."""
        index = self.proto.stack_frame_index
        if not 0 < frame_id <= len(index.stack_frames):
            return ""
        location_id = index.stack_frames[frame_id - 1].file_location_id
        if not 0 < location_id <= len(index.file_locations):
            return ""
        location = index.file_locations[location_id - 1]
        if not 0 < location.file_name_id <= len(index.file_names):
            return ""
        return f"{index.file_names[location.file_name_id - 1]}:{location.line}"


# Ops that hand their operands to their called computations as they are: opcode -> number of calls.
_CALLS = {"call": 1, "fusion": 1, "async-start": 1, "while": 2, "conditional": None}


def _check_call(instruction: Instruction) -> None:
    expected = _CALLS[instruction.opcode]
    if expected is not None and len(instruction.called) != expected:
        raise instruction.invalid(f"calls {len(instruction.called)} computations, not {expected}")
    operands = 1 if instruction.opcode == "conditional" else len(instruction.operands)
    for called in instruction.called:
        if len(called.parameters) != operands:
            raise instruction.invalid(
                f"hands {operands} operands to {called.name}, which has {len(called.parameters)} "
                "parameters"
            )


def leaf_types(shape: Any, where: Instruction) -> tuple[TensorType | None, ...]:
    """Types of the arrays of a shape, tuples flattened depth first; None stands for a token."""
    kind = shape.element_type
    if kind == TUPLE:
        return tuple([leaf for part in shape.tuple_shapes for leaf in leaf_types(part, where)])
    if kind == TOKEN:
        return (None,)
    if kind not in PRIMITIVE_TYPES:
        raise where.unsupported(f"element type {kind} is not supported")
    if any(shape.is_dynamic_dimension):
        raise where.unsupported("dynamic dimensions are not supported; pad to a static shape")
    return (_type(kind, tuple(shape.dimensions)),)


@lru_cache(maxsize=1024)
def _type(kind: int, shape: tuple[int, ...]) -> TensorType:
    """Programs have few types, and many values of each."""
    return TensorType(PRIMITIVE_TYPES[kind], shape)


def leaf_count(shape: Any) -> int:
    """Number of leaves `leaf_types` gives."""
    if shape.element_type == TUPLE:
        return sum(leaf_count(part) for part in shape.tuple_shapes)
    return 1
