"""Counts of what this process has communicated, over all its executors.

Whoever has `Counters` (an executor) is registered by `include`, and kept no longer than it lives: what
it had counted is then lost, which only a program that makes its devices anew will see.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

from .instrument import Counters


class Counting(Protocol):
    """Counts: since the beginning, summed over its streams."""

    def counters(self) -> Counters: ...


_included: WeakSet[Counting] = WeakSet()


def include(source: Counting) -> None:
    """Have `total` include the counters of ``source``."""
    _included.add(source)


def total() -> Counters:
    """The sum, as of now."""
    return sum((source.counters() for source in list(_included)), Counters())
