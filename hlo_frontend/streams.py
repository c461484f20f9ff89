"""Which collectives share a stream: those over the same groups of devices, and apart from them transfers.

Collectives of a stream run one after the other, in the order of their starts; streams do not wait for each
other. Every set of groups has a stream of its own, since different groups proceed independently; so has
the point-to-point traffic of each set of devices, which would otherwise wait behind collectives, and so have
permutes that cross into the next iteration (`passes.rotate`).

Invariant: the numbers of streams follow from the order of starts in the program, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from stretto.collectives.ops import Collective

# A stream is a thread and, where processes are involved, communicators: more groups than this share the last.
MOST_STREAMS = 8


def stream_key(collective: Collective) -> Hashable:
    """Equal for collectives that belong on one stream."""
    if collective.is_point_to_point:
        return "point to point", tuple(sorted({m for pair in collective.pairs for m in pair}))
    return collective.groups


@dataclass
class Streams:
    """The streams of a program, numbered as they come up."""

    numbers: dict[Hashable, int] = field(default_factory=dict)

    def number(self, collective: Collective) -> int:
        return self._number(stream_key(collective))

    def crossing(self, number: int) -> int:
        """The stream of a start that a loop carries, the ``number``-th of its own."""
        return self._number(("crossing", number))

    def _number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, min(len(self.numbers), MOST_STREAMS - 1))
