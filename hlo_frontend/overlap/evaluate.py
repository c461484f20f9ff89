"""The predicted time of a plan: by the table of costs with which it was made, and by another table.

For another table, the steps of every block are replayed unchanged with new times of kernels. A collective
that is handed to its stream's thread costs one launch more, as in `apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stretto.runtime.program import Prediction

from ..values import BlockGraph, Node
from .apply import Order, Planned, kept_steps
from .costs import CostTable
from .kernels import build
from .loops import blocks_of, control_flow_seconds
from .model import Graph
from .pricing import price_kernel
from .replay import handed_over
from .shared_cores import replay_shared


def prediction(planned: Planned) -> Prediction | None:
    """The predicted time of a program, from the plan of its entry; None if that was not worth planning.

    Loops and branches count as `control_flow_seconds` says.
    """
    if not planned.considered:
        return None
    exposed, held = _waited(planned)
    return Prediction(planned.seconds, exposed, held)


def _waited(planned: Planned) -> tuple[float, float]:
    """Seconds that collectives are exposed, and that they take from compute, with the blocks inside."""
    timeline = planned.timeline
    exposed, held = (
        (planned.exposed, 0.0) if timeline is None else (timeline.exposed_seconds, timeline.held)
    )
    for node, plans in planned.inner.items():
        inside = [_waited(plan) for plan in plans]
        exposed += control_flow_seconds(node, [e for e, _ in inside]) + plans[-1].under_way
        held += control_flow_seconds(node, [h for _, h in inside])
    return exposed, held


def seconds_of(
    block: BlockGraph,
    planned: Planned | None,
    costs: CostTable,
    ordered: Order,
    own: Sequence[int] = (),
) -> float:
    """Predicted seconds of a block as it was planned, and of the blocks inside it.

    ``planned``: the result of `apply.plan` for this block, None if there is none; its graphs get new times in
    place. ``ordered``: gives the default order of a block. ``own``: positions of parameters whose memory the
    block may free.
    """
    if not block.nodes:
        return 0.0
    inside: dict[Node, float] = {}
    for node in block.nodes:
        if node.blocks:
            plans = planned.inner.get(node) if planned else None
            taken = [
                seconds_of(inner, plan, costs, ordered, carries)
                for (inner, carries), plan in zip(
                    blocks_of(node), plans or (None,) * len(node.blocks), strict=True
                )
            ]
            inside[node] = control_flow_seconds(node, taken)
            inside[node] += plans[-1].under_way if plans else 0.0
    launch = costs.compute.launch_s
    if planned is not None and planned.graph is not None and planned.steps is not None:
        graph, steps = planned.graph, planned.steps
        _price(graph, costs, inside.__getitem__)
    else:
        graph = build(block, costs, own, inside.__getitem__)
        steps = kept_steps(block, graph, ordered)
    return replay_shared(graph, steps, launch).seconds + launch * handed_over(steps)


def _price(graph: Graph, costs: CostTable, opaque: Callable[[Node], float]) -> None:
    for task in graph.tasks:
        node = task.ops[0].node
        if task.is_collective:
            continue
        if node.is_runtime:
            task.seconds = opaque(node)
        else:
            price_kernel(task, costs)
