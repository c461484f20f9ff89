"""Steps with many small results, as those of training are, on 8 devices of one process.

75 arrays of 64 floats on every device in, as many out: after 9 ``psum``s, and after arithmetic alone.
*Layers* is a training step of 8 layers with two ``psum``s each. stretto and JAX's CPU backend in turns; each
call's results are awaited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness import on_both_platforms, options, show, time_calls

DEVICES, RESULTS, SUMS, LAYERS, WIDTH = 8, 75, 9, 8, 64


def measurements() -> dict[str, dict[str, Callable[[], float]]]:
    """By case and contender, a function that measures once: seconds a call."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    def sums(xs: list[jax.Array]) -> list[jax.Array]:
        total = jnp.zeros(4)
        for k in range(SUMS):
            total = lax.psum(total + xs[k][:4], "x")
        return [x * 1.5 + total[0] for x in xs]

    def alone(xs: list[jax.Array]) -> list[jax.Array]:
        return [x * 1.5 + 1 for x in xs]

    def deep(weights: list[jax.Array]) -> list[jax.Array]:
        def loss(weights: list[jax.Array]) -> jax.Array:
            x = jnp.ones((16, WIDTH))
            for up, down in zip(weights[::2], weights[1::2], strict=True):
                x = x + lax.psum(jax.nn.gelu(x @ up) @ down, "x")
            return (x**2).mean()

        gradients = jax.grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]

    small = [np.full(64, float(k), np.float32) for k in range(RESULTS)]
    weights = [np.full((WIDTH, WIDTH), 1e-2, np.float32)] * (2 * LAYERS)
    cases: dict[str, tuple[Any, Any]] = {
        f"{RESULTS} results, {SUMS} sums": (sums, small),
        f"{RESULTS} results, no collective": (alone, small),
        f"{LAYERS} layers": (deep, weights),
    }
    found: dict[str, dict[str, Callable[[], float]]] = {case: {} for case in cases}
    for platform, label in (("cpu", "JAX CPU"), ("stretto", "stretto")):
        mesh = Mesh(np.array(jax.devices(platform)), ("x",))
        for case, (f, given) in cases.items():
            placed = [jax.device_put(a, NamedSharding(mesh, P())) for a in given]
            step = jax.jit(
                jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
            )
            call = lambda step=step, placed=placed: jax.block_until_ready(step(placed))  # noqa: E731
            found[case][label] = lambda call=call: time_calls(call, 20)  # type: ignore[misc]
    return found


def main() -> None:
    args = options(__doc__ or "")
    on_both_platforms(DEVICES)
    cases = measurements()
    times: dict[str, dict[str, list[float]]] = {case: {} for case in cases}
    for turn in range(4 if args.quick else 12):
        for case, contenders in cases.items():
            for name, measure in contenders.items():
                value = measure()
                if turn:
                    times[case].setdefault(name, []).append(value)
    show(f"many results, {DEVICES} devices of one process", times, "stretto", target=args.json)


if __name__ == "__main__":
    main()
