"""The operations of a program that are regions: compiled code that calls its collectives itself.

All devices run the region's segment at once, each on a thread of the engine's; the walk goes on when all have
ended. The collectives count, and are told of, as those of a walk, after the run.

A device that is alone in its process may run where it is called (`Region.attempt`). The thread that calls is
in the engine then, so it waits for other processes for a moment only: after that the run is given up, and
made anew by the dispatch thread, which finds in the table what was sent and received so far. Several devices
that have no others to wait for may be begun where they are called: they run on threads of the engine's, and
the dispatch thread waits for what does not end in a moment.

Code that calls back into Python does so on the threads that run its devices, which wait for no other device
then (`collectives.native.step_aside`): the functions of several may wait for each other.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from time import monotonic, perf_counter
from typing import Any, cast

import numpy as np

from stretto.collectives import called_on_gpus
from stretto.collectives.bound_on_gpus import BoundOnGpus
from stretto.collectives.communicator import BoundCollective
from stretto.collectives.native import (
    TARGET,
    Peers,
    Table,
    handler,
    is_prompt,
    skipped,
    start_helpers,
    table_of,
)
from stretto.collectives.ops import Collective

from ..engines.engine import (
    Array,
    CallingEngine,
    Column,
    Engine,
    Joined,
    Joins,
    LoadedAlone,
    LoadedTogether,
    StreamedEngine,
)
from ..errors import StrettoError
from ..job.progress import Raw
from ..options import Options
from ..program import CONTEXT, Run, Slot, calls_back
from .compute import over_in_time, within
from .context import Context
from .frame import Attempt, Frame, Hosted, Operation, named

# Seconds between two looks at devices that may have failed.
_LOOK = 0.05
# Seconds of a byte that is moved where other processes have the core too.
_BYTE_S = 3e-9
# What is left to do of a run, with the frame that has its operands.
Rest = Callable[[Frame], None]
_log = logging.getLogger("stretto")
_NOTHING: frozenset[int] = frozenset()
# Tables of runs that have failed. Their devices may still come, so they are kept.
_forsaken: list[Table] = []


def can_call(engine: Engine, options: Options) -> bool:
    """Whether segments may call collectives: unless segments are measured one by one, or what is skipped is
    poisoned."""
    observed = options.profile or options.poison_skipped
    return options.native and not observed and isinstance(engine, CallingEngine)


def register(engine: Engine) -> bool:
    """Make the handler known to the engine, and its helping threads; False if it takes none."""
    if not isinstance(engine, CallingEngine):
        return False
    if isinstance(engine, StreamedEngine):
        engine.register_handler(TARGET, called_on_gpus.handler())
        return True
    engine.register_handler(TARGET, handler())
    # One for each core: the engine's own threads sleep from the first collective at which their device waits.
    start_helpers(min(os.cpu_count() or 1, engine.num_devices))
    return True


class Region:
    """A run of a segment with sites, on all local devices of its program.

    ``bound[i]``: what the communicator made of site i's collective. ``peers``: the processes that run it too.
    """

    def __init__(
        self,
        context: Context,
        run: Run,
        bound: Sequence[BoundCollective | BoundOnGpus],
        peers: Peers,
    ) -> None:
        program = context.program
        segment = program.segments[run.segment]
        self.context = context
        self.instruction = run
        self.loaded: LoadedTogether = context.segments[run.segment]  # type: ignore[assignment]
        self.lane = context.lanes[0]
        self.collectives = [program.collectives[site] for site in segment.sites]
        # Of each site: messages and bytes that a call moves, and messages that it leaves out.
        self.payload = list(map(_payload, self.collectives, bound))
        self.what = f"segment {segment.name} of {program.name}"
        # Whether a run of one device may be made anew: what it moves takes no time beside a call, and nothing
        # is used up. ``_replays``: each site is called once, and gives its results again then.
        largest = max((t.nbytes for t in program.slot_types), default=0)
        short = is_prompt(self.collectives, segment.calls, segment.iterations, largest)
        alone = len(context.local) == 1
        self.called = context.called_back if calls_back(segment.module) else None
        self._resumable = (
            alone
            and short
            and isinstance(self.loaded, LoadedAlone)
            and not segment.donated
            and not segment.once
            and self.called is None
        )
        self._replays = self._resumable and all(times == 1 for times in segment.calls)
        # Whether devices may take long behind their last collective.
        self._goes_on = self.called is not None or not segment.ends_soon
        # `attempt` can be used of several devices too: none of them waits in the thread that begins them.
        tells = bool(run.outputs) or not self._goes_on
        self.prompt = self._resumable or (not alone and tells)
        if self._resumable:
            self._run_alone = cast("LoadedAlone", self.loaded).run_alone
            (self.ordinal,) = context.ordinals
        moved = sum(
            max(n, 1) * c.nbytes for n, c in zip(segment.calls, self.collectives, strict=True)
        )
        self._moves_s = moved * _BYTE_S
        # What a run counts where each site is called once: collectives, messages, left out, bytes.
        messages, skipped, nbytes = (sum(p[k] for p in self.payload) for k in range(3))
        self._once = len(self.payload), messages, skipped, nbytes
        self.peers = peers
        self._told = False  # that rows were dropped
        self._began = 0.0  # the run, if somebody wants to know
        self._looked = self._look  # made once
        # Of each site: its name, its line, and the processes in it, for the watchdog.
        self.described = [
            (f"{c.kind} %{c.name}", c.source, context.ranks(c)) for c in self.collectives
        ]
        self._make_table()

    def _make_table(self) -> None:
        """A table, and what each device's code is given first."""
        context, partitions = self.context, self.context.program.num_partitions
        positions = {id: i for i, id in enumerate(context.logical)}
        self.table = self._table(positions)
        first = [
            context.engine.put(
                np.array(
                    [self.table.address, i, logical % partitions, logical // partitions], np.uint64
                ),
                CONTEXT,
                ordinal,
            )
            for i, (logical, ordinal) in enumerate(context.local)
        ]
        loaded = self.loaded
        joins = len(first) > 1 and isinstance(loaded, Joins)
        self.first: Column = loaded.join(CONTEXT, first) if joins else first  # type: ignore[attr-defined]

    def _table(self, positions: dict[int, int]) -> Table:
        """For devices whose positions are by logical id."""
        apart = self.called is not None
        return table_of(self.collectives, positions, self.peers, resumed=self._replays, apart=apart)

    def operation(self, land: Callable[[list[Any], Slot], list[Any]]) -> Operation:
        """Run it, and wait until all devices have ended."""
        everyone = len(self.first)

        def run_region(frame: Frame) -> None:
            assert len(frame.active) == everyone
            self._begin_all(frame, land)
            with self._turning_away():
                self._run(frame)

        return run_region

    def attempt(self, land: Callable[[list[Any], Slot], list[Any]]) -> Attempt:
        """The same for a thread that must not wait: see `communication.Communication.attempt`. Only if it is
        `prompt`: a device that is alone runs here as far as the engine has it."""
        inputs, outputs = self.instruction.inputs, self.instruction.outputs
        if not self._resumable:
            return partial(self._attempt_together, land)

        def attempt(frame: Frame, until: float) -> Callable[[], None] | None:
            registers = frame.registers
            arrays = []
            for slot in inputs:
                register = registers[slot]
                column = land(registers, slot) if type(register) is Hosted else register
                arrays.append(column[0])
            results = self.run_here(arrays, until)
            if type(results) is not list:
                return partial(cast("Rest", results), frame)
            for slot, result in zip(outputs, results, strict=True):
                registers[slot] = [result]
            return None

        return attempt

    def _attempt_together(
        self, land: Callable[[list[Any], Slot], list[Any]], frame: Frame, until: float
    ) -> Callable[[], None] | None:
        """`attempt` for several devices."""
        is_ready = self.context.engine.is_ready
        with ExitStack() as listening:
            listening.enter_context(self._turning_away())
            self._begin_all(frame, land)
            results = self._enqueue(frame)
            in_time = self.table.wait(max(until - perf_counter(), 0.0))
            if not in_time or (self._goes_on and not over_in_time(results, is_ready, until)):
                return partial(within, listening.pop_all(), partial(self._end, frame, results))
            self._end(frame, results)
        frame.ends.clear()  # what is over has called everything
        return None

    def _turning_away(self) -> AbstractContextManager[None]:
        """Turn away devices that wait for one whose function has raised."""
        if self.called is None:
            return nullcontext()
        return self.called.listened(lambda error: self.table.abort(str(error)))

    def run_here(self, arrays: list[Array], until: float) -> list[Array] | Rest:
        """Run the only device in the thread that calls, which waits for others until ``until`` (of
        ``perf_counter``), or in what it runs for as long, and as its messages take.

        Gives its results, or what is left to do with the frame that has the operands: it blocks, and may be
        called by another thread. Only for one that may be made anew.
        """
        table, lane, instrument = self.table, self.lane, self.context.instrument
        progress = lane.progress
        try:
            self._begin(until - perf_counter() + self._moves_s)
            progress.watch(self._looked)
            lane.hand_over(table)
            results = self._run_alone(self.ordinal, [self.first[0], *arrays])
        except BaseException as error:
            table.stay()
            if not table.late:
                raise self._failed(error) from error
            results = []
        if table.completed() and self._replays:  # what follows otherwise, in short
            lane.take_back()
            lane.sequence = sequence = lane.sequence + len(self.payload)
            name, source, ranks = self.described[-1]
            progress.left((name, source, sequence, ranks, self.context.called, monotonic()))
            self._account_once()
            if instrument is not None:
                self._tell((0,))
            return results
        if table.late:
            return self._again
        if not (table.over or table.wait(max(until - perf_counter(), 0.0))):
            return lambda frame: self._end(frame, [[result] for result in results])
        if table.failure:
            raise self._failed(StrettoError(table.failure))
        self._leave()
        self._account((0,))
        return results

    def _begin(self, patience: float = math.inf) -> None:
        """A run begins, which is not to wait longer than ``patience`` seconds."""
        instrument = self.context.instrument
        if instrument is not None:
            self._began = perf_counter()
        self.table.begin(instrument is not None, patience)

    def _begin_all(self, frame: Frame, land: Callable[[list[Any], Slot], list[Any]]) -> None:
        """A run of all devices begins, each on a thread of the engine's; its operands are the engine's."""
        for slot in self.instruction.inputs:
            if type(frame.registers[slot]) is Hosted:
                land(frame.registers, slot)
        self._begin()
        self.lane.progress.watch(self._looked)
        self.lane.hand_over(self.table)

    def _again(self, frame: Frame) -> None:
        """Go on with a run that was given up."""
        self.table.resume()
        self._run(frame)

    def _run(self, frame: Frame) -> None:
        self._end(frame, self._enqueue(frame))

    def _enqueue(self, frame: Frame) -> Sequence[Column]:
        """Have all devices run. Gives their results, to come."""
        registers = frame.registers
        columns = [self.first, *(registers[slot] for slot in self.instruction.inputs)]
        try:
            if self.called is None:
                results = self.loaded.run_together(columns)
            else:
                results, end = self.loaded.run_together_with_end(columns)
                frame.ends.append(end)
        except BaseException as error:
            raise self._failed(error) from error
        columns.clear()
        for slot in self.instruction.donated:
            registers[slot] = None
        return results

    def _end(self, frame: Frame, results: Sequence[Column]) -> None:
        """Wait for a run that has been enqueued, and put its results into their registers."""
        try:
            self._await(results, frame)
        except BaseException as error:
            raise self._failed(error) from error
        self._leave()
        self._account(frame.active)
        for slot, result in zip(self.instruction.outputs, results, strict=True):
            frame.registers[slot] = result

    def _failed(self, error: BaseException) -> BaseException:
        """The run has ended by this error. Gives the one to be raised."""
        self._leave()
        self._forsake(str(error))
        return named(error, self.what)

    def _leave(self) -> None:
        self.lane.take_back()
        last = self._raw(len(self.described) - 1, self.table.executed, monotonic())
        self.lane.progress.end(last)

    def _look(self) -> Raw | None:
        """What the devices wait for other processes in, if they do."""
        waiting = self.table.waiting()
        return None if waiting is None else self._raw(waiting[0], self.table.executed, waiting[1])

    def _raw(self, site: int, executed: int, began: float) -> Raw:
        name, source, ranks = self.described[site]
        sequence = self.lane.sequence + executed
        return name, source, sequence, ranks, self.context.called, began

    def _forsake(self, reason: str) -> None:
        """Turn away the devices of a run that failed, whenever they come; later runs have another table."""
        self.table.abort(reason)
        _forsaken.append(self.table)
        self._make_table()

    def _await(self, results: Sequence[Column], frame: Frame) -> None:
        """Wait until the devices have ended; raise the error of the first that failed.

        One that fails by itself is seen now and then; those that wait for it are then turned away.
        """
        table, block = self.table, self.context.engine.block
        while not table.wait(_LOOK):
            self.context.interrupts.check(frame.interrupts)
            for array in (column for result in results[:1] for column in result):
                if self.context.engine.is_ready(array):
                    block(array)
        if table.failure:
            raise StrettoError(self._failure())
        self._block(results)

    def _failure(self) -> str:
        """Why devices were turned away."""
        return self.table.failure

    def _block(self, results: Sequence[Column]) -> None:
        """Wait for the results of devices that have come to their ends."""
        block = self.context.engine.block
        for result in results[:1]:
            if isinstance(result, Joined):
                result.block()
            else:
                for array in result:
                    block(array)

    def _account_once(self) -> None:
        """Count a run that called each site once."""
        counters = self.lane.counters
        collectives, messages, left_out, nbytes = self._once
        counters.seconds += self.table.seconds
        counters.collectives += collectives
        counters.messages += messages
        counters.skipped += left_out
        counters.nbytes += nbytes

    def _account(self, active: tuple[int, ...]) -> None:
        if self._replays and self.table.executed == len(self.payload):
            self._account_once()
        else:
            counters = self.lane.counters
            counters.seconds += self.table.seconds
            for calls, (messages, left_out, nbytes) in zip(
                self.table.calls(), self.payload, strict=True
            ):
                counters.collectives += calls
                counters.messages += calls * messages
                counters.skipped += calls * left_out
                counters.nbytes += calls * nbytes
        self.lane.sequence += self.table.executed
        if self.context.instrument is not None:
            self._tell(active)

    def _tell(self, active: tuple[int, ...]) -> None:
        """Tell the instrument of the collectives of a run, and of what the devices computed between them."""
        over = perf_counter()
        rows, dropped = self.table.rows()
        if dropped and not self._told:
            self._told = True
            _log.warning(
                "%s called collectives %d times in one run: the last %d are counted, but not in the trace",
                self.what,
                self.table.executed,
                dropped,
            )
        for site, _, began, ended in rows:
            collective, stream = self.collectives[site], self.lane.number
            for name, arguments in (
                ("collective_started", ()),
                ("collective_finished", (self.payload[site][2], ended - began)),
                ("collective_ran", (began, active, _NOTHING, ended)),
            ):
                tell = self.context.told(name, collective, stream)
                if tell is not None:
                    tell(*arguments)
        ran = self.context.told("segment_ran", self.context.program, self.instruction.segment)
        if ran is None:
            return
        now = self._began
        for began, ended in sorted(row[2:] for row in rows):
            self._ran(ran, now, began)
            now = max(now, ended)
        if not dropped:
            self._ran(ran, now, over)

    def _ran(self, tell: Callable[..., None], began: float, ended: float) -> None:
        if began < ended:
            for ordinal in self.context.ordinals:
                tell(ordinal, began, ended)


def _payload(collective: Collective, bound: Any) -> tuple[int, int, int]:
    """Messages that a call sends and leaves out, and bytes that it sends."""
    never = skipped(collective)
    messages, nbytes = bound.payload(never) if never else (bound.messages, bound.bytes)
    return messages, bound.messages - messages, nbytes
