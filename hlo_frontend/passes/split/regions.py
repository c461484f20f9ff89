"""Finds what can be computed part after part around collectives: the regions of a block.

A region grows from collectives along data: through every node for which there is a rule (`rules`), upwards
and downwards. Of what it has grown to, nodes stay that lie between two of its collectives, or between a
collective and the products that come first on the way from it or last on the way to it: behind these,
messages hide. Cheap nodes that only such nodes read stay too.

Two kinds of regions:

- *Rotated*: all-gathers and reduce-scatters along the cut dimension, over the same groups. Each part is the
  rows of one device, and each device begins with its own.
- *Even*: all-reduces, and all-to-alls, all-gathers and reduce-scatters along other dimensions. All devices
  compute the same parts in the same order, and each collective is made once for each part. Gathers and
  scatters are in one only where no other region has what they would be split with: the rotated form begins
  with what a device has, and sums that are scattered along the cut are added part by part as they arrive.
  A ragged all-to-all is made once for each part of the rows that it writes, or of those that it sends.

Invariant: what is found follows from the program's text alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import ELEMENT_TYPES

from ...edit import Editor
from ...flops import flops
from ...values import BlockGraph, Node, NodeKind, Value, operand_shape, result_shape
from .rules import Cut, Split, backward, can_be, divides, forward, is_heavy

Groups = tuple[tuple[int, ...], ...]

# Of the numbers of parts that are tried, those of which others are multiples.
_FACTORS = (2, 3, 5, 7)
_SUMS_AND_EXCHANGES = frozenset({Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.RAGGED_ALL_TO_ALL})
_GATHERS_AND_SCATTERS = frozenset({Kind.ALL_GATHER, Kind.REDUCE_SCATTER})
SPLITTABLE = _SUMS_AND_EXCHANGES | _GATHERS_AND_SCATTERS


@dataclass(eq=False)
class Region:
    """``groups``: those of a rotated region, empty for an even one. ``cuts``: its nodes, with collectives in
    an even one. ``sources``: its all-gathers, ``sinks``: its reduce-scatters, each by position.
    ``dimensions``: how each array is cut that is.
    """

    groups: Groups
    cuts: dict[Node, Split] = field(default_factory=dict)
    sources: list[Node] = field(default_factory=list)
    sinks: list[Node] = field(default_factory=list)
    dimensions: dict[Value, Cut] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of devices that have a part each; 1 in an even region."""
        return len(self.groups[0]) if self.groups else 1

    @property
    def collectives(self) -> list[Node]:
        through = [node for node in self.cuts if node.kind is NodeKind.COLLECTIVE]
        return sorted([*self.sources, *through, *self.sinks], key=lambda node: node.position)

    @property
    def flops(self) -> float:
        return sum(flops(node.instruction) for node in self.cuts if is_heavy(node))

    def divides(self, parts: int) -> bool:
        """Whether everything that is cut has that many equal parts."""
        if not all(can_be(node, cut, parts) for node, cut in self.cuts.items()):
            return False
        ends = [(n.results[0].type, n) for n in self.sources]
        ends += [(n.operands[0].type, n) for n in self.sinks]
        return all(type is not None and divides(type, _along(n), parts) for type, n in ends)

    def read_whole(self, editor: Editor) -> set[Value]:
        """The cut values that something reads as a whole."""
        found: set[Value] = set()
        for value, cut in self.dimensions.items():
            for use in editor.uses(value):
                split = None if use.node is None else self.cuts.get(use.node)
                own = None if split is None else split.operands[use.position]
                if use.node in self.sinks:
                    own = cut
                if own != cut or use.value.barrier is not None or use.value.order:
                    found.add(value)
        return found

    def signature(self) -> tuple[object, ...]:
        """Equal for regions that do the same on arrays of the same types."""
        nodes = sorted([*self.sources, *self.sinks, *self.cuts], key=lambda node: node.position)
        return (
            self.groups,
            tuple(
                (
                    node.instruction.opcode,
                    tuple(v.type for v in node.operands),
                    tuple(v.type for v in node.results),
                    self.cuts.get(node),
                    flops(node.instruction) if node.instruction.opcode == "while" else 0.0,
                )
                for node in nodes
            ),
        )


def _along(node: Node) -> Cut:
    """How the whole array of a gather or a scatter is cut: a stretch for each device."""
    assert node.collective is not None
    return Cut(node.collective.dimension)


def regions_of(block: BlockGraph, num_devices: int) -> list[Region]:
    """The regions of a block, none of which share a node, by their first collectives."""
    if block.unread or block.phases or block.crossing:
        return []
    editor = Editor(block)
    taken: set[Node] = set()
    found: list[Region] = []
    for node in block.nodes:
        if node not in taken and _is_rotated(node, num_devices) and is_free(editor, node):
            assert node.collective is not None
            for region in _InParts(editor, node.collective.groups, taken).rotated(node):
                found.append(region)
                taken.update(region.cuts, region.sources, region.sinks)
    # What regions grow from, and what they have.
    for seeds, kinds in (
        (_SUMS_AND_EXCHANGES, _SUMS_AND_EXCHANGES),
        (_GATHERS_AND_SCATTERS, SPLITTABLE),
    ):
        for node in block.nodes:
            if node in taken or not _is_even(node, seeds, num_devices) or not is_free(editor, node):
                continue
            grown = [
                region
                for cut, position in _even_cuts(node)
                for region in _InParts(editor, (), taken, kinds, num_devices).even(
                    node, cut, position
                )
            ]
            # Where several are as large, one that has four parts, along the first dimension.
            largest = max(
                (r for r in grown if node in r.cuts),
                key=lambda r: (len(r.collectives), r.flops, r.divides(4)),
                default=None,
            )
            if largest is not None:
                found.append(largest)
                taken.update(largest.cuts)
    return sorted(found, key=lambda region: region.collectives[0].position)


def _is_rotated(node: Node, num_devices: int) -> bool:
    """Whether a node is a gather or a scatter of parts over groups of one size in which every device is."""
    c = node.collective
    if c is None or c.kind not in _GATHERS_AND_SCATTERS or len(c.operands) != 1:
        return False
    return covers(c, num_devices) and (c.kind is Kind.ALL_GATHER or is_summed(node, c))


def covers(c: Collective, num_devices: int) -> bool:
    """Whether every device is in a group, and the groups are of one size, larger than one."""
    counts = {len(group) for group in c.groups}
    return len(counts) == 1 and counts != {1} and sum(map(len, c.groups)) == num_devices


def is_summed(node: Node, c: Collective) -> bool:
    type = ELEMENT_TYPES[c.operands[0].dtype]
    summed = c.reduction is Reduction.SUM and node.reducer is None
    return summed and c.operands[0].dtype != "pred" and type.bits >= 8


def is_ragged(node: Node) -> bool:
    return node.collective is not None and node.collective.kind is Kind.RAGGED_ALL_TO_ALL


def is_clipped(c: Collective) -> bool:
    """Whether the offsets and sizes of a ragged all-to-all can be clipped: by differences of one type."""
    numbers = set(c.operands[2:])
    return len(numbers) == 1 and all(t.dtype in ("s32", "s64") and t.size for t in numbers)


def _is_even(node: Node, kinds: frozenset[Kind], num_devices: int) -> bool:
    """Whether a node is a collective, of these kinds, that works on each part of its operand by itself."""
    c = node.collective
    if c is None or c.kind not in kinds:
        return False
    if c.operands[0].shape == () or not c.operands[0].size:
        return False
    if c.kind is Kind.RAGGED_ALL_TO_ALL:
        return is_clipped(c) and covers(c, num_devices) and c.results[0].size > 0
    if len(c.operands) != 1:
        return False
    if c.kind in _GATHERS_AND_SCATTERS and not covers(c, num_devices):
        return False
    if c.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER):
        return node.reducer is None and c.reduction is not None
    return not c.tuple_form


def _even_cuts(node: Node) -> Iterator[tuple[Cut, int | None]]:
    """The ways to cut the result of a collective of an even region, or the operand with this position."""
    c = node.collective
    assert c is not None
    for dimension in range(len(result_shape(node))):
        if dimension != c.dimension:
            yield Cut(dimension), None
        elif c.kind is Kind.ALL_TO_ALL:
            # Rows for each member, where these are one dimension.
            yield Cut(dimension, len(c.groups[0])), None
    if c.kind is Kind.RAGGED_ALL_TO_ALL:
        yield Cut(0), 0


def _ragged(cut: Cut, position: int | None) -> Split | None:
    """How a ragged all-to-all is split whose result, or operand with this position, is cut so: along its rows
    those that land in a part, or are sent from it; else all rows are in each part."""
    numbers = (None,) * 4
    if cut.dimension:
        return Split((cut, cut, *numbers), (cut,))
    if cut.outer > 1:
        return None
    return (
        Split((cut, None, *numbers), (None,))
        if position == 0
        else Split((None, cut, *numbers), (cut,))
    )


def _shape_at(node: Node, position: int | None) -> tuple[int, ...]:
    """The shape of an operand, or of the result."""
    return result_shape(node) if position is None else operand_shape(node, position)


def is_free(editor: Editor, node: Node) -> bool:
    """Whether data alone puts a node in its place, and not the program that starts it itself."""
    if node.is_started:
        return False
    if node.order or node in editor.ordered or node in editor.block.unread:
        return False
    return not any(v.order or v.type is None for v in node.operands)


class Growth:
    """The growth of a region. ``taken``: nodes of other regions; ``parts``: what is cut must have so many
    equal parts at least. ``up`` and ``down``: values from which it has yet to go on, those of ``up`` with how
    they are to be cut."""

    def __init__(self, editor: Editor, region: Region, taken: set[Node], parts: int) -> None:
        self.editor, self.region, self.taken, self.parts = editor, region, taken, parts
        self.up: list[tuple[Value, Cut]] = []
        self.down: list[Value] = []

    def grow(self) -> None:
        while self.up or self.down:
            if self.up:
                self.reach_up(*self.up.pop())
            else:
                self.reach_down(self.down.pop())

    def reach_up(self, value: Value, cut: Cut) -> None:
        """Take in what makes a value, if it can be cut so."""
        raise NotImplementedError

    def reach_down(self, value: Value) -> None:
        """Take in the readers of a value that can take it as it is cut."""
        raise NotImplementedError

    def assign(self, node: Node, split: Split) -> None:
        """Take a node in, if it can be."""
        if node in self.taken or not is_free(self.editor, node):
            return
        if not can_be(node, split, self.parts):
            return
        self.region.cuts[node] = split
        for result, cut in zip(node.results, split.results, strict=True):
            if cut is not None:
                self.region.dimensions[result] = cut
                self.down.append(result)
        for operand, own in zip(node.operands, split.operands, strict=True):
            if own is not None:
                self.up.append((operand, own))


class _InParts(Growth):
    """The growth of one region in parts. ``groups``: empty for an even one, which has collectives of these
    ``kinds``."""

    def __init__(
        self,
        editor: Editor,
        groups: Groups,
        taken: set[Node],
        kinds: frozenset[Kind] = frozenset(),
        num_devices: int = 0,
    ) -> None:
        region = Region(groups)
        super().__init__(editor, region, taken, region.size if groups else 2)
        self.kinds, self.num_devices = kinds, num_devices

    def rotated(self, seed: Node) -> list[Region]:
        """Grown from a gather or a scatter; those above scatters come first, so that dimensions which lead
        to one go before others."""
        if seed.collective is not None and seed.collective.kind is Kind.ALL_GATHER:
            self._source(seed)
            self.grow()
        else:
            self._sink(seed)
            self.up.append((seed.operands[0], _along(seed)))
            self.grow()
        return self._selected()

    def even(self, seed: Node, cut: Cut, position: int | None) -> list[Region]:
        """Grown from a collective whose result is cut so, or its operand with this position."""
        split = self._even_cut(seed, cut, position)
        if split is None:
            return []
        rows = _shape_at(seed, position)[cut.dimension] // cut.outer
        self.parts = next((n for n in _FACTORS if rows % n == 0), _FACTORS[0])
        self.assign(seed, split)
        self.grow()
        return self._selected()

    def _source(self, node: Node) -> None:
        if node not in self.region.sources:
            self.region.sources.append(node)
            self.region.dimensions[node.results[0]] = _along(node)
            self.down.append(node.results[0])

    def _sink(self, node: Node) -> None:
        if node not in self.region.sinks:
            self.region.sinks.append(node)

    def _fits(self, node: Node) -> bool:
        """Whether a gather or scatter is one of this region's."""
        c = node.collective
        assert c is not None
        rotates = c.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) and len(c.operands) == 1
        if not rotates or c.groups != self.region.groups or node in self.taken:
            return False
        return is_free(self.editor, node) and (c.kind is Kind.ALL_GATHER or is_summed(node, c))

    def _even_cut(self, node: Node, cut: Cut, position: int | None) -> Split | None:
        c = node.collective
        if c is None or node in self.taken or not _is_even(node, self.kinds, self.num_devices):
            return None
        if not is_free(self.editor, node) or _shape_at(node, position)[cut.dimension] < 2:
            return None
        if c.kind is Kind.RAGGED_ALL_TO_ALL:
            return _ragged(cut, position)
        # A part of an exchange has rows for each member of the group.
        rows = c.kind is Kind.ALL_TO_ALL and cut.outer % len(c.groups[0]) == 0
        if cut.dimension == c.dimension and not rows:
            return None
        return Split((cut,), (cut,))

    def reach_up(self, value: Value, cut: Cut) -> None:
        node, root = value.root.node, value.root
        if (
            value.barrier is not None
            or value.order
            or node is None
            or root in self.region.dimensions
        ):
            return
        if node in self.region.cuts or node.kind not in (NodeKind.COMPUTE, NodeKind.COLLECTIVE):
            return
        if node.kind is NodeKind.COLLECTIVE:
            if self._fits(node) and node.collective is not None:
                if node.collective.kind is Kind.ALL_GATHER and _along(node) == cut:
                    self._source(node)
                return
            found = self._even_cut(node, cut, None)
        else:
            found = backward(node, root.index, cut, self.parts)
        if found is not None:
            self.assign(node, found)

    def reach_down(self, value: Value) -> None:
        cut = self.region.dimensions[value]
        for use in self.editor.uses(value):
            node = use.node
            if node is None or use.value.barrier is not None or use.value.order:
                continue
            if node in self.region.cuts:
                continue
            if node.kind is NodeKind.COLLECTIVE:
                if self._fits(node) and node.collective is not None:
                    if node.collective.kind is Kind.REDUCE_SCATTER and _along(node) == cut:
                        self._sink(node)
                    continue
                found = self._even_cut(node, cut, use.position)
            else:
                found = forward(node, use.position, cut, self.parts)
            if found is not None:
                self.assign(node, found)

    # What stays of it.

    def _selected(self) -> list[Region]:
        """The regions of the nodes that stay: two of them have no node and no collective in common."""
        region = self.region
        nodes = sorted(region.cuts, key=lambda node: node.position)
        ends = {*region.sources, *region.sinks}
        ends.update(node for node in nodes if node.kind is NodeKind.COLLECTIVE)
        above = {node: list(self._made_by(node)) for node in nodes}
        for sink in region.sinks:
            above[sink] = [n for n in (sink.operands[0].root.node,) if n in region.cuts]
        below: dict[Node, list[Node]] = {node: [] for node in (*nodes, *region.sources)}
        for node, makers in above.items():
            for maker in makers:
                below[maker].append(node)
        from_above = _reached(nodes, above, ends, past_heavy=True)
        from_below = _reached(nodes[::-1], below, ends, past_heavy=True)
        kept = from_above & from_below
        near_above = _reached(nodes, above, ends, past_heavy=False)
        near_below = _reached(nodes[::-1], below, ends, past_heavy=False)
        for near, order, towards in (
            (near_above, nodes[::-1], below),
            (near_below, nodes, above),
        ):
            leads: set[Node] = set()
            for node in order:
                if node in near and (
                    is_heavy(node) or any(n in leads for n in towards[node] if n not in ends)
                ):
                    leads.add(node)
            kept |= leads
        found = []
        for joined in connected([*nodes, *region.sources, *region.sinks], kept | ends, above):
            own = joined & kept
            if any(is_heavy(node) for node in own):
                self._absorb(nodes, own, ends)
                found.append(self._only(own, above, below))
        return [r for r in found if r is not None]

    def _made_by(self, node: Node) -> Iterator[Node]:
        """The nodes of the region that make the operands of one, cut as it reads them."""
        region = self.region
        cut = region.cuts[node]
        for operand, own in zip(node.operands, cut.operands, strict=True):
            if own is not None and self._is_read_in_parts(operand, own):
                assert operand.root.node is not None
                yield operand.root.node

    def _is_read_in_parts(self, value: Value, cut: Cut | None) -> bool:
        plain = value.barrier is None and not value.order
        return plain and cut is not None and self.region.dimensions.get(value.root) == cut

    def _absorb(self, nodes: list[Node], kept: set[Node], ends: set[Node]) -> None:
        """Add what only nodes of the region read, part by part."""
        for node in reversed(nodes):
            if node in kept or node in ends or is_heavy(node):
                continue
            uses = [use for result in node.results for use in self.editor.uses(result)]
            if uses and all(
                use.node in kept
                and use.node in self.region.cuts
                and self._is_read_in_parts(
                    use.value, self.region.cuts[use.node].operands[use.position]
                )
                for use in uses
            ):
                kept.add(node)

    def _only(
        self, kept: set[Node], above: dict[Node, list[Node]], below: dict[Node, list[Node]]
    ) -> Region | None:
        """The region with these nodes, and the collectives that are next to one."""
        old = self.region
        near = lambda node, others: any(n in kept for n in others.get(node, ()))  # noqa: E731
        ends = {n for n in old.cuts if n.kind is NodeKind.COLLECTIVE}
        chosen = (kept - ends) | {n for n in ends if near(n, above) or near(n, below)}
        region = Region(
            old.groups,
            {node: split for node, split in old.cuts.items() if node in chosen},
            sorted((n for n in old.sources if near(n, below)), key=lambda n: n.position),
            sorted((n for n in old.sinks if near(n, above)), key=lambda n: n.position),
        )
        made = {*region.cuts, *region.sources}
        region.dimensions = {v: d for v, d in old.dimensions.items() if v.node in made}
        return region if region.collectives else None


def connected(
    order: list[Node], among: set[Node], above: dict[Node, list[Node]]
) -> list[set[Node]]:
    """The parts of ``among`` between which no data flows, as ``above`` has it, by their first nodes."""
    part: dict[Node, set[Node]] = {node: {node} for node in order if node in among}
    for node, makers in above.items():
        for maker in makers:
            if node in part and maker in part and part[node] is not part[maker]:
                less, more = sorted((part[node], part[maker]), key=len)
                more |= less
                part.update(dict.fromkeys(less, more))
    return list({id(nodes): nodes for nodes in part.values()}.values())


def _reached(
    order: list[Node], next_to: dict[Node, list[Node]], ends: set[Node], past_heavy: bool
) -> set[Node]:
    """The nodes that can be reached from collectives; ``past_heavy``: also through products."""
    found: set[Node] = set()
    for node in order:
        for other in next_to[node]:
            through = other in found and other not in ends and (past_heavy or not is_heavy(other))
            if other in ends or through:
                found.add(node)
                break
    return found
