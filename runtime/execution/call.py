"""The accounting of calls of collectives: numbers, counters, and reports to watchdog and instrument.

Sends and receives are calls too. A send is over when it is posted; a receive is counted when it is posted,
and over when its message has been awaited.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from stretto.collectives.communicator import BoundCollective, Request
from stretto.collectives.ops import Collective

from ..program import Start
from ..program.valid import left_out
from .context import Context
from .frame import Hosted

_NOTHING: frozenset[int] = frozenset()
# Keyword arguments of a call: ``skip``, the pairs that move nothing in it, if the collective ever skips any.
Options = dict[str, frozenset[int]]


class Call:
    """The calls of one collective on one stream.

    It numbers them, reports them to the watchdog and the instrument, and counts the messages that they send
    and skip. ``bound``: the collective as the communicator has bound it.
    """

    def __init__(self, context: Context, start: Start, bound: BoundCollective) -> None:
        collective = context.program.collectives[start.collective]
        self.bound = bound
        self.lane = context.lanes[start.stream]
        self.what = describe(collective)
        self._logical = context.logical
        self._outputs = range(len(start.outputs))
        self._name, self._source = f"{collective.kind} %{collective.name}", collective.source
        self._ranks, self._called = context.ranks(collective), context.called
        # ``skips(iteration)``: keyword arguments of the communicator's call in it.
        self.skips = _skipped_pairs(collective)
        self._started = context.told("collective_started", collective, start.stream)
        self._finished = context.told("collective_finished", collective, start.stream)
        self._ran = context.told("collective_ran", collective, start.stream)
        self.observed = self._ran is not None or self._finished is not None
        self._payload = _payload_of(bound)
        self._all_messages = getattr(bound, "messages", 0)

    def number(self) -> int:
        """The call's number in its stream."""
        lane = self.lane
        lane.sequence = sequence = lane.sequence + 1
        return sequence

    def enter(self, sequence: int, iteration: int) -> tuple[Options, float]:
        """Report that the communicator is about to be called. Gives its keyword arguments, and the time."""
        self._watch(sequence)
        return self.begin(iteration)

    def begin(self, iteration: int) -> tuple[Options, float]:
        """The same for a send or a receive that is posted: the thread cannot hang in it, so no watchdog."""
        if self._started is not None:
            self._started()
        return self.skips(iteration), perf_counter()

    def _watch(self, sequence: int) -> None:
        self.lane.progress.begin(self._name, self._source, sequence, self._ranks, self._called)

    def wait(self, request: Request) -> dict[int, list[Any]]:
        """Wait for a posted send or receive, under the eyes of the watchdog; gives the received arrays."""
        if request.test():
            return request.wait()
        self._watch(self.lane.sequence)
        try:
            return request.wait()
        finally:
            self.lane.progress.end()

    def count(self, options: Options) -> int:
        """Count a call and the messages that it sends; gives their bytes."""
        messages, nbytes = self._payload(options)
        counters = self.lane.counters
        counters.collectives += 1
        counters.messages += messages
        counters.skipped += self._all_messages - messages
        counters.nbytes += nbytes
        return nbytes

    def end(
        self,
        options: Options,
        nbytes: int,
        began: float,
        active: tuple[int, ...],
        ended: float | None = None,
    ) -> None:
        """Report the end of a call that moved ``nbytes``, for the devices at the positions ``active``.

        ``ended``: when that was, None if now.
        """
        seconds = (perf_counter() if ended is None else ended) - began
        self.lane.counters.seconds += seconds
        if self._finished is not None:
            self._finished(nbytes, seconds)
        if self._ran is not None:
            skip = options["skip"] if options else _NOTHING
            if ended is None:
                self._ran(began, active, skip)
            else:
                self._ran(began, active, skip, ended)

    def account(
        self,
        options: Options,
        began: float,
        active: tuple[int, ...],
        ended: float | None = None,
    ) -> None:
        """`count` and `end`, for a call whose results are there."""
        self.end(options, self.count(options), began, active, ended)

    def registers(self, results: Any, active: tuple[int, ...]) -> list[Hosted]:
        """The registers of the outputs: the communicator's results by position."""
        logical = self._logical
        if len(logical) == 1:
            return [Hosted((array,)) for array in results[logical[0]]]
        registers = [Hosted([None] * len(logical)) for _ in self._outputs]
        for position in active:
            for register, array in zip(registers, results[logical[position]], strict=True):
                register[position] = array
        return registers


def describe(collective: Collective) -> str:
    """``all-reduce %psum.3 at train.py:12``, for errors."""
    name = f" %{collective.name}" if collective.name else ""
    return f"{collective.kind}{name}{f' at {collective.source}' if collective.source else ''}"


def _payload_of(bound: Any) -> Callable[[Options], tuple[int, int]]:
    """Messages and bytes that this process gives in a call with these keyword arguments."""
    all_of_it = getattr(bound, "messages", 0), getattr(bound, "bytes", 0)
    count = getattr(bound, "payload", None)
    if count is None:
        return lambda options: all_of_it
    return lambda options: count(options["skip"]) if options else all_of_it


def _skipped_pairs(collective: Collective) -> Callable[[int], Options]:
    """Keyword arguments of a call in an iteration: ``skip``, the pairs that move nothing in it."""
    valid = collective.valid_iterations
    if not valid:
        nothing: Options = {}
        return lambda iteration: nothing
    skips = left_out(valid)
    return lambda iteration: {"skip": skips(iteration)}
