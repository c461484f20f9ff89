"""What traces tell: counts as `stretto run --json` gives them, measured times, and the measured ledger."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from stretto.collectives.ops import Collective, Kind
from stretto.hlo_frontend.overlap.costs import CostTable, span
from stretto.runtime.errors import InvalidProgramError
from stretto.runtime.program import Prediction
from stretto.runtime.recording.statistics import Profiled
from stretto.runtime.recording.trace_events import Measured, Transfer
from stretto.runtime.recording.trace_runs import RunTimes, runs_of

from .run import given_bytes, total


def counts(rank: Measured) -> dict[str, Any]:
    """As `stretto run --json` gives them, of this rank."""
    kinds: Counter[str] = Counter()
    messages = nbytes = skipped = 0
    order: dict[str, None] = {}
    for t in rank.transfers:
        c = t.collective
        kinds[str(c.kind)] += 1
        order.setdefault(c.name)
        if c.kind is Kind.RECV:
            continue
        if c.is_point_to_point:
            sent = sum(k not in t.skip for k, _ in t.pairs)
            messages += sent
            skipped += len(t.pairs) - sent
            nbytes += sent * sum(o.nbytes for o in c.operands)
            continue
        for device in t.devices:
            group = c.group_of.get(device, ())
            if len(group) > 1:
                nbytes += given_bytes(c, group, device)
    return {
        "collectives": dict(kinds),
        "messages": messages,
        "bytes": nbytes,
        "skipped": skipped,
        "arithmetic": sum(max(s.arithmetic, 0) for _, s, *_ in rank.segments),
        "skipped_runs": len(rank.left_out),
        "skipped_arithmetic": sum(max(s.arithmetic, 0) for _, s, *_ in rank.left_out),
        "order": list(order),
    }


def ledger(ranks: Sequence[Measured], costs: CostTable | None) -> list[dict[str, Any]]:
    """An entry for each collective of each program, in rank 0's order of first calls. Seconds.

    ``seconds`` and ``exposed`` are medians over calls and ranks, ``exposed_total`` is a rank's mean of the
    sum; ``predicted`` is None without costs, or where the table lacks the group.
    """
    calls: dict[tuple[str, str], list[Transfer]] = defaultdict(list)
    for rank in ranks:
        for t in rank.transfers:
            calls[t.program, t.collective.name].append(t)
    entries = []
    for (program, name), all_calls in calls.items():
        collective = all_calls[0].collective
        stride, size = span(collective)
        entries.append(
            {
                "name": name,
                "program": program,
                "op": str(collective.kind),
                "source": collective.source,
                "stream": all_calls[0].stream,
                "axis_stride": stride,
                "group_size": size,
                "bytes": sum(o.nbytes for o in collective.operands),
                "calls": len(all_calls),
                "skipped": sum(k in t.skip for t in all_calls for k, _ in t.pairs),
                "seconds": median(t.end - t.begin for t in all_calls),
                "predicted": _predicted(collective, costs),
                "exposed": median(t.exposed for t in all_calls),
                "exposed_total": sum(t.exposed for t in all_calls) / len(ranks),
            }
        )
    return entries


def _predicted(collective: Collective, costs: CostTable | None) -> float | None:
    if costs is None:
        return None
    try:
        return costs.collective(collective).seconds
    except InvalidProgramError:
        return None


def report(ranks: Sequence[Measured], costs: CostTable | None) -> dict[str, Any]:
    """Counts over all ranks, times as a mean over ranks and of each, the ledger, what is missing."""
    times = [rank.times() for rank in ranks]
    return {
        **total([counts(rank) for rank in ranks]),
        **{key: sum(t[key] for t in times) / len(times) for key in times[0]},
        "ranks": [{"rank": r.trace.header.rank, **t} for r, t in zip(ranks, times, strict=True)],
        "ledger": ledger(ranks, costs),
        "programs": programs(ranks),
        "profiles": [asdict(done) for done in profiles(ranks)],
        "warnings": [r.trace.warning for r in ranks if r.trace.warning],
    }


def programs(ranks: Sequence[Measured]) -> list[dict[str, Any]]:
    """What was predicted of programs when they were compiled, and what their runs took. Milliseconds.

    Medians over the runs of all ranks (see `trace_runs`). ``held``: by which compute was predicted to take
    longer beside collectives. A program is left out whose runs differ in what they do.
    """
    taken: dict[tuple[str, int], list[RunTimes]] = defaultdict(list)
    predictions: dict[tuple[str, int], Prediction] = {}
    for rank in ranks:
        seen: Counter[str] = Counter()
        for number, program in enumerate(rank.trace.programs):
            if program.predicted is not None:
                key = program.name, seen[program.name]
                seen[program.name] += 1
                predictions.setdefault(key, program.predicted)
                taken[key] += runs_of(rank, number)
    return [
        {
            "program": name,
            "runs": len(runs),
            "predicted_ms": predictions[name, number].seconds * 1e3,
            "predicted_exposed_ms": predictions[name, number].exposed * 1e3,
            "predicted_held_ms": predictions[name, number].held * 1e3,
            "measured_ms": median(run.seconds for run in runs) * 1e3,
            "measured_exposed_ms": median(run.exposed for run in runs) * 1e3,
        }
        for (name, number), runs in taken.items()
        if runs
    ]


def profiles(ranks: Sequence[Measured]) -> list[Profiled]:
    """The programs that were measured, once each though all of their ranks tell the same."""
    return list(dict.fromkeys(done for rank in ranks for done in rank.trace.profiles))


def costs_of(ranks: Sequence[Measured], named: str | None) -> CostTable | None:
    """The table of a file, or else the one that the job knew. Raises `InvalidProgramError`."""
    if named:
        return CostTable.read(named)
    text = ranks[0].trace.header.costs
    if not text:
        return None
    return CostTable.parse(text)
