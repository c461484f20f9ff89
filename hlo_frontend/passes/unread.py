"""Compute that nobody reads on some devices, in some iterations: into segments of its own, not run there.

`passes.valid` notes for the compute nodes of a block where they are read (`Unread`). Between two rounds of
collectives, `divide` parts the nodes that cost much and are unread in the same places from the others;
`carve` then makes a segment of each part, and the executor leaves those out where they are unread.

A part is a pair (stage, class). Nodes of class 0 always run, those of class k are unread wherever the k-th
pattern says. Parts run by stage, then by class, and a node is in the first stage in which all it reads is
there before it, so that parts are in topological order.

Invariants: a node that has an effect or is known (see `passes.valid`) is in class 0; a part is worth its
dispatch (`least_flops`); all follows from the text of the module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..values import BlockGraph, Node, NodeKind
from .valid.decide import LAST, LEAST_FLOPS, Bounds, intervals
from .valid.liveness import Liveness, Reads

MOST_CLASSES = 8


@dataclass(frozen=True)
class Unread:
    """Where nobody reads a node: bit ``device * iterations + iteration`` of ``cells``.

    ``flops``: operations in these places together. ``everywhere``: iterations are not told apart.
    """

    cells: int
    devices: int
    iterations: int
    flops: float
    everywhere: bool

    def bounds(self, cells: int) -> tuple[Bounds, ...]:
        """For each device the iterations that are not in these cells."""
        return tuple(
            self._bounds(cells >> device * self.iterations) for device in range(self.devices)
        )

    def _bounds(self, cells: int) -> Bounds:
        if self.everywhere:
            return (1, 0) if cells & 1 else (0, LAST)
        return intervals(i for i in range(self.iterations) if not cells >> i & 1)


def mark(liveness: Liveness) -> None:
    """Set ``unread`` of the compute nodes that somewhere nobody reads."""
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
            node.unread = Unread(cells, devices, iterations, flops, everywhere)


def divide(nodes: Sequence[Node], least_flops: float = LEAST_FLOPS) -> None:
    """Set ``part`` and ``valid`` of the nodes of a block, whose levels are known."""
    classes = _classes(nodes, least_flops)
    chosen: dict[Node, int] = {}
    for node in nodes:
        if node.unread is not None:
            fitting = [
                (-cells.bit_count(), k)
                for k, cells in enumerate(classes, 1)
                if cells & ~node.unread.cells == 0
            ]
            chosen[node] = min(fitting)[1] if fitting else 0
    while True:
        _place(nodes, chosen)
        poor = _poor(nodes, chosen, classes, least_flops)
        if not poor:
            break
        for node in poor:
            chosen[node] = 0
    for node in nodes:
        k = chosen.get(node, 0)
        node.valid = node.unread.bounds(classes[k - 1]) if k and node.unread is not None else ()


def _classes(nodes: Sequence[Node], least_flops: float) -> list[int]:
    """Patterns of cells, those first that save most."""
    saved: dict[int, float] = {}
    for node in nodes:
        u = node.unread
        if u is not None and u.flops:
            saved[u.cells] = saved.get(u.cells, 0.0) + u.flops / (u.devices * u.iterations)
    patterns = sorted(saved, key=lambda cells: (-saved[cells], cells))
    return [cells for cells in patterns if saved[cells] >= least_flops][:MOST_CLASSES]


def _place(nodes: Sequence[Node], chosen: dict[Node, int]) -> None:
    for node in nodes:
        stage, own = 0, chosen.get(node, 0)
        for before in _before(node):
            if before.level == node.level and not before.is_runtime:
                stage = max(stage, before.part[0] + (before.part[1] > own))
        node.part = (stage, own)


def _before(node: Node) -> Iterator[Node]:
    for value in node.operands:
        if value.root.node is not None and value.root.node.kind is not NodeKind.CHEAP:
            yield value.root.node
        yield from value.comes_after()
    yield from node.order


def _poor(
    nodes: Sequence[Node], chosen: dict[Node, int], classes: list[int], least_flops: float
) -> list[Node]:
    """The nodes of parts that save too little."""
    groups: dict[tuple[int, tuple[int, int]], list[Node]] = {}
    for node in nodes:
        if chosen.get(node):
            groups.setdefault((node.level, node.part), []).append(node)
    poor: list[Node] = []
    for (_, (_, k)), group in groups.items():
        saved = 0.0
        for node in group:
            u = node.unread
            assert u is not None
            share = classes[k - 1].bit_count() / u.cells.bit_count()
            saved += u.flops * share / (u.devices * u.iterations)
        if saved < least_flops:
            poor += group
    return poor
