"""Makes an all-reduce to which each device gives only its own part an all-gather of those parts.

What a device gives is zero in the parts of the other devices of its group: rows that it looked up for itself
and zeros for those of others (``x[arange(n), i]``, gradients of it), or an update of zeros at its place. The
result is the own part of each device, one behind the other. That is half the bytes; and where every device
reads its own part only, `gathers` leaves it out.

Rows that are written, ``x.at[arange(n)[:, None], i].add(u)``, are reduced as well: one device writes its rows
into x, which is gathered, and the others write theirs into zeros (ones, for products). The own part is then
what a device wrote, and its part of x.

Bits: an all-reduce adds zeros to each element, which makes a zero of -0.0. So does each device here, with a
zero that compilers do not know.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from stretto.collectives.ops import Collective, Kind, Reduction

from ...edit import Editor
from ...schema import LiteralProto
from ...values import Barrier, Node, NodeKind, Value
from .bounds import PART, At, placed_at
from .context import Context, Rewritten
from .cut import Slicer, gathered, op, plus_zero
from .own_parts import Places, places
from .rows import Rows

# What an operand may be that is zero in places: others are not looked at.
_MASKED = frozenset(
    {"bitcast", "convert", "dynamic-update-slice", "reshape", "scatter", "select", "transpose"}
)


@dataclass(frozen=True)
class _Part:
    """A device gives its own part along ``dimension`` only. ``written``: the choice by the device of what it
    writes into: one device of a group takes an array, the others nothing. None if all take nothing."""

    dimension: int
    written: Node | None = None


def gather_own(editor: Editor, node: Node, context: Context) -> Rewritten | None:
    """Rewrite ``node``; None if it stays."""
    collective = node.collective
    if collective is None or not _reduces(node, collective) or not context.known.has_id:
        return None
    where = places(collective)
    if where is None or len(where.place) != context.num_devices:
        return None
    rows = Rows.of_group(context.known, where)
    found: dict[int, _Part] = {}
    for k, operand in enumerate(node.operands):
        part = _own(rows, operand, collective, where)
        if part is not None:
            found[k] = part
    if not found or (len(found) < len(node.operands) and node in editor.ordered):
        return None
    own = _Own(editor, node, context, where)
    for k, part in found.items():
        own.gather(k, part, collective)
    left = [k for k in range(len(node.operands)) if k not in found]
    if left:
        editor.restrict(node, left)
    else:
        editor.remove(node, own.made)
    said = "becomes an all-gather: every device gives its own part only"
    return Rewritten(said, made=tuple(own.made))


def _reduces(node: Node, collective: Collective) -> bool:
    if collective.kind is not Kind.ALL_REDUCE or node.reducer is not None:
        return False
    instruction = node.instruction
    return not (
        instruction.opcode != "all-reduce" or instruction.control_predecessors or node.is_started
    )


def _own(rows: Rows, operand: Value, collective: Collective, where: Places) -> _Part | None:
    producer, type, reduction = operand.node, operand.type, collective.reduction
    if producer is None or producer.instruction.opcode not in _MASKED or type is None:
        return None
    for d, size in enumerate(type.shape):
        if size % where.parts or not size:
            continue
        at = placed_at(len(type.shape), {d: PART})
        sums = reduction in (Reduction.SUM, Reduction.OR)
        if sums and (rows.zeros(operand, at) | ~rows.foreign).all():
            return _Part(d)
        if _writes(rows, producer, collective, at):
            return _Part(d, producer.operands[0].node)
    return None


def _writes(rows: Rows, node: Node, collective: Collective, at: At) -> bool:
    """Whether a device writes rows of its own part, one of the group into an array that is gathered, and the
    others into what changes nothing."""
    if node.instruction.opcode != "scatter" or len(node.operands) != 3:
        return False
    chosen = node.operands[0].node
    if chosen is None or chosen.instruction.opcode != "select" or chosen.order or node.order:
        return False
    if any(v.order or v.barrier for v in (*node.operands, *chosen.operands)):
        return False
    guard, nothing, array = chosen.operands
    gather = array.node.collective if array.node is not None else None
    if gather is None or gather.kind is not Kind.ALL_GATHER or gather.groups != collective.groups:
        return False
    if not changes_nothing(nothing, collective.reduction):
        return False
    assert guard.type is not None
    without = rows.of(guard, (None,) * len(guard.type.shape))
    if without.low.shape[1] != 1 or (without.low != without.high).any():
        return False
    skips = np.broadcast_to(without.low[:, 0].astype(bool), rows.foreign.shape[:1])
    if any(sum(not skips[d] for d in group) != 1 for group in collective.groups):
        return False
    return bool((rows.missed(node, at) | ~rows.foreign).all())


def changes_nothing(value: Value, reduction: Reduction | None) -> bool:
    """Whether a value is a constant that a reduction leaves out."""
    node = value.node
    if node is not None and node.instruction.opcode == "broadcast":
        node = node.operands[0].node
    if node is None or node.instruction.opcode != "constant" or value.type is None:
        return False
    type = value.type.numpy
    for field, values in LiteralProto.FromString(node.instruction.proto.literal).ListFields():
        if field.name == "shape":
            continue
        array = np.frombuffer(values, type) if isinstance(values, bytes) else np.asarray(values)
        if array.size != 1 or type.kind == "c":
            return False
        number = array.reshape(())[()]
        match reduction:
            case Reduction.SUM:
                return bool(number == 0 and not np.signbit(number))
            case Reduction.PRODUCT:
                return bool(number == 1)
            case Reduction.MAX:
                return bool(number == _least(type, -1))
            case Reduction.MIN:
                return bool(number == _least(type, 1))
    return False


def _least(type: np.dtype, sign: int) -> float:
    if type.kind in "iu":
        return float(np.iinfo(type).max if sign > 0 else np.iinfo(type).min)
    return sign * np.inf


class _Own:
    """All-gathers of own parts behind an all-reduce. ``made``: those."""

    def __init__(self, editor: Editor, node: Node, context: Context, where: Places) -> None:
        self._editor, self._node, self._parts = editor, node, where.parts
        self._slicer, own_id = Slicer.of(context.known, where.place, node.instruction)
        self._editor.put_behind(node, [own_id])
        self.made: list[Node] = []

    def gather(self, k: int, part: _Part, collective: Collective) -> None:
        """Gather the own parts of operand k instead of reducing it."""
        node = self._node
        nodes, own = self._part(node.operands[k], part.dimension)
        if part.written is not None:
            assert collective.reduction is not None
            more, own = self._with(own, part.written, part.dimension, str(collective.reduction))
            nodes += more
        elif own.type is not None and own.type.numpy.kind not in "iub":
            more, own = plus_zero(own, self._slicer.own, node.instruction)
            nodes += more
        instead = Node(NodeKind.COLLECTIVE, node.instruction, -1, [own], node.order)
        instead.collective = gathered(
            replace(collective, reduction=None), own, part.dimension, self._parts
        )
        instead.results = [Value(instead.collective.results[0], instead)]
        self._editor.put_behind(node, [*nodes, instead])
        self._editor.replace(node.results[k], instead.results[0])
        self.made.append(instead)

    def _part(self, value: Value, dimension: int) -> tuple[list[Node], Value]:
        return self._slicer.part(value, dimension, self._parts)

    def _with(
        self, own: Value, chosen: Node, dimension: int, combine: str
    ) -> tuple[list[Node], Value]:
        """What a device wrote, and its part of the array into which another device of the group wrote."""
        nodes: list[Node] = []
        guard, nothing, array = chosen.operands
        parts: list[Value] = []
        for value in (guard, array, nothing):
            is_scalar = value.type is not None and not value.type.shape
            more, part = ([], value) if is_scalar else self._part(value, dimension)
            nodes += more
            parts.append(part)
        assert own.type is not None
        like = self._node.instruction
        base = op("select", parts, own.type, like)
        # XLA would write into the sum, and so add in another order.
        apart = own.view((), Barrier((own,), is_fence=False))
        both = op(combine, [base.results[0], apart], own.type, like)
        return [*nodes, base, both], both.results[0]
