"""Leaves out collectives in which no device meets another one, as over an axis of one place.

Over groups of one device results are operands, if every device is in a group (or sends to itself):
those of other devices are zeros. A permute without pairs, as a halo's to neighbours that are not
there, gives zeros to all.
"""

from __future__ import annotations

import numpy as np

from stretto.collectives.ops import Collective, Kind
from stretto.collectives.types import TensorType

from ...edit import Editor
from ...values import Node
from .context import Context, Rewritten
from .cut import constant, op

_IDENTITIES = frozenset(
    {Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.BROADCAST}
)


def leave_out_alone(editor: Editor, node: Node, context: Context) -> Rewritten | None:
    """Leave ``node`` out; None if it stays."""
    collective = node.collective
    if collective is None:
        return None
    if collective.kind is Kind.PERMUTE and not collective.pairs:
        return _zeros(editor, node)
    if not _is_identity(collective, context.num_devices):
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


def _zeros(editor: Editor, node: Node) -> Rewritten:
    """Zeros instead of the results of a permute to which nobody sends."""
    made: list[Node] = []
    like = node.instruction
    for result in node.results:
        assert result.type is not None  # only tokens have none
        zero = op("convert", [constant(np.int32(0), like)], TensorType(result.type.dtype, ()), like)
        spread = op("broadcast", zero.results, result.type, like)
        made += [zero, spread]
        editor.replace(result, spread.results[0].view(node.order))
    editor.put_ahead(node, made)
    editor.remove(node, made)
    return Rewritten("goes: no device sends anything, and all receive zeros")
