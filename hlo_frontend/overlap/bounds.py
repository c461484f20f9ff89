"""Lower bounds of a graph's time that are quick to compute. A search that has reached one ends.

`floor` is a tighter bound that takes longer. Both hold for every order of the tasks.

In a loop's body, time is that from one iteration to the next. Tasks that begin and end in the same iteration
bound it by their longest chain; collectives that cross into the next one only by the work of their stream.
"""

from __future__ import annotations

from .buckets import bucket_key
from .model import Graph


def least_seconds(graph: Graph, launch_s: float = 0.0) -> float:
    """The largest of: one launch and all compute, the work of a stream, the longest chain of tasks."""
    least = graph.compute_seconds + launch_s
    return max([least, longest_way(graph), *graph.stream_seconds()])


def least_merged_seconds(graph: Graph, launch_s: float = 0.0) -> float:
    """A lower bound for every order of these tasks, whichever collectives are merged into buckets.

    Merging makes no chain of tasks shorter: a bucket takes longer than each of its members, and depends on
    everything that any of them depends on. A stream saves at most the latencies of the members.
    """
    saved = [0.0] * len(graph.streams)
    for task in graph.tasks:
        if bucket_key(task) is not None:
            saved[task.stream] += task.latency_s
    work = zip(graph.stream_seconds(), saved, strict=True)
    least = graph.compute_seconds + launch_s
    return max([least, longest_way(graph), *(seconds - less for seconds, less in work)])


def longest_way(graph: Graph) -> float:
    """The longest chain of tasks that depend on one another, in a loop's body within one iteration."""
    longest = 0.0
    tails = [0.0] * len(graph.tasks)
    for task in reversed(graph.tasks):
        if task.arrives:  # it may have ended before the iteration begins
            continue
        behind = 0.0
        for index in task.after:
            behind = max(behind, tails[index])
        tails[task.index] = behind + (0.0 if task.crosses else task.seconds)
        longest = max(longest, tails[task.index])
    return longest
