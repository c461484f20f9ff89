"""The schedules of a step of training: which microbatch each stage runs in each iteration of the one loop.

An iteration of a stage is one run: of the forward pass, of the backward pass, or none. What it gives is sent
at its end and is there in the next one. Stages wait for each other only where one takes what the other sent,
so an iteration without a run takes no time of its own, and runs need not take equally long.

1F1B: stage s of P runs microbatch m forwards in iteration ``2 m + s`` and backwards in ``2 m + 2 P - 1 -
s``. So its runs alternate, the last stage turns a microbatch round at once, ``P - s`` microbatches are
alive on stage s, and the loop has 2 (M + P - 1) iterations: as many as the two loops of GPipe have together
(Narayanan et al., arXiv 1806.03377 and 2104.04473, where the first microbatches are run as soon as they can
be and then wait).

ZB-H1: the part of a backward run that only gradients of weights need is a run of its own, put where a stage
would have nothing to do (Qi et al., arXiv 2401.10241). In each iteration a stage runs a microbatch
backwards if it has come back, else one forwards if it has come and no more than P are kept, else the
weights of one. With three runs equally long the bubble is P - 1 of ``3 M + P - 1``, where it is 3 (P - 1)
of ``3 (M + P - 1)``.

Interleaved 1F1B: each stage has R chunks of layers, so there are R P *virtual stages*, of which number v is
chunk ``v // P`` of stage ``v % P``. A microbatch goes R times round the ring of stages there, and R times
back. Microbatches go in groups of P, as many as can be: a stage runs chunk 0 of all of a group, then chunk
1, and backwards likewise from the last chunk on, so that each chunk takes microbatches in their order. Stage
s goes forwards until ``2 (P - s - 1) + (R - 1) P + 1`` runs are under way, then backwards and forwards in
turns (Narayanan et al., arXiv 2104.04473, section 2.2). With M >= P the longest way through all runs is
R M + P - 1 runs forwards and as many backwards, of 1/R of the work each.

A device waits at the beginning of an iteration for what its neighbours sent for it. In this schedule values
are needed later than the iteration behind the one that made them, often, and a device that waited for them
then would go at the pace of the slower one of two that run forwards and backwards. So here a value is sent
in the iteration behind (``delay``), where its sender is as soon as it has made it, and is there in the one
after that. The loop has some more iterations, in which devices do nothing and so lose nothing.

Microbatches are numbered here in the order in which they go through the backward pass as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .timetable import groups

NONE = -1
_DELAY = 2  # of interleaved 1F1B

Key = tuple[int, int]  # microbatch, virtual stage


@dataclass(frozen=True, eq=False)
class Rooms:
    """Where what is received waits. By stage and iteration, s32[P, iterations]: ``stores``, the row in which
    it is put at the beginning of an iteration, ``count`` if nobody reads it; ``fetches``, the row that a run
    takes."""

    stores: np.ndarray
    fetches: np.ndarray
    count: int


@dataclass(frozen=True, eq=False)
class Slots:
    """By stage and iteration, s32[P, iterations]: ``forward``, ``backward`` and ``weights``, the microbatch
    that is run, or `NONE`; ``puts`` and ``takes``, the rows in which a forward run puts what its layers keep,
    and from which a backward run takes it, or one of weights (``finishes``). ``rows``: how many there are.

    ``leaves`` and ``resumes``: the rows in which a backward run leaves what one of weights needs, ``left`` of
    them; there are none where a backward run does all, and no runs of weights. ``waits`` and
    ``waits_back``: where what is received in both directions waits, None where none does. ``chunk``: the
    chunk that is run, of ``chunks``. ``delay``: how many iterations it takes until what a run gives has come
    to the neighbour; with 2 it is sent in the one behind the run.
    """

    forward: np.ndarray
    backward: np.ndarray
    weights: np.ndarray
    puts: np.ndarray
    takes: np.ndarray
    finishes: np.ndarray
    rows: int
    leaves: np.ndarray
    resumes: np.ndarray
    left: int
    waits: Rooms | None
    waits_back: Rooms | None
    chunk: np.ndarray
    chunks: int = 1
    delay: int = 1

    @property
    def splits(self) -> bool:
        """Whether weights have runs of their own."""
        return self.left > 0

    @property
    def stages(self) -> int:
        return int(self.forward.shape[0])

    @property
    def iterations(self) -> int:
        return int(self.forward.shape[1])

    @property
    def shares(self) -> tuple[float, float]:
        """In what share of iterations a stage makes a run of each kind, if the loop is to take as long as its
        iterations together: runs that wait for others' count as longer (`length`). And in what share the
        last stage turns a microbatch, for which nobody else waits."""
        kinds = 3 if self.splits else 2
        turns = int(np.count_nonzero(self.backward[-1] != NONE)) / self.chunks
        return self.runs_in_a_row / kinds / self.iterations, turns / self.iterations

    @cached_property
    def runs_in_a_row(self) -> float:
        """How many runs the loop takes, one after the other, where all take as long (`length`)."""
        return self.length(1, 1, 1)

    @property
    def alive(self) -> tuple[int, ...]:
        """For each stage: the most microbatches of which it keeps something at a time, each as often as there
        are chunks for which it does."""
        begun = np.cumsum(self.forward != NONE, axis=1)
        last = self.weights if self.splits else self.backward
        ended = np.cumsum(last != NONE, axis=1)
        ended = np.concatenate([np.zeros_like(ended[:, :1]), ended[:, :-1]], axis=1)
        return tuple(int(n) for n in np.max(begun - ended, axis=1))

    def length(self, forward: float, backward: float, weights: float = 0.0) -> float:
        """How long the loop takes where runs take so long, and messages no time.

        At the beginning of an iteration, for one direction after the other, a device waits for the message
        that is due, and for the neighbour to which it sent one to have come as far as to receive it. With a
        delay, messages are sent behind these waits, else at the end of an iteration.
        """
        ring = np.arange(self.stages)
        kinds = ((self.forward, forward), (self.backward, backward), (self.weights, weights))
        taken = np.zeros(self.forward.shape)
        for table, time in kinds:
            taken[table != NONE] = time
        virtual = self.chunk * self.stages + ring[:, None]
        ways = ((self.forward, self.stages * self.chunks - 1, 1), (self.backward, 0, -1))
        now = np.zeros(self.stages)
        sent: dict[tuple[int, int], np.ndarray] = {}  # by direction and iteration
        for t in range(self.iterations):
            for table, ends, way in ways:
                made = t - self.delay
                for stage in range(self.stages if made >= 0 else 0):
                    if table[stage, made] != NONE and virtual[stage, made] != ends:
                        pair = [stage, (stage + way) % self.stages]
                        now[pair] = np.maximum(now[pair], np.max(sent[way, t - 1][pair]))
                sent[way, t] = now.copy()
            now += taken[:, t]
            if self.delay == 1:
                sent |= {(way, t): now.copy() for _, _, way in ways}
        return float(np.max(now))


def one_forward_one_backward(stages: int, microbatches: int) -> Slots:
    """1F1B, see the docstring of this file."""
    shape = stages, 2 * (microbatches + stages - 1)
    forward, backward = np.full(shape, NONE, np.int32), np.full(shape, NONE, np.int32)
    for stage in range(stages):
        for m in range(microbatches):
            forward[stage, 2 * m + stage] = m
            backward[stage, 2 * m + 2 * stages - 1 - stage] = m
    return _slots(forward, backward, np.full(shape, NONE, np.int32))


def zero_bubble(stages: int, microbatches: int) -> Slots:
    """ZB-H1, see the docstring of this file."""
    count = [[0, 0, 0] for _ in range(stages)]  # of runs forwards, backwards, and of weights
    rows: list[list[tuple[int, int] | None]] = [[] for _ in range(stages)]
    ends: dict[
        tuple[int, int, int], int
    ] = {}  # of a kind of run, by stage and microbatch: the iteration
    t = 0
    while any(w < microbatches for _, _, w in count):
        made: list[tuple[int, int] | None] = []
        for stage, (f, b, w) in enumerate(count):
            turned = (0, stage, b) if stage == stages - 1 else (1, stage + 1, b)
            if b < f and ends.get(turned, t) < t:
                made.append((1, b))
            elif (
                f < microbatches
                and f - w < stages
                and (not stage or ends.get((0, stage - 1, f), t) < t)
            ):
                made.append((0, f))
            else:
                made.append((2, w) if w < b else None)
        for stage, run in enumerate(made):
            rows[stage].append(run)
            if run is not None:
                ends[run[0], stage, run[1]] = t
                count[stage][run[0]] += 1
        t += 1
    tables = [
        np.array([[r[1] if r and r[0] == kind else NONE for r in row] for row in rows], np.int32)
        for kind in range(3)
    ]
    forward, backward, weights = tables
    return _slots(forward, backward, weights)


def interleaved(stages: int, microbatches: int, chunks: int) -> Slots:
    """Interleaved 1F1B, see the docstring of this file."""
    sizes = groups(microbatches, stages)
    there = [
        (m, chunk) for first, size in _ranges(sizes) for chunk in range(chunks)
        for m in range(first, first + size)
    ]  # fmt: skip
    back = [
        (m, chunk) for first, size in _ranges(sizes) for chunk in reversed(range(chunks))
        for m in range(first, first + size)
    ]  # fmt: skip
    most = [2 * (stages - s - 1) + (chunks - 1) * max(sizes) + 1 for s in range(stages)]
    rows = None
    while rows is None:
        rows = _in_order(stages, chunks, there, back, most, _DELAY)
        most = [n + 1 for n in most]
    tables = [
        np.array([[r[1] if r and r[0] == kind else NONE for r in row] for row in rows], np.int32)
        for kind in range(3)
    ]
    chunk = np.array([[r[2] if r else 0 for r in row] for row in rows], np.int32)
    forward, backward, weights = tables
    return _slots(forward, backward, weights, chunk, chunks, _DELAY)


def _ranges(sizes: list[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for size in sizes:
        yield first, size
        first += size


def _in_order(
    stages: int, chunks: int, there: list[Key], back: list[Key], most: list[int], delay: int
) -> list[list[tuple[int, int, int] | None]] | None:
    """What each stage does in each iteration: kind of run, microbatch and chunk. Runs are made in these
    orders, as soon as they can be; None if ``most`` of them under way at a time are too few. ``delay``: as of
    `Slots`."""
    count = [[0, 0] for _ in range(stages)]  # of runs forwards and backwards
    rows: list[list[tuple[int, int, int] | None]] = [[] for _ in range(stages)]
    ends: dict[tuple[int, int, int], int] = {}  # by kind, microbatch and virtual stage
    last = stages * chunks - 1
    t = idle = 0
    while any(b < len(back) for _, b in count):
        made: list[tuple[int, int, int] | None] = []
        for stage, (f, b) in enumerate(count):
            run = None
            if f < len(there) and f - b < most[stage]:
                m, chunk = there[f]
                v = chunk * stages + stage
                if not v or ends.get((0, m, v - 1), t) + delay <= t:
                    run = 0, m, chunk
            elif b < len(back):
                m, chunk = back[b]
                v = chunk * stages + stage
                come = v == last or ends.get((1, m, v + 1), t) + delay <= t
                if come and ends.get((0, m, v), t) < t:
                    run = 1, m, chunk
            made.append(run)
        idle = 0 if any(made) else idle + 1
        if idle > delay:
            return None
        for stage, run in enumerate(made):
            rows[stage].append(run)
            if run is not None:
                ends[run[0], run[1], run[2] * stages + stage] = t
                count[stage][run[0]] += 1
        t += 1
    return rows


def _slots(
    forward: np.ndarray, backward: np.ndarray, weights: np.ndarray,
    chunk: np.ndarray | None = None, chunks: int = 1, delay: int = 1,
) -> Slots:  # fmt: skip
    """Give each run of a microbatch forwards a row on its stage until the last run that reads it, and what is
    received one until it is needed."""
    chunk = np.zeros_like(forward) if chunk is None else chunk
    # Runs are numbered by microbatch and chunk.
    there, back, own = (np.where(t == NONE, NONE, t * chunks + chunk)
                        for t in (forward, backward, weights))  # fmt: skip
    splits = bool(np.any(weights != NONE))
    puts, finishes, rows = _rows(there, own if splits else back)
    takes = finishes if not splits else _again(there, puts, back)
    leaves, resumes, left = _rows(back, own) if splits else (puts * 0, puts * 0, 0)
    return Slots(
        forward, backward, weights, puts, takes, finishes, rows, leaves, resumes, left,
        _rooms(forward, chunk, chunks, 1, delay), _rooms(backward, chunk, chunks, -1, delay), chunk, chunks,
        delay,
    )  # fmt: skip


def _rows(begins: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows for what is there from one run until another one with the same number, of each stage."""
    puts, takes = np.zeros_like(begins), np.zeros_like(begins)
    count = 0
    for stage in range(len(begins)):
        free: list[int] = []
        taken: dict[int, int] = {}
        used = 0
        for t in range(begins.shape[1]):
            if begins[stage, t] != NONE:
                if not free:
                    free, used = [used], used + 1
                taken[int(begins[stage, t])] = puts[stage, t] = min(free)
                free.remove(min(free))
            if ends[stage, t] != NONE:
                takes[stage, t] = taken.pop(int(ends[stage, t]))
                free.append(int(takes[stage, t]))
        count = max(count, used)
    return puts, takes, count


def _again(begins: np.ndarray, puts: np.ndarray, reads: np.ndarray) -> np.ndarray:
    """The rows that runs read between those that put and those that free them."""
    found = np.zeros_like(puts)
    for stage, row in enumerate(begins):
        by_microbatch = {int(m): puts[stage, t] for t, m in enumerate(row) if m != NONE}
        for t, m in enumerate(reads[stage]):
            if m != NONE:
                found[stage, t] = by_microbatch[int(m)]
    return found


def _rooms(runs: np.ndarray, chunk: np.ndarray, chunks: int, way: int, delay: int) -> Rooms | None:
    """Where what comes from the virtual stage before (``way`` is 1) or behind (-1) waits; None if nothing
    does."""
    stages = len(runs)
    made: dict[Key, int] = {}
    for stage, t in np.argwhere(runs != NONE):
        made[int(runs[stage, t]), int(chunk[stage, t]) * stages + int(stage)] = int(t)
    arrives, needed = np.full_like(runs, NONE), np.full_like(runs, NONE)
    for (m, v), t in made.items():
        sent = made.get((m, v - way))
        if sent is not None:
            number = m * chunks + v // stages
            arrives[v % stages, sent + delay] = needed[v % stages, t] = number
    if np.array_equal(arrives, needed):
        return None
    stores, fetches, count = _rows(arrives, needed)
    return Rooms(np.where(arrives == NONE, count, stores).astype(np.int32), fetches, count)


# Of stages, microbatches and, for `interleaved`, chunks.
SCHEDULES: dict[str, Callable[..., Slots]] = {
    "1f1b": one_forward_one_backward,
    "interleaved_1f1b": interleaved,
    "zb_h1": zero_bubble,
}
