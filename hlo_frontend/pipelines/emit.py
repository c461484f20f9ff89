"""Writing HLO into a module: new computations, and instructions in the place of others.

Invariants: other parts of the module stay as they are. New ids are unique, and composed of the ids of a
computation and an instruction if those of the module are (jaxlib 0.12 and later). Names are unique. Arrays
are row-major. New computations stand before the entry computation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from .. import builder
from ..builder import array_shape, fill
from ..graph import Computation, Instruction, Module
from ..schema import TUPLE, HloComputationProto, HloInstructionProto, HloModuleProto
from ..trips import SHARE
from .refusal import Refusal


class Editor:
    """A copy of a module's proto to which computations and instructions are added; `finish` serializes it."""

    def __init__(self, module: Module) -> None:
        self.proto = HloModuleProto()
        self.proto.CopyFrom(module.proto)
        computations = self.proto.computations
        ids = [i.id for c in computations for i in c.instructions]
        self._composed = any(i >> 32 for i in ids)
        self._computation = max(c.id for c in computations)
        self._instruction = max([i & 0xFFFFFFFF for i in ids], default=0)
        self._names = {i.name for c in computations for i in c.instructions}
        self._names |= {c.name for c in computations}
        self._new: list[Any] = []

    def name(self, wanted: str) -> str:
        """The name, or one like it that is not in use."""
        name, count = wanted, 0
        while name in self._names:
            count += 1
            name = f"{wanted}.{count}"
        self._names.add(name)
        return name

    def instruction_id(self, computation: int) -> int:
        self._instruction += 1
        return (computation << 32 if self._composed else 0) | self._instruction

    def computation(self, name: str) -> Builder:
        """A new computation, without instructions."""
        self._computation += 1
        proto = HloComputationProto(name=self.name(name), id=self._computation)
        self._new.append(proto)
        return Builder(self, proto)

    def replace(self, instruction: Instruction) -> Builder:
        """A builder that adds instructions in place of this one, and ends with `Builder.stand_in`."""
        return Builder(self, self._own(instruction.computation), instruction)

    def within(self, computation: Computation) -> Builder:
        """A builder that adds instructions to a computation of the module, which ends with `sweep`."""
        return Builder(self, self._own(computation))

    def redirect(
        self,
        computation: Computation,
        stands: Mapping[Instruction, Any],
        users: Iterable[Instruction],
    ) -> None:
        """Let ``users`` in a computation read other values where they read the keys of ``stands``."""
        by_id = {i.proto.id: value.id for i, value in stands.items()}
        wanted = {u.proto.id for u in users}
        for proto in self._own(computation).instructions:
            if proto.id in wanted:
                proto.operand_ids[:] = [by_id.get(n, n) for n in proto.operand_ids]

    def carry(self, b: Builder, loop: Instruction, init: Sequence[Any]) -> Any:
        """Have a loop begin with these arrays in place of those that it carries, and give its proto. ``b``:
        adds to the loop's computation. Its condition takes them; its body is the caller's to change."""
        carried = builder.tuple_shape([v.shape for v in init])
        condition = loop.called[1]
        test = self.within(condition)
        test.own(condition.parameters[0]).shape.CopyFrom(carried)
        test.finish(test.own(condition.root))
        proto = b.own(loop)
        proto.shape.CopyFrom(carried)
        proto.operand_ids[:] = [b.tuple(init).id]
        return proto

    def sweep(self, computation: Computation) -> None:
        """Leave out of a computation what nothing needs, and put each instruction behind its operands."""
        proto = self._own(computation)
        by_id = {i.id: i for i in proto.instructions}
        stack = [proto.root_id, *(p.proto.id for p in computation.parameters)]
        stack += [i.proto.id for i in computation.instructions if i.has_side_effect]
        needed: set[int] = set()
        while stack:
            top = stack.pop()
            if top not in needed:
                needed.add(top)
                stack += [*by_id[top].operand_ids, *by_id[top].control_predecessor_ids]
        for n in reversed(range(len(proto.instructions))):
            if proto.instructions[n].id not in needed:
                del proto.instructions[n]
        _sort(proto)

    def _own(self, computation: Computation) -> Any:
        return {c.id: c for c in self.proto.computations}[computation.proto.id]

    def finish(self) -> bytes:
        entry = self.proto.entry_computation_id
        for computation in self.proto.computations:
            if computation.id == entry:
                _sort(computation)
        before = [c for c in self.proto.computations if c.id != entry]
        last = [c for c in self.proto.computations if c.id == entry]
        ordered = [*_callers_last([*before, *self._new]), *last]
        result = HloModuleProto()
        result.CopyFrom(self.proto)
        del result.computations[:]
        result.computations.extend(ordered)
        return result.SerializeToString()


class Builder(builder.Builder):
    """Adds instructions to a new computation, or to one of the module in place of one of its instructions."""

    def __init__(self, editor: Editor, proto: Any, replaced: Instruction | None = None) -> None:
        super().__init__(proto)
        self.editor = editor
        self.metadata: Any = None  # of what is added from now on
        self._replaced: Instruction | None = None
        self._later: list[Any] = []
        if replaced is not None:
            self.go_on_to(replaced)

    def go_on_to(self, replaced: Instruction) -> None:
        """Add in place of this instruction from now on; it stands behind those replaced so far."""
        if self._replaced is replaced:
            return
        self._replaced = replaced
        instructions = list(self.proto.instructions)
        at = [i.id for i in instructions].index(replaced.proto.id)
        self._later = [HloInstructionProto.FromString(i.SerializeToString())
                       for i in instructions[at + 1 :]]  # fmt: skip
        del self.proto.instructions[at:]

    def own(self, instruction: Instruction) -> Any:
        """The proto of one of the module's instructions in the computation that is changed."""
        return next(i for i in self.proto.instructions if i.id == instruction.proto.id)

    def device(self) -> Any:
        """Add the id of the device, s32[], of which a compiler does not know that it is not negative."""
        id = self.add("partition-id", builder.array_shape("u32"))
        return self.convert(id, builder.array_shape("s32"))

    def identify(self, proto: Any, opcode: str, copied: Instruction | None = None) -> None:
        name = f"interleave.{opcode}" if copied is None else f"{copied.name}.interleaved"
        proto.name = self.editor.name(name)
        proto.id = self.editor.instruction_id(self.proto.id)
        if copied is None and self.metadata is not None:
            proto.metadata.CopyFrom(self.metadata)

    def copy(self, instruction: Instruction, operands: Sequence[Any]) -> Any:
        """The same instruction on other operands, which may lie in memory in another way: what a bitcast does
        depends on the way that its own operand lies."""
        if instruction.opcode == "bitcast":
            source, target = instruction.operands[0].shape, instruction.shape
            lie_alike = list(source.layout.minor_to_major) == list(target.layout.minor_to_major)
            as_many = prod(source.dimensions) == prod(target.dimensions)
            if source.element_type == target.element_type or not (as_many and lie_alike):
                return self.reinterpret(operands[0], source, target)
        return super().copy(instruction, operands)

    def clone(
        self, wanted: Iterable[Instruction], env: dict[Instruction, Any]
    ) -> dict[Instruction, Any]:
        """Add copies of all instructions that ``wanted`` need to the computation and to ``env``, except those
        that ``env`` already has."""
        needed = slice_of(wanted, env)
        for instruction in needed:
            sources = needed_by(instruction)
            if sources == instruction.operands:
                env[instruction] = self.copy(instruction, [env[o] for o in sources])
            else:
                env[instruction] = env[sources[0]]
        return env

    def zeros(self, shape: Any) -> Any:
        """Positive zeros, whatever the type is."""
        zero = self.convert(self.constant(0), shape)
        return self.broadcast(zero, shape) if shape.dimensions else zero

    def select(self, predicate: Any, on_true: Any, on_false: Any) -> Any:
        """Selects by a scalar predicate."""
        if on_true.shape.dimensions:
            predicate = self.broadcast(predicate, on_true.shape)
        return self.add("select", on_true.shape, [predicate, on_true, on_false])

    def lookup(self, table: np.ndarray, indices: Sequence[Any]) -> Any:
        """One element of a constant s32 table, as a scalar; an index is a scalar."""
        return self.reshape(self.dynamic_slice(self.constant(table), indices, [1] * table.ndim), ())

    def update(self, array: Any, part: Any, starts: Sequence[Any]) -> Any:
        return self.add("dynamic-update-slice", array.shape, [array, part, *starts])

    def is_one(self, scalar: Any) -> Any:
        """Whether an s32 scalar is not zero."""
        fields = {"comparison_direction": "NE"}
        return self.add("compare", array_shape("pred"), [scalar, self.constant(0)], **fields)

    def on_devices(self, devices: Sequence[int], count: int, array: Any, others: Any = None) -> Any:
        """An array on these of ``count`` devices; on others ``others``, or zeros."""
        table = np.zeros(count, np.int32)
        table[list(devices)] = 1
        own = self.is_one(self.lookup(table, [self.add("partition-id", array_shape("u32"))]))
        return self.select(own, array, self.zeros(array.shape) if others is None else others)

    def conditional(
        self, predicate: Any, branches: Sequence[Builder], arguments: Sequence[Any], shape: Any,
        share: float | None = None,
    ) -> Any:  # fmt: skip
        """``branches``: for a predicate that is true, and for one that is false; ``share``: how often it is
        true, where that is known."""
        called = [b.id for b in branches]
        operands = [predicate, *arguments]
        made = self.add("conditional", shape, operands, called_computation_ids=called)
        if share is not None:
            made.frontend_attributes.map[SHARE] = f"{share:.6g}"
        return made

    def loop(self, carried: Any, body: Builder, trips: int, name: str, counter: int = 0) -> Any:
        """A loop of ``trips`` iterations, which the element ``counter`` of what is carried counts from 0 on.
        ``name``: that of its condition begins so."""
        c = self.editor.computation(f"{name}.condition")
        i = c.element(c.parameter(carried.shape), counter)
        fields = {"comparison_direction": "LT"}
        c.finish(c.add("compare", array_shape("pred"), [i, c.constant(trips)], **fields))
        return self.add(
            "while", carried.shape, [carried], called_computation_ids=[body.id, c.id],
            backend_config=json.dumps({"known_trip_count": {"n": str(trips)}}).encode(),
        )  # fmt: skip

    def stand_in(self, parts: Sequence[Any] | Any) -> None:
        """End a replacement: a tuple of ``parts``, or one array, has the replaced instruction's id."""
        assert self._replaced is not None
        old = self._replaced.proto
        is_tuple = old.shape.element_type == TUPLE
        proto = self.proto.instructions.add(name=old.name, id=old.id)
        fill(proto, *(("tuple", old.shape, parts) if is_tuple else ("copy", old.shape, [parts])))
        self.proto.instructions.extend(self._later)


def divided(b: Builder, reduced: Instruction, parts: Sequence[Sequence[int]]) -> list[Any]:
    """The results of an all-reduce of several arrays, in whose place there is one for each of ``parts``,
    positions of its arrays, and one for what is in none of them. ``b`` replaces it, and is ended."""
    named = {n for part in parts for n in part}
    others = [n for n in range(len(reduced.operands)) if n not in named]
    results: dict[int, Any] = {}
    for own in [*parts, *([others] if others else [])]:
        made = b.copy(reduced, [reduced.operands[n].proto for n in own])
        shapes = [reduced.operands[n].shape for n in own]
        made.shape.CopyFrom(shapes[0] if len(own) == 1 else builder.tuple_shape(shapes))
        results |= zip(own, [made] if len(own) == 1 else b.elements(made), strict=True)
    whole = [results[n] for n in range(len(reduced.operands))]
    b.stand_in(whole)
    return whole


def fenced(
    b: Builder, inner: Builder, k: Any, arguments: Sequence[Any], shapes: Sequence[Any]
) -> list[Any]:
    """The results of a computation, which a compiler does not mix with what is around it. ``k``: an s32
    scalar that is not negative."""
    rests = b.editor.computation("schedule.never")
    rests.parameter(builder.tuple_shape([]))
    rests.finish(rests.tuple([rests.zeros(s) for s in shapes]))
    always = b.add("compare", array_shape("pred"), [k, b.constant(0)], comparison_direction="GE")
    given = [b.tuple(arguments), b.tuple([])]
    return b.elements(b.conditional(always, [inner, rests], given, builder.tuple_shape(shapes)))


def _callers_last(computations: Sequence[Any]) -> list[Any]:
    """Computations, each behind those that it calls."""
    by_id = {c.id: c for c in computations}
    order: dict[int, None] = {}

    def visit(id: int) -> None:
        if id in by_id and id not in order:
            for instruction in by_id[id].instructions:
                for called in instruction.called_computation_ids:
                    visit(called)
            order[id] = None

    for computation in computations:
        visit(computation.id)
    return [by_id[id] for id in order]


def _sort(computation: Any) -> None:
    """Put each instruction behind its operands, otherwise in the order in which they stand.

    Raises `Refusal` where control dependencies leave no such order.
    """
    by_id = {i.id: i for i in computation.instructions}
    order: dict[int, None] = {}
    begun: set[int] = set()
    for instruction in computation.instructions:
        stack = [instruction.id]
        while stack:
            top = by_id[stack[-1]]
            needed = [*top.operand_ids, *top.control_predecessor_ids]
            missing = [n for n in needed if n not in order]
            if top.id in order or not missing:
                order.setdefault(stack.pop())
                continue
            if top.id in begun:
                raise Refusal(
                    f"{top.name} ({top.opcode}) has control dependencies that allow no other order"
                )
            begun.add(top.id)
            stack += missing
    ordered = [HloInstructionProto.FromString(by_id[n].SerializeToString()) for n in order]
    del computation.instructions[:]
    computation.instructions.extend(ordered)


def needed_by(instruction: Instruction) -> tuple[Instruction, ...]:
    """The operands of an instruction; for an element of a tuple made in this computation, that element
    alone."""
    if instruction.opcode == "get-tuple-element" and instruction.operands[0].opcode == "tuple":
        return (instruction.operands[0].operands[instruction.proto.tuple_index],)
    return instruction.operands


def carried_position(read: Instruction) -> int | None:
    """The position in the carry of a loop's body that an instruction reads."""
    if read.opcode != "get-tuple-element" or read.operands[0].opcode != "parameter":
        return None
    return int(read.proto.tuple_index)


def slice_of(
    wanted: Iterable[Instruction], have: Mapping[Instruction, Any] | set[Instruction]
) -> list[Instruction]:
    """The instructions on which ``wanted`` depend, with themselves, up to those that one has; in topological
    order."""
    found: set[Instruction] = set()
    stack = [w for w in wanted if w not in have]
    order: dict[Instruction, int] = {}
    if stack:
        order = {i: n for n, i in enumerate(stack[0].computation.instructions)}
    while stack:
        instruction = stack.pop()
        if instruction in found:
            continue
        found.add(instruction)
        stack += [o for o in needed_by(instruction) if o not in have]
    return sorted(found, key=lambda i: order[i])
