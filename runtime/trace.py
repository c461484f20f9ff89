"""``STRETTO_TRACE=dir``: each rank writes what its streams do to a file of its own (`trace_file`).

`Trace` is an instrument: threads append tuples to a deque, which is atomic, and a thread of its own writes
them out twice a second, at the end of the process, and when the job has failed. So a process that is killed
loses half a second.

Nobody is told when a segment ends. Whether it has is looked up whenever something else happens: another
segment is handed over, a collective has its operands. Where the walk comes to a wait or to its end while
segments run, a thread waits for the last of them. So the end of each stretch of compute is known at little
cost; ends within a stretch may not be.

Invariant: nothing here raises into the program; a folder that cannot be written is an error at the start.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stretto.collectives.ops import Collective

from .errors import WorldError
from .instrument import Instrument
from .program import Program
from .trace_file import (
    ALL_ACTIVE,
    SET_UNIT,
    Header,
    Kind,
    beginning,
    chunk,
    events_chunk,
    file_name,
    program_chunk,
)

if TYPE_CHECKING:
    from .engine import Engine
    from .world import World

WRITE_EVERY = 0.5
_log = logging.getLogger("stretto")
_Row = tuple[float, ...]
# program, segment, ordinal, when it was handed over, its outputs
_Running = tuple[int, int, int, float, tuple[Any, ...]]


def begin(world: World, engine: Engine) -> Trace | None:
    """The trace of this rank, if ``STRETTO_TRACE`` asks for one. Raises `WorldError`."""
    folder = world.options.trace
    if not folder:
        return None
    header = Header(
        rank=world.rank,
        size=world.size,
        host=world.host,
        pid=os.getpid(),
        local_devices=world.local_devices,
        engine=world.options.engine,
        offset=world.clock_offset,
        started=time.time(),
        costs=world.costs.text,
    )
    path = Path(folder) / file_name(world.rank)
    trace = _begun.get(path)
    if trace is None:  # a process that makes its devices anew goes on with its file
        trace = _begun[path] = Trace(Path(folder), header, engine)
        world.on_failure(lambda error: trace.write())
    return trace


_begun: dict[Path, Trace] = {}


class Trace(Instrument):
    """Writes ``folder/rank-….trace``; see the head of this file. `close` ends it."""

    def __init__(self, folder: Path, header: Header, engine: Engine) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / file_name(header.rank), "wb", buffering=0)  # noqa: SIM115
            self._file.write(beginning(header))
        except OSError as error:
            raise WorldError(f"the trace cannot be written (STRETTO_TRACE): {error}") from error
        self._engine = engine
        self._owner = os.getpid()
        self._rows: deque[_Row] = deque()
        self._parts: list[
            Callable[[], bytes]
        ] = []  # what events refer to, to be written before them
        self._numbers: dict[int, int] = {}  # id of a loaded program -> its number
        self._places: dict[int, tuple[int, int, int]] = {}  # id of a collective -> where it belongs
        self._kept: list[Program] = []  # so that no id is given twice
        self._names: dict[str, int] = {}
        self._sets: dict[frozenset[int], int] = {}
        self._walks: dict[int, float] = {}
        self._lock = threading.Lock()  # numbers
        self._writing = threading.Lock()
        self._stop = threading.Event()
        # By ordinal: segments that were running when last looked at, in order.
        self._running: list[deque[_Running]] = [deque() for _ in range(header.local_devices)]
        self._settling = threading.Lock()
        self._pending: SimpleQueue[_Running | None] = SimpleQueue()
        self._watcher: threading.Thread | None = None
        self._writer = threading.Thread(target=self._work, name="stretto-trace", daemon=True)
        self._writer.start()
        atexit.register(self.close)

    # What the executor tells.

    def program_loaded(self, program: Program, local: tuple[tuple[int, int], ...]) -> None:
        with self._lock:
            number = len(self._kept)
            self._kept.append(program)
            self._numbers[id(program)] = self._names[program.name] = number
            for index, collective in enumerate(program.collectives):
                self._places[id(collective)] = number, index, len(local)
            bare = replace(
                program, segments=tuple(replace(s, module=b"") for s in program.segments)
            )
            self._parts.append(lambda: program_chunk(bare, local))

    def program_started(self, program: str, run: int) -> None:
        self._walks[run] = perf_counter()

    def program_finished(self, program: str, run: int, error: BaseException | None) -> None:
        now, number = perf_counter(), self._names.get(program, -1)
        begun = self._walks.pop(run, now)
        self._rows.append((Kind.PROGRAM, number, run, 0, begun, now, float(error is not None)))
        self._await_running()

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

    # What becomes of it.

    def write(self) -> None:
        """Write out what there is."""
        if os.getpid() != self._owner:
            return
        with self._writing:
            if self._file.closed:
                return
            rows = [self._rows.popleft() for _ in range(len(self._rows))]
            with self._lock:
                parts, self._parts = self._parts, []
            try:
                data = b"".join([make() for make in parts])
                if rows:
                    data += events_chunk(rows)
                if data:
                    self._file.write(data)
            except OSError as error:
                _log.warning("the trace ends here: %s", error)
                self._file.close()

    def close(self) -> None:
        """Write out the rest and end the threads. Called at the end of the process."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        self._stop.set()
        self._writer.join(timeout=5.0)
        for ordinal in range(len(self._running)):
            self._settle(ordinal)
        if self._watcher is not None:
            self._pending.put(None)
            self._watcher.join(timeout=5.0)
        self.write()
        with self._writing:
            self._file.close()

    def _number_of(self, skip: frozenset[int]) -> int:
        number = self._sets.get(skip)
        if number is None:
            with self._lock:
                number = self._sets.setdefault(skip, len(self._sets))
                content = json.dumps(sorted(skip)).encode()
                if number == len(self._sets) - 1:
                    self._parts.append(lambda: chunk(b"S", content))
        return number

    def _work(self) -> None:
        while not self._stop.wait(WRITE_EVERY):
            self.write()

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
