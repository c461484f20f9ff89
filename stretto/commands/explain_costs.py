"""`stretto explain FILE --costs COSTS.json`: the schedule of a module by a table of costs, and its ledger.

The JSON is that of `hlo_frontend.overlap.export`; ``docs/overlap.md`` says what its keys mean.
"""

from __future__ import annotations

import gc
import json
from typing import Any

from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.hlo_frontend.overlap.export import to_json
from stretto.hlo_frontend.overlap.plan import plan_module
from stretto.hlo_frontend.source import in_fork, read_hlo
from stretto.runtime.errors import InvalidProgramError


def schedule_file(data: bytes, costs_file: str, num_devices: int) -> str:
    """The schedule of a file's module as JSON text, found in a forked process.

    ``num_devices``: how many it is for where it names no number of its own. Raises `InvalidProgramError`
    for a file, a table or a group in it that cannot be used.
    """
    try:
        costs = CostTable.read(costs_file)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidProgramError(f"the table of costs cannot be read: {error}") from error

    def work() -> str:
        gc.disable()  # the process ends with this: no garbage of it matters
        source = read_hlo(data)
        module = Module.parse(source.module)
        replicas, partitions = source.counts(num_devices, module)
        return json.dumps(to_json(plan_module(module, costs, partitions, replicas)))

    return in_fork(work)


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
        + "".join(f", {name} {ms:.3f} ms" for name, ms in s["stream_ms"].items()),
        f"peak memory {s['peak_bytes'] / 1e6:.1f} MB, unscheduled "
        f"{s['unscheduled_peak_bytes'] / 1e6:.1f} MB, limit {s['memory_limit_bytes'] / 1e6:.1f} MB",
    ]
    for name, blocks in s["inner"].items():
        for block in blocks:
            if block["collectives"]:
                lines += [f"inside %{name}:", *("  " + line for line in totals(block))]
    return lines
