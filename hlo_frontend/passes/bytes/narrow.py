"""Sends converted data in the narrower type.

An element that is only moved may be converted before or after: an operand that has just been widened is sent
as it was before, and a result that all readers narrow to one type is sent in that type. Minima, maxima and
bitwise reductions of integers commute with a conversion that keeps values; sums do not. Reductions of floats
stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import ELEMENT_TYPES, TensorType

from ...edit import Editor
from ...values import Node, Value
from .context import Context, Rewritten
from .steps import Step, emit, of_type, steps_of

_MOVES = frozenset({Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.PERMUTE, Kind.BROADCAST})
_REDUCES = frozenset({Kind.ALL_REDUCE, Kind.REDUCE_SCATTER})
_BITWISE = frozenset({Reduction.AND, Reduction.OR, Reduction.XOR})
_ORDERED = frozenset({Reduction.MIN, Reduction.MAX})
# Steps between a conversion and a collective, at most.
_LONGEST = 16


def narrow(editor: Editor, node: Node, context: Context) -> Rewritten | None:
    """Rewrite ``node``; None if it stays."""
    collective = node.collective
    if collective is None or collective.kind not in _MOVES | _REDUCES or collective.tuple_form:
        return None
    operands, results, said = list(node.operands), list(node.results), []
    for k in range(len(results)):
        travels = _as_before(editor, node, k) or _as_read(editor, node, k)
        if travels is not None:
            operands[k], results[k] = travels
            said.append(f"{_type(results[k]).dtype} instead of {collective.results[k].dtype}")
    if not said:
        return None
    narrowed = replace(
        collective,
        operands=tuple(_type(v) for v in operands),
        results=tuple(_type(v) for v in results),
    )
    editor.change(node, operands, results, narrowed)
    return Rewritten(f"travels as {', '.join(dict.fromkeys(said))}")


def _type(value: Value) -> TensorType:
    assert value.type is not None
    return value.type


def _as_before(editor: Editor, node: Node, k: int) -> tuple[Value, Value] | None:
    """Operand k as it was before it was widened, and result k in that type."""
    found = _widened(node.operands[k])
    assert node.collective is not None
    if found is None:
        return None
    value, convert, moves = found
    narrow, wide = convert.source.dtype, convert.target.dtype
    if not _is_narrower(narrow, wide) or not _has_one_meaning(convert):
        return None
    if not _commutes(node.collective, narrow, wide):
        return None
    nodes, operand = emit(of_type(moves, narrow), value)
    editor.put_ahead(node, nodes)
    old = node.results[k]
    new = Value(TensorType(narrow, _type(old).shape), node, k)
    nodes, widened = emit([replace(convert, source=_type(new), target=_type(old))], new)
    editor.put_behind(node, nodes)
    editor.replace(old, widened)
    return operand.view(node.operands[k].order), new


def _widened(operand: Value) -> tuple[Value, Step, tuple[Step, ...]] | None:
    """The conversion that an operand comes from: its operand, itself, and the moves after it."""
    moves: tuple[Step, ...] = ()
    value = operand
    order: tuple[Node, ...] = ()
    while len(moves) < _LONGEST and value.barrier is None and value.root.node is not None:
        node = value.root.node
        steps = steps_of(node)
        if steps is None:
            return None
        order = (*order, *node.order, *node.operands[0].order)
        value = node.operands[0]
        if len(steps) == 1 and steps[0].opcode == "convert":
            return (value.view(order), steps[0], moves) if value.barrier is None else None
        moves = (*steps, *moves)
    return None


def _as_read(editor: Editor, node: Node, k: int) -> tuple[Value, Value] | None:
    """Operand and result k in the type that all readers of the result want it in."""
    assert node.collective is not None
    if node.collective.kind not in _MOVES:
        return None
    uses = editor.uses(node.results[k])
    conversions: list[Step] = []
    for use in uses:
        steps = None if use.node is None or use.value.barrier is not None else steps_of(use.node)
        if steps is None or len(steps) != 1 or steps[0].opcode != "convert":
            return None
        if not _has_one_meaning(steps[0]):
            return None
        conversions += steps
    types = {step.target.dtype for step in conversions}
    if len(types) != 1:
        return None
    (narrow,) = types
    if not _is_narrower(narrow, conversions[0].source.dtype):
        return None
    operand = node.operands[k]
    target = TensorType(narrow, _type(operand).shape)
    convert = replace(conversions[0], source=_type(operand), target=target)
    nodes, converted = emit([convert], operand)
    editor.put_ahead(node, nodes)
    new = Value(TensorType(narrow, _type(node.results[k]).shape), node, k)
    for use in uses:
        assert use.node is not None
        editor.replace(use.node.results[0], new.view((*use.value.order, *use.node.order)))
        editor.remove(use.node)
    return converted, new


# Without a zero: devices that nothing is sent to have zero bytes, which must stay zeros.
_ZEROLESS = frozenset({"f8e8m0fnu"})


def _is_narrower(narrow: str, wide: str) -> bool:
    """Whether elements take fewer bytes. Types below a byte stay as they are."""
    small, large = ELEMENT_TYPES[narrow], ELEMENT_TYPES[wide]
    if narrow in _ZEROLESS or (narrow != "pred" and small.bits < 8):
        return False
    return small.numpy.itemsize < large.numpy.itemsize


def _has_one_meaning(convert: Step) -> bool:
    """Not so for floats to integers: what is out of range may become anything."""
    whole = ("pred", "s", "u")
    return convert.source.dtype.startswith(whole) or not convert.target.dtype.startswith(whole)


def _commutes(collective: Collective, narrow: str, wide: str) -> bool:
    """Whether converting after the collective is the same, bit for bit."""
    if collective.kind in _MOVES:
        return True
    if narrow != "pred" and not (narrow[0] in "su" and wide[0] in "su"):
        return False
    if wide[0] not in "su" or (narrow[0] == "s" and wide[0] == "u"):
        return False
    return collective.reduction in _BITWISE | _ORDERED
