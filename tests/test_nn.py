"""`stretto.nn` against the same losses of logits that are all in one place, to 1e-5; counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.scripts import reports_of

import stretto
from stretto import nn

CHECKED = pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
ROWS, WORDS, WIDTH = 24, 19, 8  # the last device has nothing but padding, the one before has some


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("stretto")), ("v",))


def drawn(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


X, HEAD, WEIGHTS = drawn(3, 4, WIDTH) * 3, drawn(ROWS, WIDTH, seed=1), drawn(3, 4, seed=2)
LABELS = np.random.default_rng(3).integers(0, WORDS, (3, 4))
LABELS[0, 1] = LABELS[2, 3] = -100
LABELS[1, 0] = WORDS - 1


def dense(x, head, labels, z_loss=0.0, smoothing=0.0):
    logits = (x @ head[:WORDS].T).astype(jnp.float32)
    lse = jax.scipy.special.logsumexp(logits, axis=-1)
    wanted = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    loss = lse - (1 - smoothing) * wanted - smoothing * jnp.mean(logits, axis=-1) + z_loss * lse**2
    return jnp.where(labels == -100, 0, loss)


def sharded(mesh: Mesh, checked: bool = True, **options: Any) -> Callable:
    def local(x, head, labels):
        return nn.vocab_parallel_cross_entropy(x, head, labels, "v", vocab_size=WORDS, **options)

    specs = (P(), P("v"), P())
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=checked)


def weighted(losses: Callable) -> Callable:
    """The gradient of a weighted sum of losses, whose values are given beside it."""

    def total(x, head, labels):
        found = losses(x, head, labels)
        return jnp.sum(found * WEIGHTS), found

    return jax.value_and_grad(total, (0, 1), has_aux=True)


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    def one(a, b):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    jax.tree.map(one, found, wanted)


@pytest.mark.quick("both")
@pytest.mark.parametrize(
    ("checked", "options"),
    [
        (True, {}),
        (False, {"z_loss": 0.01, "label_smoothing": 0.1}),
        (True, {"label_smoothing": 0.3, "recompute": True}),
    ],
    ids=["plain", "both", "recompute"],
)
def test_values_and_gradients(mesh: Mesh, checked: bool, options: dict[str, Any]) -> None:
    found = jax.jit(weighted(sharded(mesh, checked, **options)))(X, HEAD, LABELS)
    z, smoothing = options.get("z_loss", 0.0), options.get("label_smoothing", 0.0)
    close(found, weighted(lambda *given: dense(*given, z, smoothing))(X, HEAD, LABELS))
    assert not np.asarray(found[1][1])[WORDS:].any()


def test_bf16_is_as_close_as_bf16_is(mesh: Mesh) -> None:
    x, head = X.astype(jnp.bfloat16), HEAD.astype(jnp.bfloat16)
    (_, losses), gradients = jax.jit(weighted(sharded(mesh)))(x, head, LABELS)
    exact = weighted(dense)(x.astype(jnp.float32), head.astype(jnp.float32), LABELS)
    close(losses, exact[0][1])  # products of bf16 are exact in f32
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 2
    for found, wanted in zip(gradients, exact[1], strict=True):
        np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=0.02, atol=0.05)


@CHECKED
def test_embedding_and_a_head_tied_to_it(mesh: Mesh, checked: bool) -> None:
    def local(table, ids, labels):
        x = jnp.tanh(nn.vocab_parallel_embedding(ids, table, "v"))
        return nn.vocab_parallel_cross_entropy(x, table, labels, "v", vocab_size=WORDS)

    specs = (P("v"), P(), P())
    f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=checked)
    ids = np.random.default_rng(4).integers(0, WORDS, (3, 4))
    ids[0, 0] = -1

    def whole(table):
        x = jnp.where((ids >= 0)[..., None], table[jnp.maximum(ids, 0)], 0)
        return jnp.sum(dense(jnp.tanh(x), table, LABELS) * WEIGHTS)

    found = jax.jit(jax.value_and_grad(lambda t: jnp.sum(f(t, ids, LABELS) * WEIGHTS)))(HEAD)
    close(found, jax.value_and_grad(whole)(HEAD))


def test_beside_a_data_parallel_axis() -> None:
    mesh = Mesh(np.array(jax.devices("stretto")).reshape(2, 2), ("data", "v"))

    def local(x, head, labels):
        losses = nn.vocab_parallel_cross_entropy(x, head, labels, "v", vocab_size=WORDS)
        return jax.lax.psum(jnp.sum(losses), "data")

    specs = (P(None, "data"), P("v"), P(None, "data"))
    f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    found = jax.jit(jax.value_and_grad(f, (0, 1)))(X, HEAD, LABELS)
    close(found, jax.value_and_grad(lambda *a: jnp.sum(dense(*a)), (0, 1))(X, HEAD, LABELS))


def test_a_label_that_is_no_word_is_nan_and_hurts_nobody_else(mesh: Mesh) -> None:
    labels = LABELS.copy()
    labels[1, 1], labels[1, 2] = WORDS, -7
    losses = np.array(jax.jit(sharded(mesh))(X, HEAD, labels))
    assert np.isnan(losses[1, 1:3]).all()
    labels[1, 1:3] = losses[1, 1:3] = 0
    wanted = np.array(dense(X, HEAD, labels))
    wanted[1, 1:3] = 0
    np.testing.assert_allclose(losses, wanted, rtol=1e-5, atol=1e-5)


def test_large_logits_do_not_overflow(mesh: Mesh) -> None:
    """Also far below zero, where a device without words has the largest maximum."""
    for factor in (200.0, -200.0):
        head = jnp.abs(HEAD) * factor
        x = jnp.abs(X)
        close(jax.jit(sharded(mesh))(x, head, LABELS), dense(x, head, LABELS))


@pytest.mark.parametrize(("checked", "backward"), [(True, 0), (False, 1)])
def test_two_collectives(mesh: Mesh, checked: bool, backward: int) -> None:
    """As XLA compiles it, and as they are counted at run time."""
    for function, count in (
        (sharded(mesh, checked), 2),
        (weighted(sharded(mesh, checked)), 2 + backward),
    ):
        compiled = jax.jit(function).lower(X, HEAD, LABELS).compile()
        assert compiled.as_text().count(" all-reduce(") == count
        before = stretto.stats().collectives
        jax.block_until_ready(compiled(X, HEAD, LABELS))
        assert stretto.stats().collectives - before == count


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((X[..., :3], HEAD, LABELS), {}, ValueError, "no width in common"),
        ((X, HEAD, LABELS[0]), {}, ValueError, r"labels \[4\]"),
        ((X, HEAD, LABELS * 1.0), {}, TypeError, "not integers"),
        ((X.astype(np.int32), HEAD, LABELS), {}, TypeError, "x is int32"),
        ((X, HEAD, LABELS), {"label_smoothing": 1.5}, ValueError, "1.5"),
    ],
)
def test_what_does_not_fit(mesh: Mesh, arguments, options, error, text) -> None:
    with pytest.raises(error, match=text):
        jax.eval_shape(sharded(mesh, **options), *arguments)


def test_more_words_than_rows(mesh: Mesh) -> None:
    def local(x, head, labels):
        return nn.vocab_parallel_cross_entropy(x, head, labels, "v", vocab_size=25)

    f = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("v"), P()), out_specs=P())
    with pytest.raises(ValueError, match="vocab_size is 25, and the head has 24 rows"):
        jax.eval_shape(f, X, HEAD, LABELS)


SCRIPT = """
import json, sys
sys.path.insert(0, {here!r})
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from test_nn import HEAD, LABELS, X, dense, sharded, weighted

mesh = Mesh(np.array(jax.devices()), ("v",))
def place(a, spec):
    a = np.asarray(a)
    return jax.make_array_from_callback(a.shape, NamedSharding(mesh, spec), lambda i: a[i])
given = place(X, P()), place(HEAD, P("v")), place(LABELS, P())
(_, losses), (dx, _) = jax.jit(weighted(sharded(mesh)))(*given)
cpu = jax.devices("cpu")[0]
wanted = jax.jit(weighted(dense))(*(jax.device_put(np.asarray(a), cpu) for a in (X, HEAD, LABELS)))
far = [float(abs(np.asarray(a) - np.asarray(b)).max()) for a, b in
       ((losses.addressable_data(0), wanted[0][1]), (dx.addressable_data(0), wanted[1][0]))]
with open(f"{{sys.argv[1]}}/{{jax.process_index()}}.json", "w") as file:
    json.dump(max(far), file)
"""


@pytest.mark.mpi
def test_on_ranks(tmp_path: Path) -> None:
    script = SCRIPT.format(here=str(Path(__file__).parent))
    environment = {"JAX_PLATFORMS": "stretto,cpu"}
    assert max(reports_of(tmp_path, script, 4, ranks=2, **environment)[0]) < 1e-5


def test_on_jax_cpu_backend(tmp_path: Path) -> None:
    script = SCRIPT.format(here=str(Path(__file__).parent))
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    assert max(reports_of(tmp_path, script, 4, **environment)[0]) < 1e-5
