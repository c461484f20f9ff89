"""Another order to fall back on: that of a graph whose last results are finished first.

Where memory is short, passes stay near the order in which tasks are numbered (`play`), and of tasks that are
as urgent the first goes first. The module's own order may be a bad one to stay near: as text it has what the
first result needs first, so all of a backward pass stands before the first update of a weight, and what the
updates read piles up. Beginning from the last result, each update stands where what it reads is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .model import Graph
from .replay import replay
from .schedule import Schedule


def from_last_results(graph: Graph) -> list[int]:
    """The tasks, each right behind what it needs, the last one with nothing behind it first."""
    order: list[int] = []
    seen = [False] * len(graph.tasks)
    for last in reversed(graph.tasks):
        if last.after or seen[last.index]:
            continue
        seen[last.index] = True
        way = [(last.index, iter(last.before))]
        while way:
            index, needs = way[-1]
            need = next((n for n in needs if not seen[n]), None)
            if need is None:
                order.append(index)
                way.pop()
            else:
                seen[need] = True
                way.append((need, iter(graph.tasks[need].before)))
    return order


def scheduled_anew(
    graph: Graph, search: Callable[[Graph], Schedule], launch_s: float = 0.0
) -> Schedule:
    """What ``search`` finds for the graph renumbered, as a schedule of ``graph``."""
    order = from_last_results(graph)
    number = [0] * len(order)
    for new, old in enumerate(order):
        number[old] = new
    tasks = [
        task.moved(
            new,
            tuple(sorted(number[b] for b in task.before)),
            tuple(sorted(number[a] for a in task.after)),
        )
        for new, task in enumerate(graph.tasks[old] for old in order)
    ]
    found = search(replace(graph, tasks=tasks))
    steps = [(order[index], phase) for index, phase in found.steps]
    return replace(found, steps=steps, timeline=replay(graph, steps, launch_s))
