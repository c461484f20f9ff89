"""How ranks share cores, by hand."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from stretto.runtime.cores import (
    Place,
    announced,
    of_rank,
    patience,
    patience_of_callers,
    patience_of_code,
    share,
    usable,
)


def place(*cores: int, host: str = "a") -> Place:
    return Place(host, frozenset(cores))


TWO, EIGHT = range(2), range(8)


@pytest.mark.parametrize(
    ("places", "cores"),
    [
        ([place(*TWO)], 2.0),
        ([place(*TWO)] * 4, 0.5),
        ([place(*EIGHT)] * 4, 2.0),
        ([place(0), place(1)], 1.0),  # bound by the launcher
        ([place(0, 1), place(2, 3)], 2.0),
        ([place(*TWO), place(*TWO, host="b")], 2.0),
        ([place(0, 1), place(1, 2)], 1.5),
    ],
)
def test_share(places: list[Place], cores: float) -> None:
    assert share(places, places[0]) == cores


@pytest.mark.parametrize(
    ("places", "nodes", "seconds"),
    [
        ([place(*EIGHT)] * 4, 1, math.inf),
        ([place(*EIGHT)] * 5, 1, 300e-6),
        ([place(*TWO)] * 2, 1, 300e-6),
        ([place(*TWO)] * 3, 1, 50e-6),
        ([place(*EIGHT), place(*EIGHT, host="b")], 2, 1e-3),
        ([place(0), place(1)], 2, 50e-6),
        # the worst place decides for all: they make the same calls
        ([place(*EIGHT), place(0, host="b"), place(0, host="b")], 2, 50e-6),
    ],
)
def test_patience(places: list[Place], nodes: int, seconds: float) -> None:
    assert patience(places, nodes) == seconds


@pytest.mark.parametrize(
    ("others", "nodes", "seconds"),
    [(50e-6, 1, 150e-6), (300e-6, 1, 300e-6), (math.inf, 1, math.inf), (50e-6, 2, 50e-6)],
)
def test_patience_of_code(others: float, nodes: int, seconds: float) -> None:
    assert patience_of_code(others, nodes) == seconds


@pytest.mark.parametrize(
    ("places", "seconds"),
    [
        ([place(*EIGHT)] * 2, 1e-3),
        ([place(*TWO)] * 2, 1e-3),
        ([place(*TWO)] * 8, 4e-3),
        ([place(*EIGHT), place(0, host="b"), place(0, host="b")], 2e-3),
    ],
)
def test_callers_wait_longer_where_ranks_share_cores(places: list[Place], seconds: float) -> None:
    assert patience_of_callers(places) == seconds


@pytest.mark.thorough
@pytest.mark.parametrize("cores", [1, 3])
def test_an_engine_computes_on_as_many_cores_as_it_is_told(cores: int) -> None:
    # XLA reads NPROC when it makes a client. If this fails, look for what it reads now.
    code = f"""
import jax, numpy as np
from pathlib import Path
from stretto.runtime.engines.engine import create_engine
engine = create_engine("xla:cpu", 1, cores={cores})
threads = Path("/proc/self/task").glob("*/comm")
print(sum(t.read_text().startswith("tf_XLAEigen") for t in threads))
"""
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == cores


def test_who_has_said_how_many_cores_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "5")
    with announced(1):
        assert os.environ["NPROC"] == "5"
    monkeypatch.delenv("NPROC")
    with announced(1):
        assert os.environ["NPROC"] == "1"
    assert "NPROC" not in os.environ


def test_a_rank_has_a_core_at_least() -> None:
    assert of_rank([place(*TWO)] * 4, 3) == 1
    assert of_rank([place(*EIGHT)] * 3, 0) == 2
    assert of_rank([place(*EIGHT), place(1, host="b")], 1) == 1


def test_this_process_has_a_core() -> None:
    assert usable()


@pytest.mark.thorough
@pytest.mark.parametrize("said", [False, True])
def test_devices_share_the_threads_of_linear_algebra(said: bool) -> None:
    """Those of the library that jaxlib calls, not NumPy's, and where nobody has said how many."""
    code = """
import os
import jax, numpy as np, scipy.linalg
import jax.numpy as jnp
from threadpoolctl import threadpool_info

def threads():
    return {"numpy.libs" in i["filepath"]: i["num_threads"] for i in threadpool_info()}

before = threads()
doubled = jax.jit(lambda x: x + x)(np.eye(4))
assert threads() == before
assert np.array_equal(jnp.linalg.cholesky(np.diag([4.0, 9.0])), np.diag([2.0, 3.0]))
after = threads()
assert after.get(True) == before.get(True)
print(before[False], after[False])
"""
    environment = {k: v for k, v in os.environ.items() if k != "NPROC" and "_NUM_THREADS" not in k}
    environment |= {"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": "64"}
    environment |= {"OPENBLAS_NUM_THREADS": "2"} if said else {}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    before, after = done.stdout.split()
    assert after == (before if said else "1")
