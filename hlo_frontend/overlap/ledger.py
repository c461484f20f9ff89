"""The ledger: the time of every collective, the kernels that hide it, the time that is exposed, and why.

Invariant: ``exposed`` of a collective is the time for which compute stands still in its wait. The entries'
``exposed`` add up to the time that compute spends in waits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .explained import Explained
from .floor import independent_compute
from .model import Graph, Task
from .replay import Phase
from .staged import LoopReport

# A collective that is exposed for less than this share of its time counts as fully hidden.
HIDDEN = 0.01
# Kernels listed for each collective.
NAMED_KERNELS = 4


@dataclass(frozen=True)
class Entry:
    """A collective (or a bucket of them). Seconds throughout.

    ``hidden_by``: the kernels that run longest while it is in flight, with the time for which they do;
    ``beside``: that time for all kernels together. ``hideable``: the compute that neither feeds it nor needs
    it.
    """

    name: str
    members: tuple[str, ...]
    op: str
    stream: str
    seconds: float
    begin: float
    end: float
    exposed: float
    hideable: float
    hidden_by: tuple[tuple[str, float], ...]
    beside: float
    why: str

    @property
    def is_hidden(self) -> bool:
        return self.exposed <= HIDDEN * self.seconds

    @property
    def is_overlapped(self) -> bool:
        """Whether compute runs beside it. If not, it may still not be exposed: awaited behind another one."""
        return self.beside > HIDDEN * self.seconds


def ledger(plan: Explained) -> list[Entry]:
    """An entry for each collective of the plan, in issue order."""
    graph, timeline = plan.graph, plan.timeline
    arrivals = graph.crossings()
    independent = independent_compute(graph)
    kernels = [i for i, phase in plan.steps if phase is Phase.COMPUTE]
    begins = [timeline.begin[i] for i in kernels]
    ends = [timeline.end[i] for i in kernels]
    why = _Reasons(plan)
    entries = []
    for index, phase in plan.steps:
        task = graph.tasks[index]
        if phase is not Phase.START or task.arrives:
            continue
        begin, end = timeline.begin[index], timeline.end[index]
        shared = [
            (graph.tasks[k].name, min(end, timeline.end[k]) - max(begin, timeline.begin[k]))
            for k in kernels[bisect_right(ends, begin) : bisect_left(begins, end)]
        ]
        shared = [s for s in sorted(shared, key=lambda s: -s[1]) if s[1] > 0.0]
        assert task.collective is not None
        entries.append(
            Entry(
                name=task.name,
                members=tuple(op.instruction.name for op in task.ops),
                op=str(task.collective.kind),
                stream=graph.streams[task.stream],
                seconds=task.seconds,
                begin=begin,
                end=end,
                exposed=timeline.exposed[arrivals.get(index, index)],
                hideable=independent[index],
                hidden_by=tuple(shared[:NAMED_KERNELS]),
                beside=sum(seconds for _, seconds in shared),
                why=why.of(task),
            )
        )
    return entries


class _Reasons:
    """Explains why a collective begins no earlier, and why it is awaited no later."""

    def __init__(self, plan: Explained) -> None:
        self.graph: Graph = plan.graph
        self.timeline = plan.timeline
        self.arrivals = plan.graph.crossings()
        self.ahead: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, phase in plan.steps:
            if phase is Phase.START:
                stream = self.graph.tasks[index].stream
                if stream in last:
                    self.ahead[index] = last[stream]
                last[stream] = index

    def of(self, task: Task) -> str:
        awaited = self.arrivals.get(task.index, task.index)
        if self.timeline.exposed[awaited] <= HIDDEN * task.seconds:
            return "hidden"
        if awaited != task.index:
            return f"{self._start(task)}; not later: the next iteration ends"
        return f"{self._start(task)}; {self._wait(task)}"

    def _start(self, task: Task) -> str:
        timeline, tasks = self.timeline, self.graph.tasks
        begin = timeline.begin[task.index]
        slack = 1e-9 + 1e-6 * begin
        ahead = self.ahead.get(task.index)
        if ahead is not None and timeline.end[ahead] >= begin - slack:
            return f"not earlier: its stream is busy with {tasks[ahead].name}"
        if begin <= slack:
            return "not earlier: it starts with the program"
        needs = max(task.before, key=lambda b: timeline.end[b], default=None)
        if needs is not None and timeline.end[needs] >= begin - slack:
            return f"not earlier: it needs {tasks[needs].name}"
        return "not earlier: memory is at its limit, or its stream was kept for more urgent ones"

    def _wait(self, task: Task) -> str:
        timeline, tasks = self.timeline, self.graph.tasks
        if not task.after:
            return "not later: the program ends"
        first = min(task.after, key=lambda a: timeline.begin[a])
        return f"not later: {tasks[first].name} needs it and no other work was left to do"


def summary(plan: Explained, entries: Sequence[Entry]) -> dict[str, Any]:
    """Totals of a block and the blocks inside it: counts of collectives, milliseconds, bytes.

    ``entries``: the block's own ledger. In the summary, ``hideable`` collectives have independent compute;
    ``overlapped`` ones run beside compute for more than a hundredth of their time; ``fully_hidden`` ones are
    exposed for less than a hundredth of it. ``exposed_floor_ms`` cannot be avoided by any plan: ``floor_ms``
    without all compute, without the launches of this plan, which hide communication too, and without
    ``held_ms``, the time that collectives take from compute.
    """
    graph, timeline, bound = plan.graph, plan.timeline, plan.floor
    exposed = plan.total(_exposed)
    # Sums of many seconds: a schedule at its floor may seem to be under it by the last digits.
    least_exposed = min(exposed, max(0.0, bound.seconds - (timeline.seconds - exposed)))
    streams = {
        name: plan.total(lambda p, name=name: _on_stream(p, name))  # type: ignore[misc]
        for name in _streams(plan)
    }
    return {
        **_counts(plan, entries),
        "exposed_ms": exposed * 1e3,
        "exposed_here_ms": timeline.exposed_seconds * 1e3,
        "exposed_floor_ms": least_exposed * 1e3,
        "held_ms": plan.total(lambda p: p.timeline.held) * 1e3,
        "predicted_ms": timeline.seconds * 1e3,
        "floor_ms": bound.seconds * 1e3,
        "floor_resource": bound.resource,
        "floor_resource_ms": bound.resource_seconds * 1e3,
        "floor_unhideable_ms": bound.unhideable * 1e3,
        "compute_ms": plan.total(_own_compute) * 1e3,
        "stream_ms": {name: seconds * 1e3 for name, seconds in streams.items()},
        "planned": plan.planned,
        "unscheduled_ms": plan.before.seconds * 1e3,
        "unscheduled_exposed_ms": plan.before_exposed * 1e3,
        "base_bytes": graph.base_bytes,
        "peak_bytes": timeline.peak_bytes,
        "unscheduled_peak_bytes": plan.before.peak_bytes,
        "memory_limit_bytes": int(plan.memory_limit),
        "loops": [_loop(report) for report in reports(plan)],
        "splits": [asdict(chosen) | {"text": chosen.describe()} for chosen in plan.splits],
        "whole_floor_ms": None if plan.unsplit_floor is None else plan.unsplit_floor.seconds * 1e3,
    }


def reports(plan: Explained) -> list[LoopReport]:
    """The reports on all loops in a block, at any depth, inner ones first.

    Iterations that were written out around a loop have copies of its inner loops, which share a report.
    """
    found = {id(r): r for parts in plan.inner.values() for p in parts for r in reports(p)}
    return [*found.values(), *plan.loops]


def _exposed(plan: Explained) -> float:
    """Exposed seconds of the block itself, with the waits behind its loops for what they leave in flight."""
    under_way = sum(parts[-1].under_way for parts in plan.inner.values())
    return plan.timeline.exposed_seconds + under_way


def _own_compute(plan: Explained) -> float:
    tasks = plan.graph.tasks
    return sum(t.seconds for t in tasks if not t.is_collective and not t.ops[0].node.blocks)


def _on_stream(plan: Explained, name: str) -> float:
    own = zip(plan.graph.streams, plan.graph.stream_seconds(), strict=True)
    return next((seconds for stream, seconds in own if stream == name), 0.0)


def _streams(plan: Explained) -> dict[str, None]:
    """The names of all streams, in the order of their first use."""
    found = dict.fromkeys(plan.graph.streams)
    for parts in plan.inner.values():
        for part in parts:
            found |= _streams(part)
    return found


def _counts(plan: Explained, entries: Sequence[Entry]) -> Counter[str]:
    """Counts of collectives in a block, and in the blocks inside it, as often as they run."""
    found = Counter(dict.fromkeys(_COUNTED, 0))
    for entry in entries:
        found.update({name: int(of(entry)) for name, of in _COUNTED.items()})
    for _, times, part in plan.inside():
        if times:
            found.update({k: times * n for k, n in _counts(part, ledger(part)).items()})
    return found


_COUNTED: dict[str, Callable[[Entry], int]] = {
    "collectives": lambda e: len(e.members),
    "transfers": lambda e: 1,
    "buckets": lambda e: len(e.members) > 1,
    "hideable": lambda e: len(e.members) if e.hideable > 0.0 else 0,
    "overlapped": lambda e: len(e.members) if e.is_overlapped else 0,
    "fully_hidden": lambda e: len(e.members) if e.is_hidden else 0,
}


def _loop(report: LoopReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "trips": report.trips,
        "before_ms": report.before * 1e3,
        "after_ms": report.seconds * 1e3,
        "early": list(report.early),
        "late": list(report.late),
        "why": report.why,
    }
