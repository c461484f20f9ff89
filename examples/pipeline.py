"""Train a language model over a pipeline of four stages, as GPipe and as a circular pipeline.

The text is the source of Python's standard library, byte by byte. The model is a transformer of eight
layers; each device holds two of them. In `gpipe` a device's layers are neighbours, and a microbatch goes
through the devices once; in `circular` device s holds layers s and s + 4, and a microbatch goes round twice,
which makes the bubble smaller. Both are a `lax.scan` whose body does the same thing in every iteration:
take what the previous stage sent, run the stage, pass it on. Plain JAX; nothing here is stretto's. With
STRETTO_INTERLEAVE=2 stretto runs `gpipe`, forward and backward, in a schedule like that of `circular`.

The last stage computes the head, whose weights are those of the embedding; all devices hold them. With
``--head sharded`` they are divided by vocabulary: each stage holds a quarter of them, and of their moments,
and computes a quarter of the head, in the loop, beside its layers (`stretto.nn`; the loop is that of
`stretto.pipelined`). With ``--head behind`` it does so behind the loop, for all microbatches; with
STRETTO_SCHEDULE=1f1b stretto computes it a microbatch at a time then. Both run on any platform.

    JAX_PLATFORMS=stretto mpiexec -n 4 python examples/pipeline.py
    JAX_PLATFORMS=stretto STRETTO_LOCAL_DEVICES=4 python examples/pipeline.py
    JAX_PLATFORMS=stretto STRETTO_LOCAL_DEVICES=4 python examples/pipeline.py --head sharded
    JAX_PLATFORMS=stretto STRETTO_LOCAL_DEVICES=4 STRETTO_SCHEDULE=1f1b \\
        python examples/pipeline.py --head behind
    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/pipeline.py

Printed: loss, time of a step, messages sent a step beside those of the program as it is written, the share of
stage runs that is bubble as it is written, and what a device holds of the head's weights. The last line is a
JSON object with all of it.
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

STAGES = 4
LAYERS = 8
MICROBATCHES = 4
BATCH = 4  # sequences of a microbatch
LENGTH = 64
WIDTH = 64
HEADS = 4
RATE = 1e-3

Params = dict[str, Any]
Carry = tuple[jax.Array, jax.Array, jax.Array]


def text() -> np.ndarray:
    """About a megabyte of the standard library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(path.read_bytes() for path in files[:60])
    return np.frombuffer(data, np.uint8)


def initial_parameters() -> Params:
    """Host arrays, the same on every process. Layers are in the order in which a token meets them."""
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(np.float32)

    return {
        "layers": {
            "qkv": weights(LAYERS, WIDTH, 3 * WIDTH),
            "out": weights(LAYERS, WIDTH, WIDTH) * 0.3,
            "up": weights(LAYERS, WIDTH, 4 * WIDTH),
            "down": weights(LAYERS, 4 * WIDTH, WIDTH) * 0.3,
        },
        "embedding": weights(256, WIDTH),
        "positions": weights(LENGTH, WIDTH) * 0.1,
    }


def normalized(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def layer(weights: Params, x: jax.Array) -> jax.Array:
    """A transformer block on f32[batch, length, width]."""
    batch, length, width = x.shape
    q, k, v = jnp.split(normalized(x) @ weights["qkv"], 3, axis=-1)
    q, k, v = (a.reshape(batch, length, HEADS, width // HEADS) for a in (q, k, v))
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) * (width // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(scores), v).reshape(x.shape)
    x = x + mixed @ weights["out"]
    return x + jax.nn.gelu(normalized(x) @ weights["up"]) @ weights["down"]


def pipelined(repeats: int, layers: Params, xs: jax.Array) -> jax.Array:
    """All microbatches through all layers; runs on each device, with its own layers.

    ``layers`` has the axes [repeats, layers of a stage, …], ``xs`` [microbatches, batch, length, width].
    Device s works in iteration i on slot ``i - s``: microbatch ``slot % M`` in its pass ``slot // M``.
    Needs at least as many microbatches as stages. The result is on the last device, zeros on others.
    """
    stage, count = lax.axis_index("stage"), xs.shape[0]
    slots = count * repeats
    ring = [(s, (s + 1) % STAGES) for s in range(STAGES)]

    def iteration(carry: Carry, i: jax.Array) -> tuple[Carry, None]:
        received, waiting, outputs = carry
        # What has come round waits at stage 0 until its next pass begins.
        place = jnp.maximum(i - STAGES, 0) % count
        came = (stage == 0) & (i >= STAGES)
        waiting = jnp.where(came, waiting.at[place].set(received), waiting)
        slot = i - stage
        turn = jnp.clip(i, 0, slots - 1) % count
        entering = jnp.where(i < count, xs[turn], waiting[turn])
        x = jnp.where(stage == 0, entering, received)
        working = (slot >= 0) & (slot < slots)
        mine = jax.tree.map(lambda w: w[jnp.clip(slot // count, 0, repeats - 1)], layers)

        def run(x: jax.Array) -> jax.Array:
            return lax.scan(lambda x, weights: (layer(weights, x), None), x, mine)[0]

        y = lax.cond(working, run, jnp.zeros_like, x)
        out = slot - (slots - count)
        done = (stage == STAGES - 1) & (out >= 0) & (out < count)
        outputs = jnp.where(done, outputs.at[jnp.clip(out, 0, count - 1)].set(y), outputs)
        return (lax.ppermute(y, "stage", ring), waiting, outputs), None

    start = (jnp.zeros_like(xs[0]), jnp.zeros_like(xs), jnp.zeros_like(xs))
    carry, _ = lax.scan(iteration, start, jnp.arange(slots + STAGES - 1))
    return carry[2]


def loss_on_device(repeats: int, parameters: Params, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next byte; ``tokens`` is s32[microbatches, batch, length + 1]."""
    given, wanted = tokens[..., :-1], tokens[..., 1:]
    layers = jax.tree.map(lambda w: w[0], parameters["layers"])
    xs = parameters["embedding"][given] + parameters["positions"]
    h = normalized(pipelined(repeats, layers, xs))
    scores = jax.nn.log_softmax(h @ parameters["embedding"].T)
    loss = -jnp.mean(jnp.take_along_axis(scores, wanted[..., None], axis=-1))
    return lax.psum(jnp.where(lax.axis_index("stage") == STAGES - 1, loss, 0), "stage")


def sharded_loss_on_device(head_on: str, parameters: Params, tokens: jax.Array) -> jax.Array:
    """The same loss as a GPipe pipeline with the embedding and the head divided over the devices."""
    import stretto
    from stretto import nn

    given, wanted = tokens[..., :-1], tokens[..., 1:]
    layers = jax.tree.map(lambda w: w[0, 0], parameters["layers"])
    table = parameters["embedding"]
    xs = nn.vocab_parallel_embedding(given, table, "stage") + parameters["positions"]

    def head(table: jax.Array, y: jax.Array, wanted: jax.Array) -> jax.Array:
        losses = nn.vocab_parallel_cross_entropy(normalized(y), table, wanted, "stage")
        return jnp.mean(losses)

    losses = stretto.pipelined(
        layer, layers, xs, "stage", head=head, head_params=table, targets=wanted, head_on=head_on
    )
    return jnp.mean(losses)


def by_device(layers: Params, repeats: int) -> Params:
    """Layers as [stages, repeats, layers of a stage, …]: stage s holds every STAGES-th chunk."""
    share = LAYERS // (STAGES * repeats)

    def arranged(w: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(w.reshape(repeats, STAGES, share, *w.shape[1:]).swapaxes(0, 1))

    return jax.tree.map(arranged, layers)


def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array, of which every process makes the shards of its own devices."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def messages() -> np.ndarray | None:
    """Messages that this process has sent so far, and those it has left out, on stretto."""
    if jax.default_backend() != "stretto":
        return None
    import stretto

    stats = stretto.stats()
    return np.array([stats.messages, stats.skipped])


Step = Callable[[Params, jax.Array], tuple[Params, jax.Array]]


def training(mesh: Mesh, repeats: int, head: str = "last") -> tuple[Step, Params]:
    """A jitted step, (state, tokens) -> (state, loss), which takes over its state, and the first state."""
    sharded = head != "last"
    host = initial_parameters()
    host["layers"] = by_device(host["layers"], repeats)
    specs = {"layers": jax.tree.map(lambda _: P("stage"), host["layers"]),
             "embedding": P("stage") if sharded else P(), "positions": P()}  # fmt: skip
    local = jax.shard_map(
        partial(sharded_loss_on_device, "all" if head == "sharded" else "behind")
        if sharded
        else partial(loss_on_device, repeats),
        mesh=mesh,
        in_specs=(specs, P()),
        out_specs=P(),
        # Where the head is divided, the account of what is the same on all devices saves a collective.
        check_vma=sharded,
    )

    @partial(jax.jit, donate_argnums=0)
    def step(state: Params, tokens: jax.Array) -> tuple[Params, jax.Array]:
        loss, gradients = jax.value_and_grad(local)(state["parameters"], tokens)
        moments = jax.tree.map(lambda m, g: 0.95 * m + jnp.sign(g) * 0.05, state["m"], gradients)
        parameters = jax.tree.map(lambda p, m: p - RATE * m, state["parameters"], moments)
        return {"parameters": parameters, "m": moments}, loss

    def on_mesh(tree: Params) -> Params:
        return jax.tree.map(lambda a, s: place(a, NamedSharding(mesh, s)), tree, specs)

    return step, {"parameters": on_mesh(host), "m": on_mesh(jax.tree.map(np.zeros_like, host))}


def batch(mesh: Mesh, data: np.ndarray, rng: np.random.Generator) -> jax.Array:
    """Sequences from anywhere in the text, s32[microbatches, batch, length + 1]."""
    starts = rng.integers(0, len(data) - LENGTH - 1, MICROBATCHES * BATCH)
    rows = np.stack([data[s : s + LENGTH + 1] for s in starts]).astype(np.int32)
    return place(rows.reshape(MICROBATCHES, BATCH, -1), NamedSharding(mesh, P()))


def train(
    mesh: Mesh, repeats: int, steps: int, data: np.ndarray, head: str = "last"
) -> dict[str, Any]:
    """Train from the start; gives losses and what a step cost."""
    step, state = training(mesh, repeats, head)
    held = [tree["embedding"].addressable_shards[0].data.nbytes for tree in state.values()]
    rng = np.random.default_rng(1)
    losses: list[float] = []
    times: list[float] = []
    sent: np.ndarray | None = None
    for _ in range(steps):
        tokens = batch(mesh, data, rng)
        before, began = messages(), time.perf_counter()
        state, loss = step(state, tokens)
        losses.append(float(loss))
        times.append(time.perf_counter() - began)
        after = messages()
        sent = None if before is None or after is None else after - before
    slots = MICROBATCHES * repeats
    iterations = slots + STAGES - 1
    return {
        "first_loss": losses[0],
        "last_loss": float(np.mean(losses[-5:])),
        "step_ms": 1000 * float(np.median(times[1:] or times)),
        **_messages(sent),
        "bubble": 1 - slots / iterations,
        "head_bytes": sum(held),
    }


def _messages(own: np.ndarray | None) -> dict[str, int]:
    """Messages of all processes in a step, sent and as the program is written."""
    if own is None:
        return {}
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        own = np.sum(multihost_utils.process_allgather(own), axis=0)
    return {"messages": int(own[0]), "messages_as_written": int(own.sum())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--head",
        choices=("last", "sharded", "behind"),
        default="last",
        help="who computes it: the last stage, or all, in the loop or behind it",
    )
    options = parser.parse_args()
    if len(jax.devices()) < STAGES:
        print(f"needs {STAGES} devices, there are {len(jax.devices())}: see the head of this file")
        return 1
    mesh = jax.make_mesh(
        (STAGES,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:STAGES]
    )
    data = text()
    say: Callable[..., None] = print if jax.process_index() == 0 else lambda *_: None
    report: dict[str, Any] = {}
    for name, repeats in (("gpipe", 1), ("circular", 2))[: 2 if options.head == "last" else 1]:
        report[name] = found = train(mesh, repeats, options.steps, data, options.head)
        sent = ""
        if "messages" in found:
            sent = f"{found['messages']} of {found['messages_as_written']} messages a step, "
        say(
            f"{name:9} loss {found['first_loss']:.3f} -> {found['last_loss']:.3f}, "
            f"{found['step_ms']:.1f} ms a step, {sent}bubble {found['bubble']:.0%}, "
            f"{found['head_bytes']} bytes of the head and its moments a device"
        )
    say(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
