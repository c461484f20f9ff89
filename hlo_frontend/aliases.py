"""Which inputs of a segment its outputs may overwrite, if the inputs are not used afterwards.

An output is paired with an input of which it is an update: the array into which a dynamic-update-slice or a
scatter writes, the initial value of a loop's carry, or else an operand of an elementwise op that has the same
type. For other pairs XLA would insert copies.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from .carve import SegmentPlan
from .ops import op_of
from .values import Node, NodeKind, Value

# Smaller arrays are not worth the bookkeeping.
SMALLEST_BYTES = 1024
_MAX_STEPS = 64


def find_aliases(
    plan: SegmentPlan, dying: Iterable[Value], given: Container[Value] = ()
) -> dict[int, int]:
    """Input position -> output position, for inputs among ``dying`` that an output updates. Those that the
    caller has ``given`` away may be small."""
    position = {value: i for i, value in enumerate(plan.inputs)}
    free = {
        v for v in dying if v.type is not None and (v.type.nbytes >= SMALLEST_BYTES or v in given)
    }
    pairs: dict[int, int] = {}
    if not free:
        return pairs
    types = {v.type for v in free}
    inside = {value for node in plan.nodes for value in node.results}
    left = [(i, v) for i, v in enumerate(plan.outputs) if v in inside and v.type in types]
    for search in (_updated, _elementwise_source):
        for output, value in left[:]:
            source = search(value, inside, free)
            if source is not None:
                free.discard(source)
                pairs[position[source]] = output
                left.remove((output, value))
    return pairs


def _updated(value: Value, inside: set[Value], free: set[Value]) -> Value | None:
    """The input that ``value`` is an in-place update of."""
    at = value
    while at in inside:
        node = at.node
        assert node is not None
        operand = _updated_operand(node, at.index)
        if operand is None:
            return None
        at = operand.root
    return at if at in free and at.type == value.type else None


def _updated_operand(node: Node, index: int) -> Value | None:
    opcode = node.instruction.opcode
    return node.operands[index] if opcode == "while" or op_of(opcode).in_place else None


def _elementwise_source(value: Value, inside: set[Value], free: set[Value]) -> Value | None:
    stack, seen = [value], {value}
    steps = 0
    while stack and steps < _MAX_STEPS:
        steps += 1
        at = stack.pop()
        node = at.node
        if node is None or at not in inside:
            continue
        updated = _updated_operand(node, at.index)
        candidates = [updated] if updated is not None else []
        if op_of(node.instruction.opcode).elementwise:
            candidates = list(node.operands)
        for operand in reversed(candidates):
            root = operand.root
            if root in seen or root.type != value.type:
                continue
            if root in free:
                return root
            seen.add(root)
            if root.node is not None and root.node.kind is NodeKind.COMPUTE:
                stack.append(root)
    return None
