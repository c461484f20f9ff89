"""`examples/pipeline.py`, on ranks and devices of one process: the losses of JAX's CPU backend, whoever
computes the head."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.mpi import run_ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "pipeline.py"


def trained(ranks: int, head: str, **env: str) -> tuple[list[list[float]], str]:
    """Losses of the first of three steps and on average, as it is written and circular; and what is said."""
    done = run_ranks(ranks, [str(EXAMPLE), "--steps", "3", "--head", head], env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1]).values()
    return [[own["first_loss"], own["last_loss"]] for own in found], done.stderr


@pytest.fixture(scope="module")
def losses() -> list[float]:
    """Of JAX's CPU backend, with the head on the last stage."""
    four = "--xla_force_host_platform_device_count=4"
    return trained(1, "last", JAX_PLATFORMS="cpu", XLA_FLAGS=four)[0][0]


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("ranks", "head", "schedule", "says"),
    [
        (2, "last", "1f1b", "run as 1f1b"),
        (1, "sharded", "gpipe", ""),
        (2, "behind", "1f1b", "all stages compute a head together"),
    ],
)
def test_a_head(losses: list[float], ranks: int, head: str, schedule: str, says: str) -> None:
    local = {"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": str(4 // ranks)}
    found, said = trained(ranks, head, **local, STRETTO_SCHEDULE=schedule)
    assert says in said
    for own in found:
        np.testing.assert_allclose(own, losses, rtol=1e-5)
