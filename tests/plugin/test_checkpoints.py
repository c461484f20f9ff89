"""Checkpoints by orbax under mpiexec, restored by more ranks or fewer, onto other layouts and platforms."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.mpi import run_ranks

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(find_spec("orbax") is None, reason="pip install orbax-checkpoint"),
]

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")


def _ranks(number: int, folder: Path, what: str, layout: str) -> None:
    env = {"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": "2"}
    done = run_ranks(number, [str(SCRIPT), str(folder), what, layout], env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("restored") == number
    assert "stretto: " not in done.stderr


def _cpu(folder: Path, what: str, layout: str) -> None:
    """The same program in one process of JAX's CPU backend, with four devices."""
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    command = [sys.executable, str(SCRIPT), str(folder), what, layout]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("save", ["save", "save_async"])
def test_saved_by_ranks_restored_by_others(tmp_path: Path, save: str) -> None:
    _ranks(2, tmp_path / "state", save, "rows")
    _ranks(4, tmp_path / "state", "restore", "columns")
    _ranks(1, tmp_path / "state", "restore", "grid")
    _cpu(tmp_path / "state", "restore", "grid")


@pytest.mark.thorough
def test_saved_on_cpu_restored_by_ranks(tmp_path: Path) -> None:
    _cpu(tmp_path / "state", "save_async", "columns")
    _ranks(2, tmp_path / "state", "restore", "rows")
