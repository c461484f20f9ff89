"""`stretto explain FILE --costs COSTS.json`: the schedule of a module by a table of costs, and its ledger.

The JSON is that of `hlo_frontend.overlap.export`; ``docs/overlap.md`` says what its keys mean.
"""

from __future__ import annotations

import gc
import json
from typing import Any

from stretto.hlo_frontend.collectives import CollectiveReader
from stretto.hlo_frontend.flatten import flatten
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.overlap.apply import OverlapPolicy, loops_of
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.hlo_frontend.overlap.export import to_json
from stretto.hlo_frontend.overlap.plan import donated_parameters, plan_block
from stretto.hlo_frontend.overlap.staged import LoopReport
from stretto.hlo_frontend.source import in_fork, read_hlo
from stretto.hlo_frontend.verify import check_partitioned, verify

MOST_NAMES = 3  # names of collectives printed of a loop; --json has them all


def schedule_file(data: bytes, costs_file: str, num_devices: int) -> str:
    """The schedule of a file's module as JSON text, found in a forked process.

    ``num_devices``: how many it is for where it names no number of its own. Raises `InvalidProgramError`
    for a file, a table or a group in it that cannot be used.
    """
    costs = CostTable.read(costs_file)

    def work() -> str:
        gc.disable()  # the process ends with this: no garbage of it matters
        source = read_hlo(data)
        module = Module.parse(source.module)
        verify(module)
        replicas, partitions = source.counts(num_devices, module)
        check_partitioned(module, partitions)
        block = flatten(module.entry, CollectiveReader(replicas, partitions))
        found = to_json(plan_block(block, costs, donated_parameters(module)))
        reports = loops_of(block, OverlapPolicy(costs))  # last: it changes the block
        found["summary"]["loops"] = [_loop_json(report) for report in reports]
        return json.dumps(found)

    return in_fork(work, data)


def _loop_json(report: LoopReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "trips": report.trips,
        "before_ms": report.before * 1e3,
        "after_ms": report.seconds * 1e3,
        "early": list(report.early),
        "late": list(report.late),
        "why": report.why,
    }


def ledger_text(schedule: dict[str, Any]) -> str:
    """The ledger for reading: a line for each collective in issue order, then the totals."""
    lines = [f"{'time':>12} {'exposed':>12}  collective"]
    for entry in schedule["collectives"]:
        where = "".join(f"[{i}]" for i in entry["iteration"])
        more = f" and {len(entry['members']) - 1} more" if len(entry["members"]) > 1 else ""
        hidden = ", ".join(f"{h['name']} {_us(h['seconds']).strip()}" for h in entry["hidden_by"])
        lines.append(
            f"{_us(entry['seconds'])} {_us(entry['exposed'])}  {entry['op']} %{entry['name']}{where}"
            f"{more} on {entry['stream']}; {entry['why']}"
            + (f"; behind {hidden}" if hidden else "")
        )
    return "\n".join([*lines, "", *totals(schedule["summary"])])


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:9.1f} us"


def totals(s: dict[str, Any]) -> list[str]:
    """The totals of a ledger, one subject a line."""
    lines = [
        f"collectives {s['collectives']} in {s['transfers']} transfers ({s['buckets']} buckets): "
        f"hideable {s['hideable']}, overlapped {s['overlapped']}, fully hidden {s['fully_hidden']}",
        f"exposed {s['exposed_ms']:.3f} ms (floor {s['exposed_floor_ms']:.3f} ms; "
        f"unscheduled {s['unscheduled_exposed_ms']:.3f} ms)",
        f"predicted {s['predicted_ms']:.3f} ms (floor {s['floor_ms']:.3f} ms = "
        f"{s['floor_resource_ms']:.3f} ms of the busiest resource + {s['floor_unhideable_ms']:.3f} ms "
        f"that dependencies keep it idle, bound by {s['floor_resource']}; "
        f"unscheduled {s['unscheduled_ms']:.3f} ms)",
        f"compute {s['compute_ms']:.3f} ms"
        + (f" and {s['held_ms']:.3f} ms that collectives hold it back" if s["held_ms"] else "")
        + "".join(f", {name} {ms:.3f} ms" for name, ms in s["stream_ms"].items()),
        f"peak memory {s['peak_bytes'] / 1e6:.1f} MB, unscheduled "
        f"{s['unscheduled_peak_bytes'] / 1e6:.1f} MB, limit {s['memory_limit_bytes'] / 1e6:.1f} MB",
    ]
    for name, blocks in s["inner"].items():
        for block in blocks:
            if block["collectives"]:
                lines += [f"inside %{name}:", *("  " + line for line in totals(block))]
    return [*lines, *(_loop_line(loop) for loop in s.get("loops", ()) if loop["before_ms"])]


def _loop_line(loop: dict[str, Any]) -> str:
    """What becomes of a loop when the program runs, where it stays one."""
    trips = loop["trips"]
    times = "" if trips is None else f", {trips} iterations"
    before = f"as it runs, loop %{loop['name']}{times}: {loop['before_ms']:.4f} ms an iteration"
    if loop["why"]:
        return f"{before}, no collective crosses: {loop['why']}"
    moved = [
        f"{len(loop[key])} {what} ({_some(loop[key])})"
        for key, what in (("early", "begin early"), ("late", "end late"))
        if loop[key]
    ]
    saved = (
        "" if trips is None else f", {(loop['before_ms'] - loop['after_ms']) * trips:.3f} ms saved"
    )
    return f"{before}, {loop['after_ms']:.4f} ms as {' and '.join(moved) or 'results cross'}{saved}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(f"%{name}" for name in names[:MOST_NAMES]) + more
