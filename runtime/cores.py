"""Processor cores: how the ranks of a job share those of their hosts, and what follows for them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its host, and the cores that it may use there."""

    host: str
    cores: frozenset[int]


def usable() -> frozenset[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def share(places: Sequence[Place], place: Place) -> float:
    """Cores for each of the ranks that share cores with those at ``place`` (themselves among them)."""
    sharers = [p for p in places if p.host == place.host and p.cores & place.cores]
    together: frozenset[int] = frozenset().union(*(p.cores for p in sharers))
    return len(together) / len(sharers)


def of_rank(places: Sequence[Place], rank: int) -> int:
    """How many cores a rank should compute on, so that all that share cores with it can."""
    return max(1, int(share(places, places[rank])))


@contextmanager
def announced(count: int) -> Iterator[None]:
    """Within it, ``NPROC`` in the environment says on how many cores to compute, unless it is set already.

    XLA's CPU client makes so many threads when it is created. (It is for testers that XLA reads it;
    tests/runtime/test_cores.py sees that it does.)
    """
    if "NPROC" in os.environ:
        yield
        return
    os.environ["NPROC"] = str(count)
    try:
        yield
    finally:
        del os.environ["NPROC"]


def patience(places: Sequence[Place]) -> float:
    """Seconds for which a thread that waits for another rank may keep a core busy: one figure for all ranks.

    A rank that has two cores to itself can compute on one and wait on the other. With less than that, or with
    links between hosts, on which waits are long, what waits longer than a message between processes of a host
    takes leaves its core to those that compute; with less than a core, at once.
    """
    least = min(share(places, place) for place in set(places))
    if least < 1:
        return 50e-6
    if least < 2 or len({p.host for p in places}) > 1:
        return 1e-3
    return math.inf
