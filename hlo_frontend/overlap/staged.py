"""Whether to stage a loop (`stages`, `skew`), and the plan of its body.

The time of a loop is that of one iteration in a steady state (`replay`), where collectives that cross begin
in one iteration and end in the next. The loop is staged if that takes less time than the plan of its body as
it is written; the iterations written out around a staged loop count in full. If memory is short, fewer of
the early collectives move: several shares of them are planned with a short search, and only the best of these
plans gets a longer one. In every loop that gets a plan here, staged or not, those collectives cross into the
next iteration whose results are read by nothing but the next iteration.

Invariant: the choice follows from the module and the table of costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from stretto.collectives.ops import Kind

from ..passes.rotate import crossing
from ..trips import trip_count
from ..values import BlockGraph, Node
from .bounds import least_merged_seconds, least_seconds
from .buckets import Bucketed, bucket
from .costs import CostTable
from .kernels import build
from .loops import carries_of
from .model import Graph
from .refine import LEAST_STEP, refine
from .replay import Timeline, handed_over, replay, unscheduled
from .search import LEAST_PASSES, IssueOrder, search
from .shared_cores import timeline_of
from .skew import Skewed, skew
from .stages import EARLY, LoopBody, Stages, is_plain, movable, stages_of

# The share of its time that a staged loop must gain over the plan of its body as it is written. The
# iterations written out around it overlap with other code there, which the prediction does not count.
GAIN_OVER_PLAN = 1e-3
# How often a body is planned, each time with the collectives that the last plan leaves in flight.
ROUNDS = 3
# No further plan is tried if the first one takes longer than that of a similar body by this share.
FAR = 0.02
# The search ends when a plan is this close to the lower bound of an iteration.
GOOD_ENOUGH = 1.0005
# The shares of the early collectives that are tried, in case not all of them fit into memory.
SHARES = (1.0, 0.8, 0.65, 0.5, 0.35, 0.2)


@dataclass(frozen=True)
class LoopReport:
    """What was done with a loop. ``trips``: its iterations, None if not known. ``before`` and ``seconds``:
    the time of an iteration as it was written and as it runs. ``early`` and ``late``: names of the
    collectives that moved; ``why``: the reason if none did."""

    name: str
    trips: int | None
    before: float
    seconds: float
    early: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    why: str = ""


@dataclass
class Staged:
    """A decision to change a loop. ``new``: its replacement, None if only its body's order changes. ``graph``
    and ``order``: the plan of the body.

    ``under_way``: how many seconds the code behind the loop waits for collectives of the last iteration.
    """

    new: Skewed | None
    graph: Graph
    order: IssueOrder
    report: LoopReport
    under_way: float


@dataclass(frozen=True)
class Judge:
    """Plans bodies of one loop, and says how fast a body must be.

    ``plain``: seconds of the loop's own body with its plan, ``without``: in its default order. ``opaque``:
    gives the seconds of a loop or branch in it. ``least_gain``: the share of ``without`` that must be gained.
    ``memory_factor``: the limit of memory, as a multiple of the body's own peak. ``budget``: how many tasks
    each search may visit.
    """

    costs: CostTable
    plain: float
    without: float
    opaque: Callable[[Node], float]
    least_gain: float
    memory_factor: float
    budget: int

    @property
    def most(self) -> float:
        """The most seconds that an iteration may take."""
        over_plan = min(self.least_gain, GAIN_OVER_PLAN)
        return min(self.without * (1.0 - self.least_gain), self.plain * (1.0 - over_plan))

    def plan(self, graph: Graph, limit: float) -> BodyPlan:
        """The plan of a body, with its collectives as they are or merged into buckets of about one size."""
        first = self._search(graph, limit)
        as_it_is = Bucketed(graph, first, [(task.index,) for task in graph.tasks])
        found = BodyPlan(graph, as_it_is)
        if self._is_settled(found, limit):
            return found
        rounds = partial(self._search, limit=limit, like=first)
        return replace(found, found=bucket(graph, first, self.costs, rounds, limit))

    def better(self, plan: BodyPlan, limit: float) -> BodyPlan:
        """The plan after a local search over buckets (`refine`), and a longer search for the order."""
        if self._is_settled(plan, limit):
            return plan
        graph, found = plan.source, plan.found
        quick = partial(self._search, limit=limit, like=found.order, passes=LEAST_PASSES)
        found = refine(graph, found, self.costs, quick, limit, self.budget)
        if found.graph is not graph:
            last = self._search(found.graph, limit, found.order)
            if _rank(last, limit) < _rank(found.order, limit):
                found = replace(found, order=last)
        return replace(plan, found=found)

    def _is_settled(self, plan: BodyPlan, limit: float) -> bool:
        """Whether buckets cannot help: the plan is at its bound, or memory does not suffice even without."""
        timeline = plan.found.order.timeline
        least = least_merged_seconds(plan.source, self.costs.compute.launch_s)
        return timeline.seconds <= least * (1.0 + LEAST_STEP) or timeline.peak_bytes > limit

    def _search(
        self,
        graph: Graph,
        limit: float,
        like: IssueOrder | None = None,
        passes: float = float("inf"),
    ) -> IssueOrder:
        """The best of several schedules of a body, each made for the collectives that the last one leaves in
        flight. Gives up after one that takes longer than ``like`` by more than `FAR`.
        """
        launch = self.costs.compute.launch_s
        bound = least_seconds(graph, launch)
        best: IssueOrder | None = None
        for _ in range(ROUNDS):
            found = search(
                graph,
                launch_s=launch,
                memory_limit=limit,
                good_enough=bound * GOOD_ENOUGH,
                budget=self.budget,
                most_passes=passes,
                like=best or like,
            )
            if best is None or _rank(found, limit) < _rank(best, limit):
                best = found
            if best.timeline.peak_bytes <= limit and best.timeline.seconds <= bound * GOOD_ENOUGH:
                break
            if like and best.timeline.seconds > like.timeline.seconds * (1.0 + FAR):
                break
            if not _carry_over(graph, found.timeline):
                break
        assert best is not None
        return best


@dataclass(frozen=True)
class BodyPlan:
    """How an iteration runs. ``source``: its graph before collectives were merged into buckets."""

    source: Graph
    found: Bucketed

    @property
    def graph(self) -> Graph:
        return self.found.graph

    @property
    def order(self) -> IssueOrder:
        return self.found.order


@dataclass(frozen=True)
class _Try:
    """A staged loop that was planned. ``total``: seconds of all its iterations."""

    stages: Stages
    new: Skewed
    plan: BodyPlan
    total: float


def stage(loop: Node, judge: Judge) -> Staged | LoopReport:
    """The loop staged, or why it is not."""
    condition, body = loop.blocks
    trips = trip_count(loop)
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
    own = build(body, judge.costs, carries_of(body), judge.opaque)
    launch = judge.costs.compute.launch_s
    limit = judge.memory_factor * replay(own, unscheduled(own), launch).peak_bytes
    if trips is None:
        return _as_it_stands(loop, condition, judge, limit)
    most = judge.most * trips
    why = "none of its collectives can move to another iteration"

    def too_little(each: float, span: int, least: str = "") -> str:
        return (
            f"an iteration would take {least}{each * 1e6:.1f} us instead of {plain * 1e6:.1f} us, and {span} "
            "would stand around the loop: that gains too little"
        )

    def total(plan: BodyPlan, span: int) -> float:
        each = _seconds_of(plan, launch) + launch * handed_over(plan.order.steps)
        left = under_way(plan.graph, plan.order.timeline)
        return each * (trips - span) + plain * span + left

    tries: list[_Try] = []
    for stages in _choices(loop_body, judge.costs):
        span = stages.last - stages.first
        if trips <= span:
            why = f"it runs {trips} times, and {span} iterations would stand around it"
            continue
        new = skew(loop, loop_body, stages, trips)
        kernel = new.loop.blocks[1]
        kernel.crossing.update(crossing(kernel, None))
        if not kernel.crossing:
            continue
        seconds = {c: judge.opaque(node) for node, copies in new.copies.items() for c in copies}
        graph = build(kernel, judge.costs, carries_of(kernel), seconds.__getitem__)
        least = least_merged_seconds(graph, launch)
        if least * (trips - span) + plain * span > most:
            why = too_little(least, span, "at least ")
            continue
        plan = judge.plan(graph, limit)
        if plan.order.timeline.peak_bytes > limit:
            why = "what would be under way or kept for the next iteration does not fit into memory"
            continue
        tries.append(_Try(stages, new, plan, total(plan, span)))
    if not tries:
        return kept(why)
    tried = min(tries, key=lambda t: t.total)
    stages = tried.stages
    span = stages.last - stages.first
    plan = judge.better(tried.plan, limit)
    takes = total(plan, span)
    if takes > most:
        return kept(too_little(_seconds_of(plan, launch), span))
    early = tuple(n.instruction.name for n in stages.moved if stages[n] == EARLY)
    late = tuple(n.instruction.name for n in stages.moved if stages[n] != EARLY)
    report = LoopReport(loop.instruction.name, trips, plain, takes / trips, early, late)
    left = under_way(plan.graph, plan.order.timeline)
    return Staged(tried.new, plan.graph, plan.order, report, left)


def _as_it_stands(
    loop: Node, condition: BlockGraph, judge: Judge, limit: float
) -> Staged | LoopReport:
    """Plan a loop of unknown length. It is not staged, since nobody knows whether an iteration follows;
    collectives may still cross into the next one."""
    name, plain, body = loop.instruction.name, judge.plain, loop.blocks[1]
    why = "how often it runs is not known"
    found = crossing(body, condition)
    if not found:
        return LoopReport(name, None, plain, plain, why=why)
    body.crossing.update(found)
    graph = build(body, judge.costs, carries_of(body), judge.opaque)
    plan = judge.better(judge.plan(graph, limit), limit)
    graph, best = plan.graph, plan.order
    launch = judge.costs.compute.launch_s
    each = _seconds_of(plan, launch)
    more = launch * handed_over(best.steps)
    if best.timeline.peak_bytes <= limit and each + more <= judge.most:
        report = LoopReport(name, None, plain, each)
        return Staged(None, graph, best, report, under_way(graph, best.timeline))
    body.crossing.clear()
    return LoopReport(name, None, plain, plain, why=why)


def _choices(loop_body: LoopBody, costs: CostTable) -> Iterator[Stages]:
    found = movable(loop_body, costs)
    moved: tuple[Node, ...] | None = None
    for share in SHARES:
        stages = stages_of(loop_body, found, share)
        if stages.moved != moved:
            moved = stages.moved
            yield stages


def _seconds_of(plan: BodyPlan, launch_s: float) -> float:
    """Seconds of an iteration, with the time that its collectives take from compute."""
    return timeline_of(plan.graph, plan.order, launch_s).seconds


def _rank(found: IssueOrder, limit: float) -> tuple[bool, float, int]:
    timeline = found.timeline
    return timeline.peak_bytes > limit, timeline.seconds, timeline.peak_bytes


def _carry_over(graph: Graph, timeline: Timeline) -> bool:
    """Set how much of each crossing collective is left when the next iteration begins, for the next plan.

    Whether that differs from what this plan was made for.
    """
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


def under_way(graph: Graph, timeline: Timeline) -> float:
    """How many seconds the code behind the loop waits for crossing collectives of the last iteration."""
    ends = [timeline.end[index] for index in graph.crossings()]
    return max(0.0, max(ends, default=0.0) - timeline.seconds)
