"""The default order of a block: by collective depth, and with little memory.

The level of a node is the number of runtime nodes (collectives, loops, branches) on the longest path above
it. Each level has its compute first, then its runtime nodes, both by position. So the compute between two
rounds of collectives becomes one segment, or a few if some devices skip part of it (`unread`). The phases of
a pipelined body come one after the other (`rotate`).

Nodes that depend on one parameter alone (a weight that is gathered, widened, transposed), or on none (masks),
then move to the level at which they are first needed. Their results would otherwise take memory long before
their use, while the parameter exists anyway. All other nodes stay early, since they end the lives of
activations and gradients.

Invariant: the order follows from data and control dependencies and positions alone, so every process
that compiles the same module has the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..values import BlockGraph, Node, NodeKind, Value
from .unread import Levels, Ordered, divide
from .valid.decide import LEAST_FLOPS


def order(block: BlockGraph, least_flops: float = LEAST_FLOPS) -> Ordered:
    """The block's nodes in the order in which they run, and the parts of its compute. Changes nothing.

    ``least_flops``: see `unread`.
    """
    runtime = {node for node in block.nodes if node.is_runtime}
    gaps = _gaps(block.nodes, runtime)
    levels = _earliest(gaps)
    _put_off(gaps, levels, _floating(block.nodes))
    parts, valid = divide(block, levels, least_flops)
    phases = block.phases
    keys = [
        (phases.get(node, 0), levels[node], node in runtime, parts.get(node, (0, 0)), node.position)
        for node in block.nodes
    ]
    nodes = [block.nodes[i] for i in sorted(range(len(keys)), key=keys.__getitem__)]
    return Ordered(nodes, parts, valid)


# Nodes in topological order, each with those right before it and how many levels it must be below them.
_Gaps = list[tuple[Node, list[tuple[Node, int]]]]


def _gaps(nodes: Sequence[Node], runtime: set[Node]) -> _Gaps:
    """Runtime nodes with order alone between them may share a level, in which they start by position."""
    found: _Gaps = []
    for node in nodes:
        waits = node not in runtime  # for what it only comes after, too
        gaps = [
            (
                before,
                int(
                    before in runtime and (waits or (value is not None and value.type is not None))
                ),
            )
            for before, value in node.before()
        ]
        found.append((node, gaps))
    return found


def _earliest(gaps: _Gaps) -> Levels:
    levels: Levels = {}
    for node, above in gaps:
        level = 0
        for before, gap in above:
            least = levels[before] + gap
            level = max(level, least)
        levels[node] = level
    return levels


def _put_off(gaps: _Gaps, levels: Levels, floating: set[Node]) -> None:
    latest: dict[Node, int] = {}
    for node, above in reversed(gaps):
        level = levels[node]
        if node in floating:
            level = levels[node] = max(level, latest.get(node, level))
        for before, gap in above:
            most = level - gap
            if latest.get(before, most) >= most:
                latest[before] = most


# Parameters up to this size (loop counters, offsets) do not count.
_SMALL_BYTES = 1024


def _floating(nodes: Sequence[Node]) -> set[Node]:
    """Nodes without side effects that come from at most one parameter of the block."""
    origin: dict[Node, Value | None] = {}  # the nodes found, with their parameter, if any
    for node in nodes:
        if node.kind is NodeKind.LOGICAL_ID:
            origin[node] = None
            continue
        if node.kind not in (NodeKind.COMPUTE, NodeKind.COLLECTIVE):
            continue
        if node.kind is NodeKind.COMPUTE and node.has_side_effect:
            continue
        parameters: set[Value] = set()
        for value in node.operands:
            root = value.root
            if root.node is None:
                if root.type is not None and root.type.nbytes > _SMALL_BYTES:
                    parameters.add(root)
            elif root.node.kind is not NodeKind.CHEAP:
                if root.node not in origin:
                    break
                found = origin[root.node]
                if found is not None:
                    parameters.add(found)
        else:
            if len(parameters) <= 1:
                origin[node] = next(iter(parameters), None)
    return set(origin)
