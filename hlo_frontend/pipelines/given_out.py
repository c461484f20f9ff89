"""Leaves out the permutes by which what one stage has goes to all behind a loop, and back.

Of outputs that stages give side by side, ``out_specs=P("stage")``, of which the program takes those of the
last stage, ``outputs[-1]``, XLA's partitioner makes a permute from that stage to the first one, and an
all-reduce to which the others give zeros; going back, a permute from the first one of a gradient that all
stages compute alike. Here

- a device that gives to an all-reduce what another member of its group has sent to it, where the others give
  zeros, gives zeros too, and the other member what it has sent. The sum has the same terms in another order,
  all but one of which are positive zeros;
- what a device is sent of a value of which it has a copy (`Copies`), it takes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.collectives.ops import Kind, Reduction

from ..graph import Module
from ..passes.bytes.copies import Copies
from ..shardings import shardings_of
from ..values import BlockGraph, Node
from .cones import Made, Moving, Share, written
from .kept_stacks import users_of
from .places import Places


def given_out(module: Module, entry: BlockGraph, places: Places) -> bytes | None:
    """The module with one permute of its entry computation less; None if there is none to leave out.
    ``entry``: its graph, of a program without replicas; ``places``: of it."""
    if not any(map(_is_permute, entry.nodes)):
        return None
    copies = Copies(entry, places.known, places.count, shardings_of(module, 1))
    moving = Moving(entry, module.entry, places, copies)
    sums = (_summed(moving, node) for node in entry.nodes)
    made = next(filter(None, sums), None) or _copied(moving)
    return None if made is None else written(module, module.entry, made, places.count)


def _is_permute(node: Node) -> bool:
    return node.collective is not None and node.collective.kind is Kind.PERMUTE


def _copied(moving: Moving) -> Made | None:
    """The last value of which each device has all that it is sent."""
    for node in moving.last_first():
        cone = moving.cone(node)
        if cone is None or not any(map(_is_permute, cone.nodes)):
            continue
        parts = moving.parts(node, cone)
        if parts and all(source == target for part in parts for source, target in part.pairs):
            return Made([node.instruction], parts, cone.collectives[0])
    return None


def _summed(moving: Moving, reduced: Node) -> Made | None:
    """What members of groups give to an all-reduce of what others have sent to them."""
    collective = reduced.collective
    if (
        collective is None
        or collective.kind is not Kind.ALL_REDUCE
        or collective.reduction is not Reduction.SUM
        or collective.valid_iterations
    ):
        return None
    for operand in reduced.operands:
        node = operand.root.node
        if node is None or node not in moving.received or len(node.results) != 1:
            continue
        cone = moving.cone(node)
        if cone is None or users_of(node.instruction) != [reduced.instruction]:
            continue
        parts = moving.parts(node, cone) or []
        if len(parts) == 1 and _by_others(parts[0], collective.groups):
            (part,) = parts
            at_home = Share(part.source, tuple((source, source) for source, _ in part.pairs))
            return Made([node.instruction], [at_home], cone.collectives[0])
    return None


def _by_others(part: Share, groups: Sequence[Sequence[int]]) -> bool:
    """Whether one member of a group at most gives something, which another member has sent to it."""
    source_of = {target: source for source, target in part.pairs}
    for group in groups:
        giving = [device for device in group if device in source_of]
        if len(giving) > 1 or any(source_of.pop(device) not in group for device in giving):
            return False
    return not source_of and all(source != target for source, target in part.pairs)
