"""Which nodes compute part after part: what the table of independent dimensions (`passes.bytes.batches`) says
of an op, asked from the cut of one array.

An array is *cut* along a dimension into equal parts. A node can be split along a batch of its op: the parts
of its results are the results of the same op on parts of its operands, and no sum runs over the cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...ops import op_of
from ...values import Node, NodeKind, operand_shape
from ..bytes.batches import Batch, batches

# What lies between collectives and products, beside elementwise ops. Others end a region.
_BETWEEN = frozenset(
    {"bitcast", "broadcast", "concatenate", "dot", "dynamic-slice", "dynamic-update-slice", "pad"}
    | {"reduce", "reshape", "reverse", "slice", "transpose"}
)


def forward(node: Node, position: int, dimension: int, parts: int) -> Batch | None:
    """The batch of a node of which operand ``position`` is cut along ``dimension``, None if there is none."""
    found = (b for b in _batches(node, parts) if b.operands[position] == dimension)
    return next(found, None)


def backward(node: Node, dimension: int, parts: int) -> Batch | None:
    """The batch of a node whose results are cut along ``dimension``, None if there is none."""
    found = (b for b in _batches(node, parts) if set(b.results) == {dimension})
    return next(found, None)


def is_heavy(node: Node) -> bool:
    """Whether the time of a node grows faster than its bytes: what messages are hidden behind."""
    return node.kind is NodeKind.COMPUTE and node.instruction.opcode in ("dot", "convolution")


def _batches(node: Node, parts: int) -> Iterator[Batch]:
    opcode = node.instruction.opcode
    if node.kind is not NodeKind.COMPUTE or node.has_side_effect:
        return iter(())
    if opcode not in _BETWEEN and not op_of(opcode).elementwise:
        return iter(())
    operands = [v.type for v in node.operands if v.type is not None]
    results = [v.type for v in node.results if v.type is not None and v.type.size]
    plain = (len(operands), len(results)) == (len(node.operands), len(node.results))
    if not plain or len(operands) != len(node.instruction.operands):
        return iter(())
    return batches(node.instruction, operands, results, parts)


def sizes(node: Node, cut: Batch) -> Sequence[int]:
    """The sizes of the cut dimensions: all must be a multiple of the number of parts."""
    given = [operand_shape(node, i)[d] for i, d in enumerate(cut.operands) if d is not None]
    made = [v.type.shape[d] for v, d in zip(node.results, cut.along, strict=True) if v.type]
    return given + made
