"""A region as a block of its own, for looking at it without the program around it.

What lies between two of its nodes comes along, an operation for each node: without it a region of a forward
and a backward pass would seem to have two halves that hide one another.
"""

from __future__ import annotations

from ...values import BlockGraph, Node, NodeKind, Value, number
from .regions import Region

# More nodes between those of a region are left out.
_MOST = 3000


def alone(region: Region, block: BlockGraph) -> tuple[BlockGraph, Region]:
    """Copies of the nodes of a region and of those between them, in a block whose parameters are what they
    read and whose results are what others read of them; and the region of that block."""
    own = {*region.sources, *region.cuts, *region.sinks}
    inside = sorted(own | _between(own, block), key=lambda n: n.position)
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


def _between(own: set[Node], block: BlockGraph) -> set[Node]:
    """The nodes that come after one of these and before another; none if there are very many of them."""
    behind: set[Node] = set()
    for node in block.nodes:
        if any(v.node in own or v.node in behind for v in node.operands):
            behind.add(node)
    ahead: set[Node] = set()
    for node in reversed(block.nodes):
        if node in own or node in ahead:
            ahead.update(v.node for v in node.operands if v.node is not None)
    found = {
        n for n in (behind & ahead) - own if not n.blocks and n.kind is not NodeKind.LOGICAL_ID
    }
    return found if len(found) <= _MOST else set()
