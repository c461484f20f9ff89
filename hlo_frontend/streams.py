"""Which collectives share a stream: those over the same groups of devices.

Collectives of a stream run one after the other, in the order of their starts; streams do not wait for each
other. Every set of groups has its own stream, since different groups proceed independently. Point-to-point
transfers have streams of their own, one for each set of devices, so that they do not wait behind collectives;
so have permutes that cross into the next iteration (`passes.rotate`).

Invariant: the numbers of streams follow from the order of starts in the program, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from stretto.collectives.ops import Collective

# A stream is a thread and, between processes, communicators. If there are more groups, the last stream is
# shared.
MOST_STREAMS = 8


def stream_key(collective: Collective) -> Hashable:
    """A key that is equal for collectives of one stream."""
    if collective.is_point_to_point:
        return "point to point", tuple(sorted({m for pair in collective.pairs for m in pair}))
    return collective.groups


@dataclass
class Streams:
    """The streams of a program, numbered by their first use."""

    numbers: dict[Hashable, int] = field(default_factory=dict)

    def number(self, collective: Collective) -> int:
        return self._number(stream_key(collective))

    def crossing(self, number: int) -> int:
        """The stream of permutes that cross into the next iteration; ``number``: which one of a loop's."""
        return self._number(("crossing", number))

    def _number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, min(len(self.numbers), MOST_STREAMS - 1))
