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
    levels = _earliest(block.nodes)
    _put_off(block.nodes, levels)
    parts, valid = divide(block, levels, least_flops)
    nodes = sorted(
        block.nodes,
        key=lambda node: (
            block.phases.get(node, 0),
            levels[node],
            node.is_runtime,
            parts.get(node, (0, 0)),
            node.position,
        ),
    )
    return Ordered(nodes, parts, valid)


def _gap(before: Node, after: Node, value: Value | None) -> int:
    """How many levels ``after`` must be below ``before``. ``value``: the operand that ``before`` gives it.

    Runtime nodes with order alone between them may share a level, in which they start by position.
    """
    reads = value is not None and value.type is not None
    return int(before.is_runtime and (reads or not after.is_runtime))


def _earliest(nodes: Sequence[Node]) -> Levels:
    levels: Levels = {}
    for node in nodes:
        level = 0
        for before, value in node.before():
            level = max(level, levels[before] + _gap(before, node, value))
        levels[node] = level
    return levels


def _put_off(nodes: Sequence[Node], levels: Levels) -> None:
    floating = _floating(nodes)
    latest: dict[Node, int] = {}

    def bound(first: Node, level: int) -> None:
        latest[first] = min(latest.get(first, level), level)

    for node in reversed(nodes):
        if node in floating:
            levels[node] = max(levels[node], latest.get(node, levels[node]))
        for before, value in node.before():
            bound(before, levels[node] - _gap(before, node, value))


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
