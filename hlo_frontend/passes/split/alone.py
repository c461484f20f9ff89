"""A region as a block of its own, for looking at it without the program around it."""

from __future__ import annotations

from ...values import BlockGraph, Node, NodeKind, Value, number
from .regions import Region


def alone(region: Region, block: BlockGraph) -> tuple[BlockGraph, Region]:
    """Copies of the nodes of a region, in a block whose parameters are what they read and whose results are
    what others read of them; and the region of that block."""
    inside = sorted([*region.sources, *region.cuts, *region.sinks], key=lambda n: n.position)
    copies: dict[Node, Node] = {}
    values: dict[Value, Value] = {}
    parameters: list[Value] = []

    def of(value: Value) -> Value:
        root = value.root
        if root.node is not None and root.node.kind is NodeKind.CHEAP:
            return root
        if root not in values:
            values[root] = Value(root.type)
            parameters.append(values[root])
        return values[root]

    for node in inside:
        copy = Node(
            node.kind,
            node.instruction,
            -1,
            [of(value) for value in node.operands],
            collective=node.collective,
            reducer=node.reducer,
        )
        copy.results = [Value(v.type, copy, i) for i, v in enumerate(node.results)]
        values |= zip(node.results, copy.results, strict=True)
        copies[node] = copy
    others = set(block.nodes).difference(inside)
    read = {v.root for node in others for v in node.operands} | {v.root for v in block.results}
    # A cut array that the region reads behind a barrier is whole in the program, and a parameter here.
    results = [values[v] for node in inside for v in node.results if v in read]
    nodes = [copies[node] for node in inside]
    number(nodes)
    made = Region(
        region.groups,
        {copies[node]: cut for node, cut in region.cuts.items()},
        [copies[node] for node in region.sources],
        [copies[node] for node in region.sinks],
        {values[v]: d for v, d in region.dimensions.items()},
    )
    return BlockGraph(parameters, nodes, results), made
