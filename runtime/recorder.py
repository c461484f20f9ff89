"""What happens in an executor, written down as rows of numbers: the part that all traces share.

A `Recorder` is an instrument: threads append tuples to a deque, which is atomic. `trace` writes them to files
as they come, a profiler of JAX takes them at the end of its session.

Nobody is told when a segment ends. Whether it has is looked up whenever something else happens: another
segment is handed over, a collective has its operands. Where the walk comes to a wait or to its end while
segments run, a thread waits for the last of them. So the end of each stretch of compute is known at little
cost; ends within a stretch may not be.

Invariant: nothing here raises into the program.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from queue import SimpleQueue
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

Row = tuple[float, ...]  # as in `trace_file`
# program, segment, ordinal, when it was handed over, its outputs
_Running = tuple[int, int, int, float, tuple[Any, ...]]


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
        self._rows: deque[Row] = deque()
        self._numbers: dict[int, int] = {}  # id of a loaded program -> its number
        self._places: dict[int, tuple[int, int, int]] = {}  # id of a collective -> where it belongs
        self._kept: list[Program] = []  # so that no id is given twice
        self._names: dict[str, int] = {}
        self._set_numbers: dict[frozenset[int], int] = {}
        self._walks: dict[int, float] = {}
        self._lock = threading.Lock()  # numbers
        # By ordinal: segments that were running when last looked at, in order.
        self._running: list[deque[_Running]] = [deque() for _ in range(local_devices)]
        self._settling = threading.Lock()
        self._pending: SimpleQueue[_Running | None] = SimpleQueue()
        self._watcher: threading.Thread | None = None

    def take(self) -> list[Row]:
        """The rows since the last call."""
        return [self._rows.popleft() for _ in range(len(self._rows))]

    def trace(self, header: Header) -> RankTrace:
        """What there is, as if it had been written to a file and read back."""
        programs = list(self.programs)
        rows = np.array(self.take(), np.float64).reshape(-1, WIDTH)
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
            number = len(self.programs)
            self._kept.append(program)
            self._numbers[id(program)] = self._names[program.name] = number
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
        self._rows.append((Kind.PROGRAM, number, run, 0, begun, now, float(error is not None)))
        self._await_running()

    def program_profiled(self, done: Profiled) -> None:
        self.profiles.append(done)

    def segment_handed(
        self, program: Program, segment: int, ordinal: int, began: float, outputs: Sequence[Any]
    ) -> None:
        number = self._numbers[id(program)]
        running = self._running[ordinal]
        if running:
            self._settle(ordinal)
        if not running and (not outputs or self._engine.is_ready(outputs[0])):
            self._rows.append((Kind.SEGMENT, number, segment, ordinal, began, perf_counter(), 0))
        else:
            running.append((number, segment, ordinal, began, tuple(outputs)))

    def segment_skipped(self, program: str, segment: int, name: str, ordinal: int) -> None:
        now, number = perf_counter(), self._names.get(program, -1)
        self._rows.append((Kind.LEFT_OUT, number, segment, ordinal, now, now, 0))

    def collective_started(self, collective: Collective, stream: int) -> None:
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
        number, index, local = self._places[id(collective)]
        extra = ALL_ACTIVE if len(active) == local else sum(1 << p for p in active) % SET_UNIT
        if skip:
            extra += SET_UNIT * (1 + self._number_of(skip))
        self._rows.append((Kind.COLLECTIVE, number, index, stream, began, now, extra))

    def collective_queued(self, collective: Collective, stream: int) -> None:
        now = perf_counter()
        number, index, _ = self._places[id(collective)]
        self._rows.append((Kind.QUEUED, number, index, stream, now, now, 0))

    def collective_awaiting(self, collective: Collective, stream: int) -> None:
        self._await_running()

    def collective_awaited(self, collective: Collective, stream: int, began: float) -> None:
        number, index, _ = self._places[id(collective)]
        self._rows.append((Kind.AWAITED, number, index, stream, began, perf_counter(), 0))

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
                self._rows.append((Kind.SEGMENT, number, segment, ordinal, began, end, 0))
        finally:
            self._settling.release()

    def _has_ended(self, running: _Running) -> bool:
        for array in running[4]:
            try:
                return self._engine.is_ready(array)
            except Exception:  # donated meanwhile: another output may tell
                continue
        return True

    def _await_running(self) -> None:
        """The walk stops here: have a thread see when what still runs ends."""
        for ordinal, running in enumerate(self._running):
            if running:
                self._settle(ordinal)
            try:
                last = running[-1]
            except IndexError:
                continue
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._watch, name="stretto-trace-segments", daemon=True
                )
                self._watcher.start()
            self._pending.put(last)

    def _watch(self) -> None:
        """Wait for segments in the order in which they were handed over."""
        while (last := self._pending.get()) is not None:
            for array in last[4]:
                try:
                    self._engine.block(array)
                except Exception:  # donated meanwhile, or failed
                    continue
                break
            self._settle(last[2], last)
            del last
