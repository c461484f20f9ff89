"""Makes segments that differ only in the offsets of slices and pads one segment, with offsets as an input.

Layers that are unrolled over stacked weights each read their own slice of a weight, and pad the gradient to
its place. Without this, each layer would be compiled. The offsets that differ are one input, a vector of s32,
which the first segment of the block makes. Slices become dynamic slices. Pads of a dimension with one element
become selections by index; segments with other pads are not shared. Results are the same bit for bit.

Invariant: offsets lie within bounds, so nothing is clamped. Which segments are shared follows from the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from stretto.collectives.types import TensorType

from .builder import fill, shape_of
from .carve import BlockPlan, SegmentPlan
from .graph import Instruction
from .likeness import Likeness
from .schema import HloInstructionProto, LiteralProto
from .segments import ModuleBuilder
from .values import Node, NodeKind, Value, operand_shape, result_shape

# How many segments with different offsets are worth the input, which costs a little in each run.
LEAST_SHARED = 3
_MOST = 2**31

Row = tuple[int, ...]
# The offset in each dimension; None if it cannot be an input.
Starts = tuple[int | None, ...]


def share(plan: BlockPlan, likeness: Likeness) -> None:
    """Give equal segments of a block, and of those inside it, their offsets as inputs. ``likeness``: by which
    plans of its module are compared."""
    for inner in plan.blocks.values():
        for block in inner:
            share(block, likeness)
    groups: dict[Hashable, list[tuple[SegmentPlan, dict[Node, Starts]]]] = {}
    for step, starts in _candidates(plan):
        key = likeness.key(step, starts)
        if key is None:
            module = ModuleBuilder().plan(step, without_offsets=starts)
            key = module.SerializeToString(deterministic=True)
        groups.setdefault(key, []).append((step, starts))
    vectors: dict[Row, Value] = {}
    changed: set[SegmentPlan] = set()
    for members in groups.values():
        rows = [[at or 0 for found in starts.values() for at in found] for _, starts in members]
        if len({tuple(row) for row in rows}) < LEAST_SHARED:
            continue
        columns = list(zip(*rows, strict=True))
        numbers: dict[Row, int] = {}  # of columns that differ between members, equal ones once
        for column in columns:
            if len(set(column)) > 1:
                numbers.setdefault(column, len(numbers))
        for number, (step, starts) in enumerate(members):
            vector = tuple(column[number] for column in numbers)
            value = vectors.setdefault(vector, Value(TensorType("s32", (len(vector),))))
            left = iter(columns)
            told = {
                node: tuple(numbers.get(next(left)) for _ in found)
                for node, found in starts.items()
            }
            step.offsets = {n: at for n, at in told.items() if any(k is not None for k in at)}
            step.inputs.append(value)
            changed.add(step)
    if vectors:
        _make(plan, vectors, changed)


def _candidates(plan: BlockPlan) -> list[tuple[SegmentPlan, dict[Node, Starts]]]:
    """The segments with slices or pads, and these, but for those of which too few have the same opcodes: to
    build their modules would take longer."""
    found: list[tuple[SegmentPlan, dict[Node, Starts]]] = []
    alike: Counter[tuple[str, ...]] = Counter()
    for step in plan.steps:
        if isinstance(step, SegmentPlan) and not step.offsets:
            starts = {node: at for node in step.nodes if (at := _starts(node)) is not None}
            if starts:
                found.append((step, starts))
                alike[_opcodes(step)] += 1
    return [one for one in found if alike[_opcodes(one[0])] >= LEAST_SHARED]


def _opcodes(step: SegmentPlan) -> tuple[str, ...]:
    return tuple([node.instruction.opcode for node in step.nodes])


def _starts(node: Node) -> Starts | None:
    """The offsets of a plain slice or pad; None for other nodes."""
    if node.instruction.opcode not in ("slice", "pad"):
        return None
    proto = node.instruction.proto
    if node.instruction.opcode == "slice":
        plain = all(d.stride in (0, 1) for d in proto.slice_dimensions)
        starts: Starts = tuple(d.start for d in proto.slice_dimensions)
    else:
        dimensions = proto.padding_config.dimensions
        plain = all(
            d.interior_padding == 0 and min(d.edge_padding_low, d.edge_padding_high) >= 0
            for d in dimensions
        )
        starts = tuple(
            d.edge_padding_low if size == 1 < whole else None
            for d, size, whole in zip(
                dimensions, operand_shape(node), result_shape(node), strict=True
            )
        )
    told = any(at is not None for at in starts) and max(result_shape(node), default=0) < _MOST
    moves = operand_shape(node) != result_shape(node)
    small = max(operand_shape(node), default=0) < _MOST
    return starts if plain and told and moves and small else None


def _make(plan: BlockPlan, vectors: dict[Row, Value], changed: set[SegmentPlan]) -> None:
    """Have the first segment make the vectors, or a new one before it if the first one reads some itself."""
    first = next(step for step in plan.steps if isinstance(step, SegmentPlan))
    if first in changed or first.valid:
        first = SegmentPlan()
        plan.steps.insert(0, first)
    like = next(step for step in plan.steps if step in changed).nodes[0].instruction
    for vector, value in vectors.items():
        first.made.append((value, _constant(vector, like)))
        first.outputs.append(value)


def _constant(vector: Sequence[int], like: Instruction) -> Value:
    """A cheap value in the computation of ``like``."""
    type = TensorType("s32", (len(vector),))
    literal = LiteralProto(s32s=vector, shape=shape_of(type)).SerializeToString()
    proto = fill(HloInstructionProto(name="offsets"), "constant", shape_of(type), literal=literal)
    node = Node(NodeKind.CHEAP, Instruction(proto, like.computation), -1)
    node.results = [Value(type, node)]
    return node.results[0]
