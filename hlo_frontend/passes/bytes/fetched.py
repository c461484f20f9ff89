"""Makes what another device has of what a device has itself: `Fetched`.

The value that device ``source[d]`` has, or a part of it, is followed back from op to op, and made again on
device d where something differs. It goes back

- through a permute, to the device that sent it,
- through an all-gather of which a part is wanted, to the device that gave that part,
- through a sum to which only one device gives something (`rows`), to that device; or where two do, to both,
- through a gather of rows that are all of one part of an array, to that part,
- through a scatter to that part of its indices that does not miss the array, or if all miss, to the array,

and ends where each device has a copy of what the other one has (`copies`), or where it is known when the
program is compiled. What cannot be made so raises `Refused`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType

from ...values import Barrier, Node, NodeKind, Value
from ..valid.known import FOLLOWED, starts_of
from .batches import Batch, batches
from .bounds import PART, placed_at
from .context import Context
from .contributed import changes_nothing
from .copies import repeats
from .cut import Slicer, constant, cut_node, cut_type, op, plus_zero, shifted
from .rows import Rows, column_at, index_dims

# The most nodes that are looked at for a value, and the longest way back.
_MOST, _DEPTH = 400, 80
# The largest table of known numbers of all devices.
_LARGEST_TABLE = 4096
Source = tuple[int, ...]


class Refused(Exception):
    """A value cannot be made on other devices."""


class Cut(NamedTuple):
    """Of ``parts`` equal parts along ``dimension`` part ``place[d]`` for device d."""

    dimension: int
    parts: int
    place: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Found:
    """``value``: what is wanted. ``proved``: whether a sum or a scatter was left out on the way."""

    value: Value
    proved: bool = False


class Fetched:
    """Values of other devices. ``nodes``: those that were made."""

    def __init__(self, context: Context, rows: Rows, like: Node) -> None:
        self._context, self._rows, self._like = context, rows, like.instruction
        self._devices = context.num_devices
        self.nodes: list[Node] = []
        self._found: dict[tuple[Value, Source, Cut | None], Found | None] = {}
        places = dict.fromkeys(range(self._devices), 0)
        slicer, own_id = Slicer.of(context.known, places, self._like)
        self._own = slicer.own
        self.nodes.append(own_id)
        self._left, self._depth = _MOST, 0

    def end(self, node: Node, index: int) -> Found | None:
        """What the devices have of a node's result, made without the node itself."""
        source = tuple(range(self._devices))
        if node.collective is not None:
            return self._received(node, node.collective, index, source, None)
        if node.instruction.opcode == "gather":
            return self._picked(node, source)
        if node.instruction.opcode == "scatter":
            return self._into(node, node.operands[0], source)
        return self._sliced(node, source, None)

    def of(self, value: Value, source: Source, cut: Cut | None = None) -> Found:
        """What device ``source[d]`` has of ``value``, on every device d."""
        key = (value.root, source, cut)
        if key not in self._found:
            self._found[key] = None
            if not self._left or self._depth > _DEPTH:
                raise Refused
            self._left -= 1
            self._depth += 1
            try:
                self._found[key] = self._made(value.root, source, cut)
            except Refused:
                pass
            finally:
                self._depth -= 1
        found = self._found[key]
        if found is None:
            raise Refused
        if found.value.root is value.root:
            return Found(value, found.proved)
        if value.order or value.barrier is not None:
            raise Refused
        return found

    def _made(self, root: Value, source: Source, cut: Cut | None) -> Found:
        if root.type is None or (cut and root.type.shape[cut.dimension] % cut.parts):
            raise Refused
        known = self._context.known.of(root)
        if known is not None:
            return Found(self._known(root, known, source, cut))
        node = root.node
        if node is not None and not node.order:
            try:
                if node.collective is not None:
                    return self._received(node, node.collective, root.index, source, cut)
                if node.kind is NodeKind.COMPUTE and repeats(node):
                    return self._computed(node, root.index, source, cut)
            except Refused:
                pass
        if not self._context.copies.same(root, source):
            raise Refused
        return Found(root if cut is None else self._part(root, cut))

    def _put(self, nodes: Sequence[Node]) -> Value:
        self.nodes += nodes
        return nodes[-1].results[0]

    def _part(self, value: Value, cut: Cut) -> Value:
        slicer = Slicer(self._like, cut.place, self._own)
        nodes, part = slicer.part(value, cut.dimension, cut.parts)
        self.nodes += nodes
        return part

    def _known(self, root: Value, known: np.ndarray, source: Source, cut: Cut | None) -> Value:
        """A known value: the device's own where it is the same, else a table."""
        assert root.type is not None
        rows = np.broadcast_to(known, (self._devices, *known.shape[1:]))
        if (rows[list(source)] == rows).all():
            return root if cut is None else self._part(root, cut)
        type = root.type
        if self._devices * type.size > _LARGEST_TABLE or not type.size:
            raise Refused
        table = np.broadcast_to(rows[list(source)], (self._devices, *type.shape))
        if cut is not None:
            type = cut_type(type, cut.dimension, cut.parts)
            size = type.shape[cut.dimension]
            table = np.stack(
                [
                    row.take(range(place * size, (place + 1) * size), cut.dimension)
                    for row, place in zip(table, cut.place, strict=True)
                ]
            )
        numbers = table.astype(object)
        limits = np.iinfo(np.int32)
        if numbers.min() < limits.min or numbers.max() > limits.max:
            raise Refused
        return self._entry(numbers.astype(np.int32), type)

    def _entry(self, table: np.ndarray, type: TensorType) -> Value:
        """The device's own row of a table."""
        rows = constant(table.reshape(self._devices, -1), self._like)
        size = rows.type.shape[1] if rows.type is not None else 1
        one = TensorType("s32", (1, size))
        starts = [self._own, constant(np.uint32(0), self._like)]
        made = [
            op("dynamic-slice", [rows, *starts], one, self._like, dynamic_slice_sizes=[1, size])
        ]
        flat = TensorType("s32", type.shape)
        made.append(op("reshape", made[-1].results, flat, self._like))
        if type.dtype != "s32":
            made.append(op("convert", made[-1].results, type, self._like))
        return self._put(made)

    # What collectives give.

    def _received(
        self, node: Node, collective: Collective, index: int, source: Source, cut: Cut | None
    ) -> Found:
        if collective.valid_iterations or node.is_started:
            raise Refused
        operand = node.operands[index]
        if collective.kind is Kind.PERMUTE:
            sent = {target: sender for sender, target in collective.pairs}
            if len(sent) != self._devices:
                raise Refused
            found = self.of(operand, tuple([sent[d] for d in source]), cut)
        elif collective.kind is Kind.ALL_GATHER:
            found = self._given(collective, operand, source, cut)
        elif collective.kind is Kind.ALL_REDUCE and node.reducer is None:
            found = self._summed(collective, operand, source, cut)
        else:
            raise Refused
        self._context.crossed.add(node)
        return found

    def _given(
        self, collective: Collective, operand: Value, source: Source, cut: Cut | None
    ) -> Found:
        """A part of what a device has given."""
        groups = collective.group_of
        if cut is None or cut.dimension != collective.dimension or len(groups) != self._devices:
            raise Refused
        if len({len(group) for group in collective.groups}) != 1:
            raise Refused
        each, rest = divmod(cut.parts, len(collective.groups[0]))
        if rest:
            raise Refused
        pairs = list(zip(source, cut.place, strict=True))
        givers = tuple([groups[d][place // each] for d, place in pairs])
        within = tuple([place % each for _, place in pairs])
        return self.of(operand, givers, Cut(cut.dimension, each, within) if each > 1 else None)

    def _summed(
        self, collective: Collective, operand: Value, source: Source, cut: Cut | None
    ) -> Found:
        """What one device, or two, have given to a sum."""
        groups = collective.group_of
        if operand.type is None or operand.order or operand.barrier is not None:
            raise Refused
        if len(groups) != self._devices or min(len(group) for group in collective.groups) < 2:
            raise Refused
        place = (0,) * self._devices if cut is None else cut.place
        nothing = self._nothing(operand, collective.reduction, cut)
        givers = [
            [m for m in groups[d] if not nothing[m, p]] or [groups[d][0]]
            for d, p in zip(source, place, strict=True)
        ]
        if all(len(some) == 1 for some in givers):
            found = self.of(operand, tuple([m for (m,) in givers]), cut)
            return Found(self._plus_zero(found.value, collective.reduction), True)
        if cut is not None or collective.reduction is Reduction.OR:
            raise Refused
        own = [groups[d] for d in source]
        return self._both(operand, own, nothing[:, 0], collective.reduction)

    def _nothing(self, operand: Value, reduction: Reduction | None, cut: Cut | None) -> np.ndarray:
        """Of each device and part, whether what it gives changes nothing."""
        assert operand.type is not None
        rank = len(operand.type.shape)
        if reduction in (Reduction.SUM, Reduction.OR):
            parts = 1 if cut is None else cut.parts
            at = placed_at(rank, {} if cut is None else {cut.dimension: PART})
            zeros = self._rows.by(parts).zeros(operand, at)
            return np.broadcast_to(zeros, (self._devices, parts))
        node = operand.node
        if cut is not None or node is None or node.instruction.opcode != "scatter":
            raise Refused
        into = node.operands[0].node
        if len(node.operands) != 3 or into is None or into.instruction.opcode != "select":
            raise Refused
        guard, nothing, _ = into.operands
        if guard.type is None or not changes_nothing(nothing, reduction):
            raise Refused
        chosen = self._rows.by(1).of(guard, (None,) * len(guard.type.shape)).low == 1
        chosen = np.broadcast_to(chosen, (self._devices, 1)) & self._missing(node)[:, None]
        return np.asarray(chosen, bool)

    def _both(
        self,
        operand: Value,
        groups: Sequence[Sequence[int]],
        nothing: np.ndarray,
        reduction: Reduction | None,
    ) -> Found:
        """The sum, or the like, of what two devices of a group give: one writes rows, and the other one has
        the array itself. ``nothing``: the devices that give what changes nothing."""
        node = operand.node
        if node is None or node.instruction.opcode != "scatter":
            raise Refused
        misses = self._missing(node)
        chosen: list[tuple[int, int]] = []
        for group in groups:
            writes = [m for m in group if not nothing[m] and not misses[m]]
            keeps = [m for m in group if not nothing[m] and misses[m]]
            others = [m for m in group if nothing[m]]
            if len(writes) > 1 or len(keeps) > 1:
                raise Refused
            writes = writes or others[:1]
            keeps = keeps or others[-1:]
            if len(writes) != 1 or len(keeps) != 1:
                raise Refused
            chosen.append((writes[0], keeps[0]))
        first, second = (self.of(operand, tuple([pair[k] for pair in chosen])) for k in (0, 1))
        type = operand.type
        assert type is not None
        # XLA would write into the sum, and so add in another order.
        terms = [first.value.view((), Barrier((first.value,), is_fence=False)), second.value]
        extreme = reduction in (Reduction.MIN, Reduction.MAX)
        if extreme and type.numpy.kind not in "iub":
            pairs = zip(groups, chosen, strict=True)
            swapped = [group.index(one) > group.index(two) for group, (one, two) in pairs]
            both = self._extreme(self._in_turn(terms, swapped), reduction)
        else:
            both = self._put([op(str(reduction), terms, type, self._like)])
        of_two = all(len(group) == 2 for group in groups)
        return Found(both if of_two else self._plus_zero(both, reduction), True)

    def _in_turn(self, terms: list[Value], swapped: Sequence[bool]) -> list[Value]:
        """Two terms, the other way round on some devices."""
        type = terms[0].type
        assert type is not None
        if len(set(swapped)) == 1:
            return terms[::-1] if swapped[0] else terms
        chosen = self._entry(np.array(swapped, np.int32), TensorType("pred", ()))
        where = self._put([op("broadcast", [chosen], TensorType("pred", type.shape), self._like)])
        turns = (terms[::-1], terms)
        return [self._put([op("select", [where, *two], type, self._like)]) for two in turns]

    def _extreme(self, terms: list[Value], reduction: Reduction | None) -> Value:
        """The minimum or maximum of floats as collectives give it: of 0.0 and -0.0 the first one. The op
        minimum gives -0.0."""
        first, second = terms
        type, like = second.type, self._like
        assert type is not None
        truth = TensorType("pred", type.shape)
        direction = "LT" if reduction is Reduction.MIN else "GT"
        beyond = op("compare", [second, first], truth, like, comparison_direction=direction)
        nan = op("compare", [second, second], truth, like, comparison_direction="NE")
        either = op("or", [beyond.results[0], nan.results[0]], truth, like)
        return self._put(
            [beyond, nan, either, op("select", [either.results[0], second, first], type, like)]
        )

    def _plus_zero(self, value: Value, reduction: Reduction | None) -> Value:
        """A sum makes 0.0 of -0.0."""
        assert value.type is not None
        if reduction is not Reduction.SUM or value.type.numpy.kind in "iub":
            return value
        nodes, value = plus_zero(value, self._own, self._like)
        self.nodes += nodes
        return value

    # What is computed.

    def _computed(self, node: Node, index: int, source: Source, cut: Cut | None) -> Found:
        opcode = node.instruction.opcode
        if opcode == "dynamic-slice":
            return self._sliced(node, source, cut)
        if opcode == "scatter" and cut is None and len(node.operands) == 3:
            found = self._written(node, source)
            if found is not None:
                return found
        if opcode == "gather" and cut is None:
            found = self._picked(node, source)
            if found is not None:
                return found
        if cut is None:
            operands = [self.of(v, source) for v in node.operands]
            return self._again(node, index, operands, None, 1)
        given = [v.type for v in node.operands if v.type is not None]
        results = [v.type for v in node.results if v.type is not None]
        if len(given) != len(node.operands) or len(node.results) != 1 or len(results) != 1:
            raise Refused
        for batch in batches(node.instruction, given, results, cut.parts):
            if batch.results != (cut.dimension,):
                continue
            try:
                operands = [
                    self.of(v, source, None if d is None else cut._replace(dimension=d))
                    for v, d in zip(node.operands, batch.operands, strict=True)
                ]
            except Refused:
                continue
            return self._again(node, index, operands, batch, cut.parts)
        raise Refused

    def _again(
        self, node: Node, index: int, found: Sequence[Found], batch: Batch | None, parts: int
    ) -> Found:
        """The node on other operands; itself where they are its own."""
        operands = [one.value for one in found]
        proved = any(one.proved for one in found)
        if batch is not None:
            made = cut_node(node, batch, operands, parts)
        elif all(new.root is old.root for new, old in zip(operands, node.operands, strict=True)):
            return Found(node.results[index], proved)
        else:
            made = Node(NodeKind.COMPUTE, node.instruction, -1, operands)
            made.results = [Value(v.type, made, i) for i, v in enumerate(node.results)]
        self.nodes.append(made)
        return Found(made.results[index], proved)

    def _sliced(self, node: Node, source: Source, cut: Cut | None) -> Found:
        """A slice from known starts of other devices' arrays: a part, where it begins at one."""
        whole, part = node.operands[0].type, node.results[0].type
        known = [None, *(self._context.known.of(v) for v in node.operands[1:])]
        starts = starts_of(node, known, 1)
        assert whole is not None and part is not None
        along = [d for d, size in enumerate(part.shape) if size != whole.shape[d]]
        if starts is None or len(along) != 1 or (cut is not None and cut.dimension != along[0]):
            raise Refused
        (d,) = along
        size = part.shape[d]
        firsts = np.broadcast_to(starts[:, d], (self._devices,))[list(source)]
        if whole.shape[d] % size or (firsts % size).any():
            raise Refused
        parts, place = whole.shape[d] // size, tuple((firsts // size).tolist())
        if cut is not None:
            place = tuple([p * cut.parts + q for p, q in zip(place, cut.place, strict=True)])
            parts *= cut.parts
        return self.of(node.operands[0], source, Cut(d, parts, place))

    def _missing(self, node: Node) -> np.ndarray:
        """Of each device, whether a scatter leaves its array as it is."""
        rank = len(node.operands[0].type.shape) if node.operands[0].type is not None else 0
        found = self._rows.by(1).missed(node, (None,) * rank)
        return np.broadcast_to(found, (self._devices, 1))[:, 0]

    def _written(self, node: Node, source: Source) -> Found | None:
        """A scatter of which all but one part of the indices miss the array, or all do; None if it is not."""
        if self._missing(node)[list(source)].all():
            return Found(self.of(node.operands[0], source).value, True)
        array = self.of(node.operands[0], source)
        return self._into(node, array.value, source)

    def _into(self, node: Node, array: Value, source: Source) -> Found | None:
        """A scatter into ``array``, of that part of its indices and updates that does not miss it."""
        for along, beside in index_dims(node):
            for parts in self._cuts(node.operands[1], along):
                hits = ~self._rows.by(parts).missing(node, along)
                hits = np.broadcast_to(hits, (self._devices, parts))[list(source)]
                if (hits.sum(1) > 1).any():
                    continue
                place = tuple(hits.argmax(1).tolist())
                try:
                    some = [
                        self.of(value, source, Cut(d, parts, place))
                        for value, d in zip(node.operands[1:], (along, beside), strict=True)
                    ]
                except Refused:
                    continue
                batch = Batch((None, along, beside), (None,))
                operands = [array, *(one.value for one in some)]
                made = cut_node(node, batch, operands, parts)
                self.nodes.append(made)
                return Found(made.results[0], True)
        return None

    def _picked(self, node: Node, source: Source) -> Found | None:
        """A gather of rows that are all of one part of an array that devices have given parts of."""
        array, indices = node.operands
        proto = node.instruction.proto
        numbers, sizes = proto.gather_dimension_numbers, proto.gather_slice_sizes
        if array.type is None or indices.type is None or indices.type.dtype not in FOLLOWED:
            return None
        for column, d in enumerate(numbers.start_index_map):
            at = column_at(indices, numbers.index_vector_dim, column)
            found = self._rows.by(1).of(indices, at)
            low, high = (np.broadcast_to(a, (self._devices, 1))[list(source), 0] for a in found)
            for parts in self._cuts(array, d) if sizes[d] == 1 else ():
                size = array.type.shape[d] // parts
                place = tuple([int(n) // size for n in low])
                if any(
                    not 0 <= p < parts or n // size != p for n, p in zip(high, place, strict=True)
                ):
                    continue
                try:
                    part = self.of(array, source, Cut(d, parts, place)).value
                    own = self.of(indices, source).value
                except Refused:
                    continue
                ahead, start = Slicer(self._like, place, self._own).start(size)
                moved = shifted(own, numbers.index_vector_dim, column, start, self._like)
                made = cut_node(
                    node, Batch((d, None), (None,)), [part, moved[-1].results[0]], parts
                )
                self.nodes += [*ahead, *moved, made]
                return Found(made.results[0], True)
        return None

    def _cuts(self, value: Value, along: int) -> Sequence[int]:
        """Into how many parts a value may be cut: as many as gathers have put together, from many to few."""
        assert value.type is not None
        size = value.type.shape[along]
        found: set[int] = {1}
        todo, seen = [value.root], {value.root}
        while todo and len(seen) < _MOST:
            node = todo.pop().node
            if node is None:
                continue
            if node.collective is not None and node.collective.kind is Kind.ALL_GATHER:
                count = len(node.collective.groups[0])
                found |= {count * n for n in found if count * n <= self._devices}
            fresh = [v.root for v in node.operands if v.root not in seen]
            seen.update(fresh)
            todo += fresh
        return sorted([n for n in found if n > 1 and size % n == 0], reverse=True)
