"""Merges collectives that do the same to the same operands.

XLA merges instructions that are spelled alike, but groups can be spelled in several ways. Collectives that
tokens, control dependencies or an optimization barrier put in an order stay as they are: the program wants
both, for example to gather weights again instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from stretto.collectives.ops import Kind

from ...edit import Editor
from ...values import Node
from .context import Rewritten


def merge(editor: Editor, nodes: Sequence[Node]) -> dict[Node, Rewritten]:
    """Leave out those of ``nodes``, collectives of the block, that do the same as an earlier one."""
    first: dict[Hashable, Node] = {}
    merged: dict[Node, Rewritten] = {}
    for node in nodes:
        key = _key(node)
        same = node if key is None else first.setdefault(key, node)
        if same is node:
            continue
        if node in editor.ordered or same in editor.ordered:
            continue
        for result, other in zip(node.results, same.results, strict=True):
            editor.replace(result, other)
        editor.remove(node, (same,))
        merged[node] = Rewritten(f"goes: {same.instruction.name} is the same", same)
    return merged


def _key(node: Node) -> Hashable | None:
    """A key that is equal for collectives with equal results; None for those that are never merged."""
    collective = node.collective
    if collective is None or collective.kind in (Kind.SEND, Kind.RECV) or not node.operands:
        return None
    if node.order or any(next(v.comes_after(), None) for v in node.operands):
        return None
    return (
        collective.kind,
        tuple(sorted(collective.groups)),
        collective.pairs,
        collective.reduction,
        None if node.reducer is None else id(node.reducer),
        collective.dimension,
        collective.tuple_form,
        collective.dynamic_root,
        collective.valid_iterations,
        collective.results,
        tuple((id(v.root), id(v.barrier)) for v in node.operands),
    )
