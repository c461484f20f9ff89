"""Statistics of this process over all its executors: communication, compilations, measured programs.

An object with `Counters` (an executor) is registered by `include` and referred to weakly: when it is gone,
its counts are gone too, which only a program that makes its devices anew will see.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakSet


@dataclass
class Counters:
    """Communication of one stream since the start. Written by the thread that runs the stream's tasks.

    Data that no device reads is left out (`docs/pipelines.md`): ``skipped`` messages were not sent,
    ``skipped_runs`` runs of segments with ``skipped_flops`` floating point operations not made.
    """

    collectives: int = 0
    messages: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    skipped: int = 0
    skipped_runs: int = 0
    skipped_flops: float = 0.0

    def __add__(self, other: Counters) -> Counters:
        return Counters(
            self.collectives + other.collectives,
            self.messages + other.messages,
            self.nbytes + other.nbytes,
            self.seconds + other.seconds,
            self.skipped + other.skipped,
            self.skipped_runs + other.skipped_runs,
            self.skipped_flops + other.skipped_flops,
        )


class Counting(Protocol):
    """An object that counts. ``counters()``: since the beginning, summed over its streams."""

    def counters(self) -> Counters: ...


@dataclass(frozen=True)
class Compilations:
    """Counts of compilations since the process began.

    ``programs``: taken through XLA's partitioner and optimizer; ``segments``: of them, code was generated
    for by the engine; ``restored``: segments whose code was there already, from a compilation cache or a
    serialized executable.
    """

    programs: int = 0
    segments: int = 0
    restored: int = 0


@dataclass(frozen=True)
class Profiled:
    """A program that was measured (``STRETTO_PROFILE=1``).

    ``runs`` of it were; ``segments``: how many of its segments ran in them. Seconds of a run of its plan:
    ``predicted`` by the table of costs, ``measured`` by what its segments took.
    """

    program: str
    runs: int
    segments: int
    predicted: float
    measured: float

    def __str__(self) -> str:
        return (
            f"{self.program}: {self.segments} segments measured in {self.runs} runs; a run should take "
            f"{self.measured * 1e3:.3f} ms by that, {self.predicted * 1e3:.3f} ms by the table. The next job "
            "plans by what was measured"
        )


_included: WeakSet[Counting] = WeakSet()
_compilations = Compilations()
_profiled: list[Profiled] = []
_lock = threading.Lock()


def include(source: Counting) -> None:
    """Have `total` include the counters of ``source``."""
    _included.add(source)


def total() -> Counters:
    """The sum, as of now."""
    return sum((source.counters() for source in list(_included)), Counters())


def compiled(*, programs: int = 0, segments: int = 0, restored: int = 0) -> None:
    """Count compilations, see `Compilations`."""
    global _compilations
    with _lock:
        _compilations = replace(
            _compilations,
            programs=_compilations.programs + programs,
            segments=_compilations.segments + segments,
            restored=_compilations.restored + restored,
        )


def compilations() -> Compilations:
    """What was compiled, as of now."""
    return _compilations


def profiled(done: Profiled) -> None:
    """A program was measured."""
    with _lock:
        _profiled.append(done)


def profiles() -> tuple[Profiled, ...]:
    """The programs that were measured, in the order in which they were done."""
    with _lock:
        return tuple(_profiled)
