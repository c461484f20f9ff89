"""Op by op: what works batch by batch, on arrays cut along the batches, sends nothing.

XLA partitions most of these itself; what it gathers or reduces, the rewrites leave out. Either may change
with a version of XLA. What is rewritten has the bits of JAX's CPU backend on as many devices.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, kinds, mesh
from jax import lax
from test_bytes_by_place import program

B = 16
linalg = jnp.linalg


def numbers(*shape: int, dtype: str = "f4") -> np.ndarray:
    rng = np.random.default_rng(3)
    array = rng.standard_normal((B, *shape))
    return (array + 1j * rng.standard_normal(array.shape) if dtype[0] == "c" else array).astype(
        dtype
    )


def matrices(size: int) -> np.ndarray:
    """Symmetric and positive definite."""
    a = numbers(size, size)
    return a @ a.swapaxes(1, 2) + size * np.eye(size, dtype="f4")


def integers(*shape: int, below: int = 12) -> np.ndarray:
    return np.random.default_rng(4).integers(0, below, (B, *shape)).astype("i4")


def gradient(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return jax.grad(lambda *x: jnp.sin(f(*x)).sum())


def solved(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.linalg.triangular_solve(a, b, left_side=True, lower=True)


LINE, PAIR, WIDE = numbers(12), (numbers(12), numbers(3)), numbers(6, 5)
SQUARE, RIGHT, TALL = matrices(4), numbers(4, 3), numbers(5, 3)
keys = jax.random.split
# name -> a function, and its arguments, of which each is cut along its first dimension
OPS: dict[str, tuple] = {
    "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), LINE),
    "cumlogsumexp, gradient": (gradient(lambda x: lax.cumlogsumexp(x, 1)), LINE),
    "cummax": (lambda x: lax.cummax(x, 1), LINE),
    "cumprod": (lambda x: jnp.cumprod(x, 1), LINE),
    "cumprod, gradient": (gradient(lambda x: jnp.cumprod(x, 1)), LINE),
    "cumsum from the end": (lambda x: lax.cumsum(x, 1, reverse=True), LINE),
    "sort of two": (lambda x, k: lax.sort((k, x), dimension=1, num_keys=2)[1], LINE, integers(12)),
    "argsort": (lambda x: jnp.argsort(x, 1), LINE),
    "sort, gradient": (gradient(lambda x: jnp.sort(x, 1)), LINE),
    "top_k, gradient": (gradient(lambda x: lax.top_k(x, 3)[0]), LINE),
    "median": (lambda x: jnp.median(x, 1), LINE),
    "quantile": (lambda x: jnp.quantile(x, 0.3, 1), LINE),
    "map over columns": (lambda x: lax.map(jnp.sort, x.swapaxes(0, 1)).swapaxes(0, 1), WIDE),
    "scan over columns": (
        lambda x: lax.scan(lambda c, y: (c + y, jnp.sin(c)), x[:, 0], x.swapaxes(0, 1))[0],
        WIDE,
    ),
    "searchsorted": (jax.vmap(jnp.searchsorted), np.sort(LINE, 1), numbers(3)),
    "interp": (jax.vmap(jnp.interp), numbers(3), np.sort(LINE, 1), LINE),
    "unique": (jax.vmap(lambda x: jnp.unique(x, size=6)), integers(12, below=5)),
    "nonzero": (jax.vmap(lambda x: jnp.nonzero(x > 0, size=5)[0]), LINE),
    "histogram": (jax.vmap(lambda x: jnp.histogram(x, 5, (-1, 1))[0]), LINE),
    "segment_sum": (jax.vmap(lambda x, i: jax.ops.segment_sum(x, i, 4)), LINE, integers(12, below=4)),
    "convolve": (jax.vmap(jnp.convolve), *PAIR),
    "convolve, gradient": (gradient(jax.vmap(jnp.convolve)), *PAIR),
    "convolution": (
        lambda x: lax.conv_general_dilated(x, jnp.ones((2, 6, 3)), (1,), "SAME"),
        WIDE,
    ),
    "pooling, gradient": (
        gradient(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")),
        LINE,
    ),
    "fft": (jnp.fft.fft, numbers(12, dtype="c8")),
    "rfft": (jnp.fft.rfft, LINE),
    "irfft": (lambda x: jnp.fft.irfft(x, n=10), numbers(6, dtype="c8")),
    "hfft": (jnp.fft.hfft, numbers(6, dtype="c8")),
    "fftn": (lambda x: jnp.fft.fftn(x, axes=(1, 2)), numbers(6, 5, dtype="c8")),
    "rfft2, gradient": (gradient(lambda x: jnp.abs(jnp.fft.rfft2(x, axes=(1, 2)))), WIDE),
    "bits of keys": (
        lambda k: jax.vmap(jax.random.bits)(jax.random.wrap_key_data(k)),
        integers(2).astype("u4"),
    ),
    "normal numbers of keys": (
        lambda k: jax.vmap(lambda k: jax.random.normal(k, (3,)))(jax.random.wrap_key_data(k)),
        integers(2).astype("u4"),
    ),
    # jax #20381
    "permutation": (lambda x: jax.vmap(jax.random.permutation)(keys(jax.random.key(0), B), x), WIDE),
    "categorical": (lambda x: jax.random.categorical(jax.random.key(0), x, axis=1), LINE),
    "take_along_axis": (lambda x, i: jnp.take_along_axis(x, i, 1), LINE, integers(3)),
    "take_along_axis, gradient": (
        lambda x, i: gradient(lambda x: jnp.take_along_axis(x, i, 1))(x),
        LINE,
        integers(3),
    ),
    "dynamic_slice": (jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (3,))), LINE, integers()),
    "dynamic_update_slice": (
        jax.vmap(lambda x, i: lax.dynamic_update_slice(x, jnp.ones(3), (i,))),
        LINE,
        integers(),
    ),
    "cond": (jax.vmap(lambda x: lax.cond(x.sum() > 0, jnp.sort, jnp.negative, x)), LINE),
    "inv": (linalg.inv, SQUARE),
    "inv, gradient": (gradient(linalg.inv), SQUARE),
    "solve": (linalg.solve, SQUARE, RIGHT),
    "solve, gradient": (gradient(linalg.solve), SQUARE, RIGHT),
    "solve, gradient of the right side": (
        jax.grad(lambda a, b: jnp.sin(linalg.solve(a, b)).sum(), 1),
        SQUARE,
        RIGHT,
    ),
    "det": (linalg.det, SQUARE),
    "det, gradient": (gradient(linalg.det), SQUARE),
    "det by vmap, gradient": (jax.vmap(jax.grad(linalg.det)), SQUARE),
    "slogdet": (lambda a: linalg.slogdet(a)[1], SQUARE),
    "slogdet, gradient": (gradient(lambda a: linalg.slogdet(a)[1]), SQUARE),
    "cholesky, gradient": (gradient(linalg.cholesky), SQUARE),
    "eigh": (linalg.eigh, SQUARE),
    "eigh, gradient": (gradient(lambda a: linalg.eigh(a)[1]), SQUARE),
    "qr, gradient": (gradient(lambda a: linalg.qr(a)[0]), TALL),
    "svd, gradient": (gradient(lambda a: linalg.svd(a, compute_uv=False)), TALL),
    "lu": (lambda a: lax.linalg.lu(a)[0], SQUARE),
    "triangular_solve": (solved, SQUARE, RIGHT),
    "triangular_solve, gradient": (gradient(solved), SQUARE, RIGHT),
    "tridiagonal_solve": (
        lambda a, b: lax.linalg.tridiagonal_solve(a, a + 4, a, b),
        numbers(4),
        RIGHT,
    ),
    "expm": (jax.scipy.linalg.expm, SQUARE),
}  # fmt: skip


@pytest.mark.quick(
    "cumsum from the end",
    "sort of two",
    "top_k, gradient",
    "scan over columns",
    "segment_sum",
    "convolution",
    "fft",
    "take_along_axis, gradient",
    "dynamic_update_slice",
    "solve, gradient",
    "det",
    "lu",
)
@pytest.mark.parametrize("which", OPS)
def test_an_op_on_batches_that_are_cut_sends_nothing(which: str) -> None:
    f, *arrays = OPS[which]
    batches = P("x")
    module, judged = program(f, [(batches, a) for a in arrays], batches, mesh(8))
    assert kinds(module) == []
    types = (*module.program.inputs, *module.program.outputs)
    assert max(t.size for t in module.program.slot_types) <= 2 * max(t.size for t in types)
    if module.rewrites or which.startswith("cum"):
        judged()
