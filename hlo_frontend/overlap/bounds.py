"""What a graph takes at least, found quickly: by it searches end that have nothing left to gain.

`floor` finds a tighter bound, in longer time. Both hold for every order of the tasks.

In a loop's body the clock goes from iteration to iteration. What begins and ends in one iteration takes its
longest way there; what crosses takes its stream's time alone.
"""

from __future__ import annotations

from .buckets import bucket_key
from .model import Graph


def least_seconds(graph: Graph, launch_s: float = 0.0) -> float:
    """No order of these tasks takes less: a launch, and all compute, a stream's work or the longest way."""
    least = graph.compute_seconds + launch_s
    return max([least, longest_way(graph), *graph.stream_seconds()])


def least_merged_seconds(graph: Graph, launch_s: float = 0.0) -> float:
    """No order of these tasks takes less, whichever of them are merged into buckets.

    A bucket takes longer than each of its members, and comes after all that any of them does: no way gets
    shorter by it. A stream saves no more than the latencies of what may be merged.
    """
    saved = [0.0] * len(graph.streams)
    for task in graph.tasks:
        if bucket_key(task) is not None:
            saved[task.stream] += task.latency_s
    work = zip(graph.stream_seconds(), saved, strict=True)
    least = graph.compute_seconds + launch_s
    return max([least, longest_way(graph), *(seconds - less for seconds, less in work)])


def longest_way(graph: Graph) -> float:
    """The longest way through tasks that need one another; in a loop's body, of those of one iteration."""
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
