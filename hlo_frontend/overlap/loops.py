"""What a loop's form tells: how often it runs, what that takes, and which values its body makes anew.

XLA annotates loops with their trip counts late in its pipeline; a post-SPMD module has none yet. The
form read here is the one that ``scan`` and ``fori_loop`` make: a counter that begins with a constant,
gains a constant in each iteration, and is compared with a constant.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..graph import Instruction, trip_count
from ..schema import LiteralProto
from ..values import BlockGraph, Node, NodeKind, Value


def trips_of(loop: Node) -> int | None:
    """The number of iterations of a loop node, or None where it is not a constant of the module."""
    annotated = trip_count(loop.instruction)
    if annotated is not None:
        return annotated
    condition, body = loop.blocks
    if len(condition.results) != 1:
        return None
    test = condition.results[0].root.node
    if test is None or test.instruction.opcode != "compare":
        return None
    left, right = (value.root for value in test.operands)
    direction = test.instruction.proto.comparison_direction
    if left not in condition.parameters:
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if left not in condition.parameters:
        return None
    counter = condition.parameters.index(left)
    first = _constant(loop.operands[counter])
    bound = _constant(right)
    step = _step(body, counter)
    if first is None or bound is None or not step:
        return None
    match direction:
        case "LT" if step > 0:
            return max(0, -(-(bound - first) // step))
        case "LE" if step > 0:
            return max(0, (bound - first) // step + 1)
        case "GT" if step < 0:
            return max(0, -((bound - first) // -step))
        case "GE" if step < 0:
            return max(0, (first - bound) // -step + 1)
    return None


def _step(body: BlockGraph, counter: int) -> int | None:
    """What an iteration adds to the counter."""
    node = body.results[counter].root.node
    if node is None or node.instruction.opcode != "add":
        return None
    left, right = (value.root for value in node.operands)
    parameter = body.parameters[counter]
    if left is parameter:
        return _constant(right)
    return _constant(left) if right is parameter else None


def _constant(value: Value) -> int | None:
    """The value of a scalar integer constant."""
    node = value.root.node
    if node is None or node.kind is not NodeKind.CHEAP:
        return None
    return _scalar(node.instruction)


def _scalar(instruction: Instruction) -> int | None:
    if instruction.opcode != "constant" or instruction.shape.dimensions:
        return None
    literal = LiteralProto.FromString(instruction.proto.literal)
    values = [*literal.s32s, *literal.s64s]
    return values[0] if len(values) == 1 else None


def control_flow_seconds(node: Node, seconds: Sequence[float]) -> float:
    """What a loop or branch takes whose blocks take ``seconds``. A loop of known length runs no condition; of
    one of unknown length it is an iteration."""
    if node.kind is not NodeKind.LOOP:
        return max(seconds, default=0.0)
    condition, body = seconds
    trips = trips_of(node)
    return condition + body if trips is None else body * trips


def carries_of(body: BlockGraph) -> tuple[int, ...]:
    """Positions of what a body takes and gives anew: its memory is the body's own, to free or to update."""
    pairs = zip(body.parameters, body.results, strict=True)
    return tuple(k for k, (parameter, result) in enumerate(pairs) if result.root is not parameter)


def blocks_of(node: Node) -> tuple[tuple[BlockGraph, tuple[int, ...]], ...]:
    """The blocks of a loop or branch, each with the positions of those of its parameters that are its own."""
    loop = node.kind is NodeKind.LOOP
    return tuple(
        (block, carries_of(block) if loop and number else ())
        for number, block in enumerate(node.blocks)
    )
