"""Checks that a block graph is consistent, between any two passes.

- Nodes are in topological order: the nodes that a node reads or comes after stand before it in its own block.
  Cheap nodes (constants and what is computed from them) are not in the list of nodes. A block reads values of
  the blocks around it only through its parameters.
- Positions number the nodes from 0; the parts of a split collective may share one (`overlap.uncombine`).
- Types agree along every edge: operands of instructions and of collectives, carries of loops, parameters and
  results of branches.
- Phases never decrease along data and order, and a collective that crosses into the next iteration gives
results
  of its block (`passes.rotate`).

An inconsistent graph is a mistake of the pass that made it, not of the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

from stretto.collectives.types import TensorType

from .graph import leaf_types
from .trips import trip_count
from .values import BlockGraph, Node, NodeKind, Value, carried_results

Types = Sequence[TensorType | None]


class GraphError(Exception):
    """A pass has left an inconsistent graph. Nothing catches this error: it should be reported."""


def check(block: BlockGraph) -> None:
    """Check the block and the blocks inside it. Raises `GraphError`, naming node, opcode and source line."""
    _Check(block).block()


def _fail(node: Node | None, why: str) -> NoReturn:
    raise GraphError(why if node is None else f"{node.instruction.describe()}: {why}")


class _Check:
    def __init__(self, graph: BlockGraph, owner: Node | None = None) -> None:
        self.graph = graph
        self.owner = owner  # the loop or branch that the block is of
        self.parameters = set(graph.parameters)
        self.above: set[Node] = set()
        self.cheap: set[Node] = set()

    def block(self) -> None:
        for i, parameter in enumerate(self.graph.parameters):
            if parameter.root is not parameter or parameter.node is not None:
                _fail(self.owner, f"parameter {i} of a block is what a node gives")
            if parameter.type is None:
                _fail(self.owner, f"parameter {i} of a block is a token")
        last = -1
        previous: Node | None = None
        for node in self.graph.nodes:
            if node in self.above:
                _fail(node, "stands twice in its block")
            shared = previous is not None and previous.instruction is node.instruction
            if node.position != last + 1 and not (shared and node.position == last):
                _fail(node, f"has position {node.position} behind {last}")
            last, previous = node.position, node
            self.node(node)
            self.above.add(node)
        for i, result in enumerate(self.graph.results):
            self.read(result, self.owner, f"result {i} of the block")
            if result.type is None:
                _fail(self.owner, f"result {i} of the block is a token")

    def node(self, node: Node) -> None:
        for i, operand in enumerate(node.operands):
            self.read(operand, node, f"operand {i}")
        for before in node.order:
            self.comes_after(before, node, "it comes after")
        if node.selector is not None:
            self.read(node.selector, node, "its selector")
        for i, result in enumerate(node.results):
            if result.root is not result or result.node is not node or result.index != i:
                _fail(node, f"result {i} is not the node's own")
        for inner in node.blocks:
            _Check(inner, node).block()
        _check_types(node)
        if node in self.graph.crossing and not carried_results(node, self.graph.results):
            _fail(node, "is awaited in the next iteration, but no result of the block is its own")

    def read(self, value: Value, node: Node | None, what: str) -> None:
        """Check a value that ``node`` reads, or that is a result of the block if ``node`` is None."""
        root = value.root
        if root.root is not root:
            _fail(node, f"{what} is a view of a view")
        if value.type != root.type:
            _fail(node, f"{what} is read as {value.type}, it is {root.type}")
        producer = root.node
        if producer is None:
            if root.type is not None and root not in self.parameters:
                _fail(
                    node, f"{what}, {root.type}, is no parameter of the block, and no node gives it"
                )
        elif producer.kind is NodeKind.CHEAP:
            self.cheap_node(producer, node, what)
        else:
            self.comes_after(producer, node, f"{what} is of", data=True)
            given = producer.results
            if root.type is not None and not (
                root.index < len(given) and given[root.index] is root
            ):
                _fail(node, f"{what} is no result of {producer.instruction.name}")
        for before in value.comes_after():
            self.comes_after(before, node, f"{what} is read after")

    def cheap_node(self, cheap: Node, node: Node | None, what: str) -> None:
        if cheap in self.cheap:
            return
        for operand in cheap.operands:
            producer = operand.root.node
            if producer is None or producer.kind is not NodeKind.CHEAP:
                _fail(node, f"{what} is cloned, but is not made of constants alone")
            self.cheap_node(producer, node, what)
        self.cheap.add(cheap)

    def comes_after(self, before: Node, node: Node | None, what: str, data: bool = False) -> None:
        if before not in self.above:
            where = "behind it" if before in self.graph.nodes else "not in its block"
            _fail(node, f"{what} {before.instruction.describe()}, which is {where}")
        if node is None or node is self.owner:
            return
        earlier, own = (self.graph.phases.get(n, 0) for n in (before, node))
        if earlier > own:
            _fail(
                node,
                f"{what} {before.instruction.describe()}, which is of phase {earlier}; it is of phase {own}",
            )


def _types(values: Iterable[Value]) -> list[TensorType | None]:
    return [v.type for v in values]


def _agree(node: Node, what: str, found: Types, expected: Types) -> None:
    if list(found) == list(expected):
        return
    if len(found) != len(expected):
        _fail(node, f"{what}: {len(found)}, where {len(expected)} are expected")
    i = next(i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1])
    _fail(node, f"{what} {i}: {found[i]}, where {expected[i]} is expected")


def _check_types(node: Node) -> None:
    operands, results = _types(node.operands), _types(node.results)
    arrays = [t for t in operands if t is not None]
    if node.kind is NodeKind.COMPUTE:
        instruction = node.instruction
        _agree(node, "results", results, leaf_types(instruction.shape, instruction))
        if instruction.operands:  # instructions that passes make have none
            shapes = [t for o in instruction.operands for t in leaf_types(o.shape, instruction)]
            _agree(node, "operands", operands, shapes)
    elif node.kind is NodeKind.COLLECTIVE:
        if node.collective is None:
            _fail(node, "has no collective")
        _agree(node, "operands of the collective", node.collective.operands, arrays)
        _agree(node, "results of the collective", node.collective.results, results)
    elif node.kind is NodeKind.LOOP:
        _check_loop(node, arrays, results)
    elif node.kind is NodeKind.BRANCH:
        _check_branch(node, results)


def _check_loop(node: Node, carries: Types, results: Types) -> None:
    if len(node.blocks) != 2:
        _fail(node, f"has {len(node.blocks)} blocks, not condition and body")
    condition, body = node.blocks
    _agree(node, "parameters of the body", _types(body.parameters), carries)
    _agree(node, "results of the body", _types(body.results), carries)
    _agree(node, "results", results, carries)
    counted = trip_count(node) is not None
    if counted and not (condition.parameters or condition.nodes or condition.results):
        return  # a loop that a pass has made: nobody evaluates its condition
    _agree(node, "parameters of the condition", _types(condition.parameters), carries)
    _agree(node, "results of the condition", _types(condition.results), [TensorType("pred", ())])


def _check_branch(node: Node, results: Types) -> None:
    if node.selector is None or not node.operands:
        _fail(node, "has no selector")
    if node.selector.root is not node.operands[0].root:
        _fail(node, "its selector is not its first operand")
    expected = TensorType("pred" if node.selector.type == TensorType("pred", ()) else "s32", ())
    _agree(node, "selector", [node.selector.type], [expected])
    given = [t for t in _types(node.operands[1:]) if t is not None]
    _agree(node, "operands", given, [p.type for b in node.blocks for p in b.parameters])
    for number, inner in enumerate(node.blocks):
        _agree(node, f"results of branch {number}", _types(inner.results), results)
