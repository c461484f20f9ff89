"""Collectives that compiled code calls itself, between devices of one process: which can be, and their table.

`refusal` says why one cannot. `table_of` describes them to the compiled handler (`_native`), whose address
`handler` gives for an engine to register under `TARGET`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ._native import Table, can_reduce, handler, start_helpers
from .ops import Collective, Kind
from .types import TensorType

__all__ = [
    "ALWAYS",
    "NEVER",
    "TARGET",
    "Table",
    "handler",
    "refusal",
    "skipped",
    "start_helpers",
    "table_of",
]

# The name under which compiled code calls the handler, with the number of the site as attribute ``site``.
TARGET = "stretto_collective"

NEVER, ALWAYS = (1, 0), (0, (1 << 63) - 1)  # bounds of valid iterations
_SPLIT = (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL)


def refusal(collective: Collective) -> str:
    """Why compiled code cannot call this collective; empty if it can."""
    kind = collective.kind
    if kind in (Kind.SEND, Kind.RECV, Kind.RAGGED_ALL_TO_ALL):
        return f"{kind} is the executor's"
    if collective.reducer is not None:
        return "its reducer is a program of its own"
    if collective.dynamic_root:
        return "its root is known at run time only"
    if any(bounds not in (NEVER, ALWAYS) for bounds in collective.valid_iterations):
        return "it is skipped in some iterations"
    for type_ in (*collective.operands, *collective.results):
        if type_.element.bits < 8 and type_.dtype != "pred":
            return f"{type_.dtype} is packed in compiled code"
    if collective.reduction is not None:
        for type_ in collective.operands:
            if not can_reduce(str(collective.reduction), type_.dtype):
                return f"{collective.reduction} of {type_.dtype} has no compiled form"
    return ""


def table_of(collectives: Sequence[Collective], position: Mapping[int, int]) -> Table:
    """The table of these sites for devices whose positions are by logical id ``position``.

    Every member of every group must be one of them. Raises ``ValueError`` for a collective that is refused or
    whose parts do not fit.
    """
    table = Table(len(position))
    for collective in collectives:
        why = refusal(collective)
        if why:
            raise ValueError(f"{collective.kind}: {why}")
        point_to_point = collective.kind is Kind.PERMUTE
        left_out = skipped(collective)
        pairs = [p for i, p in enumerate(collective.pairs) if i not in left_out]
        groups = connected(pairs) if point_to_point else collective.groups
        where = f" at {collective.source}" if collective.source else ""
        kind = "all-to-all of tuples" if collective.tuple_form else str(collective.kind)
        table.add(
            kind,
            [_leaf(collective, k) for k in range(len(collective.operands))],
            len(collective.results),
            [[position[i] for i in group] for group in groups],
            f"{collective.kind} %{collective.name}{where}",
            [(position[s], position[t]) for s, t in pairs] if point_to_point else None,
        )
    return table


def skipped(collective: Collective) -> frozenset[int]:
    """Positions of the pairs that never move anything."""
    return frozenset(i for i, b in enumerate(collective.valid_iterations) if b == NEVER)


def connected(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Devices that pairs join, directly or through others, in ascending order."""
    groups: dict[int, set[int]] = {}
    for source, target in pairs:
        joined = groups.get(source, {source}) | groups.get(target, {target})
        for member in joined:
            groups[member] = joined
    unique = {id(group): group for group in groups.values()}
    return sorted(tuple(sorted(group)) for group in unique.values())


def _leaf(
    collective: Collective, index: int
) -> tuple[int, int, int, int, int, tuple[str, str] | None]:
    """What `Table.add` needs to know of an operand."""
    operand = collective.operands[index]
    result = collective.results[index]
    size = len(collective.groups[0]) if collective.groups else 1
    outer, inner = 1, _bytes(operand)
    if collective.kind is Kind.ALL_GATHER:
        outer, inner = _rows(operand, collective.dimension, 1)
    elif collective.kind in _SPLIT and not collective.tuple_form:
        outer, inner = _rows(operand, collective.dimension, size)
    reduction = None
    if collective.reduction is not None:
        reduction = (str(collective.reduction), operand.dtype)
    return outer, inner, _bytes(operand), _bytes(result), operand.numpy.itemsize, reduction


def _bytes(type_: TensorType) -> int:
    return type_.size * type_.numpy.itemsize


def _rows(type_: TensorType, dimension: int, parts: int) -> tuple[int, int]:
    """Blocks before the dimension, and bytes of one of ``parts`` in each."""
    length = type_.shape[dimension]
    if length % parts:
        raise ValueError(f"dimension {dimension} of {type_} does not divide into {parts} parts")
    inner = prod(type_.shape[dimension + 1 :]) * type_.numpy.itemsize
    return prod(type_.shape[:dimension]), length // parts * inner
