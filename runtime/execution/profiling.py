"""``STRETTO_PROFILE=1``: a program's first runs are measured, segment by segment, for the next compilation.

A `Measuring` stands where a loaded program has its agreement (`negotiation`), so that a program without one
pays nothing, and takes itself out when it is done. `WARM_UP` runs are as ever; `MEASURED` runs are timed
(`SegmentTimes`); then the times are handed on, to be kept for the job that comes next.

Invariant: a program never changes once its ranks have agreed on it. What is measured here changes nothing in
this job, so each process measures, or does not, for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import ref

from stretto.collectives.ops import Kind

from ..program import Program
from ..recording import statistics
from ..recording.statistics import Profiled
from .frame import Hosted
from .negotiation import Negotiation

if TYPE_CHECKING:
    from ..engines.engine import Engine
    from .call import Lane
    from .loaded import LoadedProgram

# Runs of a program before it is measured (the first ones touch memory and code for the first time), and runs
# that are; segments of loops are timed in each iteration, up to so many times in all.
WARM_UP, MEASURED = 2, 5
MOST_TIMES = 4096
_log = logging.getLogger("stretto")

Seconds = tuple[float | None, ...]
# Takes a program and the median of what each of its segments takes on a device, launch included; None for one
# that never ran. Gives predicted seconds of a run: by the table of costs, and by these times.
Keep = Callable[[Program, Seconds], tuple[float, float]]


class SegmentTimes:
    """Times of a program's segments on the devices of this process: one for each run, until all have ended.

    Nothing else goes on meanwhile: a run begins when what it reads is there, and what was started on the
    streams is over. With sends and receives in the program the streams are left alone, since a peer may
    need what comes after.
    """

    def __init__(self, program: Program, engine: Engine, lanes: Sequence[Lane]) -> None:
        self._engine = engine
        apart = any(c.kind in (Kind.SEND, Kind.RECV) for c in program.collectives)
        self._streams = [] if apart else [lane.stream for lane in lanes[: program.num_streams]]
        self._times: list[list[float]] = [[] for _ in program.segments]

    def seconds(self) -> Seconds:
        """The median of each segment."""
        return tuple(median(times) if times else None for times in self._times)

    def begin(self, registers: Sequence[Any]) -> float:
        """Wait until a segment can run undisturbed on these registers' arrays. Gives the time then."""
        for stream in self._streams:
            if not stream.idle:
                stream.wait(stream.submit(_nothing))
        self._await(registers)
        return perf_counter()

    def end(self, segment: int, began: float, registers: Sequence[Any]) -> None:
        """Wait until a segment that gives these has ended on all devices, and note what it took."""
        times = self._times[segment]
        if self._await(registers) and len(times) < MOST_TIMES:
            times.append(perf_counter() - began)

    def _await(self, registers: Sequence[Any]) -> bool:
        """Wait for arrays; whether there were any. Their errors arrive where they are used."""
        some = False
        for register in registers:
            if type(register) is Hosted:
                continue
            for array in register:
                if array is not None:
                    some = True
                    with suppress(Exception):
                        self._engine.block(array)
        return some


def _nothing() -> None:
    pass


class Measuring:
    """Stands for a program's `Negotiation` (None in a process that runs it alone) while it is measured.

    ``keep`` takes what was measured. An error of it is told, and ends the measuring: the program goes on.
    """

    agreed = False  # no run takes a short way

    def __init__(self, loaded: LoadedProgram, negotiation: Negotiation | None, keep: Keep) -> None:
        self._loaded = ref(loaded)  # which refers to this
        self._negotiation = negotiation
        self._keep = keep
        self._runs = 0

    def begin(self) -> None:
        """A run begins: see `Negotiation.begin`."""
        loaded, negotiation = self._loaded(), self._negotiation
        assert loaded is not None
        if negotiation is not None:
            negotiation.begin()
            if negotiation.key is None:  # the ranks differ: what they run is no plan's program
                self._leave(loaded)
                return
        self._runs += 1
        if self._runs > WARM_UP + MEASURED:
            times = loaded.walker.times
            self._leave(loaded)
            if times is not None:
                self._finish(loaded, times.seconds())
        elif self._runs > WARM_UP and loaded.walker.times is None:
            program, engine = loaded.walker.program, loaded.executor.engine
            self._time(loaded, SegmentTimes(program, engine, loaded.walker.lanes))

    def _time(self, loaded: LoadedProgram, times: SegmentTimes | None) -> None:
        with loaded.executor.observing:
            loaded.walker = loaded.walker.timed_by(times)

    def _leave(self, loaded: LoadedProgram) -> None:
        """The program runs as it does without this."""
        if loaded.walker.times is not None:
            self._time(loaded, None)
        loaded.negotiation = self._negotiation

    def _finish(self, loaded: LoadedProgram, seconds: Seconds) -> None:
        program = loaded.walker.program
        try:
            predicted, measured = self._keep(program, seconds)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            _log.warning("what was measured of %s is not kept: %s", program.name, what)
            return
        ran = sum(s is not None for s in seconds)
        done = Profiled(program.name, MEASURED, ran, predicted, measured)
        statistics.profiled(done)
        instrument = loaded.executor.instrument
        if instrument is not None:
            instrument.program_profiled(done)
        _log.info("%s", done)
