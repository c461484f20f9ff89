"""One pass of the scheduler: a simulation that issues tasks by a given urgency (list scheduling).

Whenever compute is free, it takes the most urgent kernel whose inputs have arrived. If there is none, it
waits for the next arrival. Before a kernel is issued, every stream that would become idle while the kernel
runs gets its most urgent ready collective. So collectives start just in time: early enough that no stream
idles, and not earlier, so that memory does not fill with values that nobody needs yet. Kernels that nothing
urgent depends on (weight gradients) thereby move behind collectives that compute would otherwise wait for.

*Feeding.* If weight gradients move behind a long chain of compute, the stream that reduces them idles during
that chain, and all of its work is left for the end. A feeding pass prevents that: if a stream would become
idle before some collective of it can be ready, the pass runs the kernel from which the least compute leads to
such a collective. If compute has as much to do as the stream, a gradient that takes longer than its
collective is better left for the end, where the last collectives leave compute idle (as in Johnson's rule for
two machines in sequence). So only kernels are preferred that together take no longer than the collective that
they lead to. The search makes passes with feeding and without.

*Memory.* A task is issued out of turn only if all remaining tasks could still run in the module's order
within the limit. So a pass never gets stuck, and prefetched values do not take the memory that the critical
path needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, nsmallest

import numpy as np

from .model import Graph
from .replay import Phase, Step

# A wait that frees memory is issued when the collective has ended by the prediction, and then this share of
# its time has passed.
WAIT_MARGIN = 0.25
# How many of the most urgent tasks are tried until one fits into memory.
ALTERNATIVES = 12
_LATER = float("inf")


class Player:
    """Simulates a graph forward or, with all edges reversed, backward.

    ``reference``: the bytes that are live at each task of the module's own order.
    """

    def __init__(self, graph: Graph, reference: Sequence[int] = ()) -> None:
        self.graph = graph
        tasks = graph.tasks
        self.seconds = [task.seconds for task in tasks]
        self.stream = [task.stream for task in tasks]
        self.before = [task.before for task in tasks]
        self.after = [task.after for task in tasks]
        # The collectives among the tasks that a task needs.
        self.awaits = [tuple(i for i in task.before if tasks[i].stream >= 0) for task in tasks]
        self.made = graph.made_bytes
        self.reference = np.array(reference, dtype=np.int64)
        self.readers: list[list[int]] = [[] for _ in graph.buffers]
        for task in tasks:
            for buffer in task.reads:
                self.readers[buffer].append(task.index)
        self.forward = True
        # Collectives that hold inputs which nothing else needs: they are awaited soon after their end.
        self.frees_at_wait = [
            task.is_collective and any(not graph.kept[b] and graph.buffers[b] for b in task.reads)
            for task in tasks
        ]

        # Collectives that the iteration before has started come first on their streams.
        self.starts_first = [task.arrives for task in tasks]
        self.crosses = [task.crosses for task in tasks]
        self._leads: list[list[float]] | None = None

    def turn_round(self) -> None:
        """Simulate backward from now on, without a limit of memory."""
        self.before, self.after = self.after, self.before
        stream = self.stream
        self.awaits = [tuple(i for i in before if stream[i] >= 0) for before in self.before]
        self.forward = False
        self.frees_at_wait = self.starts_first = [False] * len(self.seconds)

    def play(
        self,
        urgency: Sequence[float],
        memory_limit: float = _LATER,
        window: float = _LATER,
        feeds: bool = False,
    ) -> tuple[list[Step], list[float]]:
        """The issue order, and the time at which each task ended. The task of the largest urgency goes first,
        but for those that feed a stream, if ``feeds`` is set.

        Backward, times count from the end of the program, and the order is the reverse of an issue order.
        """
        limit = memory_limit if self.forward else _LATER
        if feeds and self._leads is None:
            self._leads = _leads(self.graph)
        one = _Pass(self, urgency, limit, window, self._leads if feeds and self._leads else [])
        one.play()
        return one.steps, one.end


class _Pass:
    """The state of one pass."""

    def __init__(
        self,
        player: Player,
        urgency: Sequence[float],
        limit: float,
        window: float,
        leads: Sequence[list[float]],
    ) -> None:
        count = len(player.seconds)
        streams = len(player.graph.streams)
        self.player = player
        self.rank = [-u for u in urgency]  # the smallest goes first
        self.limit = limit
        self.limited = limit < _LATER
        self.window = window
        self.leads = leads
        self.need = [len(before) for before in player.before]
        self.arrival = [0.0] * count
        self.end = [0.0] * count
        self.steps: list[Step] = []
        self.clock = 0.0
        self.kernels: list[tuple[float, int]] = []
        # By stream: the kernels that feed it, by how soon they do; issued ones may still be among them.
        self.feeders: list[list[tuple[float, float, int]]] = [[] for _ in leads]
        self.ready: list[list[tuple[float, int]]] = [[] for _ in range(streams)]
        self.later: list[tuple[float, int]] = []
        self.free = [0.0] * streams
        self.waited = [False] * count
        self.issued = [False] * count
        self.in_flight: list[tuple[float, int]] = []
        self.left = count
        # By task: the memory at its turn if all remaining tasks ran in the module's order from here on.
        self.outlook = player.reference.copy()
        self.frontier = 0
        self.live = player.graph.base_bytes
        self.unread = [len(readers) for readers in player.readers]
        # Position, among the readers of each buffer, of the last one that is not issued.
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
                self._make_ready(heappop(later)[1])
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
        """Every task that ``index`` needs has been issued."""
        arrival = self.arrival[index]
        if arrival > self.clock:
            heappush(self.later, (arrival, index))
        else:
            self._make_ready(index)

    def _make_ready(self, index: int) -> None:
        rank = self.rank[index]
        stream = self.player.stream[index]
        if stream >= 0:
            heappush(self.ready[stream], (rank, index))
            return
        heappush(self.kernels, (rank, index))
        for leads, feeders in zip(self.leads, self.feeders, strict=True):
            if leads[index] < _LATER:
                heappush(feeders, (leads[index], rank, index))

    def _queue(self, index: int) -> list[tuple[float, int]]:
        stream = self.player.stream[index]
        return self.kernels if stream < 0 else self.ready[stream]

    def _upcoming(self) -> float:
        """The time of the next arrival, or of the next wait if tasks wait for memory."""
        upcoming = self.later[0][0] if self.later else _LATER
        if self.in_flight and (self.kernels or any(self.ready)):
            upcoming = min(upcoming, self.in_flight[0][0])
        return upcoming

    def _kernel(self) -> int | None:
        """Take the most urgent kernel that fits into memory from the queue."""
        if self.leads:
            fed = self._feeder()
            if fed is not None:
                self._take(self.kernels, fed)
                return fed[1]
        first = self.kernels[0]
        if not self.limited or self._fits(first[1]):
            return heappop(self.kernels)[1]
        for entry in nsmallest(ALTERNATIVES, self.kernels)[1:]:
            if self._fits(entry[1]):
                self._take(self.kernels, entry)
                return entry[1]
        return None

    def _feeder(self) -> tuple[float, int] | None:
        """The kernel that feeds a stream first, if that stream would be idle until then."""
        for stream, feeders in enumerate(self.feeders):
            if self.ready[stream]:
                continue
            while feeders and self.issued[feeders[0][2]]:
                heappop(feeders)
            if not feeders:
                continue
            lead, rank, index = feeders[0]
            if self.free[stream] <= self.clock + lead and self._fits(index):
                return rank, index
        return None

    def _take(self, queue: list[tuple[float, int]], entry: tuple[float, int]) -> None:
        if entry == queue[0]:
            heappop(queue)
        else:
            queue.remove(entry)
            heapify(queue)

    def _fits(self, index: int) -> bool:
        """Whether the remaining tasks in the module's order stay within the limit if this one runs now."""
        made = self.player.made[index]
        if not made or not self.limited:
            return True
        first = self._first_unissued()
        if self.live + made > self.limit or index - first > self.window:
            return False
        between = self.outlook[first:index]
        return not len(between) or int(np.max(between)) + made <= self.limit

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
        """Issue the next task of the module's order: no other fits, and nothing is in flight."""
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
        self.issued[index] = True
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
        self.issued[index] = True
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
        """Update the outlook: ``index`` is issued now instead of at its turn."""
        graph = self.player.graph
        self.live += self.player.made[index]
        first = self._first_unissued()
        task = graph.tasks[index]
        if index > first:
            self.outlook[first:index] += self.player.made[index] - task.extra_bytes
        for buffer in task.reads:
            if graph.kept[buffer]:
                continue
            # If the last reader goes before its turn, the buffer is dead from the next to last one on.
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
        """``index`` will be done at ``when``: update the tasks that need it."""
        self.left -= 1
        arrival, need = self.arrival, self.need
        for after in self.player.after[index]:
            if when > arrival[after]:  # noqa: PLR1730, the hottest line there is
                arrival[after] = when
            need[after] -= 1
            if not need[after]:
                self._reveal(after)


def _leads(graph: Graph) -> list[list[float]]:
    """By stream and kernel: the least seconds of compute, with the kernel's own, that lead to a collective of
    the stream which takes at least as long; infinite if there is none."""
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
                if lead < own[task.index] and lead <= collective:
                    own[task.index], seconds[task.index] = lead, collective
    return leads
