"""Predicted times of loops and branches, and which carries a loop's body computes anew."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from ..trips import expected_shares, trip_count
from ..values import BlockGraph, Node, NodeKind


def control_flow_seconds(node: Node, seconds: Sequence[float]) -> float:
    """The time of a loop or branch. ``seconds``: those of its blocks. A loop of known length evaluates no
    condition; a loop of unknown length counts as one iteration; of branches each counts as often as it is
    taken, or the longest one where nobody knows."""
    if node.kind is not NodeKind.LOOP:
        return sum(map(mul, expected_shares(node.instruction, seconds), seconds))
    condition, body = seconds
    trips = trip_count(node)
    return condition + body if trips is None else body * trips


def carries_of(body: BlockGraph) -> tuple[int, ...]:
    """Positions of the carries that change: their memory is the body's own, to free or to update in place."""
    pairs = zip(body.parameters, body.results, strict=True)
    return tuple(k for k, (parameter, result) in enumerate(pairs) if result.root is not parameter)


def blocks_of(node: Node) -> tuple[tuple[BlockGraph, tuple[int, ...]], ...]:
    """The blocks of a loop or branch, each with the positions of the parameters whose memory it may free."""
    loop = node.kind is NodeKind.LOOP
    return tuple(
        (block, carries_of(block) if loop and number else ())
        for number, block in enumerate(node.blocks)
    )
