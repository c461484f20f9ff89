"""What is known of the rows that the devices of a group look up, write and give each other: `Rows`.

`Rows.of` gives bounds of integers (`bounds`), `Rows.zeros` where an array is zero. Both follow from
constants, iotas, the devices' ids and what is computed from them; whatever else there is may be any number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import product
from math import prod

import numpy as np

from stretto.collectives.ops import Collective, Kind

from ...ops import op_of
from ...schema import LiteralProto
from ...values import Node, NodeKind, Value
from ..valid.known import FOLLOWED, starts_of
from .batches import windows_of
from .bounds import (
    ARITHMETIC,
    MOVES,
    PART,
    At,
    Bounds,
    Part,
    compared,
    either,
    exactly,
    fitted,
    of_array,
    placed_at,
    source_of,
    widest_of,
)
from .device_values import DeviceValues
from .own_parts import Places

# The most nodes between a value and what is known of it.
_DEPTH = 64
# The most places of which each is looked at by itself.
_FEW = 8


class Rows:
    """The bounds of values on each device, and in each part of those that are cut."""

    def __init__(self, known: DeviceValues, parts: int, place: Sequence[int]) -> None:
        """``parts``: how many parts `PART` tells apart. ``place``: the one that is each device's own."""
        self._known, self._parts = known, parts
        self._place = np.array(place)
        self._others: dict[int, Rows] = {parts: self}
        self._found: dict[tuple[Value, At], Bounds] = {}
        self._zeros: dict[tuple[Value, At], np.ndarray] = {}

    @classmethod
    def of_group(cls, known: DeviceValues, where: Places) -> Rows:
        """The parts that the members of each group of a collective have."""
        return cls(known, where.parts, [where.place[d] for d in range(len(where.place))])

    @property
    def foreign(self) -> np.ndarray:
        """Of each device and part, whether the part is another device's."""
        return self._place[:, None] != np.arange(self._parts)[None]

    # Bounds.

    def of(self, value: Value, at: At) -> Bounds:
        """The bounds of the elements at these places. Integers and predicates (0 and 1) only."""
        return self._of(value.root, at, _DEPTH)

    def _of(self, root: Value, at: At, depth: int) -> Bounds:
        key = (root, at)
        if key not in self._found:
            assert root.type is not None
            widest = widest_of(root.type.dtype)
            found = widest
            if depth and root.type.size:
                found = fitted(self._bounds(root, at, depth - 1) or widest, widest)
            self._found[key] = found
        return self._found[key]

    def _bounds(self, root: Value, at: At, depth: int) -> Bounds | None:
        node = root.node
        array = self._known.of(root)
        if array is not None:
            return of_array(array, at, self._parts)
        if node is None or any(v.type is None for v in node.operands):
            return None
        if node.collective is not None:
            return self._moved(node, root.index, at, depth)
        if node.kind not in (NodeKind.COMPUTE, NodeKind.CHEAP) or len(node.results) != 1:
            return None
        opcode = node.instruction.opcode
        if opcode == "iota":
            return self._iota(node, at)
        if opcode == "concatenate":
            return self._concatenated(node, at, depth)
        if opcode == "reduce":
            return self._reduced(node, at, depth)
        if opcode not in ARITHMETIC and opcode not in MOVES:
            return None
        if any(v.type is None or v.type.dtype not in FOLLOWED for v in node.operands):
            return None
        if opcode in MOVES:
            source = source_of(node, at, self._parts)
            return None if source is None else self._of(node.operands[0].root, source, depth)
        operands = [
            self._of(v.root, at if v.type is not None and v.type.shape else (), depth)
            for v in node.operands
        ]
        if opcode == "compare":
            direction = str(node.instruction.proto.comparison_direction)
            return compared(direction, *operands)
        return ARITHMETIC[opcode](*operands)

    def _iota(self, node: Node, at: At) -> Bounds | None:
        (result,) = node.results
        assert result.type is not None
        d = node.instruction.proto.dimensions[0]
        size, place = result.type.shape[d], at[d]
        if isinstance(place, int):
            return exactly(place)
        if place is PART and size % self._parts == 0:
            first = np.arange(self._parts, dtype=object)[None] * (size // self._parts)
            return Bounds(first, first + (size // self._parts - 1))
        return Bounds(*(one + np.zeros((1, 1), object) for one in (0, size - 1)))

    def _concatenated(self, node: Node, at: At, depth: int) -> Bounds | None:
        (along,) = node.instruction.proto.dimensions
        place = at[along]
        found: list[Bounds] = []
        first = 0
        for value in node.operands:
            assert value.type is not None
            size = value.type.shape[along]
            inside = list(at)
            inside[along] = place - first if isinstance(place, int) else None
            if not isinstance(place, int) or first <= place < first + size:
                found.append(self._of(value.root, tuple(inside), depth))
            first += size
        return either(found)

    def _reduced(self, node: Node, at: At, depth: int) -> Bounds | None:
        """Whether any, or all, of a few predicates are true."""
        (reducer,) = node.instruction.called
        array, start = node.operands
        if (
            reducer.root.opcode not in ("or", "and")
            or array.type is None
            or array.type.dtype != "pred"
        ):
            return None
        gone = list(node.instruction.proto.dimensions)
        kept = iter(at)
        whole = [None if d in gone else next(kept) for d in range(len(array.type.shape))]
        places = [range(array.type.shape[d]) for d in gone]
        few = prod(len(p) for p in places) <= _FEW
        found = self._of(start.root, (), depth)
        for each in product(*places) if few else [()]:
            for d, place in zip(gone, each, strict=False):
                whole[d] = place
            one = self._of(array.root, tuple(whole), depth)
            found = ARITHMETIC[reducer.root.opcode](found, one)
        return found

    def _moved(self, node: Node, index: int, at: At, depth: int) -> Bounds | None:
        collective = node.collective
        assert collective is not None
        if collective.kind is Kind.PERMUTE:
            return self._permuted(node, collective, index, at, depth)
        sizes = {len(group) for group in collective.groups}
        devices = len(self._place)
        if collective.kind is not Kind.ALL_GATHER or len(sizes) != 1:
            return None
        if len(collective.group_of) != devices:
            return None
        members = np.array([collective.group_of[d] for d in range(devices)])
        count = members.shape[1]
        d = collective.dimension
        place, inside = at[d], list(at)
        size = collective.operands[index].shape[d]
        # Each member gives so many of the parts.
        own, rest = divmod(self._parts, count)
        if isinstance(place, int):
            inside[d] = place % size
        elif (
            place is not PART or rest or size % own or any(p is PART for p in at[:d] + at[d + 1 :])
        ):
            own, inside[d] = 0, None
        rows = self.by(own) if place is PART and own else self
        given = rows._of(node.operands[index].root, tuple(inside), depth)
        each = [np.broadcast_to(a, (devices, a.shape[1])) for a in given]
        if isinstance(place, int):
            return Bounds(*(a[members[:, place // size]] for a in each))
        if place is PART and own:
            whole = [np.broadcast_to(a, (devices, own)) for a in each]
            return Bounds(*(a[members].reshape(devices, self._parts) for a in whole))
        return either([Bounds(*(a[members[:, p]] for a in each)) for p in range(count)])

    def _permuted(
        self, node: Node, collective: Collective, index: int, at: At, depth: int
    ) -> Bounds | None:
        devices = len(self._place)
        source = {target: source for source, target in collective.pairs}
        if collective.valid_iterations or len(source) != devices:
            return None
        given = self._of(node.operands[index].root, at, depth)
        order = [source[d] for d in range(devices)]
        return Bounds(*(np.broadcast_to(a, (devices, a.shape[1]))[order] for a in given))

    def by(self, parts: int) -> Rows:
        """The same in so many parts."""
        if parts == self._parts:
            return self
        if parts not in self._others:
            self._others[parts] = made = Rows(self._known, parts, self._place.tolist())
            made._others = self._others
        return self._others[parts]

    # Zeros.

    def zeros(self, value: Value, at: At) -> np.ndarray:
        """Of each device and part, whether all elements at these places are zeros (of floats, positive)."""
        return self._zero(value.root, at, _DEPTH)

    def _zero(self, root: Value, at: At, depth: int) -> np.ndarray:
        key = (root, at)
        if key not in self._zeros:
            found = self._are_zeros(root, at, depth - 1) if depth else None
            self._zeros[key] = np.zeros((1, 1), bool) if found is None else found
        return self._zeros[key]

    def _are_zeros(self, root: Value, at: At, depth: int) -> np.ndarray | None:
        node = root.node
        if node is None or node.kind not in (NodeKind.COMPUTE, NodeKind.CHEAP):
            return None
        if len(node.results) != 1 or any(v.type is None for v in node.operands):
            return None
        operands = node.operands
        match node.instruction.opcode:
            case "constant":
                return np.full((1, 1), _is_zero(node.instruction.proto.literal))
            case "select":
                pred = self._of(operands[0].root, at if _rank(operands[0]) else (), depth)
                yes, no = (self._zero(v.root, at, depth) for v in operands[1:])
                return ((pred.high == 0) | yes) & ((pred.low == 1) | no)
            case "scatter" if len(operands) == 3:
                return self._zero(operands[0].root, at, depth) & self.missed(node, at, depth)
            case "dynamic-update-slice":
                return self._zero(operands[0].root, at, depth) & self._unwritten(node, at)
            case opcode if opcode in MOVES:
                source = source_of(node, at, self._parts)
                return None if source is None else self._zero(operands[0].root, source, depth)
            case opcode if op_of(opcode).elementwise and op_of(opcode).zero_if is not None:
                chosen = operands[op_of(opcode).zero_if or slice(None)]
                each = [self._zero(v.root, at if _rank(v) else (), depth) for v in chosen]
                return reduce(np.logical_and, each)
        return None

    def missed(self, node: Node, at: At, depth: int = _DEPTH) -> np.ndarray:
        """Whether none of a scatter's windows is at these places, or in the array at all."""
        numbers = node.instruction.proto.scatter_dimension_numbers
        type = node.results[0].type
        assert type is not None
        outside = self.missing(node, None, depth)
        if PART not in at or numbers.input_batching_dims:
            return outside
        d = at.index(PART)
        if type.shape[d] % self._parts or window_sizes(node)[d] != 1:
            return outside
        if d not in numbers.scatter_dims_to_operand_dims:
            return outside
        column = list(numbers.scatter_dims_to_operand_dims).index(d)
        at = column_at(node.operands[1], numbers.index_vector_dim, column)
        found = self._of(node.operands[1].root, at, depth)
        part = type.shape[d] // self._parts
        first = np.arange(self._parts, dtype=object)[None] * part
        return outside | np.asarray((found.high < first) | (found.low >= first + part), bool)

    def _unwritten(self, node: Node, at: At) -> np.ndarray:
        """Whether an update leaves these places as they are."""
        whole, update = node.operands[0].type, node.operands[1].type
        assert whole is not None and update is not None
        starts = starts_of(node, [None, None, *(self._known.of(v) for v in node.operands[2:])], 2)
        if PART not in at or starts is None:
            return np.zeros((1, 1), bool)
        d = at.index(PART)
        if whole.shape[d] % self._parts:
            return np.zeros((1, 1), bool)
        part = whole.shape[d] // self._parts
        first = np.arange(self._parts)[None] * part
        start = starts[:, d][:, None]
        return (start + update.shape[d] <= first) | (start >= first + part)

    # Rows.

    def missing(self, node: Node, along: int | None, depth: int = _DEPTH) -> np.ndarray:
        """Of each device, and each part of a scatter's indices ``along`` one of their dimensions (None: all
        of them), whether its windows are all outside of the array, and so left out."""
        numbers = node.instruction.proto.scatter_dimension_numbers
        count = len(node.operands) // 2
        array, indices = (node.operands[k].type for k in (0, count))
        assert array is not None and indices is not None
        out = np.zeros((1, 1), bool)
        if indices.dtype not in FOLLOWED:
            return out
        if along is not None and indices.shape[along] % self._parts:
            return out
        sizes = window_sizes(node)
        cut: dict[int, int | Part] = {} if along is None else {along: PART}
        for column, d in enumerate(numbers.scatter_dims_to_operand_dims):
            at = column_at(node.operands[count], numbers.index_vector_dim, column, cut)
            found = self._of(node.operands[count].root, at, depth)
            last = array.shape[d] - sizes[d]
            out = out | np.asarray((found.high < 0) | (found.low > last), bool)
        return out

    def misses(self, node: Node, along: int) -> bool:
        """Whether this is so of the parts that other devices have."""
        return bool((self.missing(node, along) | ~self.foreign).all())

    def within(self, indices: Value, column: int, size: int, along: int, vector: int) -> bool:
        """Whether the numbers in each device's part of indices, cut ``along`` one of their dimensions, are
        those of its part of a dimension of this size."""
        found, first, part = self._numbers_of(indices, column, size, along, vector)
        if found is None:
            return False
        inside = (found.low >= first) & (found.high < first + part)
        return bool((np.asarray(inside, bool) | self.foreign).all())

    def apart(self, indices: Value, column: int, size: int, along: int, vector: int) -> bool:
        """Whether no numbers in other devices' parts of indices are those of the device's part."""
        found, _, part = self._numbers_of(indices, column, size, along, vector)
        if found is None:
            return False
        first = self._place[:, None].astype(object) * part
        outside = (found.high < first) | (found.low >= first + part)
        return bool((np.asarray(outside, bool) | ~self.foreign).all())

    def _numbers_of(
        self, indices: Value, column: int, size: int, along: int, vector: int
    ) -> tuple[Bounds | None, np.ndarray, int]:
        """The bounds of the numbers in each part, the first number of each, and how many it has."""
        type, part = indices.type, size // self._parts
        assert type is not None
        first = np.arange(self._parts, dtype=object)[None] * part
        if size % self._parts or type.shape[along] % self._parts or type.dtype not in FOLLOWED:
            return None, first, part
        return self.of(indices, column_at(indices, vector, column, {along: PART})), first, part


def column_at(
    indices: Value, vector: int, column: int, more: dict[int, int | Part] | None = None
) -> At:
    """The places of one of the numbers that make an index. ``vector``: the dimension of those."""
    rank = _rank(indices)
    places = dict(more or {})
    if vector < rank:
        places[vector] = column
    return placed_at(rank, places)


def _rank(value: Value) -> int:
    assert value.type is not None
    return len(value.type.shape)


def _is_zero(literal: bytes) -> bool:
    """Whether all bits of a constant are zero."""
    some = False
    for field, values in LiteralProto.FromString(literal).ListFields():
        if field.name == "shape":
            continue
        some = True
        array = np.frombuffer(values, np.uint8) if isinstance(values, bytes) else np.asarray(values)
        if array.any() or (array.dtype.kind == "f" and np.signbit(array).any()):
            return False
    return some


def window_sizes(scatter: Node) -> list[int]:
    """The size of a scatter's windows along each dimension of its array."""
    updates = scatter.operands[-1].type
    assert updates is not None
    return windows_of(scatter.instruction.proto, _rank(scatter.operands[0]), updates.shape)


def index_dims(node: Node) -> Iterator[tuple[int, int]]:
    """The dimensions of a scatter's indices and of its updates that are one and the same."""
    numbers = node.instruction.proto.scatter_dimension_numbers
    count = len(node.operands) // 2
    of_indices = [d for d in range(_rank(node.operands[count])) if d != numbers.index_vector_dim]
    updates = range(_rank(node.operands[count + 1]))
    of_updates = [d for d in updates if d not in numbers.update_window_dims]
    for index, update in zip(of_indices, of_updates, strict=True):
        if index not in numbers.scatter_indices_batching_dims:
            yield index, update
