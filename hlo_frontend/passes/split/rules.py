"""Which nodes compute part after part: one rule for each opcode, from the cut of one array to that of all.

An array is *cut* along a dimension into equal parts. A node can be split if each part of its results needs,
of every operand, either the part with the same number or all of it, and if no sum runs over the cut
dimension. So the parts of its results are the results of the same op on parts of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...ops import op_of
from ...values import Node, NodeKind, operand_shape, result_shape
from ..bytes.steps import backward as step_backward
from ..bytes.steps import forward as step_forward
from ..bytes.steps import steps_of


@dataclass(frozen=True)
class Cut:
    """For each operand the dimension along which it is cut, None if all of it is read; the same for each
    result, all of which are cut."""

    operands: tuple[int | None, ...]
    results: tuple[int, ...]


# Gives the cut of a node from that of one operand; None if there is none.
Forward = Callable[[Node, int, int, int], Cut | None]
# The same from the cut of its results.
Backward = Callable[[Node, int, int], Cut | None]


def forward(node: Node, position: int, dimension: int, parts: int) -> Cut | None:
    """The cut of a node of which operand ``position`` is cut along ``dimension``, None if there is none."""
    rule = _rule(node)
    return None if rule is None else _whole_only(node, rule[0](node, position, dimension, parts))


def backward(node: Node, dimension: int, parts: int) -> Cut | None:
    """The cut of a node whose results are cut along ``dimension``, None if there is none."""
    rule = _rule(node)
    return None if rule is None else _whole_only(node, rule[1](node, dimension, parts))


def is_heavy(node: Node) -> bool:
    """Whether the time of a node grows faster than its bytes: what messages are hidden behind."""
    return node.kind is NodeKind.COMPUTE and node.instruction.opcode in ("dot", "convolution")


def _rule(node: Node) -> tuple[Forward, Backward] | None:
    if node.kind is not NodeKind.COMPUTE or node.has_side_effect:
        return None
    instruction = node.instruction
    if any(v.type is None for v in (*node.operands, *node.results)):
        return None
    if len(instruction.operands) != len(node.operands):
        return None
    opcode = instruction.opcode
    if op_of(opcode).elementwise:
        return _elementwise, _elementwise_backward
    return _RULES.get(opcode)


def _whole_only(node: Node, cut: Cut | None) -> Cut | None:
    """The cut, if no array in it is without elements."""
    if cut is None or any(v.type is None or not v.type.size for v in node.results):
        return None
    return cut


def _elementwise(node: Node, position: int, dimension: int, parts: int) -> Cut | None:
    if operand_shape(node, position) != result_shape(node):
        return None
    return _elementwise_backward(node, dimension, parts)


def _elementwise_backward(node: Node, dimension: int, parts: int) -> Cut | None:
    shape = result_shape(node)
    if dimension >= len(shape):
        return None
    cuts = [
        dimension if operand_shape(node, i) == shape else None for i in range(len(node.operands))
    ]
    for i, cut in enumerate(cuts):
        if cut is None and operand_shape(node, i):
            return None
    return Cut(tuple(cuts), (dimension,))


def _broadcast(node: Node, position: int, dimension: int, parts: int) -> Cut | None:
    to: int = node.instruction.proto.dimensions[dimension]
    if operand_shape(node)[dimension] != result_shape(node)[to]:
        return None
    return Cut((dimension,), (to,))


def _broadcast_backward(node: Node, dimension: int, parts: int) -> Cut | None:
    given = list(node.instruction.proto.dimensions)
    if dimension not in given:
        return Cut((None,), (dimension,))
    own = given.index(dimension)
    same = operand_shape(node)[own] == result_shape(node)[dimension]
    return Cut((own,), (dimension,)) if same else None


def _moved(node: Node, position: int, dimension: int, parts: int) -> Cut | None:
    steps = steps_of(node)
    if steps is None:
        return None
    to: int | None = dimension
    for step in steps:
        if to is None:
            return None
        to = step_forward(step, to, parts)
    return None if to is None else Cut((dimension,), (to,))


def _moved_backward(node: Node, dimension: int, parts: int) -> Cut | None:
    steps = steps_of(node)
    if steps is None:
        return None
    own: int | None = dimension
    for step in reversed(steps):
        if own is None:
            return None
        own = step_backward(step, own, parts)
    return None if own is None else Cut((own,), (dimension,))


def _reduce(node: Node, position: int, dimension: int, parts: int) -> Cut | None:
    reduced = list(node.instruction.proto.dimensions)
    arrays = len(node.operands) // 2
    if position >= arrays or dimension in reduced:
        return None
    to = dimension - sum(d < dimension for d in reduced)
    return Cut((dimension,) * arrays + (None,) * arrays, (to,) * len(node.results))


def _reduce_backward(node: Node, dimension: int, parts: int) -> Cut | None:
    reduced = list(node.instruction.proto.dimensions)
    left = [d for d in range(len(operand_shape(node))) if d not in reduced]
    return _reduce(node, 0, left[dimension], parts) if dimension < len(left) else None


def _dot_dimensions(node: Node) -> tuple[tuple[list[int], list[int]], tuple[list[int], ...]]:
    """The batch dimensions of both operands, and their other dimensions that are not summed over."""
    numbers = node.instruction.proto.dot_dimension_numbers
    batch = list(numbers.lhs_batch_dimensions), list(numbers.rhs_batch_dimensions)
    summed = (
        list(numbers.lhs_contracting_dimensions),
        list(numbers.rhs_contracting_dimensions),
    )
    free = tuple(
        [d for d in range(len(operand_shape(node, i))) if d not in batch[i] and d not in summed[i]]
        for i in range(2)
    )
    return batch, free


def _dot(node: Node, position: int, dimension: int, parts: int) -> Cut | None:
    if len(node.operands) != 2:
        return None
    batch, free = _dot_dimensions(node)
    if dimension in batch[position]:
        return _dot_backward(node, batch[position].index(dimension), parts)
    if dimension not in free[position]:
        return None
    to = len(batch[0]) + position * len(free[0]) + free[position].index(dimension)
    return _dot_backward(node, to, parts)


def _dot_backward(node: Node, dimension: int, parts: int) -> Cut | None:
    if len(node.operands) != 2:
        return None
    batch, free = _dot_dimensions(node)
    count = len(batch[0])
    if dimension < count:
        return Cut((batch[0][dimension], batch[1][dimension]), (dimension,))
    own = dimension - count
    if own < len(free[0]):
        return Cut((free[0][own], None), (dimension,))
    return Cut((None, free[1][own - len(free[0])]), (dimension,))


def _beside(is_whole: Callable[[Any, Node, int], bool], sliced: int) -> tuple[Forward, Backward]:
    """Rules of an op that works on other dimensions than that of the cut. ``is_whole``: whether it leaves a
    dimension as it is; ``sliced``: how many of its first operands have it, 0 if all."""

    def behind(node: Node, dimension: int, parts: int) -> Cut | None:
        if dimension >= len(result_shape(node)) or len(node.results) != 1:
            return None
        if not is_whole(node.instruction.proto, node, dimension):
            return None
        count = len(node.operands)
        cut = sliced or count
        return Cut((dimension,) * cut + (None,) * (count - cut), (dimension,))

    def ahead(node: Node, position: int, dimension: int, parts: int) -> Cut | None:
        if sliced and position >= sliced:
            return None
        return behind(node, dimension, parts)

    return ahead, behind


def _same_size(proto: Any, node: Node, dimension: int) -> bool:
    return operand_shape(node)[dimension] == result_shape(node)[dimension]


def _same_update(proto: Any, node: Node, dimension: int) -> bool:
    return operand_shape(node, 1)[dimension] == result_shape(node)[dimension]


def _not_along(proto: Any, node: Node, dimension: int) -> bool:
    return dimension not in list(proto.dimensions)


def _sliced_whole(proto: Any, node: Node, dimension: int) -> bool:
    return _same_size(proto, node, dimension) and proto.slice_dimensions[dimension].stride in (0, 1)


def _not_padded(proto: Any, node: Node, dimension: int) -> bool:
    pad = proto.padding_config.dimensions[dimension]
    return not (pad.edge_padding_low or pad.edge_padding_high or pad.interior_padding)


_RULES: dict[str, tuple[Forward, Backward]] = {
    "broadcast": (_broadcast, _broadcast_backward),
    "transpose": (_moved, _moved_backward),
    "reshape": (_moved, _moved_backward),
    "bitcast": (_moved, _moved_backward),
    "reduce": (_reduce, _reduce_backward),
    "dot": (_dot, _dot_backward),
    "concatenate": _beside(_not_along, 0),
    "reverse": _beside(_not_along, 0),
    "slice": _beside(_sliced_whole, 0),
    "pad": _beside(_not_padded, 1),
    "dynamic-slice": _beside(_same_size, 1),
    "dynamic-update-slice": _beside(_same_update, 2),
}


def sizes(node: Node, cut: Cut) -> Sequence[int]:
    """The sizes of the cut dimensions: all must be a multiple of the number of parts."""
    given = [operand_shape(node, i)[d] for i, d in enumerate(cut.operands) if d is not None]
    made = [v.type.shape[d] for v, d in zip(node.results, cut.results, strict=True) if v.type]
    return given + made
