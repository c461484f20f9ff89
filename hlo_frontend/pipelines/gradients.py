"""Analyses the pipeline of a backward pass: its residuals from the forward pass, and its sums of gradients.

Residuals are slices that layers of the forward pass gave. The forward loop stacks them by iteration, and the
backward loop reads them from there. `find_operands` traces each residual, for each run on each device, to its
origin (see `operands`). It must come from the run of the same layers. All residuals of a run, and those of
all runs of a microbatch, must come from the same microbatch of the forward pass.

Gradients of weights are slices that layers give, and that each iteration adds to a sum (`find_sums`). In
iterations in which a device has no microbatch, it must add values that are known to be zero; otherwise the
loop is refused, since the new loop does not compute on padding, and ``0 * x`` need not be zero. A sum that
begins as positive zeros is never a negative zero, so adding zeros to it makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..values import Node, Value
from .chains import Execution, Followed
from .constants import Constant
from .operands import operand
from .parts import Own, Part, Recomputed
from .recomputed import find_again
from .refusal import Refusal


def find_operands(followed: Followed, part: Part, parts: Sequence[Part]) -> None:
    """Set ``weights``, ``shared`` and ``again``: the operands of a part's layers. Raises `Refusal`."""
    layers = part.layers
    for i in [*layers.weights, *layers.shared]:
        found = operand(followed, part, parts, part.stage, i)
        if i in layers.weights:
            part.weights[i] = found
        elif isinstance(found, Constant | Own):
            part.shared[i] = found
        else:
            given = layers.loop.operands[0].operands[i]
            raise Refusal(
                f"all layers of a stage share {given.describe()}, which other layers gave"
            )
    again = {w.node for w in part.weights.values() if isinstance(w, Recomputed)}
    if len(again) > 1:
        raise Refusal("a stage is computed again by more than one loop over layers")
    if again:
        part.again = find_again(followed, part, parts, again.pop())


def find_sums(followed: Followed, part: Part, num_devices: int) -> None:
    """Set ``sums``: the carries that sum up slices of layers over microbatches."""
    for leaf in sorted(part.given):
        carries = range(len(part.loop.blocks[1].parameters))
        found = next((c for c in carries if _sums_up(followed, part, num_devices, leaf, c)), None)
        if found is not None:
            part.sums[leaf] = found


def sum_node(part: Part, carry: int) -> Node:
    """The addition of a sum."""
    node = part.loop.blocks[1].results[carry].root.node
    assert node is not None
    return node


def adds_up(part: Part, carry: int) -> Value | None:
    """What each iteration adds to a carry that is a sum, which only the addition reads; None if it is not."""
    block = part.loop.blocks[1]
    parameter, result = block.parameters[carry], block.results[carry].root
    node = result.node
    if node is None or node.instruction.opcode != "add":
        return None
    roots = [o.root for o in node.operands]
    if roots.count(parameter) != 1:
        return None
    used = [n for n in block.nodes if any(o.root in (parameter, result) for o in n.operands)]
    if used != [node] or [r.root for r in block.results].count(result) != 1:
        return None
    if any(r.root is parameter for r in block.results):
        return None
    return node.operands[1 - roots.index(parameter)]


def _sums_up(followed: Followed, part: Part, num_devices: int, leaf: int, carry: int) -> bool:
    """Whether the carry is the sum of result ``leaf`` of all runs of the stage, and of zeros."""
    added = adds_up(part, carry)
    if added is None:
        return False
    origins = followed.origins[part.loop]
    live = set(part.live)
    for t in range(part.trips):
        for d in range(num_devices):
            at = Execution(t, d)
            if origins.is_zero(added, at):
                if at in live:
                    return False
                continue
            made = origins.of(added, at)
            if (made.node, made.leaf, made.at, made.slot) != (part.stage, leaf, at, None):
                return False
            if at not in live:
                return False
    return followed.begins_with_zeros(part.loop, carry, num_devices)
