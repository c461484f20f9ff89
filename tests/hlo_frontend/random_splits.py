"""Random programs around collectives, and random routings of experts, split and compared with JAX's CPU
backend.

``python -m random_splits -n 200`` in this folder runs so many of each; the suite runs some. Programs draw the
number of devices, the layout of operands, what lies between collectives and products, and the number of
tiles. Data are small whole numbers, so that sums are exact and results must be equal bit for bit; those of
experts, which have square roots in them, must be close.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from stretto.hlo_frontend.compile import CompiledModule
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.passes.split import Decision
from stretto.hlo_frontend.passes.split.apply import found
from stretto.hlo_frontend.pipeline import SETTLING, Compilation, run

EXAMPLES = Path(__file__).parents[2] / "examples"


def split(module: CompiledModule, tiles: int, pieces: bool) -> tuple[CompiledModule, int]:
    """With everything split that can be, into so many tiles or pieces; and how many regions that are."""
    source = module.source
    assert source is not None
    c = Compilation.of(source, Module.parse(source.hlo))
    run(c, SETTLING)
    chosen = tuple(
        Decision(number, i, tiles, pieces and bool(region.groups))
        for number, _, regions in found(c.entry, source.num_replicas * source.num_partitions)
        for i, region in enumerate(regions)
        if region.divides(region.size * tiles) and region.size * tiles > 1
    )
    return replace(source, splits=chosen).compiled(), len(chosen)


def random_program(
    rng: np.random.Generator,
) -> tuple[Any, Any, tuple[Any, ...], list[np.ndarray], tuple[int, bool]]:
    """A function, its mesh, how its arguments are spread, the arguments, a number of tiles, and whether they
    are pieces."""
    from frontend_support import P, manual, mesh

    n = int(rng.choice([2, 2, 4]))
    tiles = int(rng.choice([1, 2, 3, 4]))
    rows = tiles * int(rng.integers(1, 5))
    width, hidden, out = (int(k) for k in rng.integers(1, 9, 3))
    over = mesh(n)
    kind = rng.choice(["gather", "scatter", "both", "sums", "loop", "features"])
    turned = bool(rng.integers(2))  # rows last
    sequences = int(rng.choice([1, 1, 2, 3]))  # each with rows of all devices
    between = rng.choice(["none", "bias", "norm", "convert", "square", "steps"])
    several, pieces = bool(rng.integers(2)), bool(rng.integers(2))

    def number(*shape: int) -> np.ndarray:
        return rng.integers(-2, 3, shape).astype("f4")

    def act(h: jax.Array) -> jax.Array:
        if between == "bias":
            return h + jnp.arange(h.shape[-1], dtype=h.dtype)
        if between == "norm":
            return h - h.max(axis=-1, keepdims=True)
        if between == "convert":
            return h.astype(jnp.int32).astype(jnp.float32)
        if between == "steps":
            step = lambda i, s: jnp.clip(s * h - i, -3, 3)  # noqa: E731
            return lax.fori_loop(0, 3, step, jnp.ones_like(h))
        return h * h if between == "square" else h

    def gathered(x: jax.Array) -> jax.Array:
        if sequences > 1:
            several = x.reshape(sequences, rows, x.shape[-1])
            whole = lax.all_gather(several, "x", axis=1, tiled=True)
            return whole.reshape(-1, x.shape[-1])
        if turned:
            return lax.all_gather(x.T, "x", axis=1, tiled=True).T
        return lax.all_gather(x, "x", axis=0, tiled=True)

    def scattered(y: jax.Array) -> jax.Array:
        if sequences > 1:
            several = y.reshape(sequences, n * rows, y.shape[-1])
            own = lax.psum_scatter(several, "x", scatter_dimension=1, tiled=True)
            return own.reshape(-1, y.shape[-1])
        if turned:
            return lax.psum_scatter(y.T, "x", scatter_dimension=1, tiled=True).T
        return lax.psum_scatter(y, "x", scatter_dimension=0, tiled=True)

    def layer(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return scattered(act(gathered(x) @ w) @ v)

    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> Any:
        w, v = w[0], v[0]
        if kind == "features":
            return act(lax.all_gather(x, "x", axis=1, tiled=True) @ w) @ v
        if kind == "gather":
            g = gathered(x)
            more = (g @ v[:width, :1], g.sum(0)) if several and hidden >= width else ()
            return act(g @ w) @ v, *more
        if kind == "scatter":
            return scattered(act(jnp.concatenate([x] * n) @ w) @ v)
        if kind == "sums":
            y = lax.psum(act(x @ w), "x")
            return lax.psum(act(y) @ v, "x")
        if kind == "both":
            return layer(x, w, v), (gathered(x) if several else x)
        return lax.scan(
            lambda x, _: (jnp.clip(layer(x, w, v[:, :width]), -3, 3), None), x, None, 2
        )[0]

    last = width if kind in ("loop", "both") else out
    arguments = [
        number(n * sequences * rows, width),
        number(n, n * width if kind == "features" else width, hidden),
        number(n, hidden, last),
    ]
    specs = (P("x"), P("x"), P("x"))
    return manual(f, over, specs, P("x")), over, specs, arguments, (tiles, pieces)


def judge_random(seed: int) -> int:
    """Compare one random program; how many regions of it were split."""
    from frontend_support import compiled, judge_program

    function, over, specs, arguments, parts = random_program(np.random.default_rng(seed))
    module = compiled(function, *arguments, num_devices=over.devices.size)
    made, regions = split(module, *parts)
    judge_program(made, function, over, specs, *arguments, exact=True)
    return regions


class Routings:
    """A layer of experts of `examples/moe.py` over ``data`` x ``expert`` devices, split into ``tiles``."""

    TOKENS = 16

    def __init__(self, data: int, expert: int, tiles: int) -> None:
        from frontend_support import P, compiled, manual, mesh

        self.moe = _moe()
        self.over = mesh(data, expert)
        everywhere = ("x", "y")

        def layer(x: jax.Array, weights: Any) -> jax.Array:
            return self.moe.experts(weights, x, "y")[0]

        of_expert = {"router": P(), "up": P("y"), "down": P("y")}
        self.specs = (P(everywhere), of_expert)
        self.function = manual(layer, self.over, self.specs, P(everywhere))
        module = compiled(self.function, *self.arguments(0), num_devices=data * expert)
        self.module, self.regions = split(module, tiles, pieces=False)

    def arguments(self, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Tokens and weights. Of every four routings one sends all tokens to two experts, one spares half
        of the experts, one those of the first device."""
        rng = np.random.default_rng(seed)
        moe = self.moe
        normal = lambda *shape: rng.standard_normal(shape).astype("f4")  # noqa: E731
        x = np.abs(normal(self.TOKENS * self.over.devices.size, moe.WIDTH))
        router = normal(moe.WIDTH, moe.EXPERTS)
        spared = {
            1: rng.permutation(moe.EXPERTS)[2:],
            2: rng.permutation(moe.EXPERTS)[: moe.EXPERTS // 2],
            3: np.arange(moe.EXPERTS // self.over.devices.shape[1]),
        }.get(seed % 4, np.arange(0))
        router[:, spared] -= 10.0
        up, down = normal(moe.EXPERTS, moe.WIDTH, 8), normal(moe.EXPERTS, 8, moe.WIDTH)
        return x, {"router": router, "up": up, "down": down}

    def judge(self, seed: int) -> None:
        from frontend_support import same, shards
        from interpreter import Interpreter
        from jax.sharding import NamedSharding

        x, weights = self.arguments(seed)
        put = lambda a, s: jax.device_put(a, NamedSharding(self.over, s))  # noqa: E731
        leaves = jax.tree.leaves((x, weights))
        specs = jax.tree.leaves(self.specs)
        given = [shards(a, self.over, s) for a, s in zip(leaves, specs, strict=True)]
        (got,) = Interpreter(self.module.program).run(*given)
        want = self.function(put(x, self.specs[0]), jax.tree.map(put, weights, self.specs[1]))
        by_device = {s.device: np.asarray(s.data) for s in want.addressable_shards}
        for d, device in enumerate(self.over.devices.flat):
            same(got[d], by_device[device])


def _moe() -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("moe")
    finally:
        sys.path.remove(str(EXAMPLES))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=20, help="programs, and routings")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.n)
    count = 0
    for seed in seeds:
        try:
            count += judge_random(seed) > 0
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    print(f"{len(seeds)} programs, {count} of them with regions that were split: all equal")
    # Of eight devices each has one expert: its five places are split.
    for shape, tiles in (((1, 2), 2), ((2, 2), 4), ((1, 4), 2), ((1, 8), 5)):
        routings = Routings(*shape, tiles)
        for seed in seeds:
            routings.judge(seed)
        print(f"{len(seeds)} routings over {shape}, {routings.regions} regions: all equal")
    return 0


if __name__ == "__main__":
    import conftest  # noqa: F401 (virtual devices)

    sys.exit(main())
