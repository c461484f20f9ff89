"""Replaces slices of an all-gather's result that are the device's own part by the all-gather's operand.

An all-gather that nobody reads afterwards is left out. Only if every device takes part in the all-gather: the
results of other devices are zeros, and not their operands.
"""

from __future__ import annotations

from stretto.collectives.ops import Kind

from ...edit import Editor
from ...values import Node
from .context import Context, Rewritten
from .own_parts import give_parts, own_parts, places


def take_own(editor: Editor, node: Node, context: Context) -> Rewritten | None:
    """Rewrite readers of ``node``, and leave it out if nobody else reads it; None if nothing changes."""
    collective = node.collective
    if collective is None or collective.kind is not Kind.ALL_GATHER:
        return None
    where = places(collective) if context.has_slices else None
    if where is None or len(where.place) != context.num_devices:
        return None
    kept: list[int] = []
    slices: list[str] = []
    for k, result in enumerate(node.results):
        taken, others = own_parts(editor, context.known, result, where)
        own = [part for part in taken if part.dimension == collective.dimension]
        give_parts(editor, node, node.operands[k], own, where.parts)
        slices += [part.node.instruction.name for part in own]
        if others or len(own) < len(taken) or not own:
            kept.append(k)
    if not slices:
        return None
    said = f"every device has its own part already ({', '.join(slices)})"
    if not kept:
        editor.remove(node)
        return Rewritten(f"goes: {said}")
    if len(kept) < len(node.operands):
        editor.restrict(node, kept)
    return Rewritten(f"is not read by all: {said}")
