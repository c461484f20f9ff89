"""The search for a schedule: list scheduling with several urgencies, and forward-backward improvement.

A pass (`play`) simulates the tasks by an urgency, with or without feeding streams. Which of them is best
differs from program to program, so several are made, the most promising ones first.

*Urgency* is the longest chain of tasks to the end of the program: it prefers tasks that everything else waits
for. After such a pass, a backward pass, most recently finished tasks first, finds how late each task can run;
that lateness is the urgency of one more forward pass (forward-backward improvement, known from project
scheduling).

*Memory.* If compute or a stream has time to spare, a pass within a memory limit fills memory up to that limit
with values that are needed only much later. So if memory is short, passes are made in the module's own order
that look only a *window* of tasks ahead. A pass with a limit takes longer than one without. So an urgency is
first tried without a limit, and again with one only if the result is the fastest so far and does not fit. If
earlier passes without a limit have missed it by far, only passes with one are made.

Invariants: the result depends on the graph and the arguments alone, never on time or hash seeds, so all ranks
decide alike. Therefore budgets count tasks that are visited, not seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .model import Graph
from .play import Player
from .replay import Step, Timeline, replay, unscheduled

# How many tasks all passes together may visit, and how many passes there are at least. A pass without a limit
# of memory counts as this share of one with a limit.
DEFAULT_BUDGET = 150_000
LEAST_PASSES = 3
UNWATCHED = 0.5
# Passes without a limit of memory are made as long as they miss the limit by no more than this share.
NEAR = 0.15
# Shares by which a schedule must beat another in time, or in memory where time is equal.
CLEARLY_FASTER = 1e-4
CLEARLY_SMALLER = 0.05
# How many tasks of the module's order a pass looks ahead if memory is short.
WINDOWS = (200, 50)
_LATER = float("inf")


@dataclass
class IssueOrder:
    """An issue order, its simulation, and where the search for a similar graph should begin.

    ``window``: how many tasks ahead that pass looked, ``feeds``: whether it fed streams. ``missed``: by which
    share of the limit of memory a pass without a limit missed it.
    """

    steps: list[Step]
    timeline: Timeline
    missed: float = 0.0
    window: float = _LATER
    feeds: bool = False


def search(
    graph: Graph,
    *,
    launch_s: float = 0.0,
    memory_limit: float = _LATER,
    good_enough: float = 0.0,
    budget: int = DEFAULT_BUDGET,
    most_passes: float = _LATER,
    like: IssueOrder | None = None,
) -> IssueOrder:
    """The fastest order that was found within ``memory_limit`` bytes, or the module's own if none fits.

    The search ends at ``good_enough`` seconds, after ``most_passes`` passes, and when ``budget`` tasks were
    visited. ``like``: the schedule of a similar graph.
    """
    steps = unscheduled(graph)
    best = IssueOrder(steps, replay(graph, steps, launch_s))
    if not any(task.is_collective for task in graph.tasks) or not best.timeline.seconds:
        return best
    own = best.timeline
    forward = Player(graph, own.live_by_task(graph, steps))
    backward = Player(graph)
    backward.turn_round()
    passes = min(most_passes, max(LEAST_PASSES, budget // len(graph.tasks)))
    tails = longest_tails(graph)
    leading: Sequence[float] = tails
    missed = like.missed if like else 0.0
    window = like.window if like else _LATER
    feeding = like is not None and like.feeds
    beyond = 0  # bytes by which passes with a limit of memory have missed it

    def attempt(
        urgency: Sequence[float], watched: bool, looks: float, feeds: bool
    ) -> tuple[list[float], bool]:
        """A forward pass. Gives the ends of its tasks, and whether it is the fastest so far but does not
        fit."""
        nonlocal best, leading, passes, missed, window, feeding, beyond
        passes -= 1.0 if watched else UNWATCHED
        limit = memory_limit - beyond if watched else _LATER
        steps, ends = forward.play(urgency, limit, looks, feeds)
        timeline = replay(graph, steps, launch_s)
        over = max(0, timeline.peak_bytes - int(memory_limit)) if memory_limit < _LATER else 0
        if watched:
            beyond += over
        elif over:
            missed = over / memory_limit
        best.missed = missed
        if not _is_better(timeline, best.timeline):
            return ends, False
        if over and best.timeline.peak_bytes <= memory_limit:
            return ends, True
        best = IssueOrder(steps, timeline, missed, looks, feeds)
        leading, window, feeding = urgency, looks, feeds
        return ends, False

    def play(urgency: Sequence[float], feeds: bool, anew: bool = False) -> list[float]:
        """Make passes with this urgency; the best pass so far is kept. Gives the ends of tasks."""
        looks = window
        faster = True
        if anew or missed <= NEAR:
            ends, faster = attempt(urgency, False, looks, feeds)
        if faster:
            ends, _ = attempt(urgency, True, looks, feeds)
        return ends

    def play_lateness(ends: Sequence[float], feeds: bool) -> None:
        """Passes by how late each task can run, given the ends of its tasks in an earlier one. If memory is
        short, it determines those ends more than urgency does."""
        nonlocal passes
        if missed <= NEAR and unfinished():
            _, lateness = backward.play(ends)
            passes -= UNWATCHED
            play(lateness, feeds)

    def unfinished() -> bool:
        fits = best.timeline.peak_bytes <= memory_limit
        return passes > 0 and not (fits and best.timeline.seconds <= good_enough)

    if unfinished():
        ends = play(tails, feeding, anew=True)
        play_lateness(ends, feeding)
    if unfinished():
        ends = play(leading, not feeding)
        play_lateness(ends, False)
    if missed:
        longest = max(tails)
        turns = [(1.0 - begin / own.seconds) * longest for begin in own.begin]
        for ahead in WINDOWS:
            if unfinished():
                attempt(turns, True, ahead, feeding)
    return best


def _is_better(found: Timeline, best: Timeline) -> bool:
    """Whether a schedule is clearly faster, or as fast with clearly less memory. Otherwise the one that was
    found first is kept: the urgencies tried first bring together collectives that make good buckets."""
    if found.seconds > best.seconds:
        return False
    faster = found.seconds < best.seconds * (1.0 - CLEARLY_FASTER)
    return faster or found.peak_bytes < best.peak_bytes * (1.0 - CLEARLY_SMALLER)


def longest_tails(graph: Graph) -> list[float]:
    """Seconds of the longest chain of tasks from each task's begin to the end."""
    tails = [0.0] * len(graph.tasks)
    for task in reversed(graph.tasks):
        tails[task.index] = task.seconds + max((tails[s] for s in task.after), default=0.0)
    return tails
