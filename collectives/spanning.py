"""Group collectives whose members live in several processes.

Each class here serves one kind, for all groups of one collective that span the same processes (a *team*):
the local members' operands are combined or packed in memory, one message goes between each two processes
for all these groups, and results that members share are made once. Large operands that lie as MPI needs
them are sent from where they are and received where they will stay.

Every process of a team must come to the same plan, so plans depend only on the collective, its groups and
the owners of their members, never on what is local. Packed data is laid out process by process, and there
group by group, operand by operand, member by member.

Partial results of narrow floats travel as f32 where some process combines several members and the wider
message costs little (small ones, or types below 16 bits); elsewhere f16 and bf16 travel as they are and
are rounded once in each process and once in all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .communicator import Reducer
from .local import (
    check_parts,
    check_ragged_targets,
    combiners,
    fold,
    is_leading,
    part,
    ragged_rows,
    root_of,
)
from .memory import pool
from .ops import Collective, Kind
from .reduce import is_narrow_float
from .types import ELEMENT_TYPES, TensorType

if TYPE_CHECKING:
    from .mpi import Team

Array = np.ndarray
Operands = Mapping[int, Sequence[Array]]
Results = dict[int, list[Array]]
Step = Callable[[Operands, Results], None]
# Views an array in a message's bytes.
View = Callable[[Array], Array]

# From here on an operand is worth a message of its own, which saves copying it.
_LARGE = 1 << 16
# Small operands share messages of at most this size.
_PACK = 1 << 20
# Partial results of narrow floats up to this size travel as f32.
_WIDE_WIRE = 1 << 13


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
        collective, [_group(g, owner, team) for g in groups], team, reducer
    )


def _group(ids: tuple[int, ...], owner: Mapping[int, int], team: Team) -> Group:
    index = {process: n for n, process in enumerate(team.processes)}
    members = tuple(Member(n, i, index[owner[i]]) for n, i in enumerate(ids))
    by_process = tuple(tuple(m for m in members if m.process == q) for q in range(team.size))
    return Group(members, by_process[team.index], by_process)


def _one_each(groups: Sequence[Group]) -> bool:
    """Whether no process has more than one member of a group."""
    return all(len(members) == 1 for g in groups for members in g.by_process)


class _Layout:
    """Offsets of slots in a message. Slots are aligned to 64 bytes, so that they can be arrays."""

    def __init__(self) -> None:
        self.nbytes = 0

    def add(self, shape: tuple[int, ...], dtype: np.dtype) -> View:
        """Add an array; what it returns views the array in a buffer of bytes."""
        start = self.nbytes
        stop = start + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        self.nbytes = -(-stop // 64) * 64
        return lambda buffer: buffer[start:stop].view(dtype).reshape(shape)


def _bytes(nbytes: int) -> Array:
    return pool.empty((nbytes,), np.dtype(np.uint8))


def _flat_bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _offsets(counts: Sequence[int]) -> list[int]:
    offsets = [0]
    for count in counts[:-1]:
        offsets.append(offsets[-1] + count)
    return offsets


class _AllReduce:
    """Reduce in memory, then between processes; all local members share the result."""

    def __init__(
        self, collective: Collective, groups: list[Group], team: Team, reducer: Reducer | None
    ) -> None:
        assert collective.reduction is not None
        self.groups, self.types = groups, collective.operands
        self.combines = combiners(collective)
        self.local_ids = [[m.id for m in g.local] for g in groups]
        several = not _one_each(groups)
        alone: list[tuple[int, int]] = []
        packs: dict[str, list[list[tuple[int, int]]]] = {}
        filled: dict[str, int] = {}
        items = [(g, k) for k in range(len(self.types)) for g in range(len(groups))]
        for g, k in items:
            type_ = self.types[k]
            size = type_.size * type_.numpy.itemsize
            if size >= _LARGE or len(items) == 1:
                alone.append((g, k))
                continue
            if type_.dtype not in packs or filled[type_.dtype] + size > _PACK:
                packs.setdefault(type_.dtype, []).append([])
                filled[type_.dtype] = 0
            packs[type_.dtype][-1].append((g, k))
            filled[type_.dtype] += size
        self.steps: list[Step] = []
        for g, k in alone:
            self.steps.append(self._alone(team, collective, g, k, several))
        for dtype, lists in packs.items():
            for packed in lists:
                self.steps.append(self._packed(team, collective, dtype, packed, several))

    def _alone(self, team: Team, collective: Collective, g: int, k: int, several: bool) -> Step:
        type_, ids, combine = self.types[k], self.local_ids[g], self.combines[k]
        assert collective.reduction is not None
        shape, dtype, count = type_.shape, type_.numpy, type_.size
        wire = _wire(type_.dtype, count, several)
        wire_dtype = ELEMENT_TYPES[wire].numpy
        reduce = team.all_reduce(type_.dtype, collective.reduction, count, wire)

        def run(operands: Operands, results: Results) -> None:
            out = pool.empty(shape, dtype)
            if count:
                flat = out.reshape(-1)
                if len(ids) == 1 and wire_dtype == dtype:
                    partial = operands[ids[0]][k].reshape(-1)
                else:
                    partial = flat if wire_dtype == dtype else pool.empty((count,), wire_dtype)
                    combine([operands[i][k].reshape(-1) for i in ids], partial)
                reduce(partial, flat)
            for i in ids:
                results[i][k] = out

        return run

    def _packed(
        self,
        team: Team,
        collective: Collective,
        dtype: str,
        items: list[tuple[int, int]],
        several: bool,
    ) -> Step:
        element = ELEMENT_TYPES[dtype].numpy
        line = 64 // element.itemsize
        places, total = [], 0
        for g, k in items:
            size = self.types[k].size
            shape = self.types[k].shape
            places.append(
                (self.local_ids[g], k, self.combines[k], slice(total, total + size), shape)
            )
            total = -(-(total + size) // line) * line
        assert collective.reduction is not None
        wire = _wire(dtype, total, several)
        wire_dtype = ELEMENT_TYPES[wire].numpy
        reduce = team.all_reduce(dtype, collective.reduction, total, wire) if total else None

        def run(operands: Operands, results: Results) -> None:
            out = pool.empty((total,), element)
            partial = out if wire_dtype == element else pool.empty((total,), wire_dtype)
            for ids, k, combine, place, _ in places:
                combine([operands[i][k].reshape(-1) for i in ids], partial[place])
            if reduce is not None:
                reduce(partial, out)
            for ids, k, _, place, shape in places:
                result = out[place].reshape(shape)
                for i in ids:
                    results[i][k] = result

        return run

    def __call__(self, operands: Operands, results: Results) -> None:
        for step in self.steps:
            step(operands, results)


def _wire(dtype: str, count: int, several: bool) -> str:
    element = ELEMENT_TYPES[dtype]
    if not several or not is_narrow_float(element):
        return dtype
    small = count * 4 <= _WIDE_WIRE
    return "f32" if small or element.bits < 16 else dtype


class _Gathered:
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
            layout = _Layout()
            self.slots.append(
                [
                    ((g, k), member, layout.add(types[k].shape, types[k].numpy))
                    for g, k in items
                    for member in groups[g].by_process[q]
                ]
            )
            counts.append(layout.nbytes)
        offsets = _offsets(counts)
        self.regions = [slice(o, o + c) for o, c in zip(offsets, counts, strict=True)]
        self.total = sum(counts)
        self.index = team.index
        self._gather = team.gather(counts, offsets)

    def __call__(self, operands: Operands) -> list[tuple[tuple[int, int], Member, Array]]:
        """(item, member, operand) of all members; the arrays view one buffer."""
        buffer = _bytes(self.total)
        own = buffer[self.regions[self.index]]
        for (_, k), member, view in self.slots[self.index]:
            np.copyto(view(own), operands[member.id][k])
        self._gather(None, buffer)
        return [
            (item, member, view(buffer[region]))
            for region, slots in zip(self.regions, self.slots, strict=True)
            for item, member, view in slots
        ]


class _AllGather:
    """Shards of all members; all local members share the result."""

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
            and (len(items) == 1 or self.types[k].nbytes >= _LARGE)
        }
        self.direct = [self._direct(team, g, k) for g, k in items if (g, k) in large]
        self.packed_items = [item for item in items if item not in large]
        self.packed = _Gathered(self.packed_items, collective.operands, groups, team)

    def _lies_right(self, group: Group, type_: TensorType) -> bool:
        """Whether each process's shards are one piece of the result."""
        return is_leading(type_, self.dimension) and all(
            members[-1].position - members[0].position == len(members) - 1
            for members in group.by_process
        )

    def _direct(self, team: Team, g: int, k: int) -> Step:
        """Shards are received where they belong in the result."""
        type_, group, dimension = self.types[k], self.groups[g], self.dimension
        shape, dtype = type_.shape, type_.numpy
        shard = type_.size * dtype.itemsize // group.size
        gather = team.gather(
            [shard * len(members) for members in group.by_process],
            [shard * members[0].position for members in group.by_process],
        )
        alone, local, size = _one_each([group]), group.local, group.size

        def run(operands: Operands, results: Results) -> None:
            out = pool.empty(shape, dtype)
            if alone:
                gather(_flat_bytes(operands[local[0].id][k]), _flat_bytes(out))
            else:
                for member in local:
                    target = part(out, dimension, member.position, size)
                    np.copyto(target, operands[member.id][k])
                gather(None, _flat_bytes(out))
            for member in local:
                results[member.id][k] = out

        return run

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


class _Folded:
    """All-reduce and reduce-scatter with a program's reducer: every process folds all operands."""

    def __init__(
        self, collective: Collective, groups: list[Group], team: Team, reducer: Reducer
    ) -> None:
        self.groups, self.reducer, self.types = groups, reducer, collective.operands
        self.dimension = collective.dimension if collective.kind is Kind.REDUCE_SCATTER else None
        if self.dimension is not None:
            for type_ in self.types:
                for group in groups:
                    check_parts(type_, self.dimension, group.size)
        items = [(g, k) for g in range(len(groups)) for k in range(len(self.types))]
        self.gather = _Gathered(items, self.types, groups, team)

    def __call__(self, operands: Operands, results: Results) -> None:
        inputs: list[list[list[Array]]] = [
            [[None] * len(self.types) for _ in group.members]  # type: ignore[list-item]
            for group in self.groups
        ]
        for (g, k), member, array in self.gather(operands):
            inputs[g][member.position][k] = array
        for group, rows in zip(self.groups, inputs, strict=True):
            totals = fold(self.reducer, rows)
            for member in group.local:
                results[member.id][:] = (
                    totals
                    if self.dimension is None
                    else [
                        pool.copy(part(total, self.dimension, member.position, group.size))
                        for total in totals
                    ]
                )


class _ReduceScatter:
    """Each member's part, reduced from one partial result of each process."""

    def __init__(
        self, collective: Collective, groups: list[Group], team: Team, reducer: Reducer | None
    ) -> None:
        self.dimension, self.types, self.groups = collective.dimension, collective.results, groups
        for type_ in collective.operands:
            for group in groups:
                check_parts(type_, self.dimension, group.size)
        self.combines = combiners(collective)
        self.index, self.size = team.index, team.size
        several = not _one_each(groups)
        items = [(g, k) for k in range(len(self.types)) for g in range(len(groups))]
        large = {
            (g, k)
            for g, k in items
            if not several
            and self.types[k].size
            and is_leading(collective.operands[k], self.dimension)
            and (len(items) == 1 or collective.operands[k].nbytes >= _LARGE)
        }
        self.direct = [self._direct(collective, team, g, k) for g, k in items if (g, k) in large]
        # slots[q]: (group, operand, member of q, view) of the parts that process q gets
        self.slots: list[list[tuple[int, int, Member, View]]] = []
        counts = []
        for q in range(team.size):
            layout = _Layout()
            slots = []
            for g, k in items:
                if (g, k) in large:
                    continue
                type_ = self.types[k]
                wire = ELEMENT_TYPES[_wire(type_.dtype, type_.size, several)].numpy
                for member in groups[g].by_process[q]:
                    slots.append((g, k, member, layout.add(type_.shape, wire)))
            self.slots.append(slots)
            counts.append(layout.nbytes)
        self.own = counts[team.index]
        sends = [0 if q == team.index else count for q, count in enumerate(counts)]
        receives = [0 if q == team.index else self.own for q in range(team.size)]
        self.send_offsets = _offsets(sends)
        self.total = sum(sends)
        self.exchange = team.exchange(
            sends, self.send_offsets, receives, [q * self.own for q in range(team.size)]
        )
        self.has_packed = any(self.slots)

    def _direct(self, collective: Collective, team: Team, g: int, k: int) -> Step:
        """Parts are sent from where they lie in the operand."""
        type_, group = self.types[k], self.groups[g]
        (member,) = group.local
        assert collective.reduction is not None
        reduce = team.reduce_parts(
            type_.dtype,
            collective.reduction,
            [members[0].position * type_.size for members in group.by_process],
            [type_.size] * team.size,
            type_.dtype,
        )

        def run(operands: Operands, results: Results) -> None:
            out = pool.empty(type_.shape, type_.numpy)
            reduce(operands[member.id][k].reshape(-1), out.reshape(-1))
            results[member.id][k] = out

        return run

    def __call__(self, operands: Operands, results: Results) -> None:
        for step in self.direct:
            step(operands, results)
        if not self.has_packed:
            return
        outgoing, incoming = _bytes(self.total), _bytes(self.own * self.size)
        rows = [incoming[q * self.own : (q + 1) * self.own] for q in range(self.size)]
        for q, slots in enumerate(self.slots):
            buffer = rows[q] if q == self.index else outgoing[self.send_offsets[q] :]
            for g, k, member, view in slots:
                group = self.groups[g]
                self.combines[k](
                    [
                        part(operands[m.id][k], self.dimension, member.position, group.size)
                        for m in group.local
                    ],
                    view(buffer),
                )
        self.exchange(outgoing, incoming)
        for _, k, member, view in self.slots[self.index]:
            out = pool.empty(self.types[k].shape, self.types[k].numpy)
            self.combines[k]([view(row) for row in rows], out)
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
            and _one_each(groups)
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
            for q, (offset, (_, slots)) in enumerate(zip(_offsets(sends), outgoing, strict=True))
            if q != me
        ]
        self.received = [
            (offset, slots)
            for q, (offset, (_, slots)) in enumerate(zip(_offsets(receives), incoming, strict=True))
            if q != me
        ]
        self.totals = (sum(sends), sum(receives))
        self.exchange = team.exchange(sends, _offsets(sends), receives, _offsets(receives))

    def _slots(self, source: int, target: int) -> tuple[int, list[_Slot]]:
        """Bytes and slots of what process ``source`` sends to process ``target``."""
        layout, slots = _Layout(), []
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
            exchange(_flat_bytes(operands[member.id][0]), _flat_bytes(out))
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
        outgoing, incoming = (_bytes(total) for total in self.totals)
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
                    self.team.broadcast(_flat_bytes(out), root.process)
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
        rows = {m.id: ragged_rows(operands[m.id], group.size) for m in group.local}

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
        plan_in = _bytes(sum(counts))
        offsets = _offsets(counts)
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
                    check_ragged_targets(targets, sizes, expected, len(operands[member.id][1]))

        sample = operands[group.local[0].id][0]
        tail, dtype = sample.shape[1:], sample.dtype
        width = int(np.prod(tail, dtype=np.int64)) * dtype.itemsize
        pieces = [
            [
                _flat_bytes(operands[a.id][0][start : start + count])
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
        outgoing, incoming = _bytes(sum(sends)), _bytes(sum(receives))
        position = 0
        for row in pieces:
            for piece in row:
                outgoing[position : position + piece.nbytes] = piece
                position += piece.nbytes
        team.exchange(sends, _offsets(sends), receives, _offsets(receives))(outgoing, incoming)

        outs = [pool.copy(operands[m.id][1]) for m in group.local]
        position = 0
        for plan in plans_in:
            for per_source in plan:
                for out, (sizes, targets) in zip(outs, per_source, strict=True):
                    for count, target in zip(sizes, targets, strict=True):
                        nbytes = int(count) * width
                        piece = incoming[position : position + nbytes]
                        _flat_bytes(out[target : target + count])[:] = piece
                        position += nbytes
        for member, out in zip(group.local, outs, strict=True):
            results[member.id][0] = out


def _all_reduce(
    collective: Collective, groups: list[Group], team: Team, reducer: Reducer | None
) -> Step:
    kind = _AllReduce if collective.kind is Kind.ALL_REDUCE else _ReduceScatter
    if reducer is not None:
        return _Folded(collective, groups, team, reducer)
    return kind(collective, groups, team, None)


_BUILDERS: dict[Kind, Callable[[Collective, list[Group], Team, Reducer | None], Step]] = {
    Kind.ALL_REDUCE: _all_reduce,
    Kind.REDUCE_SCATTER: _all_reduce,
    Kind.ALL_GATHER: _AllGather,
    Kind.ALL_TO_ALL: _AllToAll,
    Kind.BROADCAST: _Broadcast,
    Kind.RAGGED_ALL_TO_ALL: _RaggedAllToAll,
}
