"""Which devices of a loop's body communicate with each other.

Permutes connect the stages of a pipeline. Other collectives connect members of groups, which must have the
same place in pipelines that run side by side: then they run the same stage for the same microbatch at the
same time. That is so for what layers communicate, and for what a head does whose rows or classes an axis of
the mesh divides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from stretto.collectives.ops import Collective, Kind

from ..graph import Instruction, all_instructions
from ..groups import connected_components
from ..passes.valid.trace import is_transfer
from ..trips import annotated_trips
from ..values import Node, NodeKind, all_nodes
from .emit import slice_of
from .inline import GROUPED, communicates, other_communication
from .parts import Part
from .refusal import NoLoop, Refusal


def connected(node: Node) -> dict[int, frozenset[int]]:
    """The devices that the permutes of a loop's body connect with each other, by device."""
    return joined(
        pair
        for permute in filter(is_transfer, node.blocks[1].nodes)
        if permute.collective is not None
        for pair in permute.collective.pairs
    )


def joined(pairs: Iterable[tuple[int, int]]) -> dict[int, frozenset[int]]:
    """The devices that pairs of them connect with each other, by device."""
    return {d: frozenset(group) for group in connected_components(pairs) for d in group}


def groups_of(node: Node) -> list[tuple[Node, tuple[int, ...]]]:
    """The groups of a collective, or of those within a loop or a branch, each with its collective."""
    every = [node, *(n for block in node.blocks for n in all_nodes(block))]
    return [
        (n, tuple(group))
        for n in every if n.collective is not None for group in _groups(n.collective)
    ]  # fmt: skip


def _groups(collective: Collective) -> Iterable[Sequence[int]]:
    """Its groups; of a permute, the devices that its pairs connect."""
    if collective.kind is not Kind.PERMUTE:
        return collective.groups
    return map(sorted, connected_components(collective.pairs))


def members(nodes: Iterable[Node]) -> dict[Node, dict[int, frozenset[int]]]:
    """Of these nodes those that communicate among groups: by device, all on whose operands results depend."""
    found = {n: [g for _, g in groups_of(n)] for n in nodes}
    return {
        n: joined((group[0], d) for group in groups for d in group)
        for n, groups in found.items() if groups
    }  # fmt: skip


def loops_of_groups(node: Node) -> list[Node]:
    """Loops in the body of a loop that communicate only by collectives of groups."""
    return [
        n for n in node.blocks[1].nodes
        if n.kind is NodeKind.LOOP and not any(map(other_communication, n.instruction.called))
    ]  # fmt: skip


def side_by_side(node: Node) -> list[Node]:
    """Collectives of groups in the body of a loop of which no two members are stages of one pipeline."""
    ring = connected(node)
    return [
        n for n in node.blocks[1].nodes
        if n.instruction.opcode in GROUPED
        and all(len({ring.get(d, d) for d in group}) == len(group) for _, group in groups_of(n))
    ]  # fmt: skip


def check_rings(node: Node) -> None:
    """Check that collectives in inner loops do not connect stages of one pipeline.

    The devices that permutes connect are the stages of a pipeline; a group may have only one of them.
    """
    ring = connected(node)
    for loop in loops_of_groups(node):
        for inner, group in groups_of(loop):
            if len({ring.get(d, d) for d in group}) < len(group):
                raise Refusal(
                    f"its layers communicate by {inner.instruction.describe()} among devices "
                    f"{list(group)}, of which some are stages of the same pipeline"
                )


def check_groups(part: Part, *, heads: bool) -> None:
    """Check that groups communicate only among devices that run the same layers at the same time: the same
    stages of pipelines that run side by side. ``heads``: whether they may beside the layers too."""
    layers = [part.stage] if part.again is None else [part.stage, part.again.node]
    stage_of = {d: stage for group in part.groups for stage, d in enumerate(group)}
    given = set(slice_of(_given(part, layers), set()))
    for node in [*loops_of_groups(part.loop), *side_by_side(part.loop)]:
        groups = groups_of(node)
        if groups and node not in layers:
            _check_beside(node.instruction, given, heads)
        for inner, group in groups:
            if len({stage_of.get(d) for d in group}) > 1 or group[0] not in stage_of:
                raise Refusal(
                    f"its layers communicate by {inner.instruction.describe()} among devices "
                    f"{list(group)}, which are of different stages"
                )


def _given(part: Part, layers: Iterable[Node]) -> list[Instruction]:
    """What layers are given, but for what a microbatch begins its way back with, which a head may compute."""
    pipeline = part.pipeline()
    begins = pipeline.sent if pipeline.kept else ()
    return [
        value
        for node in layers
        for n, value in enumerate(node.instruction.operands[0].operands)
        if node is not part.stage or n not in begins
    ]


def _check_beside(instruction: Instruction, given: Collection[Instruction], heads: bool) -> None:
    if instruction.opcode == "while" and not (heads and is_in_step(instruction)):
        raise Refusal(
            f"it communicates within {instruction.describe()}, which is no loop over the layers of a stage"
        )
    if instruction in given:
        raise NoLoop(
            f"it communicates by {instruction.describe()}, not only by permutes, for what layers are given",
            instruction.name,
        )


def is_in_step(loop: Instruction) -> bool:
    """Whether all devices that run a loop communicate in it as often, whatever it computes."""
    inner = [loop, *(i for c in loop.called for i in all_instructions(c))]
    return not any(
        annotated_trips(i) is None
        if i.opcode == "while"
        else i.opcode == "conditional" and any(map(communicates, i.called))
        for i in inner
    )
