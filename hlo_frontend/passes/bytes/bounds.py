"""Bounds of integers in the parts of arrays that belong to each device: their form and their arithmetic.

XLA's partitioner gathers the row numbers of ``x[arange(n), i]`` on every device and masks out the rows of
others. That each device asks only for rows of its own follows from bounds: those of the numbers in part b
of the gathered array are those that device b of the group computed.

Bounds are asked for the elements ``at`` certain places: for each dimension a position, `PART` (of as many
equal parts as a group has members, each by itself) or None (anywhere). They are two arrays of exact
integers, ``[devices, parts]`` or less where all are the same; those of the type where nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from stretto.collectives.types import TensorType

from ...values import Node
from .batches import memory_order, same_cut


class Part:
    """Each part of a dimension by itself."""


PART = Part()
At = tuple[int | Part | None, ...]


class Bounds(NamedTuple):
    low: np.ndarray
    high: np.ndarray


def placed_at(rank: int, places: dict[int, int | Part]) -> At:
    return tuple([places.get(d) for d in range(rank)])


def source_of(node: Node, at: At, parts: int) -> At | None:
    """The places of the operand from which the elements of a node come that only moves them; None if it does
    more. Places may be wider than need be."""
    instruction = node.instruction
    if len(node.operands) != 1 or len(node.results) != 1:
        return None
    source, target = node.operands[0].type, node.results[0].type
    assert source is not None and target is not None
    proto = instruction.proto
    match instruction.opcode:
        case "convert" | "copy":
            return at
        case "broadcast":
            return tuple(
                [
                    at[d] if size == target.shape[d] else None
                    for size, d in zip(source.shape, proto.dimensions, strict=True)
                ]
            )
        case "transpose":
            found = dict(zip(proto.dimensions, at, strict=True))
            return tuple([found[d] for d in range(len(at))])
        case "reshape":
            return _reshaped(at, target.shape, source.shape, parts)
        case "bitcast" if source.dtype == target.dtype:
            into = memory_order(instruction.operands[0].shape, len(source.shape))
            out = memory_order(instruction.shape, len(target.shape))
            moved = _reshaped(
                tuple([at[d] for d in out]),
                [target.shape[d] for d in out],
                [source.shape[d] for d in into],
                parts,
            )
            by_dimension = dict(zip(into, moved, strict=True))
            return tuple([by_dimension[d] for d in range(len(into))])
        case "slice":
            return tuple(
                [
                    _sliced(place, cut, size)
                    for place, cut, size in zip(
                        at, proto.slice_dimensions, source.shape, strict=True
                    )
                ]
            )
    return None


def _reshaped(at: At, given: Sequence[int], other: Sequence[int], parts: int) -> At:
    found: list[int | Part | None] = [None] * len(other)
    for d, place in enumerate(at):
        if place is None or given[d] == 1:
            continue
        to = same_cut(given, other, d, parts)
        if to is not None and (place is PART or given[d] == other[to]):
            found[to] = place
    return tuple(found)


def _sliced(place: int | Part | None, cut: Any, size: int) -> int | Part | None:
    stride = cut.stride or 1
    if isinstance(place, int):
        return int(cut.start + place * stride)
    return place if cut.start == 0 and cut.limit == size and stride == 1 else None


def of_array(array: np.ndarray, at: At, parts: int) -> Bounds:
    """The bounds of known values, in the reduced form of `passes.valid.tensors`."""
    part = None
    for d, place in enumerate(at):
        if array.shape[d + 1] == 1:
            continue
        if isinstance(place, int):
            array = array.take([place], d + 1)
        elif place is PART:
            part = d + 1
    devices = len(array)
    if part is None or array.shape[part] % parts:
        flat = array.reshape(devices, 1, -1)
    else:
        flat = np.moveaxis(array, part, 1)
        flat = flat.reshape(devices, parts, -1)
    return Bounds(flat.min(2).astype(object), flat.max(2).astype(object))


def exactly(number: int) -> Bounds:
    one = np.full((1, 1), number, object)
    return Bounds(one, one)


def widest_of(dtype: str) -> Bounds:
    type = TensorType(dtype, ()).numpy
    low, high = (0, 1) if type.kind == "b" else (np.iinfo(type).min, np.iinfo(type).max)
    return Bounds(*(np.full((1, 1), int(n), object) for n in (low, high)))


def fitted(bounds: Bounds, widest: Bounds) -> Bounds:
    """Bounds of numbers that may have wrapped around are those of the type."""
    inside = (bounds.low >= widest.low) & (bounds.high <= widest.high)
    return Bounds(*(np.where(inside, own, all_) for own, all_ in zip(bounds, widest, strict=True)))


def either(found: Sequence[Bounds]) -> Bounds | None:
    if not found:
        return None
    low, high = found[0]
    for other in found[1:]:
        low, high = np.minimum(low, other.low), np.maximum(high, other.high)
    return Bounds(low, high)


def compared(direction: str, x: Bounds, y: Bounds) -> Bounds | None:
    """Whether it is surely true, and whether it may be."""
    surely, maybe = {
        "LT": (x.high < y.low, x.low < y.high),
        "LE": (x.high <= y.low, x.low <= y.high),
        "GT": (x.low > y.high, x.high > y.low),
        "GE": (x.low >= y.high, x.high >= y.low),
        "EQ": (
            (x.low == x.high) & (y.low == y.high) & (x.low == y.low),
            (x.low <= y.high) & (y.low <= x.high),
        ),
        "NE": (
            (x.high < y.low) | (x.low > y.high),
            ~np.asarray((x.low == x.high) & (y.low == y.high) & (x.low == y.low), bool),
        ),
    }[direction]
    return Bounds(_numbers(surely), _numbers(maybe))


def _numbers(preds: np.ndarray) -> np.ndarray:
    return np.asarray(preds, bool).astype(int).astype(object)


def _multiplied(x: Bounds, y: Bounds) -> Bounds:
    corners = [a * b for a in x for b in y]
    low, high = corners[0], corners[0]
    for corner in corners[1:]:
        low, high = np.minimum(low, corner), np.maximum(high, corner)
    return Bounds(low, high)


def _selected(pred: Bounds, yes: Bounds, no: Bounds) -> Bounds:
    low, high = np.minimum(yes.low, no.low), np.maximum(yes.high, no.high)
    low = np.where(pred.low == 1, yes.low, np.where(pred.high == 0, no.low, low))
    high = np.where(pred.low == 1, yes.high, np.where(pred.high == 0, no.high, high))
    return Bounds(low, high)


def _bits(of_predicates: Callable[..., np.ndarray]) -> Callable[[Bounds, Bounds], Bounds | None]:
    """Of predicates only: the bounds of numbers do not tell those of their bits."""

    def combined(x: Bounds, y: Bounds) -> Bounds | None:
        if any(int(a.min()) < 0 or int(a.max()) > 1 for a in (*x, *y)):
            return None
        return Bounds(of_predicates(x.low, y.low), of_predicates(x.high, y.high))

    return combined


MOVES = frozenset({"bitcast", "broadcast", "convert", "copy", "reshape", "slice", "transpose"})
ARITHMETIC: dict[str, Any] = {
    "add": lambda x, y: Bounds(x.low + y.low, x.high + y.high),
    "and": _bits(np.minimum),
    "clamp": lambda low, x, high: Bounds(
        np.minimum(np.maximum(x.low, low.low), high.low),
        np.minimum(np.maximum(x.high, low.high), high.high),
    ),
    "compare": None,
    "maximum": lambda x, y: Bounds(np.maximum(x.low, y.low), np.maximum(x.high, y.high)),
    "minimum": lambda x, y: Bounds(np.minimum(x.low, y.low), np.minimum(x.high, y.high)),
    "multiply": _multiplied,
    "negate": lambda x: Bounds(-x.high, -x.low),
    "or": _bits(np.maximum),
    "select": _selected,
    "subtract": lambda x, y: Bounds(x.low - y.high, x.high - y.low),
}
