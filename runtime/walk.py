"""From the instructions of a `Program` to Python closures: what the executor really calls.

`Walker` translates every block once, at load, into a list of operations ``operation(frame)``; walking a
program calls them in turn, and nothing is looked up by name or class on the way.

Registers. ``frame.registers[slot]`` is a list with one entry for each local device of the program, by
position; entries of devices that are not active are None or stale. The list is `Hosted` if its entries
are host arrays (what a collective gave), else they are engine arrays. Host arrays become engine arrays
where a segment needs them (`Walker.land`). Lists are never changed once they are in a register.

Divergence. ``frame.active`` holds the positions of the devices that take part: loops and branches whose
predicates differ run their blocks with fewer of them, and merge what the devices have afterwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from stretto.collectives.communicator import BoundCollective, Reducer, Request
from stretto.collectives.ops import Collective, Kind

from .engine import Engine, LoadedSegment
from .errors import StrettoError
from .instrument import Counters, Instrument
from .program import (
    Block,
    Branch,
    Copy,
    Free,
    LogicalId,
    Loop,
    Program,
    Run,
    Slot,
    Start,
    Wait,
    instructions,
)
from .progress import Progress
from .stream import Event, Stream

Operation = Callable[["Frame"], None]


class Hosted(list):
    """A register whose entries are host arrays."""

    __slots__ = ()


class Frame:
    """One walk of a program: its registers and what changes on the way."""

    __slots__ = ("active", "events", "iteration", "registers")

    def __init__(self, num_slots: int, active: tuple[int, ...]) -> None:
        self.registers: list[Any] = [None] * num_slots
        self.active = active
        self.iteration = 0  # of the innermost loop
        self.events: dict[int, Event] = {}


class Lane:
    """A stream of the executor with what goes with it: progress, counters, sends under way."""

    __slots__ = ("communicator", "counters", "number", "progress", "sends", "sequence", "stream")

    def __init__(self, number: int, stream: Stream, communicator: Any, progress: Progress) -> None:
        self.number = number
        self.stream = stream
        self.communicator = communicator
        self.progress = progress
        self.counters = Counters()
        self.sequence = 0
        self.sends: list[Request] = []

    def drain(self) -> None:
        """Wait until every send has been received. A task of this stream."""
        sends, self.sends = self.sends, []
        for request in sends:
            request.wait()


def named(error: BaseException, what: str) -> BaseException:
    """The error with the instruction it came from in its message; its class is kept if it is ours."""
    if getattr(error, "instruction", None) is not None:
        return error
    if isinstance(error, StrettoError):
        try:
            renamed: StrettoError = type(error)(f"{what}: {error}")
        except TypeError:
            renamed = StrettoError(f"{what}: {error}")
        renamed.code = error.code
    elif isinstance(error, NotImplementedError):
        renamed = StrettoError(f"{what}: {error}")
        renamed.code = "UNIMPLEMENTED"
    elif isinstance(error, Exception):
        renamed = StrettoError(f"{what}: {type(error).__name__}: {error}")
    else:
        return error  # KeyboardInterrupt and the like
    renamed.instruction = what  # type: ignore[attr-defined]
    renamed.__cause__ = error
    return renamed


class Walker:
    """The operations of one program for the local devices ``local``: (logical id, ordinal) pairs.

    ``lanes[i]`` serves the program's stream i. ``owner`` maps each logical id to its process.
    """

    def __init__(
        self,
        program: Program,
        engine: Engine,
        segments: Sequence[LoadedSegment],
        local: tuple[tuple[int, int], ...],
        owner: dict[int, int],
        lanes: Sequence[Lane],
        instrument: Instrument | None = None,
    ) -> None:
        self.program = program
        self.engine = engine
        self.segments = segments
        self.logical = tuple(logical for logical, _ in local)
        self.ordinals = tuple(ordinal for _, ordinal in local)
        self.positions = tuple(range(len(local)))
        self.owner = owner
        self.lanes = lanes
        self.instrument = instrument
        self._bound = self._bind() if local else {}
        self._starts = {i.event: i for i in instructions(program.body) if isinstance(i, Start)}
        self._translators: dict[type, Callable[[Any], Operation]] = {
            Run: self._run,
            Start: self._start,
            Wait: self._wait,
            Loop: self._loop,
            Branch: self._branch,
            Copy: self._copy,
            LogicalId: self._logical_id,
            Free: self._free,
        }
        self.operations = self._block(program.body) if local else []
        self._shared = shared_results(program)

    def _bind(self) -> dict[tuple[int, int], BoundCollective]:
        """Bind every collective to the stream it runs on, in program order: the same on all ranks."""
        bound: dict[tuple[int, int], BoundCollective] = {}
        for instruction in instructions(self.program.body):
            if not isinstance(instruction, Start):
                continue
            key = (instruction.collective, instruction.stream)
            if key in bound:
                continue
            collective = self.program.collectives[instruction.collective]
            reducer = None if collective.reducer is None else self._reducer(collective)
            try:
                bound[key] = self.lanes[instruction.stream].communicator.bind(
                    collective, self.owner, reducer
                )
            except Exception as error:
                raise named(error, describe(collective)) from error
        return bound

    def _reducer(self, collective: Collective) -> Reducer:
        """A reducer that is a program of its own, run on the first local device."""
        assert collective.reducer is not None
        segment = self.segments[collective.reducer]
        engine, types, ordinal = self.engine, collective.operands, self.ordinals[0]

        def reduce(left: list[Any], right: list[Any]) -> list[Any]:
            arrays = [
                engine.put(host, type, ordinal)
                for host, type in zip([*left, *right], [*types, *types], strict=True)
            ]
            return [engine.host_view(array) for array in segment.run(ordinal, arrays)]

        return reduce

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
        rest = list(block.instructions)
        while rest:
            instruction = rest.pop(0)
            if isinstance(instruction, Start) and not self._is_split(instruction):
                frees = 0
                while frees < len(rest) and isinstance(rest[frees], Free):
                    frees += 1
                if frees < len(rest) and rest[frees] == Wait(instruction.event):
                    del rest[frees]
                    operations.append(self._start_and_wait(instruction))
                    continue
            operations.append(self._translators[type(instruction)](instruction))
        return operations

    def _is_split(self, start: Start) -> bool:
        """Sends and receives are posted at the start and awaited at the wait."""
        return self.program.collectives[start.collective].kind in (Kind.SEND, Kind.RECV)

    def _run(self, instruction: Run) -> Operation:
        segment = self.program.segments[instruction.segment]
        what = f"segment {segment.name or instruction.segment} of {self.program.name}"
        run, land = self.segments[instruction.segment].run, self.land
        inputs, outputs, donated = instruction.inputs, instruction.outputs, instruction.donated
        ordinals, count = self.ordinals, len(self.ordinals)
        instrument, program = self.instrument, self.program.name

        def issue(frame: Frame) -> None:
            registers = frame.registers
            columns = []
            for slot in inputs:
                register = registers[slot]
                columns.append(land(registers, slot) if type(register) is Hosted else register)
            results: list[list[Any]] = [[None] * count for _ in outputs]
            for position in frame.active:
                ordinal = ordinals[position]
                try:
                    arrays = run(ordinal, [column[position] for column in columns])
                except BaseException as error:
                    raise named(error, what) from error
                for result, array in zip(results, arrays, strict=True):
                    result[position] = array
                if instrument is not None:
                    instrument.segment_issued(program, instruction.segment, segment.name, ordinal)
            for slot in donated:
                registers[slot] = None
            for slot, result in zip(outputs, results, strict=True):
                registers[slot] = result

        def issue_one(frame: Frame) -> None:
            registers = frame.registers
            arguments = []
            for slot in inputs:
                register = registers[slot]
                if type(register) is Hosted:
                    register = land(registers, slot)
                arguments.append(register[0])
            try:
                arrays = run(ordinals[0], arguments)
            except BaseException as error:
                raise named(error, what) from error
            for slot in donated:
                registers[slot] = None
            for slot, array in zip(outputs, arrays, strict=True):
                registers[slot] = [array]

        return issue_one if count == 1 and instrument is None else issue

    def _columns(self, start: Start) -> Callable[[Frame], Callable[[], dict[int, list[Any]]]]:
        """``capture(frame)`` keeps the operands of a collective; what it gives waits for them and makes
        host arrays by logical id.
        """
        inputs, logical, host_view = start.inputs, self.logical, self.engine.host_view

        def capture(frame: Frame) -> Callable[[], dict[int, list[Any]]]:
            columns = [frame.registers[slot] for slot in inputs]
            active = frame.active

            def views() -> dict[int, list[Any]]:
                return {
                    logical[position]: [
                        column[position] if type(column) is Hosted else host_view(column[position])
                        for column in columns
                    ]
                    for position in active
                }

            return views

        return capture

    def _perform(self, start: Start) -> Callable[[Any, tuple[int, ...], int], list[Hosted]]:
        """``perform(views, active, iteration)``: run a collective, give its outputs' registers."""
        collective = self.program.collectives[start.collective]
        bound = self._bound[start.collective, start.stream]
        lane = self.lanes[start.stream]
        what, count, logical = describe(collective), len(self.positions), self.logical
        name, source = f"{collective.kind} %{collective.name}", collective.source
        ranks = self._ranks(collective)
        skips = skipped_pairs(collective)
        progress, counters, instrument = lane.progress, lane.counters, self.instrument
        run: Any = bound.run
        single = count == 1
        outputs = range(len(start.outputs))
        nbytes, messages = getattr(bound, "bytes", 0), getattr(bound, "messages", 0)

        def perform(views: Any, active: tuple[int, ...], iteration: int) -> list[Hosted]:
            lane.sequence = sequence = lane.sequence + 1
            try:
                operands = views()
                if instrument is not None:
                    instrument.collective_started(collective, start.stream)
                progress.begin(name, source, sequence, ranks)
                began = perf_counter()
                try:
                    results = run(operands, **skips(iteration))
                finally:
                    progress.end()
            except BaseException as error:
                raise named(error, what) from error
            seconds = perf_counter() - began
            counters.seconds += seconds
            counters.collectives += 1
            counters.messages += messages
            counters.nbytes += nbytes
            if instrument is not None:
                instrument.collective_finished(collective, start.stream, nbytes, seconds)
            if single:
                return [Hosted((array,)) for array in results[logical[0]]]
            registers = [Hosted([None] * count) for _ in outputs]
            for position in active:
                for register, array in zip(registers, results[logical[position]], strict=True):
                    register[position] = array
            return registers

        return perform

    def _ranks(self, collective: Collective) -> tuple[int, ...]:
        """Processes that take part in the groups and pairs that have a local member."""
        here = set(self.logical)
        sets = [g for g in (*collective.groups, *collective.pairs) if here.intersection(g)]
        return tuple(sorted({self.owner[member] for members in sets for member in members}))

    def _start_and_wait(self, start: Start) -> Operation:
        capture, perform = self._columns(start), self._perform(start)
        outputs, stream = start.outputs, self.lanes[start.stream].stream

        def start_and_wait(frame: Frame) -> None:
            views = capture(frame)
            active, iteration = frame.active, frame.iteration
            results = stream.run(lambda: perform(views, active, iteration))
            for slot, register in zip(outputs, results, strict=True):
                frame.registers[slot] = register

        return start_and_wait

    def _start(self, start: Start) -> Operation:
        capture = self._columns(start)
        post = self._post(start) if self._is_split(start) else self._perform(start)
        stream, event = self.lanes[start.stream].stream, start.event

        def begin(frame: Frame) -> None:
            views = capture(frame)
            active, iteration = frame.active, frame.iteration
            frame.events[event] = stream.submit(lambda: post(views, active, iteration))

        return begin

    def _post(self, start: Start) -> Callable[[Any, tuple[int, ...], int], Any]:
        """``post(views, active, iteration)``: post sends or receives without waiting for a peer."""
        collective = self.program.collectives[start.collective]
        bound: Any = self._bound[start.collective, start.stream]
        lane, what = self.lanes[start.stream], describe(collective)
        skips, is_send = skipped_pairs(collective), collective.kind is Kind.SEND
        counters, instrument = lane.counters, self.instrument
        nbytes, messages = getattr(bound, "bytes", 0), getattr(bound, "messages", 0)

        def post(views: Any, active: tuple[int, ...], iteration: int) -> Any:
            lane.sequence += 1
            try:
                operands = views()
                if instrument is not None:
                    instrument.collective_started(collective, start.stream)
                request = bound.start(operands, **skips(iteration))
            except BaseException as error:
                raise named(error, what) from error
            counters.collectives += 1
            if is_send:
                counters.messages += messages
                counters.nbytes += nbytes
                lane.sends = [sent for sent in lane.sends if not sent.test()]
                lane.sends.append(request)
            return request, active

        return post

    def _wait(self, wait: Wait) -> Operation:
        start = self._starts[wait.event]
        collective = self.program.collectives[start.collective]
        lane, outputs = self.lanes[start.stream], start.outputs
        stream = lane.stream

        def take(frame: Frame) -> Any:
            event = frame.events.pop(wait.event)
            stream.wait(event)
            return event.result()

        def finish(frame: Frame) -> None:
            for slot, register in zip(outputs, take(frame), strict=True):
                frame.registers[slot] = register

        # A send-done must not wait for the receiver: on a ring, every rank would wait in it. The
        # operands are kept by the request until they are sent; `Lane.drain` waits at the end of a run.
        return {Kind.SEND: take, Kind.RECV: self._receive(start, collective, lane, take)}.get(
            collective.kind, finish
        )

    def _receive(
        self, start: Start, collective: Collective, lane: Lane, take: Callable[[Frame], Any]
    ) -> Operation:
        outputs, count, logical = start.outputs, len(self.positions), self.logical
        what, name = describe(collective), f"{collective.kind} %{collective.name}"
        ranks, instrument = self._ranks(collective), self.instrument
        progress, counters = lane.progress, lane.counters

        def receive(frame: Frame) -> None:
            request, active = take(frame)
            began = perf_counter()

            def await_message() -> Any:
                progress.begin(name, collective.source, lane.sequence, ranks)
                try:
                    return request.wait()
                finally:
                    progress.end()

            try:
                received = await_message() if not request.test() else request.wait()
            except BaseException as error:
                raise named(error, what) from error
            seconds = perf_counter() - began
            counters.seconds += seconds
            if instrument is not None:
                instrument.collective_finished(collective, start.stream, 0, seconds)
            registers = [Hosted([None] * count) for _ in outputs]
            for position in active:
                for register, array in zip(registers, received[logical[position]], strict=True):
                    register[position] = array
            for slot, register in zip(outputs, registers, strict=True):
                frame.registers[slot] = register

        return receive

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

        def walk(frame: Frame) -> None:
            registers, outer = frame.registers, frame.iteration
            values = [registers[slot] for slot in inputs]
            for slot in donated:
                registers[slot] = None
            for frame.iteration in iterations:
                values = enter(frame, values)
            frame.iteration = outer
            for slot, register in zip(outputs, values, strict=True):
                registers[slot] = register

        return walk

    def _while(self, loop: Loop) -> Operation:
        test, enter = self._enter(loop.condition), self._enter(loop.body)
        inputs, outputs, donated = loop.inputs, loop.outputs, loop.donated
        what = f"loop {loop.name or '(unnamed)'}{f' at {loop.source}' if loop.source else ''}"
        host_view = self.engine.host_view

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
                (predicate,) = test(frame, list(values))
                remaining = staying(frame, predicate)
                if len(remaining) != len(frame.active):
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
        partitions = self.program.num_partitions
        ids = Hosted(
            np.array(
                logical % partitions if instruction.kind == "partition" else logical // partitions,
                np.uint32,
            )
            for logical in self.logical
        )
        slot = instruction.output

        def identify(frame: Frame) -> None:
            frame.registers[slot] = ids

        return identify

    def _free(self, instruction: Free) -> Operation:
        slots = instruction.slots

        def free(frame: Frame) -> None:
            registers = frame.registers
            for slot in slots:
                registers[slot] = None

        return free


def describe(collective: Collective) -> str:
    """``all-reduce %psum.3 at train.py:12``, for errors."""
    name = f" %{collective.name}" if collective.name else ""
    return f"{collective.kind}{name}{f' at {collective.source}' if collective.source else ''}"


def shared_results(program: Program) -> tuple[int, ...]:
    """Positions of results that would share an array with an argument or with an earlier result.

    An output must be an array of its own: donating or deleting one must not take another with it.
    """
    donated = {program.body.parameters[index] for index in program.donated}
    taken = set(program.body.parameters) - donated
    shared = []
    for index, slot in enumerate(program.body.results):
        if slot in taken:
            shared.append(index)
        taken.add(slot)
    return tuple(shared)


def skipped_pairs(collective: Collective) -> Callable[[int], dict[str, frozenset[int]]]:
    """Keyword arguments of a call in an iteration: ``skip``, the pairs that move nothing in it."""
    valid = collective.valid_iterations
    if not valid:
        nothing: dict[str, frozenset[int]] = {}
        return lambda iteration: nothing
    edges = sorted({edge for low, high in valid for edge in (low, high + 1) if low <= high})
    calls = [
        {"skip": frozenset(k for k, (low, high) in enumerate(valid) if not low <= since <= high)}
        for since in [-1, *edges]  # between two edges nothing changes
    ]
    return lambda iteration: calls[bisect_right(edges, iteration)]
