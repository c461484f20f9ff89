"""Leaves out collectives over groups of one device: their results are their operands.

Only if every device is in a group (or sends to itself): the results of other devices are zeros.
"""

from __future__ import annotations

from stretto.collectives.ops import Collective, Kind

from ...edit import Editor
from ...values import Node
from .context import Context, Rewritten

_IDENTITIES = frozenset(
    {Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.BROADCAST}
)


def leave_out_alone(editor: Editor, node: Node, context: Context) -> Rewritten | None:
    """Leave ``node`` out; None if it stays."""
    collective = node.collective
    if collective is None or not _is_identity(collective, context.num_devices):
        return None
    for operand, result in zip(node.operands, node.results, strict=False):
        if operand.type != result.type:
            return None
    for operand, result in zip(node.operands, node.results, strict=False):
        editor.replace(result, operand.view(node.order))
    editor.remove(node)
    return Rewritten("goes: every device is alone in its group")


def _is_identity(collective: Collective, num_devices: int) -> bool:
    if collective.kind is Kind.PERMUTE:
        own = all(source == target for source, target in collective.pairs)
        return own and len(collective.pairs) == num_devices and not collective.valid_iterations
    if collective.kind not in _IDENTITIES:
        return False
    return len(collective.groups) == num_devices and all(len(g) == 1 for g in collective.groups)
