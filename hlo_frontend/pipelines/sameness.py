"""Which values of a program are the same on all devices of a pipeline, bit for bit, before its loop.

`Sameness.of` puts an instruction of the entry computation into one of three classes: the same on all stages;
a known function of the device's id and of values that are the same (`BY_ID`), so that each device can compute
another one's value; or anything else. Parameters are the same if their shardings say so. Floating point
arithmetic on values that depend on the id is in the third class: another program for it might round
differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from typing import Any

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import COLLECTIVES, LOGICAL_IDS, Instruction, Module, all_instructions
from ..groups import replica_groups
from ..passes.bytes.device_values import DeviceValues
from ..shardings import parts
from ..values import BlockGraph, Node, all_nodes

MOVES = frozenset(
    {
        "bitcast",
        "broadcast",
        "concatenate",
        "copy",
        "dynamic-slice",
        "get-tuple-element",
        "gather",
        "opt-barrier",
        "pad",
        "reshape",
        "reverse",
        "select",
        "slice",
        "transpose",
        "tuple",
    }
)
INTEGERS = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 9})  # PrimitiveType: pred, s8 … u64
NEVER_SAME = COLLECTIVES | {
    "custom-call",
    "infeed",
    "rng",
    "rng-get-and-update-state",
    "replica-id",
}


_SIDE_BY_SIDE = frozenset({"all-gather", "all-reduce", "all-to-all", "reduce-scatter"})
_CALLERS = frozenset({"call", "conditional", "while"})
# Of whose operands each gives one element of their result.
_TUPLES = frozenset({"all-reduce", "tuple"})


class Class(IntEnum):
    """How a value differs from stage to stage."""

    SAME = 0
    BY_ID = 1
    ANY = 2


class Sameness:
    """For pipelines on ``groups`` of devices. ``reader``: reads groups of all-reduces and all-gathers, whose
    members all get the same; without it, nothing is known of their results.

    Collectives of groups that lie side by side give each device of a pipeline what the others get, if they
    are given the same. With ``sums`` that is also said of what floats of three devices or more are summed up
    to, which is made in an order that depends on which of them are in one process; ``summed`` says whether
    it was.
    """

    def __init__(
        self,
        module: Module,
        groups: Sequence[Sequence[int]],
        reader: CollectiveReader | None = None,
        *,
        sums: bool = False,
    ) -> None:
        self.groups, self.reader, self._entry = groups, reader, module.entry
        self._sums, self.summed = sums, False
        self._found: dict[Instruction, Class] = {}
        self._loops: dict[Instruction, tuple[list[Class], dict[Instruction, Class]]] = {}
        shardings = list(module.proto.spmd_parameters_shardings)
        parameters = module.entry.parameters
        if len(shardings) != len(parameters):  # HLO text has shardings only on parameters
            shardings = [p.proto.sharding or None for p in parameters]
        for parameter, sharding in zip(parameters, shardings, strict=True):
            same = sharding is not None and self._is_same(sharding)
            self._found[parameter] = Class.SAME if same else Class.ANY

    def _is_same(self, serialized: bytes) -> bool:
        """Whether devices of one group hold the same part of an array with this sharding."""
        part = parts(serialized)
        if part is None:
            return False
        return all(len({part(d) for d in group}) == 1 for group in self.groups)

    def of(self, instruction: Instruction) -> Class:
        """The class of an instruction of the entry computation."""
        stack = [instruction]
        while stack:
            top = stack[-1]
            missing = [o for o in top.operands if o not in self._found]
            if top in self._found or not missing:
                stack.pop()
                self._found.setdefault(top, self.step(top, self._found))
            else:
                stack += missing
        return self._found[instruction]

    def step(self, instruction: Instruction, operands: Any) -> Class:
        """The class of an instruction whose operands' classes ``operands`` has."""
        opcode = instruction.opcode
        if opcode == "partition-id":
            return Class.BY_ID
        if opcode in ("all-gather", "all-reduce") and self._gives_all(instruction):
            return Class.SAME
        if opcode in _SIDE_BY_SIDE and all(operands[o] is Class.SAME for o in instruction.operands):
            return Class.SAME if self._gives_alike(instruction) else Class.ANY
        if (
            opcode in _CALLERS
            and all(operands[o] is Class.SAME for o in instruction.operands)
            and self._calls_alike(instruction)
        ):
            return Class.SAME
        if opcode in NEVER_SAME or any(c.needs_runtime for c in instruction.called):
            return Class.ANY
        if opcode == "get-tuple-element" and instruction.operands[0].opcode in _TUPLES:
            made = instruction.operands[0]
            own = Class(operands[made.operands[instruction.proto.tuple_index]])
            if made.opcode == "tuple" or (own is Class.SAME and self._gives_alike(made)):
                return own
        if (
            self.reader is not None
            and instruction.computation is self._entry
            and opcode == "get-tuple-element"
            and instruction.operands[0].opcode == "while"
            and operands[instruction.operands[0]] is Class.ANY
        ):
            return self._given_by(instruction.operands[0], instruction.proto.tuple_index)
        found = max((operands[o] for o in instruction.operands), default=Class.SAME)
        if any(draws(c) for c in instruction.called):
            return Class.ANY
        if found is Class.BY_ID and self._is_known_alike(instruction):
            return Class.SAME
        if found is Class.BY_ID and not (
            opcode in MOVES or instruction.shape.element_type in INTEGERS
        ):
            return Class.ANY
        return Class(found)

    def _calls_alike(self, instruction: Instruction) -> bool:
        """Whether what it calls, be it to communicate, gives the same on all devices of a pipeline if it is
        given the same."""
        for computation in instruction.called:
            found = dict.fromkeys(computation.parameters, Class.SAME)
            for inner in computation.instructions:
                if inner not in found:
                    found[inner] = self.step(inner, found)
            if found[computation.root] is not Class.SAME:
                return False
        return True

    def _is_known_alike(self, instruction: Instruction) -> bool:
        """Whether it is known to be the same number on all devices of a group: as a device's place on an axis
        that is not the groups', and masks that are made of it."""
        node = self._nodes.get(instruction)
        if node is None or len(node.results) != 1:
            return False
        found = self._known.of(node.results[0])
        if found is None:
            return False
        rows = [row.tobytes() for row in found]
        return len(rows) == 1 or all(len({rows[d] for d in group}) == 1 for group in self.groups)

    @cached_property
    def _graph(self) -> BlockGraph | None:
        # Devices of several replicas may have the same id.
        if self.reader is None or self.reader.num_replicas > 1:
            return None
        return flatten(self._entry, self.reader)

    @cached_property
    def _nodes(self) -> dict[Instruction, Node | None]:
        """None for an instruction of what is called several times."""
        found: dict[Instruction, Node | None] = {}
        for node in () if self._graph is None else all_nodes(self._graph):
            found[node.instruction] = None if node.instruction in found else node
        return found

    @cached_property
    def _known(self) -> DeviceValues:
        assert self._graph is not None and self.reader is not None
        return DeviceValues(self._graph, 1, self.reader.num_partitions)

    @staticmethod
    def is_function_of_id(instruction: Instruction) -> bool:
        """Whether any device can compute what this gives on another one, of the other one's operands: without
        arithmetic of floating point, which another program may round otherwise."""
        inner = [instruction, *(i for c in instruction.called for i in all_instructions(c))]
        return not any(i.opcode in NEVER_SAME or i.opcode in LOGICAL_IDS for i in inner) and all(
            i.opcode in MOVES
            or i.opcode in ("constant", "parameter", "while", "conditional", "call")
            or i.shape.element_type in INTEGERS
            for i in inner
        )

    def _gives_all(self, instruction: Instruction) -> bool:
        """Whether the devices of each pipeline are of one group of a collective."""
        if self.reader is None:
            return False
        groups = replica_groups(instruction, self.reader.num_replicas, self.reader.num_partitions)
        return all(any(set(own) <= set(group) for group in groups) for own in self.groups)

    def _gives_alike(self, instruction: Instruction) -> bool:
        """Whether the devices of each pipeline have the same place in groups that have, place by place,
        devices of the same pipelines; and whether equal operands give equal bits then."""
        if self.reader is None or self.reader.num_replicas > 1:
            return False
        groups = replica_groups(instruction, self.reader.num_replicas, self.reader.num_partitions)
        pipeline_of = {d: number for number, own in enumerate(self.groups) for d in own}
        places = {
            d: (place, tuple(pipeline_of.get(m, ~m) for m in group))
            for group in groups
            for place, d in enumerate(group)
        }
        if any(len({places.get(d, d) for d in own}) > 1 for own in self.groups):
            return False
        parts = instruction.shape.tuple_shapes or [instruction.shape]
        if (
            instruction.opcode in ("all-reduce", "reduce-scatter")
            and max(map(len, groups), default=0) > 2
            and any(part.element_type not in INTEGERS for part in parts)
        ):
            self.summed |= self._sums
            return self._sums
        return True

    def within(self, loop: Instruction) -> dict[Instruction, Class]:
        """The classes of the instructions of a loop's body in any iteration, for a loop of which it is known
        that it has as many iterations on all devices."""
        return self._loop(loop)[1]

    def carried(self, loop: Instruction) -> list[Class]:
        """The classes of what such a loop carries."""
        return self._loop(loop)[0]

    def _loop(self, loop: Instruction) -> tuple[list[Class], dict[Instruction, Class]]:
        """The classes of what a loop carries, and of the instructions of its body."""
        if loop in self._loops:
            return self._loops[loop]
        body, init = loop.called[0], loop.operands[0]
        carried = [Class.ANY] * len(loop.shape.tuple_shapes)
        found: dict[Instruction, Class] = {}
        if init.opcode == "tuple" and body.root.opcode == "tuple":
            following = [self.of(o) for o in init.operands]
            while following != carried:
                carried = following
                found = self._body(loop, carried)
                following = [
                    max(old, found[new])
                    for old, new in zip(carried, body.root.operands, strict=True)
                ]
        self._loops[loop] = carried, found
        return self._loops[loop]

    def _body(self, loop: Instruction, carried: Sequence[Class]) -> dict[Instruction, Class]:
        found: dict[Instruction, Class] = {}
        (parameter,) = loop.called[0].parameters
        for instruction in loop.called[0].instructions:
            if parameter in instruction.operands:
                reads = instruction.opcode == "get-tuple-element"
                found[instruction] = carried[instruction.proto.tuple_index] if reads else Class.ANY
            elif instruction is not parameter:
                found[instruction] = self.step(instruction, found)
        return found

    def _given_by(self, loop: Instruction, position: int) -> Class:
        """The class of a result of a loop that communicates."""
        carried, _ = self._loop(loop)
        condition = loop.called[1]
        (parameter,) = condition.parameters
        reads = [i for i in condition.instructions if parameter in i.operands]
        if condition.needs_runtime or any(
            i.opcode != "get-tuple-element" or carried[i.proto.tuple_index] is not Class.SAME
            for i in reads
        ):
            return Class.ANY
        return carried[position]


def draws(computation: Any) -> bool:
    """Whether something in a called computation is not a function of its operands alone."""
    return any(i.opcode in NEVER_SAME for i in all_instructions(computation))
