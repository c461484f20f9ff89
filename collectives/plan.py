"""Parts of the plans of collectives that span processes: groups as a team sees them, and messages.

Every process of a team must come to the same plan, so plans depend only on the collective, its groups and
the owners of their members, never on what is local. Packed data is laid out process by process, and there
group by group, operand by operand, member by member.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .memory import pool
from .types import TensorType

if TYPE_CHECKING:
    from .team import Team

Array = np.ndarray
Operands = Mapping[int, Sequence[Array]]
Results = dict[int, list[Array]]
Step = Callable[[Operands, Results], None]
# Views an array in a message's bytes.
View = Callable[[Array], Array]

# From here on an operand is worth a message of its own, which saves copying it.
LARGE = 1 << 16


@dataclass(frozen=True)
class Member:
    """A member of a group: its place there, its logical id, its process's index in the team."""

    position: int
    id: int
    process: int


@dataclass(frozen=True)
class Group:
    """A group as the processes of a team see it; ``local`` are the members of this one."""

    members: tuple[Member, ...]
    local: tuple[Member, ...]
    by_process: tuple[tuple[Member, ...], ...]

    @property
    def size(self) -> int:
        return len(self.members)


def group_of(ids: tuple[int, ...], owner: Mapping[int, int], team: Team) -> Group:
    index = {process: n for n, process in enumerate(team.processes)}
    members = tuple(Member(n, i, index[owner[i]]) for n, i in enumerate(ids))
    by_process = tuple(tuple(m for m in members if m.process == q) for q in range(team.size))
    return Group(members, by_process[team.index], by_process)


def one_each(groups: Sequence[Group]) -> bool:
    """Whether no process has more than one member of a group."""
    return all(len(members) == 1 for g in groups for members in g.by_process)


class Layout:
    """Offsets of slots in a message. Slots are aligned to 64 bytes, so that they can be arrays."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, shape: tuple[int, ...], dtype: np.dtype) -> View:
        """Add an array; what it returns views the array in a buffer of bytes."""
        start = self.nbytes
        stop = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.nbytes = -(-stop // 64) * 64
        return lambda buffer: buffer[start:stop].view(dtype).reshape(shape)


def new_bytes(nbytes: int) -> Array:
    return pool.empty((nbytes,), np.dtype(np.uint8))


def offsets_of(counts: Sequence[int]) -> list[int]:
    offsets = [0]
    for count in counts[:-1]:
        offsets.append(offsets[-1] + count)
    return offsets


class Gathered:
    """Every process gets the operands of all members: for (group, operand) items of one message."""

    def __init__(
        self,
        items: Sequence[tuple[int, int]],
        types: Sequence[TensorType],
        groups: Sequence[Group],
        team: Team,
    ) -> None:
        # slots[q]: (item, member, view) of what process q contributes
        self.slots: list[list[tuple[tuple[int, int], Member, View]]] = []
        counts = []
        for q in range(team.size):
            layout = Layout()
            self.slots.append(
                [
                    ((g, k), member, layout.add(types[k].shape, types[k].numpy))
                    for g, k in items
                    for member in groups[g].by_process[q]
                ]
            )
            counts.append(layout.nbytes)
        offsets = offsets_of(counts)
        self.regions = [slice(o, o + c) for o, c in zip(offsets, counts, strict=True)]
        self.total = sum(counts)
        self.index = team.index
        self._gather = team.gather(counts, offsets)

    def __call__(self, operands: Operands) -> list[tuple[tuple[int, int], Member, Array]]:
        """(item, member, operand) of all members; the arrays view one buffer."""
        buffer = new_bytes(self.total)
        own = buffer[self.regions[self.index]]
        for (_, k), member, view in self.slots[self.index]:
            np.copyto(view(own), operands[member.id][k])
        self._gather(None, buffer)
        return [
            (item, member, view(buffer[region]))
            for region, slots in zip(self.regions, self.slots, strict=True)
            for item, member, view in slots
        ]
