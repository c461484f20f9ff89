"""``STRETTO_TRACE=dir``: each rank writes what its streams do to a file of its own (`trace_file`).

The rows are collected by `recorder`. A thread writes them out twice a second, at the end of the
process, and when the job has failed. So a process that is killed loses half a second.

Invariants: nothing here raises into the program; a folder that cannot be written is an error at the start. A
file has one writer: what a traced process starts inherits STRETTO_TRACE, and goes without a trace.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import WorldError
from .recorder import Recorder
from .rows import MakeRows
from .trace_file import Header, beginning, chunk, file_name, head, program_chunk

if TYPE_CHECKING:
    from ..engines.engine import Engine
    from ..job.world import World

WRITE_EVERY = 0.5
_PARTS = 512  # of one call of the system, which takes 16 at least and 1024 on Linux
_log = logging.getLogger("stretto")


def begin(world: World, engine: Engine, rows: MakeRows) -> Trace | None:
    """The trace of this rank, if ``STRETTO_TRACE`` asks for one. Raises `WorldError`.

    ``rows``: as in `Recorder`.
    """
    folder = world.options.trace
    if not folder:
        return None
    header = header_of(world, world.clock_offset)
    path = Path(folder) / file_name(world.rank)
    trace = _begun.get(path)
    if trace is None:  # a process that makes its devices anew goes on with its file
        try:
            trace = _begun[path] = Trace(Path(folder), header, engine, rows)
        except _InUseError as error:
            _log.warning("no trace of process %d: %s", os.getpid(), error)
            return None
        world.on_failure(lambda error: trace.write())
    return trace


def header_of(world: World, offset: float = 0.0) -> Header:
    """Who this rank is; ``offset`` as in `Header`."""
    return Header(
        rank=world.rank,
        size=world.size,
        host=world.host,
        pid=os.getpid(),
        local_devices=world.local_devices,
        engine=world.options.engine,
        offset=offset,
        started=time.time(),
        costs=world.costs.text,
        job=world.traced_as,
    )


_begun: dict[Path, Trace] = {}


class _InUseError(WorldError):
    """Another process writes to the file."""


def _open(path: Path) -> FileIO:
    """The file, empty, for this process alone. Raises ``OSError``, `_InUseError`."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise _InUseError(
            f"another process writes {path} (STRETTO_TRACE): give each job a folder of its own"
        ) from None
    except OSError:
        pass  # a file system without locks
    os.ftruncate(descriptor, 0)
    return FileIO(descriptor, "wb")


class Trace(Recorder):
    """Writes ``folder/rank-….trace``; see the head of this file. `close` ends it."""

    def __init__(self, folder: Path, header: Header, engine: Engine, rows: MakeRows) -> None:
        super().__init__(engine, header.local_devices, rows)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _open(folder / file_name(header.rank))
            self._file.write(beginning(header))
        except OSError as error:
            raise WorldError(f"the trace cannot be written (STRETTO_TRACE): {error}") from error
        self._owner = os.getpid()
        self._written = (0, 0, 0)  # programs, sets and profiles
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._writer = threading.Thread(target=self._work, name="stretto-trace", daemon=True)
        self._writer.start()
        atexit.register(self.close)

    def write(self) -> None:
        """Write out the rows so far."""
        if os.getpid() != self._owner:
            return
        with self._writing:
            if self._file.closed:
                return
            try:
                self.rows.drain(self._write_rows)
                self._write_lists()  # what was loaded and measured before anything was run
            except OSError as error:
                _log.warning("the trace ends here: %s", error)
                self._file.close()

    def _write_rows(self, events: Sequence[memoryview], calls: Sequence[memoryview]) -> None:
        self._write_lists()  # what the rows refer to goes before them
        parts: list[memoryview] = []
        for letter, content in ((b"E", events), (b"C", calls)):
            if any(content):
                parts += memoryview(head(letter, content)), *content
        # As few calls as can be: the interpreter may change hands at each.
        while parts:
            written = os.writev(self._file.fileno(), parts[:_PARTS])
            while parts and written >= parts[0].nbytes:
                written -= parts.pop(0).nbytes
            if written:
                parts[0] = parts[0][written:]

    def _write_lists(self) -> None:
        """Write what was added to the lists of programs, sets and profiles."""
        written = self._written
        programs, sets = self.programs[written[0] :], self.sets[written[1] :]
        profiles = self.profiles[written[2] :]
        if not (programs or sets or profiles):
            return
        self._written = (
            written[0] + len(programs),
            written[1] + len(sets),
            written[2] + len(profiles),
        )
        parts = [program_chunk(*program) for program in programs]
        parts += [chunk(b"S", json.dumps(sorted(skip)).encode()) for skip in sets]
        parts += [chunk(b"M", json.dumps(asdict(done)).encode()) for done in profiles]
        self._file.write(b"".join(parts))

    def close(self) -> None:
        """Write out the rest and end the threads. Called at the end of the process."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        self._stop.set()
        self._writer.join(timeout=5.0)
        self.end()
        self.write()
        with self._writing:
            self._file.close()

    def _work(self) -> None:
        while not self._stop.wait(WRITE_EVERY):
            self.write()
