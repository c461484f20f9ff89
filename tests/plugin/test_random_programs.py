"""Some programs drawn at random, on stretto as on JAX's CPU backend, and as NumPy has it.

STRETTO_TEST_ROUNDS: how many times as many programs (1). `random_programs` and `random_subsets` run as many
as one likes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.mpi import run_ranks

SCRIPT = Path(__file__).with_name("random_programs.py")
SUBSETS = Path(__file__).with_name("random_subsets.py")
ROUNDS = int(os.environ.get("STRETTO_TEST_ROUNDS", "1"))


def environment(devices: int, ranks: int = 1) -> dict[str, str]:
    """For so many devices, on so many ranks."""
    return {
        "JAX_PLATFORMS": "stretto,cpu",
        "STRETTO_LOCAL_DEVICES": str(devices // ranks),
        # Code that is not optimized takes half the time, with what compiles it.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
    }


def check(done: subprocess.CompletedProcess[str], count: int, ranks: int = 1) -> None:
    """Each rank ran them all, and most were no errors."""
    assert done.returncode == 0, done.stdout + done.stderr
    equal = [int(n) for n in re.findall(r"(\d+) equal", done.stdout)]
    assert len(equal) == ranks and min(equal) > count / 2, done.stdout


@pytest.mark.quick("gradients-0-1-more3", "floats-0-1-more4")
@pytest.mark.parametrize(
    ("kind", "first", "count", "more"),
    [
        ("values", 0, 3, ()),
        ("values", 5000, 1, ("--wide",)),
        ("steps", 0, 1, ()),
        ("gradients", 0, 1, ()),
        ("floats", 0, 1, ()),
    ],
)
def test_in_one_process(kind: str, first: int, count: int, more: tuple[str, ...]) -> None:
    count *= ROUNDS
    command = [str(SCRIPT), kind, "--first", str(first), "--count", str(count), *more]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **environment(8)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100 + 10 * count,
    )
    check(done, count)


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.parametrize(("devices", "first"), [(8, 100), (2, 9200)])
def test_on_ranks(devices: int, first: int) -> None:
    """Several devices in each of two processes; one, whose programs the caller's thread runs."""
    ranks, count = 2, 2 * ROUNDS
    command = [str(SCRIPT), "values", "--first", str(first), "--count", str(count)]
    done = run_ranks(
        ranks,
        [*command, "--devices", str(devices)],
        env=environment(devices, ranks),
        timeout=100 + 20 * count,
    )
    check(done, count, ranks)


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "local", "hosts", "first"),
    [(2, 2, 1, 0), (3, 1, 1, 1000), (3, 2, 1, 2000), (4, 2, 2, 3000)],
)
def test_collectives_of_some_of_the_devices(ranks: int, local: int, hosts: int, first: int) -> None:
    count = 100 * ROUNDS
    done = run_ranks(
        ranks,
        [str(SUBSETS), f"--first={first}", f"--count={count}", f"--hosts={hosts}"],
        env={"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": str(local)},
        timeout=60 + count,
    )
    check(done, count, ranks)
