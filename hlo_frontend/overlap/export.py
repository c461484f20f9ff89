"""A plan as JSON that other programs can replay: ``{"steps": […], "collectives": […], "summary": {…}}``.

``docs/overlap.md`` documents each key. Steps are in issue order. Names are those of instructions in the
module; iterations that were written out around a loop have the names of its body. A loop or a branch is one
step; it lists its blocks, each with steps, collectives and totals of its own.

Invariants: ``seconds`` include launches, so a replay needs no table of costs. The sum of ``memory_delta``
from the first step on is the memory in use, and its maximum is ``summary["peak_bytes"]``.
"""

from __future__ import annotations

from typing import Any

from ..trips import trip_count
from ..values import NodeKind
from .explained import Explained
from .ledger import Entry, ledger, summary
from .model import Task
from .replay import Phase


def to_json(plan: Explained) -> dict[str, Any]:
    """Steps, the ledger's entries and its totals. Times are seconds but for ``summary``'s ``…_ms``."""
    entries = ledger(plan)
    return {
        "steps": _steps(plan),
        "collectives": [_entry_json(entry) for entry in entries],
        "summary": summary(plan, entries),
    }


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "members": list(entry.members),
        "iteration": [],
        "op": entry.op,
        "stream": entry.stream,
        "seconds": entry.seconds,
        "begin": entry.begin,
        "end": entry.end,
        "exposed": entry.exposed,
        "hideable": entry.hideable,
        "hidden_by": [{"name": name, "seconds": seconds} for name, seconds in entry.hidden_by],
        "why": entry.why,
    }


def _steps(plan: Explained) -> list[dict[str, Any]]:
    tasks = plan.graph.tasks
    done_at: dict[int, int] = {}  # task -> position of the step that ends it
    started_at: dict[int, int] = {}
    steps: list[dict[str, Any]] = []
    live, interrupted = 0, True
    for number, (index, phase) in enumerate(plan.steps):
        position = len(steps)
        task = tasks[index]
        if task.arrives and phase is Phase.START:
            continue  # the iteration before has started it
        if phase is Phase.WAIT:
            names = [task.name]
            after = [started_at[index]] if index in started_at else []
        else:
            names = sorted({tasks[b].name for b in task.before})
            after = sorted(done_at[b] for b in task.before)
        launch = plan.launch_s if phase is Phase.COMPUTE and interrupted else 0.0
        steps.append(
            {
                "name": task.name,
                "kind": str(phase),
                "stream": plan.graph.streams[task.stream] if task.is_collective else "compute",
                "seconds": 0.0 if phase is Phase.WAIT else task.seconds + launch,
                "bytes": 0 if phase is Phase.WAIT else int(task.moved_bytes),
                "collective": task.name if task.is_collective else None,
                "depends_on": names,
                "after": after,
                "memory_delta": plan.timeline.live[number] - live,
                "iteration": [],
                **(_transfer(task) if task.is_collective else _kernel(task, launch, plan)),
            }
        )
        live, interrupted = plan.timeline.live[number], phase is not Phase.COMPUTE
        if phase is Phase.START:
            started_at[index] = position
        else:
            done_at[index] = position
    return steps


def _transfer(task: Task) -> dict[str, Any]:
    assert task.collective is not None
    return {
        "op": str(task.collective.kind),
        "members": [op.instruction.name for op in task.ops],
        "iterations": [[] for _ in task.ops],
        "latency_s": task.latency_s,
        "busy": task.busy,
        "copied_bytes": task.extra_bytes,
        "crosses": task.crosses or task.arrives,
    }


def _kernel(task: Task, launch: float, plan: Explained) -> dict[str, Any]:
    node = task.ops[0].node
    found = {
        "instructions": [op.instruction.name for op in task.ops],
        "iterations": [[] for _ in task.ops],
        "flops": None if node.blocks else task.flops,
        "launch_s": launch,
    }
    if node.blocks:
        names = ("condition", "body") if node.kind is NodeKind.LOOP else None
        found["trips"] = trip_count(node) if names else None
        found["blocks"] = [
            {"block": names[i] if names else f"branch {i}"} | to_json(part)
            for i, part in enumerate(plan.inner[node])
        ]
    return found
