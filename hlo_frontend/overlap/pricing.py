"""The predicted time of each task by a table of costs, and the stream on which it runs.

A kernel reads each of its inputs once and writes each of its outputs once.
"""

from __future__ import annotations

from collections.abc import Callable

from stretto.collectives.ops import Collective

from ..flops import flops
from ..ops import op_of
from ..streams import stream_key
from ..trips import annotated_share
from ..values import Node
from .costs import CostTable, span
from .model import Buffer, Graph, Task


def price(graph: Graph, costs: CostTable, opaque: Callable[[Node], float]) -> None:
    """Set time, bytes and stream of each task. ``opaque``: gives the seconds of a loop or branch."""
    streams: dict[object, int] = {}
    arriving = {task.ops[0].node for task in graph.tasks if task.ops[0].arrives}
    for task in graph.tasks:
        node = task.ops[0].node
        if node.collective is not None:
            collective = node.collective
            charge = costs.collective(collective)
            key, label = stream_key(collective), _label(collective)
            if key not in streams:
                streams[key] = len(streams)
                taken = sum(name.split("#")[0] == label for name in graph.streams)
                graph.streams.append(f"{label}#{taken}" if taken else label)
            task.collective = collective
            task.stream = streams[key]
            task.seconds = charge.seconds
            task.moved_bytes = charge.wire_bytes
            if charge.link is not None:
                task.latency_s, task.busy = charge.link.latency_s, charge.link.busy
            task.crosses = node in arriving and not task.ops[0].arrives
            if task.ops[0].arrives:
                task.arrives, task.seconds, task.moved_bytes = True, 0.0, 0.0
                task.extra_bytes = sum(t.nbytes for t in collective.operands)
        elif node.is_runtime:
            task.seconds = opaque(node)
        else:
            price_kernel(task, costs)


def price_blocks(graph: Graph, opaque: Callable[[Node], float]) -> None:
    """Set the times of loops and branches."""
    for task in graph.tasks:
        node = task.ops[0].node
        if node.blocks:
            task.seconds = opaque(node)


def price_kernel(task: Task, costs: CostTable) -> None:
    """Set the time of a kernel: as it was measured, or by the rates of the table."""
    task.flops, task.moved_bytes = _kernel_cost(task)
    task.seconds = costs.compute.seconds(task.flops, task.moved_bytes)
    if costs.measured is not None:
        shares = shared_out(task, task.seconds, costs)
        task.seconds = sum(
            costs.taken(op.instruction, share) for op, share in zip(task.ops, shares, strict=True)
        )


def shared_out(task: Task, seconds: float, costs: CostTable) -> list[float]:
    """Each op's part of a kernel's time, in the proportion of its operations and the bytes of its result."""
    rates = costs.compute
    weights = [
        flops(op.instruction) / rates.flops_per_s + op.written_bytes / rates.bytes_per_s
        for op in task.ops
    ]
    whole = sum(weights)
    if whole <= 0.0:
        return [seconds / len(weights)] * len(weights)
    return [seconds * weight / whole for weight in weights]


def _label(collective: Collective) -> str:
    if collective.is_point_to_point:
        return "p2p"
    stride, size = span(collective)
    return f"stride{stride}x{size}"


def _kernel_cost(task: Task) -> tuple[float, float]:
    """(flops, bytes moved) of a kernel: each input read once, each output written once. A conditional moves
    them where its first branch is taken, if it is known how often that is: the other one hands on."""
    share = annotated_share(task.ops[0].instruction)
    total = sum(flops(op.instruction) for op in task.ops)
    read: dict[Buffer, int] = {}
    moved = 0
    inside = {op.index for op in task.ops}
    for op in task.ops:
        row = op_of(op.instruction.opcode)
        for position, ref in enumerate(op.reads):
            producer = ref.buffer.producer
            if producer is not None and producer.index in inside and producer is not op:
                continue
            nbytes = ref.nbytes
            if row.reads_part and position == 0:
                nbytes = min(nbytes, op.written_bytes)
            elif row.in_place and position == 0:
                nbytes = 0
            whole = max(ref.buffer.nbytes, nbytes)
            read[ref.buffer] = min(whole, read.get(ref.buffer, 0) + nbytes)
        if op.escapes:
            moved += op.written_bytes
    return total, (1.0 if share is None else share) * (moved + sum(read.values()))
