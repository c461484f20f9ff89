"""A lower bound of the time of every plan of a block, also of plans that merge collectives or stage loops.

`floor` bounds the orders of one graph. A plan may also split combined collectives, merge others into buckets,
and run parts of a loop an iteration early or late. This bound uses what holds nevertheless:

- A bucket takes at least the time of its members' bytes and one latency. So each collective that could be
  merged counts without its latency, in a graph whose combined collectives are split. The bounds of `floor`
  hold for such members, which take the bucket's time one after the other.
- Collectives that depend on one another are in different buckets, and so are collectives of different kinds,
  types or groups (`bucket_key`): for each key there are at least as many buckets as its longest chain has
  members.
- Merging makes no chain of tasks shorter: a bucket takes longer than each of its members.
- A resource does all of its work, that of a loop as often as the loop runs. If iterations of a loop can be
  moved, only this bounds the block around it. Kernels that are moved may be fused with others and read less,
  so only their arithmetic counts, not the memory that they read and write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ..streams import stream_key
from ..trips import trip_count
from ..values import BlockGraph, Node, NodeKind
from .bounds import longest_way
from .buckets import bucket_key
from .costs import CostTable
from .floor import Floor, floor
from .kernels import build
from .loops import control_flow_seconds
from .model import Graph, Task
from .pricing import price_blocks
from .uncombine import uncombine


@dataclass(frozen=True)
class BlockFloor:
    """Least seconds of a block, of all its compute, and of each stream (by `stream_key`, with its name).

    ``arithmetic``: the part of ``compute`` that is left if memory takes no time. ``latency``: the least sum
    of latencies by stream. ``movable``: whether the block has a loop of known length that communicates, whose
    iterations may then run beside the code around it.
    """

    floor: Floor
    compute: float
    arithmetic: float
    streams: Mapping[object, tuple[str, float]]
    latency: Mapping[object, float]
    movable: bool


def floor_of(
    block: BlockGraph,
    costs: CostTable,
    donated: Iterable[int],
    inner: Mapping[Node, tuple[BlockFloor, ...]],
    graph: Graph,
) -> BlockFloor:
    """The floor of a block. ``inner``: the floors of the blocks of its loops and branches. ``graph``: the
    task graph of the block as it is written; times of loops and branches in it are updated in place."""
    undo = uncombine(block, costs)
    try:
        least = {
            n: control_flow_seconds(n, [p.floor.seconds for p in ps]) for n, ps in inner.items()
        }
        if undo is not None:
            graph = build(block, costs, donated, least.__getitem__)
        else:
            price_blocks(graph, least.__getitem__)
    finally:
        if undo is not None:
            undo()
    opaque = {t.index: t.ops[0].node for t in graph.tasks if t.ops[0].node.blocks}
    kernels = [t for t in graph.tasks if not t.is_collective and t.index not in opaque]
    compute = sum(task.seconds for task in kernels)
    arithmetic = sum(_arithmetic(task, costs) for task in kernels)
    for node, parts in inner.items():
        compute += control_flow_seconds(node, [p.compute for p in parts])
        arithmetic += control_flow_seconds(node, [p.arithmetic for p in parts])
    streams, latency = _streams(graph, inner)
    movable = any(
        (node.kind is NodeKind.LOOP and trip_count(node) is not None and parts[-1].streams)
        or any(p.movable for p in parts)
        for node, parts in inner.items()
    )
    totals = {name: seconds + latency.get(key, 0.0) for key, (name, seconds) in streams.items()}
    work = arithmetic if movable else compute
    resource, most = max([("compute", work), *totals.items()], key=lambda total: total[1])
    best = Floor(most, resource, most)
    if not movable:
        merged = floor(_merged(graph))
        way = longest_way(graph)
        if merged.seconds > best.seconds:
            best = replace(merged, resource_seconds=min(most, merged.seconds))
        if way > best.seconds:
            best = Floor(way, "path", most)
    return BlockFloor(best, compute, arithmetic, streams, latency, movable)


def _arithmetic(task: Task, costs: CostTable) -> float:
    """The least time of a kernel, whichever others it is fused with."""
    if costs.measured is not None:
        return task.seconds
    return costs.compute.seconds(task.flops, 0.0)


def _merged(graph: Graph) -> Graph:
    """The graph in which each collective that could be merged has no latency."""
    tasks = []
    for task in graph.tasks:
        copy = task.moved(task.index, task.before, task.after)
        if bucket_key(task) is not None:
            copy.seconds -= task.latency_s
        tasks.append(copy)
    return replace(graph, tasks=tasks)


def _streams(
    graph: Graph, inner: Mapping[Node, tuple[BlockFloor, ...]]
) -> tuple[dict[object, tuple[str, float]], dict[object, float]]:
    """Work of each stream without the latencies of collectives that could be merged, and the latencies that
    remain even then."""
    work: dict[object, tuple[str, float]] = {}
    latency: dict[object, float] = {}

    def add(key: object, name: str, seconds: float) -> None:
        name, before = work.get(key, (name, 0.0))
        work[key] = name, before + seconds

    keys = [bucket_key(task) for task in graph.tasks]
    stream_of: dict[object, object] = {}  # by key of buckets
    for task, bucket in zip(graph.tasks, keys, strict=True):
        if task.collective is not None:
            saved = task.latency_s if bucket is not None else 0.0
            stream = stream_key(task.collective)
            add(stream, graph.streams[task.stream], task.seconds - saved)
            if saved:
                stream_of[bucket] = stream
    for bucket, stream in stream_of.items():
        longest: list[float] = []  # the latencies of the longest chain to a task
        for task, own in zip(graph.tasks, keys, strict=True):
            chain = max([longest[b] for b in task.before], default=0.0)
            longest.append(chain + task.latency_s if own == bucket else chain)
        latency[stream] = latency.get(stream, 0.0) + max(longest)
    for node, parts in inner.items():
        for key in {key: None for p in parts for key in p.streams}:
            shares = [p.streams.get(key, ("", 0.0))[1] for p in parts]
            waits = [p.latency.get(key, 0.0) for p in parts]
            (name, *_) = [p.streams[key][0] for p in parts if key in p.streams]
            if node.kind is NodeKind.LOOP:
                add(key, name, control_flow_seconds(node, shares))
                latency[key] = latency.get(key, 0.0) + control_flow_seconds(node, waits)
            else:  # the choice that is taken may be the one that uses the stream least
                add(key, name, min(shares))
    return work, latency
