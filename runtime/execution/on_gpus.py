"""Collectives that stay on the GPUs: enqueued by the walk, looked after by their stream.

The walk puts a collective onto CUDA's streams at its start, and at its wait has XLA's streams wait for it
(`runtime/engines/cuda_loans.py`); the host waits for nothing. The thread of the stream, which would run a
collective in the host's memory, only watches: it is in the collective, to the watchdog and in traces, until
the collective has passed on all local devices, and tells of errors that come later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from stretto.collectives.bound_on_gpus import BoundOnGpus

from ..errors import StrettoError
from ..program import Start
from .call import Call
from .context import Context
from .device_times import Timed
from .frame import Frame, named
from .under_way import Borrower, Enqueued, UnderWay, abandon, tell

# Seconds between two looks at a collective that is under way: the first, and the most. An error is asked for
# at every look from the second on.
_FIRST_LOOK, _MOST = 1e-3, 2e-3


class OnGpus(Borrower):
    """The calls of one collective that NCCL makes."""

    def __init__(
        self, context: Context, start: Start, call: Call, bound: BoundOnGpus, deferred: bool
    ) -> None:
        super().__init__(context, start, call, deferred, bound.scratch)
        self._bound = bound

    def enqueue(self, frame: Frame) -> Enqueued:
        """Put a call onto the streams. Raises what NCCL raises, named."""
        call, bound, loans, count = self._call, self._bound, self._loans, len(self._results)
        logical, ordinals = self._context.logical, self._context.ordinals
        columns = self._columns(frame)
        calls: dict[int, UnderWay] = {}
        buffers = {}
        gpus, lane = bound.gpus, call.lane
        with gpus.lock:
            gpus.finish()
            try:
                for position in frame.active:
                    ordinal, i = ordinals[position], logical[position]
                    stream = bound.stream(i)
                    calls[position] = under_way = self._borrow(columns, position)
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
        return Enqueued(partial(self._arrived, calls), gpus.finish)

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
