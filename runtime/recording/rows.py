"""What packs the rows of a trace: the contract between a `Recorder` and the plugin's `_capi.Rows`.

A `Recorder` makes one `Rows`, and of it an object for each program, segment and collective, with a method
for each of its events: all that does not change between calls is in the object. The
methods are those of `Instrument`, without what the object knows. The plugin's C module implements it
(`plugin/_rows.pxi`), which makes no Python objects; the same in Python, whose rows are equal byte for byte,
is in the tests (`tests/support/rows.py`). The head of `recorder` says when ends of segments are looked up.

Rows are packed as they stand in a file (`trace_file`), which leaves nothing for the garbage collector to
count or for a writer to convert. Programs called without a walk, which take microseconds, have a buffer of
their own, of records less than half as long.

Invariants: nothing here raises into the program; threads may call anything at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .instrument import SegmentRun

# The parts of events, one after the other, and those of calls.
Write = Callable[[Sequence[memoryview], Sequence[memoryview]], None]
# Of the times that a walk stands at a place: how many of the first are watched, and one in how many later.
EXACT = 4
EVERY = 64
# Seconds after a look before which another one would tell little.
LEAST = 100e-6


class ProgramRows(Protocol):
    """A program."""

    def started(self, run: int) -> None: ...

    def finished(self, run: int, error: BaseException | None) -> None: ...


class SegmentRows(Protocol):
    """A segment of a program."""

    def handed(self, ordinal: int, began: float, outputs: Sequence[Any]) -> None: ...

    def ran(self, ordinal: int, began: float, ended: float) -> None:
        """A part of the segment that is over."""
        ...

    def left_out(self, ordinal: int) -> None: ...

    def called(self, run: int, ordinal: int, began: float, outputs: Sequence[Any]) -> None: ...

    def around_run(self, run: SegmentRun) -> SegmentRun:
        """The segment's ``run``, wrapped so that every call becomes a row."""
        ...

    def around_call(self, run: SegmentRun, next_run: Callable[[], int]) -> SegmentRun:
        """The same for a segment that is all of its program. ``next_run()`` numbers runs that need more
        than one row."""
        ...


class CollectiveRows(Protocol):
    """A collective of a program on a stream."""

    def started(self) -> None: ...

    def ran(
        self,
        began: float,
        active: Sequence[int],
        skip: frozenset[int],
        ended: float | None = None,
    ) -> None: ...

    def awaiting(self) -> None: ...

    def awaited(self, queued: float, began: float) -> None: ...


class Rows(Protocol):
    """Rows of `trace_file.WIDTH` float64, and the segments that were running when last looked at."""

    def drain(self, write: Write) -> None:
        """Have ``write`` take what came since the last call, if anything did. For one thread at a time.

        It gets events and calls in parts, one after the other, which are its until it returns.
        """
        ...

    def take(self) -> tuple[bytes, bytes]:
        """What came since the last call: events, calls."""
        ...

    def program(self, number: int) -> ProgramRows:
        """The program with this number; -1 for one that is not known."""
        ...

    def segment(self, program: Any, index: int, smallest: int) -> SegmentRows:
        """A segment of a program. ``smallest``: the output that is kept, and asked whether it is computed."""
        ...

    def collective(self, program: int, index: int, stream: int, local: int) -> CollectiveRows:
        """A collective on a stream, of the program with this number, which has ``local`` devices here."""
        ...

    def last(self, ordinal: int) -> tuple[int, Any] | None:
        """The last segment that runs on a device: its number there, and its output; None if none runs."""
        ...

    def block_on(self, ordinal: int, number: int) -> None:
        """A thread waits for the segment with this number from now on. No device: for none."""
        ...

    def settle(self, ordinal: int, ended: int = -1) -> None:
        """Write down the segments that have ended on a device; that numbered ``ended`` is known to have."""
        ...


# rows(is_ready, local_devices, watch, number_of): ``is_ready(array)`` is the engine's. ``watch()`` is called
# where the ends of what runs (`Rows.last`) are to be seen as they come; ``number_of(skip)`` numbers a set of
# pairs.
MakeRows = Callable[
    [Callable[[Any], bool], int, Callable[[], None], Callable[[frozenset[int]], int]], Rows
]
