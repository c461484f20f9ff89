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

from stretto.runtime.program import Branch, Program, Run, Start, Wait


class ReplayError(AssertionError):
    """A schedule that cannot be run as it stands. Tests should let it through."""


@dataclass(frozen=True)
class Replayed:
    """Seconds of the whole, of compute, and of compute held by waits; peak bytes.

    ``exposed_by`` is by position of the wait.
    """

    seconds: float
    compute_seconds: float
    exposed_seconds: float
    exposed_by: dict[int, float]
    peak_bytes: int


def replay_steps(steps: Sequence[Mapping[str, Any]]) -> Replayed:
    """Play ``steps`` in issue order. Raises `ReplayError` on a schedule that breaks its own rules."""
    clock = compute = 0.0
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
            clock += step["seconds"]
            compute += step["seconds"]
            ended[position] = clock
        elif step["kind"] == "start":
            begin = max(clock, stream_free.get(step["stream"], 0.0))
            stream_free[step["stream"]] = open_starts[position] = begin + step["seconds"]
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
    return Replayed(clock, compute, sum(exposed.values()), exposed, peak)


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
    """Walk a program's outermost block on a virtual clock: what its runs and collectives take is given.

    Runs follow each other; a collective begins when its stream is free and everything run before its start
    is done. Memory is that of the registers, from the instruction that writes one to the one that frees it.
    Raises `ReplayError` where a value is read before it is there, or freed while a collective reads it.
    ``exposed_by`` is by position of the wait. Loops and branches take no time.
    """
    sizes = [t.nbytes for t in program.slot_types]
    there = set(program.body.parameters)
    clock = compute = 0.0
    free = [0.0] * program.num_streams
    ends: dict[int, tuple[float, Start]] = {}
    exposed: dict[int, float] = {}
    live = peak = sum(sizes[slot] for slot in there)
    for position, i in enumerate(program.body.instructions):
        reads: tuple[int, ...] = getattr(i, "slots", ()) or getattr(i, "inputs", ())
        writes: tuple[int, ...] = getattr(i, "outputs", ())
        gone: tuple[int, ...] = getattr(i, "slots", ()) or getattr(i, "donated", ())
        if not isinstance(i, Branch) and not there.issuperset(reads):
            raise ReplayError(f"instruction {position} reads {set(reads) - there}, not there yet")
        reading = {slot for _, start in ends.values() for slot in start.inputs}
        if reading.intersection(gone):
            raise ReplayError(f"instruction {position} ends what a collective in flight reads")
        if isinstance(i, Run):
            taken = seconds(i)
            clock, compute = clock + taken, compute + taken
        elif isinstance(i, Start):
            begin = max(clock, free[i.stream])
            free[i.stream] = begin + seconds(i)
            ends[i.event] = free[i.stream], i
            live += sum(sizes[slot] for slot in writes)
            writes = ()
        elif isinstance(i, Wait):
            end, start = ends.pop(i.event)
            exposed[position] = max(0.0, end - clock)
            clock = max(clock, end)
            there.update(start.outputs)
        live += sum(sizes[slot] for slot in writes)
        there.update(writes)
        peak = max(peak, live)
        live -= sum(sizes[slot] for slot in gone)
        there.difference_update(gone)
    return Replayed(clock, compute, sum(exposed.values()), exposed, peak)
