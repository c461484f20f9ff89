"""`Walker`: the instructions of a `Program` as Python closures, which the executor calls in turn.

`Walker` translates every block once, at load, into a list of operations ``operation(frame)``; walking a
program calls them in turn, and nothing is looked up by name or class on the way. Host arrays that a
collective gave become engine arrays where a segment needs them (`Walker.land`); after a divergent loop
or branch the arrays of all devices are merged into one register.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..program import (
    Block,
    Branch,
    Copy,
    Free,
    Instruction,
    LogicalId,
    Loop,
    Program,
    Run,
    Slot,
    Start,
    Wait,
)
from ..program.memory_plan import shared_results
from ..recording.instrument import Instrument
from .communication import Communication
from .compute import Compute
from .context import Context
from .frame import Attempt, Frame, Hosted, Operation, named
from .regions import Region
from .segment_times import SegmentTimes


class Walker:
    """The operations of one program for the local devices. There are none before `prepare`."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.program = context.program
        self.engine = context.engine
        self.ordinals = context.ordinals
        self.positions = tuple(range(len(context.local)))
        self.lanes = context.lanes
        self.operations: list[Operation] = []
        # Operations for a thread that must not block, where every collective is small and awaited at once.
        self.prompt: list[Attempt] | None = None
        # The region that is all of the program and `prompt`.
        self.region: Region | None = None
        self._shared = shared_results(context.program)
        self._ids: dict[Slot, list[Any]] = {}  # of `_lasting_id`
        self.prepared = False
        self._tell()

    def _tell(self) -> None:
        """Look up the reports of a walk's begin, ``started(run)``, and end, ``finished(run, error)``."""
        self.started = self.context.told("program_started", self.program)
        self.finished = self.context.told("program_finished", self.program)

    def watched_by(self, instrument: Instrument | None) -> Walker:
        """A copy that reports to another instrument. For prepared walkers: waits for no process."""
        return self._in(replace(self.context, instrument=instrument))

    def timed_by(self, times: SegmentTimes | None) -> Walker:
        """A copy that times its segments, or with None does not. For prepared walkers."""
        return self._in(replace(self.context, times=times))

    def _in(self, context: Context) -> Walker:
        made = Walker(context)
        made._translate(Communication(context, self._communication))
        return made

    def prepare(self) -> None:
        """Bind the collectives, which may wait for the other processes, and translate the program."""
        context = self.context
        if not context.local:
            return
        communication = Communication(context)
        if context.instrument is not None:
            context.instrument.program_loaded(self.program, context.local)
        self._translate(communication)

    def _translate(self, communication: Communication) -> None:
        self._communication = communication
        self._tell()
        self._compute = Compute(self.context, self.land)
        self._translators: dict[type, Callable[[Any], Operation]] = {
            Run: self._run,
            Start: communication.start,
            Wait: communication.wait,
            Loop: self._loop,
            Branch: self._branch,
            Copy: self._copy,
            LogicalId: self._logical_id,
            Free: self._free,
        }
        self._regions: dict[int, Region] = {}  # by the identity of their runs
        self.operations = self._block(self.program.body)
        self.prompt = self._prompt(self.program.body)
        single = self.program.single_run
        if single is not None and self.prompt is not None:
            self.region = self._regions.get(id(single))
        self.prepared = True

    def ways(self) -> dict[str, str]:
        """As of `Communication.ways`; none before it is `prepared`."""
        return self._communication.ways() if self.prepared else {}

    def new_frame(self) -> Frame:
        """The frame of a walk that begins."""
        interrupts = self.context.interrupts.signals()
        return Frame(len(self.program.slot_types), self.positions, interrupts)

    def results(self, frame: Frame) -> list[Any]:
        """The registers of the program's results, each with arrays of its own."""
        results = [frame.registers[slot] for slot in self.program.body.results]
        for index in self._shared:
            if type(results[index]) is not Hosted:
                results[index] = [
                    self.engine.copy(array, ordinal)
                    for array, ordinal in zip(results[index], self.ordinals, strict=True)
                ]
        return results

    def land(self, registers: list[Any], slot: Slot) -> list[Any]:
        """Turn the host arrays of a register into engine arrays."""
        put, type = self.engine.put, self.program.slot_types[slot]
        landed = [
            None if host is None else put(host, type, ordinal)
            for host, ordinal in zip(registers[slot], self.ordinals, strict=True)
        ]
        registers[slot] = landed
        return landed

    def view(self, registers: list[Any], slot: Slot, position: int) -> np.ndarray:
        """Host content of one device's entry; waits until it is computed."""
        register = registers[slot]
        entry = register[position]
        return entry if type(register) is Hosted else self.engine.host_view(entry)

    def _block(self, block: Block) -> list[Operation]:
        """Operations of a block; a start whose wait follows directly becomes one operation."""
        operations: list[Operation] = []
        instructions, joined = self._awaited_at_once(block.instructions), set()
        for index, instruction in enumerate(instructions):
            if isinstance(instruction, Wait) and instruction.event in joined:
                continue
            if isinstance(instruction, Start) and not self._communication.is_split(instruction):
                after = index + 1
                while after < len(instructions) and isinstance(instructions[after], Free):
                    after += 1
                if after < len(instructions) and instructions[after] == Wait(instruction.event):
                    joined.add(instruction.event)
                    operations.append(self._communication.start_and_wait(instruction))
                    continue
            operations.append(self._translators[type(instruction)](instruction))
        return operations

    def _awaited_at_once(self, instructions: Sequence[Instruction]) -> list[Instruction]:
        """The instructions, with waits directly behind their starts where nothing that computes is between:
        collectives of one stream come one behind the other anyway, and need no other thread for that."""
        found: list[Instruction] = []
        pending: list[Start] = []  # since the last instruction of another kind

        for instruction in instructions:
            if isinstance(instruction, Wait):
                for position, start in enumerate(pending):
                    if start.event == instruction.event:
                        behind = len(found)
                        while found[behind - 1] is not start:
                            behind -= 1
                        found.insert(behind, instruction)
                        del pending[position]
                        break
                else:
                    found.append(instruction)
                continue
            found.append(instruction)
            if isinstance(instruction, Start):
                if pending and pending[-1].stream != instruction.stream:
                    pending.clear()
                if self._communication.is_split(instruction):
                    pending.clear()
                else:
                    pending.append(instruction)
            elif not isinstance(instruction, Free):
                pending.clear()
        return found

    def _prompt(self, block: Block) -> list[Attempt] | None:
        """Attempts at the operations of a block that has something to wait for, one by one as in
        ``operations``; None if one of them may block for long. A program that calls back has an end of its
        own: only if all of its runs are attempts, each of which is over with what it has called.
        """
        communication, attempts = self._communication, []
        calls = self.context.called_back is not None
        started: int | None = None  # the event of a start whose wait has yet to come
        waits = False
        for instruction in self._awaited_at_once(block.instructions):
            match instruction:
                case Start() if (
                    not calls and started is None and communication.is_prompt(instruction)
                ):
                    attempts.append(communication.attempt(instruction))
                    started = instruction.event
                    waits = True
                case Wait() if started == instruction.event:
                    started = None
                case Free():
                    attempts.append(_at_once(self._free(instruction)))
                case Run() if self.program.segments[instruction.segment].sites:
                    region = self._regions[id(instruction)]
                    if started is not None or not region.prompt:
                        return None
                    attempts.append(region.attempt(self.land))
                    waits = True
                case Run() if calls:
                    attempt = self._compute.attempt(instruction)
                    if attempt is None:
                        return None
                    attempts.append(attempt)
                    waits = True
                case Run() | Copy() | LogicalId() if started is None:
                    attempts.append(_at_once(self._translators[type(instruction)](instruction)))
                case _:
                    return None
        return attempts if waits else None

    def _run(self, run: Run) -> Operation:
        segment = self.program.segments[run.segment]
        if not segment.sites:
            return self._compute.operation(run)
        region = self._communication.region(run)
        self._regions[id(run)] = region
        return region.operation(self.land)

    def _loop(self, loop: Loop) -> Operation:
        return self._counted_loop(loop) if loop.trip_count is not None else self._while(loop)

    def _enter(self, block: Block) -> Callable[[Frame, list[Any]], list[Any]]:
        """``enter(frame, arguments)``: walk a block, give its results' registers."""
        operations, parameters, results = self._block(block), block.parameters, block.results
        owned = set(parameters)
        for instruction in block.instructions:
            owned.update(getattr(instruction, "outputs", ()))
        dropped = tuple(slot for slot in results if slot in owned)

        def enter(frame: Frame, arguments: list[Any]) -> list[Any]:
            registers = frame.registers
            for slot, register in zip(parameters, arguments, strict=True):
                registers[slot] = register
            arguments.clear()  # or they would outlive their last use in the block
            for operation in operations:
                operation(frame)
            values = [registers[slot] for slot in results]
            for slot in dropped:
                registers[slot] = None
            return values

        return enter

    def _counted_loop(self, loop: Loop) -> Operation:
        assert loop.trip_count is not None
        enter, inputs, outputs, donated = (
            self._enter(loop.body),
            loop.inputs,
            loop.outputs,
            loop.donated,
        )
        iterations = range(loop.trip_count)
        settle, interrupts = self._communication.settle(loop), self.context.interrupts
        signals = interrupts.signals

        def walk(frame: Frame) -> None:
            registers, outer = frame.registers, frame.iteration
            values = [registers[slot] for slot in inputs]
            for slot in donated:
                registers[slot] = None
            for frame.iteration in iterations:
                if frame.interrupts != signals():
                    interrupts.check(frame.interrupts)
                values = enter(frame, values)
            settle(frame, values)
            frame.iteration = outer
            for slot, register in zip(outputs, values, strict=True):
                registers[slot] = register

        return walk

    def _test(self, condition: Block) -> Callable[[Frame, list[Any]], Any]:
        """``test(frame, carries)``: the register of the predicate. Where it is a carry, which the body has
        computed, nothing is run."""
        (result,) = condition.results
        if result in condition.parameters and all(
            isinstance(i, Free) for i in condition.instructions
        ):
            carry = condition.parameters.index(result)
            return lambda frame, values: values[carry]
        enter = self._enter(condition)
        return lambda frame, values: enter(frame, list(values))[0]

    def _while(self, loop: Loop) -> Operation:
        test, enter = self._test(loop.condition), self._enter(loop.body)
        inputs, outputs, donated = loop.inputs, loop.outputs, loop.donated
        what = f"loop {loop.name or '(unnamed)'}{f' at {loop.source}' if loop.source else ''}"
        host_view, settle = self.engine.host_view, self._communication.settle(loop)
        interrupts, signals = self.context.interrupts, self.context.interrupts.signals

        def staying(frame: Frame, predicate: Any) -> tuple[int, ...]:
            hosted = type(predicate) is Hosted
            try:
                return tuple(
                    position
                    for position in frame.active
                    if (predicate[position] if hosted else host_view(predicate[position]))
                )
            except BaseException as error:
                raise named(error, what) from error

        def walk(frame: Frame) -> None:
            registers, outer, entered = frame.registers, frame.iteration, frame.active
            values = [registers[slot] for slot in inputs]
            for slot in donated:
                registers[slot] = None
            final: list[Any] | None = None
            frame.iteration = 0
            while True:
                if frame.interrupts != signals():
                    interrupts.check(frame.interrupts)
                remaining = staying(frame, test(frame, values))
                if len(remaining) != len(frame.active):
                    settle(frame, values)
                    leaving = tuple(p for p in frame.active if p not in remaining)
                    if final is None and not remaining:
                        final = values
                        break
                    final = self._merge(final, values, leaving, outputs)
                    if not remaining:
                        break
                    frame.active = remaining
                values = enter(frame, values)
                frame.iteration += 1
            frame.iteration, frame.active = outer, entered
            for slot, register in zip(outputs, final, strict=True):
                registers[slot] = register

        return walk

    def _merge(
        self,
        merged: list[Any] | None,
        values: list[Any],
        positions: Sequence[int],
        slots: Sequence[Slot],
    ) -> list[Any]:
        """Take the entries of these positions into ``merged``, as engine arrays."""
        if merged is None:
            merged = [[None] * len(self.positions) for _ in slots]
        for column, register, slot in zip(merged, values, slots, strict=True):
            hosted, type_ = type(register) is Hosted, self.program.slot_types[slot]
            for position in positions:
                entry = register[position]
                if hosted:
                    entry = self.engine.put(entry, type_, self.ordinals[position])
                column[position] = entry
        return merged

    def _branch(self, branch: Branch) -> Operation:
        enters = [self._enter(block) for block in branch.branches]
        last = len(enters) - 1
        is_pred = self.program.slot_types[branch.selector].dtype == "pred"
        selector, inputs, outputs = branch.selector, branch.inputs, branch.outputs
        what = f"conditional {branch.name or '(unnamed)'}"
        view = self.view

        def choose(frame: Frame) -> dict[int, list[int]]:
            chosen: dict[int, list[int]] = {}
            try:
                for position in frame.active:
                    index = int(view(frame.registers, selector, position))
                    if is_pred:
                        index = 0 if index else 1
                    elif not 0 <= index <= last:
                        index = last
                    chosen.setdefault(index, []).append(position)
            except BaseException as error:
                raise named(error, what) from error
            return chosen

        def walk(frame: Frame) -> None:
            registers, entered = frame.registers, frame.active
            chosen = choose(frame)
            final: list[Any] | None = None
            for index in sorted(chosen):
                frame.active = tuple(chosen[index])
                values = enters[index](frame, [registers[slot] for slot in inputs[index]])
                alone = len(chosen) == 1
                final = values if alone else self._merge(final, values, frame.active, outputs)
            frame.active = entered
            for slot, register in zip(outputs, final or [], strict=True):
                registers[slot] = register

        return walk

    def _copy(self, instruction: Copy) -> Operation:
        copy, ordinals, count = self.engine.copy, self.ordinals, len(self.positions)
        source, target = instruction.input, instruction.output

        def duplicate(frame: Frame) -> None:
            register = frame.registers[source]
            if type(register) is not Hosted:  # nobody writes to host arrays: they may be shared
                copied: list[Any] = [None] * count
                for position in frame.active:
                    copied[position] = copy(register[position], ordinals[position])
                register = copied
            frame.registers[target] = register

        return duplicate

    def _logical_id(self, instruction: LogicalId) -> Operation:
        slot = instruction.output
        if slot in self.program.lasting_ids:

            def identify_lasting(frame: Frame) -> None:
                frame.registers[slot] = list(self._lasting_id(slot))

            return identify_lasting

        ids = Hosted(
            _logical_id(self.program, instruction, logical) for logical in self.context.logical
        )

        def identify(frame: Frame) -> None:
            frame.registers[slot] = ids

        return identify

    def _lasting_id(self, slot: Slot) -> list[Any]:
        """The arrays of one of the program's `lasting_ids`, by position; put on the devices once."""
        found = self._ids.get(slot)
        if found is None:
            which, type = self.program.lasting_ids[slot], self.program.slot_types[slot]
            found = self._ids[slot] = [
                self.engine.put(_logical_id(self.program, which, logical), type, ordinal)
                for ordinal, logical in zip(self.ordinals, self.context.logical, strict=True)
            ]
        return found

    def arranged(
        self, run: Run, segment: Callable[[int, list[Any]], list[Any]]
    ) -> Callable[[int, list[Any]], list[Any]]:
        """``f(ordinal, arguments)``: the segment of a program's `arranged_run`, given those of the program's
        arguments that it takes, in its order, and the device's ids."""
        slots = list(self.program.lasting_ids)
        order = [*self.program.body.parameters, *slots]
        places = [order.index(slot) for slot in run.inputs]
        columns = [self._lasting_id(slot) for slot in slots]
        ids = {
            ordinal: [column[position] for column in columns]
            for position, ordinal in enumerate(self.ordinals)
        }

        def call(ordinal: int, arguments: list[Any]) -> list[Any]:
            given = arguments + ids[ordinal]
            return segment(ordinal, [given[place] for place in places])

        return call

    def _free(self, instruction: Free) -> Operation:
        slots = instruction.slots

        def free(frame: Frame) -> None:
            registers = frame.registers
            for slot in slots:
                registers[slot] = None

        return free


def _at_once(operation: Operation) -> Attempt:
    """An operation that never blocks as an attempt."""

    def attempt(frame: Frame, until: float) -> None:
        operation(frame)

    return attempt


def _logical_id(program: Program, which: LogicalId, logical: int) -> np.ndarray:
    """The id of a logical device as a host array."""
    partitions = program.num_partitions
    id_ = logical % partitions if which.kind == "partition" else logical // partitions
    return np.array(id_, np.uint32)
