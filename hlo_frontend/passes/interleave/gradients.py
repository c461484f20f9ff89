"""What ties the pipeline of a backward pass to that of the forward pass, and where its gradients go.

Its layers read slices that the layers of the forward pass gave (residuals), which the forward loop has put
into stacks by iteration, and from there in the backward loop's iterations come to them: `find_operands`
follows each of them for each run on each device to what made it. They must come from the run of the same
layers, of the same microbatch for all of a run's residuals and all runs of a microbatch.

Gradients of weights are what layers give, slice by slice, added to a sum in each iteration (`find_sums`). In
iterations in which a device has no microbatch what it adds must be known to be zero, or it is refused: what
a stage computes on padding is not computed any more, and ``0 * x`` need not be zero. A sum that begins as
positive zeros never is a negative zero, so that adding zeros to it, or not, makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ...values import Node
from .chains import Execution, Followed, Source
from .constants import Constant
from .parts import Kept, Part
from .refusal import Refusal


def find_operands(followed: Followed, part: Part, parts: Sequence[Part]) -> None:
    """Fill in ``weights`` and ``shared``: what the layers of a part take. Raises `Refusal`."""
    layers = part.layers
    given = layers.loop.operands[0].operands
    for i in [*layers.weights, *layers.shared]:
        found: Constant | Kept
        if part.constants.has(given[i]):
            found = Constant(given[i], part.loop.instruction)
        else:
            found = _operand(followed, part, parts, i)
        if i in layers.weights:
            part.weights[i] = found
        elif isinstance(found, Kept):
            raise Refusal(
                f"all layers of a stage share {given[i].describe()}, which other layers gave"
            )
        else:
            part.shared[i] = found


def _operand(followed: Followed, part: Part, parts: Sequence[Part], i: int) -> Constant | Kept:
    """What an operand of the layers is that is not constant by what computes it."""
    given = part.layers.loop.operands[0].operands[i]
    value = part.stage.operands[i]
    sources = [followed.of(part.loop, value, run) for run in part.live]
    first = sources[0]
    made = first.made
    same = all(
        (s.loop, s.made.node, s.made.leaf, s.begin) == (first.loop, made.node, made.leaf, first.begin)
        and s.made.slot is None
        and not s.made.plus
        and s.made.at.device == run.device
        for s, run in zip(sources, part.live, strict=True)
    )  # fmt: skip
    changes = Refusal(
        f"{given.describe()}, which its layers take, changes from iteration to iteration"
    )
    if not same:
        raise changes
    if made.node is None:
        instruction = first.loop.instruction.operands[0].operands[made.leaf]
        return _sized(Constant(instruction, None), given, changes)
    owner = next((p for p in parts if p.stage is made.node), None)
    if owner is not None and owner is not part and made.leaf in owner.layers.stacked:
        if value.type != made.node.results[made.leaf].type:
            raise changes
        order = _order(part, owner, sources, given.describe())
        return Kept(owner.name, made.leaf, order)
    if made.node.instruction.opcode == "while":
        raise Refusal(
            f"{given.describe()}, which its layers take, is kept by {made.node.instruction.describe()} "
            f"in the loop %{first.loop.instruction.name}, which is not interleaved"
        )
    home = next((p for p in parts if p.loop is first.loop), None)
    inside = (
        home is not None and made.node.instruction.computation is home.loop.instruction.called[0]
    )
    if home is None or not inside or not home.constants.has(made.node.instruction):
        raise changes
    return _sized(Constant(made.node.instruction, home.loop.instruction), given, changes)


def _sized(constant: Constant, given: object, refusal: Refusal) -> Constant:
    """The constant, which must be the value that is taken but for its dimensions."""
    shape, wanted = constant.value.shape, given.shape  # type: ignore[attr-defined]
    if shape.element_type != wanted.element_type or prod(shape.dimensions) != prod(
        wanted.dimensions
    ):
        raise refusal
    return constant


def _order(part: Part, owner: Part, sources: Sequence[Source], what: str) -> tuple[int, ...]:
    """By microbatch of ``part``: the number of it in the pipeline ``owner``, which keeps what it reads."""
    opposite = part.layers.reverse != owner.layers.reverse
    stages = len(part.groups[0])
    wrong = (
        f"{what}, which its layers take, is not what the same layers kept for the same microbatch"
    )
    if {g[::-1] if opposite else g for g in part.groups} != set(owner.groups) or (
        part.layers.count != owner.layers.count
    ):
        raise Refusal(f"{wrong}: the stages are others")
    order: dict[int, int] = {}
    for run, source in zip(part.live, sources, strict=True):
        microbatch, stage = part.places[run]
        if source.made.at not in owner.places:
            raise Refusal(f"{wrong}{_when(run)}")
        kept, at = owner.places[source.made.at]
        if at != (stages - 1 - stage if opposite else stage):
            raise Refusal(f"{wrong}{_when(run)}")
        if order.setdefault(microbatch, kept) != kept:
            raise Refusal(f"{wrong}{_when(run)}")
    if sorted(order.values()) != list(range(len(owner.enters))):
        raise Refusal(wrong)
    return tuple(order[m] for m in range(len(part.enters)))


def _when(run: Execution) -> str:
    return f": on device {run.device} in iteration {run.iteration}"


def find_sums(followed: Followed, part: Part, num_devices: int) -> None:
    """Fill in ``sums``: the carries in which what layers give is summed up over microbatches."""
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


def _sums_up(followed: Followed, part: Part, num_devices: int, leaf: int, carry: int) -> bool:
    """Whether the carry is the sum of what the stage gives as ``leaf``, by all its runs, and of zeros."""
    block = part.loop.blocks[1]
    parameter, result = block.parameters[carry], block.results[carry].root
    node = result.node
    if node is None or node.instruction.opcode != "add":
        return False
    roots = [o.root for o in node.operands]
    if roots.count(parameter) != 1:
        return False
    used = [n for n in block.nodes if any(o.root in (parameter, result) for o in n.operands)]
    if used != [node] or [r.root for r in block.results].count(result) != 1:
        return False
    if any(r.root is parameter for r in block.results):
        return False
    added = node.operands[1 - roots.index(parameter)]
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
