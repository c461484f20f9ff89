"""Collectives as data: kind, participants, reducer, dimensions, types.

Ids are *logical* flattened device ids, ``replica * num_partitions + partition``; whoever loads a program
maps them to devices of the world. Groups are always explicit and hold only logical ids that take part:
HLO's four group modes and three spellings are read in one place, ``hlo_frontend/groups.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from .types import TensorType

# Collectives of at most this many bytes for each process are posted and then awaited
# (`communicator.Pending`), so that the thread that runs one need not block in it. MPI does not match a
# collective that blocks with one that does not: the size decides, on all processes alike, never the state of
# a process.
PROMPT = 1 << 16


class Kind(StrEnum):
    """Kinds of collectives, by their HLO names."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    PERMUTE = "collective-permute"
    BROADCAST = "collective-broadcast"
    RAGGED_ALL_TO_ALL = "ragged-all-to-all"
    SEND = "send"
    RECV = "recv"


class Reduction(StrEnum):
    """Reducers with a native implementation. ``and``/``or``/``xor`` are bitwise; logical on pred."""

    SUM = "add"
    PRODUCT = "multiply"
    MIN = "minimum"
    MAX = "maximum"
    AND = "and"
    OR = "or"
    XOR = "xor"


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program. Variadic: ``operands`` and ``results`` run in parallel.

    ``dimension``
        all-gather: dimension that grows. reduce-scatter: dimension that shrinks. all-to-all in array
        form: the dimension split and concatenated. Otherwise -1.
    ``groups``
        For every kind but permute, send and recv: disjoint ordered groups. An all-gather places shards
        in group order; a broadcast's root is the first member of its group.
    ``pairs``
        For permute, send and recv: (source, target) pairs.
    ``reduction`` / ``reducer``
        A native reduction, or the index of the program's reducer segment: it takes the n operands of
        one member, then those of another (2n tensors of types ``operands``), and gives the n combined.
    ``tuple_form``
        all-to-all of HLO's tuple form: operand i goes to member i of the group, result i comes from it.
    ``dynamic_root``
        collective-broadcast whose last operand is an s32 root index within the group.
    ``channel``
        For send and recv: the channel that matches them. Identifies nothing else.
    ``name`` / ``source``
        The HLO instruction's name and ``file:line`` (may be empty), for errors and traces.
    """

    kind: Kind
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    reduction: Reduction | None = None
    reducer: int | None = None
    dimension: int = -1
    tuple_form: bool = False
    dynamic_root: bool = False
    channel: int = 0
    # For each of `pairs`: first and last of each run of iterations of the loop around it in which it
    # moves data, (lo, hi, lo, hi, …), ascending. (1, 0) is never; empty for all pairs: always.
    valid_iterations: tuple[tuple[int, ...], ...] = field(default=())
    name: str = ""
    source: str = ""

    @cached_property
    def group_of(self) -> dict[int, tuple[int, ...]]:
        """Group by logical id of each member."""
        return {member: group for group in self.groups for member in group}

    @property
    def nbytes(self) -> int:
        """Bytes that a device gives to it, or gets from it, whichever are more."""
        return max(sum(t.nbytes for t in types) for types in (self.operands, self.results))

    @property
    def is_point_to_point(self) -> bool:
        return self.kind in (Kind.PERMUTE, Kind.SEND, Kind.RECV)


def attributes(c: Collective) -> list[str]:
    """The attributes of a collective as text, one word or phrase each: groups, reduction, channel, …."""
    parts: list[str] = []
    if c.groups:
        parts.append(f"groups {nested(c.groups)}")
    if c.pairs:
        parts.append(f"pairs {nested(c.pairs)}")
    if c.reduction is not None:
        parts.append(f"reduction {c.reduction}")
    if c.reducer is not None:
        parts.append(f"reducer {c.reducer}")
    if c.dimension != -1:
        parts.append(f"dimension {c.dimension}")
    if c.tuple_form:
        parts.append("tuple_form")
    if c.dynamic_root:
        parts.append("dynamic_root")
    if c.channel:
        parts.append(f"channel {c.channel}")
    if c.valid_iterations:
        parts.append(f"valid {nested(c.valid_iterations)}")
    return parts


def nested(groups: Iterable[Iterable[int]]) -> str:
    """Lists of numbers as HLO writes them."""
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"
