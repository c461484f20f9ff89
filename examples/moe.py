"""Train a language model with a mixture of experts in each layer, on a mesh (data, expert).

The text is the source of Python's standard library, byte by byte. The model is a transformer whose layers
have eight experts each instead of one hidden layer. A token goes to the two experts that its router likes
best, weighted by how much; each expert takes so many tokens of a device and no more (its capacity), first
choices before second ones, and what does not fit is left out. Batches are spread over all devices, experts
over the axis ``expert``: an all-to-all brings tokens to the devices of their experts, another one brings
back what became of them. Plain JAX; nothing here is stretto's. With STRETTO_SPLIT=1 and a table of costs
stretto makes these exchanges a few experts at a time, while others are computed.

    JAX_PLATFORMS=stretto mpiexec -n 4 python examples/moe.py
    JAX_PLATFORMS=stretto STRETTO_LOCAL_DEVICES=4 python examples/moe.py
    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/moe.py

Printed: loss, time of a step, and the share of choices that found no place. The last line is a JSON object
with all of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LAYERS = 2
EXPERTS = 8
CHOICES = 2  # experts of a token
CAPACITY = 1.25  # places of an expert, as a multiple of what it gets where all get the same
BATCH = 2  # sequences of a device
LENGTH = 64
WIDTH = 64
HEADS = 4
HIDDEN = 128
RATE = 1e-3
BALANCE = 0.01  # weight of the loss that spreads tokens over experts

Params = dict[str, Any]
Map = Callable[[jax.Array], jax.Array]


def text() -> np.ndarray:
    """About a megabyte of the standard library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(path.read_bytes() for path in files[:60])
    return np.frombuffer(data, np.uint8)


def initial_parameters() -> Params:
    """Host arrays, the same on every process."""
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(np.float32)

    def layer() -> Params:
        return {
            "qkv": weights(WIDTH, 3 * WIDTH),
            "out": weights(WIDTH, WIDTH) * 0.3,
            "router": weights(WIDTH, EXPERTS),
            "up": weights(EXPERTS, WIDTH, HIDDEN),
            "down": weights(EXPERTS, HIDDEN, WIDTH) * 0.3,
        }

    return {
        "layers": [layer() for _ in range(LAYERS)],
        "embedding": weights(256, WIDTH),
        "positions": weights(LENGTH, WIDTH) * 0.1,
    }


def normalized(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(weights: Params, x: jax.Array) -> jax.Array:
    """Causal self-attention on f32[batch, length, width]."""
    batch, length, width = x.shape
    q, k, v = jnp.split(normalized(x) @ weights["qkv"], 3, axis=-1)
    q, k, v = (a.reshape(batch, length, HEADS, width // HEADS) for a in (q, k, v))
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) * (width // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v)
    return x + mixed.reshape(x.shape) @ weights["out"]


def places(chosen: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The place of each choice among those of its expert, and whether it has one.

    ``chosen``: s32[tokens, choices]. A place is ``expert * capacity + number``; first choices of all tokens
    are numbered before second ones.
    """
    flat = chosen.T.reshape(-1)
    same = jax.nn.one_hot(flat, EXPERTS, dtype=jnp.int32)
    number = jnp.take_along_axis(jnp.cumsum(same, axis=0), flat[:, None], axis=1)[:, 0] - 1
    found = number < capacity
    place = jnp.where(found, flat * capacity + number, EXPERTS * capacity)
    return place.reshape(chosen.shape[::-1]).T, found.reshape(chosen.shape[::-1]).T


def experts(
    weights: Params, x: jax.Array, axis: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The experts on f32[tokens, width]: what they make of the tokens, the loss that spreads tokens over
    them, and how many choices found no place.

    ``axis``: that over which experts are spread; each device has ``weights`` of its own ones. None: all
    experts are here.
    """
    count = 1 if axis is None else lax.axis_size(axis)
    exchange: Map = (lambda a: a) if axis is None else (lambda a: lax.all_to_all(a, axis, 0, 0))
    tokens, width = x.shape
    capacity = int(np.ceil(CAPACITY * CHOICES * tokens / EXPERTS))
    likes = jax.nn.softmax(x @ weights["router"])
    gates, chosen = lax.top_k(likes, CHOICES)
    gates = gates / gates.sum(-1, keepdims=True)
    place, found = places(chosen, capacity)
    sent = jnp.zeros((EXPERTS * capacity + 1, width), x.dtype)
    for choice in range(CHOICES):
        sent = sent.at[place[:, choice]].set(x)
    # [owner, expert of the owner, place, width] becomes [sender, own expert, place, width].
    arrived = exchange(sent[:-1].reshape(count, EXPERTS // count, capacity, width))
    mine = arrived.swapaxes(0, 1).reshape(EXPERTS // count, count * capacity, width)
    hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", mine, weights["up"]))
    made = jnp.einsum("ecf,efd->ecd", hidden, weights["down"])
    back = exchange(made.reshape(EXPERTS // count, count, capacity, width).swapaxes(0, 1))
    back = jnp.concatenate(
        [back.reshape(EXPERTS * capacity, width), jnp.zeros((1, width), x.dtype)]
    )
    out = sum(gates[:, c, None] * back[place[:, c]] for c in range(CHOICES))
    share = jax.nn.one_hot(chosen[:, 0], EXPERTS).mean(0)
    spread = EXPERTS * (share * likes.mean(0)).sum()
    return out, spread, (~found).sum()


def loss_on_device(parameters: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy of the next byte with the loss that spreads tokens, and the share of choices left
    out.

    ``tokens`` is s32[batch, length + 1], the device's own sequences.
    """
    given, wanted = tokens[:, :-1], tokens[:, 1:]
    x = parameters["embedding"][given] + parameters["positions"]
    spread = lost = jnp.zeros(())
    for weights in parameters["layers"]:
        x = attention(weights, x)
        flat = normalized(x).reshape(-1, WIDTH)
        made, more, left_out = experts(weights, flat, "expert")
        x = x + made.reshape(x.shape)
        spread, lost = spread + more, lost + left_out
    scores = jax.nn.log_softmax(normalized(x) @ parameters["embedding"].T)
    loss = -jnp.mean(jnp.take_along_axis(scores, wanted[..., None], axis=-1))
    share = lost / (LAYERS * CHOICES * given.size)
    everywhere = ("data", "expert")
    return lax.pmean(loss + BALANCE * spread, everywhere), lax.pmean(share, everywhere)


def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array, of which every process makes the shards of its own devices."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


Step = Callable[[Params, jax.Array], tuple[Params, jax.Array, jax.Array]]


def training(mesh: Mesh) -> tuple[Step, Params]:
    """A jitted step, (state, tokens) -> (state, loss, share left out), which takes over its state, and the
    first state."""
    host = initial_parameters()
    of_expert = {"up": P("expert"), "down": P("expert")}
    layer = {name: of_expert.get(name, P()) for name in host["layers"][0]}
    specs = {"layers": [layer] * LAYERS, "embedding": P(), "positions": P()}
    local = jax.shard_map(
        loss_on_device,
        mesh=mesh,
        in_specs=(specs, P(("data", "expert"))),
        out_specs=(P(), P()),
        check_vma=False,
    )

    @partial(jax.jit, donate_argnums=0)
    def step(state: Params, tokens: jax.Array) -> tuple[Params, jax.Array, jax.Array]:
        found = jax.value_and_grad(local, has_aux=True)(state["parameters"], tokens)
        (loss, share), gradients = found
        moments = jax.tree.map(lambda m, g: 0.95 * m + jnp.sign(g) * 0.05, state["m"], gradients)
        parameters = jax.tree.map(lambda p, m: p - RATE * m, state["parameters"], moments)
        return {"parameters": parameters, "m": moments}, loss, share

    def on_mesh(tree: Params) -> Params:
        return jax.tree.map(lambda a, s: place(a, NamedSharding(mesh, s)), tree, specs)

    return step, {"parameters": on_mesh(host), "m": on_mesh(jax.tree.map(np.zeros_like, host))}


def train(mesh: Mesh, steps: int, data: np.ndarray) -> dict[str, Any]:
    """Train from the start; gives losses and what a step took."""
    step, state = training(mesh)
    rng = np.random.default_rng(1)
    losses: list[float] = []
    shares: list[float] = []
    times: list[float] = []
    for _ in range(steps):
        starts = rng.integers(0, len(data) - LENGTH - 1, BATCH * mesh.size)
        rows = np.stack([data[s : s + LENGTH + 1] for s in starts]).astype(np.int32)
        tokens = place(rows, NamedSharding(mesh, P(("data", "expert"))))
        began = time.perf_counter()
        state, loss, share = step(state, tokens)
        losses.append(float(loss))
        shares.append(float(share))
        times.append(time.perf_counter() - began)
    return {
        "first_loss": losses[0],
        "last_loss": float(np.mean(losses[-5:])),
        "step_ms": 1000 * float(np.median(times[1:] or times)),
        "left_out": float(np.mean(shares)),
        "losses": losses,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--experts", type=int, default=0, help="devices along the axis expert")
    options = parser.parse_args()
    count = len(jax.devices())
    along = options.experts or (2 if count % 2 == 0 else 1)
    if count % along or EXPERTS % along:
        print(f"{count} devices and {EXPERTS} experts cannot be divided by {along}")
        return 1
    mesh = jax.make_mesh(
        (count // along, along), ("data", "expert"), axis_types=(AxisType.Auto,) * 2
    )
    report = train(mesh, options.steps, text())
    if jax.process_index() == 0:
        print(
            f"{mesh.shape['data']} x {along} devices: loss {report['first_loss']:.3f} -> "
            f"{report['last_loss']:.3f}, {report['step_ms']:.1f} ms a step, "
            f"{report['left_out']:.1%} of choices left out"
        )
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
