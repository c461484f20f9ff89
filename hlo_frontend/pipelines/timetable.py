"""The interleaved schedule: which chunk of which microbatch each stage runs in each iteration.

P stages have R chunks of layers each; chunk r of stage s holds the layers of *virtual stage* ``r * P + s``,
so a microbatch goes R times round the ring of stages. Microbatches go in groups of at least P (the last
ones, where there are fewer, leave slots empty): all of a group go round once, one after the other, then a
second time. A group of G > P would come back to stage 0 too early by ``G - P`` iterations, for which it
waits there. With groups of P, as many as can be, hardly anything ever waits (Narayanan et al., arXiv
2104.04473, section 2.2).

A loop of ``M`` microbatches takes ``R * M + P - 1`` iterations, where it took M + P - 1, of 1/R of the work
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .refusal import Refusal

RECEIVED, ENTERS, WAITED = 0, 1, 2  # the sources of a stage's input


@dataclass(frozen=True)
class Run:
    """One run of a chunk on a microbatch."""

    microbatch: int
    chunk: int


@dataclass(frozen=True, eq=False)
class Timetable:
    """``runs[stage][iteration]``; of the other tables each is s32[P, iterations].

    ``source``: where a run's input comes from. ``place``: the slot of the waiting room that it reads.
    ``store``: the slot into which received values go at the beginning of an iteration, ``rooms`` if they need
    not be kept. ``commit``: by how many iterations of the written loop a stage advances (0 or 1). ``reads``:
    whether the result of the run is that of the last stage in this iteration of the written loop.
    """

    runs: tuple[tuple[Run | None, ...], ...]
    rooms: int
    source: np.ndarray
    place: np.ndarray
    store: np.ndarray
    commit: np.ndarray
    reads: np.ndarray

    @property
    def iterations(self) -> int:
        return len(self.runs[0])

    @property
    def working(self) -> np.ndarray:
        return np.array([[run is not None for run in row] for row in self.runs], np.int32)

    @property
    def chunk(self) -> np.ndarray:
        return np.array([[run.chunk if run else 0 for run in row] for row in self.runs], np.int32)

    def microbatch(self, rests: int) -> np.ndarray:
        """The microbatch that a stage works on, ``rests`` if there is none."""
        return np.array(
            [[run.microbatch if run else rests for run in row] for row in self.runs], np.int32
        )

    def seams(self, chunks: int) -> np.ndarray:
        """Whether a run takes the result of a run that was on another stage in the written loop."""
        rows = [[run is not None and (run.chunk * len(self.runs) + stage) % chunks == 0
                 for run in row] for stage, row in enumerate(self.runs)]  # fmt: skip
        return np.array(rows, np.int32)


def groups(microbatches: int, stages: int) -> list[int]:
    """Sizes of the groups of microbatches that go round together, as equal as possible."""
    count = max(1, microbatches // stages)
    return [(microbatches + count - 1 - i) // count for i in range(count)]


def timetable(
    stages: int, chunks: int, enters: Sequence[int], leaves: Sequence[int], trips: int
) -> Timetable:
    """The timetable of a loop of ``trips`` iterations as written.

    ``enters[m]`` and ``leaves[m]``: the iterations of the written loop in which microbatch m enters the first
    stage and leaves the last one. Raises `Refusal` if their order cannot be kept.
    """
    slots: dict[int, Run] = {}  # of stage 0; stage s is s iterations later
    waits: list[tuple[int, int]] = []  # received at the beginning of, and needed in, an iteration
    first = begin = 0
    for size in groups(len(enters), stages):
        turn = max(size, stages)
        for chunk in range(chunks):
            for i in range(size):
                slot = begin + chunk * turn + i
                slots[slot] = Run(first + i, chunk)
                if chunk and turn > stages:
                    waits.append((slot - turn + stages, slot))
        first += size
        begin += chunks * turn
    began = {run.microbatch: slot for slot, run in slots.items() if run.chunk == 0}
    ended = {run.microbatch: slot + stages - 1
             for slot, run in slots.items() if run.chunk == chunks - 1}  # fmt: skip
    delay = _delay(began, ended, enters, leaves)
    total = max(max(slots) + stages + delay, trips)
    total = max(total, *(began[m] + delay + trips - enters[m] for m in began),
                *(ended[m] + delay + trips - leaves[m] for m in ended))  # fmt: skip
    runs: list[list[Run | None]] = [[None] * total for _ in range(stages)]
    for slot, run in slots.items():
        for stage in range(stages):
            runs[stage][slot + stage + delay] = run
    shape = (stages, total)
    source, place = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for slot, run in slots.items():
        if run.chunk == 0:
            source[0, slot + delay] = ENTERS
    rooms, taken = _rooms(waits)
    store = np.full(shape, rooms, np.int32)
    for (arrives, needed), room in zip(waits, taken, strict=True):
        store[0, arrives + delay] = room
        source[0, needed + delay] = WAITED
        place[0, needed + delay] = room
    commit, reads = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for stage in range(stages):
        fixed: dict[int, int] = {}
        if stage == 0:
            fixed |= {enters[m]: at + delay for m, at in began.items()}
        if stage == stages - 1:
            fixed |= {leaves[m]: at + delay for m, at in ended.items()}
            reads[stage, [at + delay for at in ended.values()]] = 1
        commit[stage, _commits(fixed, trips)] = 1
    rows = tuple(tuple(row) for row in runs)
    return Timetable(rows, rooms, source, place, store, commit, reads)


def _delay(
    began: dict[int, int], ended: dict[int, int], enters: Sequence[int], leaves: Sequence[int]
) -> int:
    """How many iterations to wait so that a stage can do everything that comes before its first
    microbatch."""
    early = [enters[m] - at for m, at in began.items()]
    late = [leaves[m] - at for m, at in ended.items()]
    return max(0, *early, *late)


def _commits(fixed: dict[int, int], trips: int) -> list[int]:
    """The iteration in which each iteration of the written loop takes place; some are fixed."""
    times: list[int] = []
    for iteration in range(trips):
        earliest = times[-1] + 1 if times else 0
        at = fixed.get(iteration, earliest)
        if at < earliest:
            raise Refusal("its microbatches are taken in or given out too far apart")
        times.append(at)
    return times


def _rooms(waits: Sequence[tuple[int, int]]) -> tuple[int, list[int]]:
    """Slots for sorted times [arrives, needed): a slot is read before the next value is put into it."""
    free: list[int] = []
    used: list[int] = []  # until when each slot is
    taken: list[int] = []
    for arrives, needed in waits:
        free = [i for i, until in enumerate(used) if until <= arrives]
        if free:
            used[free[0]] = needed
            taken.append(free[0])
        else:
            taken.append(len(used))
            used.append(needed)
    return len(used), taken
