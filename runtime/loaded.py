"""`LoadedProgram`: a program on its devices, ready to be executed; `Flight`: one execution of it.

Programs that only compute, and whose arguments are there, are handed to the engine in the caller's thread.
All others become a flight, which the executor's dispatch thread walks. Where a program's collectives are all
small, the caller's thread begins the walk, which saves two thread switches if the other processes are there
already, and leaves the rest to the dispatch thread as soon as it would have to wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .compiled_segments import CompiledSegments
from .errors import InvalidProgramError
from .frame import Frame, Hosted, drop_tracebacks
from .program import Block, Branch, Loop, Run, Start, instructions
from .stream import Event, completions
from .value import DeletedError, Landed, Promise, Value
from .walk import Walker

if TYPE_CHECKING:
    from stretto.collectives.types import TensorType

    from .executor import Executor
    from .negotiation import Joint

# Seconds that a caller waits for other processes before it leaves a small collective to the dispatch thread.
# Leaving it costs two thread switches here, and makes the other processes wait for as long: less patience
# than that, and one late process makes all of them take turns at being late.
PATIENCE = 300e-6


class LoadedProgram:
    """A program on its devices. ``local``: (logical id, ordinal) of those in this process, in order."""

    def __init__(
        self,
        executor: Executor,
        walker: Walker,
        local: tuple[tuple[int, int], ...],
        has_host_callbacks: bool = False,
        must_agree: bool = False,
    ) -> None:
        """``must_agree``: with other processes, even if the program as it is communicates nothing."""
        self.executor = executor
        self.program = program = walker.program
        self.local = local
        self.walker = walker
        self.has_host_callbacks = has_host_callbacks
        self.communicates = must_agree or any(
            isinstance(i, Start) for i in instructions(program.body)
        )
        self.input_types = program.inputs
        self.output_types = program.outputs
        self.donates = bool(program.donated)
        self._num_inputs = len(program.inputs)
        self._engine = executor.engine
        self._single = None
        # How it is agreed on with the other processes that run it; None if there are none.
        self.joint: Joint | None = None
        if (
            program.single_segment is not None
            and local
            and not must_agree
            and executor.instrument is None
            and not has_host_callbacks
        ):
            self._single = walker.segments[program.body.instructions[0].segment].run  # type: ignore[union-attr]

    def prepare(self) -> None:
        """Bind the collectives; waits for the other processes of the program, where there are any."""
        self.walker.prepare()

    @property
    def compiled(self) -> CompiledSegments:
        """What the engine made of the program, in the order that it runs in."""
        walker = self.walker
        return CompiledSegments(
            walker.program, self._engine, walker.segments, self.has_host_callbacks
        )

    @property
    def single(self) -> Callable[[int, list[Any]], list[Any]] | None:
        """The engine's ``run`` of the only segment, where the program is nothing else.

        For callers that have the engine's arrays and donate none; None where `execute` must be used.
        """
        return self._single

    def execute(self, arguments: Sequence[Sequence[Value]]) -> list[list[Value]]:
        """Run it: ``arguments[k][i]`` is parameter i for ``local[k]``; gives outputs in the same form.

        Returns at once. Donated arguments are deleted. Raises what the engine refuses at once and
        `DeletedError`; later errors arrive at the outputs.
        """
        return self.execute_with_completion(arguments)[0]

    def execute_with_completion(
        self, arguments: Sequence[Sequence[Value]]
    ) -> tuple[list[list[Value]], Event | None]:
        """The same, with an event that is set once all is issued (its ``error`` says whether the run
        failed); None if that is so already. Where the program calls back into Python, it is set once
        everything has been called.
        """
        if self._single is not None and (not self.donates or self.executor.idle):
            outputs = self._run_single(arguments)
            if outputs is not None:
                return outputs, None
        if (
            self.walker.prompt is not None
            and self.executor.idle
            and (self.joint is None or self.joint.agreed)
        ):
            begun = self._run_promptly(arguments)
            if begun is not None:
                return begun
        if len(arguments) != len(self.local) or any(
            len(row) != len(self.input_types) for row in arguments
        ):
            raise InvalidProgramError(
                f"program {self.program.name} takes {len(self.input_types)} arguments for each of "
                f"{len(self.local)} local devices, not {[len(row) for row in arguments]}"
            )
        if not self.local:
            return [], None
        return self._launch(arguments)

    def cost_analysis(self) -> dict[str, float]:
        """Flops, transcendentals and bytes of one device's run, as far as the engine tells.

        Every segment counts once for each place it runs at, times the trip counts that are known.
        """
        analyses: list[dict[str, float]] = [
            getattr(segment, "cost_analysis", dict)() for segment in self.walker.segments
        ]
        if self.program.single_segment is not None and analyses:
            return analyses[0]
        totals: dict[str, float] = {}
        for segment, times in segment_runs(self.program.body):
            for key in ("flops", "transcendentals", "bytes accessed"):
                if segment < len(analyses) and key in analyses[segment]:
                    totals[key] = totals.get(key, 0.0) + times * analyses[segment][key]
        return totals

    def _run_single(self, arguments: Sequence[Sequence[Value]]) -> list[list[Value]] | None:
        """Hand the one segment to the engine; None if that cannot be done here and now."""
        run: Any = self._single
        count, engine, types = self._num_inputs, self._engine, self.output_types
        if len(arguments) != len(self.local):
            return None
        rows = []
        for values in arguments:
            row = []
            for value in values:
                array = value._array
                if array is None:
                    if type(value._other) is not Landed:
                        return None
                    array = value.array()
                row.append(array)
            if len(row) != count:
                return None
            rows.append(row)
        outputs = []
        for (_, ordinal), row in zip(self.local, rows, strict=True):
            arrays = run(ordinal, row)
            outputs.append([Value(t, ordinal, engine, a) for t, a in zip(types, arrays)])  # noqa: B905
        if self.donates:
            self._delete_donated(arguments)
        return outputs

    def _run_promptly(
        self, arguments: Sequence[Sequence[Value]]
    ) -> tuple[list[list[Value]], Event | None] | None:
        """Begin the walk of a `prompt` program here; None if that cannot be done here and now."""
        executor, walker = self.executor, self.walker
        prompt, frame = walker.prompt, self._frame_of(arguments)
        if frame is None or not executor.take_turn():
            return None
        rest: Callable[[], None] | None = None
        error: BaseException | None = None
        instrument, run, done = executor.instrument, executor.next_run(), 0
        assert prompt is not None
        try:
            if self.joint is not None:
                self.joint.begin()
            if instrument is not None:
                instrument.program_started(self.program.name, run)
            until = perf_counter() + PATIENCE
            for attempt in prompt:
                done += 1
                rest = attempt(frame, until)
                if rest is not None:
                    break
            else:
                results = walker.results(frame)
        except BaseException as raised:
            error = raised
        if error is None and rest is None:
            executor.end_turn()
            if instrument is not None:
                instrument.program_finished(self.program.name, run, None)
            outputs = [
                [
                    Value(t, ordinal, self._engine, None, Landed(register[position]))
                    if type(register) is Hosted
                    else Value(t, ordinal, self._engine, register[position])
                    for t, register in zip(self.output_types, results, strict=True)
                ]
                for position, (_, ordinal) in enumerate(self.local)
            ]
            event = None
        else:
            flight = Flight(self, [], None, run)
            outputs, event = self._values_of(flight), flight.event
            if rest is not None:
                executor.end_turn(flight, partial(flight.resume, frame, rest, done))
            else:
                executor.end_turn(flight)
                flight.fail(frame, error)
        if self.donates:
            self._delete_donated(arguments)
        return outputs, event

    def _frame_of(self, arguments: Sequence[Sequence[Value]]) -> Frame | None:
        """The frame of a walk with these arguments, if they are all there."""
        program = self.walker.program
        frame = Frame(len(program.slot_types), self.walker.positions)
        registers, count = frame.registers, len(self.local)
        if len(arguments) != count or any(len(row) != self._num_inputs for row in arguments):
            return None
        for index, slot in enumerate(program.body.parameters):
            type_, landed = self.input_types[index], 0
            register: list[Any] = []
            for row in arguments:
                value = row[index]
                array = value._array
                if array is None:
                    other = value._other
                    if type(other) is not Landed:
                        return None
                    array, landed = other.host, landed + 1
                if value.type is not type_ and value.type != type_:
                    return None
                register.append(array)
            if landed:
                if landed < count:
                    return None
                register = Hosted(register)
            registers[slot] = register
        return frame

    def _values_of(self, flight: Flight) -> list[list[Value]]:
        """The outputs that a flight will give."""
        return [
            [
                Value(type, ordinal, self._engine, None, promise)
                for type, promise in zip(self.output_types, promises, strict=True)
            ]
            for (_, ordinal), promises in zip(self.local, flight.promises, strict=True)
        ]

    def _delete_donated(self, arguments: Sequence[Sequence[Value]]) -> None:
        for index in self.program.donated:
            for row in arguments:
                row[index].delete()

    def _launch(
        self, arguments: Sequence[Sequence[Value]]
    ) -> tuple[list[list[Value]], Event | None]:
        idle = self.executor.idle
        columns: list[list[Any]] = []
        issued = True
        failed: Exception | None = None
        for index, type_ in enumerate(self.input_types):
            column = []
            for row in arguments:
                value = row[index]
                if value.type != type_:
                    raise InvalidProgramError(
                        f"argument {index} of program {self.program.name} is {value.type}, "
                        f"not {type_}"
                    )
                try:
                    content = value.capture()
                except DeletedError:
                    raise
                except Exception as error:
                    failed = failed or error
                    content = None
                if type(content) is Promise:
                    issued = False
                column.append(content)
            columns.append(column)
        flight = Flight(self, columns, failed)
        outputs = self._values_of(flight)
        if idle and issued and not self.communicates:
            self.executor.fly_here(flight)
        else:
            self.executor.fly(flight)
        if self.donates:
            self._delete_donated(arguments)
        return outputs, flight.end if self.has_host_callbacks else flight.event


class Flight:
    """One run of a program, from its arguments to its outputs."""

    __slots__ = ("_columns", "_failed", "end", "event", "loaded", "promises", "run")

    def __init__(
        self,
        loaded: LoadedProgram,
        columns: list[list[Any]],
        failed: Exception | None,
        run: int | None = None,
    ) -> None:
        self.loaded = loaded
        self.event = Event()  # all is issued
        self.end = Event() if loaded.has_host_callbacks else self.event  # and called back
        self.promises = [[Promise(self.event) for _ in loaded.output_types] for _ in loaded.local]
        self.run = loaded.executor.next_run() if run is None else run
        self._columns = columns
        self._failed = failed

    def walk(self) -> None:
        """Walk the program. Errors go to the outputs."""
        frame: Frame | None = None
        error: BaseException | None = self._failed
        try:
            if error is None:
                frame = self._begin()
                for operation in self.loaded.walker.operations:
                    operation(frame)
        except BaseException as raised:
            error = raised
        self._end(frame, error)

    def resume(self, frame: Frame, rest: Callable[[], None], index: int) -> None:
        """Walk on: ``rest`` is left of an operation, ``index`` the next one. Errors go to the outputs."""
        error: BaseException | None = None
        try:
            rest()
            for operation in self.loaded.walker.operations[index:]:
                operation(frame)
        except BaseException as raised:
            error = raised
        self._end(frame, error)

    def fail(self, frame: Frame, error: BaseException | None) -> None:
        """End a walk that has come to an error."""
        self._end(frame, error)

    def _begin(self) -> Frame:
        """The frame with the arguments; the first run is agreed on with the other processes."""
        loaded = self.loaded
        arguments = [
            self._gather(column, type)
            for column, type in zip(self._columns, loaded.input_types, strict=True)
        ]
        self._columns = []
        if loaded.joint is not None:
            loaded.joint.begin()
        walker = loaded.walker  # the first run may have given it another order
        program = walker.program
        frame = Frame(len(program.slot_types), walker.positions)
        for index, slot in enumerate(program.body.parameters):
            frame.registers[slot] = arguments[index]
        if loaded.executor.instrument is not None:
            loaded.executor.instrument.program_started(program.name, self.run)
        return frame

    def _end(self, frame: Frame | None, error: BaseException | None) -> None:
        """Give the outputs what there is of them. ``frame``: None if it has not come to one."""
        loaded = self.loaded
        walker, executor = loaded.walker, loaded.executor
        results: list[Any] = []
        if error is None and frame is not None:
            try:
                results = walker.results(frame)
            except BaseException as raised:
                error = raised
        if error is not None:
            if frame is not None:
                results = [frame.registers[slot] for slot in walker.program.body.results]
            drop_tracebacks(error)
        self.land(error, results, () if frame is None else frame.ends)
        for lane in walker.lanes:
            if lane.sends:
                drained = lane.stream.submit(lane.drain)
                drained.add_callback(partial(executor.report_failure_of, drained))
        if executor.instrument is not None:
            executor.instrument.program_finished(loaded.program.name, self.run, error)

    def _gather(self, column: list[Any], type_: TensorType) -> list[Any]:
        """A register from what the arguments stood for."""
        column = [entry.result() if type(entry) is Promise else entry for entry in column]
        landed = [type(entry) is Landed for entry in column]
        if all(landed):
            return Hosted(entry.host for entry in column)
        if any(landed):
            walker = self.loaded.walker
            return [
                walker.engine.put(entry.host, type_, ordinal) if type(entry) is Landed else entry
                for entry, ordinal in zip(column, walker.ordinals, strict=True)
            ]
        return column

    def land(
        self,
        error: BaseException | None,
        results: Sequence[Any] = (),
        ends: Sequence[Any] = (),
    ) -> None:
        """Deliver the outputs; those that are not issued get the error. Only the first call counts.

        ``ends`` are those of runs that call back into Python.
        """
        loaded = self.loaded
        executor = loaded.executor
        if not executor.claim(self):
            return
        for index in range(len(loaded.output_types)):
            register = results[index] if results else None
            hosted = type(register) is Hosted
            for position, promises in enumerate(self.promises):
                entry = None if register is None else register[position]
                if entry is None:
                    promises[index].error = error
                else:
                    promises[index].content = Landed(entry) if hosted else entry
        if loaded.communicates and not getattr(error, "agreed", False):
            executor.report(error)
        self.event.set(error=error)
        if self.end is self.event:
            return
        if error is None and ends:
            completions.submit(partial(_wait_for, tuple(ends), self.end))
        else:
            self.end.set(error=error)


def _wait_for(ends: Sequence[Any], event: Event) -> None:
    """Set the event once all ends have come; its error is the first of theirs."""
    failure: BaseException | None = None
    for end in ends:
        try:
            end.block_until_ready()
        except Exception as error:
            drop_tracebacks(error)
            failure = failure or error
    event.set(error=failure)


def segment_runs(block: Block, times: int = 1) -> Iterator[tuple[int, int]]:
    """Every run of a segment in a block: its index, and how often it runs if loops run as known."""
    for instruction in block.instructions:
        if isinstance(instruction, Run):
            yield instruction.segment, times
        elif isinstance(instruction, Loop):
            count = 1 if instruction.trip_count is None else instruction.trip_count
            yield from segment_runs(instruction.body, times * count)
            if instruction.trip_count is None:
                yield from segment_runs(instruction.condition, times)
        elif isinstance(instruction, Branch):
            for branch in instruction.branches:
                yield from segment_runs(branch, times)
