"""An independent judge of schedules: replays the JSON steps of ``stretto explain`` on a virtual clock.

It knows nothing of how a schedule came about. It takes the ``steps`` of one rank (or of several), plays
them with one compute stream and FIFO streams for collectives, and raises `ReplayError` where a step comes
before something it depends on, where a collective is started or waited for twice or never, or where ranks
start the collectives of a stream in different orders. `replay_program` does the same with a program that
was lowered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.runtime.program import (
    Block,
    Branch,
    Carried,
    Copy,
    Free,
    LogicalId,
    Loop,
    Program,
    Run,
    Start,
    Wait,
)


class ReplayError(AssertionError):
    """A schedule that cannot be run as it stands. Tests should let it through."""


@dataclass(frozen=True)
class Replayed:
    """Seconds of the whole, of compute, and of compute held by waits; peak bytes.

    ``exposed_by`` is by position of the wait. ``held_seconds``: by how much collectives beside it, which keep
    cores busy, made compute longer.
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    exposed_by: dict[int, float]
    peak_bytes: int
    held_seconds: float = 0.0


def replay_steps(steps: Sequence[Mapping[str, Any]]) -> Replayed:
    """Play ``steps`` in issue order. Raises `ReplayError` on a schedule that breaks its own rules."""
    clock = compute = held = 0.0
    sharing: list[tuple[float, float, float]] = []  # begin, end, busy of what was started
    stream_free: dict[str, float] = {}
    ended: dict[int, float] = {}
    open_starts: dict[int, float] = {}
    exposed: dict[int, float] = {}
    live = peak = 0
    for position, step in enumerate(steps):
        for needed in step["after"]:
            if needed >= position:
                raise ReplayError(f"step {position} ({step['name']}) comes before step {needed}")
            if step["kind"] != "wait" and needed not in ended:
                raise ReplayError(
                    f"step {position} ({step['name']}) uses {steps[needed]['name']} before its wait"
                )
        if step["kind"] == "compute":
            sharing = [each for each in sharing if each[1] > clock]
            taken = _taken(step["seconds"], clock, sharing)
            clock += taken
            compute += step["seconds"]
            held += taken - step["seconds"]
            ended[position] = clock
        elif step["kind"] == "start":
            begin = max(clock, stream_free.get(step["stream"], 0.0))
            stream_free[step["stream"]] = open_starts[position] = begin + step["seconds"]
            if step.get("busy"):
                sharing.append((begin, begin + step["seconds"], step["busy"]))
        elif step["kind"] == "wait":
            (start,) = step["after"]
            if steps[start]["kind"] != "start" or start not in open_starts:
                raise ReplayError(f"step {position} waits for {step['name']}, not in flight")
            if steps[start]["collective"] != step["collective"]:
                raise ReplayError(f"step {position} waits for another's start")
            end = open_starts.pop(start)
            exposed[position] = max(0.0, end - clock)
            clock = max(clock, end)
            ended[position] = clock
        else:
            raise ReplayError(f"step {position} is a {step['kind']!r}")
        live += step["memory_delta"]
        peak = max(peak, live)
    if open_starts:
        names = ", ".join(steps[p]["name"] for p in open_starts)
        raise ReplayError(f"never waited for: {names}")
    return Replayed(clock, compute, sum(exposed.values()), exposed, peak, held)


def _taken(work: float, clock: float, sharing: Sequence[tuple[float, float, float]]) -> float:
    """How long so much compute takes from ``clock`` on, beside what has a share of its cores."""
    if not sharing:
        return work
    at, left = clock, work
    for bound in sorted({t for begin, end, _ in sharing for t in (begin, end) if t > clock}):
        lost = sum(busy for begin, end, busy in sharing if begin <= at < end)
        done = max(0.0, 1.0 - lost) * (bound - at)
        if done >= left:
            return at + left / (1.0 - lost) - clock
        at, left = bound, left - done
    return at + left - clock


def check_common_order(ranks: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Raises `ReplayError` where ranks start different collectives, or in another order, on a stream."""
    orders = []
    for steps in ranks:
        order: dict[str, list[tuple[str, ...]]] = {}
        for step in steps:
            if step["kind"] == "start":
                order.setdefault(step["stream"], []).append(tuple(step["members"]))
        orders.append(order)
    for rank, order in enumerate(orders[1:], 1):
        if order != orders[0]:
            raise ReplayError(f"ranks 0 and {rank} start collectives in different orders")


def replay_program(program: Program, seconds: Callable[[Run | Start], float]) -> Replayed:
    """Walk a program on a virtual clock: what its runs and collectives take is given.

    Runs follow each other; a collective begins when its stream is free and everything run before its start
    is done. Loops of known length run so often, other loops and branches take no time. Memory is that of the
    registers, from the instruction that writes one to the one that frees it; carries are handed on. Raises
    `ReplayError` where a value is read before it is there, freed while a collective reads it, or where a
    collective is started again before it is awaited. ``exposed_by`` is by position of the wait in the
    outermost block, in which a loop counts at its own.
    """
    walk = _Walk(program, seconds)
    walk.own = {slot: walk.sizes[slot] for slot in program.body.parameters}
    walk.live = walk.peak = sum(walk.own.values())
    walk.block(program.body, set(program.body.parameters))
    return Replayed(walk.clock, walk.compute, sum(walk.exposed.values()), walk.exposed, walk.peak)


class _Walk:
    """A walk under way. ``own``: bytes of each register whose memory is nobody else's."""

    def __init__(self, program: Program, seconds: Callable[[Run | Start], float]) -> None:
        self.seconds = seconds
        self.sizes = [t.nbytes for t in program.slot_types]
        self.clock = self.compute = 0.0
        self.free = [0.0] * program.num_streams
        self.ends: dict[int, tuple[float, Start]] = {}
        self.exposed: dict[int, float] = {}
        self.own: dict[int, int] = {}
        self.live = self.peak = 0
        self.arriving: dict[int, tuple[Carried, Block]] = {}

    def block(self, block: Block, there: set[int], within: int | None = None) -> None:
        for index, i in enumerate(block.instructions):
            position = index if within is None else within
            reads: tuple[int, ...] = getattr(i, "slots", ()) or getattr(i, "inputs", ())
            outputs: tuple[int, ...] = getattr(i, "outputs", ())
            if isinstance(i, Copy | LogicalId):
                outputs, reads = (i.output,), (i.input,) if isinstance(i, Copy) else ()
            gone: tuple[int, ...] = getattr(i, "slots", ()) or getattr(i, "donated", ())
            if not isinstance(i, Branch) and not there.issuperset(reads):
                raise ReplayError(f"{i} reads {set(reads).difference(there)}, not there yet")
            reading = {slot for _, start in self.ends.values() for slot in start.inputs}
            donated = set() if isinstance(i, Free) and within is not None else set(gone)
            if reading.intersection(donated):
                raise ReplayError(f"{i} ends what a collective in flight reads")
            if isinstance(i, Loop) and i.trip_count is not None:
                self.loop(i, there, position)
                continue
            if isinstance(i, Run):
                taken = self.seconds(i)
                self.clock, self.compute = self.clock + taken, self.compute + taken
            elif isinstance(i, Start):
                self.start(i)
            elif isinstance(i, Wait):
                there.update(self.wait(i.event, position))
            if not isinstance(i, Start):
                self.write(outputs)
                there.update(outputs)
            self.peak = max(self.peak, self.live)
            self.drop(gone)
            there.difference_update(gone)

    def write(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.own[slot] = self.sizes[slot]
            self.live += self.sizes[slot]

    def drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.live -= self.own.pop(slot, 0)

    def start(self, start: Start) -> None:
        if start.event in self.ends:
            raise ReplayError(f"{start} is started again before it is awaited")
        begin = max(self.clock, self.free[start.stream])
        self.free[start.stream] = begin + self.seconds(start)
        self.ends[start.event] = self.free[start.stream], start
        self.write(start.outputs)

    def wait(self, event: int, position: int) -> Sequence[int]:
        """Wait, if there is something to wait for; the registers that are there now."""
        carried, loop_body = self.arriving.get(event, (None, None))
        if event in self.ends:
            end, start = self.ends.pop(event)
            self.exposed[position] = self.exposed.get(position, 0.0) + max(0.0, end - self.clock)
            self.clock = max(self.clock, end)
            if carried is None:
                return start.outputs
        elif carried is None:
            raise ReplayError(f"event {event} is awaited, but not in flight")
        assert carried is not None and loop_body is not None
        return [loop_body.parameters[k] for _, k in carried.carries]

    def loop(self, loop: Loop, there: set[int], position: int) -> None:
        body = loop.body
        self.arriving |= {carried.event: (carried, body) for carried in loop.carried}
        under_way = {body.parameters[k] for carried in loop.carried for _, k in carried.carries}
        given = loop.inputs
        taken = set(loop.donated)
        for _ in range(loop.trip_count or 0):
            self.hand_on(given, body.parameters, taken)
            self.block(body, there.union(body.parameters) - under_way, position)
            given, taken = body.results, set(body.results)
        for carried in loop.carried:
            if carried.event in self.ends:
                self.wait(carried.event, position)
        self.hand_on(given, loop.outputs, taken)
        there.difference_update(loop.donated)
        there.update(loop.outputs)

    def hand_on(self, given: Sequence[int], to: Sequence[int], taken: set[int]) -> None:
        """What is in some registers is in others; the memory of those ``taken`` goes with it."""
        moved = {slot: self.own.pop(slot, 0) for slot in given if slot in taken}
        for source, target in zip(given, to, strict=True):
            self.own[target] = moved.pop(source, 0)
