"""Programs that loop over small steps, on 8 devices of one process: stretto and JAX's CPU backend in turns.

*sums*: a ``fori_loop`` of ``psum``s of 8 floats. *gradient*: the conjugate gradient method, a ``while_loop``
with two sums and two permutes an iteration. *halo*: two permutes of edges an iteration of a diffusion.
*while*: a condition that is a maximum over all devices. Times are of one iteration.
"""

from __future__ import annotations

from collections.abc import Callable

from harness import on_both_platforms, options, show, time_calls

DEVICES = 8
TRIPS = 200


def measurements() -> dict[str, dict[str, Callable[[], float]]]:
    """By case and contender, a function that measures once: seconds an iteration."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    right = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
    left = [(t, s) for s, t in right]

    def sums(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, TRIPS, lambda _, v: lax.psum(v, "x") * 0.125, x[:8])

    def neighbours(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.ppermute(x[-1:], "x", right), lax.ppermute(x[:1], "x", left)

    def halo(x: jax.Array) -> jax.Array:
        def step(_: object, v: jax.Array) -> jax.Array:
            before, after = neighbours(v)
            wide = jnp.concatenate([before, v, after])
            return v + 0.1 * (wide[2:] - 2 * v + wide[:-2])

        return lax.fori_loop(0, TRIPS, step, x)

    def gradient(x: jax.Array) -> jax.Array:
        def product(v: jax.Array) -> jax.Array:
            before, after = neighbours(v)
            wide = jnp.concatenate([before, v, after])
            return 2.1 * v - wide[2:] - wide[:-2]

        def dot(a: jax.Array, b: jax.Array) -> jax.Array:
            return lax.psum(a @ b, "x")

        def step(c: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            solution, residual, direction, squared, n = c
            image = product(direction)
            length = squared / dot(direction, image)
            residual = residual - length * image
            new = dot(residual, residual)
            direction = residual + new / squared * direction
            return solution + length * direction, residual, direction, new, n + 1

        start = (jnp.zeros_like(x), x, x, dot(x, x), jnp.int32(0))
        return lax.while_loop(lambda c: (c[3] > 0) & (c[4] < TRIPS), step, start)[0]

    def condition(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda v: lax.pmax(v.max(), "x") < TRIPS, lambda v: v + 1, x)

    found: dict[str, dict[str, Callable[[], float]]] = {}
    for platform, label in (("cpu", "JAX CPU"), ("stretto", "stretto")):
        mesh = Mesh(np.array(jax.devices(platform)), ("x",))
        for size in (64, 4096):
            data = np.random.default_rng(0).random(DEVICES * size, np.float32)
            x = jax.device_put(data, NamedSharding(mesh, P("x")))
            for f in (sums, gradient, halo, condition):
                if f in (sums, condition) and size > 64:
                    continue
                run = jax.jit(
                    jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
                )
                call = lambda run=run, x=x: run(x).block_until_ready()  # noqa: E731
                name = {"sums": "sums", "condition": "while"}.get(
                    f.__name__, f"{f.__name__}, {size} elements a device"
                )
                found.setdefault(name, {})[label] = lambda call=call: time_calls(call, 3) / TRIPS
    return found


def main() -> None:
    args = options(__doc__ or "")
    on_both_platforms(DEVICES)
    times: dict[str, dict[str, list[float]]] = {}
    cases = measurements()
    for case, contenders in cases.items():
        row = times[case] = {name: [] for name in contenders}
        for turn in range(4 if args.quick else 12):
            for name, measure in contenders.items():
                value = measure()
                if turn:
                    row[name].append(value)
    goals = dict.fromkeys(times, "stretto ≤ 1x")
    show("small steps, 8 devices of one process", times, "stretto", goals, target=args.json)


if __name__ == "__main__":
    main()
