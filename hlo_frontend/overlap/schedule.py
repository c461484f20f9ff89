"""The schedule: list scheduling against the clock, improved from both ends.

*One pass* plays the clock forward. Whenever compute is free it takes the most urgent kernel whose inputs
have arrived; where there is none, it waits for the next arrival. Before a kernel is issued, every stream
that would run dry while it runs is given its most urgent ready collective, so that starts are issued just
in time: early enough that no stream idles, not earlier, so that memory is not filled with what nobody
needs yet. Kernels that nothing urgent depends on (weight gradients) thereby drift behind collectives that
compute would otherwise wait for.

*Patience.* A long kernel that nothing waits for can hold up an urgent one whose input arrives a moment
later. A patient pass leaves compute idle for up to a share of the long kernel's time instead. That pays
where a stream is the bottleneck, and costs where compute is; so it is one of the things tried.

*Feeding.* Where weight gradients drift behind a long chain of compute, the stream that they would keep busy
idles meanwhile, and all of its work is left for the end. A feeding pass runs, whenever a stream would run dry
until it is through, the kernel from which the least compute leads to a collective of that stream. Where
compute has as much to do as the stream, a gradient that takes longer than its collective is better left for
the end, when the collectives that come last leave compute idle (as in Johnson's rule for two machines, one
behind the other); so there are two kinds of such passes (`Feeding`). They are among the things tried, too.

*Urgency* is a blend of two: the longest way to the end of the program, which hurries along what all else
waits for, and the module's own order, which lets nothing pile up. Several blends are tried. After each, the
program is played backward, most recently finished first, which finds how late each task can run; that
lateness is the urgency of one more forward pass (forward-backward improvement, as in project scheduling).
Passes with slightly disturbed urgencies follow while the budget lasts and they gain something.

*Memory.* The module's own order is the fallback at every moment: a task is issued out of turn only if the
rest could still be run in the module's order within the limit. So passes never get stuck, and prefetched
values cannot crowd out what the critical path needs. Where compute or a stream has time to spare, it would
still fill memory with what is ready but needed only much later. So where memory is short, passes are tried
that look no further ahead than a *window* of tasks in the module's order. Watching memory costs time, so an
urgency is first played without; only where that is faster than the best so far but does not fit is it played
again, and where others have missed by far, at once with memory watched.

Invariants: the result depends on the graph and the arguments alone, never on time or hash seeds, so all
ranks decide alike; budgets are therefore counted in tasks visited, not in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush, nsmallest
from random import Random

import numpy as np

from .model import Graph
from .replay import Phase, Step, Timeline, replay, unscheduled

# Tasks that passes may visit in all, and passes in all: small graphs need no more. One that does not watch
# memory counts as this share of one that does.
DEFAULT_BUDGET = 150_000
LEAST_PASSES, MOST_PASSES = 3, 32
UNWATCHED = 0.5
# A wait that frees memory is issued once the clock is this share of its time past its predicted end.
WAIT_MARGIN = 0.25
# Shares of a kernel's time for which compute may idle to run a more urgent one before it.
PATIENCES = (0.2, 0.5, 1.0)
# Shares of the program's time by which urgencies are disturbed.
SPREADS = (0.02, 0.005, 0.05, 0.001)
# How many of those that gain nothing one after the other end the search.
IDLE_TURNS = 8
# How many of the most urgent tasks are looked at for one that fits.
ALTERNATIVES = 12
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


class Feeding(IntEnum):
    """Which kernels come first where a stream would run dry: those before a collective that takes no less
    than the ``LAST`` of them, or than ``ALL`` that lead to it."""

    NONE = 0
    LAST = 1
    ALL = 2


@dataclass
class Schedule:
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


def schedule(
    graph: Graph,
    *,
    launch_s: float = 0.0,
    memory_limit: float = _LATER,
    good_enough: float = 0.0,
    budget: int = DEFAULT_BUDGET,
    most_passes: int = MOST_PASSES,
    like: Schedule | None = None,
    seed: int = 0,
) -> Schedule:
    """The best order found: least time, to a ten-thousandth, within ``memory_limit`` bytes.

    Where no order within the limit is found, the module's own order is kept. ``good_enough`` seconds end
    the search, as do ``budget``, the number of tasks that may be visited, and ``most_passes``, of which
    small graphs cannot make more. ``like`` is the schedule of a similar graph.
    """
    steps = unscheduled(graph)
    best = Schedule(steps, replay(graph, steps, launch_s))
    if not any(task.is_collective for task in graph.tasks) or not best.timeline.seconds:
        return best
    own = best.timeline
    forward = Player(graph, own.live_by_task(graph, steps))
    backward = Player(graph)
    backward.turn_round()
    random = Random(seed)
    passes: float = min(most_passes, max(LEAST_PASSES, budget // len(graph.tasks)))
    tails = longest_tails(graph)
    longest = max(tails)
    turns = [(1.0 - begin / own.seconds) * longest for begin in own.begin]
    leading: Sequence[float] = tails
    patience = 0.0
    blend = like.blend if like else BLENDS[0]
    missed = like.missed if like else 0.0
    window = like.window if like else _LATER
    feeding = like.feeding if like else Feeding.NONE
    looked_ahead = False
    beyond = 0  # by how much passes that watched memory have missed its limit

    def attempt(
        urgency: Sequence[float], watched: bool, patient: float, looks: float, feeds: Feeding
    ) -> tuple[list[float], bool]:
        """A forward pass; gives the ends of its tasks, and whether it would be the best yet if it fitted."""
        nonlocal best, leading, passes, patience, missed, window, feeding, beyond
        passes -= 1.0 if watched else UNWATCHED
        limit = memory_limit - beyond if watched else _LATER
        steps, ends = forward.play(urgency, limit, patient, looks, feeds)
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
        best = Schedule(steps, timeline, blend, missed, looks, feeds)
        leading, patience, window, feeding = urgency, patient, looks, feeds
        return ends, False

    def play(
        urgency: Sequence[float],
        patient: float,
        ahead: float | None = None,
        feed: Feeding | None = None,
        anew: bool = False,
    ) -> list[float]:
        """Passes with this urgency, of which the best one yet is kept. Gives the ends of tasks."""
        looks = window if ahead is None else ahead
        feeds = feeding if feed is None else feed
        faster = True
        if ahead is None and (anew or missed <= NEAR):
            ends, faster = attempt(urgency, False, patient, looks, feeds)
        if faster:
            ends, _ = attempt(urgency, True, patient, looks, feeds)
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
        ends = play(blended, patience, anew=True)
        if missed <= NEAR:
            # Where memory is short, the ends say more of it than of what is urgent.
            _, lateness = backward.play(ends)
            passes -= UNWATCHED
            play(lateness, patience)
        if share == blends[0] and unfinished():
            for other in [kind for kind in Feeding if kind is not feeding]:
                if unfinished():
                    ends = play(leading, patience, feed=other)
            if missed <= NEAR and unfinished():
                _, lateness = backward.play(ends)
                passes -= UNWATCHED
                play(lateness, patience, feed=Feeding.NONE)
        if missed and not looked_ahead:
            looked_ahead, blend = True, 1.0
            for ahead in WINDOWS:
                if unfinished():
                    play(turns, patience, ahead)
        if share == (like.blend if like else BLENDS[1]):
            for patient in PATIENCES:
                if unfinished():
                    play(leading, patient)
    turn = gained = 0
    while unfinished() and turn - gained < IDLE_TURNS:
        turn += 1
        last = best
        spread = best.timeline.seconds * SPREADS[turn % len(SPREADS)]
        play([u + random.uniform(-spread, spread) for u in leading], patience)
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


def _leads(graph: Graph, kind: Feeding) -> list[list[float]]:
    """By stream and kernel: seconds of the least compute, its own included, that leads to a collective of the
    stream for which this kind of feeding runs it; infinite where there is none."""
    count = len(graph.tasks)
    leads = [[_LATER] * count for _ in graph.streams]
    takes = [[0.0] * count for _ in graph.streams]  # seconds of that collective
    for task in reversed(graph.tasks):
        if task.is_collective:
            continue
        for stream, (own, seconds) in enumerate(zip(leads, takes, strict=True)):
            for index in task.after:
                after = graph.tasks[index]
                if after.stream == stream and task.seconds <= after.seconds:
                    lead, collective = task.seconds, after.seconds
                elif not after.is_collective:
                    lead, collective = task.seconds + own[index], seconds[index]
                else:
                    continue
                if lead < own[task.index] and (lead <= collective or kind is Feeding.LAST):
                    own[task.index], seconds[task.index] = lead, collective
    return leads


def longest_tails(graph: Graph) -> list[float]:
    """Seconds of the longest way from each task's begin to the end."""
    tails = [0.0] * len(graph.tasks)
    for task in reversed(graph.tasks):
        tails[task.index] = task.seconds + max((tails[s] for s in task.after), default=0.0)
    return tails


class Player:
    """Plays a graph forward or, with all edges turned round, backward.

    ``reference`` are the bytes live at each task of the module's own order.
    """

    def __init__(self, graph: Graph, reference: Sequence[int] = ()) -> None:
        self.graph = graph
        tasks = graph.tasks
        self.seconds = [task.seconds for task in tasks]
        self.stream = [task.stream for task in tasks]
        self.before = [task.before for task in tasks]
        self.after = [task.after for task in tasks]
        # Of what a task needs, that which must be waited for.
        self.awaits = [tuple(i for i in task.before if tasks[i].stream >= 0) for task in tasks]
        self.made = graph.made_bytes
        self.reference = np.array(reference, dtype=np.int64)
        self.readers: list[list[int]] = [[] for _ in graph.buffers]
        for task in tasks:
            for buffer in task.reads:
                self.readers[buffer].append(task.index)
        self.forward = True
        # In flight, these hold inputs that nothing else needs: they are waited for soon after their end.
        self.frees_at_wait = [
            task.is_collective and any(not graph.kept[b] and graph.buffers[b] for b in task.reads)
            for task in tasks
        ]

        # What the iteration before has started is under way already, ahead of all else on its stream.
        self.starts_first = [task.arrives for task in tasks]
        self.crosses = [task.crosses for task in tasks]
        self.leads = {kind: _leads(graph, kind) for kind in (Feeding.LAST, Feeding.ALL)}

    def turn_round(self) -> None:
        """Play backward from now on, without regard for memory."""
        self.before, self.after = self.after, self.before
        stream = self.stream
        self.awaits = [tuple(i for i in before if stream[i] >= 0) for before in self.before]
        self.forward = False
        self.frees_at_wait = self.starts_first = [False] * len(self.seconds)

    def play(
        self,
        urgency: Sequence[float],
        memory_limit: float = _LATER,
        patience: float = 0.0,
        window: float = _LATER,
        feeding: Feeding = Feeding.NONE,
    ) -> tuple[list[Step], list[float]]:
        """Issue order, and when each task ended. The largest urgency goes first.

        Backward, times count from the end of the program and the order is the reverse of one.
        """
        limit = memory_limit if self.forward else _LATER
        run = _Run(self, urgency, limit, patience, window, self.leads.get(feeding, ()))
        run.play()
        return run.steps, run.end


class _Run:
    """State of one pass."""

    def __init__(
        self,
        player: Player,
        urgency: Sequence[float],
        limit: float,
        patience: float,
        window: float,
        leads: Sequence[list[float]],
    ) -> None:
        count = len(player.seconds)
        streams = len(player.graph.streams)
        self.player = player
        self.rank = [-u for u in urgency]  # the smallest goes first
        self.limit = limit
        self.patience = patience
        self.limited = limit < _LATER
        self.window = window
        self.leads = leads
        self.need = [len(before) for before in player.before]
        self.arrival = [0.0] * count
        self.end = [0.0] * count
        self.steps: list[Step] = []
        self.clock = 0.0
        self.kernels: list[tuple[float, int]] = []
        self.ready: list[list[tuple[float, int]]] = [[] for _ in range(streams)]
        self.later: list[tuple[float, int]] = []
        self.free = [0.0] * streams
        self.waited = [False] * count
        self.issued = [False] * count
        self.in_flight: list[tuple[float, int]] = []
        self.left = count
        # Memory if all that is left ran in the module's order from here on, by task of that order.
        self.outlook = player.reference.copy()
        self.frontier = 0
        self.live = player.graph.base_bytes
        self.unread = [len(readers) for readers in player.readers]
        # Position, among the readers of each buffer, of the last that is not issued.
        self.last_reader = [count - 1 for count in self.unread]

    def play(self) -> None:
        first = self.player.starts_first
        free = [index for index, need in enumerate(self.need) if not need]
        for index in sorted(free, key=lambda index: not first[index]):
            if first[index]:
                self._start(index)
            else:
                self._reveal(index)
        seconds, later, in_flight = self.player.seconds, self.later, self.in_flight
        while self.left:
            clock = self.clock
            while later and later[0][0] <= clock:
                _, index = heappop(later)
                heappush(self._queue(index), (self.rank[index], index))
            while in_flight and in_flight[0][0] <= clock:
                self._wait(heappop(in_flight)[1])
            kernel = self._kernel() if self.kernels else None
            if kernel is not None:
                self._fill(clock + seconds[kernel])
                self._run(kernel)
                continue
            self._fill(self._upcoming())
            upcoming = self._upcoming()
            if upcoming < _LATER:
                self.clock = max(self.clock, upcoming)
            elif self.left:
                self._force()
        for _, index in sorted(self.in_flight):
            self._wait(index)

    def _reveal(self, index: int) -> None:
        """All that ``index`` needs is on its way."""
        arrival = self.arrival[index]
        if arrival > self.clock:
            heappush(self.later, (arrival, index))
        else:
            heappush(self._queue(index), (self.rank[index], index))

    def _queue(self, index: int) -> list[tuple[float, int]]:
        stream = self.player.stream[index]
        return self.kernels if stream < 0 else self.ready[stream]

    def _upcoming(self) -> float:
        """When something next arrives or, where something waits for memory, is freed."""
        upcoming = self.later[0][0] if self.later else _LATER
        if self.in_flight and (self.kernels or any(self.ready)):
            upcoming = min(upcoming, self.in_flight[0][0])
        return upcoming

    def _kernel(self) -> int | None:
        """The most urgent kernel that fits and holds up nothing more urgent, taken from the queue."""
        if self.leads:
            fed = self._feeder()
            if fed is not None:
                self._take(self.kernels, fed)
                return fed[1]
        first = self.kernels[0]
        fits = not self.limited or self._fits(first[1])
        if fits and not (self.patience and self._holds_up(first)):
            return heappop(self.kernels)[1]
        for entry in nsmallest(ALTERNATIVES, self.kernels)[1:]:
            if self._fits(entry[1]) and not self._holds_up(entry):
                self._take(self.kernels, entry)
                return entry[1]
        return None

    def _feeder(self) -> tuple[float, int] | None:
        """The kernel that soonest gives a stream something to do that would run dry until then."""
        for stream, leads in enumerate(self.leads):
            if self.ready[stream]:
                continue
            near = [(leads[e[1]], e) for e in self.kernels if leads[e[1]] < _LATER]
            lead, entry = min(near, default=(_LATER, None))
            if entry is None or self.free[stream] > self.clock + lead:
                continue
            if self._fits(entry[1]):
                return entry
        return None

    def _holds_up(self, entry: tuple[float, int]) -> bool:
        if not self.patience or not self.later:
            return False
        arrival, awaited = self.later[0]
        seconds = self.player.seconds[entry[1]]
        return (
            self.clock + seconds > arrival
            and arrival - self.clock < self.patience * seconds
            and self.rank[awaited] < entry[0]
        )

    def _take(self, queue: list[tuple[float, int]], entry: tuple[float, int]) -> None:
        if entry is queue[0]:
            heappop(queue)
        else:
            queue.remove(entry)
            heapify(queue)

    def _fits(self, index: int) -> bool:
        """Whether the task may run now with the rest in the module's order still within the limit."""
        made = self.player.made[index]
        if not made or not self.limited:
            return True
        first = self._first_unissued()
        if self.live + made > self.limit or index - first > self.window:
            return False
        between = self.outlook[first:index]
        return not len(between) or int(between.max()) + made <= self.limit

    def _first_unissued(self) -> int:
        while self.frontier < len(self.issued) and self.issued[self.frontier]:
            self.frontier += 1
        return self.frontier

    def _fill(self, horizon: float) -> None:
        """Issue collectives to streams that would idle before ``horizon``."""
        for stream, queue in enumerate(self.ready):
            while queue and (self.free[stream] < horizon or self.free[stream] <= self.clock):
                entry = queue[0]
                if self.limited and not self._fits(entry[1]):
                    alternatives = nsmallest(ALTERNATIVES, queue)[1:]
                    fitting = (e for e in alternatives if self._fits(e[1]))
                    entry = next(fitting, entry)
                    if entry is queue[0]:
                        break
                self._take(queue, entry)
                self._start(entry[1])

    def _force(self) -> None:
        """Nothing fits and nothing is on its way: the module's own order goes on."""
        waiting = [*self.kernels, *(entry for queue in self.ready for entry in queue)]
        entry = min(waiting, key=lambda e: e[1])
        self._take(self._queue(entry[1]), entry)
        if self.player.stream[entry[1]] < 0:
            self._run(entry[1])
        else:
            self._start(entry[1])

    def _run(self, index: int) -> None:
        player = self.player
        for awaited in player.awaits[index]:
            if not self.waited[awaited]:
                self._wait(awaited)
        self.steps.append((index, Phase.COMPUTE))
        self.clock += player.seconds[index]
        self.end[index] = self.clock
        if self.limited:
            self._account(index)
            self._release(index)
        self._done(index, self.clock)

    def _start(self, index: int) -> None:
        player = self.player
        for awaited in player.awaits[index]:
            if not self.waited[awaited]:
                self._wait(awaited)
        self.steps.append((index, Phase.START))
        stream = player.stream[index]
        ends = max(self.clock, self.free[stream]) + player.seconds[index]
        self.end[index] = self.free[stream] = ends
        if player.frees_at_wait[index]:
            heappush(self.in_flight, (ends + WAIT_MARGIN * player.seconds[index], index))
        else:
            heappush(self.in_flight, (_LATER, index))
        if self.limited:
            self._account(index)
        self._done(index, ends)

    def _wait(self, index: int) -> None:
        if not self.waited[index]:
            self.waited[index] = True
            if not self.player.crosses[index]:
                self.steps.append((index, Phase.WAIT))
                if self.limited:
                    self._release(index)

    def _account(self, index: int) -> None:
        """The outlook once ``index`` is issued now instead of in its turn."""
        self.issued[index] = True
        graph = self.player.graph
        self.live += self.player.made[index]
        first = self._first_unissued()
        task = graph.tasks[index]
        if index > first:
            self.outlook[first:index] += self.player.made[index] - task.extra_bytes
        for buffer in task.reads:
            if graph.kept[buffer]:
                continue
            # Where the last of its readers goes before its turn, it is dead from the next to last on.
            last = self._last_unissued_reader(buffer, first - 1)
            if last < index:
                self.outlook[max(first, last + 1) : index + 1] -= graph.buffers[buffer]

    def _last_unissued_reader(self, buffer: int, otherwise: int) -> int:
        readers, position = self.player.readers[buffer], self.last_reader[buffer]
        while position >= 0 and self.issued[readers[position]]:
            position -= 1
        self.last_reader[buffer] = position
        return readers[position] if position >= 0 else otherwise

    def _release(self, index: int) -> None:
        graph = self.player.graph
        self.live -= graph.tasks[index].extra_bytes
        for buffer in graph.tasks[index].reads:
            self.unread[buffer] -= 1
            if not self.unread[buffer] and not graph.kept[buffer]:
                self.live -= graph.buffers[buffer]

    def _done(self, index: int, when: float) -> None:
        """``index`` will be done at ``when``: tell those that need it."""
        self.left -= 1
        arrival, need = self.arrival, self.need
        for after in self.player.after[index]:
            if when > arrival[after]:  # noqa: PLR1730, the hottest line there is
                arrival[after] = when
            need[after] -= 1
            if not need[after]:
                self._reveal(after)
