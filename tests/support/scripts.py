"""Running scripts on stretto: those that print, and those that leave a JSON file of each process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .mpi import run_ranks
from .processes import finished

DROPPED = ("STRETTO_", "XLA_", "JAX_", "PMI")


def run(
    script: str, platforms: str | None = "stretto", devices: int = 4, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in its own process; ``platforms`` None leaves JAX_PLATFORMS unset."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED)}
    env |= {"STRETTO_LOCAL_DEVICES": str(devices), **environment}
    if platforms is not None:
        env["JAX_PLATFORMS"] = platforms
    return finished([sys.executable, "-c", textwrap.dedent(script)], env)


def conforming(engine: str) -> list[str]:
    """Check the engine ``engine`` of the entry points; gives the checks made.

    In a process of its own: where large tests have run, what small arrays take of the memory that these gave
    back looks like a leak for long.
    """
    done = run(
        f"""
        from stretto.engine_check import check_engine
        from stretto.runtime.engines.engine import create_engine

        print(*check_engine(lambda devices: create_engine({engine!r}, devices)))
        """,
        platforms="cpu",
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def passes(script: str, platforms: str | None = "stretto", devices: int = 4) -> str:
    """The output of a script that must exit with 0."""
    done = run(script, platforms, devices)
    assert done.returncode == 0, (
        f"exit status {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def reports_of(
    folder: Path,
    text: str,
    devices: int,
    ranks: int = 1,
    rank_env: Mapping[int, Mapping[str, str]] | None = None,
    **environment: str,
) -> tuple[list[Any], str]:
    """Run a script with ``devices`` devices in all, in this many processes.

    It gets the folder as its argument, where each process writes one ``….json``. Gives these reports, by
    name, and what was written to standard error. ``environment`` is added to that of the processes,
    ``rank_env`` to that of single ranks.
    """
    script = folder / "script.py"
    script.write_text(text)
    env = {
        "JAX_PLATFORMS": "stretto",
        "STRETTO_LOCAL_DEVICES": str(devices // ranks),
        **environment,
    }
    if ranks > 1:
        done = run_ranks(ranks, [str(script), str(folder)], env=env, rank_env=rank_env)
    else:
        done = finished([sys.executable, str(script), str(folder)], {**os.environ, **env})
    assert done.returncode == 0, done.stderr
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert len(reports) == ranks
    return reports, done.stderr
