"""What programs do between large steps, on 8 devices of one process: stretto and JAX's CPU backend in turns.

Transfers, eager expressions, single calls of small jitted programs with and without collectives: where the
runtime is most of the time. Times are of one call, awaited after every third.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import on_both_platforms, options, platforms_in_turns, show
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 8


def calls(platform: str) -> dict[str, Callable[[], Any]]:
    """By name, what is called."""
    devices = jax.devices(platform)
    jax.config.update("jax_default_device", devices[0])
    mesh = Mesh(np.array(devices), ("x",))
    rows, copies = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    host = np.ones((64, 64), np.float32)
    # Where XLA can use it in place, its parts too, and beside that.
    room = np.ones((1 << 22) + 128, np.uint8)
    start = -room.ctypes.data % 64
    aligned, beside = (room[k : k + (1 << 22)].view(np.float32) for k in (start, start + 4))
    one, sharded, replicated = (jax.device_put(host, p) for p in (devices[0], rows, copies))
    blocks = jax.device_put(np.ones((64, 8, 8), np.float32), rows)
    sequence = jax.device_put(
        np.ones((100, DEVICES, 64), np.float32), NamedSharding(mesh, P(None, "x"))
    )
    weights = [jax.device_put(host * 0.01, copies) for _ in range(8)]
    moments = [w * 0 for w in weights]
    many = [jax.device_put(np.ones(4, np.float32), copies) for _ in range(200)]
    key = jax.random.key(0)
    updated = [sharded + 0]

    @jax.jit
    def train(weights: Any, moments: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            h = x
            for w in weights:
                h = jnp.tanh(h @ w)
            return (h**2).mean()

        value, gradient = jax.value_and_grad(loss)(weights)
        moments = [0.9 * m + g for m, g in zip(moments, gradient, strict=True)]
        return [w - 0.1 * m for w, m in zip(weights, moments, strict=True)], moments, value

    @jax.jit
    def recurrent(x: jax.Array, w: jax.Array) -> jax.Array:
        def step(h: jax.Array, t: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ w + t), None

        return lax.scan(step, jnp.zeros((DEVICES, 64)), x)[0]

    def per_device(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x")))

    def eager(x: jax.Array) -> jax.Array:
        return jnp.sin(x * 2 + 1).sum(axis=1) / 3

    set_row = jax.jit(lambda a: a.at[3].set(0.0), donate_argnums=0)

    def update() -> jax.Array:
        updated[0] = set_row(updated[0])
        return updated[0]

    pairs = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
    add = jax.jit(lambda a, b: a + b)
    solve = jax.jit(jax.vmap(lambda a: jnp.linalg.solve(jnp.eye(8) * 2 + a * 0, a[0])))
    each = jax.jit(lambda arrays: [a + 1 for a in arrays])
    normal = jax.jit(lambda k: jax.random.normal(k, (64, 64)), out_shardings=rows)
    sum_ = per_device(lambda a: lax.psum(a, "x") + a)
    shift = per_device(lambda a: lax.ppermute(a, "x", pairs) + lax.psum(a, "x").mean())
    return {
        "eager, five operations, one device": lambda: eager(one),
        "the same, sharded": lambda: eager(sharded),
        "the same, replicated": lambda: eager(replicated),
        "a row of a sharded array": lambda: sharded[3],
        "4 MiB from the host, sharded, used in place": lambda: jax.device_put(aligned, rows),
        "the same, copied": lambda: jax.device_put(beside, rows),
        "float of a sum": lambda: float(sharded.sum()),
        "x + y": lambda: add(sharded, sharded),
        "a row is set, donated": update,
        "solve, batched": lambda: solve(blocks),
        "a scan of 100 steps": lambda: recurrent(sequence, weights[0]),
        "random numbers, sharded, key on one device": lambda: normal(key),
        "200 small results": lambda: each(many),
        "x + psum": lambda: sum_(sharded),
        "ppermute + psum": lambda: shift(sharded),
        "a training step of 8 small layers": lambda: train(weights, moments, sharded),
    }


def three(call: Callable[[], Any]) -> None:
    """Call it three times, and wait for the last."""
    for _ in range(2):
        call()
    jax.block_until_ready(call())


def main() -> None:
    args = options(__doc__ or "")
    on_both_platforms(DEVICES)
    contenders = {"stretto": calls("stretto"), "cpu": calls("cpu")}
    times: dict[str, dict[str, list[float]]] = {}
    for case in contenders["stretto"]:
        runs = {platform: partial(three, made[case]) for platform, made in contenders.items()}
        found = platforms_in_turns(runs, 8 if args.quick else 40, 5)
        times[case] = {label: [t / 3 for t in of_three] for label, of_three in found.items()}
    title = "everyday calls, 8 devices of one process"
    show(title, times, "JAX CPU", dict.fromkeys(times, "≤ 1.5x"), target=args.json)


if __name__ == "__main__":
    main()
