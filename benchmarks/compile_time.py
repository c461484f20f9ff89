"""Time to compile a training step of an 8-layer llama-like model on 8 devices (fsdp 4 x tp 2), and to run it
for the first time.

Without a table of costs nothing is planned on one host. One contender has one, of a 1 Gb/s network: what
it takes longer is planning, and compiling the segments that its plan has more. ``4 ranks`` is stretto with
the devices on four processes of this host, of which the slowest counts; ``4 ranks, each for itself`` is the
same where ranks do not share what they compile.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fresh import PLATFORMS, in_fresh_processes
from harness import options, show

MODES = ("8 layers", "8 layers scanned", "8 layers of stacked weights")
DEVICES = 8


def costs() -> dict[str, Any]:
    """The table of a network that is slow enough for every block of the step to be planned."""
    link = {"latency_s": 3e-4, "bytes_per_s": 117187500.0}
    return {
        "compute": {"flops_per_s": 27e9, "bytes_per_s": 8e9, "launch_s": 5e-5},
        "links": [
            {"axis_stride": stride, "group_size": size, **link}
            for stride in range(1, DEVICES)
            for size in range(2, DEVICES + 1)
        ],
    }


def worker(mode: str) -> None:
    """Compile and run once in this process; client start-up is not counted, nor is filling the arrays."""
    import jax
    import models
    import numpy as np
    from jax.experimental import multihost_utils

    config = dataclasses.replace(
        models.SMALL, scan=mode.endswith("scanned"), stacked=mode.endswith("stacked weights")
    )
    mesh = models.mesh_of(jax.devices())
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
    arguments = jax.block_until_ready(models.concrete(config, mesh))
    step = models.train_step(config, mesh)
    lowered = step.lower(*models.abstract(config, mesh))
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("lowered")
    began = time.perf_counter()
    compiled = lowered.compile()
    compiling = time.perf_counter() - began
    jax.block_until_ready(compiled(*arguments))
    found = {"compile": compiling, "compile and first run": time.perf_counter() - began}
    if jax.process_count() > 1:
        rows = multihost_utils.process_allgather(np.array(list(found.values())))
        found = dict(zip(found, rows.max(axis=0).tolist(), strict=True))
    if jax.process_index() == 0:
        print(json.dumps(found))


def main() -> None:
    if "--worker" in sys.argv:
        return worker(sys.argv[-1])
    args = options(__doc__ or "")
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "costs.json"
        table.write_text(json.dumps(costs()))
        planned = {**PLATFORMS["stretto"], "STRETTO_COSTS": str(table)}
        ranks = {**PLATFORMS["stretto"], "BENCH_RANKS": "4"}
        contenders = {
            **PLATFORMS,
            "stretto, planned": planned,
            "4 ranks": ranks,
            "4 ranks, each for itself": {**ranks, "STRETTO_SHARE_COMPILED": "0"},
        }
        rows = in_fresh_processes(Path(__file__), MODES, 2 if args.quick else 5, contenders)
    goals = dict.fromkeys(rows, "stretto ≤ 1x, planned ≤ 1.3x, 4 ranks ≤ 1.2x of stretto")
    return show("compiling the step", rows, "JAX CPU", goals, target=args.json)


if __name__ == "__main__":
    main()
