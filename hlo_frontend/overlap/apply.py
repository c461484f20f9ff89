"""The pass that plans blocks: it decides in which order a block's compute and collectives are issued.

Every block is planned on its own: the entry, and the bodies of loops and branches, which are single steps of
the blocks around them. The planner predicts the time of the block in its default order (`passes.order`, each
collective awaited at its first use) and the time of the plan, by the same clock; both count the time that
collectives take from the compute beside them (`shared_cores`). The plan is used only if it is faster by
`LEAST_GAIN`. After that comparison, `loosen` moves starts forward and waits back where that costs no time.

Two kinds of blocks keep their default order: blocks that send or receive, since the order of a peer may
depend on theirs, and blocks in which some devices skip compute that nobody reads (`passes.unread`), since
that compute is divided by the levels of the default order.

A block is not planned at all if its collectives together take less time than a few launches, or too little
for the least gain.

Invariant: decisions follow from the program's text and the table of costs, so they are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from stretto.collectives.ops import Kind

from ..carve import Await, BlockPlan, carve
from ..passes.order import order
from ..passes.unread import Ordered
from ..topological import topological
from ..trips import trip_count
from ..values import BlockGraph, Node, NodeKind
from .bounds import least_merged_seconds, least_seconds
from .buckets import bucket
from .costs import CostTable
from .kernels import build
from .loops import blocks_of, control_flow_seconds
from .loosen import loosen
from .measured import Measured
from .model import Graph
from .place import place
from .pricing import price_blocks
from .refine import refine
from .replay import Phase, Step, Timeline, handed_over, replay, unscheduled
from .search import LEAST_PASSES, IssueOrder, search
from .shared_cores import replay_shared, timeline_of
from .skew import substitute
from .staged import GOOD_ENOUGH, Judge, LoopReport, stage, under_way
from .structure import Structure
from .uncombine import uncombine

# The share of a block's own time, without the loops and branches inside it, that a plan must save.
LEAST_GAIN = 0.03
# Launches that the collectives of a block must cost in all to be worth a look.
LEAST_LAUNCHES = 2.0
# Tasks that the passes of one block may visit in all. It bounds compile time.
BUDGET = 20_000
MEMORY_FACTOR = 1.1
NOTHING_BUILT: Mapping[BlockGraph, Graph] = MappingProxyType({})


@dataclass(frozen=True)
class OverlapPolicy:
    """How blocks are planned. ``least_gain``: the share of its time without a plan, not counting loops and
    branches inside the block, by which a plan must be faster. ``memory_factor``: how much more memory a plan
    may use than the block as it is written. ``budget``: how many tasks the search may visit.

    ``measured``: measured times of compute, by key of the module (`measured.key_of`).
    """

    costs: CostTable
    least_gain: float = LEAST_GAIN
    memory_factor: float = MEMORY_FACTOR
    budget: int = BUDGET
    measured: Mapping[str, Measured] = field(default_factory=dict, hash=False)

    def of(self, key: str) -> OverlapPolicy:
        """The policy for the module with this key."""
        known = self.measured.get(key)
        if known is None:
            return self
        return replace(self, costs=replace(self.costs, measured=known), measured={})


@dataclass
class Planned:
    """The decision for a block. ``steps``: the plan, or None if the block keeps its default order.

    ``seconds``: the predicted time of the block as it will run; ``without``: that of its default order. Both
    are the time of all collectives if the block is not worth planning. ``timeline``: the predicted run, or
    None if it was not worth predicting; ``exposed`` is then the time of all collectives, as if each were
    awaited where it starts. ``under_way``: for a loop's body, how many seconds the code behind the loop waits
    for collectives that the last iteration has started.
    """

    seconds: float
    without: float
    graph: Graph | None = field(default=None, repr=False)
    steps: list[Step] | None = field(default=None, repr=False)
    timeline: Timeline | None = field(default=None, repr=False)
    inner: dict[Node, tuple[Planned, ...]] = field(default_factory=dict, repr=False)
    loops: list[LoopReport] = field(default_factory=list)
    under_way: float = 0.0
    exposed: float = 0.0

    @property
    def considered(self) -> bool:
        """Whether this block, or one inside it, communicates enough to be worth a look."""
        return (
            self.graph is not None
            or bool(self.loops)
            or any(p.considered for ps in self.inner.values() for p in ps)
        )

    @property
    def changed(self) -> bool:
        """Whether this block, or one inside it, has a plan."""
        return self.steps is not None or any(p.changed for ps in self.inner.values() for p in ps)


def planned_loops(planned: Planned | None) -> set[Node]:
    """The loops, at any depth, of which a block has a plan."""
    found: set[Node] = set()
    for node, plans in planned.inner.items() if planned else ():
        for inner in plans:
            found |= planned_loops(inner)
            if inner.steps is not None:
                found.add(node)
    return found


Order = Callable[[BlockGraph], Ordered]


def plan(
    block: BlockGraph,
    policy: OverlapPolicy,
    donated: Iterable[int] = (),
    ordered: Order = order,
    built: Mapping[BlockGraph, Graph] = NOTHING_BUILT,
) -> Planned | None:
    """Plan a block and the blocks inside it. None if nothing in it communicates.

    ``donated``: positions of parameters whose memory may be freed. ``ordered``: gives the default order of a
    block. ``built``: task graphs of blocks, priced by the policy's table; times of loops and branches in them
    are updated in place. Raises `InvalidProgramError` for groups that the table lacks.

    In blocks that get a plan, combined collectives are split for good. Carve a block before this call if it
    is to be lowered as it was.
    """
    if not any(node.is_runtime for node in block.nodes):
        return None
    return _plan(block, policy, donated, ordered, built, inside=False)


def with_crossings(
    block: BlockGraph,
    planned: Planned,
    policy: OverlapPolicy,
    donated: Iterable[int] = (),
    ordered: Order = order,
) -> Planned:
    """The same decision, with the times of a block in which loops without a plan were pipelined since
    (`passes.rotate`). Times of loops and branches in its task graphs are updated in place."""
    inner = {
        node: tuple(
            with_crossings(b, p, policy, carries, ordered)
            for (b, carries), p in zip(blocks_of(node), planned.inner[node], strict=True)
        )
        for node in planned.inner
    }
    same = all(p is q for n, ps in inner.items() for p, q in zip(ps, planned.inner[n], strict=True))
    if same and (planned.steps is not None or not block.crossing):
        return planned
    launch = policy.costs.compute.launch_s
    seconds = {node: _control_flow_seconds(node, plans) for node, plans in inner.items()}
    if planned.steps is not None and planned.graph is not None:
        graph, steps = planned.graph, planned.steps
        price_blocks(graph, seconds.__getitem__)
    else:
        graph = build(block, policy.costs, donated, seconds.__getitem__)
        steps = kept_steps(block, graph, ordered)
    timeline = replay_shared(graph, steps, launch)
    reports = {report.name: report for report in planned.loops}
    for node, plans in inner.items():
        if node.kind is NodeKind.LOOP and plans[1].steps is None and node.blocks[1].crossing:
            name, before = node.instruction.name, planned.inner[node][1].seconds
            late = tuple(
                n.instruction.name for n in node.blocks[1].nodes if n in node.blocks[1].crossing
            )
            reports[name] = LoopReport(name, trip_count(node), before, plans[1].seconds, late=late)
    return replace(
        planned,
        seconds=timeline.seconds,
        graph=graph,
        timeline=timeline,
        inner=inner,
        loops=[*reports.values()],
        under_way=under_way(graph, timeline),
    )


def carve_planned(
    block: BlockGraph,
    planned: Planned | None,
    ordered: Callable[[BlockGraph], Sequence[Node | Await]] = order,
    structure: Structure | None = None,
) -> BlockPlan:
    """The block cut into segments as planned, and the blocks inside it. ``structure`` is that of the block
    around it."""
    structure = structure or Structure()
    nodes: Sequence[Node | Await] = (
        ordered(block)
        if planned is None or planned.steps is None or planned.graph is None
        else place(block, planned.graph, planned.steps, structure)
    )
    carved = carve(block, nodes)
    for node in block.nodes:
        if node.blocks:
            inner = planned.inner.get(node) if planned else None
            plans = inner or (None,) * len(node.blocks)
            carved.blocks[node] = tuple(
                carve_planned(b, p, ordered, structure)
                for b, p in zip(node.blocks, plans, strict=True)
            )
    return carved


def _plan(
    block: BlockGraph,
    policy: OverlapPolicy,
    donated: Iterable[int],
    ordered: Order,
    built: Mapping[BlockGraph, Graph],
    *,
    inside: bool = True,
) -> Planned:
    """``inside``: whether there is a block around this one, which needs its predicted time."""
    costs = policy.costs
    inner = {
        node: tuple(_plan(b, policy, carries, ordered, built) for b, carries in blocks_of(node))
        for node in block.nodes
        if node.blocks
    }
    given = list(block.nodes)
    reports: list[LoopReport] = []
    for node in [node for node in inner if node.kind is NodeKind.LOOP]:
        reports += _stage(block, node, policy, inner)
    seconds = {node: _control_flow_seconds(node, plans) for node, plans in inner.items()}
    collectives = [node.collective for node in block.nodes if node.collective is not None]
    communication = sum(costs.collective(c).seconds for c in collectives)
    # How often the block runs does not matter here: launches and collectives grow by the same factor.
    worthwhile = communication > LEAST_LAUNCHES * costs.compute.launch_s and communication > 0.0
    fixed = any(c.kind in (Kind.SEND, Kind.RECV) for c in collectives)
    own_order = ordered(block) if worthwhile and not fixed else Ordered((), {}, {})
    if not worthwhile or fixed or own_order.valid:
        compute = 0.0
        if inside or any(p.considered for plans in inner.values() for p in plans):
            compute = _compute_seconds(block, costs, lambda node: seconds[node])
        took = compute + communication
        return Planned(took, took, inner=inner, loops=reports, exposed=communication)
    if block in built and block.nodes == given:  # no loop of it is another by now
        graph = built[block]
        price_blocks(graph, seconds.__getitem__)
    else:
        graph = build(block, costs, donated, seconds.__getitem__)
    launch = costs.compute.launch_s
    steps = unpassed(own_order, graph)
    without = replay_shared(graph, steps, launch)
    compute_seconds = graph.compute_seconds
    # Collectives that use the cores add to the time of compute; merged ones have one latency.
    moving = sum(t.busy * (t.seconds - t.latency_s) for t in graph.tasks if not t.arrives)
    bound = max([compute_seconds + moving, *graph.stream_seconds()])
    took = without.seconds
    kept = Planned(took, took, graph, timeline=without, inner=inner, loops=reports)
    # A plan of this block does not change the times of loops and branches inside it.
    inside_blocks = sum(task.seconds for task in graph.tasks if task.ops[0].node.blocks)
    most = took - policy.least_gain * (took - inside_blocks)
    if bound >= most:
        return kept
    limit = policy.memory_factor * replay(graph, unscheduled(graph), launch).peak_bytes
    undo = uncombine(block, costs)
    if undo is not None:
        graph = build(block, costs, donated, seconds.__getitem__)
    # Only now: combined collectives make dependency chains longer, so the bound was not one before.
    if least_merged_seconds(graph, launch) >= most:
        if undo is not None:
            undo()
        return kept

    def searched(
        candidate: Graph,
        share: float,
        like: IssueOrder | None = None,
        passes: float = float("inf"),
    ) -> IssueOrder:
        return search(
            candidate,
            launch_s=launch,
            memory_limit=limit,
            good_enough=least_seconds(candidate, launch) * GOOD_ENOUGH,
            budget=int(share * policy.budget),
            most_passes=passes,
            like=like,
        )

    first = searched(graph, 1.0)
    shorter = partial(searched, share=0.25, like=first)
    bucketed = bucket(graph, first, costs, shorter, limit)
    quick = partial(searched, share=0.25, passes=LEAST_PASSES, like=bucketed.order)
    bucketed = refine(graph, bucketed, costs, quick, limit, policy.budget // 2)
    best = bucketed.order
    if bucketed.graph is not graph:
        last = searched(bucketed.graph, 0.5, best)
        if last.timeline.peak_bytes <= limit:
            best = min(best, last, key=lambda s: (s.timeline.seconds, s.timeline.peak_bytes))
    graph = bucketed.graph
    more = max(0, handed_over(best.steps) - handed_over(steps)) * launch
    takes = timeline_of(graph, best, launch).seconds
    if takes + more > most:
        if undo is not None:
            undo()
        return kept
    best = loosen(graph, best, launch)
    timeline = timeline_of(graph, best, launch)
    return Planned(timeline.seconds, took, graph, best.steps, timeline, inner, reports)


def _stage(
    block: BlockGraph, loop: Node, policy: OverlapPolicy, inner: dict[Node, tuple[Planned, ...]]
) -> list[LoopReport]:
    """Replace a loop of the block by a staged loop if that is faster. Updates ``inner``."""
    body = inner[loop][1]
    judge = Judge(
        policy.costs,
        body.seconds,
        body.without,
        lambda node: _control_flow_seconds(node, body.inner[node]),
        policy.least_gain,
        policy.memory_factor,
        policy.budget,
    )
    found = stage(loop, judge)
    if isinstance(found, LoopReport):
        return [found] if found.why else []
    steps = found.order.steps
    timeline = timeline_of(found.graph, found.order, policy.costs.compute.launch_s)
    if found.new is None:
        planned = replace(
            body,
            seconds=timeline.seconds,
            graph=found.graph,
            steps=steps,
            timeline=timeline,
            under_way=found.under_way,
        )
        inner[loop] = (inner[loop][0], planned)
        return [found.report]
    kernel = found.new.loop.blocks[1]
    copied = {c: body.inner[node] for node, copies in found.new.copies.items() for c in copies}
    inside = {node: plans for node, plans in copied.items() if node in kernel.nodes}
    substitute(block, loop, found.new)
    del inner[loop]
    inner |= {node: plans for node, plans in copied.items() if node not in inside}
    planned = Planned(
        timeline.seconds,
        body.seconds,
        found.graph,
        steps,
        timeline,
        inside,
        under_way=found.under_way,
    )
    inner[found.new.loop] = (Planned(0.0, 0.0), planned)
    return [found.report]


def _control_flow_seconds(node: Node, plans: Sequence[Planned]) -> float:
    return control_flow_seconds(node, [p.seconds for p in plans]) + plans[-1].under_way


def _compute_seconds(block: BlockGraph, costs: CostTable, opaque: Callable[[Node], float]) -> float:
    """Seconds of everything that is not a collective."""
    return build(block, costs, (), opaque).compute_seconds


def unpassed(ordered: Sequence[Node], graph: Graph) -> list[Step]:
    """The steps of a block that keeps its default order: a segment runs once all its inputs are there."""
    at = {node: position for position, node in enumerate(ordered)}
    # What the iteration before has started arrives at its first reader, and ends no segment.
    where = [-1 if task.arrives else max(at[op.node] for op in task.ops) for task in graph.tasks]
    steps: list[Step] = []
    waited: set[int] = set()
    segment: list[int] = []

    def wait(indices: Iterable[int]) -> None:
        for index in indices:
            if graph.tasks[index].is_collective and index not in waited:
                waited.add(index)
                steps.append((index, Phase.WAIT))

    def close() -> None:
        for index in segment:
            wait(graph.tasks[index].before)
        steps.extend((index, Phase.COMPUTE) for index in segment)
        segment.clear()

    # A kernel's last node may be far behind its first one, which others need.
    before = {task.index: task.before for task in graph.tasks}
    for index in topological(before, key=lambda i: (where[i], i)):
        task = graph.tasks[index]
        if not task.ops[0].node.is_runtime:
            segment.append(index)
            continue
        close()
        wait(task.before)
        steps.append((index, Phase.START if task.is_collective else Phase.COMPUTE))
    close()
    wait(range(len(graph.tasks)))
    return steps


def kept_steps(block: BlockGraph, graph: Graph, ordered: Order) -> list[Step]:
    """The steps of a block without a plan. The next iteration awaits collectives that cross into it."""
    return [
        (index, phase)
        for index, phase in unpassed(ordered(block), graph)
        if phase is not Phase.WAIT or not graph.tasks[index].crosses
    ]
