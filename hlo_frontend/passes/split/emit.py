"""Splits a region: each of its nodes becomes one node for each part, each collective a transfer for each.

Rotated regions. The device at place i of its group begins with its own part, then works on those of i + 1,
i + 2, …, each cut into ``tiles``. Where an all-gather was, the device at i + d sends its tiles to i; where a
reduce-scatter was, what i has computed for i + d is sent there, and what arrives is added in the order of the
places. At which rows a part lies differs from device to device: it is looked up in a table by the device's
id, once for each region, so all parts are the same instructions on other numbers.

Such a region may also be cut into pieces, tiles of all devices together: part t is tile t of each device's
rows, and gathers and scatters are made for each piece. That takes fewer transfers, and more time until the
first one is there.

Even regions. All devices compute the same parts one after the other; each collective is made for each part.
Of a ragged all-to-all a part is a stretch of the buffer that it writes, or of the one that it sends from:
of what one device sends another, those rows that lie in it. Who sends knows which these are; so that who
receives knows how many there will be, the devices tell each other once where their rows lie.

Where a part is several stretches of rows (`rules.Cut`), arrays from outside are seen with these as a
dimension of their own.

Values that are read outside of the region, or inside it as a whole, are put together: parts are written into
one array in the order in which they are computed. Arrays from outside that are read in parts are sliced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stretto.collectives.ops import Collective, Kind
from stretto.collectives.types import TensorType

from ...edit import Editor
from ...values import BlockGraph, Node, Value
from ..bytes.steps import part_of
from .instructions import Maker, collective_like, name_of
from .places import Places
from .regions import Region, is_ragged
from .rules import Cut, Split

# Beyond all rows.
_FAR = 1 << 30


class Part:
    """A part of everything that is cut: tile ``tile`` of the rows of the device ``distance`` places on.
    ``number``: how many parts are computed before it, and the element of the region's table that tells
    where it lies. ``values``: by value that is cut, this part of it."""

    def __init__(self, name: str, number: int, distance: int, tile: int) -> None:
        self.name, self.number, self.distance, self.tile = name, number, distance, tile
        self.values: dict[Value, Value] = {}


def split(
    block: BlockGraph, region: Region, tiles: int, places: Places, pieces: bool = False
) -> None:
    """Split a region of the block into parts, in place. ``tiles``: tiles of the part of each device, or parts
    of an even region; what is cut must divide (`Region.divides`). ``places``: those of the block.
    ``pieces``: whether a rotated region is cut into pieces."""
    Splitting(block, region, tiles, places, pieces).apply()


class Splitting:
    def __init__(
        self,
        block: BlockGraph,
        region: Region,
        tiles: int,
        places: Places,
        pieces: bool,
    ) -> None:
        self.block, self.region, self.tiles, self.places = block, region, tiles, places
        self.editor = Editor(block)
        self.size = region.size
        self.pieces = pieces and bool(region.groups)
        self.count = tiles if pieces else self.size * tiles
        self.parts = self._parts()
        self.sliced: dict[tuple[Part, Value, Cut], Value] = {}
        self.used = region.read_whole(self.editor)
        self.table = self._table()

    def _parts(self) -> list[Part]:
        distances = 1 if self.pieces else self.size
        places = [(d, t) for d in range(distances) for t in range(self.tiles)]
        total = len(places)
        return [Part(f"part{k + 1}of{total}", k, d, t) for k, (d, t) in enumerate(places)]

    def _table(self) -> list[list[int]]:
        """By device: the place of each part among all; then its own place in its group."""
        if not self.region.groups or self.pieces:
            return [list(range(self.count))]
        place = {d: p for group in self.region.groups for p, d in enumerate(group)}
        n = self.size
        return [
            [(place[d] + part.distance) % n * self.tiles + part.tile for part in self.parts]
            + [place[d]]
            for d in sorted(place)
        ]

    def apply(self) -> None:
        self.places.begin(self.region.collectives[0].instruction)
        nodes = [*self.region.sources, *self.region.cuts, *self.region.sinks]
        for node in sorted(nodes, key=lambda node: node.position):
            if node in self.region.sources:
                self._gather(node)
            elif node in self.region.sinks:
                self._scatter(node)
            else:
                self._each(node)
        self.places.end(self.editor)

    # What happens to each node.

    def _gather(self, node: Node) -> None:
        """The tiles of the others arrive one by one."""
        (operand,) = node.operands
        result = node.results[0]
        cut = self.region.dimensions[result]
        made: list[Node] = []
        tiles = self._tiles(node, operand, cut.dimension, made)
        for part in self.parts:
            value = tiles[part.tile]
            if self.pieces:
                value = self._piece(node, part, value, made)
            elif part.distance:
                value = self._permuted(node, part, value, -part.distance, made)
            part.values[result] = value
        self._put_together(node, result, cut, made)
        self._replace(node, made)

    def _tiles(self, node: Node, value: Value, dimension: int, made: list[Node]) -> list[Value]:
        if self.tiles == 1:
            return [value]
        assert value.type is not None
        maker = Maker(node.instruction, f"{node.instruction.name}.tiles")
        size = value.type.shape[dimension] // self.tiles
        tiles = [maker.slice(value, dimension, k * size, size) for k in range(self.tiles)]
        made += maker.nodes
        return tiles

    def _piece(self, node: Node, part: Part, value: Value, made: list[Node]) -> Value:
        """What the gather or scatter makes of a piece."""
        assert node.collective is not None and value.type is not None
        shape = list(value.type.shape)
        along = node.collective.dimension
        gathers = node.collective.kind is Kind.ALL_GATHER
        shape[along] = shape[along] * self.size if gathers else shape[along] // self.size
        new = _collective(node, part, [value], [TensorType(value.type.dtype, tuple(shape))])
        made.append(new)
        return new.results[0]

    def _permuted(self, node: Node, part: Part, value: Value, by: int, made: list[Node]) -> Value:
        """What arrives where each device sends ``value`` to the one ``by`` places on."""
        n = self.size
        pairs = tuple(
            (device, group[(place + by) % n])
            for group in self.region.groups
            for place, device in enumerate(group)
        )
        new = _collective(node, part, [value], [value.type], kind=Kind.PERMUTE, pairs=pairs)
        made.append(new)
        return new.results[0]

    def _scatter(self, node: Node) -> None:
        """Tiles are sent to those whose they are, and what arrives is added."""
        collective = node.collective
        assert collective is not None
        dimension = collective.dimension
        made: list[Node] = []
        terms: list[list[Value]] = [[] for _ in range(self.size)]
        for part in self.parts:
            maker = Maker(node.instruction, f"{node.instruction.name}.{part.name}")
            value = self._read(part, node.operands[0], Cut(dimension), maker)
            made += maker.nodes
            if self.pieces:
                value = self._piece(node, part, value, made)
            elif part.distance:
                value = self._permuted(node, part, value, part.distance, made)
            terms[part.distance].append(value)
        maker = Maker(node.instruction, f"{node.instruction.name}.sum")
        joined = [maker.concatenated(tiles, dimension) for tiles in terms if tiles]
        total = joined[0] if self.pieces else self._sum(maker, joined)
        made += maker.nodes
        self.editor.replace(node.results[0], total)
        self._replace(node, made)

    def _sum(self, maker: Maker, terms: Sequence[Value]) -> Value:
        """The sum in the order of the places, from place 0 on; ``terms[d]`` is of the device ``d`` places
        back. Floats of 16 bits and less are summed as f32 and rounded once, as communicators do."""
        type = terms[0].type
        assert type is not None
        narrow = type.dtype.startswith(("f4", "f8", "f16", "bf16"))
        wide = TensorType("f32", type.shape) if narrow else type
        if narrow:
            terms = [maker.add("convert", wide, [term]) for term in terms]
        total = self._in_order(maker, terms, wide)
        return maker.add("convert", type, [total]) if narrow else total

    def _in_order(self, maker: Maker, terms: Sequence[Value], type: TensorType) -> Value:
        """The sum from place 0 on, where which place is a device's own is known only as it runs: devices at
        places up to it are as many places back as that, those behind it more. So all terms are added, from
        the last to the first, and then again, as -0.0, which changes no number, where it is not their turn.
        That is one loop over elements; to put terms into one array and take them out in order is two copies.
        """
        if self.size == 2:
            return maker.add("add", type, terms)  # the same both ways
        own = self.places.at(self.table, len(self.parts))
        nothing = maker.add("negate", type, [maker.zeros(type)])
        total = nothing
        back = list(reversed(range(self.size)))
        for direction, d in [("GE", d) for d in back] + [("LT", d) for d in back[:-1]]:
            pair = [own, maker.constant([d], ())]
            turn = maker.add(
                "compare", TensorType("pred", ()), pair, comparison_direction=direction
            )
            taken = maker.add("broadcast", TensorType("pred", type.shape), [turn])
            term = maker.add("select", type, [taken, terms[d], nothing])
            total = maker.add("add", type, [total, term])
        return total

    def _each(self, node: Node) -> None:
        """The node once for each part."""
        split = self.region.cuts[node]
        if is_ragged(node) and Cut(0) in split.operands:
            self._ragged(node, split)
            return
        made: list[Node] = []
        for part in self.parts:
            maker = Maker(node.instruction, f"{node.instruction.name}.{part.name}")
            operands = [
                value if own is None else self._read(part, value, own, maker)
                for value, own in zip(node.operands, split.operands, strict=True)
            ]
            made += maker.nodes
            if node.collective is not None:
                types = [
                    v.type if cut is None else part_of(v.type, cut.dimension, self.count)
                    for v, cut in zip(node.results, split.results, strict=True)
                    if v.type is not None
                ]
                made.append(_collective(node, part, operands, types))
                results = made[-1].results
            else:
                copy = Maker(node.instruction, f"{node.instruction.name}.{part.name}")
                results = copy.part(node, split.batch, self.count, operands)
                made += copy.nodes
            part.values |= zip(node.results, results, strict=True)
        for result, cut in zip(node.results, split.results, strict=True):
            if cut is None:
                self.editor.replace(result, self.parts[0].values[result])
            else:
                self._put_together(node, result, cut, made)
        self._replace(node, made)

    def _ragged(self, node: Node, split: Split) -> None:
        """A ragged all-to-all of rows for each part: of those that land in it, or are sent from it."""
        given, taken, starts, counts, targets, arriving = node.operands
        (result,) = node.results
        lands = split.results[0] is not None
        type = (result if lands else given).type
        assert type is not None and result.type is not None and node.collective is not None
        size, places = type.shape[0] // self.count, targets if lands else starts
        far = self._told(node, places)
        made = [far]
        whole = taken
        for part in self.parts:
            maker = Maker(node.instruction, f"{node.instruction.name}.{part.name}")
            rows = _Rows(maker, places, [self._bound(part, size, k) for k in (0, 1)])
            first, number = rows.within(places, counts)
            _, expected = rows.within(far.results[0], arriving)
            inside = rows.where(number, rows.less(first, self._start(part, size)))
            ahead = rows.less(first, places)
            other = rows.where(number, rows.more(starts if lands else targets, ahead))
            if lands:
                own = part_of(type, 0, self.count)
                arrays = [given, self._read(part, taken, Cut(0), maker), other, number, inside]
            else:
                own = result.type
                arrays = [self._read(part, given, Cut(0), maker), whole, inside, number, other]
            new = _collective(node, part, [*arrays, expected], [own])
            made += [*maker.nodes, new]
            part.values[result] = whole = new.results[0]
        if lands:
            self._put_together(node, result, Cut(0), made)
        else:
            self.editor.replace(result, whole)
        self._replace(node, made)

    def _told(self, node: Node, places: Value) -> Node:
        """The exchange by which devices learn at which places the others have the rows that they get."""
        old, type = node.collective, places.type
        assert old is not None and type is not None
        name = f"{name_of(node)}.places"
        new = replace(
            old, kind=Kind.ALL_TO_ALL, operands=(type,), results=(type,), dimension=0, name=name
        )
        return collective_like(node, new, [places])

    def _bound(self, part: Part, size: int, end: int) -> Value:
        """The row before which a part begins or ``end``s: the first and the last have what lies outside of
        the buffer, which is an error that is to be found."""
        outside = part.number + end in (0, self.count)
        row = (2 * end - 1) * _FAR if outside else (part.number + end) * size
        return self.places.at([[row]], 0)

    def _read(self, part: Part, value: Value, cut: Cut, maker: Maker) -> Value:
        """A part of a value as a node of the region reads it."""
        plain = value.barrier is None and not value.order
        if plain and self.region.dimensions.get(value.root) == cut:
            return part.values[value.root]
        if plain:
            cheap = maker.cheap_part(value, cut.dimension, self.count)
            if cheap is not None:
                return cheap
        assert value.type is not None
        key = Value(value.type) if not plain else value.root
        found = self.sliced.get((part, key, cut)) if plain else None
        if found is None:
            stretches = self._stretches(cut)
            if stretches > 1:
                tiled = self._tiled(value, cut.dimension, stretches, self.count, maker)
                one = maker.slice_at(tiled, cut.dimension + 1, self._start(part), 1)
                found = maker.add("reshape", part_of(value.type, cut.dimension, self.count), [one])
            else:
                rows = value.type.shape[cut.dimension] // self.count
                found = maker.slice_at(value, cut.dimension, self._start(part, rows), rows)
            self.sliced[part, key, cut] = found
        return found

    def _stretches(self, cut: Cut) -> int:
        """Of how many stretches of the dimension a part is made, with others between them."""
        return cut.outer * (self.size if self.pieces else 1)

    def _tiled(
        self, value: Value, dimension: int, stretches: int, tiles: int, maker: Maker
    ) -> Value:
        """An array seen as `_tiled_type` says."""
        assert value.type is not None
        return maker.add("reshape", _tiled_type(value.type, dimension, stretches, tiles), [value])

    def _start(self, part: Part, rows: int = 1) -> Value:
        """Where a part lies in an array of which each part has so many rows."""
        return self.places.at(self.table, part.number, rows)

    def _put_together(self, node: Node, result: Value, cut: Cut, made: list[Node]) -> None:
        """Have a value as a whole, where something reads it so."""
        if result not in self.used:
            return
        assert result.type is not None
        whole: Value | None = None
        dimension, stretches = cut.dimension, self._stretches(cut)
        for part in self.parts:
            maker = Maker(node.instruction, f"{node.instruction.name}.put.{part.name}")
            size = result.type.shape[dimension]
            value = part.values[result]
            if stretches > 1:
                own = self._tiled(value, dimension, stretches, 1, maker)
                type = _tiled_type(result.type, dimension, stretches, self.count)
                into = maker.zeros(type) if whole is None else whole
                whole = maker.put_at(into, own, dimension + 1, self._start(part))
            else:
                start = self._start(part, size // self.count)
                into = maker.zeros(result.type) if whole is None else whole
                whole = maker.put_at(into, value, dimension, start)
            made += maker.nodes
        assert whole is not None
        if stretches > 1:
            maker = Maker(node.instruction, f"{node.instruction.name}.put")
            whole = maker.add("reshape", result.type, [whole])
            made += maker.nodes
        self.editor.replace(result, whole)

    def _replace(self, node: Node, made: Sequence[Node]) -> None:
        self.editor.put_behind(node, made)
        self.editor.remove(node)


class _Rows:
    """Makes numbers of rows of a ragged all-to-all, of the type of ``like``. ``bounds``: of a stretch."""

    def __init__(self, maker: Maker, like: Value, bounds: Sequence[Value]) -> None:
        assert like.type is not None
        self._maker, self._type = maker, like.type
        self._low, self._high = (self._spread(bound) for bound in bounds)

    def within(self, first: Value, number: Value) -> tuple[Value, Value]:
        """Of ``number`` rows from ``first`` on the first one that is not before the stretch, and how many are
        in it."""
        begin = self._add("maximum", first, self._low)
        end = self._add("minimum", self.more(first, number), self._high)
        none = self._maker.zeros(self._type)
        return begin, self._add("maximum", self.less(end, begin), none)

    def more(self, a: Value, b: Value) -> Value:
        return self._add("add", a, b)

    def less(self, a: Value, b: Value) -> Value:
        return self._add("subtract", a, b)

    def where(self, number: Value, value: Value) -> Value:
        """``value`` where there are rows, 0 where there are none."""
        none = self._maker.zeros(self._type)
        type = TensorType("pred", self._type.shape)
        some = self._maker.add("compare", type, [number, none], comparison_direction="GT")
        return self._maker.add("select", self._type, [some, value, none])

    def _add(self, opcode: str, a: Value, b: Value) -> Value:
        return self._maker.add(opcode, self._type, [self._spread(a), self._spread(b)])

    def _spread(self, value: Value) -> Value:
        if value.type is None or value.type.shape:
            return value
        if value.type.dtype != self._type.dtype:
            value = self._maker.add("convert", TensorType(self._type.dtype, ()), [value])
        return self._maker.add("broadcast", self._type, [value])


def _tiled_type(type: TensorType, dimension: int, stretches: int, tiles: int) -> TensorType:
    """The type with the dimension of its rows as three: stretches, tiles of a stretch, and rows of a tile."""
    before, rows, after = (
        type.shape[:dimension],
        type.shape[dimension],
        type.shape[dimension + 1 :],
    )
    return TensorType(type.dtype, (*before, stretches, tiles, rows // (stretches * tiles), *after))


def _collective(
    node: Node,
    part: Part,
    operands: Sequence[Value],
    types: Sequence[TensorType | None],
    kind: Kind | None = None,
    pairs: tuple[tuple[int, int], ...] = (),
) -> Node:
    """A collective for one part; a permute if there are ``pairs``, else of the kind of ``node``."""
    old = node.collective
    assert old is not None
    name = f"{name_of(node)}.{part.name}"
    given = tuple(v.type for v in operands if v.type is not None)
    results = tuple(t for t in types if t is not None)
    new = replace(old, operands=given, results=results, name=name)
    if kind is Kind.PERMUTE:
        # Its cost is that of the link between the devices of the whole collective.
        new = Collective(kind, given, results, old.groups, pairs, name=name, source=old.source)
    return collective_like(node, new, operands)
