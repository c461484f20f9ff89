"""`stretto explain FILE --costs COSTS.json`: the schedule of a module by a table of costs, and its ledger.

The JSON is that of `hlo_frontend.overlap.export`; ``docs/overlap.md`` says what its keys mean.
"""

from __future__ import annotations

import gc
import json
from typing import Any

from stretto.hlo_frontend.compile import explained_hlo
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.hlo_frontend.overlap.export import to_json
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.hlo_frontend.source import in_fork, read_hlo
from stretto.runtime.options import in_force

MOST_NAMES = 3  # names of collectives printed of a loop; --json has them all


def schedule_file(data: bytes, costs_file: str, num_devices: int, *, rewrites: bool = False) -> str:
    """The plan of a file's module as JSON text, found in a forked process.

    It is the plan of a program that is compiled of this module with this table of costs. ``num_devices``: how
    many it is for where it names no number of its own. ``rewrites``: as in `compile_hlo`. Raises
    `InvalidProgramError` for a file, a table or a group in it that cannot be used.
    """
    costs = CostTable.read(costs_file)

    def work() -> str:
        gc.disable()  # the process ends with this: no garbage of it matters
        source = read_hlo(data)
        module = Module.parse(source.module)
        replicas, partitions = source.counts(num_devices, module)
        own = in_force()
        found = explained_hlo(
            source.module,
            replicas,
            partitions,
            OverlapPolicy(costs),
            pseudo_tokens=own.pseudo_tokens,
            rewrites=rewrites,
            valid=ValidPolicy.of(own),
            interleave=own.interleave,
            schedule=own.schedule,
            splits=rewrites and own.split,
            parsed=module,
        )
        return json.dumps(to_json(found))

    return in_fork(work, data)


def ledger_text(schedule: dict[str, Any]) -> str:
    """The ledger for reading: a line for each collective in issue order, then the totals."""
    return "\n".join([*_entries(schedule), "", *totals(schedule["summary"])])


def _entries(schedule: dict[str, Any]) -> list[str]:
    """The collectives of a block; then, for each loop or branch, those of the blocks inside it."""
    lines = [f"{'time':>12} {'exposed':>12}  collective"] if schedule["collectives"] else []
    for entry in schedule["collectives"]:
        more = f" and {len(entry['members']) - 1} more" if len(entry["members"]) > 1 else ""
        hidden = ", ".join(f"{h['name']} {_us(h['seconds']).strip()}" for h in entry["hidden_by"])
        lines.append(
            f"{_us(entry['seconds'])} {_us(entry['exposed'])}  {entry['op']} %{entry['name']}{more} on "
            f"{entry['stream']}; {entry['why']}" + (f"; behind {hidden}" if hidden else "")
        )
    for step in schedule["steps"]:
        for block in step.get("blocks", ()):
            s = block["summary"]
            if s["collectives"]:
                times = "" if step["trips"] is None else f", {step['trips']} iterations"
                lines += [
                    f"inside %{step['name']}, {block['block']}{times}: predicted {s['predicted_ms']:.4f} "
                    f"ms each, exposed {s['exposed_ms']:.4f} ms, own order {s['unscheduled_ms']:.4f} ms",
                    *("  " + line for line in _entries(block)),
                ]
    return lines


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
        *_floor_of_whole(s),
        f"peak memory {s['peak_bytes'] / 1e6:.1f} MB, unscheduled "
        f"{s['unscheduled_peak_bytes'] / 1e6:.1f} MB, limit {s['memory_limit_bytes'] / 1e6:.1f} MB",
    ]
    lines += [f"%{c['name']} {c['text']}" for c in s["splits"]]
    return [*lines, *(_loop_line(loop) for loop in s["loops"] if loop["before_ms"])]


def _floor_of_whole(s: dict[str, Any]) -> list[str]:
    """The floor with collectives that are not split, where some are."""
    if s["whole_floor_ms"] is None:
        return []
    return [
        f"floor with all collectives whole {s['whole_floor_ms']:.3f} ms, with those that are split "
        f"{s['floor_ms']:.3f} ms"
    ]


def _loop_line(loop: dict[str, Any]) -> str:
    """What became of a loop."""
    trips = loop["trips"]
    times = "" if trips is None else f", {trips} iterations"
    before = f"loop %{loop['name']}{times}: {loop['before_ms']:.4f} ms an iteration"
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
