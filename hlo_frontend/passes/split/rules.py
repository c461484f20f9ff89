"""Which nodes compute part after part: what the table of independent dimensions (`passes.bytes.batches`) says
of an op, asked from the cut of one array.

An array is *cut* along a dimension into equal parts (`Cut`). A node can be split along a batch of its op: the
parts of its results are the results of the same op on parts of its operands, and no sum runs over the cut.

Where rows of several sequences become one dimension, `[batch, rows, width]` reshaped to
`[batch * rows, width]`, a part of the rows of each sequence is no longer one stretch of rows, but as many as
there are sequences. So a cut has a number of stretches. Ops that are independent along a dimension work on
any of its rows; only reshapes and bitcasts lead from one number of stretches to another.

A loop without collectives can be split along its carries if its body can (`passes.bytes.loops`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from stretto.collectives.types import TensorType

from ...graph import Instruction, all_instructions
from ...ops import op_of
from ...values import Node, NodeKind
from ..bytes.batches import Batch, batches, memory_order
from ..bytes.loops import loop_batch

# What lies between collectives and products, beside elementwise ops. Others end a region.
_BETWEEN = frozenset(
    {"bitcast", "broadcast", "cholesky", "concatenate", "convolution", "custom-call", "dot"}
    | {"dynamic-slice", "dynamic-update-slice", "fft", "gather", "pad", "reduce", "reduce-window"}
    | {"reshape", "reverse", "scatter", "select-and-scatter", "slice", "sort", "transpose"}
    | {"triangular-solve", "while"}
)
_RESHAPES = ("bitcast", "reshape")


class Cut(NamedTuple):
    """How an array is cut: ``dimension`` is seen as ``[outer, parts, rows]``, and part p has all that is at
    place p of the middle one."""

    dimension: int
    outer: int = 1


class Split(NamedTuple):
    """How a node is split. ``operands``: None for those that are needed whole; ``results``: None for those of
    the whole, which each part has (a loop's counter)."""

    operands: tuple[Cut | None, ...]
    results: tuple[Cut | None, ...]

    @property
    def batch(self) -> Batch:
        """The dimensions alone."""
        return Batch(
            tuple([None if cut is None else cut.dimension for cut in self.operands]),
            tuple([None if cut is None else cut.dimension for cut in self.results]),
        )


def forward(node: Node, position: int, cut: Cut, parts: int) -> Split | None:
    """How a node can be split whose operand ``position`` is cut so, None if it cannot. ``parts``: the least
    number of them."""
    if not _has_rule(node):
        return None
    if node.instruction.opcode in _RESHAPES:
        to = _reshaped(node, cut, parts, back=False)
        return None if to is None else Split((cut,), (to,))
    if node.instruction.opcode == "while":
        return _looped(node, position, cut, parts)
    found = (b for b in _batches(node, parts) if b.operands[position] == cut.dimension)
    return _split(next(found, None), cut.outer)


def backward(node: Node, index: int, cut: Cut, parts: int) -> Split | None:
    """How a node can be split whose result ``index`` is cut so, None if it cannot."""
    if not _has_rule(node):
        return None
    if node.instruction.opcode in _RESHAPES:
        given = _reshaped(node, cut, parts, back=True)
        return None if given is None else Split((given,), (cut,))
    if node.instruction.opcode == "while":
        return _looped(node, index, cut, parts)
    found = (b for b in _batches(node, parts) if b.results[index] == cut.dimension)
    return _split(next(found, None), cut.outer)


def _looped(node: Node, carry: int, cut: Cut, parts: int) -> Split | None:
    """How a loop can be split of which this carry is cut so. Where a part has several stretches, what the
    body does to rows must be the same for each of them: reshapes must keep them apart."""
    batch = loop_batch(node.instruction, carry, cut.dimension, parts)
    if cut.outer > 1 and batch != loop_batch(
        node.instruction, carry, cut.dimension, parts * cut.outer
    ):
        return None
    return _split(batch, cut.outer)


def _split(batch: Batch | None, outer: int) -> Split | None:
    if batch is None:
        return None
    operands = tuple([None if d is None else Cut(d, outer) for d in batch.operands])
    return Split(operands, tuple([None if d is None else Cut(d, outer) for d in batch.results]))


def _reshaped(node: Node, cut: Cut, parts: int, back: bool) -> Cut | None:
    """How the result of a reshape or bitcast is cut where its operand is cut so, or the other way (``back``).

    In memory an array is ``[before, parts, after]``, with all dimensions before the cut, and its ``outer``,
    in ``before``. The cut of the other shape is along the dimension in which that number is reached.
    """
    instruction = node.instruction
    types = node.operands[0].type, node.results[0].type
    if types[0] is None or types[1] is None or types[0].dtype != types[1].dtype:
        return None
    orders = [list(range(len(t.shape))) for t in types if t is not None]
    if instruction.opcode == "bitcast":
        shapes = instruction.operands[0].shape, instruction.shape
        orders = [memory_order(s, len(o)) for s, o in zip(shapes, orders, strict=True)]
    (given, into), (other, out) = zip(types, orders, strict=True)
    if back:
        (given, into), (other, out) = (other, out), (given, into)
    assert given is not None and other is not None
    if not given.size:
        return None
    before = prod(given.shape[d] for d in into[: into.index(cut.dimension)]) * cut.outer
    ahead = 1
    for d in out:
        if before % ahead == 0 and other.shape[d] % (before // ahead * parts) == 0:
            return Cut(d, before // ahead)
        ahead *= other.shape[d]
    return None


def is_heavy(node: Node) -> bool:
    """Whether the time of a node grows faster than its bytes: what messages are hidden behind."""
    if node.kind is not NodeKind.COMPUTE:
        return False
    if node.instruction.opcode == "while":
        return any(is_product(i) for c in node.instruction.called for i in all_instructions(c))
    return is_product(node.instruction)


def is_product(instruction: Instruction) -> bool:
    """Whether it is a product, by itself."""
    return instruction.opcode in ("dot", "convolution")


def _has_rule(node: Node) -> bool:
    opcode = node.instruction.opcode
    if node.kind is not NodeKind.COMPUTE or node.has_side_effect:
        return False
    return opcode in _BETWEEN or op_of(opcode).elementwise


def _batches(node: Node, parts: int) -> Iterator[Batch]:
    operands = [v.type for v in node.operands if v.type is not None]
    results = [v.type for v in node.results if v.type is not None and v.type.size]
    plain = (len(operands), len(results)) == (len(node.operands), len(node.results))
    if not plain or len(operands) != len(node.instruction.operands):
        return iter(())
    return batches(node.instruction, operands, results, parts)


def divides(type: TensorType, cut: Cut, parts: int) -> bool:
    """Whether an array cut so has that many equal parts."""
    return type.shape[cut.dimension] % (cut.outer * parts) == 0


def can_be(node: Node, split: Split, parts: int) -> bool:
    """Whether everything that is cut at a node has that many equal parts. Of a grouped convolution, along
    its groups, each stretch of a part must have whole groups."""
    first = next((cut for cut in split.results if cut is not None), None)
    grouped = node.instruction.opcode == "convolution" and None not in split.operands
    if grouped and first is not None:
        groups = node.instruction.proto.feature_group_count or 1
        if groups % (first.outer * parts):
            return False
    given = [(v.type, cut) for v, cut in zip(node.operands, split.operands, strict=True) if cut]
    made = [(v.type, cut) for v, cut in zip(node.results, split.results, strict=True) if cut]
    if not all(t is not None and divides(t, cut, parts) for t, cut in (*given, *made)):
        return False
    if node.instruction.opcode != "while" or first is None:
        return True
    return _looped(node, split.results.index(first), first, parts) == split
