"""Processor cores: how the ranks of a job share those of their hosts, and what follows for them."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
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
