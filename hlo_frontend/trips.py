"""Trip counts of loops, if they follow from the module.

XLA annotates loops with their trip counts late in its pipeline; a module right behind the SPMD partitioner
has no annotations. For such a loop the form is recognized that ``scan`` and ``fori_loop`` make: a counter
begins with a constant, grows by a constant in each iteration, and is compared with a constant.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from .graph import Instruction
from .schema import LiteralProto
from .values import BlockGraph, Node, NodeKind, Value

# Of a conditional of two branches that a pass makes: `expected_shares`.
SHARE = "stretto_share"
# Of a loop that a pass makes, how often it runs, where compilers are not to know.
TRIPS = "stretto_trips"


def annotated_trips(loop: Instruction) -> int | None:
    """The number of iterations that XLA found for a while, or None."""
    config = loop.proto.backend_config
    if not config.startswith(b"{"):
        return None
    try:
        return int(json.loads(config)["known_trip_count"]["n"])
    except (KeyError, ValueError, TypeError):
        return None


def expected_trips(call: Instruction) -> int:
    """How often a call or a loop runs its computation; once if that is not known."""
    known = annotated_trips(call)
    return int(call.attributes.get(TRIPS, 1)) if known is None else known


def expected_shares(conditional: Instruction, costs: Sequence[float]) -> list[float]:
    """In what share of its executions a conditional takes each branch: as a pass of ours says by `SHARE`, or
    always the one that costs most. ``costs``: of each branch."""
    share = annotated_share(conditional)
    if share is not None:
        return [share, 1 - share]
    most = max(range(len(costs)), key=costs.__getitem__, default=0)
    return [float(k == most) for k in range(len(costs))]


def annotated_share(conditional: Instruction) -> float | None:
    """The share of the first of two branches, None where that is not known."""
    share = conditional.attributes.get(SHARE)
    return None if share is None else float(share)


def trip_count(loop: Node) -> int | None:
    """The number of iterations of a loop node, or None where it is not a constant of the module."""
    annotated = annotated_trips(loop.instruction)
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
            trips = -(-(bound - first) // step)
        case "LE" if step > 0:
            trips = (bound - first) // step + 1
        case "GT" if step < 0:
            trips = -((bound - first) // -step)
        case "GE" if step < 0:
            trips = (first - bound) // -step + 1
        case _:
            return None
    trips = max(0, trips)
    return trips if _is_in_range(first + trips * step, left) else None


def _is_in_range(end: int, counter: Value) -> bool:
    """Whether a counter that ends here has not wrapped around."""
    assert counter.type is not None
    limits = np.iinfo(counter.type.numpy)
    return limits.min <= end <= limits.max


def _step(body: BlockGraph, counter: int) -> int | None:
    """The number that an iteration adds to the counter."""
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
    instruction = node.instruction
    if instruction.opcode != "constant" or instruction.shape.dimensions:
        return None
    literal = LiteralProto.FromString(instruction.proto.literal)
    values = [*literal.s32s, *literal.s64s]
    return values[0] if len(values) == 1 else None
