"""Prints the pickled seeds. A script: it starts JAX's CPU backend with four devices."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxlib import _hlo

from stretto.hlo_frontend import stablehlo, tap
from stretto.hlo_frontend.text import parse_hlo_text

from .corpus import HANDMADE, Seed

P = PartitionSpec
DEVICES = 4


def _functions() -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def mapped(f: Callable[..., Any]) -> Any:
        return jax.shard_map(
            f, mesh=mesh, in_specs=P("a", "b"), out_specs=P("a", "b"), check_vma=False
        )

    x = np.ones((4, 8), np.float32)

    def kinds(x: Any) -> Any:
        total = lax.psum(x, ("a", "b")) + lax.pmax(x, "a")
        gathered = lax.all_gather(total, "b", axis=1, tiled=True)
        scattered = lax.psum_scatter(gathered, "b", scatter_dimension=1, tiled=True)
        turned = lax.all_to_all(scattered, "a", split_axis=0, concat_axis=0, tiled=True)
        return lax.ppermute(turned, "b", [(0, 1), (1, 0)]) * lax.axis_index("a")

    yield "kinds", mapped(kinds), (x,)

    def ring(x: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            moving, total = c
            moving = lax.ppermute(moving, "b", [(0, 1), (1, 0)])
            return moving, total + moving * i

        return lax.fori_loop(0, 3, step, (x, x))[1]

    yield "ring", mapped(ring), (x,)

    def converge(x: Any) -> Any:
        return lax.while_loop(lambda c: lax.pmax(c.sum(), "a") < 100, lambda c: c * 2, x)

    yield "converge", mapped(converge), (x,)

    def branch(x: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda v: lax.psum(v, "b"), lambda v: v * 2, x)

    yield "branch", mapped(branch), (x,)

    def scan(x: Any) -> Any:
        def step(c: Any, y: Any) -> Any:
            c = jnp.tanh(c @ y)
            return lax.psum(c, "a"), c.sum()

        return lax.scan(step, x, jnp.ones((3, 4, 4), x.dtype))[0]

    yield "scan", mapped(scan), (x,)

    def small(x: Any) -> Any:
        halves = lax.psum(x.astype(jnp.bfloat16), "a")
        whole = lax.psum(x.astype(jnp.int8), "b")
        return halves.astype(jnp.float32) + whole

    yield "small", mapped(small), (x,)
    weights = NamedSharding(mesh, P("a", "b"))
    rows = NamedSharding(mesh, P("a"))

    def layer(x: Any, w: Any) -> Any:
        y = jax.nn.relu(lax.with_sharding_constraint(x, rows) @ w)
        return lax.with_sharding_constraint(y, weights).sum(axis=0)

    placed = jax.device_put(x, weights), jax.device_put(np.ones((8, 8), np.float32), weights)
    yield "layer", layer, placed
    yield "gradient", jax.grad(lambda w, x: layer(x, w).sum()), placed[::-1]


def main() -> None:
    found = [
        Seed(f"handmade {number}", text, parse_hlo_text(text))
        for number, text in enumerate(HANDMADE)
    ]
    for name, function, arguments in _functions():
        lowered = jax.jit(function).lower(*arguments).as_text()
        parsed = stablehlo.parse(lowered)
        stablehlo.settle_layouts(parsed)
        proto = tap.optimized_hlo(parsed, 1, DEVICES, b"")
        text = _hlo.HloModule.from_serialized_hlo_module_proto(proto).to_string()
        found.append(Seed(name, text, proto))
    sys.stdout.buffer.write(pickle.dumps(tuple(found)))


if __name__ == "__main__":
    # Pickled by their place in the package.
    main()
