"""The default order of a block: by collective depth, with memory in mind.

The level of a node is the number of runtime nodes (collectives, loops, branches) on the longest path
above it. Each level has its compute first, then its runtime nodes, each by position: compute between
two rounds of collectives becomes one segment.

A node that makes more bytes than it frees (a gathered weight, a widened one) is then put off to the
level where it is first needed, so that values do not pile up long before their use.

Invariant: the order follows from data and control dependencies and positions alone, so every process
that compiles the same module has the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..values import BlockGraph, Node, NodeKind, Value


def order(block: BlockGraph) -> list[Node]:
    """The block's nodes in the order in which they are to run."""
    _earliest(block.nodes)
    _put_off(block.nodes)
    return sorted(block.nodes, key=lambda node: (node.level, node.is_runtime, node.position))


def _gap(before: Node, after: Node, *, reads: bool) -> int:
    """How many levels ``after`` must be below ``before``.

    Runtime nodes that are only ordered share a level: they are started in order of position.
    """
    return int(before.is_runtime and (reads or not after.is_runtime))


def _earliest(nodes: Sequence[Node]) -> None:
    for node in nodes:
        level = 0
        for value in node.operands:
            first = value.node
            if first is not None and first.kind is not NodeKind.CHEAP:
                reads = value.type is not None
                level = max(level, first.level + _gap(first, node, reads=reads))
            for before in value.order:
                level = max(level, before.level + _gap(before, node, reads=False))
        for before in node.order:
            level = max(level, before.level + _gap(before, node, reads=False))
        node.level = level


def _put_off(nodes: Sequence[Node]) -> None:
    latest: dict[Node, int] = {}
    uses: dict[Value, int] = {}
    for node in nodes:
        for value in node.operands:
            uses[value.root] = uses.get(value.root, 0) + 1
    for node in reversed(nodes):
        limit = latest.get(node)
        if limit is not None and limit > node.level and _may_wait(node, uses):
            node.level = limit
        for value in node.operands:
            first = value.node
            if first is not None and first.kind is not NodeKind.CHEAP:
                reads = value.type is not None
                bound = node.level - _gap(first, node, reads=reads)
                latest[first] = min(latest.get(first, bound), bound)
            for before in value.order:
                bound = node.level - _gap(before, node, reads=False)
                latest[before] = min(latest.get(before, bound), bound)
        for before in node.order:
            bound = node.level - _gap(before, node, reads=False)
            latest[before] = min(latest.get(before, bound), bound)


def _may_wait(node: Node, uses: dict[Value, int]) -> bool:
    if node.kind not in (NodeKind.COMPUTE, NodeKind.COLLECTIVE):
        return False
    if node.kind is NodeKind.COMPUTE and node.has_side_effect:
        return False
    made = sum(value.type.nbytes for value in node.results if value.type is not None)
    freed = sum(
        value.type.nbytes
        for value in node.operands
        if value.type is not None and value.root.node is not None and uses[value.root] == 1
    )
    return made >= freed
