"""Group collectives whose members live in several processes.

Each class here and in `spanning_reduce.py` serves one kind, for all groups of one collective that span the
same processes (a *team*): the local members' operands are combined or packed in memory, one message goes
between each two processes for all these groups, and results that members share are made once. Large
operands that lie as MPI needs them are sent from where they are and received where they will stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .communicator import Reducer
from .direct import Direct, Post, posting
from .local import check_parts, is_leading, part, root_of
from .memory import as_bytes, pool
from .ops import Collective, Kind
from .plan import (
    LARGE,
    Array,
    Gathered,
    Group,
    Layout,
    Member,
    Operands,
    Results,
    Step,
    View,
    group_of,
    new_bytes,
    offsets_of,
    one_each,
)
from .ragged import check_ragged_targets, ragged_rows
from .spanning_reduce import AllReduce, Folded, ReduceScatter
from .types import TensorType

if TYPE_CHECKING:
    from .team import Team


def spanning_collective(
    collective: Collective,
    groups: Sequence[tuple[int, ...]],
    owner: Mapping[int, int],
    team: Team,
    reducer: Reducer | None = None,
) -> Step:
    """The collective for groups that span exactly the processes of ``team``.

    The step reads the operands of all local members and puts their results in. Raises as
    `local.local_collective` does.
    """
    return _BUILDERS[collective.kind](
        collective, [group_of(g, owner, team) for g in groups], team, reducer
    )


class _AllGather:
    """Shards of all members; all local members share the result."""

    # Posts it, where all its messages are known beforehand.
    post: Post | None = None

    def __init__(
        self, collective: Collective, groups: list[Group], team: Team, reducer: Reducer | None
    ) -> None:
        self.dimension, self.types, self.groups = collective.dimension, collective.results, groups
        for type_ in self.types:
            for group in groups:
                check_parts(type_, self.dimension, group.size)
        items = [(g, k) for k in range(len(self.types)) for g in range(len(groups))]
        large = {
            (g, k)
            for g, k in items
            if self._lies_right(groups[g], self.types[k])
            and (len(items) == 1 or self.types[k].nbytes >= LARGE)
        }
        self.direct = [self._direct(team, g, k) for g, k in items if (g, k) in large]
        self.packed_items = [item for item in items if item not in large]
        self.packed = Gathered(self.packed_items, collective.operands, groups, team)
        if not self.packed_items:
            self.post = posting(self.direct)

    def _lies_right(self, group: Group, type_: TensorType) -> bool:
        """Whether each process's shards are one piece of the result."""
        return is_leading(type_, self.dimension) and all(
            members[-1].position - members[0].position == len(members) - 1
            for members in group.by_process
        )

    def _direct(self, team: Team, g: int, k: int) -> Direct:
        """Shards are received where they belong in the result."""
        type_, group, dimension = self.types[k], self.groups[g], self.dimension
        shape, dtype = type_.shape, type_.numpy
        shard = type_.size * dtype.itemsize // group.size
        gather = team.gather(
            [shard * len(members) for members in group.by_process],
            [shard * members[0].position for members in group.by_process],
        )
        alone, local, size = one_each([group]), group.local, group.size

        def prepare(operands: Operands, results: Results) -> tuple[Array | None, Array]:
            out = pool.empty(shape, dtype)
            for member in local:
                results[member.id][k] = out
            if alone:
                return as_bytes(operands[local[0].id][k]), as_bytes(out)
            for member in local:
                np.copyto(part(out, dimension, member.position, size), operands[member.id][k])
            return None, as_bytes(out)

        return Direct(prepare, gather)

    def __call__(self, operands: Operands, results: Results) -> None:
        for step in self.direct:
            step(operands, results)
        if not self.packed_items:
            return
        outs = {
            (g, k): pool.empty(self.types[k].shape, self.types[k].numpy)
            for g, k in self.packed_items
        }
        for (g, k), member, shard in self.packed(operands):
            target = part(outs[g, k], self.dimension, member.position, self.groups[g].size)
            np.copyto(target, shard)
        for (g, k), out in outs.items():
            for member in self.groups[g].local:
                results[member.id][k] = out


class _AllToAll:
    """Parts of every member for every other, in array form or tuple form."""

    def __init__(
        self, collective: Collective, groups: list[Group], team: Team, reducer: Reducer | None
    ) -> None:
        self.groups, self.types, self.index = groups, collective.results, team.index
        self.dimension = collective.dimension
        self.tuple_form = collective.tuple_form
        for group in groups:
            for type_ in self.types:
                if not self.tuple_form:
                    check_parts(type_, self.dimension, group.size)
                elif len(self.types) != group.size:
                    raise ValueError(f"{len(self.types)} operands for a group of {group.size}")
        self.direct: Step | None = None
        if (
            not self.tuple_form
            and len(groups) == len(self.types) == 1
            and one_each(groups)
            and is_leading(self.types[0], self.dimension)
        ):
            self.direct = self._direct(team)
            return
        me = team.index
        outgoing = [self._slots(me, q) for q in range(team.size)]
        incoming = [self._slots(q, me) for q in range(team.size)]
        sends = [0 if q == me else outgoing[q][0] for q in range(team.size)]
        receives = [0 if q == me else incoming[q][0] for q in range(team.size)]
        self.sent = [
            (offset, slots)
            for q, (offset, (_, slots)) in enumerate(zip(offsets_of(sends), outgoing, strict=True))
            if q != me
        ]
        self.received = [
            (offset, slots)
            for q, (offset, (_, slots)) in enumerate(
                zip(offsets_of(receives), incoming, strict=True)
            )
            if q != me
        ]
        self.totals = (sum(sends), sum(receives))
        self.exchange = team.exchange(sends, offsets_of(sends), receives, offsets_of(receives))

    def _slots(self, source: int, target: int) -> tuple[int, list[_Slot]]:
        """Bytes and slots of what process ``source`` sends to process ``target``."""
        layout, slots = Layout(), []
        for g, group in enumerate(self.groups):
            for a in group.by_process[source]:
                for b in group.by_process[target]:
                    for k, type_ in enumerate(self.types):
                        shape = list(type_.shape)
                        if self.tuple_form:
                            if k != b.position:
                                continue
                        else:
                            shape[self.dimension] //= group.size
                        slots.append(_Slot(g, k, a, b, layout.add(tuple(shape), type_.numpy)))
        return layout.nbytes, slots

    def _direct(self, team: Team) -> Step:
        """Parts go from the operand to where they stay in the result."""
        (type_,), (group,) = self.types, self.groups
        (member,) = group.local
        size = type_.size * type_.numpy.itemsize // group.size
        counts = [size] * team.size
        places = [members[0].position * size for members in group.by_process]
        exchange = team.exchange(counts, places, counts, places)

        def run(operands: Operands, results: Results) -> None:
            out = pool.empty(type_.shape, type_.numpy)
            exchange(as_bytes(operands[member.id][0]), as_bytes(out))
            results[member.id][0] = out

        return run

    def _source(self, operands: Operands, g: int, k: int, a: Member, b: Member) -> Array:
        """What ``a`` has for ``b``."""
        operand = operands[a.id][k]
        if self.tuple_form:
            return operand
        return part(operand, self.dimension, b.position, self.groups[g].size)

    def _target(self, results: Results, g: int, k: int, a: Member, b: Member) -> Array:
        """Where ``b`` keeps what comes from ``a``."""
        if self.tuple_form:
            return results[b.id][a.position]
        return part(results[b.id][k], self.dimension, a.position, self.groups[g].size)

    def __call__(self, operands: Operands, results: Results) -> None:
        if self.direct is not None:
            self.direct(operands, results)
            return
        outgoing, incoming = (new_bytes(total) for total in self.totals)
        for offset, slots in self.sent:
            for s in slots:
                np.copyto(s.view(outgoing[offset:]), self._source(operands, s.g, s.k, s.a, s.b))
        self.exchange(outgoing, incoming)
        for g, group in enumerate(self.groups):
            for b in group.local:
                results[b.id][:] = [pool.empty(t.shape, t.numpy) for t in self.types]
            for a in group.local:
                for b in group.local:
                    for k in (b.position,) if self.tuple_form else range(len(self.types)):
                        np.copyto(
                            self._target(results, g, k, a, b), self._source(operands, g, k, a, b)
                        )
        for offset, slots in self.received:
            for s in slots:
                np.copyto(self._target(results, s.g, s.k, s.a, s.b), s.view(incoming[offset:]))


@dataclass(frozen=True)
class _Slot:
    """What goes from member ``a`` to member ``b`` of group ``g``, of operand ``k``."""

    g: int
    k: int
    a: Member
    b: Member
    view: View


class _Broadcast:
    """The operands of each group's root; local members share the result."""

    def __init__(
        self, collective: Collective, groups: list[Group], team: Team, reducer: Reducer | None
    ) -> None:
        self.groups, self.types, self.team = groups, collective.results, team
        self.dynamic = collective.dynamic_root

    def __call__(self, operands: Operands, results: Results) -> None:
        for group in self.groups:
            roots = [operands[m.id][-1] for m in group.local]
            root = group.members[root_of(roots, group.size) if self.dynamic else 0]
            for k, type_ in enumerate(self.types):
                if root.process == self.team.index:
                    out = pool.copy(operands[root.id][k])
                else:
                    out = pool.empty(type_.shape, type_.numpy)
                if type_.size:
                    self.team.broadcast(as_bytes(out), root.process)
                for member in group.local:
                    results[member.id][k] = out


class _RaggedAllToAll:
    """Rows of varying number. The members first tell each other how many, and where to put them."""

    def __init__(
        self, collective: Collective, groups: list[Group], team: Team, reducer: Reducer | None
    ) -> None:
        self.groups, self.team = groups, team
        self.updates = [collective.operands[2].size // group.size for group in groups]

    def __call__(self, operands: Operands, results: Results) -> None:
        for group, updates in zip(self.groups, self.updates, strict=True):
            self._run(group, updates, operands, results)

    def _run(self, group: Group, updates: int, operands: Operands, results: Results) -> None:
        team = self.team
        ids = [member.id for member in group.members]
        rows = {m.id: ragged_rows(operands[m.id], ids, m.id) for m in group.local}

        # Of each pair of members: how many rows of each update, and where they go.
        plans_out = [
            np.array(
                [
                    [rows[a.id][1][b.position], rows[a.id][2][b.position]]
                    for a in group.local
                    for b in members
                ],
                np.int64,
            )
            for members in group.by_process
        ]
        counts = [plan.nbytes for plan in plans_out]
        plan_in = new_bytes(sum(counts))
        offsets = offsets_of(counts)
        team.exchange(counts, offsets, counts, offsets)(
            np.concatenate([plan.reshape(-1) for plan in plans_out]).view(np.uint8), plan_in
        )
        plans_in = [
            plan_in[o : o + c].view(np.int64).reshape(len(members), len(group.local), 2, updates)
            for o, c, members in zip(offsets, counts, group.by_process, strict=True)
        ]
        for b, member in enumerate(group.local):
            for q, members in enumerate(group.by_process):
                for a, source in enumerate(members):
                    sizes, targets = plans_in[q][a, b]
                    expected = rows[member.id][3][source.position]
                    check_ragged_targets(
                        targets, sizes, expected, len(operands[member.id][1]), source.id, member.id
                    )

        sample = operands[group.local[0].id][0]
        tail, dtype = sample.shape[1:], sample.dtype
        width = int(np.prod(tail, dtype=np.int64)) * dtype.itemsize
        pieces = [
            [
                as_bytes(operands[a.id][0][start : start + count])
                for a in group.local
                for b in members
                for start, count in zip(
                    rows[a.id][0][b.position], rows[a.id][1][b.position], strict=True
                )
            ]
            for members in group.by_process
        ]
        sends = [sum(piece.nbytes for piece in row) for row in pieces]
        receives = [int(plan[:, :, 0].sum()) * width for plan in plans_in]
        outgoing, incoming = new_bytes(sum(sends)), new_bytes(sum(receives))
        position = 0
        for row in pieces:
            for piece in row:
                outgoing[position : position + piece.nbytes] = piece
                position += piece.nbytes
        team.exchange(sends, offsets_of(sends), receives, offsets_of(receives))(outgoing, incoming)

        outs = [pool.copy(operands[m.id][1]) for m in group.local]
        position = 0
        for plan in plans_in:
            for per_source in plan:
                for out, (sizes, targets) in zip(outs, per_source, strict=True):
                    for count, target in zip(sizes, targets, strict=True):
                        nbytes = int(count) * width
                        piece = incoming[position : position + nbytes]
                        as_bytes(out[target : target + count])[:] = piece
                        position += nbytes
        for member, out in zip(group.local, outs, strict=True):
            results[member.id][0] = out


def _all_reduce(
    collective: Collective, groups: list[Group], team: Team, reducer: Reducer | None
) -> Step:
    kind = AllReduce if collective.kind is Kind.ALL_REDUCE else ReduceScatter
    if reducer is not None:
        return Folded(collective, groups, team, reducer)
    return kind(collective, groups, team, None)


_BUILDERS: dict[Kind, Callable[[Collective, list[Group], Team, Reducer | None], Step]] = {
    Kind.ALL_REDUCE: _all_reduce,
    Kind.REDUCE_SCATTER: _all_reduce,
    Kind.ALL_GATHER: _AllGather,
    Kind.ALL_TO_ALL: _AllToAll,
    Kind.BROADCAST: _Broadcast,
    Kind.RAGGED_ALL_TO_ALL: _RaggedAllToAll,
}
