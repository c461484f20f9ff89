"""Collectives that stay on the GPUs: enqueued by the walk, looked after by their stream.

The walk puts a collective onto CUDA's streams at its start, and at its wait has XLA's streams wait for it
(`runtime/engines/cuda_loans.py`); the host waits for nothing. The thread of the stream, which would run a
collective in the host's memory, only watches: it is in the collective, to the watchdog and in traces, until
the collective has passed on all local devices, and tells of errors that come later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from stretto.collectives.bound_on_gpus import BoundOnGpus, Buffers
from stretto.collectives.cuda import Queued, cuda
from stretto.collectives.types import TensorType

from ..engines.engine import StreamedEngine
from ..errors import StrettoError
from ..program import Start
from .call import Call
from .context import Context
from .device_times import Timed
from .frame import Frame, Hosted, named
from .stream import Event

if TYPE_CHECKING:
    from ..engines.cuda_loans import Loans, Mark

# Seconds between two looks at a collective that is under way: the first, and the most. An error is asked for
# at every look from the second on.
_FIRST_LOOK, _MOST = 1e-3, 2e-3
# Memory of collectives whose enqueuing failed: they may be under way in part.
_abandoned: list[Any] = []


class UnderWay:
    """A call on one device: what it borrows until XLA's stream waits for it.

    ``lent``: arrays that are read; ``rooms``: what is written to, results and then scratch; ``queue``: what
    is to come onto streams of the device next.
    """

    __slots__ = (
        "_loans",
        "_places",
        "lent",
        "mark",
        "marks",
        "ordinal",
        "queue",
        "rooms",
        "times",
    )

    def __init__(self, loans: Loans, ordinal: int, lent: list[Any], rooms: list[Any]) -> None:
        self._loans = loans
        self.ordinal = ordinal
        self.lent = lent
        self.rooms = rooms
        self.queue: list[Queued] = []
        self._places: list[int] = []  # addresses of the rooms
        self.mark: Mark | None = None
        self.marks: list[Mark] = []  # the same, for whoever watches
        self.times: list[Timed] = []  # beginning and end, where somebody wants to know

    def buffers(self, source: int, target: int, results: int) -> Buffers:
        """Addresses for a stream that reads what is lent and one that writes to the rooms, which wait for the
        arrays once they come to the queue. ``results``: how many rooms are not scratch."""
        lend, queue = self._loans.lend, self.queue
        operands = [lend(array, source, queue) for array in self.lent]
        self._places = places = [lend(array, target, queue) for array in self.rooms]
        if len(places) == results:
            return Buffers(operands, places)
        return Buffers(operands, places[:results], places[results])

    def marked(self, stream: int) -> None:
        """All of it is on the stream, with what is in the queue."""
        self.mark = self._loans.mark_in(self.queue, self.ordinal, stream)

    def flush(self) -> None:
        """Put the queue onto the streams."""
        queue, self.queue = self.queue, []
        if queue:
            cuda().enqueue(self._loans.device(self.ordinal), queue)

    def arrive(self, types: Sequence[TensorType], deferred: bool) -> list[Any]:
        """The results, for XLA; ends the loans. ``deferred``: only runs and loans read them."""
        mark, self.mark = self.mark, None
        assert mark is not None
        rooms = self.rooms[: len(types)]
        if deferred:
            results = self._loans.defer(self.ordinal, mark, rooms, self._places[: len(types)])
        else:
            results = self._loans.arrive(self.ordinal, mark, rooms, types)
        self.lent = self.rooms = []
        return results

    def __del__(self) -> None:
        if self.mark is not None:  # nobody waited for it, in a walk that has failed
            self._loans.hold(self.ordinal, self.mark)


class Enqueued:
    """What stands for the event of a collective: its wait takes ``result()``, which does not wait.

    ``finish``: what is left to do of the collective, whether or not anybody waits for it.
    """

    __slots__ = ("_finish", "_result", "since")
    done = True
    error: BaseException | None = None

    def __init__(self, result: Callable[[], Any], finish: Callable[[], None] | None = None) -> None:
        self._result = result
        self._finish = finish
        self.since = 0.0

    def result(self) -> Any:
        """The registers of the outputs. To be called once."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return self._result()

    def __del__(self) -> None:
        if self._finish is not None:  # nobody waited for it, in a walk that has failed
            with suppress(Exception):  # whoever watches the collective is told
                self._finish()


class OnGpus:
    """The calls of one collective that NCCL makes."""

    def __init__(
        self, context: Context, start: Start, call: Call, bound: BoundOnGpus, deferred: bool
    ) -> None:
        self._context, self._call, self._bound, self._deferred = context, call, bound, deferred
        self._inputs = start.inputs
        self._operands = [context.program.slot_types[slot] for slot in start.inputs]
        self._results = [context.program.slot_types[slot] for slot in start.outputs]
        self._loans = cast("StreamedEngine", context.engine).loans
        scratch = [TensorType("u8", (bound.scratch,))] if bound.scratch else []
        self._rooms = self._loans.rooms([*self._results, *scratch], context.ordinals)

    def enqueue(self, frame: Frame) -> Enqueued:
        """Put a call onto the streams. Raises what NCCL raises, named."""
        call, bound, loans, count = self._call, self._bound, self._loans, len(self._results)
        logical, ordinals = self._context.logical, self._context.ordinals
        columns = [
            landed(self._context, frame.registers[slot], type)
            for slot, type in zip(self._inputs, self._operands, strict=True)
        ]
        calls: dict[int, UnderWay] = {}
        buffers = {}
        gpus, lane = bound.gpus, call.lane
        with gpus.lock:
            gpus.finish()
            try:
                for position in frame.active:
                    ordinal, i = ordinals[position], logical[position]
                    stream = bound.stream(i)
                    lent = [column[position] for column in columns]
                    under_way = UnderWay(loans, ordinal, lent, self._rooms.take(ordinal))
                    calls[position] = under_way
                    buffers[i] = under_way.buffers(stream, stream, count)
                    under_way.flush()
                    if call.observed:
                        under_way.times.append(Timed(loans.device(ordinal), stream))
                rest = bound.begin(buffers, **call.skips(frame.iteration))
            except BaseException as error:
                abandon(calls)
                raise named(error, call.what) from error
            gpus.leave(partial(self._finish, calls, rest))
            watch = partial(self._watch, calls, frame.active, frame.iteration)
            watched = lane.stream.submit(watch)
        watched.add_callback(partial(tell, watched, lane.failed))
        made = partial(arrived, self._context, calls, self._results, self._deferred)
        return Enqueued(made, gpus.finish)

    def _finish(self, calls: Mapping[int, UnderWay], rest: Callable[[], None]) -> None:
        """The rest of `enqueue`, and marks of where the streams are then."""
        try:
            rest()
            for position, under_way in calls.items():
                stream = self._bound.stream(self._context.logical[position])
                if self._call.observed:
                    device = self._loans.device(under_way.ordinal)
                    under_way.times.append(Timed(device, stream))
                mark = self._loans.mark(under_way.ordinal, stream)
                under_way.mark = mark
                under_way.marks.append(mark)
        except BaseException as error:
            abandon(calls)
            raise named(error, self._call.what) from error

    def _watch(
        self, calls: Mapping[int, UnderWay], active: tuple[int, ...], iteration: int
    ) -> None:
        """A task of the stream: wait until the marks have passed. Raises what becomes of the collective."""
        call, bound, pause = self._call, self._bound, _FIRST_LOOK
        each = [under_way.marks for under_way in calls.values()]
        times = [under_way.times for under_way in calls.values()]
        del calls  # whoever waits for it gives the loans back
        options, began = call.enter(call.number(), iteration)
        try:
            while not all(marks and marks[0].passed() for marks in each):
                if pause > _FIRST_LOOK:
                    failure = bound.failure()
                    if failure:
                        raise StrettoError(failure)
                time.sleep(pause)
                pause = min(2 * pause, _MOST)
        except BaseException as error:
            raise named(error, call.what) from error
        finally:
            call.lane.progress.end()
        ended = None
        if call.observed and times:  # by the streams' own events, now that they have passed
            began = max(first.read() for first, _ in times)  # all local devices have come
            ended = max(last.read() for _, last in times)
        call.account(options, began, active, ended)


def arrived(
    context: Context,
    calls: Mapping[int, UnderWay],
    types: Sequence[TensorType],
    deferred: bool,
) -> list[list[Any]]:
    """The registers of the outputs: a run that needs them waits for the collective, on the device.
    ``deferred``: only runs and collectives on the GPUs' streams read them."""
    registers: list[list[Any]] = [[None] * len(context.ordinals) for _ in types]
    for position, under_way in calls.items():
        for register, array in zip(registers, under_way.arrive(types, deferred), strict=True):
            register[position] = array
    return registers


def landed(context: Context, register: Any, type: TensorType) -> Sequence[Any]:
    """A register of engine arrays."""
    if not isinstance(register, Hosted):
        return register
    put = context.engine.put
    return [
        None if host is None else put(host, type, ordinal)
        for host, ordinal in zip(register, context.ordinals, strict=True)
    ]


def abandon(calls: Any) -> None:
    """Keep the memory of calls whose enqueuing failed."""
    _abandoned.append(calls)


def tell(watched: Event, failed: Callable[[BaseException], None]) -> None:
    """Pass on the error of a task, if it has one."""
    if watched.error is not None:
        failed(watched.error)
