"""``STRETTO_PROFILE=1``: the first runs of a program are measured, and the program is planned anew by that.

A `Measuring` stands where a loaded program has its `Joint`, so that a program without one pays nothing, and
takes itself out when it is done. `WARM_UP` runs are as ever; `MEASURED` runs are timed segment by segment
(`SegmentTimes`). At the beginning of the next one the processes of the program take the times of the first of
them, each plans and compiles for itself, they compare what came of it, and all of them go on with the new
program or all with the old. Both exchanges are made where the program begins its run, in the order in which
the processes run it, like that of its first run (`negotiation`).

Runs are counted for a program as the processes have agreed on it, not for what a process has loaded: one may
load the program anew when it likes, and then follows what was decided.

Invariant: whether and when something is exchanged follows from counts of runs that all processes share. What
a process finds out for itself (that there is nothing to plan, that compiling failed) is told in an exchange,
and then all keep the program that they have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from stretto.collectives.ops import Kind

from . import statistics
from .errors import InvalidProgramError
from .frame import Hosted
from .negotiation import Joint, Key, Terms
from .program import Program
from .schedule import strict
from .statistics import Profiled

if TYPE_CHECKING:
    from .call import Lane
    from .engine import Engine
    from .loaded import LoadedProgram
    from .walk import Walker

# Runs of a program before it is measured (the first ones touch memory and code for the first time), and runs
# that are; segments of loops are timed in each iteration, up to so many times in all.
WARM_UP, MEASURED = 2, 5
MOST_TIMES = 4096
_log = logging.getLogger("stretto")

Seconds = tuple[float | None, ...]


@dataclass(frozen=True)
class NewPlan:
    """What came of planning anew: ``program`` is to take the place of the one at hand, None to keep that.

    ``before`` and ``after``: predicted seconds of a run with the old plan and the new one, as measured.
    """

    program: Program | None
    before: float
    after: float


class Planner(Protocol):
    """How a program is planned anew. ``wanted``: whether there is anything to plan."""

    wanted: bool

    def plan(self, program: Program, seconds: Seconds) -> NewPlan:
        """``seconds[i]``: what segment i takes on a device, launch included; None where it never ran."""
        ...

    def keep(self) -> None:
        """What was measured may be kept for later jobs."""
        ...


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


class Campaign:
    """The measuring of one program on this process: ``runs`` so far, then what was decided."""

    def __init__(self) -> None:
        self.runs = 0
        self.times: SegmentTimes | None = None
        self.decision: Decision | None = None


@dataclass(frozen=True)
class Decision:
    """By which times the program is planned anew, and the digest of what all then run; empty: as before."""

    seconds: Seconds = ()
    digest: str = ""


class Measuring:
    """Stands for a program's `Joint` (None in a process that runs it alone) while it is measured.

    ``make(program)`` compiles another program for the same devices. ``campaigns``: those of the executor, by
    what the processes have agreed on.
    """

    agreed = False  # no run takes a short way

    def __init__(
        self,
        loaded: LoadedProgram,
        joint: Joint | None,
        planner: Planner,
        make: Callable[[Program], Walker],
        campaigns: dict[Key, Campaign],
    ) -> None:
        self._loaded = ref(loaded)  # which refers to this
        self._joint = joint
        self._planner = planner
        self._make = make
        self._campaigns = campaigns
        self._campaign: Campaign | None = None

    def begin(self) -> None:
        """A run begins: see `Joint.begin`. It may be the one before which the program is replaced."""
        loaded, joint = self._loaded(), self._joint
        assert loaded is not None
        if joint is not None:
            joint.begin()
            if joint.key is None:  # the ranks differ, and have a common order without any plan
                self._leave(loaded)
                return
        if self._campaign is None:
            campaign = Campaign()
            if joint is not None and joint.key is not None:
                campaign = self._campaigns.setdefault(joint.key, campaign)
            self._campaign = campaign
        campaign = self._campaign
        campaign.runs += 1
        if campaign.decision is None and campaign.runs > WARM_UP + MEASURED:
            campaign.decision = self._decide(loaded, campaign)
            campaign.times = None
        elif campaign.decision is not None:
            self._follow(loaded, campaign.decision)
        if campaign.decision is not None:
            self._leave(loaded)
        elif campaign.runs > WARM_UP and self._planner.wanted:
            if campaign.times is None:
                program = loaded.walker.program
                campaign.times = SegmentTimes(program, loaded.executor.engine, loaded.walker.lanes)
            if loaded.walker.times is None:
                self._time(loaded, campaign.times)

    def _time(self, loaded: LoadedProgram, times: SegmentTimes | None) -> None:
        with loaded.executor.observing:
            loaded.walker = loaded.walker.timed_by(times)

    def _leave(self, loaded: LoadedProgram) -> None:
        """The program runs as it does without this."""
        if loaded.walker.times is not None:
            self._time(loaded, None)
        loaded.joint = self._joint

    def _decide(self, loaded: LoadedProgram, campaign: Campaign) -> Decision:
        program, joint, planner = loaded.walker.program, self._joint, self._planner
        times = campaign.times
        seconds = times.seconds() if times is not None else ()
        first = joint is None or joint.is_first
        if joint is not None:
            own = {"program": digest(program) if planner.wanted else "", "seconds": seconds}
            offers = joint.exchange("the measured times", own)
            if len({offer["program"] for offer in offers}) > 1 or not offers[0]["program"]:
                if any(offer["program"] for offer in offers) and first:
                    _log.warning(
                        "%s is not planned anew: its ranks compute differently", program.name
                    )
                return Decision()
            seconds = tuple(offers[0]["seconds"])
        problem, found, walker = "", NewPlan(None, 0.0, 0.0), None
        try:
            found = planner.plan(program, seconds)
            if found.program is not None:
                walker = self._make(found.program)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        new = digest(found.program) if found.program is not None else ""
        if joint is not None:
            reports = joint.exchange("the new plan", {"program": new, "problem": problem})
            problem = next(
                (f"rank {r['rank']} cannot: {r['problem']}" for r in reports if r["problem"]), ""
            )
            if not problem and len({r["program"] for r in reports}) > 1:
                problem = "the ranks do not come to one plan"
        if problem:
            if first:
                _log.warning("%s keeps its plan: %s", program.name, problem)
            return Decision()
        if walker is not None:
            self._replace(loaded, walker)
        planner.keep()
        self._tell(loaded, program, seconds, found, first)
        return Decision(seconds, new)

    def _follow(self, loaded: LoadedProgram, decision: Decision) -> None:
        """Do what was decided before this process loaded the program once more."""
        if not decision.digest:
            return
        found = self._planner.plan(loaded.walker.program, decision.seconds)
        if found.program is None or digest(found.program) != decision.digest:
            raise InvalidProgramError(
                f"{loaded.program.name} was planned anew, and what this process has loaded since does not "
                "come to the same plan. Run the job without STRETTO_PROFILE"
            )
        self._replace(loaded, self._make(found.program))

    def _replace(self, loaded: LoadedProgram, walker: Walker) -> None:
        loaded.walker, loaded.program = walker, walker.program
        loaded.prepare()

    def _tell(
        self, loaded: LoadedProgram, program: Program, seconds: Seconds, found: NewPlan, first: bool
    ) -> None:
        done = Profiled(
            program.name,
            MEASURED,
            sum(s is not None for s in seconds),
            found.before,
            found.after,
            found.program is not None,
        )
        statistics.profiled(done)
        instrument = loaded.executor.instrument
        if instrument is not None:
            instrument.program_profiled(done)
        if first:
            _log.info("%s", done)


def digest(program: Program) -> str:
    """Equal only for programs that compute the same and start the same collectives on the same streams."""
    return Terms(program, strict(program), ()).fingerprint().hex()
