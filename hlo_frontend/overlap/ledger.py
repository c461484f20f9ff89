"""The ledger: what every collective costs, what hides it, what is left exposed, and why.

Invariant: the entries' ``exposed`` add up to what the compute stream is held by waits; a collective's is
what its own wait holds it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

from .floor import independent_compute
from .model import Graph, Task
from .plan import Plan
from .replay import Phase

# What is exposed for less than this share of its own time counts as fully hidden.
HIDDEN = 0.01
# Kernels listed for each collective.
NAMED_KERNELS = 4


@dataclass(frozen=True)
class Entry:
    """A collective (or a bucket of them). Seconds throughout.

    ``hidden_by`` are the kernels that run longest while it is in flight, with the time they share; ``beside``
    is the time that all kernels share with it.
    ``hideable`` is the compute that neither feeds it nor needs it.
    """

    name: str
    members: tuple[str, ...]
    iteration: tuple[int, ...]
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
        """Whether compute runs beside it: what is not exposed may just be awaited after another."""
        return self.beside > HIDDEN * self.seconds


def ledger(plan: Plan) -> list[Entry]:
    """An entry for each collective of the plan, in issue order."""
    graph, timeline = plan.graph, plan.timeline
    independent = independent_compute(graph)
    kernels = [i for i, phase in plan.steps if phase is Phase.COMPUTE]
    begins = [timeline.begin[i] for i in kernels]
    ends = [timeline.end[i] for i in kernels]
    why = _Reasons(plan)
    entries = []
    for index, phase in plan.steps:
        task = graph.tasks[index]
        if phase is not Phase.START:
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
                iteration=task.ops[0].iteration,
                op=str(task.collective.kind),
                stream=graph.streams[task.stream],
                seconds=task.seconds,
                begin=begin,
                end=end,
                exposed=timeline.exposed[index],
                hideable=independent[index],
                hidden_by=tuple(shared[:NAMED_KERNELS]),
                beside=sum(seconds for _, seconds in shared),
                why=why.of(task),
            )
        )
    return entries


class _Reasons:
    """Why a collective begins when it does and is needed when it is."""

    def __init__(self, plan: Plan) -> None:
        self.graph: Graph = plan.graph
        self.timeline = plan.timeline
        self.ahead: dict[int, int] = {}
        last: dict[int, int] = {}
        for index, phase in plan.steps:
            if phase is Phase.START:
                stream = self.graph.tasks[index].stream
                if stream in last:
                    self.ahead[index] = last[stream]
                last[stream] = index

    def of(self, task: Task) -> str:
        if self.timeline.exposed[task.index] <= HIDDEN * task.seconds:
            return "hidden"
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


def summary(plan: Plan, entries: list[Entry] | None = None) -> dict[str, Any]:
    """Totals of a plan: counts of collectives, milliseconds, bytes.

    ``hideable`` collectives have independent compute at all; ``overlapped`` run beside some of it, for more
    than a hundredth of their time; ``fully_hidden`` are exposed for less than a hundredth of it.
    ``exposed_floor_ms`` is what no order of these steps avoids: ``floor_ms`` less all compute, what the plan
    takes for launches, which hide communication too, and ``held_ms``, what collectives take from compute.
    """
    entries = ledger(plan) if entries is None else entries
    graph, timeline, bound = plan.graph, plan.timeline, plan.floor
    exposed = sum(e.exposed for e in entries)
    # Sums of many seconds: a schedule at its floor may seem to be under it by the last digits.
    least_exposed = min(exposed, max(0.0, bound.seconds - (timeline.seconds - exposed)))
    return {
        "collectives": sum(len(e.members) for e in entries),
        "transfers": len(entries),
        "buckets": sum(len(e.members) > 1 for e in entries),
        "hideable": sum(len(e.members) for e in entries if e.hideable > 0.0),
        "overlapped": sum(len(e.members) for e in entries if e.is_overlapped),
        "fully_hidden": sum(len(e.members) for e in entries if e.is_hidden),
        "exposed_ms": exposed * 1e3,
        "exposed_floor_ms": least_exposed * 1e3,
        "held_ms": timeline.held * 1e3,
        "predicted_ms": timeline.seconds * 1e3,
        "floor_ms": bound.seconds * 1e3,
        "floor_resource": bound.resource,
        "floor_resource_ms": bound.resource_seconds * 1e3,
        "floor_unhideable_ms": bound.unhideable * 1e3,
        "unbucketed_floor_ms": plan.source_floor.seconds * 1e3,
        "compute_ms": graph.compute_seconds * 1e3,
        "stream_ms": {
            name: seconds * 1e3
            for name, seconds in zip(graph.streams, graph.stream_seconds(), strict=True)
        },
        "unscheduled_ms": plan.before.seconds * 1e3,
        "unscheduled_exposed_ms": plan.before.exposed_seconds * 1e3,
        "base_bytes": graph.base_bytes,
        "peak_bytes": timeline.peak_bytes,
        "unscheduled_peak_bytes": plan.before.peak_bytes,
        "memory_limit_bytes": int(plan.memory_limit),
        "inner": {
            node.instruction.name: [summary(inner) for inner in plans]
            for node, plans in plan.inner.items()
        },
    }
