"""Time to compile a training step of an 8-layer llama-like model on 8 devices (fsdp 4 x tp 2)."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

from fresh import in_fresh_processes
from harness import options, show

MODES = ("8 layers", "8 layers scanned", "8 layers of stacked weights")


def worker(mode: str) -> None:
    """Compile once in this process; client start-up is not counted."""
    import jax
    import models

    config = dataclasses.replace(
        models.SMALL, scan=mode.endswith("scanned"), stacked=mode.endswith("stacked weights")
    )
    mesh = models.mesh_of(jax.devices())
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))
    step = models.train_step(config, mesh)
    lowered = step.lower(*models.abstract(config, mesh))
    began = time.perf_counter()
    lowered.compile()
    print(json.dumps({"compile": time.perf_counter() - began}))


def main() -> None:
    if "--worker" in sys.argv:
        return worker(sys.argv[-1])
    args = options(__doc__ or "")
    rows = in_fresh_processes(Path(__file__), MODES, 2 if args.quick else 5)
    goals = dict.fromkeys(rows, "stretto ≤ 1.5x")
    return show("compiling the step", rows, "JAX CPU", goals, target=args.json)


if __name__ == "__main__":
    main()
