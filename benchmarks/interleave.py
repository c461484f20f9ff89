"""What interleaving gains: a GPipe program as it is written, and with two and four chunks of layers a device;
and a step of training with it, forward and backward.

The model: of ``M + P - 1`` iterations of a stage's time, ``R * M + P - 1`` of 1/R of that are left. Shown
is the share of this gain that is seen. Two ranks compute (matrix products, a core each); four and eight are
simulated: their stages sleep. Each call of a program includes what moves its weights into their places.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness import Contender, console, in_turns, machine, options, seconds, start
from rich.table import Table

LAYERS = 4
REAL = {"rows": 2048, "width": 512, "nap": 0.0, "gradients": False}
TRAINED = {**REAL, "gradients": True}
SIMULATED = {"rows": 8, "width": 8, "nap": 0.025, "gradients": False}
# Ranks, microbatches, how a layer takes its time, and the share of the gain that is the goal.
CASES = (
    ("2 ranks, matrix products", 2, 2, REAL, 0.85),
    ("2 ranks, a step of training", 2, 2, TRAINED, 0.85),
    ("4 ranks, simulated", 4, 4, SIMULATED, 0.95),
    ("8 ranks, simulated", 8, 8, SIMULATED, 0.95),
)
CHUNKS = (1, 2, 4)


@dataclass(frozen=True)
class Setting:
    """The ranks, running with so many chunks."""

    contender: Contender
    chunks: int

    @property
    def name(self) -> str:
        return str(self.chunks)

    def run(self, case: Mapping[str, Any]) -> float:
        return self.contender.run({**case, "chunks": self.chunks})


def model(stages: int, microbatches: int, chunks: int) -> float:
    """How many times as fast the interleaved loop is, if only the stages took time."""
    written = microbatches + stages - 1
    return written * chunks / (chunks * microbatches + stages - 1)


def main() -> None:
    args = options(__doc__ or "")
    table = Table(title="interleaved pipelines", caption=machine())
    for column in ("", "chunks", "a call", "gain", "of the model's", "share of the gain", "goal"):
        table.add_column(column, justify="left" if not column else "right")
    found: dict[str, Any] = {}
    for label, ranks, microbatches, kind, goal in CASES:
        contender = start(
            "stretto", "interleave_ranks.py", ranks, "mpi", JAX_PLATFORMS="stretto,cpu"
        )
        try:
            case = {"microbatches": microbatches, "layers": LAYERS, "calls": 2, **kind}
            settings = [Setting(contender, chunks) for chunks in CHUNKS]
            times = in_turns(settings, {label: case}, 5 if args.quick else 15)[label]
        finally:
            contender.close()
        medians = {chunks: statistics.median(times[str(chunks)]) for chunks in CHUNKS}
        found[label] = medians
        for chunks in CHUNKS:
            cells = [label if chunks == 1 else "", str(chunks), seconds(medians[chunks])]
            if chunks > 1:
                gain, ideal = medians[1] / medians[chunks], model(ranks, microbatches, chunks)
                share = (gain - 1) / (ideal - 1)
                cells += [f"{gain:.2f}x", f"{ideal:.2f}x", f"{share:.0%}", f"{goal:.0%}"]
            table.add_row(*cells)
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "median": found}, indent=2))


if __name__ == "__main__":
    main()
