"""What there is to every call of a collective, beside the communicator's work and the walk's.

A `Lane` is a stream of the executor with all that goes with it; a `Call` numbers the calls of one collective
on its lane, tells the watchdog and the observer of them, counts what they move and what is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stretto.collectives.communicator import Communicator, Request
from stretto.collectives.ops import Collective

from ..job.progress import Progress
from ..program import Start
from ..program.valid import left_out
from ..recording.instrument import told
from ..recording.statistics import Counters
from .frame import Hosted
from .stream import Stream

if TYPE_CHECKING:
    from .communication import Communication

_NOTHING: frozenset[int] = frozenset()


class Lane:
    """A stream of the executor with what goes with it: progress, counters, sends under way."""

    __slots__ = ("communicator", "counters", "number", "progress", "sends", "sequence", "stream")

    def __init__(
        self, number: int, stream: Stream, communicator: Communicator, progress: Progress
    ) -> None:
        self.number = number
        self.stream = stream
        self.communicator = communicator
        self.progress = progress
        self.counters = Counters()
        self.sequence = 0
        self.sends: list[Request] = []

    def drain(self) -> None:
        """Wait until every send has been received. A task of this stream."""
        sends, self.sends = self.sends, []
        for request in sends:
            request.wait()


class Call:
    """What there is to every call of one collective, beside the communicator's work."""

    def __init__(self, communication: Communication, start: Start) -> None:
        collective = communication.program.collectives[start.collective]
        self.bound = communication.bound(start)
        self.lane = communication.lanes[start.stream]
        self.what = describe(collective)
        self._logical = communication.logical
        self._outputs = range(len(start.outputs))
        self._name, self._source = f"{collective.kind} %{collective.name}", collective.source
        self._ranks, self._called = communication.ranks(collective), communication.called
        self._skips = skipped_pairs(collective)
        instrument = communication.instrument
        self._started = told(instrument, "collective_started", collective, start.stream)
        self._finished = told(instrument, "collective_finished", collective, start.stream)
        self._ran = told(instrument, "collective_ran", collective, start.stream)
        self._payload = payload_of(self.bound)
        self._all_messages = getattr(self.bound, "messages", 0)

    def number(self) -> int:
        """The call's number in its stream."""
        lane = self.lane
        lane.sequence = sequence = lane.sequence + 1
        return sequence

    def enter(self, sequence: int, iteration: int) -> tuple[dict[str, frozenset[int]], float]:
        """The communicator is about to be called: its keyword arguments, and the time."""
        if self._started is not None:
            self._started()
        self.lane.progress.begin(self._name, self._source, sequence, self._ranks, self._called)
        return self._skips(iteration), perf_counter()

    def account(
        self, options: dict[str, frozenset[int]], began: float, active: tuple[int, ...]
    ) -> None:
        """It has given its results to the devices at these positions."""
        seconds = perf_counter() - began
        counters = self.lane.counters
        counters.seconds += seconds
        messages, nbytes = self._payload(options)
        counters.collectives += 1
        counters.messages += messages
        counters.skipped += self._all_messages - messages
        counters.nbytes += nbytes
        if self._finished is not None:
            self._finished(nbytes, seconds)
        if self._ran is not None:
            self._ran(began, active, options["skip"] if options else _NOTHING)

    def registers(self, results: Any, active: tuple[int, ...]) -> list[Hosted]:
        """The outputs' registers from what the communicator gave."""
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


def payload_of(bound: Any) -> Callable[[dict[str, frozenset[int]]], tuple[int, int]]:
    """Messages and bytes that this process gives in a call with these keyword arguments."""
    all_of_it = getattr(bound, "messages", 0), getattr(bound, "bytes", 0)
    count = getattr(bound, "payload", None)
    if count is None:
        return lambda options: all_of_it
    return lambda options: count(options["skip"]) if options else all_of_it


def skipped_pairs(collective: Collective) -> Callable[[int], dict[str, frozenset[int]]]:
    """Keyword arguments of a call in an iteration: ``skip``, the pairs that move nothing in it."""
    valid = collective.valid_iterations
    if not valid:
        nothing: dict[str, frozenset[int]] = {}
        return lambda iteration: nothing
    skips = left_out(valid)
    return lambda iteration: {"skip": skips(iteration)}
