"""Peak memory of training steps of an 8-layer llama-like model on 8 devices of one process.

*steps*: the peak of resident memory while stepping, after compiling; *whole run*: the process's peak with
compilation. Both in bytes, the interpreter and JAX included.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
from pathlib import Path

from fresh import in_fresh_processes
from harness import options, show

MODES = ("8 layers", "8 layers scanned")
STEPS = 3


def peak_since_reset() -> int:
    """VmHWM in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def worker(mode: str) -> None:
    import jax
    import models

    config = dataclasses.replace(models.LARGE, scan=mode.endswith("scanned"))
    mesh = models.mesh_of(jax.devices())
    step = models.train_step(config, mesh).lower(*models.abstract(config, mesh)).compile()
    state, tokens = models.concrete(config, mesh)
    jax.block_until_ready(state)
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(STEPS):
        state, value = step(state, tokens)
        value.block_until_ready()
    whole = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"steps": peak_since_reset(), "whole run": max(whole, peak_since_reset())}))


def mebibytes(value: float) -> str:
    return f"{value / 2**20:.0f} MiB"


def main() -> None:
    if "--worker" in sys.argv:
        return worker(sys.argv[-1])
    args = options(__doc__ or "")
    rows = in_fresh_processes(Path(__file__), MODES, 1 if args.quick else 3)
    goals = {row: "stretto ≤ 1.3x" for row in rows if row.endswith("steps")}
    title = "peak resident memory of training"
    return show(title, rows, "JAX CPU", goals, mebibytes, args.json)


if __name__ == "__main__":
    main()
