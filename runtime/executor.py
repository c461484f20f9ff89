"""`Executor`: loads programs and runs them on the local devices of this process.

`LoadedProgram.execute` returns at once with values that arrive later. Programs that only compute, and whose
arguments are there, are handed to the engine in the caller's thread, since an engine is asynchronous by
itself. All others go to one dispatch thread, which walks them in the order of the calls: so every
collective is started in an order that follows from the program's text alone, the same on all ranks.

An error in a walk fails the outputs that are not issued yet; those that are arrive. If the program spans
processes the world is told, and its other ranks fail too.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from operator import add
from typing import Any, Protocol

from stretto.collectives.communicator import Communicator

from . import statistics
from .communication import Lane
from .engine import Engine, LoadedSegment
from .errors import InvalidProgramError, StrettoError
from .frame import Frame, Hosted
from .instrument import Counters, Instrument
from .options import Options
from .program import Block, Branch, Loop, Program, Run, Start, instructions
from .progress import Progress
from .stream import Event, Stream
from .value import DeletedError, Landed, Promise, Value
from .walk import Walker

# Programs queued ahead of the dispatch thread. Enough to hide its latency; a caller that is further ahead
# waits, or values of runs not begun would pile up without bound.
MAX_QUEUED = 32


class Processes(Protocol):
    """What an executor needs to know of the world: `stretto.runtime.world.World`, or one in memory."""

    rank: int
    size: int
    local_devices: int
    comm: Any
    options: Options

    @property
    def error(self) -> StrettoError | None: ...

    def fail(self, error: BaseException) -> None: ...

    def on_failure(self, listener: Callable[[StrettoError], None]) -> None: ...

    def progress(self, stream: int = 0) -> Progress: ...


class Executor:
    """Runs programs on ``engine`` for the devices of this process in ``world``.

    ``communicators(stream)`` makes the communicator of a stream; by default the hierarchy over the
    world's MPI communicator. Global device ids count the devices of rank 0, then those of rank 1, ….
    """

    def __init__(
        self,
        engine: Engine,
        world: Processes,
        options: Options | None = None,
        *,
        communicators: Callable[[int], Communicator] | None = None,
        instrument: Instrument | None = None,
    ) -> None:
        self.engine = engine
        self.world = world
        self.options = options or world.options
        self.instrument = instrument
        self._communicators = communicators or _hierarchies(world)
        self._lanes: list[Lane] = []
        self._lock = threading.Lock()
        self.dispatch = Stream("stretto-dispatch")
        self._flights: dict[int, Flight] = {}
        self._runs = 0
        self._closed = False
        world.on_failure(self._fail_flights)
        statistics.include(self)
        atexit.register(_close_at_exit, weakref.ref(self))

    def load(
        self, program: Program, device_ids: Sequence[int], host_callbacks: Sequence[Any] = ()
    ) -> LoadedProgram:
        """Compile the segments and bind the collectives. ``device_ids[i]``: global id of logical id i.

        Every process that owns one of the devices loads the same programs in the same order. Raises
        `CompileError`, `UnsupportedError`, or `InvalidProgramError` where devices and program disagree.
        """
        device_ids = tuple(device_ids)
        self._check_devices(program, device_ids)
        per_process = self.world.local_devices
        owner = {logical: device // per_process for logical, device in enumerate(device_ids)}
        local = tuple(
            (logical, device % per_process)
            for logical, device in enumerate(device_ids)
            if owner[logical] == self.world.rank
        )
        segments = self._compile(program, host_callbacks) if local else []
        with self._lock:
            while local and len(self._lanes) < program.num_streams:
                self._lanes.append(self._lane(len(self._lanes)))
            walker = Walker(
                program, self.engine, segments, local, owner, self._lanes, self.instrument
            )
        return LoadedProgram(self, walker, local, bool(host_callbacks))

    def counters(self) -> Counters:
        """Communication of this process since the start, over all streams."""
        return reduce(add, (lane.counters for lane in list(self._lanes)), Counters())

    def close(self) -> None:
        """Wait for the runs under way (not once the world has failed), then end the threads."""
        self._closed = True
        for stream in [self.dispatch, *(lane.stream for lane in self._lanes)]:
            while not stream.close(timeout=0.2):
                if self.world.error is not None:
                    return
        for lane in self._lanes:
            lane.communicator.close()

    def _check_devices(self, program: Program, device_ids: tuple[int, ...]) -> None:
        available = self.world.size * self.world.local_devices
        if len(device_ids) != program.num_devices:
            raise InvalidProgramError(
                f"program {program.name} is for {program.num_devices} devices "
                f"({program.num_replicas} replicas x {program.num_partitions} partitions), "
                f"but {len(device_ids)} are assigned to it"
            )
        unknown = [d for d in device_ids if not 0 <= d < available]
        if unknown:
            raise InvalidProgramError(
                f"program {program.name} asks for device {unknown[0]}, but there are {available}: "
                f"{self.world.size} processes with {self.world.local_devices} devices each"
            )
        if len(set(device_ids)) != len(device_ids):
            raise InvalidProgramError(
                f"program {program.name} is given a device twice: {device_ids}"
            )

    def _compile(self, program: Program, host_callbacks: Sequence[Any]) -> list[LoadedSegment]:
        def compile_one(index: int) -> LoadedSegment:
            segment = program.segments[index]
            return self.engine.compile(
                segment,
                name=segment.name or f"{program.name}.{index}",
                host_callbacks=host_callbacks,
            )

        indices = range(len(program.segments))
        workers = min(len(indices), os.cpu_count() or 1)
        if workers < 2:
            return [compile_one(index) for index in indices]
        with ThreadPoolExecutor(workers, thread_name_prefix="stretto-compile") as pool:
            return list(pool.map(compile_one, indices))

    def _lane(self, number: int) -> Lane:
        return Lane(
            number,
            Stream(f"stretto-stream-{number}"),
            self._communicators(number),
            self.world.progress(number),
        )

    def fly(self, flight: Flight) -> None:
        """Have the dispatch thread walk a run; what a host callback asks for runs within its own run."""
        if self._closed:
            raise StrettoError("the executor is closed: the process is ending")
        nested = threading.get_ident() == self.dispatch.thread_id
        if not nested and len(self._flights) >= MAX_QUEUED:
            oldest = list(self._flights.values())[:1]
            for ahead in oldest:
                ahead.event.wait()
        self._flights[id(flight)] = flight
        error = self.world.error
        if error is not None:
            flight.land(error)
        elif nested:
            flight.walk()
        else:
            self.dispatch.submit(flight.walk)

    def fly_here(self, flight: Flight) -> None:
        """Walk a run, in the caller's thread unless others are queued."""
        self._flights[id(flight)] = flight
        self.dispatch.run(flight.walk)

    def claim(self, flight: Flight) -> bool:
        """Whether the caller is the one to end this run."""
        return self._flights.pop(id(flight), None) is not None

    def report(self, error: BaseException | None) -> None:
        """Tell the other ranks that a program that they run too has failed here."""
        if error is not None and self.world.size > 1:
            self.world.fail(error)

    def report_failure_of(self, event: Event) -> None:
        """`report` as a callback."""
        self.report(event.error)

    def next_run(self) -> int:
        self._runs += 1
        return self._runs

    def _fail_flights(self, error: StrettoError) -> None:
        """The job has failed: everyone who waits gets the error, whatever the dispatch thread does."""
        for flight in list(self._flights.values()):
            flight.land(error)


class LoadedProgram:
    """A program on its devices. ``local``: (logical id, ordinal) of those in this process, in order."""

    def __init__(
        self,
        executor: Executor,
        walker: Walker,
        local: tuple[tuple[int, int], ...],
        has_host_callbacks: bool = False,
    ) -> None:
        self.executor = executor
        self.program = program = walker.program
        self.local = local
        self.walker = walker
        self.has_host_callbacks = has_host_callbacks
        self.communicates = any(isinstance(i, Start) for i in instructions(program.body))
        self.input_types = program.inputs
        self.output_types = program.outputs
        self._engine = executor.engine
        self._single = None
        if program.single_segment is not None and local and executor.instrument is None:
            self._single = walker.segments[program.body.instructions[0].segment].run  # type: ignore[union-attr]

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
        failed); None if that is so already.
        """
        if len(arguments) != len(self.local) or any(
            len(row) != len(self.input_types) for row in arguments
        ):
            raise InvalidProgramError(
                f"program {self.program.name} takes {len(self.input_types)} arguments for each of "
                f"{len(self.local)} local devices, not {[len(row) for row in arguments]}"
            )
        if not self.local:
            return [], None
        donated = self.program.donated
        idle = self.executor.dispatch.idle
        if self._single is not None and (idle or not donated):
            outputs = self._run_single(arguments)
            if outputs is not None:
                return outputs, None
        return self._launch(arguments, idle)

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
        """Hand the one segment to the engine; None if an argument is not issued yet."""
        run: Any = self._single
        rows = []
        for values in arguments:
            row = []
            for value in values:
                array = value._array
                if array is None:
                    try:
                        if type(value.capture()) is Promise:
                            return None
                    except Exception as error:
                        return self._failed(error)
                    array = value.array()
                row.append(array)
            rows.append(row)
        engine, types, donated = self._engine, self.output_types, self.program.donated
        outputs = []
        for (_, ordinal), row, values in zip(self.local, rows, arguments, strict=True):
            arrays = run(ordinal, row)
            outputs.append(
                [Value(type, ordinal, engine, a) for type, a in zip(types, arrays, strict=True)]
            )
            for index in donated:
                values[index].delete()
        return outputs

    def _failed(self, error: Exception) -> list[list[Value]]:
        if isinstance(error, DeletedError):
            raise error
        return [
            [Value.failed(self._engine, error, type, ordinal) for type in self.output_types]
            for _, ordinal in self.local
        ]

    def _launch(
        self, arguments: Sequence[Sequence[Value]], idle: bool
    ) -> tuple[list[list[Value]], Event | None]:
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
        outputs = [
            [
                Value(type, ordinal, self._engine, None, promise)
                for type, promise in zip(self.output_types, promises, strict=True)
            ]
            for (_, ordinal), promises in zip(self.local, flight.promises, strict=True)
        ]
        if idle and issued and not self.communicates:
            self.executor.fly_here(flight)
        else:
            self.executor.fly(flight)
        for index in self.program.donated:
            for row in arguments:
                row[index].delete()
        return outputs, flight.event


class Flight:
    """One run of a program, from its arguments to its outputs."""

    __slots__ = ("_columns", "_failed", "event", "loaded", "promises", "run")

    def __init__(
        self, loaded: LoadedProgram, columns: list[list[Any]], failed: Exception | None
    ) -> None:
        self.loaded = loaded
        self.event = Event()
        self.promises = [[Promise(self.event) for _ in loaded.output_types] for _ in loaded.local]
        self.run = loaded.executor.next_run()
        self._columns = columns
        self._failed = failed

    def walk(self) -> None:
        """Walk the program. Errors go to the outputs."""
        loaded = self.loaded
        walker, executor = loaded.walker, loaded.executor
        program, instrument = loaded.program, executor.instrument
        frame = Frame(len(program.slot_types), walker.positions)
        error: BaseException | None = self._failed
        results: list[Any] = []
        try:
            if error is None:
                for slot, column in zip(program.body.parameters, self._columns, strict=True):
                    frame.registers[slot] = self._gather(column, slot)
                self._columns = []
                if instrument is not None:
                    instrument.program_started(program.name, self.run)
                for operation in walker.operations:
                    operation(frame)
                results = walker.results(frame)
        except BaseException as raised:
            error = raised
            results = [frame.registers[slot] for slot in program.body.results]
        self.land(error, results)
        for lane in walker.lanes:
            if lane.sends:
                drained = lane.stream.submit(lane.drain)
                drained.add_callback(partial(executor.report_failure_of, drained))
        if instrument is not None:
            instrument.program_finished(program.name, self.run, error)

    def _gather(self, column: list[Any], slot: int) -> list[Any]:
        """A register from what the arguments stood for."""
        column = [entry.result() if type(entry) is Promise else entry for entry in column]
        landed = [type(entry) is Landed for entry in column]
        if all(landed):
            return Hosted(entry.host for entry in column)
        if any(landed):
            walker = self.loaded.walker
            type_ = self.loaded.program.slot_types[slot]
            return [
                walker.engine.put(entry.host, type_, ordinal) if type(entry) is Landed else entry
                for entry, ordinal in zip(column, walker.ordinals, strict=True)
            ]
        return column

    def land(self, error: BaseException | None, results: Sequence[Any] = ()) -> None:
        """Deliver the outputs; those that are not issued get the error. Only the first call counts."""
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
        if loaded.communicates:
            executor.report(error)
        self.event.set(error=error)


def _hierarchies(world: Processes) -> Callable[[int], Communicator]:
    from stretto.collectives.hierarchy import create_communicator

    return lambda stream: create_communicator(world.comm, stream)


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


def _close_at_exit(reference: weakref.ref[Executor]) -> None:
    executor = reference()
    if executor is not None:
        executor.close()
