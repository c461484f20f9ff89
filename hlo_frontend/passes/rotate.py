"""Pipelines loops: a permute that only the next iteration reads is awaited in that iteration.

In the loop of a pipeline, a device sends data at the end of an iteration that its neighbour reads in the next
one. Such a permute becomes a start whose results are carries in flight (`runtime.program.Carried`), and the
body is divided into three phases: first the nodes that do not depend on carries in flight; then, behind the
wait, the nodes that the permutes' operands need; then, behind their starts, all other nodes. So the transfer
runs beside the last phase and the first phase of the next iteration.

Invariants: phases never decrease along data and order. Neither the loop's condition nor a node of the first
phase reads a carry in flight. The result follows from the text of the module.
"""

from __future__ import annotations

from collections.abc import Collection

from stretto.collectives.ops import Kind

from ..flops import flops_of
from ..trips import trip_count
from ..values import BlockGraph, Node, NodeKind, Value, all_nodes, carried_results

# How many operations must be there to hide a transfer: about what a core does while a message is handed to
# the stream's thread and arrives from the next process.
LEAST_HIDDEN_FLOPS = 5e5
# Streams for crossing permutes, beside that of all other collectives: a ring and its reverse do not wait for
# each other.
STREAMS = 2


def rotate(block: BlockGraph, left: Collection[Node] = ()) -> bool:
    """Pipeline the loops in a block and in the blocks inside it, except those in ``left``: set ``phases`` and
    ``crossing`` of their bodies. Whether any loop was pipelined.
    """
    loops = [n for n in all_nodes(block) if n.kind is NodeKind.LOOP and n not in left]
    return any([_rotate(loop) for loop in loops])


def _rotate(loop: Node) -> bool:
    condition, body = loop.blocks
    tested = condition if trip_count(loop) is None else None
    chosen = crossing(body, tested, (Kind.PERMUTE,))
    while chosen:
        phases = _phases(body, chosen)
        late = [node for node in chosen if phases[node] != 1]
        if not late:
            break
        for node in late:
            del chosen[node]
    if not chosen:
        return False
    hidden = [_flops(body, phases, 0), _flops(body, phases, 2)]
    if sum(hidden) < LEAST_HIDDEN_FLOPS:
        return False
    # A phase that hides little is not worth a segment.
    for phase, flops in zip((0, 2), hidden, strict=True):
        if flops < LEAST_HIDDEN_FLOPS / 2:
            _fold(body, chosen, phases, phase)
    body.phases.update(phases)
    body.crossing.update(chosen)
    return True


def crossing(
    body: BlockGraph, condition: BlockGraph | None, kinds: Collection[Kind] = tuple(Kind)
) -> dict[Node, tuple[tuple[int, int], ...]]:
    """The collectives of these kinds whose results are carries of the loop that nothing in the body reads,
    with (result, carry) pairs. ``condition``: that of the loop, if it is evaluated; it must not read them."""
    read = {v.root for node in body.nodes for v in node.operands}
    tested: set[Value] = set()
    if condition is not None:
        own = {v.root for node in condition.nodes for v in node.operands}
        own.update(v.root for v in condition.results)
        tested = {body.parameters[k] for k, p in enumerate(condition.parameters) if p in own}
    found: dict[Node, tuple[tuple[int, int], ...]] = {}
    for node in body.nodes:
        if node.collective is None or node.collective.kind not in kinds:
            continue
        carries = carried_results(node, body.results)
        if not carries or read.intersection(node.results):
            continue
        if tested.intersection(body.parameters[k] for _, k in carries):
            continue
        found[node] = carries
    return found


def _phases(body: BlockGraph, chosen: dict[Node, tuple[tuple[int, int], ...]]) -> dict[Node, int]:
    arriving = {body.parameters[k] for carries in chosen.values() for _, k in carries}
    needed: set[Node] = set(chosen)
    for node in reversed(body.nodes):
        if node in needed:
            needed.update(before for before, _ in node.before())
    phases: dict[Node, int] = {}
    for node in body.nodes:
        phase = 0
        if any(v.root in arriving for v in node.operands) or node in chosen:
            phase = 1
        for before, _ in node.before():
            after_start = before in chosen and node not in chosen
            phase = max(phase, 2 if after_start else phases.get(before, 0))
        if phase == 1 and node not in needed:
            phase = 2
        phases[node] = phase
    return phases


def _flops(body: BlockGraph, phases: dict[Node, int], phase: int) -> float:
    """Operations of a phase."""
    own = (n.instruction for n in body.nodes if n.kind is NodeKind.COMPUTE and phases[n] == phase)
    return flops_of(own)


def _fold(body: BlockGraph, chosen: Collection[Node], phases: dict[Node, int], phase: int) -> None:
    """Merge a phase into the middle one, unless collectives or their order forbid it."""
    own = [node for node in body.nodes if phases[node] == phase]
    if any(node.is_runtime or any(b in chosen for b, _ in node.before()) for node in own):
        return
    for node in own:
        phases[node] = 1
