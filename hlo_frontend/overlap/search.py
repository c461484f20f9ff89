"""The schedule: list scheduling against the clock, improved from both ends.

A pass (`play`) runs the tasks against the clock by an urgency, feeding streams or not. Which of these serve
best differs from program to program: they are tried, the likely ones first.

*Urgency* is a blend of two: the longest way to the end of the program, which hurries along what all else
waits for, and the module's own order, which lets nothing pile up. Several blends are tried. After each, the
program is played backward, most recently finished first, which finds how late each task can run; that
lateness is the urgency of one more forward pass (forward-backward improvement, as in project scheduling).
Passes with slightly disturbed urgencies follow while the budget lasts and they gain something.

*Memory.* Where compute or a stream has time to spare, a pass that watches memory would still fill it with
what is ready but needed only much later. So where memory is short, passes are tried that look no further
ahead than a *window* of tasks in the module's order. Watching memory costs time, so an urgency is first
played without; only where that is faster than the best so far but does not fit is it played again, and where
others have missed by far, at once with memory watched.

Invariants: the result depends on the graph and the arguments alone, never on time or hash seeds, so all
ranks decide alike; budgets are therefore counted in tasks visited, not in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from .model import Graph
from .play import Feeding, Player
from .replay import Step, Timeline, replay, unscheduled

# Tasks that passes may visit in all, and passes in all: small graphs need no more. One that does not watch
# memory counts as this share of one that does.
DEFAULT_BUDGET = 150_000
LEAST_PASSES, MOST_PASSES = 3, 32
UNWATCHED = 0.5
# Shares of the program's time by which urgencies are disturbed.
SPREADS = (0.02, 0.005, 0.05, 0.001)
# How many of those that gain nothing one after the other end the search.
IDLE_TURNS = 8
# Passes that do not watch memory are tried as long as they have missed its limit by no more than this share.
NEAR = 0.15
# Shares by which a schedule must beat another in time, or in memory where time is equal.
CLEARLY_FASTER = 1e-4
CLEARLY_SMALLER = 0.05
# How many tasks of the module's order a pass looks ahead, where memory is short.
WINDOWS = (200, 100, 50, 400, 25)
_LATER = float("inf")


# Shares of the module's own order in the urgencies tried.
BLENDS = (0.0, 1.0, 0.5, 0.9, 0.75)


@dataclass
class IssueOrder:
    """An issue order and what it does.

    ``blend`` is the share of the module's own order that served best, ``window`` how far ahead it looked,
    ``feeding`` what came first where streams ran dry, ``missed`` by what share of the limit a pass that
    did not watch memory missed it: where the search for a similar graph should begin.
    """

    steps: list[Step]
    timeline: Timeline
    blend: float = BLENDS[0]
    missed: float = 0.0
    window: float = _LATER
    feeding: Feeding = Feeding.NONE


def search(
    graph: Graph,
    *,
    launch_s: float = 0.0,
    memory_limit: float = _LATER,
    good_enough: float = 0.0,
    budget: int = DEFAULT_BUDGET,
    most_passes: int = MOST_PASSES,
    like: IssueOrder | None = None,
) -> IssueOrder:
    """The best order found: least time, to a ten-thousandth, within ``memory_limit`` bytes.

    Where no order within the limit is found, the module's own order is kept. ``good_enough`` seconds end
    the search, as do ``budget``, the number of tasks that may be visited, and ``most_passes``, of which
    small graphs cannot make more. ``like`` is the schedule of a similar graph.
    """
    steps = unscheduled(graph)
    best = IssueOrder(steps, replay(graph, steps, launch_s))
    if not any(task.is_collective for task in graph.tasks) or not best.timeline.seconds:
        return best
    own = best.timeline
    forward = Player(graph, own.live_by_task(graph, steps))
    backward = Player(graph)
    backward.turn_round()
    random = Random(0)
    passes: float = min(most_passes, max(LEAST_PASSES, budget // len(graph.tasks)))
    tails = longest_tails(graph)
    longest = max(tails)
    turns = [(1.0 - begin / own.seconds) * longest for begin in own.begin]
    leading: Sequence[float] = tails
    blend = like.blend if like else BLENDS[0]
    missed = like.missed if like else 0.0
    window = like.window if like else _LATER
    feeding = like.feeding if like else Feeding.NONE
    looked_ahead = False
    beyond = 0  # by how much passes that watched memory have missed its limit

    def attempt(
        urgency: Sequence[float], watched: bool, looks: float, feeds: Feeding
    ) -> tuple[list[float], bool]:
        """A forward pass; gives the ends of its tasks, and whether it would be the best yet if it fitted."""
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
        best = IssueOrder(steps, timeline, blend, missed, looks, feeds)
        leading, window, feeding = urgency, looks, feeds
        return ends, False

    def play(
        urgency: Sequence[float],
        ahead: float | None = None,
        feed: Feeding | None = None,
        anew: bool = False,
    ) -> list[float]:
        """Passes with this urgency, of which the best one yet is kept. Gives the ends of tasks."""
        looks = window if ahead is None else ahead
        feeds = feeding if feed is None else feed
        faster = True
        if ahead is None and (anew or missed <= NEAR):
            ends, faster = attempt(urgency, False, looks, feeds)
        if faster:
            ends, _ = attempt(urgency, True, looks, feeds)
        return ends

    def unfinished() -> bool:
        fits = best.timeline.peak_bytes <= memory_limit
        return passes > 0 and not (fits and best.timeline.seconds <= good_enough)

    blends = sorted(BLENDS, key=lambda share: share != blend)
    for share in blends:
        if not unfinished():
            return best
        blend = share
        blended = [(1.0 - blend) * a + blend * b for a, b in zip(tails, turns, strict=True)]
        ends = play(blended, anew=True)
        if missed <= NEAR:
            # Where memory is short, the ends say more of it than of what is urgent.
            _, lateness = backward.play(ends)
            passes -= UNWATCHED
            play(lateness)
        if share == blends[0] and unfinished():
            for other in [kind for kind in Feeding if kind is not feeding]:
                if unfinished():
                    ends = play(leading, feed=other)
            if missed <= NEAR and unfinished():
                _, lateness = backward.play(ends)
                passes -= UNWATCHED
                play(lateness, feed=Feeding.NONE)
        if missed and not looked_ahead:
            looked_ahead, blend = True, 1.0
            for ahead in WINDOWS:
                if unfinished():
                    play(turns, ahead)
    turn = gained = 0
    while unfinished() and turn - gained < IDLE_TURNS:
        turn += 1
        last = best
        spread = best.timeline.seconds * SPREADS[turn % len(SPREADS)]
        play([u + random.uniform(-spread, spread) for u in leading])
        if best is not last:
            gained = turn
    return best


def _is_better(found: Timeline, best: Timeline) -> bool:
    """Clearly faster, or as fast with clearly less memory: urgencies tried first are kept where it is equal,
    since buckets are made of what they bring together."""
    if found.seconds > best.seconds:
        return False
    faster = found.seconds < best.seconds * (1.0 - CLEARLY_FASTER)
    return faster or found.peak_bytes < best.peak_bytes * (1.0 - CLEARLY_SMALLER)


def longest_tails(graph: Graph) -> list[float]:
    """Seconds of the longest way from each task's begin to the end."""
    tails = [0.0] * len(graph.tasks)
    for task in reversed(graph.tasks):
        tails[task.index] = task.seconds + max((tails[s] for s in task.after), default=0.0)
    return tails
