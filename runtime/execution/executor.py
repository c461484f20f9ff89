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
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from itertools import count
from operator import add
from typing import Any, Protocol
from weakref import WeakSet

from stretto.collectives.communicator import Communicator
from stretto.collectives.order import CommonOrder, Schedule
from stretto.collectives.poison import poison

from ..engines.engine import Engine, LoadedSegment
from ..errors import InvalidProgramError, StrettoError, UnsupportedError
from ..job import watchdog
from ..job.exits import await_at_exit
from ..job.progress import Progress
from ..job.run_log import RunLogs, called
from ..options import Options
from ..program import Program
from ..program.order import strict
from ..recording import statistics
from ..recording.instrument import Instrument, Instruments
from ..recording.statistics import Counters
from . import called_back
from .absent import Absent, zeros
from .call import Lane
from .compiled_segments import compile_segments
from .execution import Execution
from .loaded import PATIENCE, LoadedProgram
from .negotiation import Agreements, Assembly, AsWritten, Negotiation, Proposal, check_rings
from .profiling import Keep, Measuring
from .side_by_side import await_idle, await_left
from .stream import Event, Stream, completions
from .walk import Walker

# Programs queued ahead of the dispatch thread. Enough to hide its latency; a caller that is further ahead
# waits, or values of runs not begun would pile up without bound.
MAX_QUEUED = 32


class Processes(Protocol):
    """What an executor needs to know of the world: `stretto.runtime.job.world.World`, or one in memory."""

    rank: int
    size: int
    local_devices: int
    comm: Any
    patience: float
    options: Options

    @property
    def error(self) -> StrettoError | None: ...

    def fail(self, error: BaseException) -> None: ...

    def on_failure(self, listener: Callable[[StrettoError], None]) -> None: ...

    def progress(self, stream: int = 0) -> Progress: ...

    @property
    def runs(self) -> RunLogs: ...

    def assembly(self, processes: tuple[int, ...]) -> Assembly: ...


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
        if self.options.poison_skipped:
            self._communicators = _poisoned(self._communicators)
        self._absent = Absent(engine, poison if self.options.poison_skipped else zeros)
        self._computing = Counters()  # of the dispatch thread
        self._lanes: list[Lane] = []
        self._lock = threading.Lock()
        self._nested = threading.RLock()  # held by runs within a run, where they span processes
        self.observing = threading.Lock()  # held to change the instrument, and who knows of it
        self.dispatch = Stream("stretto-dispatch")
        self._executions: dict[int, Execution] = {}
        self.next_run = count(1).__next__  # numbers the executions of programs
        self._loaded: WeakSet[LoadedProgram] = WeakSet()
        self._closed = False
        self._agreements = Agreements(world.assembly)
        world.on_failure(self._fail_executions)
        statistics.include(self)
        atexit.register(_close_at_exit, weakref.ref(self))

    def load(
        self,
        program: Program,
        device_ids: Sequence[int],
        host_callbacks: Sequence[Any] = (),
        *,
        schedule: Schedule | None = None,
        with_order: Callable[[CommonOrder], Program] | None = None,
        rewritten: bytes = b"",
        as_written: Callable[[], AsWritten] | None = None,
        code: Sequence[bytes] = (),
        keep: Keep | None = None,
    ) -> LoadedProgram:
        """Compile the segments. ``device_ids[i]``: global id of logical id i.

        ``code[i]``: segment i as the engine serialized it, which is restored then instead of compiled;
        empty where there is none.

        ``schedule`` tells what the program communicates, in which of its orders data and tokens require
        it; ``with_order`` gives the program in another one. Without them the program's order is the only
        one. Where its collectives are not those of the module it was made of, ``rewritten`` is a digest of
        what was done to them, and ``as_written`` compiles the module without that, for ranks that differ.

        ``keep`` takes what its segments take, if its first runs are to be measured (`profiling`).

        Waits for no other process: what several processes run together is agreed on and bound when it
        first runs (`negotiation`). Raises `CompileError`, `UnsupportedError`, `InvalidProgramError` where
        devices and program disagree, and `CollectiveMismatch` where the program waits for itself.
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
        processes = tuple(sorted(set(owner.values())))
        schedule = strict(program) if schedule is None else schedule
        check_rings(program, schedule, owner, alone=len(processes) == 1)
        line = watchdog.calling_line() if len(processes) > 1 else ""
        host_callbacks = [called_back.marked(function) for function in host_callbacks]
        make = partial(self._walker, local, owner, host_callbacks, line)
        must_agree = len(processes) > 1 and bool(rewritten)
        walker = make(program, code)
        with self.observing:
            loaded = LoadedProgram(self, walker, local, bool(host_callbacks), must_agree)
            self._loaded.add(loaded)
        if not local:
            return loaded
        if len(processes) > 1:
            runs = self.world.runs.of(processes)
            runs.loaded(program.name, line, loaded.communicates)
        if len(processes) > 1 and loaded.communicates:

            def reorder(order: CommonOrder) -> Program:
                if with_order is None:
                    raise UnsupportedError("the program cannot be given another order")
                loaded.walker = make(with_order(order))
                return loaded.walker.program

            def unrewritten() -> Proposal:
                nonlocal with_order
                assert as_written is not None
                written = as_written()
                with_order = written.with_order
                return Proposal(written.program, written.schedule, device_ids, line)

            negotiation = Negotiation(
                Proposal(program, schedule, device_ids, line, rewritten),
                self.world.rank,
                owner,
                runs,
                self._agreements,
                reorder,
                loaded.prepare,
                self._lanes[0],
                unrewritten,
            )
        else:
            negotiation = None
            loaded.prepare()
        loaded.negotiation = negotiation if keep is None else Measuring(loaded, negotiation, keep)
        return loaded

    def observe(self, instrument: Instrument) -> Callable[[], None]:
        """Tell ``instrument``, too, what happens from now on, until what this gives is called.

        Runs under way are told of in part. Programs that were loaded before are told of as well.
        """
        with self.observing:
            before = self.instrument
            for loaded in list(self._loaded):
                if loaded.walker.prepared:
                    instrument.program_loaded(loaded.walker.program, loaded.local)
            self._watch(instrument if before is None else Instruments(before, instrument))

        def end() -> None:
            with self.observing:
                self._watch(before)

        return end

    def _watch(self, instrument: Instrument | None) -> None:
        self.instrument = instrument
        for loaded in list(self._loaded):
            loaded.watch()

    def counters(self) -> Counters:
        """Communication of this process since the start, over all streams, and what was left out."""
        return reduce(
            add, (lane.counters for lane in list(self._lanes)), Counters() + self._computing
        )

    def close(self) -> None:
        """Wait for the runs under way (not once the world has failed), then end the threads."""
        self._closed = True
        for stream in [self.dispatch, *(lane.stream for lane in self._lanes)]:
            await_at_exit(partial(self._ended, stream))
            if self.world.error is not None:
                break
        await_left()
        if self.world.error is not None:
            return
        await_idle(completions)  # who waits for arrays is inside of XLA too
        for lane in self._lanes:
            lane.communicator.close()

    def _ended(self, stream: Stream, seconds: float) -> bool:
        return stream.close(seconds) or self.world.error is not None

    def _walker(
        self,
        local: tuple[tuple[int, int], ...],
        owner: dict[int, int],
        host_callbacks: Sequence[Any],
        line: str,
        program: Program,
        code: Sequence[bytes] = (),
    ) -> Walker:
        segments: Sequence[LoadedSegment] = ()
        if local:
            segments = compile_segments(program, self.engine, host_callbacks, code).segments
        with self._lock:
            while local and len(self._lanes) < program.num_streams:
                self._lanes.append(self._lane(len(self._lanes)))
        return Walker(
            program,
            self.engine,
            segments,
            local,
            owner,
            self._lanes,
            self.instrument,
            called(program.name, line),
            bool(host_callbacks),
            self._absent,
            self._computing,
        )

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

    def _lane(self, number: int) -> Lane:
        return Lane(
            number,
            Stream(f"stretto-stream-{number}"),
            self._communicators(number),
            self.world.progress(number),
        )

    def enqueue(self, execution: Execution) -> None:
        """Have the dispatch thread walk a run; what a host callback asks for runs within its own run."""
        nested = called_back.inside()
        if self._closed and not nested:
            raise StrettoError("the executor is closed: the process is ending")
        if not nested and len(self._executions) >= MAX_QUEUED:
            oldest = list(self._executions.values())[:1]
            for ahead in oldest:
                ahead.event.wait()
        self._executions[id(execution)] = execution
        error = self.world.error
        if error is not None:
            execution.land(error)
        elif nested:
            # The functions of several devices may run the same programs at once: in one order on all ranks.
            with nullcontext() if execution.loaded.negotiation is None else self._nested:
                execution.walk()
        else:
            self.dispatch.submit(execution.walk)

    @property
    def idle(self) -> bool:
        """Whether all runs are over, but for what the dispatch thread does after their end."""
        return not self._executions

    def take_turn(self) -> bool:
        """Have the caller be the dispatch thread until it calls `end_turn`, if no run is under way."""
        if self._executions or self._closed or self.world.error is not None:
            return False
        return self.dispatch.try_turn(PATIENCE)

    def end_turn(
        self, execution: Execution | None = None, rest: Callable[[], None] | None = None
    ) -> None:
        """The end of it. ``rest``: what the dispatch thread is to do of the run that became an execution."""
        if execution is not None:
            self._executions[id(execution)] = execution
            error = self.world.error
            if error is not None:
                execution.land(error)
        if rest is None:
            self.dispatch.end_turn()
        else:
            self.dispatch.hand_over(rest)

    def walk_here(self, execution: Execution) -> None:
        """Walk a run, in the caller's thread unless others are queued."""
        self._executions[id(execution)] = execution
        if called_back.inside():
            execution.walk()
        else:
            self.dispatch.run(execution.walk)

    def claim(self, execution: Execution) -> bool:
        """Whether the caller is the one to end this run."""
        return self._executions.pop(id(execution), None) is not None

    def report(self, error: BaseException | None) -> None:
        """Tell the other ranks that a program that they run too has failed here."""
        if error is not None and self.world.size > 1:
            self.world.fail(error)

    def report_failure_of(self, event: Event) -> None:
        """`report` as a callback."""
        self.report(event.error)

    def _fail_executions(self, error: StrettoError) -> None:
        """The job has failed: everyone who waits gets the error, whatever the dispatch thread does."""
        for execution in list(self._executions.values()):
            execution.land(error)


def _hierarchies(world: Processes) -> Callable[[int], Communicator]:
    from stretto.collectives.hierarchy import create_communicator

    return lambda stream: create_communicator(world.comm, stream, world.patience)


def _poisoned(communicators: Callable[[int], Communicator]) -> Callable[[int], Communicator]:
    from stretto.collectives.poison import PoisonedCommunicator

    return lambda stream: PoisonedCommunicator(communicators(stream))


def _close_at_exit(reference: weakref.ref[Executor]) -> None:
    executor = reference()
    if executor is not None:
        executor.close()
