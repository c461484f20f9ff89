"""What a head that is divided over the stages gains: a step of training, two ranks, 16 microbatches.

The head takes as long as three stages. On the last stage every iteration takes four stages' time; divided
over two stages two and a half. Both heads are in the loop (`stretto.pipelined`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness import Contender, console, in_turns, machine, options, seconds, start
from rich.table import Table

CASE = {"microbatches": 16, "layers": 4, "rows": 256, "width": 256, "heads": 3, "calls": 1}
GOAL = 1.4


@dataclass(frozen=True)
class Setting:
    """The ranks, with the head computed by the last stage or by all."""

    contender: Contender
    head_on: str

    @property
    def name(self) -> str:
        return self.head_on

    def run(self, case: Mapping[str, Any]) -> float:
        return self.contender.run({**case, "head_on": self.head_on})


def model(stages: int, microbatches: int, heads: int) -> float:
    """How many times as fast the step is, if only stages and heads took time."""
    iterations = microbatches + stages - 1
    on_last = (stages - 1) + microbatches * (1 + heads)
    return on_last / (iterations + microbatches * heads / stages)


def main() -> None:
    args = options(__doc__ or "")
    contender = start("stretto", "vocab_head_ranks.py", 2, "mpi", JAX_PLATFORMS="stretto,cpu")
    try:
        settings = [Setting(contender, where) for where in ("last", "all")]
        times = in_turns(settings, {"step": CASE}, 5 if args.quick else 15)["step"]
    finally:
        contender.close()
    medians = {where: statistics.median(times[where]) for where in ("last", "all")}
    table = Table(title="a head that takes as long as three stages", caption=machine())
    for column in ("head", "a step", "gain", "of the model's", "goal"):
        table.add_column(column, justify="left" if column == "head" else "right")
    gain, ideal = medians["last"] / medians["all"], model(2, CASE["microbatches"], CASE["heads"])
    table.add_row("on the last stage", seconds(medians["last"]), "", "", "")
    table.add_row(
        "divided over the stages",
        seconds(medians["all"]),
        f"{gain:.2f}x",
        f"{ideal:.2f}x",
        f"{GOAL}x",
    )
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "median": medians}, indent=2))


if __name__ == "__main__":
    main()
