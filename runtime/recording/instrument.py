"""`Instrument`: observes the executor; the one hook for traces, statistics and tests.

An executor made with an `Instrument` calls it as things happen; one made without pays nothing. Methods
are called from the dispatch thread and from stream threads, and must be quick and raise nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from stretto.collectives.ops import Collective

from ..program import Program
from .statistics import Profiled

SegmentRun = Callable[[int, list[Any]], list[Any]]


class Instrument:
    """Override what is of interest; every method does nothing here.

    ``run`` counts the executions of one executor from 1. ``stream`` is the stream's number. ``began`` is a
    time of ``perf_counter``. Collectives are objects of the program that was loaded.
    """

    def program_loaded(self, program: Program, local: tuple[tuple[int, int], ...]) -> None:
        """A program is ready to run on ``local``: (logical id, ordinal) pairs."""

    def program_started(self, program: Program, run: int) -> None:
        """The walk of a program begins; its arguments are issued."""

    def program_finished(self, program: Program, run: int, error: BaseException | None) -> None:
        """The walk has ended: everything is issued, or it failed."""

    def program_called(
        self,
        program: Program,
        segment: int,
        run: int,
        ordinal: int,
        began: float,
        outputs: Sequence[Any],
    ) -> None:
        """A program that is one segment on one local device was handed to the engine without a walk.

        Where this is not overridden, it is reported as a walk; if the engine refused it, always.
        """
        self.program_started(program, run)
        self.segment_issued(program, segment, ordinal)
        self.segment_handed(program, segment, ordinal, began, outputs)
        self.program_finished(program, run, None)

    def program_profiled(self, done: Profiled) -> None:
        """A program was measured (`profiling`)."""

    def segment_issued(self, program: Program, segment: int, ordinal: int) -> None:
        """A run of a segment was handed to the engine for one local device."""

    def segment_handed(
        self,
        program: Program,
        segment: int,
        ordinal: int,
        began: float,
        outputs: Sequence[Any],
    ) -> None:
        """The same run, with the time before it was handed over, and the engine's arrays."""

    def segment_ran(
        self, program: Program, segment: int, ordinal: int, began: float, ended: float
    ) -> None:
        """A part of a run of a segment that calls collectives, between two of them, is over."""

    def segment_skipped(self, program: Program, segment: int, ordinal: int) -> None:
        """A segment was not run on a local device, since its outputs there are not read."""

    def collective_started(self, collective: Collective, stream: int) -> None:
        """The operands are computed; the communicator is called."""

    def collective_finished(
        self, collective: Collective, stream: int, nbytes: int, seconds: float
    ) -> None:
        """The communicator has given the results. ``nbytes``: payload moved between devices."""

    def collective_ran(
        self,
        collective: Collective,
        stream: int,
        began: float,
        active: Sequence[int],
        skip: frozenset[int],
        ended: float | None = None,
    ) -> None:
        """The same call, for the local devices at the positions ``active``.

        ``skip``: the collective's pairs that moved nothing. For a send, its message was posted; for a
        receive, the time is that of waiting for it. ``ended``: when it was over, where that is known only
        now, as of a GPU's streams; None if now.
        """

    def collective_queued(self, collective: Collective, stream: int) -> None:
        """The walk has come to a start: the collective was given to its stream."""

    def collective_awaiting(self, collective: Collective, stream: int) -> None:
        """The walk has come to a wait, and what it waits for is not there."""

    def collective_awaited(
        self, collective: Collective, stream: int, queued: float, began: float
    ) -> None:
        """The walk has come through a wait, which it reached at ``began``.

        It had come to the start, and given the collective to its stream, at ``queued``.
        """

    # What the executor calls is made once, when a program is translated.

    def listener(self, name: str, *known: Any) -> Callable[..., None] | None:
        """The function that reports the event ``name``, with ``known`` as the first arguments of the method.

        It takes the other arguments. None if the event is not observed.
        """
        if getattr(type(self), name) is getattr(Instrument, name):
            return None
        method: Callable[..., None] = getattr(self, name)
        return partial(method, *known) if known else method

    def around_run(self, run: SegmentRun, program: Program, segment: int) -> SegmentRun:
        """A segment's ``run`` for walks, wrapped to report every call; ``run`` if calls are not observed."""
        issued = self.listener("segment_issued", program, segment)
        handed = self.listener("segment_handed", program, segment)
        if issued is None and handed is None:
            return run

        def watched(ordinal: int, arrays: list[Any]) -> list[Any]:
            began = perf_counter()
            outputs = run(ordinal, arrays)
            if issued is not None:
                issued(ordinal)
            if handed is not None:
                handed(ordinal, began, outputs)
            return outputs

        return watched

    def around_call(
        self, run: SegmentRun, program: Program, segment: int, next_run: Callable[[], int]
    ) -> SegmentRun:
        """The ``run`` of the only segment of a program, where it is handed over without a walk.

        ``next_run()`` numbers the program's executions.
        """
        called = self.program_called

        def watched(ordinal: int, arrays: list[Any]) -> list[Any]:
            number, began = next_run(), perf_counter()
            try:
                outputs = run(ordinal, arrays)
            except BaseException as error:
                self.program_started(program, number)
                self.program_finished(program, number, error)
                raise
            called(program, segment, number, ordinal, began, outputs)
            return outputs

        return watched


def told(instrument: Instrument | None, name: str, *known: Any) -> Callable[..., None] | None:
    """`Instrument.listener`, or None where there is no instrument."""
    return None if instrument is None else instrument.listener(name, *known)


class Instruments(Instrument):
    """Several instruments as one: every event is reported to each, in their order."""

    def __init__(self, *parts: Instrument) -> None:
        self.parts = parts

    def listener(self, name: str, *known: Any) -> Callable[..., None] | None:
        each = [part.listener(name, *known) for part in self.parts]
        listeners = [listener for listener in each if listener is not None]
        if len(listeners) < 2:
            return listeners[0] if listeners else None

        def tell(*arguments: Any) -> None:
            for listener in listeners:
                listener(*arguments)

        return tell


def _told(name: str) -> Callable[..., None]:
    def tell(self: Instruments, *arguments: Any) -> None:
        for part in self.parts:
            getattr(part, name)(*arguments)

    return tell


for _name in vars(Instrument):
    if _name.startswith(("program_", "segment_", "collective_")):
        setattr(Instruments, _name, _told(_name))
