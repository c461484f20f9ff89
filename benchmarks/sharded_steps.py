"""Training steps of a stack of transformer blocks over two devices; their compute and messages alone.

Attention (causal, all heads in one array) and a hidden layer four times as wide, RMS norms without weights,
the mean square of the output as loss, plain gradient descent. Three ways to spread it over an axis ``x``:

- ``sharded``: each device has half of every weight and of the batch; weights are gathered before they are
  used, gradients reduced and scattered. ``plain``: the same by shardings of `jit` alone.
- ``tensor``: each device has half of the heads and of the hidden layer, and all of the batch.
- ``data``: each device has all weights and half of the batch; gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Weights = list[tuple[jax.Array, ...]]
Step = Callable[[], Any]

LENGTH, HEAD = 64, 64
PROGRAMS = ("sharded", "plain", "tensor", "data")
PARTS = ("step", "compute", "messages")


@dataclass(frozen=True)
class Sizes:
    """``batch``: sequences of `LENGTH` of all devices together."""

    layers: int
    width: int
    batch: int


def shapes(width: int) -> list[tuple[int, int]]:
    """Weights of a block: query, key, value, output, up, down."""
    return [(width, width)] * 4 + [(width, 4 * width), (4 * width, width)]


def _norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


Map = Callable[[jax.Array], jax.Array]


def _same(x: jax.Array) -> jax.Array:
    return x


def _block(x: jax.Array, weights: tuple[jax.Array, ...], entering: Map, leaving: Map) -> jax.Array:
    q, k, v, out, up, down = weights
    batch, length, _ = x.shape
    y = entering(_norm(x))
    split = lambda w: (y @ w).reshape(batch, length, -1, HEAD)  # noqa: E731
    scores = jnp.einsum("blhd,bmhd->bhlm", split(q), split(k)) / np.sqrt(HEAD)
    mask = np.tril(np.ones((length, length), bool))
    shares = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    attended = jnp.einsum("bhlm,bmhd->blhd", shares, split(v))
    x = x + leaving(attended.reshape(batch, length, -1) @ out)
    return x + leaving(jax.nn.gelu(entering(_norm(x)) @ up) @ down)


def _loss(
    weights: Weights,
    x: jax.Array,
    gathered: Map = _same,
    entering: Map = _same,
    leaving: Map = _same,
) -> jax.Array:
    for layer in weights:
        x = _block(x, tuple(map(gathered, layer)), entering, leaving)
    return (x * x).mean()


def _moved(weights: Weights, grads: Weights) -> Weights:
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, grads)


# Leaving a tensor-parallel region what the devices have is summed, entering it their gradients are.
@jax.custom_vjp
def _leaving(y: jax.Array) -> jax.Array:
    return lax.psum(y, "x")


_leaving.defvjp(lambda y: (lax.psum(y, "x"), None), lambda _, g: (g,))


@jax.custom_vjp
def _entering(y: jax.Array) -> jax.Array:
    return y


_entering.defvjp(lambda y: (y, None), lambda _, g: (lax.psum(g, "x"),))


def _gather(w: jax.Array) -> jax.Array:
    return lax.all_gather(w, "x", axis=0, tiled=True)


def _scatter(g: jax.Array) -> jax.Array:
    return lax.psum_scatter(g, "x", scatter_dimension=0, tiled=True)


def _sum(g: jax.Array) -> jax.Array:
    return lax.psum(g, "x")


def _stepped(loss: Callable[[Weights, jax.Array], jax.Array]) -> Callable[..., Weights]:
    return lambda w, x: _moved(w, jax.grad(loss)(w, x))


def _activations(w: Weights, x: jax.Array) -> jax.Array:
    """The sums of activations and of their gradients that tensor parallelism takes."""
    for _ in range(4 * len(w)):
        x = _sum(x) * 0.5
    return x


# program -> part -> what each device does with its weights and its inputs
_LOCAL: dict[str, dict[str, Callable[..., Any]]] = {
    "sharded": {
        "step": _stepped(lambda w, x: _loss(w, x, _gather)),
        "compute": _stepped(lambda w, x: _loss(w, x, lambda one: jnp.concatenate([one, one]))),
        "messages": lambda w, x: jax.tree.map(lambda one: _scatter(_gather(one)), w),
    },
    "tensor": {
        "step": _stepped(lambda w, x: _loss(w, x, _same, _entering, _leaving)),
        "compute": _stepped(_loss),
        "messages": _activations,
    },
    "data": {
        "step": lambda w, x: _moved(w, jax.tree.map(_sum, jax.grad(_loss)(w, x))),
        "compute": _stepped(_loss),
        "messages": lambda w, x: jax.tree.map(_sum, w),
    },
}
_ROWS, _COLUMNS, _WHOLE = P("x", None), P(None, "x"), P()
# program -> shardings of a block's weights, and of the inputs
_SPECS: dict[str, tuple[tuple[P, ...], P]] = {
    "sharded": ((_ROWS,) * 6, P("x")),
    "tensor": ((_COLUMNS,) * 3 + (_ROWS, _COLUMNS, _ROWS), _WHOLE),
    "data": ((_WHOLE,) * 6, P("x")),
}


def build(program: str, part: str, sizes: Sizes, mesh: Mesh) -> Step:
    """A call that runs one part of a program once and waits for it; a step's weights go into the next."""
    layout = "sharded" if program == "plain" else program
    specs, inputs = _SPECS[layout]
    rng = np.random.default_rng(0)

    def placed(shape: tuple[int, ...], spec: P, scale: float) -> jax.Array:
        data = (rng.standard_normal(shape) * scale).astype(np.float32)
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda i: data[i])

    weights: Any = [
        tuple(
            placed(shape, spec, shape[0] ** -0.5)
            for shape, spec in zip(shapes(sizes.width), specs, strict=True)
        )
        for _ in range(sizes.layers)
    ]
    x = placed((sizes.batch, LENGTH, sizes.width), inputs, 1.0)
    if program == "plain" and part == "step":
        spread = [tuple(NamedSharding(mesh, s) for s in specs)] * sizes.layers
        function = jax.jit(_stepped(_loss), out_shardings=spread)
    else:
        tree = [specs] * sizes.layers
        local = _LOCAL[layout][part]
        results = inputs if local is _activations else tree
        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(tree, inputs), out_specs=results, check_vma=False
        )
        function = jax.jit(mapped)
    state = [weights]

    def step() -> None:
        given = function(state[0], x)
        jax.block_until_ready(given)
        if part == "step":
            state[0] = given

    return step
