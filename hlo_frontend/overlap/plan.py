"""The whole pass: a block in, an issue order out, with all that was found on the way.

`plan_block` schedules a block and, on their own, the blocks of control flow that could not be laid out.
`overlap_order` gives a module's entry as a linear order of instructions with their phases.

Invariant: the plan is a function of the block and the cost table, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Instruction, Module
from ..values import BlockGraph, Node
from .buckets import Bucketed, bucket
from .costs import CostTable
from .floor import Floor, floor
from .kernels import build
from .loops import blocks_of, control_flow_seconds
from .model import Graph, Op, Task
from .renumber import scheduled_anew
from .replay import Phase, Step, Timeline, replay, unscheduled
from .schedule import Schedule, schedule
from .shared_cores import timeline_of

# How far above the module's own peak memory may go.
MEMORY_FACTOR = 1.1
# Tasks that all passes may visit in all, and the shares of the three rounds of search.
BUDGET = 120_000
_FIRST, _EACH_PLAN, _LAST = 0.25, 0.1, 0.5
# A schedule this close to the floor is not searched further.
GOOD_ENOUGH = 1.0005


@dataclass
class Plan:
    """A scheduled block. ``graph`` has buckets merged; ``source`` is the graph before that.

    ``timeline``: how the schedule runs where collectives take time from compute (`shared_cores`).
    """

    source: Graph
    graph: Graph
    members: list[tuple[int, ...]]
    schedule: Schedule
    timeline: Timeline
    before: Timeline
    floor: Floor
    source_floor: Floor
    memory_limit: float
    launch_s: float
    inner: dict[Node, tuple[Plan, ...]] = field(default_factory=dict)

    @property
    def steps(self) -> list[Step]:
        return self.schedule.steps


def plan_block(
    block: BlockGraph,
    costs: CostTable,
    donated: Iterable[int] = (),
    *,
    memory_factor: float = MEMORY_FACTOR,
    buckets: bool = True,
    budget: int = BUDGET,
) -> Plan:
    """Schedule a block. ``donated`` are positions of parameters that the caller gives up.

    Peak memory is at most ``memory_factor`` times that of the module's own order. ``budget`` bounds the
    search in tasks visited. Raises `InvalidProgramError` for groups that the cost table lacks.
    """
    inner: dict[Node, tuple[Plan, ...]] = {}

    def opaque(node: Node) -> float:
        plans = tuple(
            plan_block(
                b,
                costs,
                carries,
                memory_factor=memory_factor,
                buckets=buckets,
                budget=budget // 4,
            )
            for b, carries in blocks_of(node)
        )
        inner[node] = plans
        return control_flow_seconds(node, [plan.timeline.seconds for plan in plans])

    graph = build(block, costs, donated, opaque)
    launch = costs.compute.launch_s
    before = replay(graph, unscheduled(graph), launch)
    limit = before.peak_bytes * memory_factor
    bound = floor(graph)

    def search(
        candidate: Graph, share: float, good_enough: float = 0.0, like: Schedule | None = None
    ) -> Schedule:
        return schedule(
            candidate,
            launch_s=launch,
            memory_limit=limit,
            good_enough=good_enough,
            budget=int(share * budget),
            like=like,
        )

    first = search(graph, _FIRST, bound.seconds * GOOD_ENOUGH)
    found = Bucketed(graph, first, [(task.index,) for task in graph.tasks])
    if buckets:
        found = bucket(graph, first, costs, lambda g: search(g, _EACH_PLAN, like=first), limit)
    best, merged_bound = found.schedule, bound
    if found.graph is not graph:
        merged_bound = floor(found.graph)
    enough = merged_bound.seconds * GOOD_ENOUGH
    searches: tuple[Callable[[], Schedule], ...] = (
        lambda: search(found.graph, _LAST, enough, best),
        lambda: scheduled_anew(found.graph, lambda g: search(g, _FIRST, enough), launch),
    )
    for once_more in searches:
        if best.timeline.seconds > enough:
            last = once_more()
            if last.timeline.peak_bytes <= limit:
                best = min(best, last, key=lambda s: (s.timeline.seconds, s.timeline.peak_bytes))
    return Plan(
        source=graph,
        graph=found.graph,
        members=found.members,
        schedule=best,
        timeline=timeline_of(found.graph, best, launch),
        before=before,
        floor=merged_bound,
        source_floor=bound,
        memory_limit=limit,
        launch_s=launch,
        inner=inner,
    )


def donated_parameters(module: Module) -> tuple[int, ...]:
    """Positions of the entry's parameters that alias an output or are given up otherwise.

    Only whole array parameters count; parts of tuples are taken as kept.
    """
    proto = module.proto
    entries = [*proto.input_output_alias.entries, *proto.buffer_donor.entries]
    return tuple(sorted({e.parameter_number for e in entries if not e.parameter_shape_index}))


def plan_module(
    module: Module,
    costs: CostTable,
    num_partitions: int,
    num_replicas: int = 1,
    *,
    memory_factor: float = MEMORY_FACTOR,
    buckets: bool = True,
    budget: int = BUDGET,
) -> Plan:
    """`plan_block` of a module's entry computation."""
    block = flatten(module.entry, CollectiveReader(num_replicas, num_partitions))
    return plan_block(
        block,
        costs,
        donated_parameters(module),
        memory_factor=memory_factor,
        buckets=buckets,
        budget=budget,
    )


def overlap_order(
    module: Module, costs: CostTable, num_partitions: int, num_replicas: int = 1
) -> list[tuple[Instruction, Phase]]:
    """The entry's instructions in issue order: kernels' in place, collectives once to start and once to
    wait. Instructions of loops that were laid out occur once for each iteration; members of a bucket
    stand next to each other."""
    found = plan_module(module, costs, num_partitions, num_replicas)
    return [(op.instruction, phase) for op, phase in placed_ops(found)]


def placed_ops(found: Plan) -> list[tuple[Op, Phase]]:
    """Every op of the plan's steps, renaming ones right before the first that reads through them."""
    placed: list[tuple[Op, Phase]] = []
    done: set[Op] = set()

    def place_renames(op: Op) -> None:
        for rename in op.renames:
            if rename not in done:
                done.add(rename)
                place_renames(rename)
                placed.append((rename, Phase.COMPUTE))

    for index, phase in found.steps:
        task: Task = found.graph.tasks[index]
        for op in task.ops:
            if phase is not Phase.WAIT:
                place_renames(op)
            placed.append((op, phase))
    return placed
