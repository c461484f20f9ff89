"""The schedule of a program's collectives, and giving a program another order of them.

`schedule_of` lists the collectives of a carved program in their order, with the partial order that data and
tokens require: ``after`` of an entry are the nearest entries above it, through compute and order edges. Loops
and branches that communicate are entries with one child schedule for each of their blocks (condition and body
of a loop); others count as compute. `reorder` gives the blocks the order on which the ranks agreed.

Invariant: positions follow from the module's text alone, so the same module has the same schedule, byte
for byte, in every process.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise

from stretto.collectives.order import CommonOrder, Entry, Schedule, entry_of
from stretto.runtime.errors import InvalidProgramError

from .carve import BlockPlan, RuntimeStep
from .segments import ModuleBuilder
from .topological import topological
from .trips import trip_count
from .values import BlockGraph, Node, NodeKind, number


def schedule_of(block: BlockGraph, plan: BlockPlan) -> Schedule:
    """The schedule of a block that was carved into ``plan``."""
    children = _children(block, plan)
    listed = _listed(plan, children)
    before = _before(block, listed)
    return Schedule(
        tuple(_entry(node, before[node].after, children.get(node, ())) for node in listed)
    )


def token_edges(block: BlockGraph, plan: BlockPlan) -> dict[str, tuple[str, ...]]:
    """For the name of each collective, loop and branch: the names of those that tokens put right before
    it."""
    edges: dict[str, tuple[str, ...]] = {}
    listed = _listed(plan, _children(block, plan))
    for node, before in _before(block, listed).items():
        edges[node.instruction.name] = tuple(listed[i].instruction.name for i in before.tokens)
        for inner, inner_plan in zip(node.blocks, plan.blocks.get(node, ()), strict=True):
            edges |= token_edges(inner, inner_plan)
    return edges


def _children(block: BlockGraph, plan: BlockPlan) -> dict[Node, tuple[Schedule, ...]]:
    children = {}
    for node in block.nodes:
        if node.blocks:
            schedules = tuple(map(schedule_of, node.blocks, plan.blocks[node]))
            if node.kind is NodeKind.LOOP and trip_count(node) is not None:
                schedules = (Schedule(), *schedules[1:])  # the condition is never evaluated
            children[node] = schedules
    return children


def _listed(plan: BlockPlan, children: dict[Node, tuple[Schedule, ...]]) -> list[Node]:
    """The nodes that have an entry, in the plan's order."""
    nodes = [step.node for step in plan.steps if isinstance(step, RuntimeStep)]
    return [n for n in nodes if n.kind is NodeKind.COLLECTIVE or any(children.get(n, ()))]


def _entry(node: Node, after: tuple[int, ...], children: tuple[Schedule, ...]) -> Entry:
    if node.collective is not None:
        return entry_of(node.collective, after, _reducer(node))
    is_loop = node.kind is NodeKind.LOOP
    return Entry(
        kind="loop" if is_loop else "branch",
        key="",
        after=after,
        children=children,
        trip_count=trip_count(node) if is_loop else None,
        name=node.instruction.name,
        source=node.instruction.source,
    )


def _reducer(node: Node) -> str:
    """A digest of a reducer that is not native."""
    if node.reducer is None or node.collective is None:
        return ""
    module = ModuleBuilder().reducer(node.reducer, node.collective.operands)
    return sha256(module.SerializeToString(deterministic=True)).hexdigest()[:16]


@dataclass(frozen=True)
class _Before:
    """Positions of the entries right before an entry; ``tokens``: those that tokens put before it."""

    after: tuple[int, ...]
    tokens: tuple[int, ...]


def _before(block: BlockGraph, listed: list[Node]) -> dict[Node, _Before]:
    """For each listed node, the nearest listed nodes that it comes after.

    Sets of positions are bits of integers: ``nearest`` are those above a node with none between,
    ``ordered`` those of them reached through an order edge, ``above`` all above a listed one.
    """
    position = {node: i for i, node in enumerate(listed)}
    nearest: dict[Node, int] = {}
    ordered: dict[Node, int] = {}
    above = [0] * len(listed)
    found: dict[Node, _Before] = {}
    for node in block.nodes:
        near = by_order = 0
        for other, operand in node.before():
            i = position.get(other)
            reached = nearest.get(other, 0) if i is None else 1 << i
            near |= reached
            by_order |= reached if operand is None else ordered.get(other, 0)
        i = position.get(node)
        if i is None:
            nearest[node], ordered[node] = near, by_order
            continue
        direct, implied = _latest(near, above)
        tokens, _ = _latest(by_order, above)
        above[i] = near | implied
        found[node] = _Before(direct, tokens)
    return found


def _latest(positions: int, above: list[int]) -> tuple[tuple[int, ...], int]:
    """Those of the positions that come before no other one, and all positions before any of them.

    Positions grow along the order, so the highest one left comes before no other.
    """
    latest, implied = [], 0
    while positions:
        last = positions.bit_length() - 1
        latest.append(last)
        implied |= above[last]
        positions &= ~(above[last] | 1 << last)
    return tuple(reversed(latest)), implied


def reorder(
    block: BlockGraph, plan: BlockPlan, order: CommonOrder, path: tuple[int, ...] = ()
) -> None:
    """Make the listed nodes of the block, and of the blocks in it, follow ``order``, by order edges.

    ``plan`` is the plan whose schedule ``order`` permutes; the block must be planned anew afterwards.
    Raises `InvalidProgramError` where the order contradicts the block's data or tokens.
    """
    listed = _listed(plan, _children(block, plan))
    for i, node in enumerate(listed):
        for child, inner in enumerate(node.blocks):
            reorder(inner, plan.blocks[node][child], order, (*path, i, child))
    permutation = order.get(path, tuple(range(len(listed))))
    if sorted(permutation) != list(range(len(listed))):
        raise InvalidProgramError(
            f"{list(permutation)} is no order of the {len(listed)} collectives of a block"
        )
    wanted = [listed[i] for i in permutation]
    for earlier, later in pairwise(wanted):
        later.order = tuple(dict.fromkeys((*later.order, earlier)))
    inside = set(block.nodes)
    before = {node: {b for b, _ in node.before() if b in inside} for node in block.nodes}
    nodes = topological(before, key=lambda node: node.position)
    stuck = inside.difference(nodes)
    if stuck:
        first = min(stuck, key=lambda n: (n.kind is not NodeKind.COLLECTIVE, n.position))
        raise first.instruction.invalid("the order asked for contradicts its data or tokens")
    block.nodes[:] = nodes
    number(nodes)
