"""Pipelines within a loop, as that over the steps of a training or the parts of a batch.

What is proved and rewritten are loops of the entry computation. So the body of the loop around them is made
one, `as_entry`: a parameter for each value that the loop carries, all of which it gives anew. What is proved
then holds in each iteration, since of a parameter no more is known than does: what it is if no iteration
changes it and it follows from constants and the device's id, and whether all devices of a pipeline have the
same, as they begin with it and each iteration leaves it. The rewritten body then takes the place of the one
that was there, `within`.
"""

from __future__ import annotations

from typing import Any

from ..builder import array_shape, tuple_shape
from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Computation, Instruction, Module, all_instructions, leaf_types
from ..ops import op_of
from ..schema import TUPLE, HloInstructionProto, HloModuleProto, OpSharding
from .connected import joined
from .constants import behind
from .emit import Editor, slice_of
from .recognize import is_candidate
from .sameness import Class, Sameness

_OTHER = 3  # OpSharding.Type
_UNKNOWN = OpSharding(type=5).SerializeToString()
_KNOWN = frozenset({"constant", "copy", "iota"})


def loops_around(module: Module, num_replicas: int, num_partitions: int) -> list[Instruction]:
    """The loops of the entry computation with pipelines in their bodies that `as_entry` accepts."""
    reader = CollectiveReader(num_replicas, num_partitions)
    found = [i for i in module.entry.instructions if i.opcode == "while" and _is_plain(i)]
    return [
        i for i in found
        if any(map(is_candidate, flatten(i.called[0], reader, in_loop=True).nodes))
    ]  # fmt: skip


def _is_plain(loop: Instruction) -> bool:
    """Whether a loop carries arrays one by one, by a body that nobody else calls."""
    body = loop.called[0]
    (parameter,) = body.parameters
    return (
        body.root.opcode == loop.operands[0].opcode == "tuple"
        and all(p.element_type != TUPLE for p in loop.shape.tuple_shapes)
        and None not in leaf_types(loop.shape, loop)
        and all(
            i.opcode == "get-tuple-element" for i in body.instructions if parameter in i.operands
        )
        and sum(body in i.called for c in loop.computation.module.computations
                for i in c.instructions) == 1
    )  # fmt: skip


def as_entry(
    module: Module, loop: Instruction, num_replicas: int, num_partitions: int, sums: bool
) -> tuple[bytes, bool]:
    """A module whose entry computation is the body of ``loop``. ``sums``: as in `Sameness`; gives whether
    that was made use of, too."""
    proto = _body_alone(module, loop)
    reader, groups = CollectiveReader(num_replicas, num_partitions), _groups(loop, num_partitions)
    replicated = OpSharding(
        type=_OTHER,
        tile_assignment_dimensions=(len(groups), len(groups[0])),
        tile_assignment_devices=[d for group in groups for d in group],
        replicate_on_last_tile_dim=True,
    ).SerializeToString()
    begins = Sameness(module, groups, reader, sums=sums)
    summed = False
    init = loop.operands[0].operands
    shardings = proto.spmd_parameters_shardings
    same = [n for n, value in enumerate(init)
            if shardings[n] == _UNKNOWN and begins.of(value) is Class.SAME]  # fmt: skip
    while same:
        for n in same:
            shardings[n] = replicated
        made = Module.parse(proto.SerializeToString())
        found = Sameness(made, groups, reader, sums=sums)
        wrong = [n for n in same if found.of(made.entry.root.operands[n]) is not Class.SAME]
        if not wrong:
            summed = begins.summed or found.summed
            break
        for n in wrong:
            shardings[n] = _UNKNOWN
        same = [n for n in same if n not in wrong]
    return proto.SerializeToString(), summed


def _groups(loop: Instruction, num_partitions: int) -> list[list[int]]:
    """The devices that the permutes of the loops in the body of ``loop`` connect, as those of a pipeline; all
    of them as one group where groups are of several sizes. Each device is in one."""
    found = joined(
        (pair.source, pair.target)
        for inner in loop.called[0].instructions
        if inner.opcode == "while"
        for instruction in all_instructions(inner.called[0])
        for pair in instruction.proto.source_target_pairs
    )
    every = range(num_partitions)
    groups = [sorted(g) for g in dict.fromkeys(found.get(d, frozenset({d})) for d in every)]
    return groups if len({len(group) for group in groups}) == 1 else [list(every)]


def _body_alone(module: Module, loop: Instruction) -> Any:
    """The proto of that module. Of arguments that are not changed it has their shardings."""
    editor, body = Editor(module), loop.called[0]
    (parameter,) = body.parameters
    proto = editor.proto
    _hide_entry(editor)
    own = next(c for c in proto.computations if c.id == body.proto.id)
    parameters, computed = {}, []
    shardings = [_UNKNOWN] * len(loop.shape.tuple_shapes)
    at: dict[int, int] = {}  # by id of a read of the carry: what is read instead
    for number, shape in enumerate(loop.shape.tuple_shapes):
        own_parameter = HloInstructionProto(
            name=editor.name("carried"), opcode="parameter", shape=shape, parameter_number=number
        )
        own_parameter.id = editor.instruction_id(own.id)
        parameters[number] = own_parameter
    reads = {i.proto.id: i.proto.tuple_index for i in body.instructions if parameter in i.operands}
    for number in sorted(set(reads.values())):
        init = loop.operands[0].operands[number]
        value = parameters[number].id
        if _is_unchanged(body, number):
            shardings[number] = _sharding(module, behind(init))
            if _is_known(init):
                made = _clones(editor, init, own.id)
                computed += made
                value = made[-1].id
        at |= {read: value for read, n in reads.items() if n == number}
    others = [
        _copy(i) for i in own.instructions if i.id != parameter.proto.id and i.id not in reads
    ]
    for instruction in others:
        for ids in (instruction.operand_ids, instruction.control_predecessor_ids):
            ids[:] = [at.get(n, n) for n in ids]
    _replace(own, [*parameters.values(), *computed, *others])
    proto.entry_computation_id, proto.entry_computation_name = own.id, own.name
    for name in ("host_program_shape", "input_output_alias", "buffer_donor", "schedule",
                 "spmd_output_sharding", "spmd_parameters_shardings"):  # fmt: skip
        proto.ClearField(name)
    proto.spmd_parameters_shardings.extend(shardings)
    return proto


def within(module: Module, loop: Instruction, made: bytes) -> bytes:
    """The module with the body of ``loop`` replaced by the entry computation of ``made``, which was made from
    what `as_entry` gives."""
    editor = Editor(Module.parse(made))
    proto, number = editor.proto, loop.called[0].proto.id
    body = next(c for c in proto.computations if c.id == number)
    carried = HloInstructionProto(
        name=editor.name("carried"), opcode="parameter", shape=tuple_shape(loop.shape.tuple_shapes)
    )
    carried.id = editor.instruction_id(number)
    instructions = [carried]
    for instruction in body.instructions:
        own = _copy(instruction)
        if own.opcode == "parameter":
            own.opcode, own.tuple_index = "get-tuple-element", own.parameter_number
            own.ClearField("parameter_number")
            own.operand_ids[:] = [carried.id]
        instructions.append(own)
    _replace(body, instructions)
    whole = HloModuleProto()
    whole.CopyFrom(module.proto)
    hidden = module.proto.entry_computation_id
    computations = [c for c in proto.computations if c.id != hidden]
    computations += [c for c in module.proto.computations if c.id == hidden]
    del whole.computations[:]
    whole.computations.extend(computations)
    return whole.SerializeToString()


def _sharding(module: Module, value: Instruction) -> bytes:
    """How an argument of the program is sharded; nothing is known of other values."""
    if value.opcode != "parameter":
        return _UNKNOWN
    shardings = module.proto.spmd_parameters_shardings
    if len(shardings) == len(module.entry.parameters):
        return shardings[value.proto.parameter_number]
    return value.proto.sharding or _UNKNOWN


def _is_unchanged(body: Computation, number: int) -> bool:
    """Whether no iteration changes what is carried at this position."""
    result = behind(body.root.operands[number])
    return (
        result.opcode == "get-tuple-element"
        and result.operands[0] is body.parameters[0]
        and result.proto.tuple_index == number
    )


def _is_known(value: Instruction) -> bool:
    """Whether a value follows from constants and the device's id, as do numbers of iterations and what stage
    a device is, which are hoisted out of loops."""
    return all(
        i.opcode in _KNOWN
        or (op_of(i.opcode).fuses and i.opcode != "parameter" and all(map(_is_pure, i.called)))
        for i in slice_of([value], set())
    )


def _is_pure(computation: Computation) -> bool:
    return all(
        i.opcode in ("constant", "parameter") or (op_of(i.opcode).fuses and not i.called)
        for i in computation.instructions
    )


def _clones(editor: Editor, value: Instruction, computation: int) -> list[Any]:
    """Copies of what computes a value, for another computation; the last one is that of the value."""
    ids: dict[int, int] = {}
    found = []
    for instruction in slice_of([value], set()):
        own = _copy(instruction.proto)
        own.name = editor.name(f"{own.name}.carried")
        own.id = ids[instruction.proto.id] = editor.instruction_id(computation)
        own.operand_ids[:] = [ids[o.proto.id] for o in instruction.operands]
        own.ClearField("control_predecessor_ids")
        found.append(own)
    return found


def _copy(instruction: Any) -> Any:
    return HloInstructionProto.FromString(instruction.SerializeToString())


def _replace(computation: Any, instructions: list[Any]) -> None:
    copies = [_copy(i) for i in instructions]
    del computation.instructions[:]
    computation.instructions.extend(copies)


def _hide_entry(editor: Editor) -> None:
    """Leave of the entry computation its id and name alone, which no other one gets then."""
    entry = next(c for c in editor.proto.computations if c.id == editor.proto.entry_computation_id)
    nothing = HloInstructionProto(
        name=editor.name("hidden"), opcode="parameter", shape=array_shape("pred")
    )
    nothing.id = entry.root_id = editor.instruction_id(entry.id)
    _replace(entry, [nothing])
