"""Checks the invariants of a `Program`; the first violation raises, and says where.

Besides what `program` states, these follow from how programs are run:

- event numbers are unique in the program;
- a nested block may read slots of the blocks around it, but frees and donates only its own: it may run
  many times, or for some devices only;
- a loop whose body consumes a carry gives that carry up at its start (``donated``), and no other carry may
  hold the same value; conditions and branches consume none of their parameters;
- the body of a program consumes only parameters that the caller donates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from stretto.collectives.ops import Collective, Kind
from stretto.collectives.types import ELEMENT_TYPES, TensorType

from ..errors import InvalidProgramError
from . import (
    Block,
    Branch,
    Carried,
    Copy,
    Free,
    LogicalId,
    Loop,
    Program,
    Run,
    Segment,
    Slot,
    Start,
    Wait,
    instructions,
)
from .valid import are_bounds

_PRED = TensorType("pred", ())
_SELECTORS = (_PRED, TensorType("s32", ()))
_ID = TensorType("u32", ())
_EMPTY = Block((), (), ())


def check(program: Program) -> None:
    """Raise `InvalidProgramError` naming program, instruction and slot, if an invariant is broken."""
    _Checker(program).check()


class _Scope:
    """The state of a block's slots and events while its instructions are checked in order."""

    def __init__(self, outer: _Scope | None, where: str) -> None:
        self.outer = outer
        self.where = where
        self.own: set[Slot] = set()  # written in this block
        self.dead: dict[Slot, str] = {}  # slot -> what ended it
        self.consumed: set[Slot] = set()
        self.shared: set[Slot] = set()  # outputs of runs that may be left out
        self.pending: dict[int, Start] = {}
        self.carried: dict[int, tuple[Slot, ...]] = {}  # event -> parameters that its wait gives
        self.crossing: dict[int, Start] = {}  # started, to be awaited in the next iteration

    def defines(self, slot: Slot) -> bool:
        scope: _Scope | None = self
        while scope is not None:
            if slot in scope.own:
                return slot not in scope.dead
            scope = scope.outer
        return False

    def end_of(self, slot: Slot) -> str:
        """What ended the slot, or an empty string."""
        scope: _Scope | None = self
        while scope is not None:
            if slot in scope.dead:
                return scope.dead[slot]
            scope = scope.outer
        return ""


class _Checker:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.where = f"program {program.name}"
        self.written: dict[Slot, str] = {}
        self.events: set[int] = set()
        self.carrying: set[int] = set()  # events that loops carry
        self.rules: dict[type, Callable[[Any, _Scope], None]] = {
            Run: self._run,
            Start: self._start,
            Wait: self._wait,
            Loop: self._loop,
            Branch: self._branch,
            Copy: self._copy,
            LogicalId: self._logical_id,
            Free: self._free,
        }

    def check(self) -> None:
        program = self.program
        if program.num_replicas < 1 or program.num_partitions < 1 or program.num_streams < 1:
            self._fail("replicas, partitions and streams must be at least 1")
        for slot, type_ in enumerate(program.slot_types):
            self._type(type_, f"slot %{slot}")
        for index, segment in enumerate(program.segments):
            self._segment(segment, f"segment {index}")
        for index, collective in enumerate(program.collectives):
            self._collective(collective, f"collective {index}")
        self._positions(program.donated, len(program.body.parameters), "donated inputs")
        scope = self._block(program.body, None, "body")
        donated = {program.body.parameters[index] for index in program.donated}
        for slot in program.body.parameters:
            if slot in scope.consumed and slot not in donated:
                self._fail(f"parameter %{slot} is consumed, but the caller does not donate it")

    def _fail(self, problem: str) -> None:
        raise InvalidProgramError(f"{self.where}: {problem}")

    def _type(self, type_: TensorType, what: str) -> None:
        if type_.dtype not in ELEMENT_TYPES or any(d < 0 for d in type_.shape):
            self._fail(f"{what} has the impossible type {type_}")

    def _positions(self, positions: tuple[int, ...], count: int, what: str) -> None:
        if len(set(positions)) != len(positions) or any(not 0 <= p < count for p in positions):
            self._fail(f"{what} {positions} are not distinct positions among {count}")

    def _segment(self, segment: Segment, what: str) -> None:
        for type_ in (*segment.inputs, *segment.outputs):
            self._type(type_, what)
        self._positions(segment.donated, len(segment.inputs), f"{what}: donated inputs")
        for site in segment.sites:
            if not 0 <= site < len(self.program.collectives):
                self._fail(f"{what}: there is no collective {site}")
        if len(segment.calls) != len(segment.sites):
            self._fail(
                f"{what} has {len(segment.calls)} counts of calls for {len(segment.sites)} sites"
            )

    def _collective(self, collective: Collective, what: str) -> None:
        what = f"{what} ({collective.kind} %{collective.name})"
        for type_ in (*collective.operands, *collective.results):
            self._type(type_, what)
        members = [m for group in collective.groups for m in group]
        ids = [*members, *(i for pair in collective.pairs for i in pair)]
        devices = self.program.num_devices
        for logical in ids:
            if not 0 <= logical < devices:
                self._fail(f"{what} names device {logical}, but there are {devices}")
        if len(set(members)) != len(members):
            self._fail(f"{what}: a device is in two groups")
        if not all(collective.groups):
            self._fail(f"{what} has an empty group")
        by_pairs = collective.is_point_to_point
        if (collective.groups and by_pairs) or (collective.pairs and not by_pairs):
            self._fail(f"{what} must be described by {'pairs' if by_pairs else 'groups'}")
        valid = collective.valid_iterations
        if valid and len(valid) != len(collective.pairs):
            self._fail(
                f"{what} has {len(valid)} valid iterations for {len(collective.pairs)} pairs"
            )
        for bounds in valid:
            if not are_bounds(bounds):
                self._fail(f"{what} has the valid iterations {bounds}, which are no intervals")
        if collective.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
            if (collective.reduction is None) == (collective.reducer is None):
                self._fail(f"{what} needs either a reduction or a reducer")
            if collective.reducer is not None:
                self._reducer(collective, what)

    def _reducer(self, collective: Collective, what: str) -> None:
        assert collective.reducer is not None
        if not 0 <= collective.reducer < len(self.program.segments):
            self._fail(f"{what}: there is no reducer segment {collective.reducer}")
        segment = self.program.segments[collective.reducer]
        operands = collective.operands
        if segment.inputs != (*operands, *operands) or segment.outputs != operands:
            self._fail(
                f"{what}: its reducer is {_signature(segment.inputs, segment.outputs)}, "
                f"not {_signature((*operands, *operands), operands)}"
            )

    def _block(
        self, block: Block, outer: _Scope | None, where: str, carried: tuple[Carried, ...] = ()
    ) -> _Scope:
        scope = _Scope(outer, where)
        entered, self.where = self.where, f"{self.where}, {where}"
        self._write(block.parameters, scope, f"a parameter of {where}")
        for c in carried:
            scope.carried[c.event] = tuple(block.parameters[k] for _, k in c.carries)
            scope.own.difference_update(scope.carried[c.event])
        inside = self.where
        for index, instruction in enumerate(block.instructions):
            rule = self.rules.get(type(instruction))
            self.where = f"{inside}, instruction {index} ({type(instruction).__name__.lower()})"
            if rule is None:
                self._fail("unknown instruction")
            else:
                rule(instruction, scope)
        self.where = inside
        for event in scope.pending:
            self._fail(f"event {event} is started but not awaited in this block")
        for c in carried:
            self._crosses(c, block, scope)
        crossing = {slot for start in scope.crossing.values() for slot in start.outputs}
        self._read((slot for slot in block.results if slot not in crossing), scope)
        self.where = entered
        return scope

    def _crosses(self, carried: Carried, block: Block, scope: _Scope) -> None:
        start = scope.crossing.get(carried.event)
        if start is None:
            self._fail(f"event {carried.event} is carried, but not started in this block")
            return
        for output, carry in carried.carries:
            if not 0 <= output < len(start.outputs):
                self._fail(f"event {carried.event} has no output {output}")
            if block.results[carry] != start.outputs[output]:
                self._fail(
                    f"carry {carry} is %{block.results[carry]}, not output {output} of event "
                    f"{carried.event}"
                )
        given = [k for k, slot in enumerate(block.results) if slot in start.outputs]
        if sorted(given) != sorted(k for _, k in carried.carries):
            self._fail(f"event {carried.event} becomes carries {given}, not those that it names")

    def _slot(self, slot: Slot) -> TensorType:
        if not 0 <= slot < len(self.program.slot_types):
            self._fail(f"there is no slot %{slot}")
        return self.program.slot_types[slot]

    def _types(self, slots: Iterable[Slot]) -> tuple[TensorType, ...]:
        return tuple(self._slot(slot) for slot in slots)

    def _read(self, slots: Iterable[Slot], scope: _Scope) -> None:
        for slot in slots:
            self._slot(slot)
            if not scope.defines(slot):
                ended = scope.end_of(slot)
                self._fail(f"%{slot} is read after {ended}" if ended else f"%{slot} is not defined")

    def _write(self, slots: Iterable[Slot], scope: _Scope, by: str = "") -> None:
        for slot in slots:
            self._slot(slot)
            if slot in self.written:
                self._fail(f"%{slot} is written twice, first by {self.written[slot]}")
            self.written[slot] = by or self.where
            scope.own.add(slot)

    def _end(self, slots: Iterable[Slot], scope: _Scope, how: str) -> None:
        for slot in slots:
            self._read((slot,), scope)
            if slot not in scope.own:
                self._fail(f"%{slot} belongs to a block around this one and cannot be {how} here")
            if how == "donated":
                for event, start in scope.crossing.items():
                    if slot in start.inputs:
                        self._fail(
                            f"%{slot} is donated while event {event}, which reads it, is under way"
                        )
            for event, start in scope.pending.items():
                if slot in start.inputs:
                    self._fail(f"%{slot} is {how} before the wait of event {event}, which reads it")
            scope.dead[slot] = f"it was {how}"
            if how == "donated":
                if slot in scope.shared:
                    self._fail(f"%{slot} is donated, though its run may be left out")
                scope.consumed.add(slot)

    def _match(self, got: tuple[TensorType, ...], expected: Any, what: str) -> None:
        if got != tuple(expected):
            self._fail(f"{what} are {_list(got)}, not {_list(expected)}")

    def _run(self, run: Run, scope: _Scope) -> None:
        if not 0 <= run.segment < len(self.program.segments):
            self._fail(f"there is no segment {run.segment}")
        segment = self.program.segments[run.segment]
        self._read(run.inputs, scope)
        self._match(self._types(run.inputs), segment.inputs, "inputs")
        self._match(self._types(run.outputs), segment.outputs, "outputs")
        expected = tuple(run.inputs[index] for index in segment.donated)
        if run.donated != expected:
            self._fail(f"donates {_slots(run.donated)}, but its segment {_slots(expected)}")
        for slot in run.donated:
            if run.inputs.count(slot) > 1:
                self._fail(f"%{slot} is donated and used by another input as well")
        self._end(run.donated, scope, "donated")
        self._write(run.outputs, scope)
        if run.valid:
            if len(run.valid) != self.program.num_devices or not all(map(are_bounds, run.valid)):
                self._fail(f"its valid iterations are {run.valid}, not stretches for each device")
            scope.shared.update(run.outputs)

    def _start(self, start: Start, scope: _Scope) -> None:
        if not 0 <= start.collective < len(self.program.collectives):
            self._fail(f"there is no collective {start.collective}")
        if not 0 <= start.stream < self.program.num_streams:
            self._fail(f"there is no stream {start.stream}")
        if start.event in self.events:
            self._fail(f"event {start.event} is started twice")
        self.events.add(start.event)
        collective = self.program.collectives[start.collective]
        self._read(start.inputs, scope)
        self._match(self._types(start.inputs), collective.operands, "inputs")
        self._match(self._types(start.outputs), collective.results, "outputs")
        if start.event in self.carrying:
            if start.event in scope.carried:
                self._fail(f"event {start.event} is started before it is awaited")
            scope.crossing[start.event] = start
        else:
            scope.pending[start.event] = start
        for slot in start.outputs:
            if slot in self.written:
                self._fail(f"%{slot} is written twice, first by {self.written[slot]}")
            self.written[slot] = self.where

    def _wait(self, wait: Wait, scope: _Scope) -> None:
        if wait.event in scope.carried:
            scope.own.update(scope.carried.pop(wait.event))
            return
        start = scope.pending.pop(wait.event, None)
        if start is None:
            if wait.event in self.events:
                self._fail(f"event {wait.event} was awaited already, or started in another block")
            self._fail(f"event {wait.event} was never started")
            return
        scope.own.update(start.outputs)

    def _loop(self, loop: Loop, scope: _Scope) -> None:
        self._read(loop.inputs, scope)
        carries = self._types(loop.inputs)
        self._match(self._types(loop.outputs), carries, "outputs")
        self._match(self._types(loop.body.parameters), carries, "parameters of the body")
        self._match(self._types(loop.body.results), carries, "results of the body")
        if loop.trip_count is not None and loop.trip_count < 0:
            self._fail(f"trip count {loop.trip_count}")
        self._carried(loop)
        if loop.trip_count is None or loop.condition != _EMPTY:
            condition = loop.condition
            self._match(self._types(condition.parameters), carries, "parameters of the condition")
            self._match(self._types(condition.results), (_PRED,), "results of the condition")
            inner = self._block(condition, scope, "condition")
            untouched = {condition.parameters[k] for c in loop.carried for _, k in c.carries}
            if untouched.intersection(_read_slots(condition)):
                self._fail("its condition reads a carry that is under way")
            self._keeps(condition, inner, "condition")
        inner = self._block(loop.body, scope, "body", loop.carried)
        for start in inner.crossing.values():
            if self.program.collectives[start.collective].kind in (Kind.SEND, Kind.RECV):
                self._fail(f"event {start.event} is a send or a receive, which no loop carries")
            for k in set(loop.body.results).intersection(start.inputs):
                if any(
                    p in inner.consumed and r == k
                    for p, r in zip(loop.body.parameters, loop.body.results, strict=True)
                ):
                    self._fail(
                        f"%{k} becomes a carry that is consumed while event {start.event} reads it"
                    )
        consumed = [k for k, slot in enumerate(loop.body.parameters) if slot in inner.consumed]
        expected = {loop.inputs[k] for k in consumed}
        if not expected <= set(loop.donated):
            missing = expected - set(loop.donated)
            self._fail(f"its body consumes {_slots(sorted(missing))}, which it does not donate")
        for k in consumed:
            if loop.inputs.count(loop.inputs[k]) > 1:
                self._fail(f"%{loop.inputs[k]} enters a consumed carry and another one as well")
            result = loop.body.results[k]
            if loop.body.results.count(result) > 1:
                self._fail(
                    f"%{result} leaves the body for a consumed carry and another one as well"
                )
            if result in inner.shared:
                self._fail(
                    f"%{result}, whose run may be left out, becomes a carry that is consumed"
                )
            if result not in inner.own:
                self._fail(f"%{result}, from outside the body, becomes a carry that is consumed")
        if not set(loop.donated) <= set(loop.inputs):
            self._fail(f"donates {_slots(loop.donated)}, which are not all among its inputs")
        self._end(loop.donated, scope, "donated")
        self._write(loop.outputs, scope)

    def _carried(self, loop: Loop) -> None:
        carries = [k for c in loop.carried for _, k in c.carries]
        self._positions(tuple(carries), len(loop.inputs), "carries under way")
        for c in loop.carried:
            if c.event in self.carrying or c.event in self.events or not c.carries:
                self._fail(f"event {c.event} is carried twice, or by no carry")
            self.carrying.add(c.event)

    def _keeps(self, block: Block, inner: _Scope, what: str) -> None:
        for slot in block.parameters:
            if slot in inner.consumed:
                self._fail(f"its {what} consumes its parameter %{slot}")

    def _branch(self, branch: Branch, scope: _Scope) -> None:
        self._read((branch.selector,), scope)
        selector = self._slot(branch.selector)
        if selector not in _SELECTORS:
            self._fail(f"selector %{branch.selector} is {selector}, not pred[] or s32[]")
        if selector == _PRED and len(branch.branches) != 2:
            self._fail(f"a pred[] selector needs 2 branches, there are {len(branch.branches)}")
        if not branch.branches or len(branch.branches) != len(branch.inputs):
            self._fail(f"{len(branch.branches)} branches, inputs for {len(branch.inputs)}")
        outputs = self._types(branch.outputs)
        for index, (block, inputs) in enumerate(zip(branch.branches, branch.inputs, strict=True)):
            self._read(inputs, scope)
            what = f"of branch {index}"
            self._match(self._types(block.parameters), self._types(inputs), f"parameters {what}")
            self._match(self._types(block.results), outputs, f"results {what}")
            inner = self._block(block, scope, f"branch {index}")
            self._keeps(block, inner, f"branch {index}")
        self._write(branch.outputs, scope)

    def _copy(self, copy: Copy, scope: _Scope) -> None:
        self._read((copy.input,), scope)
        self._match(self._types((copy.output,)), self._types((copy.input,)), "outputs")
        self._write((copy.output,), scope)

    def _logical_id(self, instruction: LogicalId, scope: _Scope) -> None:
        if instruction.kind not in ("partition", "replica"):
            self._fail(f"unknown kind of id {instruction.kind!r}")
        self._match(self._types((instruction.output,)), (_ID,), "outputs")
        self._write((instruction.output,), scope)

    def _free(self, free: Free, scope: _Scope) -> None:
        self._end(free.slots, scope, "freed")


def _read_slots(block: Block) -> set[Slot]:
    """The slots that the instructions of a block read, and its results; not those they free."""
    read = set(block.results)
    for instruction in instructions(block):
        inputs = getattr(instruction, "inputs", ())
        for one in inputs:
            read.update(one if isinstance(one, tuple) else (one,))
        if isinstance(instruction, Copy):
            read.add(instruction.input)
        if isinstance(instruction, Branch):
            read.add(instruction.selector)
    return read


def _slots(slots: Iterable[Slot]) -> str:
    return ", ".join(f"%{slot}" for slot in slots) or "nothing"


def _list(types: Iterable[TensorType]) -> str:
    return f"({', '.join(map(str, types))})"


def _signature(inputs: Iterable[TensorType], outputs: Iterable[TensorType]) -> str:
    return f"{_list(inputs)} -> {_list(outputs)}"
