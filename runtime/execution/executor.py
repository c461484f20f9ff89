"""`Executor`: loads programs and runs them on the local devices of this process.

`LoadedProgram.execute` returns at once with values that arrive later. Programs that only compute, and whose
arguments are there, are handed to the engine in the caller's thread, since an engine is asynchronous by
itself. All others go to one dispatch thread, which walks them in the order of the calls: so every
collective is started in an order that follows from the program's text alone, the same on all ranks.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any
from weakref import WeakSet

from stretto.collectives.communicator import Communicator
from stretto.collectives.gpu_mpi import OnDevices
from stretto.collectives.gpus import Gpus
from stretto.collectives.hierarchy import Hierarchy
from stretto.collectives.order import CommonOrder, Schedule
from stretto.collectives.poison import poison
from stretto.collectives.staging import Staging

from ..engines.engine import Engine, LoadedSegment, StreamedEngine
from ..errors import InvalidProgramError, UnsupportedError
from ..job import watchdog
from ..job.exits import await_at_exit
from ..job.rendezvous import memory_name
from ..job.run_log import called
from ..options import Options
from ..program import Program
from ..program.communicated import strict
from ..recording import statistics
from ..recording.instrument import Instrument, Instruments
from ..recording.statistics import Counters
from .absent import Absent, zeros
from .called_back import CalledBack
from .compiled_segments import compile_segments
from .context import Context
from .dispatch import Dispatcher, Processes
from .interrupts import Interrupts
from .lane import Lane
from .loaded import LoadedProgram
from .negotiation import Agreements, AsWritten, Negotiation, Proposal, check_rings
from .profiling import Keep, Measuring
from .side_by_side import await_idle, await_left
from .stream import Stream, completions
from .walk import Walker

_LATE = 1.0  # seconds for which the end of an observation waits for GPUs


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
        signals: Callable[[], int] | None = None,
    ) -> None:
        self.engine = engine
        self.world = world
        self.options = options or world.options
        self.dispatcher = Dispatcher(world, instrument)
        self._communicators = communicators or _hierarchies(world)
        if self.options.poison_skipped:
            self._communicators = _poisoned(self._communicators)
        self._absent = Absent(engine, poison if self.options.poison_skipped else zeros)
        self._computing = Counters()  # of the dispatch thread
        self._lanes: list[Lane] = []
        self._lock = threading.Lock()
        self._loaded: WeakSet[LoadedProgram] = WeakSet()
        self._agreements = Agreements(world.assembly)
        # Where the job has other processes, they would wait for this one: nothing is ended there.
        self._interrupts = (
            Interrupts(signals, self.options.grace)
            if signals is not None and world.size == 1
            else Interrupts()
        )
        world.on_failure(self._abort)
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
        self.dispatcher.check_open()
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
        called = CalledBack(host_callbacks) if host_callbacks else None
        make = partial(self._walker, local, owner, called, line)
        must_agree = len(processes) > 1 and bool(rewritten)
        walker = make(program, code)
        with self.dispatcher.observing:
            loaded = LoadedProgram(
                self.dispatcher, walker, local, bool(host_callbacks), must_agree, self
            )
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
        with self.dispatcher.observing:
            before = self.dispatcher.instrument
            for loaded in list(self._loaded):
                if loaded.walker.prepared:
                    instrument.program_loaded(loaded.walker.program, loaded.local)
            self._watch(instrument if before is None else Instruments(before, instrument))

        def end() -> None:
            with self.dispatcher.observing:
                self._watch(before)
            # What GPUs have done is told of a moment after its results are there.
            until = time.monotonic() + _LATE
            for lane in list(self._lanes):
                while lane.gpus is not None and not lane.stream.idle and time.monotonic() < until:
                    time.sleep(1e-3)

        return end

    def _watch(self, instrument: Instrument | None) -> None:
        self.dispatcher.instrument = instrument
        for loaded in list(self._loaded):
            loaded.watch()

    def counters(self) -> Counters:
        """Communication of this process since the start, over all streams, and what was left out."""
        return reduce(
            add, (lane.counters for lane in list(self._lanes)), Counters() + self._computing
        )

    def _abort(self, error: BaseException) -> None:
        if isinstance(self.engine, StreamedEngine):
            self.engine.fail(error)  # before what is under way ends without having been done
        for lane in list(self._lanes):
            lane.abort(str(error))

    def close(self) -> None:
        """Wait for the runs under way (not once the world has failed), then end the threads."""
        self.dispatcher.closed = True
        for stream in [self.dispatcher.stream, *(lane.stream for lane in self._lanes)]:
            await_at_exit(partial(self._ended, stream))
            if self.world.error is not None:
                break
        await_left()
        if self.world.error is not None:
            return
        await_idle(completions)  # who waits for arrays is inside of XLA too
        for lane in self._lanes:
            if lane.gpus is not None:
                lane.gpus.close()
            lane.communicator.close()

    def settle(self) -> None:
        """Wait for the runs under way. Python is ending, and may call functions that run others."""
        self.dispatcher.late = True
        for stream in [self.dispatcher.stream, *(lane.stream for lane in self._lanes)]:
            if not stream.idle:
                await_at_exit(stream.submit(_nothing).wait_for)
        await_left()
        await_idle(completions)

    def _ended(self, stream: Stream, seconds: float) -> bool:
        return stream.close(seconds) or self.world.error is not None

    def _walker(
        self,
        local: tuple[tuple[int, int], ...],
        owner: dict[int, int],
        called_back: CalledBack | None,
        line: str,
        program: Program,
        code: Sequence[bytes] = (),
    ) -> Walker:
        segments: Sequence[LoadedSegment] = ()
        if local:
            ordinals = [ordinal for _, ordinal in local]
            functions = called_back.functions if called_back else ()
            compiled = compile_segments(program, self.engine, functions, code, ordinals)
            segments = compiled.segments
        with self._lock:
            while local and len(self._lanes) < program.num_streams:
                self._lanes.append(self._lane(len(self._lanes)))
        return Walker(
            Context(
                program,
                self.engine,
                segments,
                local,
                owner,
                self._lanes,
                self._absent,
                self._computing,
                called(program.name, line),
                called_back,
                self.dispatcher.instrument,
                interrupts=self._interrupts,
            )
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
        communicator = self._communicators(number)
        gpus = staging = on_devices = None
        # Any other communicator, as the poisoned one, has something of its own to do.
        if isinstance(self.engine, StreamedEngine) and isinstance(communicator, Hierarchy):
            if self.options.nccl:
                gpus = Gpus(communicator.mpi, self.options.timeout)
            if "+" not in self.world.engines:  # other engines' ranks communicate whole arrays
                staging = Staging()
                if communicator.mpi is not None and self.options.cuda_mpi != "0":
                    on_devices = OnDevices(communicator.mpi, self.options.cuda_mpi)
        return Lane(
            number,
            Stream(f"stretto-stream-{number}"),
            communicator,
            self.world.progress(number),
            gpus,
            self._gpus_failed,
            staging,
            on_devices,
        )

    def _gpus_failed(self, error: BaseException) -> None:
        """A collective on GPUs has failed after it was enqueued: so has all that is behind it."""
        self._abort(error)
        self.dispatcher.report(error)


def _hierarchies(world: Processes) -> Callable[[int], Communicator]:
    from stretto.collectives.hierarchy import create_communicator

    memory = memory_name() if world.options.shared_memory else ""
    return lambda stream: create_communicator(
        world.comm, stream, world.patience, world.patience_of_code, memory
    )


def _poisoned(communicators: Callable[[int], Communicator]) -> Callable[[int], Communicator]:
    from stretto.collectives.poison import PoisonedCommunicator

    return lambda stream: PoisonedCommunicator(communicators(stream))


def _close_at_exit(reference: weakref.ref[Executor]) -> None:
    executor = reference()
    if executor is None:
        return
    # Other processes may wait for this one, and GPUs for their host, as long as something may run.
    if executor.world.size > 1 or isinstance(executor.engine, StreamedEngine):
        executor.close()
    else:
        executor.settle()


def _nothing() -> None:
    pass
