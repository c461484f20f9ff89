"""`Context`: what the operations of a program are made with, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from stretto.collectives.ops import Collective

from ..engines.engine import Engine, LoadedSegment
from ..program import Program
from ..recording.instrument import Instrument, told
from ..recording.statistics import Counters
from .absent import Absent
from .called_back import CalledBack
from .interrupts import Interrupts
from .lane import Lane
from .segment_times import SegmentTimes


@dataclass(frozen=True)
class Context:
    """A program, and what its operations need to know of the process in which they run.

    ``segments``: those of the program as ``engine`` compiled them; none where ``local`` is empty, which has
    (logical id, ordinal) pairs of the program's devices in this process, in order. ``owner`` maps each
    logical id to its process. ``lanes[i]`` serves the program's stream i. ``absent`` gives what stands for
    outputs of segments that are not run, and ``counters`` counts those. ``called`` names the program and the
    line it is called from, for the watchdog. ``called_back``: the functions that the program calls back, if
    any; frames then collect the ends of runs of segments. ``instrument`` is told what happens; ``times``
    measures the segments, while somebody wants to know. ``interrupts`` end walks that nobody waits for any
    more.
    """

    program: Program
    engine: Engine
    segments: Sequence[LoadedSegment]
    local: tuple[tuple[int, int], ...]
    owner: Mapping[int, int]
    lanes: Sequence[Lane]
    absent: Absent
    counters: Counters
    called: str = ""
    called_back: CalledBack | None = None
    instrument: Instrument | None = None
    times: SegmentTimes | None = None
    interrupts: Interrupts = field(default_factory=Interrupts)

    @cached_property
    def logical(self) -> tuple[int, ...]:
        """Logical ids of the local devices."""
        return tuple(logical for logical, _ in self.local)

    @cached_property
    def ordinals(self) -> tuple[int, ...]:
        """Ordinals of the local devices, by which the engine knows them."""
        return tuple(ordinal for _, ordinal in self.local)

    def told(self, name: str, *known: Any) -> Callable[..., None] | None:
        """See `instrument.told`."""
        return told(self.instrument, name, *known)

    def ranks(self, collective: Collective) -> tuple[int, ...]:
        """Processes that take part in the groups and pairs that have a local member."""
        here = set(self.logical)
        sets = [g for g in (*collective.groups, *collective.pairs) if here.intersection(g)]
        return tuple(sorted({self.owner[member] for members in sets for member in members}))
