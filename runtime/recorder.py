"""What happens in an executor, written down as rows of numbers: the part that all traces share.

A `Recorder` is an instrument: threads append rows to one bytearray, packed as they stand in a file, which
leaves nothing for the garbage collector to count or for a writer to convert; appending is atomic. `trace`
writes them to files as they come, a profiler of JAX takes them at the end of its session.

Nobody is told when a segment ends. Whether it has is looked up whenever something else happens: another
segment is handed over, a collective begins, a wait is over. A row tells how long before its end the segment
was last seen to run. Where the walk stands at a wait while segments run beside a collective, or comes to its
end, nothing else may happen for long: there a thread waits for the last of them, and its end is exact. That
thread takes the interpreter and a core from the others when it wakes, which costs more than all the rest. So
it waits at the first `EXACT` times that the walk stands at each place, and at one in `EVERY` from then on:
who reads the trace takes the other stretches of compute to be as long as those, within what was seen
(`trace_events`).

Where the walk waits for a collective that has yet to get its operands, the collective's start tells when they
were computed, and nobody else needs to.

Of a segment that runs the smallest output is kept, to be asked. If it is donated meanwhile, another segment
came behind, whose end is then that of the stretch.

Invariant: nothing here raises into the program.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import nan
from queue import SimpleQueue
from struct import Struct
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from stretto.collectives.ops import Collective

from .instrument import Instrument
from .program import Program
from .trace_file import ALL_ACTIVE, SET_UNIT, WIDTH, Header, Kind, RankTrace

if TYPE_CHECKING:
    from .engine import Engine
    from .statistics import Profiled

_row = Struct(f"<{WIDTH}d").pack  # as in `trace_file`
# program, segment, ordinal, when it was handed over, one of its outputs
_Running = tuple[float, int, int, float, Any]
# Looked up once: an enumeration's members are slow to get at. All that goes into a row is quicker as a float.
_SEGMENT, _LEFT_OUT, _COLLECTIVE = map(float, (Kind.SEGMENT, Kind.LEFT_OUT, Kind.COLLECTIVE))
_AWAITED, _PROGRAM, _CALLED = map(float, (Kind.AWAITED, Kind.PROGRAM, Kind.CALLED))
_ALL_ACTIVE = float(ALL_ACTIVE)
# Of the times that a walk stands at a place: how many of the first are watched, and one in how many later.
EXACT = 4
EVERY = 16
# Seconds after a look before which another one would tell little.
LEAST = 100e-6


@dataclass(slots=True)
class _Place:
    """A place where the walk stops, and how often it has."""

    number: float  # of the program
    index: float = 0.0  # of a collective
    local: int = 0  # devices of the program that are here
    smallest: Sequence[int] = ()  # of a program: of each segment the output that is smallest
    stops: int = 0

    def stop(self) -> bool:
        """Whether this time the ends of segments are watched."""
        stops = self.stops
        self.stops = stops + 1
        # Places of a program take turns.
        return stops < EXACT or (stops + int(self.index)) % EVERY == 0


_NOWHERE = _Place(-1.0)


class Recorder(Instrument):
    """Collects rows, and the programs and sets of pairs that they name by their number.

    ``programs``: those that were loaded, their segments without modules, each with the (logical id, ordinal)
    of its local devices. ``sets``: pairs that moved nothing. ``profiles``: programs that were measured.
    """

    def __init__(self, engine: Engine, local_devices: int) -> None:
        self.programs: list[tuple[Program, tuple[tuple[int, int], ...]]] = []
        self.sets: list[frozenset[int]] = []
        self.profiles: list[Profiled] = []
        self._engine = engine
        self._is_ready = engine.is_ready
        self._rows = bytearray()
        self._put = self._rows.extend
        self._loaded: dict[int, _Place] = {}  # by id of a program
        self._places: dict[int, _Place] = {}  # by id of a collective
        self._kept: list[Program] = []  # so that no id is given twice
        self._names: dict[str, _Place] = {}  # the program that was last loaded under this name
        self._set_numbers: dict[frozenset[int], int] = {}
        self._walks: dict[int, float] = {}
        self._lock = threading.Lock()  # numbers
        # By ordinal: segments that were running when last looked at, in order.
        self._running: list[deque[_Running]] = [deque() for _ in range(local_devices)]
        self._looked = [0.0] * local_devices  # when that was
        self._settling = threading.Lock()
        self._moving: set[int] = set()  # ids of collectives under way
        self._standing = False  # whether the walk stands at a wait, and ends are to be watched
        # By ordinal: the last segment that the thread was told to wait for.
        self._watched: list[_Running | None] = [None] * local_devices
        self._blocking: _Running | None = None  # the one that it waits for
        self._pending: SimpleQueue[_Running | None] = SimpleQueue()
        self._watcher: threading.Thread | None = None

    def take(self) -> bytes:
        """The rows since the last call. For one thread at a time."""
        rows = bytes(self._rows)
        del self._rows[: len(rows)]
        return rows

    def trace(self, header: Header) -> RankTrace:
        """What there is, as if it had been written to a file and read back."""
        programs = list(self.programs)
        rows = np.frombuffer(self.take(), "<f8").reshape(-1, WIDTH).copy()
        rows[:, 4:6] += header.offset
        return RankTrace(
            header,
            [program for program, _ in programs],
            [local for _, local in programs],
            list(self.sets),
            rows,
            list(self.profiles),
        )

    def end(self) -> None:
        """Look a last time, and end the thread."""
        for ordinal in range(len(self._running)):
            self._settle(ordinal)
        if self._watcher is not None:
            self._pending.put(None)
            self._watcher.join(timeout=5.0)

    # What the executor tells.

    def program_loaded(self, program: Program, local: tuple[tuple[int, int], ...]) -> None:
        with self._lock:
            known = self._loaded.get(id(program))
            if known is not None and self.programs[int(known.number)][1] == local:
                return
            number = float(len(self.programs))
            self._kept.append(program)
            sizes = [[t.nbytes for t in s.outputs] for s in program.segments]
            smallest = [each.index(min(each)) if each else 0 for each in sizes]
            loaded = _Place(number, local=len(local), smallest=smallest)
            self._loaded[id(program)] = self._names[program.name] = loaded
            for index, collective in enumerate(program.collectives):
                self._places[id(collective)] = _Place(number, float(index), len(local))
            bare = replace(
                program, segments=tuple(replace(s, module=b"") for s in program.segments)
            )
            self.programs.append((bare, local))

    def program_started(self, program: str, run: int) -> None:
        self._walks[run] = perf_counter()

    def program_finished(self, program: str, run: int, error: BaseException | None) -> None:
        now, place = perf_counter(), self._names.get(program, _NOWHERE)
        begun = self._walks.pop(run, now)
        failed = 0.0 if error is None else 1.0
        self._put(_row(_PROGRAM, place.number, run, 0.0, begun, now, failed))
        self._walk_ends(place)

    def program_called(
        self, program: Program, segment: int, run: int, ordinal: int, began: float, outputs: Any
    ) -> None:
        place = self._loaded[id(program)]
        if not self._running[ordinal] and (
            not outputs or self._is_ready(outputs[place.smallest[segment]])
        ):
            self._put(_row(_CALLED, place.number, segment, ordinal, began, perf_counter(), run))
        else:
            self.segment_handed(program, segment, ordinal, began, outputs)
            now = perf_counter()
            self._put(_row(_PROGRAM, place.number, run, 1.0, began, now, 0.0))
            self._walk_ends(place)

    def program_profiled(self, done: Profiled) -> None:
        self.profiles.append(done)

    def segment_handed(
        self, program: Program, segment: int, ordinal: int, began: float, outputs: Sequence[Any]
    ) -> None:
        place, running = self._loaded[id(program)], self._running[ordinal]
        if running and began - self._looked[ordinal] > LEAST:
            self._settle(ordinal)
        output = outputs[place.smallest[segment]] if outputs else None
        running.append((place.number, segment, ordinal, began, output))

    def segment_skipped(self, program: str, segment: int, name: str, ordinal: int) -> None:
        now, number = perf_counter(), self._names.get(program, _NOWHERE).number
        self._put(_row(_LEFT_OUT, number, segment, ordinal, now, now, 0.0))

    def collective_started(self, collective: Collective, stream: int) -> None:
        self._moving.add(id(collective))
        if any(self._running):
            # Whoever begins it has waited for what ended last, if for anything.
            self._look(exact=True)
            if self._standing:
                self._await_running()

    def collective_ran(
        self,
        collective: Collective,
        stream: int,
        began: float,
        active: Sequence[int],
        skip: frozenset[int],
    ) -> None:
        now = perf_counter()
        self._moving.discard(id(collective))
        place = self._places[id(collective)]
        extra = _ALL_ACTIVE
        if len(active) != place.local:
            extra = float(sum(1 << p for p in active) % SET_UNIT)
        if skip:
            extra += SET_UNIT * (1 + self._number_of(skip))
        self._put(_row(_COLLECTIVE, place.number, place.index, stream, began, now, extra))

    def collective_awaiting(self, collective: Collective, stream: int) -> None:
        if any(self._running) and self._places[id(collective)].stop():
            # In this order, and the other way round where one starts: somebody has them watched.
            self._standing = True
            if self._moving:
                self._look()
                self._await_running()

    def collective_awaited(
        self, collective: Collective, stream: int, queued: float, began: float
    ) -> None:
        now, place = perf_counter(), self._places[id(collective)]
        self._standing = False
        self._put(_row(_AWAITED, place.number, place.index, stream, began, now, began - queued))
        if now - began > LEAST and any(self._running):
            self._look()

    # How segments end.

    def _number_of(self, skip: frozenset[int]) -> int:
        number = self._set_numbers.get(skip)
        if number is None:
            with self._lock:
                number = self._set_numbers.setdefault(skip, len(self.sets))
                if number == len(self.sets):
                    self.sets.append(skip)
        return number

    def _look(self, exact: bool = False) -> None:
        """See which segments have ended. ``exact``: the last of them has just now."""
        for ordinal, running in enumerate(self._running):
            if running:
                self._settle(ordinal, exact=exact)

    def _walk_ends(self, place: _Place) -> None:
        if any(self._running):
            self._look()
            if place.stop():
                self._await_running()

    def _settle(self, ordinal: int, ended: _Running | None = None, exact: bool = False) -> None:
        """Write down the segments that have ended on a device; ``ended`` is known to be one of them."""
        running, last = self._running[ordinal], None
        with self._settling:
            now = perf_counter()
            known = ended is not None and ended in running
            while running and (known or self._has_ended(running[0])):
                if last is not None:
                    self._put(_row(_SEGMENT, last[0], last[1], ordinal, last[3], nan, 0.0))
                last = running.popleft()
                known = known and last is not ended
            looked, self._looked[ordinal] = self._looked[ordinal], now
            if last is not None:
                began = last[3]
                since = 0.0 if exact or last is self._blocking else now - max(looked, began)
                self._put(_row(_SEGMENT, last[0], last[1], ordinal, began, now, since))

    def _has_ended(self, running: _Running) -> bool:
        try:
            return running[4] is None or self._is_ready(running[4])
        except Exception:  # donated meanwhile
            return True

    def _await_running(self) -> None:
        """The walk stops here: have a thread see when what still runs ends."""
        for ordinal, running in enumerate(self._running):
            try:
                last = running[-1]
            except IndexError:
                continue
            if last is self._watched[ordinal]:
                continue
            self._watched[ordinal] = last
            if self._watcher is None:
                with self._lock:
                    self._begin_watching()
            self._pending.put(last)

    def _begin_watching(self) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch, name="stretto-trace-segments", daemon=True
            )
            self._watcher.start()

    def _watch(self) -> None:
        """Wait for segments in the order in which they were handed over."""
        while (last := self._pending.get()) is not None:
            if self._has_ended(last):  # somebody else may have seen it; when, nobody knows
                self._settle(last[2])
                continue
            self._blocking = last
            with suppress(Exception):  # donated meanwhile, or failed
                self._engine.block(last[4])
            self._settle(last[2], last)
            self._blocking = None
            del last
