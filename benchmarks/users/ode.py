"""diffrax: predators and prey from many starting points, the points divided over all devices."""

from __future__ import annotations

from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

POINTS = 256
RATES = np.array([1.1, 0.4, 0.4, 0.1], np.float32)


def field(_: Any, y: jax.Array, rates: jax.Array) -> jax.Array:
    prey, predators = y
    grow, eaten, die, eat = rates
    return jnp.stack(
        [grow * prey - eaten * prey * predators, eat * prey * predators - die * predators]
    )


def solve(begin: jax.Array, rates: jax.Array) -> jax.Array:
    """One point's state at time 10, with steps of its own size."""
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=0.0,
        t1=10.0,
        dt0=0.1,
        y0=begin,
        args=rates,
        stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-4),
        max_steps=1024,
    )
    return solution.ys[-1]


def solve_all(begin: jax.Array, rates: jax.Array) -> jax.Array:
    return jax.vmap(solve, in_axes=(0, None))(begin, rates)


def loss(rates: jax.Array, begin: jax.Array) -> jax.Array:
    return (solve_all(begin, rates) ** 2).mean()


def programs() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """By name: a jitted function and its arguments."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    points = (1 + 9 * np.random.default_rng(0).random((POINTS, 2))).astype(np.float32)
    begin = jax.make_array_from_callback(
        points.shape, NamedSharding(mesh, P("x")), lambda index: points[index]
    )
    rates = jax.make_array_from_callback(
        RATES.shape, NamedSharding(mesh, P()), lambda index: RATES[index]
    )
    # Each device ends its loop by itself.
    apart = jax.shard_map(
        solve_all, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False
    )
    return {
        "diffrax solve": (jax.jit(solve_all), (begin, rates)),
        "diffrax gradient": (jax.jit(jax.grad(loss)), (rates, begin)),
        "diffrax shard_map": (jax.jit(apart), (begin, rates)),
    }
