"""Measures in fresh processes, in turns: for what a process can do only once (compiling, growing)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import clean_environment, console, mpiexec

# Environment of each contender.
PLATFORMS: Mapping[str, Mapping[str, str]] = {
    "JAX CPU": {"JAX_PLATFORMS": "cpu"},
    "stretto": {"JAX_PLATFORMS": "stretto,cpu"},
}


def in_fresh_processes(
    script: Path,
    modes: Sequence[str],
    repeats: int,
    contenders: Mapping[str, Mapping[str, str]] = PLATFORMS,
) -> dict[str, dict[str, list[float]]]:
    """Run ``script MODE`` for each contender ``repeats`` times in turns; each prints figures as JSON.

    A contender with ``BENCH_RANKS`` in its environment is run on so many ranks, which share the 8 devices,
    and one of which prints.

    Returns figures by ``"MODE: figure"`` and contender. One that fails is left out, with its error.
    """
    rows: dict[str, dict[str, list[float]]] = {}
    for mode in modes:
        for _ in range(repeats):
            for label, variables in contenders.items():
                ranks = int(variables.get("BENCH_RANKS", "1"))
                env = clean_environment(
                    **variables,
                    STRETTO_LOCAL_DEVICES=str(8 // ranks),
                    XLA_FLAGS="--xla_force_host_platform_device_count=8",
                )
                command = [sys.executable, str(script), "--worker", mode]
                if ranks > 1:
                    command = [mpiexec(), "-n", str(ranks), *command]
                done = subprocess.run(
                    command, env=env, capture_output=True, text=True, timeout=900, check=False
                )
                if done.returncode:
                    console.print(f"{label}, {mode}: {done.stderr[-1500:]}", markup=False)
                    continue
                for figure, value in json.loads(done.stdout.splitlines()[-1]).items():
                    rows.setdefault(f"{mode}: {figure}", {}).setdefault(label, []).append(value)
    return rows
