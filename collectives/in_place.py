"""Wires between processes that have memory in common: what a message brings is read where its sender put it.

Over MPI a message is copied into the receiver's stage. In memory that both see that is not needed, unless
what has come is sent on, changed or needed in later rounds. A sender, on the other hand, must not write
where somebody may still read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from .wires import ARRIVED, BY_AFTER, BY_THEN, COPIED, STAGE, Action, Message, Place, Round, Wire


def in_place(wire: Wire) -> Wire:
    """The wire of processes that read each other's stages: with `Message.read`, and rounds that need not be
    `Round.acknowledged` where nothing is written to what they send."""
    rounds = list(wire.rounds)
    after = wire.after
    for number, round_ in enumerate(rounds):
        later = rounds[number + 1 :]
        arrived = _Regions([(m.offset, m.nbytes) for m in round_.receives])
        spoiled = {k for r in later for m in (*r.sends, *r.receives) for k in arrived.touched(m)}
        spoiled |= {k for r in later for a in r.then for k in arrived.used(a)}
        spoiled |= {k for a in (*round_.then, *after) for k in arrived.written(a)}
        in_then = {k for a in round_.then for k in arrived.read(a)}
        in_after = {k for a in after for k in arrived.read(a)}
        spoiled |= in_then & in_after | {k for a in (*round_.then, *after) for k in arrived.cut(a)}
        if later:
            spoiled |= in_after
        direct = {k: BY_THEN if k in in_then else BY_AFTER for k in range(len(arrived))}
        direct = {k: read for k, read in direct.items() if k not in spoiled}
        receives = tuple(
            m._replace(read=direct.get(k, COPIED)) for k, m in enumerate(round_.receives)
        )
        then = tuple(arrived.directly(a, direct) for a in round_.then)
        if not later:
            after = tuple(arrived.directly(a, direct) for a in after)
        rounds[number] = Round(round_.sends, receives, then)
    for number, round_ in enumerate(rounds):
        sent = _Regions([(m.offset, m.nbytes) for m in round_.sends])
        followers = rounds[number + 1 :]
        copied = [m for r in followers for m in r.receives if m.read == COPIED]
        actions = [a for r in rounds[number:] for a in r.then]
        acknowledged = any(sent.touched(m) for m in copied) or any(sent.written(a) for a in actions)
        rounds[number] = round_._replace(acknowledged=acknowledged)
    return Wire(wire.stage, wire.before, tuple(rounds), after)


class _Regions:
    """Regions of the stage that do not overlap, by number: which of them what is done has to do with."""

    def __init__(self, regions: Sequence[tuple[int, int]]) -> None:
        order = sorted((offset, offset + nbytes, k) for k, (offset, nbytes) in enumerate(regions))
        self._order = [region for region in order if region[0] < region[1]]
        self._begins = [begin for begin, _, _ in self._order]
        self._size = len(regions)

    def __len__(self) -> int:
        return self._size

    def _overlapping(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        for region in self._order[max(bisect_right(self._begins, begin) - 1, 0) :]:
            if region[0] >= end:
                return
            if region[1] > begin:
                yield region

    def _at(self, place: Place, action: Action) -> Iterator[tuple[int, bool, int]]:
        """The regions at a place of an action: their numbers, whether all of it lies in there, and where."""
        if place.where != STAGE:
            return
        step = action.to_step if place is action.to else action.from_step
        end = place.offset + (action.rows - 1) * step + action.nbytes
        for begin, stop, k in self._overlapping(place.offset, end):
            yield k, begin <= place.offset and end <= stop, place.offset - begin

    def touched(self, message: Message) -> list[int]:
        end = message.offset + message.nbytes
        return [k for _, _, k in self._overlapping(message.offset, end)]

    def written(self, action: Action) -> list[int]:
        return [k for k, _, _ in self._at(action.to, action)]

    def read(self, action: Action) -> list[int]:
        return [k for k, _, _ in self._at(action.given, action)]

    def used(self, action: Action) -> list[int]:
        return self.written(action) + self.read(action)

    def cut(self, action: Action) -> list[int]:
        """Those that an action reads together with something else."""
        return [k for k, whole, _ in self._at(action.given, action) if not whole]

    def directly(self, action: Action, direct: Mapping[int, int]) -> Action:
        """The action, reading where the sender put it what is in ``direct``."""
        for k, _, offset in self._at(action.given, action):
            if k in direct:
                return action._replace(given=Place(ARRIVED, k, offset))
        return action
