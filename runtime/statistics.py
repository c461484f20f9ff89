"""Counts of what the streams of this process have communicated.

Each stream has `Counters` of its own and adds to them without a lock; `total` sums them up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Of one stream, since its beginning.

    ``seconds``: time in collectives, from when a collective's operands are there to its end.
    ``waited``: the part of it during which the program had nothing else to do (exposed time).
    ``collectives``: collectives run. ``messages`` and ``bytes``: as the communicator counts them.
    """

    seconds: float = 0.0
    waited: float = 0.0
    collectives: int = 0
    messages: int = 0
    bytes: int = 0


_all: list[Counters] = []


def new_counters() -> Counters:
    """Counters for a stream to write, that `total` includes."""
    counters = Counters()
    _all.append(counters)
    return counters


def total() -> Counters:
    """The sum over the streams of this process, as of now."""
    return Counters(*(sum(getattr(c, f.name) for c in _all) for f in fields(Counters)))
