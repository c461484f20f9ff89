"""Decides which regions are split, and into how many tiles, by the planner and the table of costs.

First each region is planned by itself, split into more and more tiles as long as that gets faster; regions
that are alike are looked at once. Where some gain by themselves, the program is planned as it is: collectives
that other compute hides stay whole. The others are split in the program, which is planned again. All times
count a launch for each collective that is handed to a stream, and what parts take beyond their share of the
whole (`overhead`). Splits stay if the program takes
`OverlapPolicy.least_gain` less time, and no more than ``memory_factor`` of the memory.

Invariant: decisions follow from the program's text and the table of costs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ...overlap.apply import Order, OverlapPolicy, Planned, plan
from ...overlap.evaluate import seconds_of
from ...values import BlockGraph, all_nodes
from .alone import alone
from .apply import Decision, apply, found
from .emit import split
from .overhead import overhead
from .regions import Region

# Numbers of tiles that are tried, in this order, of those that divide what is cut.
_TILES = (1, 2, 4, 8, 16)
_OTHERS = (3, 5, 6, 7, 9, 10, 12)
# A region must leave as many launches exposed as this to be worth a look.
_LEAST_LAUNCHES = 2.0
# Nodes of a program beyond which regions are only split all together.
_MOST_NODES = 4000


@dataclass(frozen=True)
class Chosen:
    """What was decided for a collective. ``parts``: how many it was split into, 1 if it was not, then
    ``why``. ``before`` and ``after``: predicted seconds of its region by itself, 0 if nobody looked."""

    name: str
    source: str
    parts: int = 1
    before: float = 0.0
    after: float = 0.0
    why: str = ""

    def describe(self) -> str:
        """What follows the name in a sentence."""
        if self.parts > 1:
            return (
                f"is split into {self.parts} parts: with what depends on it {self.after * 1e3:.3g} ms "
                f"instead of {self.before * 1e3:.3g} ms"
            )
        return f"is not split: {self.why}"


@dataclass(frozen=True)
class Choice:
    """The decisions for a program, and what is to be told of its collectives. ``before`` and ``after``:
    predicted seconds of the program without and with the decisions."""

    decisions: tuple[Decision, ...] = ()
    told: tuple[Chosen, ...] = ()
    before: float = 0.0
    after: float = 0.0


@dataclass(eq=False)
class _Candidate:
    """Regions that are alike, with the number of their block and their own in it. ``overhead``: see
    `overhead.overhead`; it is in ``after``."""

    members: list[tuple[int, int, Region]] = field(default_factory=list)
    tiles: int = 0
    pieces: bool = False
    before: float = 0.0
    after: float = 0.0
    overhead: float = 0.0
    why: str = ""

    def decisions(self) -> Iterable[Decision]:
        return (
            Decision(block, number, self.tiles, self.pieces) for block, number, _ in self.members
        )

    def parts(self) -> int:
        return self.tiles if self.pieces else self.members[0][2].size * self.tiles


def choose(
    entry: BlockGraph,
    policy: OverlapPolicy,
    donated: Sequence[int],
    ordered: Order,
    counts: tuple[int, int],
    again: Callable[[], BlockGraph],
) -> Choice:
    """Decide for a program. ``entry`` stays as it is; ``again`` gives it anew, to be changed. ``counts``:
    replicas and partitions. The others are those of `overlap.apply.plan`."""
    blocks = found(entry, counts[0] * counts[1])
    if not blocks:
        return Choice()
    trial = _Trial(policy, donated, ordered, counts, again)
    alike: dict[tuple[object, ...], _Candidate] = {}
    nodes = {number: block for number, block, _ in blocks}
    left: list[_Candidate] = []
    for number, _, regions in blocks:
        for i, region in enumerate(regions):
            alike.setdefault((number, region.signature()), _Candidate()).members.append(
                (number, i, region)
            )
    for candidate in alike.values():
        number, _, region = candidate.members[0]
        _try_alone(candidate, region, nodes[number], policy, ordered, counts)
    worth = [c for c in alike.values() if c.tiles]
    before = after = 0.0
    kept: list[_Candidate] = []
    if worth:
        before, peak, exposed = trial.planned(())
        left = [c for c in worth if _is_exposed(c, exposed, policy.costs.compute.launch_s)]
        after = before
        if left:
            kept, after = _kept(left, trial, before, peak, sum(1 for _ in all_nodes(entry)))
    for candidate in worth:
        if candidate not in kept:
            candidate.tiles = 0
            candidate.why = (
                f"the program would not take {policy.least_gain:.0%} less time, or need too much memory"
                if candidate in left
                else "other compute hides it"
            )
    decisions = sorted((d for c in kept for d in c.decisions()), key=lambda d: (d.block, d.region))
    told = [
        Chosen(
            node.instruction.name,
            node.instruction.source,
            c.parts() if c in kept else 1,
            c.before,
            c.after,
            c.why,
        )
        for c in alike.values()
        for _, _, region in c.members
        for node in region.collectives
    ]
    return Choice(tuple(decisions), tuple(told), before, after)


def _is_exposed(candidate: _Candidate, exposed: dict[str, float], launch_s: float) -> bool:
    """Whether its collectives hold compute in the program as it is, for longer than a few launches."""
    names = [n.instruction.name for _, _, region in candidate.members for n in region.collectives]
    least = _LEAST_LAUNCHES * launch_s * len(candidate.members)
    return sum(exposed.get(name, 0.0) for name in names) > least


def _kept(
    worth: Sequence[_Candidate], trial: _Trial, before: float, peak: int, size: int
) -> tuple[list[_Candidate], float]:
    """The candidates that stay split, and the seconds of the program with them. All of them together; where
    that is not worth it, one after the other, those that save most first."""
    most, memory = (1.0 - trial.policy.least_gain) * before, trial.policy.memory_factor * peak

    def fits(candidates: Sequence[_Candidate], limit: float) -> float | None:
        took, needs, _ = trial.planned([d for c in candidates for d in c.decisions()])
        took += sum(c.overhead * len(c.members) for c in candidates)
        return took if took <= limit and needs <= memory else None

    took = fits(worth, most)
    if took is not None:
        return list(worth), took
    kept: list[_Candidate] = []
    if len(worth) == 1 or size > _MOST_NODES:
        return kept, before
    best = before
    for candidate in sorted(worth, key=lambda c: (c.after - c.before) * len(c.members)):
        took = fits([*kept, candidate], (1.0 - trial.policy.least_gain) * best)
        if took is not None:
            kept.append(candidate)
            best = took
    return kept, best


@dataclass(frozen=True, eq=False)
class _Trial:
    """Plans the program with some regions split."""

    policy: OverlapPolicy
    donated: Sequence[int]
    ordered: Order
    counts: tuple[int, int]
    again: Callable[[], BlockGraph]

    def planned(self, decisions: Sequence[Decision]) -> tuple[float, int, dict[str, float]]:
        """Seconds, peak memory in bytes, and how long each collective is exposed, by name."""
        entry = self.again()
        apply(entry, decisions, *self.counts)
        made = plan(entry, self.policy, self.donated, self.ordered)
        if made is None:
            return 0.0, 0, {}
        exposed: dict[str, float] = {}
        _exposed(made, 1.0, exposed)
        seconds = seconds_of(entry, made, self.policy.costs, self.ordered, tuple(self.donated))
        return seconds, _peak(made), exposed


def _peak(planned: Planned) -> int:
    own = planned.timeline.peak_bytes if planned.timeline is not None else 0
    return own + max((_peak(p) for ps in planned.inner.values() for p in ps), default=0)


def _exposed(planned: Planned, times: float, found: dict[str, float]) -> None:
    """Add how long each collective of a block holds compute, and of those inside it."""
    if planned.timeline is not None and planned.graph is not None:
        for task in planned.graph.tasks:
            if task.is_collective:
                for op in task.ops:
                    name = op.instruction.name
                    seconds = times * planned.timeline.exposed[task.index]
                    found[name] = found.get(name, 0.0) + seconds
    for plans in planned.inner.values():
        for inner in plans:
            _exposed(inner, times, found)


def _try_alone(
    candidate: _Candidate,
    region: Region,
    block: BlockGraph,
    policy: OverlapPolicy,
    ordered: Order,
    counts: tuple[int, int],
) -> None:
    """Find the tiles or pieces with which a region by itself takes least time."""

    def planned(tiles: int, pieces: bool = False) -> tuple[float, int]:
        own, copy = alone(region, block)
        if tiles:
            split(own, copy, tiles, *counts, pieces)
        made = plan(own, replace(policy, measured={}), (), ordered)
        seconds = seconds_of(own, made, policy.costs, ordered)
        return seconds, 0 if made is None else _peak(made)

    candidate.before, peak = planned(0)
    best, most = candidate.before, policy.memory_factor * peak
    # Rotated first: where both take the same, devices begin with what they have.
    ways = (False, True) if region.groups else (False,)
    fitting = [_fitting(region, 1 if region.groups and not pieces else 2) for pieces in ways]
    if not any(fitting):
        candidate.why = "what is cut cannot be divided"
        return
    for pieces, numbers in zip(ways, fitting, strict=True):
        worse = 0
        for number in numbers:
            took, needs = planned(number, pieces)
            if needs > most:
                continue  # more tiles need less
            more = overhead(
                region, number if pieces else region.size * number, policy.costs.compute
            )
            if took + more < best:
                best, worse = took + more, 0
                candidate.tiles, candidate.pieces, candidate.overhead = number, pieces, more
            else:
                worse += 1
                if worse > 1:
                    break
    candidate.after = best
    if best <= (1.0 - policy.least_gain) * candidate.before:
        return
    candidate.why = (
        f"with what depends on it it would take {best * 1e3:.3g} ms instead of "
        f"{candidate.before * 1e3:.3g} ms, which is not {policy.least_gain:.0%} less"
        if candidate.tiles
        else "its parts would take longer"
    )
    candidate.tiles = 0


def _fitting(region: Region, least: int) -> list[int]:
    """The numbers of tiles that are tried, from ``least`` on."""
    found = [t for t in _TILES if t >= least and region.divides(region.size * t)]
    if len(found) < 2:
        found += [t for t in _OTHERS if t >= least and region.divides(region.size * t)][:2]
    return sorted(found)
