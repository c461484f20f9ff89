"""GPipe pipelines as users write them in JAX, and ways in which they differ.

Each microbatch goes once through the stages; a stage is a `lax.scan` over the layers that its device holds.
`program` gives a jitted function over a mesh, its arguments, and their shardings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from frontend_support import P, manual, mesh
from jax import lax

WIDTH, ROWS = 6, 2


def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ w["a"] + w["b"]), None


def weights(layers: int, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(layers)
    a = rng.standard_normal((layers, WIDTH, WIDTH)) * 0.5
    return {"a": a.astype(dtype), "b": rng.standard_normal((layers, WIDTH)).astype(dtype)}


def inputs(microbatches: int, dtype: Any = np.float32) -> np.ndarray:
    rng = np.random.default_rng(100 + microbatches)
    return rng.standard_normal((microbatches, ROWS, WIDTH)).astype(dtype)


def same_as_it_is(x: jax.Array) -> jax.Array:
    return x


def where(
    stages: int,
    microbatches: int,
    *,
    ring: bool = True,
    mask: str = "cond",
    layer: Callable = layer,
    scan: Callable = lax.scan,
    numbered: bool = False,
    send: Callable = same_as_it_is,
    receive: Callable = same_as_it_is,
    permute: Callable | None = None,
    everywhere: bool = False,
) -> Callable:
    """Outputs are collected by `where` on the last stage, and summed over stages in the end.

    ``mask``: what is done where there is no microbatch: ``cond`` runs nothing, ``zeros`` runs zeros,
    ``nothing`` runs what is there. ``scan(layer, x, layers)`` runs a stage, which is also given the
    iteration where it is ``numbered``. ``everywhere``: outputs of all stages are collected and given.
    """
    pairs = [(s, s + 1) for s in range(stages - 1)] + [(stages - 1, 0)] * ring

    def local(layers, xs):
        stage = lax.axis_index("x")

        def iteration(carry, i):
            received, outputs = carry
            x = jnp.where(stage == 0, xs[jnp.clip(i, 0, microbatches - 1)], receive(received))
            slot = i - stage
            working = (slot >= 0) & (slot < microbatches)

            def run(x):
                given = (layer, x, layers, i) if numbered else (layer, x, layers)
                return scan(*given)[0]

            if mask == "cond":
                y = lax.cond(working, run, jnp.zeros_like, x)
            else:
                y = run(jnp.where(working, x, 0) if mask == "zeros" else x)
            y = send(y)
            out = i - (stages - 1)
            put = outputs.at[jnp.clip(out, 0, microbatches - 1)].set(y)
            outputs = jnp.where(((stage == stages - 1) & (out >= 0)) | everywhere, put, outputs)
            sent = lax.ppermute(y, "x", pairs) if permute is None else permute(y)
            return (sent, outputs), None

        start = (jnp.zeros_like(xs[0]), jnp.zeros_like(xs))
        (_, outputs), _ = lax.scan(iteration, start, jnp.arange(microbatches + stages - 1))
        if everywhere:
            return outputs
        return lax.psum(jnp.where(stage == stages - 1, outputs, 0), "x")

    return local


def collected(stages: int, microbatches: int) -> Callable:
    """What is received comes first in an iteration; outputs are what the scan gives, cut in the end."""
    pairs = [(s, (s + 1) % stages) for s in range(stages)]

    def local(layers, xs):
        stage = lax.axis_index("x")
        padded = jnp.concatenate([xs, jnp.zeros((stages - 1, *xs.shape[1:]), xs.dtype)])

        def iteration(state, x):
            received = lax.ppermute(state, "x", pairs)
            y, _ = lax.scan(layer, jnp.where(stage == 0, x, received), layers)
            return y, jnp.where(stage == stages - 1, y, 0)

        _, ys = lax.scan(iteration, jnp.zeros_like(xs[0]), padded)
        return lax.psum(ys[stages - 1 :], "x")

    return local


def losses(stages: int, microbatches: int) -> Callable:
    """A loss is summed up on the last stage, and a count of microbatches; the state is a pair."""
    pairs = [(s, s + 1) for s in range(stages - 1)]

    def local(layers, xs):
        stage = lax.axis_index("x")

        def both(state, w):
            x, size = state
            y, _ = layer(x, w)
            return (y, size + jnp.sum(jnp.abs(y))), None

        def iteration(carry, _):
            i, state, loss, count = carry
            fresh = (xs[jnp.clip(i, 0, microbatches - 1)] * 2, jnp.float32(0))
            state = jax.tree.map(lambda a, b: jnp.where(stage == 0, a, b), fresh, state)
            x, size = lax.scan(both, state, layers)[0]
            last = (stage == stages - 1) & (i >= stages - 1)
            loss = loss + jnp.where(last, jnp.mean(x * x) + size, 0)
            count = count + last.astype(jnp.int32)
            state = jax.tree.map(lambda v: lax.ppermute(v, "x", pairs), (x, size))
            return (i + 1, state, loss, count), None

        start = (0, (jnp.zeros_like(xs[0]), jnp.float32(0)), jnp.float32(0), 0)
        trips = microbatches + stages - 1
        (_, _, loss, count), _ = lax.scan(iteration, start, None, length=trips)
        return lax.psum(loss, "x"), lax.psum(count, "x")

    return local


def taken(local: Callable, stages: int, share: int) -> Callable:
    """With the layers of all stages on every device, of which each takes its own."""

    def sliced(layers, xs):
        first = lax.axis_index("x") * share
        own = jax.tree.map(lambda w: lax.dynamic_slice_in_dim(w, first, share), layers)
        return local(own, xs)

    return sliced


def parallel_layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """A layer whose width is divided over the axis ``y``."""
    return x + lax.psum(jnp.tanh(x @ w["up"]) @ w["down"], "y"), None


PARALLEL = {"down": P("x", "y"), "up": P("x", None, "y")}


def parallel_weights(layers: int) -> dict[str, np.ndarray]:
    """Of `parallel_layer`; sharded as `PARALLEL` says."""
    rng = np.random.default_rng(layers)
    down = rng.standard_normal((layers, 2 * WIDTH, WIDTH)) * 0.3
    up = rng.standard_normal((layers, WIDTH, 2 * WIDTH)) * 0.3
    return {"down": down.astype(np.float32), "up": up.astype(np.float32)}


def program(local: Callable, stages: int, *, replicated: bool = False, out: Any = None) -> Any:
    """`jit` over a mesh of ``stages`` devices; takes weights as `weights` gives them, and `inputs`."""
    over = mesh(stages)
    spec = P() if replicated else P("x")
    return manual(local, over, (spec, P()), P() if out is None else out)


def squared(local: Callable, over: Any, specs: Any, out: Any = None) -> Callable:
    """A jitted training step: the sum of squares of what ``local`` gives, and its gradients."""
    out = P() if out is None else out
    mapped = jax.shard_map(local, mesh=over, in_specs=specs, out_specs=out, check_vma=False)

    def loss(*arguments):
        leaves = jax.tree.leaves(mapped(*arguments))
        return sum(jnp.sum(v.astype(np.float32) ** 2) for v in leaves)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def by_hand(
    stages: int,
    microbatches: int,
    *,
    read: Callable = lambda kept, at: kept[at],
    between: Callable = lambda kept: kept,
    keep: Callable = lambda stack, kept: kept,
    spy: Callable | None = None,
    add: Callable = lambda total, dw: total + dw,
) -> Callable:
    """A forward and a backward pass, written as two scans. The first keeps what each layer begins with.

    ``read`` takes what was kept in an iteration, ``between`` is done to it between the passes, ``keep`` makes
    what an iteration keeps of that of the last one; ``spy`` is shown a microbatch's gradients; ``add`` adds
    them up.
    """
    forward = [(s, (s + 1) % stages) for s in range(stages)]
    backward = [(t, s) for s, t in forward]
    trips = microbatches + stages - 1

    def local(layers, xs):
        stage = lax.axis_index("x")
        nothing = jax.tree.map(jnp.zeros_like, layers)
        slabs = jnp.zeros((layers["b"].shape[0], *xs.shape[1:]), xs.dtype)

        def there(carry, i):
            received, outputs, last = carry
            x = jnp.where(stage == 0, xs[jnp.clip(i, 0, microbatches - 1)], received)
            working = (i >= stage) & (i - stage < microbatches)

            def run(x):
                return lax.scan(lambda x, w: (layer(x, w)[0], x), x, layers)

            y, kept = lax.cond(working, run, lambda x: (jnp.zeros_like(x), slabs), x)
            kept = keep(last, kept)
            out = i - (stages - 1)
            put = outputs.at[jnp.clip(out, 0, microbatches - 1)].set(y)
            outputs = jnp.where((stage == stages - 1) & (out >= 0), put, outputs)
            return (lax.ppermute(y, "x", forward), outputs, kept), kept

        def back(carry, i):
            received, total, seen = carry
            slot = i - stage
            working = (slot >= 0) & (slot < microbatches)
            begin = 2 * outputs[jnp.clip(slot, 0, microbatches - 1)]
            dy = jnp.where(stage == stages - 1, begin, received)

            def one(dy, given):
                w, x = given
                return jax.vjp(lambda x, w: layer(x, w)[0], x, w)[1](dy)

            def run(dy):
                return lax.scan(one, dy, (layers, read(kept, i)), reverse=True)

            dx, dw = lax.cond(working, run, lambda dy: (jnp.zeros_like(dy), nothing), dy)
            if spy is not None:
                seen = seen + spy(dw)
            total = jax.tree.map(add, total, dw)
            return (lax.ppermute(dx, "x", backward), total, seen), None

        start = (jnp.zeros_like(xs[0]), jnp.zeros_like(xs), slabs)
        (_, outputs, _), kept = lax.scan(there, start, jnp.arange(trips))
        kept = between(kept)
        start = (jnp.zeros_like(xs[0]), nothing, jnp.float32(0))
        (_, total, seen), _ = lax.scan(back, start, jnp.arange(trips)[::-1])
        outputs = lax.psum(jnp.where(stage == stages - 1, outputs, 0), "x")
        return outputs, total, lax.psum(seen, "x")

    return local
