"""Reductions whose members live in several processes: all-reduce and reduce-scatter.

Operands are combined in memory first, so one partial result a process travels.

Partial results of narrow floats travel as f32 where some process combines several members and the wider
message costs little (small ones, or types below 16 bits); elsewhere f16 and bf16 travel as they are and
are rounded once in each process and once in all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .communicator import Reducer
from .direct import Direct, Post, posting
from .local import check_parts, combiners, fold, is_leading, part
from .memory import pool
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
    View,
    new_bytes,
    offsets_of,
    one_each,
)
from .reduce import is_narrow_float
from .types import ELEMENT_TYPES

if TYPE_CHECKING:
    from .team import Team

# Small operands share messages of at most this size.
_PACK = 1 << 20
# Partial results of narrow floats up to this size travel as f32.
_WIDE_WIRE = 1 << 13


class AllReduce:
    """Reduce in memory, then between processes; all local members share the result."""

    # Posts it, where all that begins it is known; `prompt` where it is small and one message: `ops.PROMPT`.
    post: Post | None = None

    def __init__(
        self, collective: Collective, groups: list[Group], team: Team, reducer: Reducer | None
    ) -> None:
        assert collective.reduction is not None
        self.groups, self.types = groups, collective.operands
        self.combines = combiners(collective)
        self.local_ids = [[m.id for m in g.local] for g in groups]
        several = not one_each(groups)
        alone: list[tuple[int, int]] = []
        packs: dict[str, list[list[tuple[int, int]]]] = {}
        filled: dict[str, int] = {}
        items = [(g, k) for k in range(len(self.types)) for g in range(len(groups))]
        for g, k in items:
            type_ = self.types[k]
            size = type_.size * type_.numpy.itemsize
            if size >= LARGE or len(items) == 1:
                alone.append((g, k))
                continue
            if type_.dtype not in packs or filled[type_.dtype] + size > _PACK:
                packs.setdefault(type_.dtype, []).append([])
                filled[type_.dtype] = 0
            packs[type_.dtype][-1].append((g, k))
            filled[type_.dtype] += size
        self.steps = [self._alone(team, collective, g, k, several) for g, k in alone]
        for dtype, lists in packs.items():
            for packed in lists:
                self.steps.append(self._packed(team, collective, dtype, packed, several))
        self.post = posting(self.steps)
        self.prompt = len(self.steps) == 1 and getattr(self.steps[0].exchange, "prompt", False)

    def _alone(self, team: Team, collective: Collective, g: int, k: int, several: bool) -> Direct:
        type_, ids, combine = self.types[k], self.local_ids[g], self.combines[k]
        assert collective.reduction is not None
        shape, dtype, count = type_.shape, type_.numpy, type_.size
        wire = _wire(type_.dtype, count, several)
        wire_dtype = ELEMENT_TYPES[wire].numpy
        reduce = team.all_reduce(type_.dtype, collective.reduction, count, wire)

        def prepare(operands: Operands, results: Results) -> tuple[Array, Array]:
            out = pool.empty(shape, dtype)
            for i in ids:
                results[i][k] = out
            flat = out.reshape(-1)
            if len(ids) == 1 and wire_dtype == dtype:
                return operands[ids[0]][k].reshape(-1), flat
            partial = flat if wire_dtype == dtype else pool.empty((count,), wire_dtype)
            combine([operands[i][k].reshape(-1) for i in ids], partial)
            return partial, flat

        return Direct(prepare, reduce if count else None)

    def _packed(
        self,
        team: Team,
        collective: Collective,
        dtype: str,
        items: list[tuple[int, int]],
        several: bool,
    ) -> Direct:
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

        def prepare(operands: Operands, results: Results) -> tuple[Array, Array]:
            out = pool.empty((total,), element)
            partial = out if wire_dtype == element else pool.empty((total,), wire_dtype)
            for ids, k, combine, place, shape in places:
                combine([operands[i][k].reshape(-1) for i in ids], partial[place])
                result = out[place].reshape(shape)
                for i in ids:
                    results[i][k] = result
            return partial, out

        return Direct(prepare, reduce)

    def __call__(self, operands: Operands, results: Results) -> None:
        for step in self.steps:
            step(operands, results)


class ReduceScatter:
    """Each member's part, reduced from one partial result of each process."""

    # Posts it, where all its messages are known beforehand.
    post: Post | None = None

    def __init__(
        self, collective: Collective, groups: list[Group], team: Team, reducer: Reducer | None
    ) -> None:
        self.dimension, self.types, self.groups = collective.dimension, collective.results, groups
        for type_ in collective.operands:
            for group in groups:
                check_parts(type_, self.dimension, group.size)
        self.combines = combiners(collective)
        self.index, self.size = team.index, team.size
        several = not one_each(groups)
        items = [(g, k) for k in range(len(self.types)) for g in range(len(groups))]
        large = {
            (g, k)
            for g, k in items
            if not several
            and self.types[k].size
            and is_leading(collective.operands[k], self.dimension)
            and (len(items) == 1 or collective.operands[k].nbytes >= LARGE)
        }
        self.direct = [self._direct(collective, team, g, k) for g, k in items if (g, k) in large]
        # slots[q]: (group, operand, member of q, view) of the parts that process q gets
        self.slots: list[list[tuple[int, int, Member, View]]] = []
        counts = []
        for q in range(team.size):
            layout = Layout()
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
        self.send_offsets = offsets_of(sends)
        self.total = sum(sends)
        self.exchange = team.exchange(
            sends, self.send_offsets, receives, [q * self.own for q in range(team.size)]
        )
        self.has_packed = any(self.slots)
        if not self.has_packed:
            self.post = posting(self.direct)

    def _direct(self, collective: Collective, team: Team, g: int, k: int) -> Direct:
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

        def prepare(operands: Operands, results: Results) -> tuple[Array, Array]:
            out = results[member.id][k] = pool.empty(type_.shape, type_.numpy)
            return operands[member.id][k].reshape(-1), out.reshape(-1)

        return Direct(prepare, reduce)

    def __call__(self, operands: Operands, results: Results) -> None:
        for step in self.direct:
            step(operands, results)
        if not self.has_packed:
            return
        outgoing, incoming = new_bytes(self.total), new_bytes(self.own * self.size)
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


class Folded:
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
        self.gather = Gathered(items, self.types, groups, team)

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


def _wire(dtype: str, count: int, several: bool) -> str:
    element = ELEMENT_TYPES[dtype]
    if not several or not is_narrow_float(element):
        return dtype
    small = count * 4 <= _WIDE_WIRE
    return "f32" if small or element.bits < 16 else dtype
