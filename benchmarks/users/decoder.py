"""flax NNX: a training step of a small decoder, on a mesh of batch, weights and heads (2 x 2 x the rest)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WORDS, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 256, 64, 4, 2, 32, 8


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.before = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.between = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attend(self.before(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.between(x))))


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.words = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.words.attend(self.norm(x))


def programs() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """By name: a jitted function and its arguments."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, -1), ("batch", "weights", "heads"))

    def placed(a: Any, spec: P) -> jax.Array:
        whole = np.asarray(a)
        return jax.make_array_from_callback(
            whole.shape, NamedSharding(mesh, spec), lambda index: whole[index]
        )

    # Made on the host: the same on every process.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        graph, state = nnx.split(Decoder(nnx.Rngs(0)))
        state = jax.tree.map(np.asarray, state)
    optimizer = optax.adam(1e-3)
    weights = jax.tree.map(
        lambda a: placed(a, P("weights", "heads") if a.ndim == 2 else P()), state
    )
    moments = jax.jit(optimizer.init)(weights)
    rows = np.random.default_rng(0).integers(0, WORDS, (BATCH, LENGTH + 1), dtype=np.int32)

    def loss(weights: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, weights)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(weights: Any, moments: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(weights, tokens)
        updates, moments = optimizer.update(gradient, moments, weights)
        return optax.apply_updates(weights, updates), moments, value

    return {"flax decoder": (jax.jit(step), (weights, moments, placed(rows, P("batch"))))}
