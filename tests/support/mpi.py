"""Starting ranks: `run_ranks` runs a script, or code, under the mpiexec of this Python's MPI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from .processes import finished


def find_mpiexec() -> str | None:
    """mpiexec beside this interpreter, or on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def is_hydra() -> bool:
    """Whether mpiexec is MPICH's."""
    mpiexec = find_mpiexec()
    if mpiexec is None:
        return False
    done = subprocess.run(
        [mpiexec, "--version"], capture_output=True, text=True, check=False, timeout=30
    )
    return "HYDRA" in done.stdout


def need_hydra(why: str) -> None:
    """Skip the test where mpiexec is another MPI's than MPICH's; where there is none, `run_ranks` does."""
    if find_mpiexec() is not None and not is_hydra():
        pytest.skip(why)


def patient() -> list[str]:
    """Arguments that make mpiexec wait for every rank to end by itself."""
    return ["-disable-auto-cleanup"] if is_hydra() else []


def run_ranks(
    ranks: int,
    script: str | Path | Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    rank_env: Mapping[int, Mapping[str, str]] | None = None,
    timeout: float = 120.0,
    mpiexec_arguments: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run Python on ``ranks`` ranks; returns exit code, stdout and stderr of all of them.

    ``script`` is a path, or a list of arguments to Python (``["-c", code]``). ``env`` is added to the
    environment of all ranks, ``rank_env[r]`` to rank r's. Skips the test where there is no mpiexec. What does
    not end in ``timeout`` seconds: see `processes.finished`.
    """
    mpiexec = find_mpiexec()
    if mpiexec is None:
        pytest.skip(
            "no mpiexec, neither beside this Python nor on PATH: pip install 'stretto[mpi]'"
        )
    python = [sys.executable, *([str(script)] if isinstance(script, str | Path) else script)]
    command = [mpiexec, *mpiexec_arguments]
    if rank_env:
        for rank in range(ranks):
            own = [f"{name}={value}" for name, value in rank_env.get(rank, {}).items()]
            command += [*([":"] if rank else []), "-n", "1", "env", *own, *python]
    else:
        command += ["-n", str(ranks), *python]
    return finished(command, {**os.environ, **(env or {})}, timeout)
