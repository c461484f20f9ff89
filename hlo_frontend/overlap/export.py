"""A plan as data that anyone can replay: ``{"steps": […], "collectives": […], "summary": {…}}``.

``docs/overlap.md`` says what each key means. Steps are in issue order. Names are those of instructions in
the module; where a loop is laid out, a name occurs once an iteration, and ``iteration`` tells them apart.

Invariants: ``seconds`` are complete, launches included, so a replay needs no cost table; ``memory_delta``
summed up from the first step on is the memory in use, whose maximum is ``summary["peak_bytes"]``.
"""

from __future__ import annotations

from typing import Any

from .ledger import Entry, ledger, summary
from .model import Task
from .plan import Plan
from .pricing import kernel_cost
from .replay import Phase


def to_json(plan: Plan) -> dict[str, Any]:
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
        "iteration": list(entry.iteration),
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


def _steps(plan: Plan) -> list[dict[str, Any]]:
    tasks = plan.graph.tasks
    done_at: dict[int, int] = {}  # task -> position of the step that ends it
    started_at: dict[int, int] = {}
    steps = []
    live, interrupted = 0, True
    for position, (index, phase) in enumerate(plan.steps):
        task = tasks[index]
        if phase is Phase.WAIT:
            names, after = [task.name], [started_at[index]]
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
                "memory_delta": plan.timeline.live[position] - live,
                "iteration": list(task.ops[0].iteration),
                **(_transfer(task) if task.is_collective else _kernel(task, launch)),
            }
        )
        live, interrupted = plan.timeline.live[position], phase is not Phase.COMPUTE
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
        "iterations": [list(op.iteration) for op in task.ops],
        "latency_s": task.latency_s,
        "busy": task.busy,
        "copied_bytes": task.extra_bytes,
    }


def _kernel(task: Task, launch: float) -> dict[str, Any]:
    opaque = bool(task.ops[0].node.blocks)
    return {
        "instructions": [op.instruction.name for op in task.ops],
        "iterations": [list(op.iteration) for op in task.ops],
        "flops": None if opaque else kernel_cost(task)[0],
        "launch_s": launch,
    }
