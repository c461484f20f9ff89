"""The rows of a trace as they come: the definition, in Python, of what the plugin packs in C.

`stretto.runtime.recording.rows` has the contract. Here ``put`` and ``put_call`` append any row, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from math import nan
from struct import Struct
from time import perf_counter
from typing import Any

from stretto.runtime.recording.instrument import SegmentRun
from stretto.runtime.recording.rows import EVERY, EXACT, LEAST, Write
from stretto.runtime.recording.trace_file import ALL_ACTIVE, CALL, SET_UNIT, WIDTH, Kind

_row = Struct(f"<{WIDTH}d").pack

# program, segment, when it was handed over, one of its outputs (None if it has none)
_Running = tuple[float, float, float, Any]


class Rows:
    """Rows of `WIDTH` float64, and the segments that were running when last looked at.

    ``is_ready(array)`` is the engine's. ``watch()`` is called where the ends of what runs (`last`) are to be
    seen as they come; ``number_of(skip)`` numbers a set of pairs. ``least``: see `LEAST`. ``clock`` is for
    tests; None: ``perf_counter``.
    """

    def __init__(
        self,
        is_ready: Callable[[Any], bool],
        local_devices: int,
        watch: Callable[[], None],
        number_of: Callable[[frozenset[int]], int],
        least: float = LEAST,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.is_ready = is_ready
        self.watch = watch
        self.number_of = number_of
        self.least = least
        self.now = perf_counter if clock is None else clock
        self.walks: dict[int, float] = {}  # when each run was begun
        self.moving = 0  # collectives under way
        self.standing = False  # whether the walk stands at a wait, and ends are to be watched
        # By ordinal: what runs, in order; how many have ended before that; when was looked.
        self.running: list[deque[_Running]] = [deque() for _ in range(local_devices)]
        self.ended = [0] * local_devices
        self.looked = [0.0] * local_devices
        self._data, self._calls = bytearray(), bytearray()
        self._settling = threading.Lock()
        self._blocking = (-1, 0)

    def put(self, *row: float) -> None:
        """Append a row."""
        self._data.extend(_row(*row))

    def put_call(self, program: int, segment: int, ordinal: int, begin: float, end: float) -> None:
        """Append a call of a program that is over. ``segment`` and ``ordinal``: less than 2**16."""
        self._calls.extend(CALL.pack(program % 2**32, segment, ordinal, begin, end))

    def drain(self, write: Write) -> None:
        """Have ``write`` take what came since the last call, if anything did. For one thread at a time.

        It gets events and calls in parts, one after the other, which are its until it returns.
        """
        events, calls = self.take()
        if events or calls:
            write([memoryview(events)], [memoryview(calls)])

    def take(self) -> tuple[bytes, bytes]:
        """The same: events, calls."""
        events, calls = bytes(self._data), bytes(self._calls)
        del self._data[: len(events)], self._calls[: len(calls)]
        return events, calls

    def program(self, number: int) -> ProgramRows:
        """The program with this number; -1 for one that is not known."""
        return ProgramRows(self, number)

    def segment(self, program: ProgramRows, index: int, smallest: int) -> SegmentRows:
        """A segment of it. ``smallest``: the output that is kept, to be asked whether it is computed."""
        return SegmentRows(self, program, index, smallest)

    def collective(self, program: int, index: int, stream: int, local: int) -> CollectiveRows:
        """A collective on a stream, of the program with this number, which has ``local`` devices here."""
        return CollectiveRows(self, program, index, stream, local)

    # How segments end.

    def last(self, ordinal: int) -> tuple[int, Any] | None:
        """The last segment that runs on a device: its number there, and its output; None if none runs."""
        running = self.running[ordinal]
        try:
            output = running[-1][3]
        except IndexError:
            return None
        return self.ended[ordinal] + len(running) - 1, output

    def block_on(self, ordinal: int, number: int) -> None:
        """A thread waits for the segment with this number from now on. No device: for none."""
        self._blocking = ordinal, number

    def settle(self, ordinal: int, ended: int = -1) -> None:
        """Write down the segments that have ended on a device; that numbered ``ended`` is known to have."""
        self._settle(ordinal, ended, False, True)

    def look(self, exact: bool = False) -> None:
        """See which segments have ended. ``exact``: the last of them has just now."""
        for ordinal, running in enumerate(self.running):
            if running:
                self._settle(ordinal, -1, exact, False)

    def _settle(self, ordinal: int, known: int, exact: bool, patient: bool) -> None:
        if not self._settling.acquire(blocking=patient):
            return  # somebody else is at it
        running, last = self.running[ordinal], None
        try:
            now = self.now()
            while running and (self.ended[ordinal] <= known or self.has_ended(running[0][3])):
                if last is not None:
                    self.put(Kind.SEGMENT, last[0], last[1], ordinal, last[2], nan, 0.0)
                last = running.popleft()
                self.ended[ordinal] += 1
            looked, self.looked[ordinal] = self.looked[ordinal], now
            if last is not None:
                exact = exact or self._blocking == (ordinal, self.ended[ordinal] - 1)
                since = 0.0 if exact else now - max(looked, last[2])
                self.put(Kind.SEGMENT, last[0], last[1], ordinal, last[2], now, since)
        finally:
            self._settling.release()

    def has_ended(self, output: Any) -> bool:
        try:
            return output is None or self.is_ready(output)
        except Exception:  # donated meanwhile
            return True


class ProgramRows:
    """A program, and how often its walk has come to its end while segments ran."""

    def __init__(self, rows: Rows, number: int) -> None:
        self.rows = rows
        self.number = number
        self._stops = 0

    def started(self, run: int) -> None:
        self.rows.walks[run] = self.rows.now()

    def finished(self, run: int, error: BaseException | None) -> None:
        rows, now = self.rows, self.rows.now()
        begun, failed = rows.walks.pop(run, now), 0.0 if error is None else 1.0
        rows.put(Kind.PROGRAM, self.number, run, 0.0, begun, now, failed)
        self.ends()

    def ends(self) -> None:
        """Its walk has come to its end."""
        rows = self.rows
        if any(rows.running):
            rows.look()
            stops, self._stops = self._stops, self._stops + 1
            if is_watched(stops):
                rows.watch()


class SegmentRows:
    """A segment of a program."""

    def __init__(self, rows: Rows, program: ProgramRows, index: int, smallest: int) -> None:
        self.rows = rows
        self.program = program
        self.index = index
        self.smallest = smallest

    def handed(self, ordinal: int, began: float, outputs: Sequence[Any]) -> None:
        rows = self.rows
        running = rows.running[ordinal]
        if running and began - rows.looked[ordinal] > rows.least:
            rows._settle(ordinal, -1, False, False)
        output = outputs[self.smallest] if outputs else None
        running.append((self.program.number, self.index, began, output))

    def ran(self, ordinal: int, began: float, ended: float) -> None:
        self.rows.put(Kind.SEGMENT, self.program.number, self.index, ordinal, began, ended, 0.0)

    def left_out(self, ordinal: int) -> None:
        now = self.rows.now()
        self.rows.put(Kind.LEFT_OUT, self.program.number, self.index, ordinal, now, now, 0.0)

    def called(self, run: int, ordinal: int, began: float, outputs: Sequence[Any]) -> None:
        self._called(lambda: run, ordinal, began, outputs)

    def _called(
        self, next_run: Callable[[], int], ordinal: int, began: float, outputs: Sequence[Any]
    ) -> None:
        rows, number = self.rows, self.program.number
        if not rows.running[ordinal] and (not outputs or rows.has_ended(outputs[self.smallest])):
            rows.put_call(number, self.index, ordinal, began, rows.now())
            return
        self.handed(ordinal, began, outputs)
        rows.put(Kind.PROGRAM, number, next_run(), 1.0, began, rows.now(), 0.0)
        self.program.ends()

    def around_run(self, run: SegmentRun) -> SegmentRun:
        """The segment's ``run``, every call of which is told."""
        now, handed = self.rows.now, self.handed

        def watched(ordinal: int, arrays: list[Any]) -> list[Any]:
            began = now()
            outputs = run(ordinal, arrays)
            handed(ordinal, began, outputs)
            return outputs

        return watched

    def around_call(self, run: SegmentRun, next_run: Callable[[], int]) -> SegmentRun:
        """The same of a segment that is all of its program. ``next_run()`` numbers runs of which more than a
        row is told."""
        now, called, program = self.rows.now, self._called, self.program

        def watched(ordinal: int, arrays: list[Any]) -> list[Any]:
            began = now()
            try:
                outputs = run(ordinal, arrays)
            except BaseException as error:
                number = next_run()
                program.started(number)
                program.finished(number, error)
                raise
            called(next_run, ordinal, began, outputs)
            return outputs

        return watched


class CollectiveRows:
    """A collective of a program on a stream, and how often the walk has stood at its wait."""

    def __init__(self, rows: Rows, program: int, index: int, stream: int, local: int) -> None:
        self.rows = rows
        self._place = program, index, stream
        self._local = local
        self._moving = False
        self._stops = 0

    def started(self) -> None:
        rows = self.rows
        if not self._moving:
            self._moving = True
            rows.moving += 1
        if any(rows.running):
            # Whoever begins it has waited for what ended last, if for anything.
            rows.look(exact=True)
            if rows.standing:
                rows.watch()

    def ran(
        self,
        began: float,
        active: Sequence[int],
        skip: frozenset[int],
        ended: float | None = None,
    ) -> None:
        rows = self.rows
        now = rows.now() if ended is None else ended
        if self._moving:
            self._moving = False
            rows.moving -= 1
        extra = ALL_ACTIVE
        if len(active) != self._local:
            extra = sum(1 << p for p in active) % SET_UNIT
        if skip:
            extra += SET_UNIT * (1 + rows.number_of(skip))
        rows.put(Kind.COLLECTIVE, *self._place, began, now, extra)

    def awaiting(self) -> None:
        rows = self.rows
        if any(rows.running):
            stops, self._stops = self._stops, self._stops + 1
            if is_watched(stops, self._place[1]):
                # In this order, and the other way round where one starts: somebody has them watched.
                rows.standing = True
                if rows.moving:
                    rows.look()
                    rows.watch()

    def awaited(self, queued: float, began: float) -> None:
        rows, now = self.rows, self.rows.now()
        rows.standing = False
        rows.put(Kind.AWAITED, *self._place, began, now, began - queued)
        if now - began > rows.least and any(rows.running):
            rows.look()


def is_watched(stops: int, index: int = 0) -> bool:
    """Whether ends are watched where the walk has stopped so often. A program's places take turns."""
    return stops < EXACT or (stops + index) % EVERY == 0
