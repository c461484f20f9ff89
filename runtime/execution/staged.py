"""Collectives of GPUs' arrays through the host's memory, without stopping what the GPU computes meanwhile.

At a collective's start the walk enqueues copies of the operands to page-locked memory. The thread of the
stream does the rest: it waits until an operand has come, has the communicator move it, and enqueues the
copies of the result back. Large collectives are cut into pieces (`stretto.collectives.pieces`), so that one
is communicated while the next comes and the last goes. The walk waits for that thread at the collective's
wait, and not before.

No stream waits for the host. One that did would stop whoever waits for all streams, as the driver does where
code is loaded or given up and memory is taken; and where jaxlib asks for that with the GIL held, nobody could
let the stream go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

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
from .under_way import Borrower, Moving, UnderWay, abandon

_ALIGNED = 256


def can_be_staged(collective: Collective) -> bool:
    """Whether the communicator can move it while the GPU goes on. A reducer that is a program runs on the
    GPU, which may be waiting for its result; sends and receives have a start and an end of their own."""
    return collective.reducer is None and collective.kind not in (Kind.SEND, Kind.RECV)


@dataclass(slots=True)
class _Copies:
    """A call on one device: ``come``, for each piece the number that says that its operands are there, and
    ``rooms``, where results go. Its page-locked memory is that from ``begin`` on of the call's ``block``."""

    under_way: UnderWay
    device: int
    block: Block
    begin: int
    rooms: Sequence[int]
    come: list[int]

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

    def enqueue(self, frame: Frame) -> Moving:
        """Put the copies of a call onto the streams, the host's part onto the executor's. Raises what CUDA
        does."""
        context, call, staging = self._context, self._call, self._staging
        columns = self._columns(frame)
        copies: dict[int, _Copies] = {}
        calls: dict[int, UnderWay] = {}
        try:
            staging.check()
            with staging.lock:
                device = self._loans.device(context.ordinals[frame.active[0]])
                block = pinned.take(self._nbytes * len(frame.active), device, staging.check)
                for k, position in enumerate(frame.active):
                    calls[position] = under_way = self._borrow(columns, position)
                    copies[position] = self._copy(under_way, block, k * self._nbytes)
                    under_way.flush()
                carry = partial(self._carry, copies, frame.active, frame.iteration)
                moved = call.lane.stream.submit(carry)
        except BaseException as error:
            abandon(calls)
            raise named(error, call.what) from error
        return Moving(moved, partial(self._arrived, calls))

    def _copy(self, under_way: UnderWay, block: Block, begin: int) -> _Copies:
        """Queue the copies from one device, to a block from ``begin`` on."""
        staging, queue = self._staging, under_way.queue
        device, base = self._loans.device(under_way.ordinal), block.address + begin
        source, target = staging.streams(device)
        buffers = under_way.buffers(source, target, len(self._results))
        come = []
        for (piece, _), given in zip(self._pieces, self._given, strict=True):
            for n, at, to, nbytes in piece.given:
                queue.append((COPY, base + given[n] + to, buffers.operands[n] + at, nbytes, source))
            come.append(staging.tell_in(queue, device))
        return _Copies(under_way, device, block, begin, buffers.results, come)

    def _carry(self, copies: dict[int, _Copies], active: tuple[int, ...], iteration: int) -> None:
        """A task of the stream: what the host does. Raises what becomes of the collective."""
        call, logical = self._call, self._context.logical
        number = call.number()
        try:
            self._await(copies, 0)
            options, began = call.enter(number, iteration)
            run_options: Any = options
            try:
                for k, (piece, bound) in enumerate(self._pieces):
                    self._await(copies, k)
                    types, places = piece.collective.operands, self._given[k]
                    given = {logical[p]: c.views(types, places) for p, c in copies.items()}
                    results = bound.run(given, **run_options)
                    for position, c in copies.items():
                        self._return(c, k, results[logical[position]])
            finally:
                call.lane.progress.end()
        except BaseException as error:
            abandon([c.under_way for c in copies.values()])
            raise named(error, call.what) from error
        marks = [c.under_way.mark for c in copies.values() if c.under_way.mark is not None]
        pinned.give_back(next(iter(copies.values())).block, marks)
        call.account(options, began, active)

    def _await(self, copies: dict[int, _Copies], k: int) -> None:
        """Wait for the operands of a piece."""
        staging = self._staging
        come = [partial(staging.has_come, c.device, c.come[k]) for c in copies.values()]
        await_all(come, staging.check)

    def _return(self, copies: _Copies, k: int, arrays: Sequence[np.ndarray]) -> None:
        """Enqueue the copies of a piece's results to one device, with a mark behind those of the last."""
        piece, _ = self._pieces[k]
        under_way, places = copies.under_way, self._made[k]
        made = copies.views(piece.collective.results, places)
        for room, array in zip(made, arrays, strict=True):
            as_bytes(room)[:] = as_bytes(np.ascontiguousarray(array))
        _, target = self._staging.streams(copies.device)
        base = copies.block.address + copies.begin
        for n, at, to, nbytes in piece.made:
            copy = (COPY, copies.rooms[n] + at, base + places[n] + to, nbytes, target)
            under_way.queue.append(copy)
        if k == len(self._pieces) - 1:
            under_way.marked(target)
        under_way.flush()
