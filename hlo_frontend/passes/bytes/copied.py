"""Leaves out what is sent, added up and sent back so that each device gets what it has already.

On a mesh of several axes, XLA's partitioner spreads the numbers of rows (``x[arange(n), i]``,
``x.at[arange(n), i].set(u)``) over the axes along which x is not cut: it permutes them, looks up or writes on
all devices, adds up or gathers, and permutes back. As devices along those axes have copies of x, of the
numbers and of the updates, each device finds its rows by itself (`fetched`).

The *ends* of such chains are permutes, sums, slices of sums, scatters and gathers of rows. A chain is
rewritten where it leaves out a sum to which one device gives something and the others zeros, or rows that are
not asked for, or not written: what programs send from copy to copy themselves stays. Collectives that nobody
reads then go.

Bits: each element is computed from the same numbers by the same ops, and zeros are added where a sum adds
them. Where XLA lets one device write into x, and another one into zeros, each device does what that one does
with its rows, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.collectives.ops import Kind

from ...edit import Editor
from ...values import Node, NodeKind, Value
from .context import Context, Rewritten
from .fetched import Fetched, Found, Refused
from .rows import Rows

_SAID = "goes: every device makes what it would get of what it has"
# What may lie between a permute or a slice and the sum whose result it moves.
_MOVES = frozenset({"bitcast", "convert", "copy", "dynamic-slice", "reshape", "slice", "transpose"})
# The operands that a sum may have: they are zero in places.
_MASKED = frozenset({"bitcast", "convert", "reshape", "scatter", "select", "transpose"})
_LONGEST = 8


def use_copies(editor: Editor, nodes: Sequence[Node], context: Context) -> dict[Node, Rewritten]:
    """Rewrite the first end of the block that can be; what is left of ``nodes``, its collectives, says."""
    if not nodes or not context.known.has_id or not context.copies.has_some:
        return {}
    rows = Rows(context.known, 1, [0] * context.num_devices)
    for node in editor.block.nodes:
        if node in context.tried or not _is_end(node):
            continue
        context.tried.add(node)
        fetched = Fetched(context, rows, node)
        values = _fetched(node, fetched)
        if values:
            gone = _apply(editor, node, values, fetched.nodes, context.crossed)
            if gone:
                return {one: Rewritten(_SAID) for one in gone}
    return {}


def _is_end(node: Node) -> bool:
    collective = node.collective
    if collective is not None:
        plain = not node.is_started and not node.instruction.control_predecessors
        if collective.kind is Kind.PERMUTE:
            return plain and any(_is_sum(v) for v in node.operands)
        return plain and collective.kind is Kind.ALL_REDUCE and any(map(_is_masked, node.operands))
    if node.kind is not NodeKind.COMPUTE or node.order:
        return False
    if node.instruction.opcode == "dynamic-slice":
        return _is_sum(node.operands[0])
    if node.instruction.opcode == "gather":
        return _is_gathered(node.operands[0])
    return node.instruction.opcode == "scatter" and len(node.operands) == 3


def _is_masked(value: Value) -> bool:
    return value.node is not None and value.node.instruction.opcode in _MASKED


def _is_sum(value: Value) -> bool:
    """Whether a value is moved from a sum that may have one term."""
    node = _moved(value)
    return (
        node is not None
        and node.collective is not None
        and node.collective.kind is Kind.ALL_REDUCE
        and any(map(_is_masked, node.operands))
    )


def _is_gathered(value: Value) -> bool:
    node = _moved(value)
    collective = None if node is None else node.collective
    return collective is not None and collective.kind is Kind.ALL_GATHER


def _moved(value: Value) -> Node | None:
    """The collective whose result is moved."""
    for _ in range(_LONGEST):
        node = value.node
        if node is None or node.collective is not None:
            return node
        if node.kind is not NodeKind.COMPUTE or node.instruction.opcode not in _MOVES:
            return None
        value = node.operands[0]
    return None


def _fetched(node: Node, fetched: Fetched) -> dict[Value, Value]:
    """What is to be read instead of a node's results, as far as they can be made otherwise."""
    found: dict[Value, Value] = {}
    for result in node.results:
        try:
            made: Found | None = fetched.end(node, result.index)
        except Refused:
            continue
        if made is not None and made.proved:
            found[result] = made.value
    return found


def _apply(
    editor: Editor, node: Node, values: dict[Value, Value], made: Sequence[Node], crossed: set[Node]
) -> list[Node]:
    """Replace results of a node. Gives the collectives that go; nothing is changed where none does."""
    left = [k for k, result in enumerate(node.results) if result not in values]
    if left and (node.collective is None or node in editor.ordered):
        return []
    gone = _unread(editor, node, values, made, crossed)
    if node.collective is not None and not left:
        gone.append(node)
    elif not gone and not left:
        return []
    editor.put_behind(node, made)
    for old, new in values.items():
        editor.replace(old, new)
    for one in gone:
        editor.remove(one)
    if left:
        editor.restrict(node, left)
        return [*gone, node]
    return gone


def _unread(
    editor: Editor, end: Node, values: dict[Value, Value], made: Sequence[Node], crossed: set[Node]
) -> list[Node]:
    """The collectives that were crossed and that nobody reads behind the edit."""
    instead = {old: new.root for old, new in values.items()}
    read = {instead.get(v.root, v.root) for v in editor.block.results}
    nodes: list[Node] = []
    for node in editor.block.nodes:
        nodes.append(node)
        if node is end:
            nodes += made
    gone: list[Node] = []
    for node in reversed(nodes):
        passed = node in crossed and node is not end and not node.is_started
        goes = node.kind in (NodeKind.COMPUTE, NodeKind.LOGICAL_ID) and not node.has_side_effect
        if (goes or passed) and not any(v in read for v in node.results):
            if passed:
                gone.append(node)
            continue
        if node is end and len(values) == len(node.results):
            continue
        read.update([instead.get(v.root, v.root) for v in node.operands])
        if node.selector is not None:
            read.add(instead.get(node.selector.root, node.selector.root))
    return gone
