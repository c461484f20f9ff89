"""Collectives over processes: every kind, dtype and group form, under mpiexec. See collective_ranks.py."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from support.mpi import run_ranks

SCRIPT = Path(__file__).with_name("collective_ranks.py")
PATH = {"PYTHONPATH": str(SCRIPT.parents[1])}


@pytest.mark.quick("2,1-1-0.0")
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("devices", "every", "patience"),
    [
        ("1,1", 1, math.inf),
        ("2,2", 1, math.inf),
        ("2,1", 1, 0.0),
        ("4,4", 1, math.inf),
        ("1,1,1,1", 3, 50e-6),
        ("2,1,3", 3, 0.0),
    ],
)
def test_collectives_over_processes(devices, every, patience):
    counts, arguments = devices.split(","), [devices, str(every), str(patience)]
    done = run_ranks(len(counts), [str(SCRIPT), *arguments], env=PATH, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    match = re.search(r"^checked (\d+)$", done.stdout, re.MULTILINE)
    assert match, done.stdout + done.stderr
    assert int(match[1]) > 150
    posted = re.search(r"^posted (.*)$", done.stdout, re.MULTILINE)
    assert posted and {"all-reduce", "collective-permute"} <= set(posted[1].split())
    ahead = re.search(r"^ahead(.*)$", done.stdout, re.MULTILINE)
    # Where a wait may keep a core, MPI's blocking calls are as good. Of several devices, operands are packed.
    wanted = {"all-gather", "all-reduce", "reduce-scatter"} if patience < 1e-4 else set()
    if set(counts) == {"1"}:
        assert ahead and set(ahead[1].split()) == wanted
