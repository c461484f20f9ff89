"""Finds all-reduces that can become reduce-scatters, and what follows from them that each device can compute
for its own rows alone, before the rows are gathered.

An all-reduce gives all devices of a group the same rows. A reduce-scatter gives each its *share*, an
all-gather makes them whole again: together they send as much, and what lies between is computed once instead
of on every device. That is what sequence parallelism is written for by hand (Korthikanti et al., 2022,
arXiv:2205.05198): behind a row-parallel product, what adds the residual and norms its rows needs no others.
It is done with the parts of all-reduces as well: a part is scattered while the product's next rows run, and
gathered for what follows row by row.

From all-reduces along data, through every cheap node for which there is a rule (`rules`) and whose operands
are the same on all devices of a group (`bytes.copies`), grows what can be computed by shares. Which of it is,
the least cut decides (`least_cut`): all that another node reads whole must be gathered, a byte on the wire
counts as much as 32 that are computed, and gathers should be few. So a gather stands where least is sent, and
of the places where that is so, as far down as it can.

Invariant: what is found follows from the program's text alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from stretto.collectives.ops import Kind

from ...edit import Editor
from ...values import BlockGraph, Node, Value, result_shape
from ..bytes.copies import Copies
from .least_cut import INFINITE, Network
from .regions import Groups, Growth, Region, connected, covers, is_free, is_summed
from .rules import Cut, Split, backward, divides, forward, is_heavy

# Smaller all-reduces stay: they are latency.
_LEAST_BYTES = 1 << 15
# What a byte that is gathered counts, where one that is computed counts 1, and what each gather counts.
_WIRE, _GATHER = 32, 1 << 21
# More nodes are not looked at.
_MOST = 20000


def shares_of(block: BlockGraph, num_devices: int, copies: Copies) -> list[Region]:
    """What of a block can be computed by shares, as regions: ``sources`` are all-reduces, ``cuts`` the nodes
    of which each device computes its own rows. No two share a node."""
    if block.unread or block.phases or block.crossing or len(block.nodes) > _MOST:
        return []
    editor = Editor(block)
    taken: set[Node] = set()
    found: list[Region] = []
    for node in block.nodes:
        if node in taken or not _is_seed(node, num_devices) or not is_free(editor, node):
            continue
        assert node.collective is not None
        groups = node.collective.groups
        grown = [
            _Shares(editor, groups, copies, taken, num_devices).grown(node, d)
            for d in range(len(result_shape(node)))
        ]
        best = max(grown, key=lambda r: (len(r.sources), _nbytes(r)))
        if best.sources:
            taken.update(best.sources)
            kept = _cheapest(best, editor)
            found += _components(kept)
            taken.update(kept.cuts)
    return sorted(found, key=lambda region: region.collectives[0].position)


def _is_seed(node: Node, num_devices: int) -> bool:
    """Whether a node is an all-reduce of one array over groups of one size in which every device is."""
    c = node.collective
    if c is None or c.kind is not Kind.ALL_REDUCE or len(c.operands) != 1:
        return False
    return covers(c, num_devices) and c.operands[0].nbytes >= _LEAST_BYTES and is_summed(node, c)


def _nbytes(region: Region) -> int:
    return sum(v.type.nbytes for node in region.cuts for v in node.results if v.type is not None)


class _Shares(Growth):
    """All that can be computed by shares, from one all-reduce."""

    def __init__(
        self, editor: Editor, groups: Groups, copies: Copies, taken: set[Node], num_devices: int
    ) -> None:
        region = Region(groups)
        super().__init__(editor, region, taken, region.size)
        self.copies, self.num_devices = copies, num_devices

    def grown(self, seed: Node, dimension: int) -> Region:
        self._sum(seed, Cut(dimension))
        self.grow()
        return self.region

    def _sum(self, node: Node, cut: Cut) -> None:
        type = node.results[0].type
        if type is None or not divides(type, cut, self.parts) or not type.size:
            return
        self.region.sources.append(node)
        self.region.dimensions[node.results[0]] = cut
        self.down.append(node.results[0])

    def reach_up(self, value: Value, cut: Cut) -> None:
        node, root = value.root.node, value.root
        plain = value.barrier is None and not value.order
        if not plain or node is None or root in self.region.dimensions:
            return
        if node.collective is not None:
            if (
                node not in self.taken
                and _is_seed(node, self.num_devices)
                and node.collective.groups == self.region.groups
                and is_free(self.editor, node)
            ):
                self._sum(node, cut)
            return
        if not is_heavy(node):
            self._assign(node, backward(node, root.index, cut, self.parts))

    def reach_down(self, value: Value) -> None:
        cut = self.region.dimensions[value]
        for use in self.editor.uses(value):
            node = use.node
            plain = use.value.barrier is None and not use.value.order
            if plain and node is not None and not is_heavy(node) and node.collective is None:
                self._assign(node, forward(node, use.position, cut, self.parts))

    def _assign(self, node: Node, split: Split | None) -> None:
        """Take a node in whose operands are the same on all devices of a group."""
        if split is None or node in self.region.cuts:
            return
        if all(self.copies.alike(value, self.region.groups) for value in node.operands):
            self.assign(node, split)


def _cheapest(region: Region, editor: Editor) -> Region:
    """The region with those of its nodes that are to be computed by shares."""
    network = Network()
    vertices = {node: network.vertex() for node in (*region.sources, *region.cuts)}
    for node, vertex in vertices.items():
        computed = sum(v.type.nbytes for v in node.results if v.type is not None)
        network.edge(0, vertex, INFINITE if node in region.sources else computed)
        for value in node.results:
            if value not in region.dimensions:
                continue
            assert value.type is not None
            whole = network.vertex()
            network.edge(vertex, whole, _GATHER + _WIRE * value.type.nbytes)
            for use in editor.uses(value):
                reads = use.node in region.cuts and (
                    region.cuts[use.node].operands[use.position] == region.dimensions[value]
                    and use.value.barrier is None
                    and not use.value.order
                )
                network.edge(whole, vertices[use.node] if reads and use.node else 1, INFINITE)
    side = network.sources_side()
    cuts = {node: split for node, split in region.cuts.items() if vertices[node] in side}
    return _with(region, region.sources, cuts)


def _with(region: Region, sources: list[Node], cuts: dict[Node, Split]) -> Region:
    """The region with these of its nodes."""
    kept = {*sources, *cuts}
    dimensions = {v: cut for v, cut in region.dimensions.items() if v.node in kept}
    ordered = sorted(sources, key=lambda node: node.position)
    return Region(region.groups, cuts, ordered, dimensions=dimensions)


def _components(region: Region) -> Iterator[Region]:
    """Regions between which no data flows; what comes from no all-reduce is left out, and all-reduces from
    which nothing comes: a reduce-scatter with its all-gather right behind it is an all-reduce."""
    nodes = sorted([*region.sources, *region.cuts], key=lambda node: node.position)
    above = {
        node: [
            v.root.node
            for v in node.operands
            if v.root.node is not None and v.root in region.dimensions
        ]
        for node in region.cuts
    }
    for joined in connected(nodes, set(nodes), above):
        sources = [node for node in region.sources if node in joined]
        if sources and joined.intersection(region.cuts):
            cuts = {node: split for node, split in region.cuts.items() if node in joined}
            yield _with(region, sources, cuts)
