"""Decides which regions are split, and into how many tiles, by the planner and the table of costs.

First each region is planned by itself, split into more and more tiles as long as that gets faster; regions
that are alike are looked at once. Where some gain by themselves, the program is planned as it is: collectives
that other compute hides stay whole. The others are split in the program, which is planned again, with more
than one of the forms that gain. All times count a launch for each collective that is handed to a stream, and
what parts take beyond their share of the whole (`overhead`), in loops as often as they run. Splits stay if
the program takes `OverlapPolicy.least_gain` less time, and no more than ``memory_factor`` of the memory.

Where all-reduces, or the parts of them, could be reduce-scatters and all-gathers (`shares`), the program is
planned once more with these, in parts and whole. The fastest of these programs is taken.

Invariant: decisions follow from the program's text and the table of costs alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from stretto.collectives.ops import Kind

from ...edit import Editor
from ...overlap.apply import Order, OverlapPolicy, Planned, plan
from ...overlap.evaluate import seconds_of
from ...trips import trip_count
from ...values import BlockGraph, NodeKind, all_blocks, all_nodes
from .alone import alone
from .apart import LEAST_BYTES
from .apply import Decision, Shardings, Shared, apply, found, found_shares
from .emit import split
from .overhead import overhead, overhead_of_shares
from .places import Places
from .regions import SPLITTABLE, Region, is_clipped, is_free

# Numbers of tiles that are tried, in this order, of those that divide what is cut.
_TILES = (1, 2, 4, 8, 16)
_OTHERS = (3, 5, 6, 7, 9, 10, 12)
# A region must leave as many launches exposed as this to be worth a look.
_LEAST_LAUNCHES = 2.0
# What stands behind the name of a part (`emit.Part`).
_PART = re.compile(r"\.part\d+of\d+$")
# Nodes of a program beyond which regions are only split all together.
_MOST_NODES = 4000


@dataclass(frozen=True)
class Chosen:
    """What was decided for a collective. ``parts``: how many it was split into, 1 if it was not, then
    ``why``. ``before`` and ``after``: predicted seconds of its region by itself, 0 if nobody looked.
    ``shared``: whether it has become a reduce-scatter and all-gathers."""

    name: str
    source: str
    parts: int = 1
    before: float = 0.0
    after: float = 0.0
    why: str = ""
    shared: bool = False

    def describe(self) -> str:
        """What follows the name in a sentence."""
        took = f"{self.after * 1e3:.3g} ms instead of {self.before * 1e3:.3g} ms"
        own = "becomes a reduce-scatter and an all-gather, between which each device computes its own rows"
        if self.parts > 1:
            more = f"; each {own}" if self.shared else ""
            return f"is split into {self.parts} parts: with what depends on it {took}{more}"
        if self.shared:
            return f"{own}: the program takes {took}"
        return f"is not split: {self.why}"


@dataclass(frozen=True)
class Choice:
    """The decisions for a program, and what is to be told of its collectives. ``before`` and ``after``:
    predicted seconds of the program without and with the decisions; ``overhead``: those of ``after`` that are
    beyond the plan."""

    decisions: tuple[Decision | Shared, ...] = ()
    told: tuple[Chosen, ...] = ()
    before: float = 0.0
    after: float = 0.0
    overhead: float = 0.0


@dataclass(frozen=True)
class _Form:
    """A way to split a region (see `emit.split`). ``seconds``: of the region by itself, split so, with
    ``overhead``."""

    tiles: int
    pieces: bool
    seconds: float
    overhead: float


@dataclass(eq=False)
class _Candidate:
    """Regions that are alike, with the number of their block and their own in it. ``times``: how often their
    block runs. ``before``: seconds of a region by itself, whole. ``forms``: the ways to split it that pay by
    themselves, the fastest first; ``form``: the one that is looked at."""

    members: list[tuple[int, int, Region]] = field(default_factory=list)
    times: int = 1
    before: float = 0.0
    forms: list[_Form] = field(default_factory=list)
    form: _Form | None = None
    why: str = ""

    def decisions(self) -> Iterable[Decision]:
        form = self.form
        assert form is not None
        return (Decision(block, n, form.tiles, form.pieces) for block, n, _ in self.members)

    def parts(self) -> int:
        if self.form is None:
            return 1
        return self.form.tiles * (1 if self.form.pieces else self.members[0][2].size)

    @property
    def overhead(self) -> float:
        return self.form.overhead * len(self.members) * self.times if self.form else 0.0

    @property
    def saved(self) -> float:
        """Seconds that its fastest form saves, if nothing else hides its collectives."""
        return (self.before - self.forms[0].seconds) * len(self.members) * self.times


def choose(
    policy: OverlapPolicy,
    donated: Sequence[int],
    ordered: Order,
    counts: tuple[int, int],
    again: Callable[[], BlockGraph],
    shardings: Shardings = (),
) -> Choice:
    """Decide for a program. ``again`` gives it anew, to be changed. ``counts``: replicas and partitions.
    ``shardings``: of its parameters. The others are those of `overlap.apply.plan`."""
    trial = _Trial(policy, donated, ordered, counts, again, shardings)
    parted = best = _chosen(trial)
    could: dict[str, Chosen] = {}
    for base in dict.fromkeys((parted.decisions, ())):
        shared = _shared(trial, parted, base)
        if shared is None:
            continue
        could |= {told.name: told for told in shared.told if told.shared}
        least = best.after if best.decisions else (1.0 - policy.least_gain) * shared.before
        if shared.after < least:
            best = shared
    known = {told.name for told in best.told}
    why = (
        f"neither in parts nor as a reduce-scatter and an all-gather would the program take "
        f"{policy.least_gain:.0%} less time, or it would need too much memory"
    )
    more = [Chosen(t.name, t.source, why=why) for t in could.values() if t.name not in known]
    # Of a combined all-reduce that was scattered, each array is a collective of the same name.
    told = dict.fromkeys((*best.told, *more))
    names = {_PART.sub("", one.name) for one in told}
    others = (one for one in _in_no_region(trial) if one.name not in names)
    return replace(best, told=(*told, *dict.fromkeys(others)))


def _in_no_region(trial: _Trial) -> Iterator[Chosen]:
    """The large collectives of kinds that can be split, with the reason why those that are in no region are
    not."""
    for block in all_blocks(trial.entry):
        editor = Editor(block)
        for node in block.nodes:
            c = node.collective
            if c is None or c.kind not in SPLITTABLE:
                continue
            if max(t.nbytes for t in (*c.operands, *c.results)) < LEAST_BYTES:
                continue
            why = "no product is computed before or behind it in parts that it has too"
            if block.unread or block.phases or block.crossing:
                why = "of what is computed around it some is left out, or awaited in another iteration"
            elif not is_free(editor, node):
                why = "its place among others is given by more than data"
            elif c.kind is Kind.RAGGED_ALL_TO_ALL and not is_clipped(c):
                why = "its offsets and sizes are neither all s32 nor all s64"
            yield Chosen(node.instruction.name, node.instruction.source, why=why)


def _shared(trial: _Trial, parted: Choice, base: tuple[Decision | Shared, ...]) -> Choice | None:
    """What becomes of a program with ``base`` split, and then all computed by shares that can be; None if
    nothing can. ``parted``: what was decided without shares. ``after`` is infinite where memory is too short.
    """
    entry = trial.made(base) if base else trial.entry
    times = list(_times(entry))
    shares = found_shares(entry, trial.counts, trial.shardings)
    if not shares:
        return None
    policy = trial.policy
    before, peak, _ = trial.whole
    given = tuple(Shared(block, i) for block, _, regions in shares for i in range(len(regions)))
    overhead = parted.overhead if base else 0.0
    for block, graph, regions in shares:
        own = (overhead_of_shares(region, graph, policy.costs) for region in regions)
        overhead += times[block] * sum(own)
    after, needs, _ = trial.planned((*base, *given))
    after = after + overhead if needs <= policy.memory_factor * peak else float("inf")
    sums = [node for _, _, regions in shares for region in regions for node in region.sources]
    told = {t.name: t if base or t.parts == 1 else _left_whole(t) for t in parted.told}
    for node in sums:
        name = _PART.sub("", node.instruction.name)
        known = told.get(name, Chosen(name, node.instruction.source, before=before, after=after))
        told[name] = replace(known, shared=True)
    return Choice((*base, *given), tuple(told.values()), before, after, overhead)


def _left_whole(told: Chosen) -> Chosen:
    why = "the program takes less time whole, with reduce-scatters and all-gathers for all-reduces"
    return replace(told, parts=1, why=why)


def _chosen(trial: _Trial) -> Choice:
    """Which regions of a program are split."""
    policy, counts = trial.policy, trial.counts
    entry = trial.entry
    blocks = found(entry, counts[0] * counts[1])
    if not blocks:
        return Choice()
    times = dict(enumerate(_times(entry)))
    alike: dict[tuple[object, ...], _Candidate] = {}
    for number, block, regions in blocks:
        for i, region in enumerate(regions):
            key = number, region.signature()
            if key not in alike:
                alike[key] = _Candidate(times=times[number])
                _try_alone(alike[key], region, block, policy, trial.ordered, counts)
            alike[key].members.append((number, i, region))
    worth = [c for c in alike.values() if c.forms]
    before = after = 0.0
    if worth:
        before, peak, exposed = trial.whole
        after = before
        left = [c for c in worth if _is_exposed(c, exposed, policy.costs.compute.launch_s)]
        if left:
            after = _decide(left, trial, before, peak, sum(1 for _ in all_nodes(entry)))
        for candidate in worth:
            if candidate not in left:
                candidate.why = "other compute hides it"
    kept = [c for c in worth if c.form is not None]
    decisions = sorted((d for c in kept for d in c.decisions()), key=lambda d: (d.block, d.region))
    told = [
        Chosen(
            node.instruction.name,
            node.instruction.source,
            c.parts(),
            c.before,
            c.form.seconds if c.form else c.forms[0].seconds if c.forms else c.before,
            c.why,
        )
        for c in alike.values()
        for _, _, region in c.members
        for node in region.collectives
    ]
    overhead = sum(c.overhead for c in kept)
    return Choice(tuple(decisions), tuple(told), before, after, overhead)


def _times(block: BlockGraph, times: int = 1) -> Iterator[int]:
    """How often a block and each of those inside it run, in the order of `all_blocks`. Loops of unknown
    length count as one iteration."""
    yield times
    for node in block.nodes:
        trips = trip_count(node) if node.kind is NodeKind.LOOP else None
        for inner in node.blocks:
            yield from _times(inner, times * (1 if trips is None else trips))


def _is_exposed(candidate: _Candidate, exposed: dict[str, float], launch_s: float) -> bool:
    """Whether its collectives hold compute in the program as it is, for longer than a few launches."""
    names = [n.instruction.name for _, _, region in candidate.members for n in region.collectives]
    least = _LEAST_LAUNCHES * launch_s * len(candidate.members)
    return sum(exposed.get(name, 0.0) for name in names) > least


def _decide(
    worth: Sequence[_Candidate], trial: _Trial, before: float, peak: int, size: int
) -> float:
    """Leave candidates split or whole, with the reason; the seconds of the program then. First all together:
    each as is best for itself, all of them rotated, all of them in pieces, and with as few parts as pay.
    Where none of these is worth it, one after the other, those that save most first."""
    memory = trial.policy.memory_factor * peak
    most = 1.0 - trial.policy.least_gain
    short: set[_Candidate] = set()

    def takes(forms: Mapping[_Candidate, _Form]) -> float:
        """Seconds of the program; infinite where memory is too short."""
        settle(forms)
        split = [c for c in worth if c.form is not None]
        took, needs, _ = trial.planned([d for c in split for d in c.decisions()])
        took += sum(c.overhead for c in split)
        if needs <= memory:
            return took
        if took <= most * before:
            short.update(split)
        return float("inf")

    def settle(forms: Mapping[_Candidate, _Form]) -> None:
        for candidate in worth:
            candidate.form = forms.get(candidate)

    small = size <= _MOST_NODES
    ways = [{c: c.forms[0] for c in worth}]
    if small:
        for pieces in (False, True):
            ways.append(
                {c: next((f for f in c.forms if f.pieces is pieces), c.forms[0]) for c in worth}
            )
        ways.append({c: min(c.forms, key=lambda f: (f.tiles, f.seconds)) for c in worth})
    distinct = list({tuple(way.items()): way for way in ways}.values())
    best = min(((takes(way), i) for i, way in enumerate(distinct)), default=(before, 0))
    if best[0] <= most * before:
        settle(distinct[best[1]])
        return best[0]
    kept: dict[_Candidate, _Form] = {}
    took = before
    if len(worth) > 1 and small:
        for candidate in sorted(worth, key=lambda c: -c.saved):
            found = takes(kept | {candidate: candidate.forms[0]})
            if found <= most * took:
                kept[candidate], took = candidate.forms[0], found
    settle(kept)
    for candidate in worth:
        if candidate.form is None:
            candidate.why = (
                "the program would need too much memory"
                if candidate in short
                else f"the program would not take {trial.policy.least_gain:.0%} less time"
            )
    return took


@dataclass(frozen=True, eq=False)
class _Trial:
    """Plans the program with some regions split."""

    policy: OverlapPolicy
    donated: Sequence[int]
    ordered: Order
    counts: tuple[int, int]
    again: Callable[[], BlockGraph]
    shardings: Shardings = ()

    def made(self, decisions: Sequence[Decision | Shared]) -> BlockGraph:
        """The program as it would be decided."""
        entry = self.again()
        apply(entry, decisions, *self.counts, self.shardings)
        return entry

    def planned(
        self, decisions: Sequence[Decision | Shared]
    ) -> tuple[float, int, dict[str, float]]:
        """Seconds, peak memory in bytes, and how long each collective is exposed, by name."""
        entry = self.made(decisions)
        made = plan(entry, self.policy, self.donated, self.ordered)
        if made is None:
            return 0.0, 0, {}
        exposed: dict[str, float] = {}
        _exposed(made, 1.0, exposed)
        seconds = seconds_of(entry, made, self.policy.costs, self.ordered, tuple(self.donated))
        return seconds, _peak(made), exposed

    @cached_property
    def entry(self) -> BlockGraph:
        """The program as it is, for looking at it."""
        return self.made(())

    @cached_property
    def whole(self) -> tuple[float, int, dict[str, float]]:
        """The same with no region split."""
        return self.planned(())


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
            split(own, copy, tiles, Places(own, *counts), pieces)
        made = plan(own, replace(policy, measured={}), (), ordered)
        seconds = seconds_of(own, made, policy.costs, ordered)
        return seconds, 0 if made is None else _peak(made)

    candidate.before, peak = planned(0)
    best = candidate.before
    most = policy.memory_factor * peak
    # Rotated first: where both take the same, devices begin with what they have.
    ways = (False, True) if region.groups else (False,)
    fitting = [_fitting(region, 1 if region.groups and not pieces else 2) for pieces in ways]
    if not any(fitting):
        candidate.why = "what is cut cannot be divided"
        return
    tried: list[_Form] = []
    for pieces, numbers in zip(ways, fitting, strict=True):
        worse = 0
        for number in numbers:
            took, needs = planned(number, pieces)
            if needs > most:
                continue  # more tiles need less
            more = overhead(region, block, number, pieces, policy.costs)
            tried.append(_Form(number, pieces, took + more, more))
            worse = 0 if took + more < best else worse + 1
            best = min(best, took + more)
            if worse > 1:
                break
    tried.sort(key=lambda form: form.seconds)
    enough = (1.0 - policy.least_gain) * candidate.before
    candidate.forms = [form for form in tried if form.seconds <= enough]
    if not candidate.forms:
        candidate.why = (
            f"with what depends on it it would take {tried[0].seconds * 1e3:.3g} ms instead of "
            f"{candidate.before * 1e3:.3g} ms, which is not {policy.least_gain:.0%} less"
            if tried and tried[0].seconds < candidate.before
            else "its parts would take longer"
            if tried
            else "its parts would need too much memory"
        )


def _fitting(region: Region, least: int) -> list[int]:
    """The numbers of tiles that are tried, from ``least`` on."""
    found = [t for t in _TILES if t >= least and region.divides(region.size * t)]
    if len(found) < 2:
        found += [t for t in _OTHERS if t >= least and region.divides(region.size * t)][:2]
    return sorted(found)
