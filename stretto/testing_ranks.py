"""Replays a lowered program on all of its devices, a process for each, on virtual clocks.

`replay_ranks` walks the program as the executor does: runs follow each other on a device, collectives are
tasks of streams, which take one at a time in the order of their starts, and a wait ends when its task has.
What runs and messages take is given. It shows what a schedule is worth without a machine that has so many
cores: who waits for whom follows from the program alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stretto.collectives.ops import Collective, Kind
from stretto.runtime.program import Block, Branch, Carried, Loop, Program, Run, Start, Wait
from stretto.runtime.program.valid import left_out
from stretto.testing_replay import ReplayError

# ``seconds(run, device, iteration)`` of the innermost loop around it, 0 outside of loops.
Seconds = Callable[[Run, int, int], float]
# ``taken(branch, device, iteration)``: which of its blocks is walked. All members of a collective in it must
# walk it together.
Taken = Callable[[Branch, int, int], int]


@dataclass(frozen=True)
class Ranks:
    """What became of a replay: the end of each device, and how long it waited for others. Seconds."""

    ends: tuple[float, ...]
    waited: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return max(self.ends)


@dataclass
class _Posted:
    """A start on a device: when it was made, and which of its pairs move nothing."""

    start: Start
    time: float
    skip: frozenset[int]
    begin: float | None = None
    end: float | None = None


def replay_ranks(
    program: Program,
    seconds: Seconds,
    transfer: Callable[[Collective], float],
    taken: Taken | None = None,
) -> Ranks:
    """Walk ``program`` on all devices at once.

    Runs that a device leaves out take no time. A message begins when both sides have begun their tasks and
    takes ``transfer(collective)``; the task of who sends and of who receives ends with it. Other collectives
    begin when all members of a group have. Raises `ReplayError` where devices wait for each other for ever,
    and ``NotImplementedError`` for loops of unknown length, sends, receives, and branches without ``taken``.
    """
    ranks = _Ranks(program, seconds, transfer, taken)
    walks = [ranks.walk(device) for device in range(program.num_devices)]
    left = dict(enumerate(walks))
    while left:
        before = ranks.steps
        for device, walk in list(left.items()):
            if next(walk, True):
                del left[device]
        if left and ranks.steps == before:
            raise ReplayError(f"devices {sorted(left)} wait for each other for ever")
    return Ranks(tuple(ranks.clock), tuple(ranks.waited))


class _Ranks:
    """A replay under way. ``steps``: how many starts and waits it has come through on all devices."""

    def __init__(
        self,
        program: Program,
        seconds: Seconds,
        transfer: Callable[[Collective], float],
        taken: Taken | None,
    ) -> None:
        self.program, self.seconds, self.taken = program, seconds, taken
        self.skips = [
            left_out(c.valid_iterations) if c.valid_iterations else None
            for c in program.collectives
        ]
        self.transfer = [transfer(c) for c in program.collectives]
        count = program.num_devices
        self.clock, self.waited, self.steps = [0.0] * count, [0.0] * count, 0
        # By device and stream, all that was started on it.
        self.posted: list[list[list[_Posted]]] = [
            [[] for _ in range(program.num_streams)] for _ in range(count)
        ]
        self.events: list[dict[int, tuple[int, int]]] = [{} for _ in range(count)]
        self.left_out: dict[tuple[tuple[int, ...], ...], Callable[[int], frozenset[int]]] = {}

    def walk(self, device: int) -> Iterator[bool]:
        """Walk as far as others allow; gives False where it must wait for them."""
        yield from self.block(self.program.body, device, 0, {})

    def block(
        self, block: Block, device: int, iteration: int, carried: dict[int, Carried]
    ) -> Iterator[bool]:
        for i in block.instructions:
            match i:
                case Run():
                    if not i.valid or device not in self._skips(i)(iteration):
                        self.clock[device] += self.seconds(i, device, iteration)
                case Start():
                    self.start(i, device, iteration)
                case Wait():
                    if i.event not in carried or i.event in self.events[device]:
                        yield from self.wait(i.event, device)
                case Loop(trip_count=int(trips)):
                    inner = {c.event: c for c in i.carried}
                    for t in range(trips):
                        yield from self.block(i.body, device, t, inner)
                    for event in inner:
                        if event in self.events[device]:
                            yield from self.wait(event, device)
                case Branch() if self.taken is not None:
                    chosen = i.branches[self.taken(i, device, iteration)]
                    yield from self.block(chosen, device, iteration, carried)
                case Loop() | Branch():
                    raise NotImplementedError(f"the replay does not follow {i.name or i}")

    def _skips(self, run: Run) -> Callable[[int], frozenset[int]]:
        if run.valid not in self.left_out:
            self.left_out[run.valid] = left_out(run.valid)
        return self.left_out[run.valid]

    def start(self, start: Start, device: int, iteration: int) -> None:
        self.steps += 1
        posted = self.posted[device][start.stream]
        skips = self.skips[start.collective]
        skip = frozenset() if skips is None else skips(iteration)
        self.events[device][start.event] = start.stream, len(posted)
        posted.append(_Posted(start, self.clock[device], skip))

    def wait(self, event: int, device: int) -> Iterator[bool]:
        stream, number = self.events[device].pop(event)
        while (end := self.end(device, stream, number)) is None:
            yield False
        self.steps += 1
        self.waited[device] += max(0.0, end - self.clock[device])
        self.clock[device] = max(self.clock[device], end)

    def begin(self, device: int, stream: int, number: int) -> float | None:
        """When a task begins: once it is started and the one before it has ended. None if not yet known."""
        posted = self.posted[device][stream]
        if number >= len(posted):
            return None
        task = posted[number]
        if task.begin is None:
            before = self.end(device, stream, number - 1) if number else 0.0
            if before is not None:
                task.begin = max(task.time, before)
        return task.begin

    def end(self, device: int, stream: int, number: int) -> float | None:
        task = self.posted[device][stream][number]
        if task.end is None:
            begins = [self.begin(d, stream, number) for d in self._together(device, task)]
            own = self.begin(device, stream, number)
            if own is not None and None not in begins:
                late = [
                    max(own, b) + self.transfer[task.start.collective]
                    for b in begins
                    if b is not None
                ]
                task.end = max([own, *late])
        return task.end

    def _together(self, device: int, task: _Posted) -> list[int]:
        """The devices that a device's part in a collective waits for."""
        collective = self.program.collectives[task.start.collective]
        if collective.kind in (Kind.SEND, Kind.RECV):
            raise NotImplementedError(f"the replay does not follow {collective.kind}")
        if collective.kind is Kind.PERMUTE:
            moving = [p for k, p in enumerate(collective.pairs) if k not in task.skip]
            ends = [(s, t) for s, t in moving if device in (s, t) and s != t]
            return [t if s == device else s for s, t in ends]
        groups = [g for g in collective.groups if device in g]
        return [other for group in groups for other in group if other != device]
