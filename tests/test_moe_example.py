"""`examples/moe.py`, its exchanges in parts, on devices of two ranks: the losses of one CPU device."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support.mpi import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 4
# Messages that are slow beside compute: whatever can be split is.
COSTS = {
    "compute": {"flops_per_s": 1e9, "bytes_per_s": 1e9, "launch_s": 1e-6},
    "links": [
        {"axis_stride": stride, "group_size": size, "latency_s": 1e-5, "bytes_per_s": 5e6}
        for stride, size in ((1, 2), (2, 2), (1, 4))
    ],
}


@pytest.fixture(scope="module")
def losses() -> list[float]:
    """Of one device with all data and all experts."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        moe = importlib.import_module("moe")
    finally:
        sys.path.remove(str(EXAMPLES))
    mesh = jax.make_mesh(
        (1, 1), ("data", "expert"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:1]
    )
    old, moe.BATCH = moe.BATCH, moe.BATCH * 4
    try:
        return moe.train(mesh, STEPS, moe.text())["losses"]
    finally:
        moe.BATCH = old


@pytest.mark.thorough
@pytest.mark.mpi
def test_on_two_ranks_of_two_devices(losses: list[float], tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(COSTS))
    done = run_ranks(
        2,
        [str(EXAMPLES / "moe.py"), "--steps", str(STEPS)],
        env={
            "JAX_PLATFORMS": "stretto",
            "STRETTO_LOCAL_DEVICES": "2",
            "STRETTO_SPLIT": "1",
            "STRETTO_COSTS": str(costs),
        },
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    # Capacity counts by device: which choices find no place depends on how many there are.
    np.testing.assert_allclose(report["losses"], losses, rtol=0.03)
    assert report["losses"][-1] < report["losses"][0]
    assert 0.0 < report["left_out"] < 0.5
