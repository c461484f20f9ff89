"""Collectives of GPUs' arrays through the host's memory, without anybody waiting on the walk.

The walk enqueues all of it at the start: copies of the operands to page-locked memory, a wait for the host,
copies of the results back. The thread of the stream does the part in between: it waits until an operand has
come, has the communicator move it, and lets the copies of the result go on. Large collectives are cut into
pieces (`stretto.collectives.pieces`), so that one is communicated while the next comes and the last goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.collectives.communicator import BoundCollective
from stretto.collectives.cuda import COPY
from stretto.collectives.memory import as_bytes
from stretto.collectives.ops import Collective, Kind
from stretto.collectives.pieces import Piece
from stretto.collectives.staging import Block, Staging, await_all, pinned
from stretto.collectives.types import TensorType

from ..program import Start
from .call import Call
from .context import Context
from .frame import Frame, named
from .under_way import Borrower, Enqueued, UnderWay, abandon, tell

if TYPE_CHECKING:
    from ..engines.cuda_loans import Mark

_ALIGNED = 256


def can_be_staged(collective: Collective) -> bool:
    """Whether the communicator can move it while the GPU goes on. A reducer that is a program runs on the
    GPU, which may be waiting for its result; sends and receives have a start and an end of their own."""
    return collective.reducer is None and collective.kind not in (Kind.SEND, Kind.RECV)


@dataclass(slots=True)
class _Copies:
    """A call on one device: for each piece the mark of its operands, and the number that its results wait
    for. Its page-locked memory is that of ``block`` from ``begin`` on."""

    device: int
    block: Block
    begin: int
    marks: list[Mark]
    numbers: list[int]

    def views(self, types: Sequence[TensorType], places: Sequence[int]) -> list[np.ndarray]:
        """Arrays of these types at these places."""
        view, begin = self.block.view, self.begin
        return [view(begin + at, t.shape, t.numpy) for t, at in zip(types, places, strict=True)]


class Staged(Borrower):
    """The calls of one collective that go through the host's memory."""

    def __init__(
        self,
        context: Context,
        start: Start,
        call: Call,
        pieces: Sequence[tuple[Piece, BoundCollective]],
        staging: Staging,
        deferred: bool,
    ) -> None:
        super().__init__(context, start, call, deferred)
        self._pieces, self._staging = pieces, staging
        self._nbytes = 0
        # Offsets in the page-locked memory of the arrays of each piece.
        self._given = [self._places(piece.collective.operands) for piece, _ in pieces]
        self._made = [self._places(piece.collective.results) for piece, _ in pieces]

    def _places(self, types: Sequence[TensorType]) -> list[int]:
        places = []
        for type in types:
            places.append(self._nbytes)
            self._nbytes += -(-type.nbytes // _ALIGNED) * _ALIGNED
        return places

    def enqueue(self, frame: Frame) -> Enqueued:
        """Put a call onto the streams, and what the host does onto the executor's. Raises errors of CUDA."""
        context, call, staging = self._context, self._call, self._staging
        columns = self._columns(frame)
        calls: dict[int, UnderWay] = {}
        copies: dict[int, _Copies] = {}
        try:
            staging.check()
            with staging.lock:
                device = self._loans.device(context.ordinals[frame.active[0]])
                block = pinned.take(self._nbytes * len(frame.active), device, staging.check)
                for k, position in enumerate(frame.active):
                    calls[position] = under_way = self._borrow(columns, position)
                    copies[position] = self._copy(under_way, block, k * self._nbytes)
                # From here to the task nothing may wait for a stream, as what loads code or takes memory may:
                # these streams go on when the task says so.
                for under_way in calls.values():
                    under_way.flush()
                staging.held()
                carry = partial(self._carry, copies, frame.active, frame.iteration)
                watched = call.lane.stream.submit(carry)
        except BaseException as error:
            abandon(calls)
            failed = named(error, call.what)
            if any(copied.numbers for copied in copies.values()):
                call.lane.failed(failed)  # nobody will let those streams go on: the job ends
            raise failed from error
        marks = [under_way.mark for under_way in calls.values() if under_way.mark is not None]
        pinned.give_back(block, marks)
        watched.add_callback(partial(tell, watched, call.lane.failed))
        return Enqueued(partial(self._arrived, calls))

    def _copy(self, under_way: UnderWay, block: Block, begin: int) -> _Copies:
        """Queue the copies from one device, to a block from ``begin`` on, and those back to it behind what
        the host has yet to do."""
        staging, ordinal, queue = self._staging, under_way.ordinal, under_way.queue
        device, base = self._loans.device(ordinal), block.address + begin
        source, target = staging.streams(device)
        buffers = under_way.buffers(source, target, len(self._results))
        operands, rooms = buffers.operands, buffers.results
        marks, numbers = [], []
        for (piece, _), given in zip(self._pieces, self._given, strict=True):
            for n, at, to, nbytes in piece.given:
                queue.append((COPY, base + given[n] + to, operands[n] + at, nbytes, source))
            marks.append(self._loans.mark_in(queue, ordinal, source))
        for (piece, _), made in zip(self._pieces, self._made, strict=True):
            numbers.append(staging.hold_in(queue, device))
            for n, at, to, nbytes in piece.made:
                queue.append((COPY, rooms[n] + at, base + made[n] + to, nbytes, target))
        under_way.marked(target)
        return _Copies(device, block, begin, marks, numbers)

    def _carry(self, copies: dict[int, _Copies], active: tuple[int, ...], iteration: int) -> None:
        """A task of the stream: what the host does. Raises what becomes of the collective."""
        call, staging, logical = self._call, self._staging, self._context.logical
        number = call.number()
        try:
            await_all([c.marks[0].passed for c in copies.values()], staging.check)
            options, began = call.enter(number, iteration)
            run_options: Any = options
            try:
                for k, (piece, bound) in enumerate(self._pieces):
                    await_all([c.marks[k].passed for c in copies.values()], staging.check)
                    types, places = piece.collective.operands, self._given[k]
                    given = {logical[p]: c.views(types, places) for p, c in copies.items()}
                    results = bound.run(given, **run_options)
                    types, places = piece.collective.results, self._made[k]
                    for position, c in copies.items():
                        made = c.views(types, places)
                        for to, array in zip(made, results[logical[position]], strict=True):
                            as_bytes(to)[:] = as_bytes(np.ascontiguousarray(array))
                        staging.reach(c.device, c.numbers[k])
            finally:
                call.lane.progress.end()
        except BaseException as error:
            raise named(error, call.what) from error
        call.account(options, began, active)
