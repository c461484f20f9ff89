"""A pipeline and its gradient on stretto itself: nothing changes by a bit, and messages are as counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.scripts import reports_of

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

STAGES, COUNT = 4, 5
RING = [(s, (s + 1) % STAGES) for s in range(STAGES)]
mesh = jax.make_mesh((STAGES,), ("p",), axis_types=(AxisType.Auto,))

def run(w, xs):
    stage = lax.axis_index("p")
    def step(carry, i):
        state, outputs = carry
        x = jnp.where(stage == 0, xs[jnp.minimum(i, COUNT - 1)], state)
        x = jnp.where((i >= stage) & (i < stage + COUNT), x, 0)
        y = jnp.tanh(x @ w[0])
        done = (stage == STAGES - 1) & (i >= STAGES - 1)
        outputs = jnp.where(done, outputs.at[i - (STAGES - 1)].set(y), outputs)
        return (lax.ppermute(y, "p", RING), outputs), None
    start = jnp.zeros_like(xs[0]), jnp.zeros_like(xs)
    (_, outputs), _ = lax.scan(step, start, jnp.arange(COUNT + STAGES - 1))
    return outputs

f = jax.shard_map(run, mesh=mesh, in_specs=(P("p"), P()), out_specs=P("p"), check_vma=False)
rng = np.random.default_rng(0)
def place(a, spec):
    return jax.make_array_from_callback(a.shape, NamedSharding(mesh, spec), lambda i: a[i])
w = place(rng.standard_normal((STAGES, 8, 8)).astype(np.float32) * 0.4, P("p"))
xs = place(rng.standard_normal((COUNT, 2, 8)).astype(np.float32), P())
grad = jax.jit(jax.grad(lambda w, xs: (f(w, xs) ** 2).sum()))(w, xs)
own = {str(s.index[0].start or 0): np.asarray(s.data).tobytes().hex() for s in grad.addressable_shards}
counts = [0, 0]
if jax.default_backend() == "stretto":
    import stretto
    counts = [stretto.stats().messages, stretto.stats().skipped]
with open(f"{sys.argv[1]}/{jax.process_index()}.json", "w") as file:
    json.dump([own, *counts], file)
"""
TRIPS = 5 + 4 - 1
NEEDED = 5 * 3


def gradients(reports: list) -> dict[str, np.ndarray]:
    """By stage, from all processes."""
    shards = {stage: text for own, _, _ in reports for stage, text in own.items()}
    return {s: np.frombuffer(bytes.fromhex(t), np.float32) for s, t in sorted(shards.items())}


def run(tmp_path: Path, ranks: int = 1, **environment: str) -> tuple[dict, int, int]:
    reports, _ = reports_of(tmp_path, SCRIPT, 4, ranks, **environment)
    sums = [sum(r[i] for r in reports) for i in (1, 2)]
    return gradients(reports), *sums


@pytest.fixture(scope="module")
def unskipped(tmp_path_factory) -> dict[str, np.ndarray]:
    tmp = tmp_path_factory.mktemp("unskipped")
    found, messages, skipped = run(tmp, STRETTO_DERIVE_VALID_ITERATIONS="0")
    assert skipped == 0
    assert messages >= 2 * 4 * TRIPS
    return found


def same(one: dict, other: dict) -> bool:
    return {s: a.tobytes() for s, a in one.items()} == {s: a.tobytes() for s, a in other.items()}


def test_skipping_changes_no_bit(unskipped, tmp_path):
    found, _, skipped = run(tmp_path)
    assert sorted(found) == ["0", "1", "2", "3"]
    assert same(found, unskipped)
    assert skipped == 2 * (4 * TRIPS - NEEDED)


def test_nobody_reads_what_is_left_out(unskipped, tmp_path):
    found, _, skipped = run(tmp_path, STRETTO_POISON_SKIPPED="1")
    assert same(found, unskipped)
    assert skipped > 0


def test_the_gradient_is_that_of_jax(unskipped, tmp_path):
    flags = "--xla_force_host_platform_device_count=4"
    found, _, _ = run(tmp_path, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
    for stage, array in unskipped.items():
        np.testing.assert_allclose(array, found[stage], rtol=1e-4, atol=1e-6)


@pytest.mark.mpi
def test_on_ranks(unskipped, tmp_path):
    found, _, skipped = run(tmp_path, 4)
    assert same(found, unskipped)
    assert skipped == 2 * (4 * TRIPS - NEEDED)
