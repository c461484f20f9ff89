"""Collectives whose messages leave before their turn on the stream has come.

While a stream waits for one collective, the next ones whose operands are there are posted. Otherwise the
link would idle from the end of one until a thread has been told of it and has begun the next: where one core
computes and communicates, for as long as the compute that the end has set free.

Invariants: collectives of a stream are posted in its order, at most `stream.LOOK_AHEAD` before their turn;
they end one after the other, and the watchdog, the counters and the instrument see them in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from stretto.collectives.communicator import Pending, PromptCollective

from ..engines.engine import Engine
from .call import Call
from .frame import Hosted, named


class AheadOfTurn:
    """One call of a collective, a task of its stream: `prepare` posts it, the call itself waits for it.

    ``views()`` gives the operands of all devices as host arrays, and waits for them.
    """

    def __init__(
        self,
        call: Call,
        engine: Engine,
        columns: Sequence[Any],
        views: Callable[[], dict[int, list[Any]]],
        active: tuple[int, ...],
        iteration: int,
    ) -> None:
        self._call, self._engine, self._columns, self._views = call, engine, columns, views
        self._active, self._iteration = active, iteration
        self._pending: Pending | None = None
        self._error: BaseException | None = None

    def prepare(self) -> bool:
        """Post it if its operands are there. An error of posting is raised when the turn has come."""
        if self._pending is None and self._error is None:
            try:
                is_ready = self._engine.is_ready
                for column in self._columns:
                    if type(column) is not Hosted and not all(map(is_ready, column)):
                        return False
                self._post(self._views())
            except BaseException as error:
                self._error = error
        return self._error is None

    def _post(self, operands: dict[int, list[Any]]) -> None:
        self._pending = cast("PromptCollective", self._call.bound).post(operands)

    def __call__(self) -> list[Hosted]:
        call = self._call
        sequence = call.number()
        try:
            if self._error is not None:
                raise self._error
            operands = self._views() if self._pending is None else None
            options, began = call.enter(sequence, self._iteration)
            try:
                if operands is not None:
                    self._post(operands)
                pending = cast("Pending", self._pending)
                look_ahead = call.lane.stream.look_ahead
                look_ahead()
                pending.wait(look_ahead)
            finally:
                call.lane.progress.end()
        except BaseException as error:
            raise named(error, call.what) from error
        call.account(options, began, self._active)
        return call.registers(pending.results, self._active)
