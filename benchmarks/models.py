"""A llama-like training step over a mesh of fsdp x tp, by shardings alone: plain JAX, any backend.

Grouped-query attention with rotary positions, SwiGLU, RMS norm, cross entropy and Adam.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Tree = Any


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of one batch.

    ``scan``: one traced layer, else every layer by itself. ``stacked``: without a scan too, one array
    holds a weight of all layers, and each layer reads its slice.
    """

    layers: int = 8
    width: int = 256
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 512
    vocab: int = 512
    batch: int = 8
    length: int = 64
    scan: bool = False
    stacked: bool = False

    @property
    def head(self) -> int:
        return self.width // self.heads


SMALL = Config()
# Arrays that outweigh the process: 35 M parameters, 400 MiB with Adam's moments.
LARGE = Config(width=512, hidden=1408, heads=8, kv_heads=4, vocab=8192, length=64)


def shapes(c: Config) -> dict[str, tuple[tuple[int, ...], P]]:
    """Shape and sharding of every parameter: by layer (``wq.3``), or with the layer as first dimension."""
    kv = c.kv_heads * c.head
    layer = {
        "wq": ((c.width, c.width), P(None, "fsdp", "tp")),
        "wk": ((c.width, kv), P(None, "fsdp", "tp")),
        "wv": ((c.width, kv), P(None, "fsdp", "tp")),
        "wo": ((c.width, c.width), P(None, "tp", "fsdp")),
        "gate": ((c.width, c.hidden), P(None, "fsdp", "tp")),
        "up": ((c.width, c.hidden), P(None, "fsdp", "tp")),
        "down": ((c.hidden, c.width), P(None, "tp", "fsdp")),
        "norm1": ((c.width,), P(None, None)),
        "norm2": ((c.width,), P(None, None)),
    }
    if c.scan or c.stacked:
        result = {k: ((c.layers, *shape), spec) for k, (shape, spec) in layer.items()}
    else:
        result = {
            f"{k}.{i}": (shape, P(*spec[1:]))
            for i in range(c.layers)
            for k, (shape, spec) in layer.items()
        }
    result["embed"] = ((c.vocab, c.width), P("tp", "fsdp"))
    result["head"] = ((c.width, c.vocab), P("fsdp", "tp"))
    return result


def rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * (1 + scale)


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions on (batch, length, heads, head)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] / 10000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def layer(c: Config, x: jax.Array, p: Tree) -> jax.Array:
    b, n, _ = x.shape
    h = rms(x, p["norm1"])
    q = rotate((h @ p["wq"]).reshape(b, n, c.heads, c.head))
    k = rotate((h @ p["wk"]).reshape(b, n, c.kv_heads, c.head))
    v = (h @ p["wv"]).reshape(b, n, c.kv_heads, c.head)
    q = q.reshape(b, n, c.kv_heads, c.heads // c.kv_heads, c.head)
    scores = jnp.einsum("bnkge,bmke->bkgnm", q, k) / np.sqrt(c.head)
    scores = jnp.where(jnp.tril(jnp.ones((n, n), bool)), scores, -1e9)
    mixed = jnp.einsum("bkgnm,bmke->bnkge", jax.nn.softmax(scores), v).reshape(b, n, c.width)
    x = x + mixed @ p["wo"]
    h = rms(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def of_layer(layers: Tree, i: int) -> Tree:
    """The weights of layer ``i``, by their bare names."""
    if "wq" in layers:
        return {k: v[i] for k, v in layers.items()}
    return {k.partition(".")[0]: v for k, v in layers.items() if k.endswith(f".{i}")}


def loss(c: Config, params: Tree, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    layers = {k: v for k, v in params.items() if k not in ("embed", "head")}
    step = jax.checkpoint(lambda h, p: layer(c, h, p))
    if c.scan:
        x = lax.scan(lambda h, p: (step(h, p), None), x, layers)[0]
    else:
        for i in range(c.layers):
            x = step(x, of_layer(layers, i))
    logits = jax.nn.log_softmax(x[:, :-1] @ params["head"])
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()


def train_step(c: Config, mesh: Mesh) -> Any:
    """jitted: (parameters, first moments, second moments), tokens -> the same, loss. The state is donated."""
    shardings = {k: NamedSharding(mesh, spec) for k, (_, spec) in shapes(c).items()}
    state_shardings = (shardings, shardings, shardings)

    def step(state: Tree, tokens: jax.Array) -> tuple[Tree, jax.Array]:
        params, m, v = state
        value, grads = jax.value_and_grad(lambda p: loss(c, p, tokens))(params)
        m = jax.tree.map(lambda a, g: 0.9 * a + 0.1 * g, m, grads)
        v = jax.tree.map(lambda a, g: 0.99 * a + 0.01 * g * g, v, grads)
        params = jax.tree.map(lambda p, a, s: p - 1e-3 * a / (jnp.sqrt(s) + 1e-8), params, m, v)
        return (params, m, v), value

    data = NamedSharding(mesh, P("fsdp"))
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(state_shardings, data),
        out_shardings=(state_shardings, NamedSharding(mesh, P())),
    )


def mesh_of(devices: Sequence[jax.Device]) -> Mesh:
    """fsdp x tp: 4 x 2 of eight devices."""
    return Mesh(np.array(devices[:8]).reshape(4, 2), ("fsdp", "tp"))


def abstract(c: Config, mesh: Mesh) -> tuple[Tree, jax.ShapeDtypeStruct]:
    """Arguments of the step as shapes, for compiling without data."""
    params = {
        k: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for k, (shape, spec) in shapes(c).items()
    }
    tokens = jax.ShapeDtypeStruct(
        (c.batch, c.length), jnp.int32, sharding=NamedSharding(mesh, P("fsdp"))
    )
    return (params, params, params), tokens


def concrete(c: Config, mesh: Mesh) -> tuple[Tree, jax.Array]:
    """Arguments of the step: seeded parameters, zero moments, seeded tokens."""
    rng = np.random.default_rng(0)

    def filled(make: Callable[[tuple[int, ...]], np.ndarray]) -> Tree:
        return {
            k: jax.device_put(make(shape), NamedSharding(mesh, spec))
            for k, (shape, spec) in shapes(c).items()
        }

    zeros = lambda s: np.zeros(s, np.float32)  # noqa: E731
    params = filled(lambda s: 0.02 * rng.standard_normal(s, np.float32))
    tokens = rng.integers(0, c.vocab, (c.batch, c.length)).astype(np.int32)
    return (params, filled(zeros), filled(zeros)), jax.device_put(
        tokens, NamedSharding(mesh, P("fsdp"))
    )
