"""Splits combined all-reduces. XLA combines all-reduces into one with many operands.

That saves latency, but prevents overlap: the combined all-reduce cannot start before its last operand is
computed. Operands are taken in the order in which they are computed, and gathered into one all-reduce until
its time on the wire exceeds the latency; the next operand then begins another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from stretto.collectives.ops import Collective, Kind

from ..edit import restricted
from ..values import BlockGraph, Node, Value
from .costs import CostTable


def uncombine(block: BlockGraph, costs: CostTable) -> Callable[[], None] | None:
    """Split the block's combined all-reduces, in place.

    Gives a function that undoes this, or None if there was nothing to split.
    """
    parts = {
        node: made
        for node in block.nodes
        if node.collective is not None
        and node.collective.kind is Kind.ALL_REDUCE
        and node.collective.reduction is not None
        and len(node.collective.operands) > 1
        and len(made := _parts(node, node.collective, costs)) > 1
    }
    if not parts:
        return None
    nodes = list(block.nodes)
    orders: list[tuple[Node | Value, tuple[Node, ...]]] = []

    def replace_order(of: Node | Value) -> None:
        if any(node in parts for node in of.order):
            orders.append((of, of.order))
            of.order = tuple(part for node in of.order for part in parts.get(node, [node]))

    for made in parts.values():
        for part in made:
            for index, value in enumerate(part.results):
                value.node, value.index = part, index
    block.nodes[:] = [part for node in nodes for part in parts.get(node, [node])]
    for node in block.nodes:
        replace_order(node)
        for operand in node.operands:
            replace_order(operand)
    for value in block.results:
        replace_order(value)

    def undo() -> None:
        block.nodes[:] = nodes
        for node in parts:
            for index, value in enumerate(node.results):
                value.node, value.index = node, index
        for of, order in reversed(orders):
            of.order = order

    return undo


def _parts(node: Node, collective: Collective, costs: CostTable) -> list[Node]:
    """The collectives that replace one."""
    arrays = [value for value in node.operands if value.type is not None]
    tokens = [value for value in node.operands if value.type is None]
    return [
        Node(
            node.kind,
            node.instruction,
            node.position,
            operands=[*(arrays[k] for k in chosen), *tokens],
            order=node.order,
            results=[node.results[k] for k in chosen],
            collective=restricted(collective, chosen),
        )
        for chosen in _grouped(arrays, collective, costs)
    ]


def _grouped(
    arrays: Sequence[Value], collective: Collective, costs: CostTable
) -> Iterator[list[int]]:
    """Positions of the operands of each part."""

    def computed(k: int) -> tuple[int, int]:
        producer = arrays[k].root.node
        return (-1 if producer is None else producer.position), k

    group: list[int] = []
    for k in sorted(range(len(arrays)), key=computed):
        group.append(k)
        charge = costs.collective(restricted(collective, group))
        if charge.link is None or charge.seconds > 2.0 * charge.link.latency_s:
            yield group
            group = []
    if group:
        yield group
