"""Loops as they are run: whether staging one pays, and the plan of the body that comes of it.

What the iterations of a loop take is the time of one among others (`replay`), in which collectives that cross
begin in one iteration and end in the next. The loop is staged (`stages`, `skew`) where that takes less time
than the plan of its body as it stands, with the iterations counted in full that then stand around it. Where
memory is short, fewer of the early collectives move. In every loop, staged or not, collectives cross whose
results are nothing but carries.

Invariant: what is chosen follows from the module and the table of costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from stretto.collectives.ops import Kind

from ..passes.rotate import crossing
from ..values import BlockGraph, Node
from .buckets import bucket
from .costs import CostTable
from .kernels import build
from .loops import carries_of, trips_of
from .model import Graph
from .refine import refine
from .replay import Timeline, handed_over, held_up, replay, unscheduled
from .schedule import Schedule, schedule
from .skew import Skewed, skew
from .stages import EARLY, LoopBody, Stages, is_plain, stages_of
from .tidy import tidy

# How often the plan of a body is made, each time with what the last one leaves under way.
ROUNDS = 3
# A plan this close to what bounds an iteration is not searched further.
GOOD_ENOUGH = 1.0005
# Shares of the early collectives that are tried to move, until memory suffices.
SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.2)


@dataclass(frozen=True)
class LoopReport:
    """What became of a loop: iterations, seconds of one as it stood and as it is run, what moved, or ``why``
    nothing did. ``trips`` is None where it is not known, ``early`` and ``late`` are names of collectives."""

    name: str
    trips: int | None
    before: float
    seconds: float
    early: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    why: str = ""


@dataclass
class Staged:
    """A loop to be put in the place of another one, or None where it stays, and the plan of its body.

    ``under_way``: seconds for which the last iteration's crossing collectives hold up what stands behind it.
    """

    new: Skewed | None
    graph: Graph
    schedule: Schedule
    report: LoopReport
    under_way: float


@dataclass(frozen=True)
class Judge:
    """By what a loop is judged.

    ``plain``: seconds of its body as it is planned; ``opaque``: those of nodes with blocks in it;
    ``least_gain``: the share of its time that must be gained; ``memory_factor``: how far above the body's own
    peak memory may go; ``budget``: tasks that each search may visit.
    """

    costs: CostTable
    plain: float
    opaque: Callable[[Node], float]
    least_gain: float
    memory_factor: float
    budget: int

    def plan(self, body: BlockGraph, limit: float, opaque: Callable[[Node], float]) -> _Plan:
        """The plan of a body with crossing collectives."""
        graph = build(body, self.costs, carries_of(body), opaque, loops=False)
        first = self._search(graph, limit, self.budget)
        if first.timeline.peak_bytes > limit:
            return graph, first  # nor would it with buckets, which take memory of their own
        rounds = partial(self._search, limit=limit, budget=self.budget // 4, like=first)
        found = bucket(graph, first, self.costs, rounds, limit)
        quick = partial(self._search, limit=limit, budget=0, like=found.schedule)
        found = refine(graph, first, found, self.costs, quick, limit, self.budget)
        return found.graph, found.schedule

    def _search(
        self, graph: Graph, limit: float, budget: int, like: Schedule | None = None
    ) -> Schedule:
        """The best of the schedules of a body, each made with what the last one leaves under way."""
        launch = self.costs.compute.launch_s
        # No iteration is shorter than the work of its busiest resource.
        bound = max([graph.compute_seconds, *graph.stream_seconds()])
        best: Schedule | None = None
        for _ in range(ROUNDS):
            found = schedule(
                graph,
                launch_s=launch,
                memory_limit=limit,
                good_enough=bound * GOOD_ENOUGH,
                budget=budget,
                like=best or like,
            )
            found = tidy(graph, found, launch, limit)
            if best is None or _rank(found, limit) < _rank(best, limit):
                best = found
            if not _carry_over(graph, found.timeline):
                break
        assert best is not None
        return best


_Plan = tuple[Graph, Schedule]


def stage(loop: Node, judge: Judge) -> Staged | LoopReport:
    """The loop staged, or why it is not."""
    condition, body = loop.blocks
    trips = trips_of(loop)
    plain = judge.plain

    def kept(why: str) -> LoopReport:
        return LoopReport(loop.instruction.name, trips, plain, plain, why=why)

    collectives = [node.collective for node in body.nodes if node.collective is not None]
    if not collectives:
        return kept("nothing in it communicates")
    if any(c.kind in (Kind.SEND, Kind.RECV) for c in collectives):
        return kept("it sends or receives, which a peer's order may depend on")
    if not is_plain(body):
        return kept("its iterations differ in what they transfer or leave out")
    loop_body = LoopBody(body)
    own = build(body, judge.costs, carries_of(body), judge.opaque, loops=False)
    launch = judge.costs.compute.launch_s
    limit = judge.memory_factor * replay(own, unscheduled(own), launch).peak_bytes
    if trips is None:
        return _as_it_stands(loop, condition, judge, limit)
    why = "none of its collectives can move to another iteration"
    best: Staged | None = None
    for stages in _choices(loop_body, judge.costs):
        span = stages.last - stages.first
        if trips <= span:
            why = f"it runs {trips} times, and {span} iterations would stand around it"
            continue
        new = skew(loop, loop_body, stages, trips)
        kernel = new.loop.blocks[1]
        for node, carried in crossing(kernel, None).items():
            node.carried = carried
        if not any(node.carried for node in kernel.nodes):
            continue
        seconds = {c: judge.opaque(node) for node, copies in new.copies.items() for c in copies}
        graph, found = judge.plan(kernel, limit, seconds.__getitem__)
        if found.timeline.peak_bytes > limit:
            why = "what would be under way or kept for the next iteration does not fit into memory"
            continue
        each = found.timeline.seconds + held_up(graph, found.timeline)
        under_way = _under_way(graph, found.timeline)
        total = each * (trips - span) + plain * span + under_way
        total += launch * handed_over(found.steps) * (trips - span)
        if best is not None and total >= best.report.seconds * trips:
            break  # with fewer that move it takes longer
        if total > plain * trips * (1.0 - judge.least_gain):
            why = (
                f"an iteration would take {each * 1e6:.1f} us instead of {plain * 1e6:.1f} us, and {span} "
                "would stand around the loop: that gains too little"
            )
            continue
        early = tuple(n.instruction.name for n in stages.moved if stages[n] == EARLY)
        late = tuple(n.instruction.name for n in stages.moved if stages[n] != EARLY)
        report = LoopReport(loop.instruction.name, trips, plain, total / trips, early, late)
        best = Staged(new, graph, found, report, under_way)
    return kept(why) if best is None else best


def _as_it_stands(
    loop: Node, condition: BlockGraph, judge: Judge, limit: float
) -> Staged | LoopReport:
    """A loop of unknown length: collectives may cross, but none begins for an iteration that may not come."""
    name, plain, body = loop.instruction.name, judge.plain, loop.blocks[1]
    why = "how often it runs is not known"
    found = crossing(body, condition)
    if not found:
        return LoopReport(name, None, plain, plain, why=why)
    for node, carried in found.items():
        node.carried = carried
    graph, best = judge.plan(body, limit, judge.opaque)
    each = best.timeline.seconds + held_up(graph, best.timeline)
    more = judge.costs.compute.launch_s * handed_over(best.steps)
    if best.timeline.peak_bytes <= limit and each + more <= plain * (1.0 - judge.least_gain):
        report = LoopReport(name, None, plain, each)
        return Staged(None, graph, best, report, _under_way(graph, best.timeline))
    for node in found:
        node.carried = ()
    return LoopReport(name, None, plain, plain, why=why)


def _choices(loop_body: LoopBody, costs: CostTable) -> Iterator[Stages]:
    moved: tuple[Node, ...] | None = None
    for share in SHARES:
        stages = stages_of(loop_body, costs, share)
        if stages.moved != moved:
            moved = stages.moved
            yield stages


def _rank(found: Schedule, limit: float) -> tuple[bool, float, int]:
    timeline = found.timeline
    return timeline.peak_bytes > limit, timeline.seconds, timeline.peak_bytes


def _carry_over(graph: Graph, timeline: Timeline) -> bool:
    """Have the next plan begin with what is left under way in this one. Whether that is news."""
    crossings = graph.crossings()
    busy = [timeline.seconds] * len(graph.streams)
    news = False
    for index in sorted(crossings, key=lambda i: timeline.end[i]):
        task = graph.tasks[crossings[index]]
        left = max(0.0, timeline.end[index] - busy[task.stream])
        busy[task.stream] += left
        news = news or abs(left - task.seconds) > 1e-3 * timeline.seconds
        task.seconds = left
    return news


def _under_way(graph: Graph, timeline: Timeline) -> float:
    """How long the last iteration's crossing collectives hold up what stands behind the loop."""
    ends = [timeline.end[index] for index in graph.crossings()]
    return max(0.0, max(ends, default=0.0) - timeline.seconds)
