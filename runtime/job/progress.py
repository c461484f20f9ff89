"""The state of a stream, from which the watchdog explains why a job does not go on.

A stream writes its `Progress` around every call that may block; the watchdog reads it from another
thread. There is no lock: a state is one tuple, replaced by one attribute write, so that a reader sees
either the old or the new one. Writing costs about 0.1 us.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple


class Entry(NamedTuple):
    """One collective as a rank sees it, in plain data that other hosts can read.

    ``sequence`` counts the collectives of a stream from 1, including those this process has no part in,
    so that it can be compared between ranks. ``ranks`` are the processes that take part. ``age`` is the
    number of seconds since it began; for a completed one, since it ended. ``program`` is the program that
    it is part of, with the line that calls it.
    """

    name: str
    source: str
    sequence: int
    ranks: tuple[int, ...]
    age: float
    program: str = ""


# name, source, sequence, ranks, program, time.monotonic() of its beginning
Raw = tuple[str, str, int, tuple[int, ...], str, float]
# Looks at what compiled code waits in, from any thread.
Look = Callable[[], Raw | None]


class Snapshot(NamedTuple):
    """The state of one stream at one moment: the collective it is in, and the last completed one."""

    stream: int
    current: Entry | None
    last: Entry | None


class Progress:
    """The state of one stream. Written by the stream's thread, and, while it waits for compiled code, by
    functions that this calls back: they may run programs."""

    __slots__ = ("_current", "_ended", "_last", "_looks", "stream")

    def __init__(self, stream: int = 0) -> None:
        self.stream = stream
        self._current: Raw | Look | None = None
        self._last: Raw | None = None
        # Of compiled code that has the stream's collectives: what it calls back may leave it others within.
        self._looks: list[Look] = []
        self._ended = 0.0

    def begin(
        self, name: str, source: str, sequence: int, ranks: tuple[int, ...], program: str = ""
    ) -> None:
        """The stream enters a collective."""
        self._current = (name, source, sequence, ranks, program, monotonic())

    def watch(self, look: Look) -> None:
        """The stream leaves its collectives to compiled code. ``look`` gives the one that is waited in."""
        self._looks.append(look)
        self._current = look

    def left(self, last: Raw) -> None:
        """The stream has taken its collectives back from compiled code, at the time that ``last`` has."""
        self._last = last
        del self._looks[-1:]
        self._current = self._looks[-1] if self._looks else None
        self._ended = last[5]

    def end(self, last: Raw | None = None) -> None:
        """The stream has left the collective it was in, completed or failed; after `watch`, ``last``."""
        if last is not None:
            del self._looks[-1:]  # Ctrl-C may have come before there was one
            self._last = last
        elif not callable(self._current):
            self._last = self._current
        self._current = self._looks[-1] if self._looks else None
        self._ended = monotonic()

    def snapshot(self, now: float | None = None) -> Snapshot:
        """The state now, or as of ``now`` on the clock of ``time.monotonic()``."""
        now = monotonic() if now is None else now
        current = self._current  # read once: the stream may end it meanwhile
        if callable(current):
            current = current()
        return Snapshot(
            self.stream,
            _entry(current, now, current[5]) if current else None,
            _entry(self._last, now, self._ended) if self._last else None,
        )


def _entry(raw: Raw, now: float, since: float) -> Entry:
    return Entry(*raw[:4], age=max(0.0, now - since), program=raw[4])
