"""Moves the conditions of loops into their bodies, so that an iteration runs one segment less.

A loop whose length is not known asks its condition ahead of each iteration: a segment of its own, between the
body's last one and the next one's first. Here the loop carries the answer. The block around it computes the
first one, the body the next ones, of the carries that it hands on, and the condition gives the carry. So the
answer comes of the segment in which what it depends on is made, if no collective is between.

Invariants: the condition is computed as often as before, of the same carries, once ahead of each iteration
and once behind the last one. Conditions that communicate, loop, branch or do anything beside computing stay
where they are, and so do those of loops that do not communicate: these are segments as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..edit import Editor
from ..graph import all_instructions
from ..trips import trip_count
from ..values import BlockGraph, Node, NodeKind, Value, all_blocks, all_nodes


def move_into_bodies(block: BlockGraph) -> int:
    """Move conditions of the loops in a block, and in the blocks inside it. How many were moved."""
    return sum([_of_block(inner) for inner in all_blocks(block)])


def _of_block(block: BlockGraph) -> int:
    loops = [node for node in block.nodes if node.kind is NodeKind.LOOP and _moves(node)]
    if not loops:
        return 0
    editor = Editor(block)
    for loop in loops:
        condition, body = loop.blocks
        first, before = _copy(condition, loop.operands)
        following, behind = _copy(condition, body.results)
        editor.put_ahead(loop, before)
        _carry(loop, first, following)
        body.nodes += behind
        for position, node in enumerate(behind, len(body.nodes) - len(behind)):
            node.position = position
    editor.commit()
    return len(loops)


def _moves(loop: Node) -> bool:
    condition, _ = loop.blocks
    if trip_count(loop) is not None or len(condition.results) != 1:
        return False
    (answer,) = condition.results
    return (
        answer.root.node in condition.nodes
        and not any(node.has_side_effect or _calls(node) for node in condition.nodes)
        and not any(v.barrier for v in (answer, *(v for n in condition.nodes for v in n.operands)))
        and any(node.collective is not None for node in all_nodes(loop.blocks[1]))
    )


def _calls(node: Node) -> bool:
    """Whether a node calls code that XLA does not know, which may see beside what it is called."""
    inside = (i for called in node.instruction.called for i in all_instructions(called))
    return any(i.opcode == "custom-call" for i in (node.instruction, *inside))


def _copy(condition: BlockGraph, given: Sequence[Value]) -> tuple[Value, list[Node]]:
    """The condition of the carries ``given``, and the nodes that compute it."""
    values = dict(zip(condition.parameters, given, strict=True))
    copies: dict[Node, Node] = {}

    def value(of: Value) -> Value:
        # Constants have no place in a block: copies read the same.
        copied = values.get(of.root, of.root)
        order = tuple(copies[node] for node in of.order)
        return copied.view(order) if order else copied

    for node in condition.nodes:
        operands = [value(v) for v in node.operands]
        order = tuple(copies[before] for before in node.order)
        copy = copies[node] = Node(node.kind, node.instruction, -1, operands, order)
        copy.results = [Value(v.type, copy, i) for i, v in enumerate(node.results)]
        values |= zip(node.results, copy.results, strict=True)
    return value(condition.results[0]), list(copies.values())


def _carry(loop: Node, first: Value, following: Value) -> None:
    """Make a loop carry the answer of its condition."""
    condition, body = loop.blocks
    loop.operands.append(first)
    loop.results.append(Value(first.type, loop, len(loop.results)))
    body.parameters.append(Value(first.type))
    body.results.append(following)
    answer = Value(first.type)
    condition.parameters.append(answer)
    condition.nodes.clear()
    condition.results[:] = [answer]
