"""The plan of a program's collectives as text: for each block its steps in their order, and its time with and
without the plan. ``explain --costs`` prints the ledger of the collectives.
"""

from __future__ import annotations

from collections.abc import Iterator

from .overlap.apply import Planned
from .overlap.model import Task
from .overlap.replay import Phase

MOST_NAMES = 4  # instructions of a kernel that are named


def plan_text(planned: Planned) -> str:
    """The plan of a block and of those inside it."""
    return "\n".join(_lines("entry", planned, "")) + "\n"


def _lines(name: str, planned: Planned, indent: str) -> Iterator[str]:
    seconds = f"{_us(planned.seconds)}, {_us(planned.without)} without a plan"
    if planned.steps is None or planned.graph is None:
        yield f"{indent}{name}: keeps its order, {_us(planned.seconds)}"
    else:
        yield f"{indent}{name}: {seconds}"
        for index, phase in planned.steps:
            yield f"{indent}  {_step(planned.graph.tasks[index], phase)}"
    for report in planned.loops:
        moved = f"early ({', '.join(report.early)}) late ({', '.join(report.late)})"
        yield (
            f"{indent}  loop %{report.name}: {_us(report.seconds)} an iteration, {_us(report.before)} "
            f"before; {report.why or moved}"
        )
    for node, plans in planned.inner.items():
        for i, inner in enumerate(plans):
            yield from _lines(f"%{node.instruction.name}, block {i}", inner, indent + "  ")


def _step(task: Task, phase: Phase) -> str:
    names = [f"%{op.instruction.name}" for op in task.ops]
    shown = ", ".join(names[:MOST_NAMES])
    if len(names) > MOST_NAMES:
        shown += f" and {len(names) - MOST_NAMES} more"
    text = f"{phase} {shown}"
    if phase is Phase.WAIT:
        return text
    on = f" on stream {task.stream}" if task.is_collective else ""
    crosses = ", awaited in the next iteration" if task.crosses else ""
    return f"{text}: {_us(task.seconds)}{on}{crosses}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
