"""An independent judge of schedules: replays the JSON steps of ``stretto explain`` on a virtual clock.

It knows nothing of how a schedule came about. It takes the ``steps`` of one rank (or of several), plays
them with one compute stream and FIFO streams for collectives, and raises `ReplayError` where a step comes
before something it depends on, where a collective is started or waited for twice or never, or where ranks
start the collectives of a stream in different orders.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
