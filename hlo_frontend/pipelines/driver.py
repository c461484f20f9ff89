"""Interleaves the pipelines of a module, or reports why it does not."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar

from ..collectives import CollectiveReader
from ..flatten import flatten
from ..graph import Module
from ..interleaved import Interleaved, Scheduled
from ..passes.valid.tensors import MOST_ELEMENTS
from ..passes.valid.trace import GaveUpError
from . import recognize as pipelines
from .barriers import without_barriers
from .between import prepared
from .chains import Followed
from .emit import Editor
from .fission import fissioned
from .given import as_given
from .inline import all_take_part, inlined, opened
from .masked import masked
from .merged import Names, merged
from .merged_verify import check as check_merged
from .moved import moved
from .nested import as_entry, loops_around, within
from .numbered import Numbered, numbered
from .outlined import outlined
from .partitioned import Localized, Whys, localized
from .parts import Part, Pipeline
from .pieces import Pieces
from .received import received
from .refusal import NoLoop, Refusal, about
from .rewrite import rewritten
from .sameness import Sameness
from .slots import SCHEDULES
from .timetable import Timetable, timetable
from .training import Training, kept_bytes, owner_of, training
from .travelling import at_home
from .unstreamed import Unstreamed, unstreamed
from .verify import check

# Why an engine may round results of a step whose stages are no loops over layers.
_APART = "a stage is computed apart from what stands beside it"

# And those of one with a head in the loop that all stages compute.
_LEFT = "a head that all stages compute is left to one of them"
# And those of a step in a loop whose iterations sum floats up over other axes than the stages'.
_SUMMED = (
    "sums over other axes, which the stages make each for itself, are taken to be the same on all"
)

# And those of a step that has masks of padding only here (see `masked`).
_PADDING = "zeros that are computed on padding may have another sign"

# And those of one around whose iterations there are barriers (see `barriers`).
_BARRIERS = "barriers around what is computed again are left out"

# And those of one that keeps what stages give for a head that computes it again (see `given`).
_GIVEN = "what stages give is kept for a head, and not computed again"

# What is said of a step that is refused for want of such masks alone.
_MAY_BE_FINITE = (
    ". Or set STRETTO_FINITE_PADDING=1 (stretto_finite_padding) if what it computes on padding is neither "
    "NaN nor infinite: its gradients are proved to be products with zeros there"
)

_Report = TypeVar("_Report", Interleaved, Scheduled)


def interleave(
    serialized: bytes, num_replicas: int, num_partitions: int, chunks: int
) -> tuple[bytes, tuple[Interleaved, ...]]:
    """The module with ``chunks`` chunks of layers for each device of its pipelines, and a report on each
    loop.

    A loop that cannot be interleaved stays as it is, and so do loops that depend on its residuals. ``chunks``
    is at least 2. Loops are those of the entry computation, or of the body of one of its loops.
    """

    def found(given: bytes) -> tuple[bytes, tuple[Interleaved, ...]]:
        return _interleaved(given, num_replicas, num_partitions, chunks)

    def once(given: bytes) -> tuple[bytes, tuple[Interleaved, ...]]:
        return _with_moves(found, given, num_replicas, num_partitions)

    def whole(given: bytes) -> tuple[bytes, tuple[Interleaved, ...]]:
        return _with_rows(once, given, num_replicas, num_partitions)

    # There is no promise of rounding here.
    return _also_within(whole, serialized, num_replicas, num_partitions, None)


def _with_moves(
    rewrite: Callable[[bytes], tuple[bytes, tuple[_Report, ...]]],
    serialized: bytes,
    num_replicas: int,
    num_partitions: int,
) -> tuple[bytes, tuple[_Report, ...]]:
    """What ``rewrite`` makes of a module, of which stages hand on by one permute (see `moved`), and once (see
    `received`), if it refuses fewer loops then. If it refuses all, this is no reason."""
    made, reports = rewrite(serialized)
    done = len([r for r in reports if not r.why])
    if reports and done == len(reports):
        return made, reports
    moves = moved(serialized, num_replicas, num_partitions)
    again = received(serialized if moves is None else moves)
    other = moves if again is None else again
    if other is None:
        return made, reports
    after, others = rewrite(other)
    done_then = len([r for r in others if not r.why])
    if done_then > done and len(others) - done_then <= len(reports) - done:
        return after, others
    return made, others if others and not done and not done_then else reports


def _with_rows(
    rewrite: Callable[[bytes], tuple[bytes, tuple[_Report, ...]]],
    serialized: bytes,
    num_replicas: int,
    num_partitions: int,
    but: frozenset[str] = frozenset(),
) -> tuple[bytes, tuple[_Report, ...]]:
    """What ``rewrite`` makes of a module, of which stages have all rows that they take by number (see
    `numbered`), in loops ``but`` those of these names. A loop that is refused stays as it is."""
    try:
        taken = numbered(serialized, num_replicas, num_partitions, but)
    except GaveUpError:
        taken = Numbered(serialized)
    made, reports = rewrite(taken.module)
    if not taken.held:
        return made, reports
    refused = {report.name for report in reports if report.why}
    if len(refused) == len(reports):
        return serialized, reports
    if alone := frozenset(taken.held) & refused:
        return _with_rows(rewrite, serialized, num_replicas, num_partitions, but | alone)

    def held(report: _Report) -> int:
        names = {report.name, getattr(report, "backward", "")}
        return report.held + sum(n for name, n in taken.held.items() if name in names)

    return made, tuple(r if r.why else replace(r, held=held(r)) for r in reports)


def _also_within(
    rewrite: Callable[[bytes], tuple[bytes, tuple[_Report, ...]]],
    serialized: bytes,
    num_replicas: int,
    num_partitions: int,
    rounding: Callable[[_Report], _Report] | None,
) -> tuple[bytes, tuple[_Report, ...]]:
    """What ``rewrite`` makes of a module, which looks at loops of the entry computation; if it finds none,
    of the bodies of these. ``rounding``: what says in a report that sums over other axes are taken to have
    the same bits on all stages; None if they must not be."""
    serialized, reports = rewrite(serialized)
    around = [] if reports else loops_around(Module.parse(serialized), num_replicas, num_partitions)
    for name in [loop.name for loop in around]:
        module = Module.parse(serialized)
        loop = next(i for i in module.entry.instructions if i.name == name)
        alone, summed = as_entry(
            module, loop, num_replicas, num_partitions, sums=rounding is not None
        )
        made, found = rewrite(alone)
        if rounding is not None and summed:
            found = tuple(map(rounding, found))
        if any(not report.why for report in found):
            serialized = within(module, loop, made)
        reports += found
    return serialized, reports


def _interleaved(
    serialized: bytes,
    num_replicas: int,
    num_partitions: int,
    chunks: int,
    but: frozenset[str] = frozenset(),
) -> tuple[bytes, tuple[Interleaved, ...]]:
    """The same, of loops in the entry computation. ``but``: loops whose streams stay."""
    as_given = serialized
    streams = _unstreamed(serialized, num_replicas, num_partitions, but, computes=False)
    local = _localized(streams.module, num_replicas, num_partitions, leaves=False)
    serialized, whys = local.module, local.whys
    written = Module.parse(serialized)
    entry = flatten(written.entry, CollectiveReader(num_replicas, num_partitions))
    candidates = [n.instruction for n in entry.nodes if pipelines.is_candidate(n)]
    reports = {i.name: Interleaved(i.name, i.source) for i in candidates}
    left = list(reports)
    while left:
        try:
            serialized, found = _all(written, left, num_replicas, num_partitions, chunks)
            break
        except Refusal as refusal:
            name = refusal.loop or left[0]
            reports[name] = replace(reports[name], why=_why(refusal, whys) + _handed_on(streams))
            left.remove(name)
        except GaveUpError as error:
            why = f"the program is too large to be followed: {error}"
            reports |= {name: replace(reports[name], why=why) for name in left}
            left = []
    else:
        found = []
    if not found:
        serialized = as_given
    for name, report in zip(left, found, strict=True):
        source, held = reports[name].source, streams.held.get(name, 0)
        reports[name] = replace(report, name=name, source=source, held=held)
    if alone := _left_alone(streams, reports.values()):
        return _interleaved(as_given, num_replicas, num_partitions, chunks, but | alone)
    return serialized, tuple(reports.values())


def _localized(
    serialized: bytes, num_replicas: int, num_partitions: int, *, leaves: bool
) -> Localized:
    """The module with pipelines of one array of all stages as programs of a device, see `partitioned`."""
    try:
        return localized(serialized, num_replicas, num_partitions, leaves=leaves)
    except GaveUpError:
        return Localized(serialized)


def _unstreamed(
    serialized: bytes,
    num_replicas: int,
    num_partitions: int,
    but: frozenset[str],
    *,
    computes: bool,
) -> Unstreamed:
    """The module with microbatches that are handed on in loops given to all stages, see `unstreamed`."""
    try:
        return unstreamed(serialized, num_replicas, num_partitions, computes=computes, but=but)
    except GaveUpError:
        return Unstreamed(serialized)


def _left_alone(
    streams: Unstreamed, reports: Collection[Interleaved | Scheduled]
) -> frozenset[str]:
    """The loops whose streams were taken out for nothing, where other loops were rewritten."""
    refused = {report.name for report in reports if report.why}
    return frozenset(streams.held) & refused if len(refused) < len(reports) else frozenset()


def _handed_on(streams: Unstreamed) -> str:
    """What is said of a refused loop, behind the reason, where streams stay in loops."""
    if not streams.whys:
        return ""
    whys = "; ".join(dict.fromkeys(streams.whys))
    return f". Microbatches that are handed on from stage to stage stay in the loop: {whys}"


def _why(refusal: Refusal, whys: Whys) -> str:
    more = whys.get(refusal.at)
    return str(refusal) if more is None else f"{refusal}: {more}"


def _all(
    written: Module, names: list[str], num_replicas: int, num_partitions: int, chunks: int
) -> tuple[bytes, list[Interleaved]]:
    """All of these loops rewritten. Raises `Refusal`, which names one of them, and `GaveUpError`."""
    module, copied = at_home(written, names, num_replicas, num_partitions)
    if copied:  # there is no promise of rounding here
        module = written
    for name in names:
        module = inlined(module, name)
    entry = flatten(module.entry, CollectiveReader(num_replicas, num_partitions))
    nodes = [n for n in entry.nodes if n.instruction.name in names]
    found = pipelines.find(entry, nodes, num_replicas, num_partitions)
    tables: list[Timetable] = []
    for pipeline in found:
        with about(pipeline.loop.name):
            whys = [*(own.why for own in pipeline.owned.values()), *pipeline.elsewhere.values()]
            if whys:
                raise Refusal(whys[0])
            tables.append(_table(pipeline, chunks))
    serialized, done = rewritten(module, found, tables, chunks, num_partitions)
    check(serialized, done, found, chunks, num_partitions)
    return serialized, [
        Interleaved(
            p.loop.name, "", chunks, p.stages, p.microbatches, p.layers.count, p.trips,
            table.iterations, new.moved, new.back, new.taken,
        )
        for p, table, new in zip(found, tables, done, strict=True)
    ]  # fmt: skip


def _table(pipeline: Pipeline, chunks: int) -> Timetable:
    if pipeline.layers.count % chunks:
        raise Refusal(f"{pipeline.layers.count} layers of a device are not {chunks} equal chunks")
    table = timetable(pipeline.stages, chunks, pipeline.enters, pipeline.leaves, pipeline.trips)
    if pipeline.stages * table.iterations > MOST_ELEMENTS:
        raise Refusal(
            f"{table.iterations} iterations of {pipeline.stages} stages are too many to be followed"
        )
    return table


def scheduled(
    serialized: bytes, num_replicas: int, num_partitions: int, schedule: str, chunks: int = 1,
    *, finite_padding: bool = False,
) -> tuple[bytes, tuple[Scheduled, ...]]:  # fmt: skip
    """The module with its steps of training in a schedule (see `slots`), with ``chunks`` chunks of layers a
    device, and a report on each step, and on each loop of a pipeline that stays as it is. Steps are loops of
    the entry computation, or of the body of one of its loops. ``finite_padding``: whether what they compute
    on padding is taken to be neither NaN nor infinite (see `masked`)."""

    def found(given: bytes) -> tuple[bytes, tuple[Scheduled, ...]]:
        made, reports = _scheduled(given, num_replicas, num_partitions, schedule, chunks)
        refused = {report.name for report in reports if report.why}
        for finite in (False, True) if refused else ():
            masks = _masked(given, num_replicas, num_partitions, finite=finite)
            if masks is None:
                continue
            other, others = _scheduled(masks, num_replicas, num_partitions, schedule, chunks)
            if len([r for r in others if r.why]) >= len(refused):
                continue
            if not finite:
                return other, others
            if finite_padding:
                return other, tuple(
                    r if r.why else replace(r, unmasked=True, rounds=r.rounds or _PADDING)
                    for r in others
                )
            left = {r.name for r in others if not r.why} & refused
            return made, tuple(
                replace(r, why=r.why + _MAY_BE_FINITE) if r.name in left else r for r in reports
            )
        return made, reports

    def rounding(report: Scheduled) -> Scheduled:
        return report if report.why else replace(report, rounds=report.rounds or _SUMMED)

    def once(given: bytes) -> tuple[bytes, tuple[Scheduled, ...]]:
        return _with_moves(found, given, num_replicas, num_partitions)

    def unbarred(given: bytes) -> tuple[bytes, tuple[Scheduled, ...]]:
        made, reports = once(given)
        refused = len([r for r in reports if r.why])
        bare = without_barriers(given, num_replicas, num_partitions) if refused else None
        if bare is None:
            return made, reports
        other, others = once(bare)
        if len([r for r in others if r.why]) >= refused:
            return made, reports
        return other, tuple(
            r if r.why else replace(r, rounds=r.rounds or _BARRIERS) for r in others
        )

    def whole(given: bytes) -> tuple[bytes, tuple[Scheduled, ...]]:
        return _with_rows(unbarred, given, num_replicas, num_partitions)

    return _also_within(whole, serialized, num_replicas, num_partitions, rounding)


def _masked(
    serialized: bytes, num_replicas: int, num_partitions: int, *, finite: bool
) -> bytes | None:
    """The module with masks of padding, see `masked`; None where it is not known where that is."""
    try:
        return masked(serialized, num_replicas, num_partitions, finite=finite)
    except GaveUpError:
        return None


def _scheduled(
    serialized: bytes,
    num_replicas: int,
    num_partitions: int,
    schedule: str,
    chunks: int,
    but: frozenset[str] = frozenset(),
) -> tuple[bytes, tuple[Scheduled, ...]]:
    """The same, of steps in the entry computation. ``but``: loops whose streams stay."""
    as_given = serialized
    counts = num_replicas, num_partitions
    streams = _unstreamed(serialized, *counts, but, computes=True)
    local = _localized(streams.module, num_replicas, num_partitions, leaves=True)
    serialized, whys = local.module, local.whys
    reports: dict[str, Scheduled] = {}
    finished: set[str] = set()
    while True:
        module = Module.parse(serialized)
        entry = flatten(module.entry, CollectiveReader(num_replicas, num_partitions))
        left = [n.instruction for n in entry.nodes if pipelines.is_candidate(n)]
        left = [i for i in left if i.name not in finished]
        if not left:
            done = any(not report.why for report in reports.values())
            if alone := _left_alone(streams, reports.values()):
                return _scheduled(as_given, *counts, schedule, chunks, but | alone)
            return serialized if done else as_given, tuple(reports.values())
        sources = {i.name: i.source for i in left}
        names = list(sources)
        pair: list[str] = []
        try:
            serialized, report = _any_step(
                module, names, pair, num_replicas, num_partitions, schedule, chunks
            )
        except Refusal as refusal:
            name = refusal.loop or names[-1]
            why = _why(refusal, whys) + _handed_on(streams)
            reports[name] = Scheduled(name, sources[name], schedule, why=why)
            finished.add(name)
            for other in set(pair) - {name}:
                why = f"the loop %{name}, with which it would be one, is not"
                reports[other] = Scheduled(other, sources[other], schedule, why=why)
                finished.add(other)
        except GaveUpError as error:
            why = f"the program is too large to be followed: {error}"
            reports |= {n: Scheduled(n, s, schedule, why=why) for n, s in sources.items()}
            finished |= set(names)
        else:
            rounds = report.rounds or (_LEFT if local.left else "")
            held = sum(streams.held.get(name, 0) for name in pair)
            reports[pair[0]] = replace(report, source=sources[pair[0]], rounds=rounds, held=held)
            finished |= {*pair, report.loop}


def _any_step(
    module: Module, names: list[str], pair: list[str], num_replicas: int, num_partitions: int,
    schedule: str, chunks: int,
) -> tuple[bytes, Scheduled]:  # fmt: skip
    """A step of loops of these names, as `_step` makes it; ``pair`` gets its loops. Where a head in the loop
    is computed again with what its stage gives, that is kept instead (see `given`). Raises as `_step`."""
    counts = num_replicas, num_partitions
    try:
        return _any_stage(module, names, pair, *counts, schedule, chunks)
    except Refusal as refusal:
        first, at_first = refusal, pair[:]
    try:
        kept = as_given(module, names, *counts)
        if kept is not None:
            made, report = _any_stage(kept, names, pair, *counts, schedule, chunks)
            return made, replace(report, rounds=report.rounds or _GIVEN)
    except (Refusal, GaveUpError):
        pair[:] = at_first
    raise first


def _any_stage(
    module: Module, names: list[str], pair: list[str], num_replicas: int, num_partitions: int,
    schedule: str, chunks: int,
) -> tuple[bytes, Scheduled]:  # fmt: skip
    """The same. Where stages are no loops over layers, each of them may be put into one."""
    counts = num_replicas, num_partitions

    def step(module: Module) -> tuple[bytes, Scheduled]:
        pair[:] = names if len(names) == 2 else _pair(module, names, *counts)
        return _step(module, pair, *counts, schedule, chunks)

    try:
        return step(module)
    except Refusal as refusal:
        first = refusal
    try:
        splits = schedule == "zb_h1"
        whole = outlined(module, names, *counts, splits=splits) if chunks == 1 else None
        if whole is not None:
            made, report = step(whole)
            return made, replace(report, rounds=report.rounds or _APART)
    except (Refusal, GaveUpError):
        if isinstance(first, NoLoop):
            raise
    raise first


def _analyzed(
    module: Module, names: list[str], num_replicas: int, num_partitions: int
) -> tuple[Module, Followed, list[Part]]:
    for name in names:
        module = opened(all_take_part(inlined(module, name), name), name)
    entry = flatten(module.entry, CollectiveReader(num_replicas, num_partitions))
    nodes = [n for n in entry.nodes if n.instruction.name in names]
    return module, *pipelines.analyzed(entry, nodes, num_replicas, num_partitions, heads=True)


def _pair(module: Module, names: list[str], num_replicas: int, num_partitions: int) -> list[str]:
    """The first two loops of which one goes back through the layers of the other. Raises `Refusal`."""
    module, _ = at_home(module, names, num_replicas, num_partitions)
    _, _, parts = _analyzed(module, names, num_replicas, num_partitions)
    alone = {part.name for part in parts}
    pairs: list[list[str]] = []
    for part in parts:
        with about(part.name):
            if part.pipeline().kept:
                pairs.append([owner_of(part, parts).name, part.name])
                alone -= set(pairs[-1])
    for part in parts:
        if part.name in alone:
            with about(part.name):
                owner_of(part, parts)
    return pairs[0]


def _step(
    module: Module, names: list[str], num_replicas: int, num_partitions: int, schedule: str,
    chunks: int,
) -> tuple[bytes, Scheduled]:  # fmt: skip
    """The step that two loops make, in one loop. Raises `Refusal`, which names one of them, and
    `GaveUpError`."""
    module, copied = at_home(module, names[:1], num_replicas, num_partitions)
    module, apart = prepared(module, names)
    if copied:
        apart = apart or "what travels with a microbatch is computed apart"
    module, forward, backward, step = _followed(module, names, num_replicas, num_partitions)
    with about(backward.name):
        if schedule == "zb_h1":
            back, reader = step.backward, CollectiveReader(num_replicas, num_partitions)
            in_two = fissioned(module, back.layers, list(back.sums), reader)
            if in_two is not None:
                module, forward, backward, step = _followed(
                    in_two, names, num_replicas, num_partitions
                )
        count = step.forward.layers.count
        if count % chunks:
            raise Refusal(f"{count} layers of a device are not {chunks} equal chunks")
        sizes = step.forward.stages, step.forward.microbatches, chunks
        slots = SCHEDULES[schedule](*sizes[: 3 if chunks > 1 else 2])
    made, new = merged(module, step, slots, num_partitions)
    drawn = check_merged(made, new, step, num_partitions)
    trips = step.forward.trips + step.backward.trips
    return made, Scheduled(
        forward.name, "", schedule, backward.name, new.loop, step.forward.stages,
        step.forward.microbatches, trips, slots.iterations, round(slots.runs_in_a_row), slots.alive,
        kept_bytes(step),
        step.forward.trips, slots.rows, new.left, drawn.runs, _rounds(step, new, chunks) or apart,
        chunks=chunks, row=kept_bytes(step, chunks), moved=new.moved, back=new.back, taken=new.parts,
        numbers=drawn.numbers, own_chunks=drawn.own_chunks, meetings=new.meetings,
    )  # fmt: skip


def _followed(
    module: Module, names: list[str], num_replicas: int, num_partitions: int
) -> tuple[Module, Part, Part, Training]:
    """A module whose two loops were analyzed as a step, with these. Raises as `_step`."""
    module, followed, parts = _analyzed(module, names, num_replicas, num_partitions)
    forward, backward = parts
    with about(backward.name):
        if owner_of(backward, parts) is not forward:
            raise Refusal("it does not go back through the layers of the loop before it")
        pieces = Pieces(Editor(module), forward.pipeline(), ())
        groups, reader = forward.pipeline().groups, CollectiveReader(num_replicas, num_partitions)
        sameness = Sameness(module, groups, reader)
        return module, forward, backward, training(followed, forward, backward, pieces, sameness)


def _rounds(step: Training, made: Names, chunks: int) -> str:
    """Why an engine may round results otherwise than in the written step, or an empty string."""
    if any(b.rows is not None and b.rows.rounds for b in step.begins.values()):
        return "a head is computed row by row"
    if step.turn is not None and step.turn.rounds:
        return (
            "a head is computed in the loop apart from what stands beside it, for it communicates, or is "
            "under no lax.cond"
        )
    if any(own.walk.rounds for own in step.owned.values()):
        return "what a stage has for itself is computed apart"
    if made.apart:
        return "what the loops collect is computed behind them"
    if made.left:
        return "gradients of weights are computed apart"
    # Slices of weights are then whole arrays, which an engine's kernels may read in another order.
    return "a chunk is a single layer" if 1 < chunks == step.forward.layers.count else ""
