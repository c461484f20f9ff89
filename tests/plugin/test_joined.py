"""Under mpiexec, JAX's distributed client is there without `jax.distributed.initialize`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mpi import patient, run_ranks

pytestmark = pytest.mark.mpi

ENV = {"JAX_PLATFORMS": "stretto"}
START = """
import os, sys, time, jax, numpy as np
from jax._src.distributed import global_state
assert not jax.distributed.is_initialized()
rank = jax.process_index()
"""


def test_the_store_and_barriers() -> None:
    code = """
assert jax.distributed.is_initialized()
assert (global_state.process_id, global_state.num_processes) == (rank, 3)
client = global_state.client
client.key_value_set(f"numbers/{rank}", str(10 * rank))
client.wait_at_barrier("written", 60_000)
assert sorted(client.key_value_dir_get("numbers/")) == [(f"numbers/{r}", str(10 * r)) for r in range(3)]
# The CPU backend is each process's own, as without: another rank need not take part.
assert {d.process_index for d in jax.devices("cpu")} == {0}
assert float(jax.device_put(2.0, jax.devices("cpu")[0])) == 2
print("fine", flush=True)
"""
    done = run_ranks(3, ["-c", START + code], env=ENV)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 3
    assert done.stderr == ""


@pytest.mark.thorough
def test_proxies_are_not_asked() -> None:
    proxy = {"http_proxy": "http://192.0.2.1:9", "https_proxy": "http://192.0.2.1:9"}
    code = "assert 'no_grpc_proxy' not in os.environ; print('fine', flush=True)"
    done = run_ranks(2, ["-c", START + code], env=ENV | proxy)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2


def test_a_program_that_joins_by_itself_is_left_alone() -> None:
    code = """
import os, jax
from jax._src.distributed import global_state
jax.distributed.initialize(cluster_detection_method="mpi4py", local_device_ids=[0])
client = global_state.client
jax.devices()
assert global_state.client is client
print("fine", flush=True)
"""
    done = run_ranks(2, ["-c", code], env=ENV)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2
    assert done.stderr == ""  # nobody watches a service that has ended


@pytest.mark.quick("1")
@pytest.mark.parametrize("killed", [0, 1])
def test_the_death_of_a_rank_is_told_by_stretto_alone(killed: int) -> None:
    """JAX's client would end its process at once where that of rank 0 is gone."""
    here = Path(__file__)
    script = [str(here.with_name("killed_rank.py")), str(killed)]
    paths = {"PYTHONPATH": str(here.parents[1])}
    patience = {"STRETTO_GRACE": "600"}  # which none waits for
    done = run_ranks(2, script, env=ENV | paths | patience, mpiexec_arguments=patient())
    assert done.returncode != 0
    assert "caught True" in done.stdout, done.stderr
    assert f"rank {killed} (pid " in done.stderr
    assert "coordination" not in done.stderr


def test_a_forked_child_has_none() -> None:
    code = """
child = os.fork()
if child == 0:
    assert not jax.distributed.is_initialized()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert jax.distributed.is_initialized()
print("fine", flush=True)
"""
    done = run_ranks(2, ["-W", "ignore", "-c", START + code], env=ENV)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fine") == 2


def test_alone_there_is_none() -> None:
    code = START + "assert global_state.client is None; print('fine', flush=True)"
    done = run_ranks(1, ["-c", code], env=ENV)
    assert done.stdout == "fine\n", done.stderr
