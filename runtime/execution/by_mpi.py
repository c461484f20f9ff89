"""Collectives of GPUs' arrays that MPI does on their memory, where its library takes that.

The walk enqueues what is copied first and marks how far the streams have come. The thread of the stream
waits for the marks, which say that operands are computed and that memory is free, and calls MPI. The walk
waits for MPI at the collective's wait, and puts what is left onto the streams.

Nothing on the GPU waits for MPI meanwhile: MPI libraries allocate and free device memory and lock pages in
their calls, and these may wait for all streams.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from stretto.collectives.bound_on_gpus import Buffers
from stretto.collectives.gpu_mpi import BoundOnDevices, Plan
from stretto.collectives.staging import Staging, await_all

from ..program import Start
from .call import Call
from .context import Context
from .frame import Frame, named
from .under_way import Borrower, Moving, UnderWay, abandon

if TYPE_CHECKING:
    from ..engines.cuda_loans import Mark


class ByMpi(Borrower):
    """The calls of one collective that MPI makes on the GPUs' memory."""

    def __init__(
        self,
        context: Context,
        start: Start,
        call: Call,
        bound: BoundOnDevices,
        staging: Staging,
        deferred: bool,
    ) -> None:
        super().__init__(context, start, call, deferred, bound.scratch)
        self._bound, self._staging = bound, staging

    def enqueue(self, frame: Frame) -> Moving:
        """Put a call onto the streams, and MPI's part onto the executor's. Raises errors of CUDA."""
        context, call, bound = self._context, self._call, self._bound
        logical, count = context.logical, len(self._results)
        columns = self._columns(frame)
        calls: dict[int, UnderWay] = {}
        buffers: dict[int, Buffers] = {}
        options = call.skips(frame.iteration)
        try:
            self._staging.check()
            plan = bound.plan({logical[p]: None for p in frame.active}, **options)
            with self._staging.lock:
                for position in frame.active:
                    stream = self._stream(position)
                    calls[position] = under_way = self._borrow(columns, position)
                    buffers[logical[position]] = under_way.buffers(stream, stream, count)
                    under_way.flush()
                marks = self._before(plan, buffers, frame.active)
        except BaseException as error:
            abandon(calls)
            raise named(error, call.what) from error
        exchange = partial(self._exchange, plan, buffers, marks, calls, frame.active)
        moved = call.lane.stream.submit(partial(exchange, frame.iteration))
        return Moving(moved, partial(self._finish, plan, buffers, calls))

    def _stream(self, position: int) -> int:
        return self._staging.streams(self._loans.device(self._context.ordinals[position]))[0]

    def _before(
        self, plan: Plan, buffers: Mapping[int, Buffers], active: tuple[int, ...]
    ) -> list[Mark]:
        """Enqueue the copies ahead of the messages; marks behind them."""
        loans, logical, ordinals = self._loans, self._context.logical, self._context.ordinals
        position_of = {logical[p]: p for p in active}
        # Of the devices that others copy from: when their operands are there.
        lent: dict[int, Mark] = {}
        for sources in plan.awaited.values():
            for i in sources - lent.keys():
                lent[i] = loans.mark(ordinals[position_of[i]], self._stream(position_of[i]))
        marks = []
        for i, position in position_of.items():
            stream = self._stream(position)
            for source in plan.awaited.get(i, ()):
                loans.follow(ordinals[position], stream, lent[source])
            self._bound.before(plan, i, buffers, stream)
            marks.append(loans.mark(ordinals[position], stream))
        return marks

    def _exchange(
        self,
        plan: Plan,
        buffers: Mapping[int, Buffers],
        marks: list[Mark],
        calls: Mapping[int, UnderWay],
        active: tuple[int, ...],
        iteration: int,
    ) -> None:
        """A task of the stream: what MPI does. ``calls`` own the memory. Raises what becomes of it."""
        call, staging = self._call, self._staging
        number = call.number()
        try:
            await_all([mark.passed for mark in marks], staging.check)
            options, began = call.enter(number, iteration)
            try:
                self._bound.exchange(plan, buffers, staging.check)
            finally:
                call.lane.progress.end()
        except BaseException as error:
            abandon(calls)  # MPI may still write to it
            raise named(error, call.what) from error
        call.account(options, began, active)

    def _finish(
        self, plan: Plan, buffers: Mapping[int, Buffers], calls: Mapping[int, UnderWay]
    ) -> list[list[Any]]:
        """The registers of the outputs, once MPI is through: what is copied then, and what waits for that."""
        loans, logical = self._loans, self._context.logical
        try:
            with self._staging.lock:
                for position, under_way in calls.items():
                    stream = self._stream(position)
                    self._bound.after(plan, logical[position], buffers, stream)
                    under_way.mark = loans.mark(under_way.ordinal, stream)
            by_id = {logical[p]: under_way for p, under_way in calls.items()}
            for i, readers in plan.readers.items():
                for reader in readers:
                    mark = by_id[reader].mark
                    assert mark is not None
                    loans.hold(by_id[i].ordinal, mark)
        except BaseException as error:
            abandon(calls)
            raise named(error, self._call.what) from error
        return self._arrived(calls)
