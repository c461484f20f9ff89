"""What loops and branches take, and which values a loop's body makes anew."""

from __future__ import annotations

from collections.abc import Sequence

from ..trips import trip_count
from ..values import BlockGraph, Node, NodeKind


def control_flow_seconds(node: Node, seconds: Sequence[float]) -> float:
    """What a loop or branch takes whose blocks take ``seconds``. A loop of known length runs no condition; of
    one of unknown length it is an iteration."""
    if node.kind is not NodeKind.LOOP:
        return max(seconds, default=0.0)
    condition, body = seconds
    trips = trip_count(node)
    return condition + body if trips is None else body * trips


def carries_of(body: BlockGraph) -> tuple[int, ...]:
    """Positions of what a body takes and gives anew: its memory is the body's own, to free or to update."""
    pairs = zip(body.parameters, body.results, strict=True)
    return tuple(k for k, (parameter, result) in enumerate(pairs) if result.root is not parameter)


def blocks_of(node: Node) -> tuple[tuple[BlockGraph, tuple[int, ...]], ...]:
    """The blocks of a loop or branch, each with the positions of those of its parameters that are its own."""
    loop = node.kind is NodeKind.LOOP
    return tuple(
        (block, carries_of(block) if loop and number else ())
        for number, block in enumerate(node.blocks)
    )
