"""Analyses a stage that the backward pass recomputes (`jax.checkpoint` of a stage).

The backward loop then has two loops over layers. The first one runs the stage as the forward pass did, from
the same initial values, and its layers give the residuals that the layers of the second one read. With a
policy that keeps some of what the layers gave there, the first loop reads that.
`find_again` proves that the initial values of the first one are, in each run, those of the same layers in the
forward pass, for the same microbatch. In the interleaved loops each chunk is recomputed from the chunk's
initial values, which the forward loop keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..values import Node
from .chains import Execution, Followed
from .constants import Constant
from .layers import layer_loop
from .operands import operand
from .parts import Again, Kept, Own, Part, Recomputed
from .refusal import Refusal


def find_again(followed: Followed, part: Part, parts: Sequence[Part], node: Node) -> Again:
    """The recomputation by ``node`` in the body of a part's loop. Raises `Refusal`."""
    layers = layer_loop(node.instruction, followed.reader)
    own = part.layers
    name = f"the loop %{node.instruction.name}, which computes a stage again,"
    for taken in part.weights.values():
        if isinstance(taken, Recomputed) and taken.leaf not in layers.stacked:
            raise Refusal(f"{name} gives more than what its layers keep")
    if layers.count != own.count or layers.reverse == own.reverse:
        raise Refusal(f"{name} does not go through the layers the other way")
    body = part.loop.instruction.called[0]
    if node.instruction.computation is not body or node.instruction.operands[0].opcode != "tuple":
        raise Refusal(f"{name} is not a loop of its own")
    given = node.instruction.operands[0].operands
    weights: dict[int, Constant | Kept | Own] = {}
    shared: dict[int, Constant | Own] = {}
    for i in [*layers.weights, *layers.shared]:
        found = operand(followed, part, parts, node, i)
        if isinstance(found, Constant | Own) and i in layers.shared:
            shared[i] = found
        elif isinstance(found, Constant | Kept | Own) and i in layers.weights:
            weights[i] = found
        else:
            raise Refusal(f"{given[i].describe()}, which {name} takes, is given by other layers")
    inputs = _inputs(followed, part, parts, node, layers.passed)
    begun = {
        i: Own(node, i, f"{given[i].describe()}, with which {name} begins, is not what a stage began with")
        for i in layers.passed if i not in inputs
    }  # fmt: skip
    return Again(
        node,
        layers,
        weights,
        shared,
        inputs,
        begun,
    )


def _inputs(
    followed: Followed, part: Part, parts: Sequence[Part], node: Node, passed: Sequence[int]
) -> dict[int, Kept]:
    taken = [_sources(followed, part, node, i, part.live) for i in passed]
    wrong = Refusal(
        f"the loop %{node.instruction.name} does not compute again what a pipeline that is interleaved did"
    )
    for owner in parts:
        if owner is part or owner.layers.reverse == part.layers.reverse:
            continue
        if {g[::-1] for g in part.groups} != set(owner.groups):
            continue
        begun = [_sources(followed, owner, owner.stage, i, owner.live) for i in owner.layers.passed]
        leaves = [next((j for j, b in enumerate(begun) if set(t.values()) <= set(b.values())), None)
                  for t in taken]  # fmt: skip
        kept: dict[int, Kept] = {}
        for i, j, own in zip(passed, leaves, taken, strict=True):
            order = None if j is None else _order(part, owner, own, begun[j])
            if j is not None and order is not None:
                kept[i] = Kept(owner.name, owner.layers.passed[j], order)
        if kept:
            return kept
    raise wrong


Sources = dict[Execution, object]


def _sources(
    followed: Followed, part: Part, node: Node, operand: int, runs: Sequence[Execution]
) -> Sources:
    """For each run, a key of the operand's origin, equal for equal origins."""
    found: Sources = {}
    for run in runs:
        found[run] = followed.of(part.loop, node.operands[operand], run).key
    return found


def _order(part: Part, owner: Part, taken: Sources, begun: Sources) -> tuple[int, ...] | None:
    """For each microbatch of ``part``: that of ``owner`` with the same inputs in all stages, or None."""
    stages = len(part.groups[0])
    by_place: dict[tuple[int, int], list[object]] = {}
    for run, source in begun.items():
        m, stage = owner.places[run]
        by_place.setdefault((m, stage), []).append(source)
    order: dict[int, int] = {}
    for run, source in taken.items():
        m, stage = part.places[run]
        fits = [k for k in range(len(owner.enters)) if source in by_place[k, stages - 1 - stage]]
        if len(fits) != 1 or order.setdefault(m, fits[0]) != fits[0]:
            return None
    if sorted(order.values()) != list(range(len(owner.enters))):
        return None
    return tuple(order[m] for m in range(len(part.enters)))
