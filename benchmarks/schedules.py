"""What schedules of a step of training cost: a GPipe program as it is written, as 1F1B, with two chunks of
layers a device too, and as ZB-H1.

Two ranks compute, a core each. 1F1B does the same runs and has the same bubble, and is to take the same time:
at most 1.03 times GPipe's. What its layers keep for the backward pass is to be at most
``1.1 P / (M + P - 1)`` of what GPipe keeps; shown is all that a device needs beside arguments and results, so
also what both have.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness import Contender, console, in_turns, machine, options, seconds, start
from rich.table import Table

CASE = {
    "layers": 4,
    "rows": 512,
    "width": 256,
    "nap": 0.0,
    "gradients": True,
    "chunks": 1,
    "calls": 1,
}
RANKS = 2
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1")


@dataclass(frozen=True)
class Setting:
    """The ranks, running a schedule."""

    contender: Contender
    schedule: str

    @property
    def name(self) -> str:
        return self.schedule

    def run(self, case: Mapping[str, Any]) -> float:
        chunks = 2 if self.schedule == "interleaved_1f1b" else 1
        return self.contender.run({**case, "schedule": self.schedule, "chunks": chunks})


def main() -> None:
    args = options(__doc__ or "", microbatches=16)
    table = Table(title="schedules of a step of training", caption=machine())
    for column in ("", "a step", "of GPipe's", "goal", "memory of a device"):
        table.add_column(column, justify="left" if not column else "right")
    label = f"{RANKS} ranks, {args.microbatches} microbatches"
    contender = start("stretto", "interleave_ranks.py", RANKS, "mpi", JAX_PLATFORMS="stretto,cpu")
    try:
        settings = [Setting(contender, schedule) for schedule in SCHEDULES]
        case = {**CASE, "microbatches": args.microbatches}
        memory = {s.name: s.run({**case, "memory": True}) for s in settings}
        times = in_turns(settings, {label: case}, 5 if args.quick else 15)[label]
    finally:
        contender.close()
    found: dict[str, Any] = {"memory": memory}
    for schedule in SCHEDULES:
        ratios = [b / a for a, b in zip(times["gpipe"], times[schedule], strict=True)]
        found[schedule] = statistics.median(times[schedule])
        share = statistics.median(ratios)
        cells = [f"{label}, {schedule}", seconds(found[schedule])]
        cells += (
            ["", ""]
            if schedule == "gpipe"
            else [f"{share:.3f}x", "1.03x" if schedule == "1f1b" else ""]
        )
        table.add_row(*cells, f"{memory[schedule] / 1e6:.1f} MB")
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "median": found}, indent=2))


if __name__ == "__main__":
    main()
