"""`Recorder`: writes down the events of an executor as rows of numbers; all traces are made of them.

A `Recorder` is an instrument: it knows what is loaded, by number, and gives the executor the methods of
`Rows` to call as things happen. `trace` writes the rows to files as they come, a profiler of JAX takes them
at the end of its session.

Engines do not report when a segment ends. The recorder looks it up at every other event: another segment is
handed over, a collective begins, a wait is over. A row tells how long before its end the segment
was last seen to run. Where the walk stands at a wait while segments run beside a collective, or comes to its
end, the next event may be far off: there a thread waits for the last of them, and its end is exact. That
thread takes the interpreter and a core from the others when it wakes, which costs more than all the rest. So
it waits at the first `EXACT` times that the walk stands at each place, and at one in `EVERY` from then on:
readers of the trace take the other stretches of compute to be as long as those, within what was seen
(`trace_events`).

Where the walk waits for a collective that has yet to get its operands, the collective's start tells when they
were computed, and no thread needs to wait for them.

Of a running segment the smallest output is kept, and asked whether it is ready. If it is donated meanwhile,
another segment came behind, whose end is then that of the stretch.

Invariant: nothing here raises into the program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from stretto.collectives.ops import Collective

from ..program import Program
from .instrument import Instrument, SegmentRun
from .rows import CollectiveRows, MakeRows, ProgramRows, SegmentRows
from .trace_file import Header, RankTrace, rows_of

if TYPE_CHECKING:
    from ..engines.engine import Engine
    from .statistics import Profiled

# Device, the number there of a segment that runs on it, its output.
_Running = tuple[int, int, Any]


@dataclass(frozen=True)
class _Loaded:
    """A program that was loaded. ``smallest``: of each segment the output that is smallest."""

    rows: ProgramRows
    number: int
    local: int
    smallest: tuple[int, ...]


class Recorder(Instrument):
    """Collects rows, and the programs and sets of pairs that they name by their number.

    ``programs``: those that were loaded, their segments without modules, each with the (logical id, ordinal)
    of its local devices. ``sets``: pairs that moved nothing. ``profiles``: programs that were measured.
    ``rows`` makes the `Rows`: the plugin's ``_capi.Rows``.
    """

    def __init__(self, engine: Engine, local_devices: int, rows: MakeRows) -> None:
        self.programs: list[tuple[Program, tuple[tuple[int, int], ...]]] = []
        self.sets: list[frozenset[int]] = []
        self.profiles: list[Profiled] = []
        self.rows = rows(engine.is_ready, local_devices, self._watch_running, self._number_of)
        self._engine = engine
        self._local_devices = local_devices
        self._nowhere = _Loaded(self.rows.program(-1), -1, 0, ())
        self._loaded: dict[int, _Loaded] = {}  # by id of a program
        self._places: dict[int, tuple[_Loaded, int]] = {}  # by id of a collective, with its index
        self._collectives: dict[tuple[int, int, int], CollectiveRows] = {}  # program, index, stream
        self._kept: list[Program] = []  # so that no id is given twice
        self._set_numbers: dict[frozenset[int], int] = {}
        self._lock = threading.Lock()  # numbers
        # By ordinal: the last segment that the thread was told to wait for.
        self._watched = [-1] * local_devices
        self._pending: SimpleQueue[_Running | None] = SimpleQueue()
        self._watcher: threading.Thread | None = None

    def trace(self, header: Header) -> RankTrace:
        """The trace so far, as if it had been written to a file and read back."""
        programs = list(self.programs)
        rows = rows_of(*self.rows.take())
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
        for ordinal in range(self._local_devices):
            self.rows.settle(ordinal)
        if self._watcher is not None:
            self._pending.put(None)
            self._watcher.join(timeout=5.0)

    # What the executor tells.

    def program_loaded(self, program: Program, local: tuple[tuple[int, int], ...]) -> None:
        with self._lock:
            known = self._loaded.get(id(program))
            if known is not None and self.programs[known.number][1] == local:
                return
            number = len(self.programs)
            self._kept.append(program)
            sizes = [[t.nbytes for t in s.outputs] for s in program.segments]
            smallest = tuple(each.index(min(each)) if each else 0 for each in sizes)
            loaded = _Loaded(self.rows.program(number), number, len(local), smallest)
            self._loaded[id(program)] = loaded
            for index, collective in enumerate(program.collectives):
                self._places[id(collective)] = loaded, index
            bare = replace(
                program, segments=tuple(replace(s, module=b"") for s in program.segments)
            )
            self.programs.append((bare, local))

    def program_profiled(self, done: Profiled) -> None:
        self.profiles.append(done)

    def listener(self, name: str, *known: Any) -> Callable[..., None] | None:
        row = _TOLD.get(name)
        return super().listener(name, *known) if row is None else row.maker(self, *known)

    def around_run(self, run: SegmentRun, program: Program, segment: int) -> SegmentRun:
        return self._segment(program, segment).around_run(run)

    def around_call(
        self, run: SegmentRun, program: Program, segment: int, next_run: Callable[[], int]
    ) -> SegmentRun:
        return self._segment(program, segment).around_call(run, next_run)

    def _program(self, program: Program) -> _Loaded:
        return self._loaded.get(id(program), self._nowhere)

    def _segment(self, program: Program, segment: int) -> SegmentRows:
        loaded = self._program(program)
        smallest = loaded.smallest[segment] if loaded.smallest else 0
        return self.rows.segment(loaded.rows, segment, smallest)

    def _collective(self, collective: Collective, stream: int) -> CollectiveRows:
        loaded, index = self._places.get(id(collective), (self._nowhere, 0))
        with self._lock:
            place = (loaded.number, index, stream)
            if place not in self._collectives:
                self._collectives[place] = self.rows.collective(*place, loaded.local)
            return self._collectives[place]

    def _number_of(self, skip: frozenset[int]) -> int:
        number = self._set_numbers.get(skip)
        if number is None:
            with self._lock:
                number = self._set_numbers.setdefault(skip, len(self.sets))
                if number == len(self.sets):
                    self.sets.append(skip)
        return number

    # How segments end.

    def _watch_running(self) -> None:
        """The walk stops here: have a thread wait for the ends of the segments that still run."""
        for ordinal, watched in enumerate(self._watched):
            last = self.rows.last(ordinal)
            if last is None or last[0] == watched:
                continue
            self._watched[ordinal] = last[0]
            if self._watcher is None:
                with self._lock:
                    self._begin_watching()
            self._pending.put((ordinal, *last))

    def _begin_watching(self) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch, name="stretto-trace-segments", daemon=True
            )
            self._watcher.start()

    def _watch(self) -> None:
        """Wait for segments in the order in which they were handed over."""
        rows, engine = self.rows, self._engine
        while (last := self._pending.get()) is not None:
            ordinal, number, output = last
            ended = True
            with suppress(Exception):  # donated meanwhile
                ended = output is None or engine.is_ready(output)
            if ended:  # another thread may have seen it; the time is not known
                rows.settle(ordinal)
                continue
            rows.block_on(ordinal, number)
            with suppress(Exception):  # donated meanwhile, or failed
                engine.block(output)
            rows.settle(ordinal, number)
            rows.block_on(-1, 0)
            del last, output


# The events that become rows: how many of the first arguments name the object, and its method of `Rows`.
@dataclass(frozen=True)
class _Told:
    known: int
    maker: Callable[..., Callable[..., None]]


_TOLD = {
    "program_started": _Told(1, lambda self, *of: self._program(*of).rows.started),
    "program_finished": _Told(1, lambda self, *of: self._program(*of).rows.finished),
    "program_called": _Told(2, lambda self, *of: self._segment(*of).called),
    "segment_handed": _Told(2, lambda self, *of: self._segment(*of).handed),
    "segment_ran": _Told(2, lambda self, *of: self._segment(*of).ran),
    "segment_skipped": _Told(2, lambda self, *of: self._segment(*of).left_out),
    "collective_started": _Told(2, lambda self, *of: self._collective(*of).started),
    "collective_ran": _Told(2, lambda self, *of: self._collective(*of).ran),
    "collective_awaiting": _Told(2, lambda self, *of: self._collective(*of).awaiting),
    "collective_awaited": _Told(2, lambda self, *of: self._collective(*of).awaited),
}


def _method(told: _Told) -> Callable[..., None]:
    """The method of `Instrument`, for callers that give all arguments at once."""

    def tell(self: Recorder, *arguments: Any) -> None:
        told.maker(self, *arguments[: told.known])(*arguments[told.known :])

    return tell


for _name, _row in _TOLD.items():
    setattr(Recorder, _name, _method(_row))
