"""Puts compute that nobody reads on some devices, in some iterations, into segments that are skipped there.

`passes.valid` finds the *places* (devices and iterations) in which nobody reads a compute node's results
(`Unread`). Between two rounds of collectives, `divide` separates expensive nodes that are unread in the same
places from the others. `carve` makes a segment of each part, and the executor skips it where it is unread.

A part is a pair (stage, class). Nodes of class 0 always run; nodes of class k are unread in all places of the
k-th pattern. Parts run by stage, then by class. A node is in the first stage in which everything that it
reads comes before it, so parts are in topological order.

Invariants: a node with a side effect, or with a known result (`passes.valid`), is in class 0. Every part
saves enough to be worth its dispatch (`least_flops`). The parts follow from the text of the module.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..iterations import Bounds, Unread
from ..values import BlockGraph, Node, NodeKind
from .valid.liveness import Liveness, Reads

MOST_CLASSES = 8


# How many runtime nodes are on the longest path above each node (see `order`).
Levels = dict[Node, int]
Part = tuple[int, int]  # stage and class
Parts = dict[Node, Part]
Valid = dict[Node, tuple[Bounds, ...]]


class Ordered(list[Node]):
    """The nodes of a block in an order, and the parts of its compute.

    ``parts``: the part of each node that is not in part (0, 0) of its level. ``valid``: for each node that
    some devices skip, the iterations in which each device runs it, as in `Run.valid`.
    """

    def __init__(self, nodes: Iterable[Node], parts: Parts, valid: Valid) -> None:
        super().__init__(nodes)
        self.parts = parts
        self.valid = valid


def mark(liveness: Liveness) -> None:
    """Set ``unread`` of all blocks: the compute nodes whose results nobody reads in some places."""
    for block, reads in liveness.reads.items():
        _mark_block(block, reads, liveness.forward.num_devices)


def _mark_block(block: BlockGraph, reads: Reads, devices: int) -> None:
    if not any(reads.flops.values()):
        return
    met = {iteration for rows in reads.rows.values() for iteration in rows}
    everywhere = None in met
    iterations = 1 if everywhere else 1 + max((i for i in met if i is not None), default=0)
    for node in block.nodes:
        rows = reads.rows.get(node)
        if node.kind is not NodeKind.COMPUTE or rows is None or node.has_side_effect:
            continue
        read = np.zeros((devices, iterations), bool)
        for iteration, where in rows.items():
            read[:, 0 if iteration is None or everywhere else iteration] |= where
        if not read.all():
            packed = np.packbits(~read.reshape(-1), bitorder="little").tobytes()
            cells = int.from_bytes(packed, "little")
            flops = reads.flops.get(node, 0.0)
            block.unread[node] = Unread(cells, devices, iterations, flops, everywhere)


def divide(block: BlockGraph, levels: Levels, least_flops: float) -> tuple[Parts, Valid]:
    """The parts of a block's nodes, and the iterations in which those parts are run: see `Ordered`."""
    unread = {node: block.unread[node] for node in block.nodes if node in block.unread}
    classes = _classes(unread.values(), least_flops)
    chosen: dict[Node, int] = {}
    for node, where in unread.items():
        fitting = [
            (-cells.bit_count(), k)
            for k, cells in enumerate(classes, 1)
            if cells & ~where.cells == 0
        ]
        if fitting:
            chosen[node] = min(fitting)[1]
    while chosen:
        parts = _place(block.nodes, levels, chosen)
        poor = _poor(levels, parts, chosen, unread, classes, least_flops)
        if not poor:
            return parts, {node: unread[node].bounds(classes[k - 1]) for node, k in chosen.items()}
        for node in poor:
            del chosen[node]
    return {}, {}


def _classes(unread: Iterable[Unread], least_flops: float) -> list[int]:
    """The patterns of places that save enough, the one that saves most first."""
    saved: dict[int, float] = {}
    for u in unread:
        if u.flops:
            saved[u.cells] = saved.get(u.cells, 0.0) + u.flops / (u.devices * u.iterations)
    patterns = sorted(saved, key=lambda cells: (-saved[cells], cells))
    return [cells for cells in patterns if saved[cells] >= least_flops][:MOST_CLASSES]


def _place(nodes: Sequence[Node], levels: Levels, chosen: dict[Node, int]) -> Parts:
    parts: Parts = {}
    for node in nodes:
        stage, own = 0, chosen.get(node, 0)
        for before, _ in node.before():
            if levels[before] == levels[node] and not before.is_runtime:
                first, k = parts.get(before, (0, 0))
                stage = max(stage, first + (k > own))
        if stage or own:
            parts[node] = (stage, own)
    return parts


def _poor(
    levels: Levels,
    parts: Parts,
    chosen: dict[Node, int],
    unread: dict[Node, Unread],
    classes: list[int],
    least_flops: float,
) -> list[Node]:
    """The nodes of parts that save too little."""
    groups: dict[tuple[int, Part], list[Node]] = {}
    for node in chosen:
        groups.setdefault((levels[node], parts[node]), []).append(node)
    poor: list[Node] = []
    for (_, (_, k)), group in groups.items():
        saved = 0.0
        for node in group:
            u = unread[node]
            share = classes[k - 1].bit_count() / u.cells.bit_count()
            saved += u.flops * share / (u.devices * u.iterations)
        if saved < least_flops:
            poor += group
    return poor
