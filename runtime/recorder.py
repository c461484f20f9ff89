"""What happens in an executor, written down as rows of numbers: the part that all traces share.

A `Recorder` is an instrument: threads append rows to one bytearray, packed as they stand in a file, which
leaves nothing for the garbage collector to count or for a writer to convert; appending is atomic. `trace`
writes them to files as they come, a profiler of JAX takes them at the end of its session.

Nobody is told when a segment ends. Whether it has is looked up whenever something else happens: another
segment is handed over, a collective has its operands. Where the walk stands at a wait while segments run
beside a collective, or comes to its end, a thread waits for the last of them. So the end of each stretch of
compute is known; ends within a stretch may not be. That thread takes the interpreter from the others when it
wakes, which costs more than all the rest: where the walk waits for a collective that has yet to get its
operands, the collective's start tells when they were computed, and nobody else needs to.

Of a segment that runs the smallest output is kept, to be asked. If it is donated meanwhile, another segment
came behind, whose end is then that of the stretch.

Invariant: nothing here raises into the program.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
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
_Running = tuple[int, int, int, float, Any]
# Looked up once: an enumeration's members are slow to get at.
_SEGMENT, _LEFT_OUT, _COLLECTIVE = map(int, (Kind.SEGMENT, Kind.LEFT_OUT, Kind.COLLECTIVE))
_QUEUED, _AWAITED, _PROGRAM = map(int, (Kind.QUEUED, Kind.AWAITED, Kind.PROGRAM))


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
        self._rows = bytearray()
        self._put = self._rows.extend
        # id of a loaded program -> its number, and of each segment the output that is smallest
        self._numbers: dict[int, tuple[int, list[int]]] = {}
        self._places: dict[int, tuple[int, int, int]] = {}  # id of a collective -> where it belongs
        self._kept: list[Program] = []  # so that no id is given twice
        self._names: dict[str, int] = {}
        self._set_numbers: dict[frozenset[int], int] = {}
        self._walks: dict[int, float] = {}
        self._lock = threading.Lock()  # numbers
        # By ordinal: segments that were running when last looked at, in order.
        self._running: list[deque[_Running]] = [deque() for _ in range(local_devices)]
        self._settling = threading.Lock()
        self._moving: set[int] = set()  # ids of collectives under way
        self._standing = False  # whether the walk stands at a wait
        # By ordinal: the last segment that the thread was told to wait for.
        self._watched: list[_Running | None] = [None] * local_devices
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
            number = self._names[program.name] = len(self.programs)
            self._kept.append(program)
            sizes = [[t.nbytes for t in s.outputs] for s in program.segments]
            smallest = [each.index(min(each)) if each else 0 for each in sizes]
            self._numbers[id(program)] = number, smallest
            for index, collective in enumerate(program.collectives):
                self._places[id(collective)] = number, index, len(local)
            bare = replace(
                program, segments=tuple(replace(s, module=b"") for s in program.segments)
            )
            self.programs.append((bare, local))

    def program_started(self, program: str, run: int) -> None:
        self._walks[run] = perf_counter()

    def program_finished(self, program: str, run: int, error: BaseException | None) -> None:
        now, number = perf_counter(), self._names.get(program, -1)
        begun = self._walks.pop(run, now)
        self._put(_row(_PROGRAM, number, run, 0, begun, now, float(error is not None)))
        self._await_running()

    def program_profiled(self, done: Profiled) -> None:
        self.profiles.append(done)

    def segment_handed(
        self, program: Program, segment: int, ordinal: int, began: float, outputs: Sequence[Any]
    ) -> None:
        number, smallest = self._numbers[id(program)]
        running = self._running[ordinal]
        if running:
            self._settle(ordinal)
        output = outputs[smallest[segment]] if outputs else None
        if not running and (output is None or self._engine.is_ready(output)):
            self._put(_row(_SEGMENT, number, segment, ordinal, began, perf_counter(), 0))
        else:
            running.append((number, segment, ordinal, began, output))

    def segment_skipped(self, program: str, segment: int, name: str, ordinal: int) -> None:
        now, number = perf_counter(), self._names.get(program, -1)
        self._put(_row(_LEFT_OUT, number, segment, ordinal, now, now, 0))

    def collective_started(self, collective: Collective, stream: int) -> None:
        self._moving.add(id(collective))
        if self._standing:
            self._await_running()
            return
        for ordinal, running in enumerate(self._running):
            if running:
                self._settle(ordinal)

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
        number, index, local = self._places[id(collective)]
        extra = ALL_ACTIVE if len(active) == local else sum(1 << p for p in active) % SET_UNIT
        if skip:
            extra += SET_UNIT * (1 + self._number_of(skip))
        self._put(_row(_COLLECTIVE, number, index, stream, began, now, extra))

    def collective_queued(self, collective: Collective, stream: int) -> None:
        now = perf_counter()
        number, index, _ = self._places[id(collective)]
        self._put(_row(_QUEUED, number, index, stream, now, now, 0))

    def collective_awaiting(self, collective: Collective, stream: int) -> None:
        # In this order, and the other way round where one starts: somebody looks.
        self._standing = True
        if self._moving:
            self._await_running()

    def collective_awaited(self, collective: Collective, stream: int, began: float) -> None:
        self._standing = False
        number, index, _ = self._places[id(collective)]
        self._put(_row(_AWAITED, number, index, stream, began, perf_counter(), 0))

    # How segments end.

    def _number_of(self, skip: frozenset[int]) -> int:
        number = self._set_numbers.get(skip)
        if number is None:
            with self._lock:
                number = self._set_numbers.setdefault(skip, len(self.sets))
                if number == len(self.sets):
                    self.sets.append(skip)
        return number

    def _settle(self, ordinal: int, ended: _Running | None = None) -> None:
        """Write down the segments that have ended on a device; ``ended`` is known to be one of them."""
        running = self._running[ordinal]
        if ended is None:
            if not self._settling.acquire(blocking=False):
                return  # somebody else looks
        else:
            self._settling.acquire()
        try:
            now = perf_counter()
            done: list[_Running] = []
            if ended is not None and ended in running:
                while not done or done[-1] is not ended:
                    done.append(running.popleft())
            while running and self._has_ended(running[0]):
                done.append(running.popleft())
            for index, (number, segment, _, began, _) in enumerate(done):
                end = now if index == len(done) - 1 else nan
                self._put(_row(_SEGMENT, number, segment, ordinal, began, end, 0))
        finally:
            self._settling.release()

    def _has_ended(self, running: _Running) -> bool:
        try:
            return running[4] is None or self._engine.is_ready(running[4])
        except Exception:  # donated meanwhile
            return True

    def _await_running(self) -> None:
        """The walk stops here: have a thread see when what still runs ends."""
        for ordinal, running in enumerate(self._running):
            if not running:
                continue
            self._settle(ordinal)
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
            with suppress(Exception):  # donated meanwhile, or failed
                if last[4] is not None:
                    self._engine.block(last[4])
            self._settle(last[2], last)
            del last
