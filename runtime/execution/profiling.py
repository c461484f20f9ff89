"""``STRETTO_PROFILE=1``: a program's first runs are measured, segment by segment, for the next compilation.

A `Measuring` stands where a loaded program has its agreement (`negotiation`), so that a program without one
pays nothing, and takes itself out when it is done. The first `WARM_UP` runs are not timed, the next
`MEASURED` are (`SegmentTimes`); then the times are handed on, to be kept for the job that comes next.

Invariant: a program never changes once its ranks have agreed on it. What is measured here changes nothing in
this job, so each process measures, or does not, for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from weakref import ref

from ..program import Program
from ..recording import statistics
from ..recording.statistics import Profiled
from .loaded import LoadedProgram
from .negotiation import Negotiation
from .segment_times import Seconds, SegmentTimes

# Runs of a program before it is measured (the first ones touch memory and code for the first time), and runs
# that are.
WARM_UP, MEASURED = 2, 5
_log = logging.getLogger("stretto")

# Takes a program and the median of what each of its segments takes on a device, launch included; None for one
# that never ran. Gives predicted seconds of a run: by the table of costs, and by these times.
Keep = Callable[[Program, Seconds], tuple[float, float]]


class Measuring:
    """Stands for a program's `Negotiation` (None in a process that runs it alone) while it is measured.

    ``keep`` takes the times. If it raises, the error is logged and the program goes on unmeasured.
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
            times = loaded.walker.context.times
            self._leave(loaded)
            if times is not None:
                self._finish(loaded, times.seconds())
        elif self._runs > WARM_UP and loaded.walker.context.times is None:
            context = loaded.walker.context
            self._time(loaded, SegmentTimes(context.program, context.engine, context.lanes))

    def _time(self, loaded: LoadedProgram, times: SegmentTimes | None) -> None:
        with loaded.dispatcher.observing:
            loaded.walker = loaded.walker.timed_by(times)

    def _leave(self, loaded: LoadedProgram) -> None:
        """End the measuring: the program runs with its agreement alone, or with none."""
        if loaded.walker.context.times is not None:
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
        instrument = loaded.dispatcher.instrument
        if instrument is not None:
            instrument.program_profiled(done)
        _log.info("%s", done)
