"""Cuts a large collective into pieces that are collectives themselves: one moves while others are copied.

A piece's arrays are flat. It takes the same span of each part of the operand, and gives the same span of each
part of the result: an all-gather's result has a part for each member, a reduce-scatter's operand has, both of
an all-to-all's have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from .ops import Collective, Kind
from .types import TensorType

# Bytes of a piece: to a GPU they take 0.1 ms, beside which what a message costs is little.
PIECE = 4 << 20
# An operand or result by its number, an offset in it, one in the piece's array, and bytes.
Span = tuple[int, int, int, int]


@dataclass(frozen=True)
class Piece:
    """``given``: the spans of operands that it takes; ``made``: those of results that it gives."""

    collective: Collective
    given: tuple[Span, ...]
    made: tuple[Span, ...]


def pieces(collective: Collective, most: int = PIECE) -> list[Piece]:
    """The pieces in their order: of ``most`` bytes, or the whole where it cannot be cut."""
    parts = _parts(collective)
    if parts is None:
        return [_whole(collective)]
    (type,), (result,) = collective.operands, collective.results
    if max(type.nbytes, result.nbytes) <= most:
        return [_whole(collective)]
    taken, given = parts
    width, count = type.element.bits // 8, type.size // taken
    step = max(1, most // width // max(parts))
    found = []
    for start in range(0, count, step):
        length = min(step, count - start)
        span = length * width

        def spans(number: int, start: int = start, span: int = span) -> tuple[Span, ...]:
            return tuple((0, (j * count + start) * width, j * span, span) for j in range(number))

        piece = replace(
            collective,
            operands=(TensorType(type.dtype, (taken * length,)),),
            results=(TensorType(type.dtype, (given * length,)),),
            dimension=0 if collective.dimension >= 0 else -1,
        )
        found.append(Piece(piece, spans(taken), spans(given)))
    return found


def _whole(collective: Collective) -> Piece:
    given, made = (
        tuple((n, 0, 0, type.nbytes) for n, type in enumerate(types))
        for types in (collective.operands, collective.results)
    )
    return Piece(collective, given, made)


def _parts(collective: Collective) -> tuple[int, int] | None:
    """Parts of the operand and of the result; None where pieces would not be contiguous."""
    kind, operands = collective.kind, collective.operands
    if len(operands) != 1 or operands[0].element.bits < 8 or collective.reducer is not None:
        return None
    if kind in (Kind.ALL_REDUCE, Kind.PERMUTE) or (
        kind is Kind.BROADCAST and not collective.dynamic_root
    ):
        return 1, 1
    sizes = {len(group) for group in collective.groups}
    if len(sizes) != 1 or collective.tuple_form or collective.dimension < 0:
        return None
    if prod(operands[0].shape[: collective.dimension]) != 1:
        return None
    (size,) = sizes
    return {
        Kind.ALL_GATHER: (1, size),
        Kind.REDUCE_SCATTER: (size, 1),
        Kind.ALL_TO_ALL: (size, size),
    }.get(kind)
