"""What the pass decides for a program, told by the driver that plans programs when they are compiled.

`explained` plans a block with `apply.plan` and gives of it and of every block inside it the steps as they
run, what they take, what the block took as it was written, and a floor. Blocks without a plan are told too,
in the order that they keep.

Invariant: the plan is the one that `compile` makes of the same module with the same policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ..passes.order import order
from ..passes.rotate import rotate
from ..passes.split import Chosen
from ..trips import expected_shares, trip_count
from ..values import BlockGraph, Node, NodeKind
from .apply import Order, OverlapPolicy, Planned, kept_steps, plan, planned_loops, with_crossings
from .floor import Floor
from .kernels import build
from .loops import blocks_of, control_flow_seconds
from .model import Graph
from .program_floor import BlockFloor, floor_of
from .replay import Step, Timeline, replay, unscheduled
from .shared_cores import replay_shared
from .staged import LoopReport


@dataclass
class Explained:
    """A block as it runs. Seconds, bytes.

    ``timeline``: what ``steps`` do, with what collectives take from compute (`shared_cores`). ``before``: the
    block as it was written, each collective awaited where it starts; ``before_exposed`` counts the blocks
    inside it too. ``planned``: whether ``steps`` are a plan, and not the block's own order. ``loops``: what
    became of the loops in it. ``under_way``: see `apply.Planned`. Of a program: ``splits``, what was decided
    of the collectives that could be split; ``unsplit_floor``, the floor with all of them whole, if some are.
    """

    graph: Graph
    steps: list[Step]
    timeline: Timeline
    before: Timeline
    before_exposed: float
    floor: Floor
    memory_limit: float
    launch_s: float
    planned: bool
    inner: dict[Node, tuple[Explained, ...]] = field(default_factory=dict)
    loops: list[LoopReport] = field(default_factory=list)
    under_way: float = 0.0
    splits: tuple[Chosen, ...] = ()
    unsplit_floor: Floor | None = None

    def inside(self) -> Iterator[tuple[Node, float, Explained]]:
        """Each block right inside this one: its loop or branch, how often it runs, the block.

        Branches run as predictions have it (`expected_shares`); a loop of unknown length counts as one
        iteration, one of known length evaluates no condition.
        """
        for node, parts in self.inner.items():
            if node.kind is not NodeKind.LOOP:
                shares = expected_shares(node.instruction, [p.timeline.seconds for p in parts])
                yield from ((node, s, part) for s, part in zip(shares, parts, strict=True))
                continue
            trips = trip_count(node)
            condition, body = parts
            yield node, int(trips is None), condition
            yield node, 1 if trips is None else trips, body

    def total(self, own: Callable[[Explained], float]) -> float:
        """The sum of something over this block and, as often as they run, those inside it."""
        return own(self) + sum(times * part.total(own) for _, times, part in self.inside())


@dataclass(frozen=True)
class _Written:
    """A block before it was planned."""

    timeline: Timeline
    exposed: float
    floor: BlockFloor


def explained(
    block: BlockGraph,
    policy: OverlapPolicy,
    donated: Iterable[int] = (),
    ordered: Order = order,
    *,
    pipeline: bool = False,
) -> Explained:
    """Plan a block, and tell what was decided; the block is changed as `apply.plan` changes it.

    Arguments and errors are those of `apply.plan`. ``pipeline``: whether loops without a plan are pipelined
    (`passes.rotate`).
    """
    given = tuple(donated)
    written: dict[tuple[str, int], _Written] = {}
    built: dict[BlockGraph, Graph] = {}
    of_entry = _written(block, policy, given, written, built)
    found = plan(block, policy, given, ordered, built)
    if pipeline and found is not None and rotate(block, planned_loops(found)):
        found = with_crossings(block, found, policy, given, ordered)
    return _explained(block, found, policy, given, ordered, of_entry, written)


def floor_as_written(
    block: BlockGraph, policy: OverlapPolicy, donated: Iterable[int] = ()
) -> Floor:
    """The floor of a program."""
    return _written(block, policy, tuple(donated), {}, {}).floor.floor


def _written(
    block: BlockGraph,
    policy: OverlapPolicy,
    donated: tuple[int, ...],
    found: dict[tuple[str, int], _Written],
    built: dict[BlockGraph, Graph],
) -> _Written:
    """The block as it is written. ``found`` gets those inside it, by name of the node and position: what is
    put in a loop's place keeps its name. ``built`` gets the graphs of all of them."""
    costs = policy.costs
    inner = {
        node: tuple(_written(b, policy, carries, found, built) for b, carries in blocks_of(node))
        for node in block.nodes
        if node.blocks
    }
    for node, parts in inner.items():
        found |= {(node.instruction.name, i): part for i, part in enumerate(parts)}
    seconds = {
        node: control_flow_seconds(node, [p.timeline.seconds for p in parts])
        for node, parts in inner.items()
    }
    graph = build(block, costs, donated, seconds.__getitem__)
    timeline = replay(graph, unscheduled(graph), costs.compute.launch_s)
    exposed = timeline.exposed_seconds + sum(
        control_flow_seconds(node, [p.exposed for p in parts]) for node, parts in inner.items()
    )
    built[block] = graph
    floors = {node: tuple(p.floor for p in parts) for node, parts in inner.items()}
    return _Written(timeline, exposed, floor_of(block, costs, donated, floors, graph))


def _explained(
    block: BlockGraph,
    planned: Planned | None,
    policy: OverlapPolicy,
    donated: tuple[int, ...],
    ordered: Order,
    written: _Written,
    by_name: dict[tuple[str, int], _Written],
) -> Explained:
    costs = policy.costs
    launch = costs.compute.launch_s
    inner: dict[Node, tuple[Explained, ...]] = {}
    for node in block.nodes:
        if node.blocks:
            plans = (planned.inner.get(node) if planned else None) or (None,) * len(node.blocks)
            inner[node] = tuple(
                _explained(b, p, policy, own, ordered, by_name[node.instruction.name, i], by_name)
                for i, ((b, own), p) in enumerate(zip(blocks_of(node), plans, strict=True))
            )
    if planned is not None and planned.steps is not None:
        assert planned.graph is not None and planned.timeline is not None
        graph, steps, timeline = planned.graph, planned.steps, planned.timeline
    else:
        seconds = {node: _seconds(node, parts) for node, parts in inner.items()}
        graph = build(block, costs, donated, seconds.__getitem__)
        steps = kept_steps(block, graph, ordered)
        timeline = replay_shared(graph, steps, launch)
    return Explained(
        graph,
        steps,
        timeline,
        written.timeline,
        written.exposed,
        written.floor.floor,
        policy.memory_factor * written.timeline.peak_bytes,
        launch,
        planned is not None and planned.steps is not None,
        inner,
        planned.loops if planned else [],
        planned.under_way if planned else 0.0,
    )


def _seconds(node: Node, parts: tuple[Explained, ...]) -> float:
    taken = control_flow_seconds(node, [p.timeline.seconds for p in parts])
    return taken + parts[-1].under_way
