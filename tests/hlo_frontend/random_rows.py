"""Draws programs on the rows of spread arrays at random, and compares them rewritten with what is written.

    cd tests/hlo_frontend && XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python -m random_rows --count 500 [--seed 0] [--mesh 2 4 --axis y]

Each is a chain of ops that XLA's partitioner gathers for: rows by number, updates of some rows, sorts, sums
along either dimension, loops. Numbers are small integers, so that all orders of additions agree; zeros have
both signs, which count. Prints the programs whose bits are not equal; the last line counts what became of
all. The suite runs some.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from frontend_support import P, compiled, kinds, mesh, shards
from interpreter import Interpreter
from jax import lax
from jax.sharding import NamedSharding

ROWS, COLUMNS = 8, 12
Op = Callable[..., jax.Array]


def own() -> jax.Array:
    return jnp.arange(ROWS)


def drawn(rng: random.Random) -> tuple[str, Op]:
    """An op of x [ROWS, COLUMNS], numbers i [ROWS] and j [ROWS, 3] of columns, and rows u."""
    a, c = rng.randrange(ROWS), rng.randrange(COLUMNS)
    b, d = rng.randrange(a + 1, ROWS + 1), rng.randrange(c + 1, COLUMNS + 1)
    axis, some = rng.randrange(2), rng.randrange(1, 4)
    ops: dict[str, Op] = {
        "get": lambda x, i, j, u: x + x[own(), i][:, None],
        "get three": lambda x, i, j, u: x + x[own()[:, None], j].sum(1)[:, None],
        "get another row": lambda x, i, j, u: x + x[(own() + some) % ROWS, i][:, None],
        "set": lambda x, i, j, u: x.at[own(), i].set(u[:, 0]),
        "set from x": lambda x, i, j, u: x.at[own(), i].set(x[:, c]),
        "add": lambda x, i, j, u: x.at[own(), i].add(u[:, 1]),
        "add three": lambda x, i, j, u: x.at[own()[:, None], j].add(u[:, :3]),
        "most of three": lambda x, i, j, u: x.at[own()[:, None], j].max(u[:, :3]),
        "add to any row": lambda x, i, j, u: x.at[i % ROWS, own()].add(1.0),
        f"rows {a}:{b}": lambda x, i, j, u: x.at[a:b].set(u[: b - a]),
        f"rows {a}:{b}, {c}:{d}": lambda x, i, j, u: x.at[a:b, c:d].set(u[: b - a, : d - c]),
        f"rows {a}:{b} added": lambda x, i, j, u: x.at[a:b].add(u[: b - a]),
        f"from where i says, {some} rows": lambda x, i, j, u: lax.dynamic_update_slice(
            x, u[:some, :some], (i[0], i[1])
        ),
        f"sort {axis}": lambda x, i, j, u: jnp.sort(x, axis),
        f"sum {axis}": lambda x, i, j, u: jnp.cumsum(x, axis) % 16,
        f"flip {axis}": lambda x, i, j, u: jnp.flip(x, axis),
        f"roll {axis}": lambda x, i, j, u: jnp.roll(x, some, axis),
        "loop of sorts": lambda x, i, j, u: lax.fori_loop(
            0, 3, lambda k, y: jnp.sort(y, 1).at[own(), (i + k) % COLUMNS].add(1.0), x
        ),
        "loop over columns": lambda x, i, j, u: lax.fori_loop(
            0, some, lambda k, y: y.at[:, k].set(y[:, k + 1] + y[own(), i]), x
        ),
        f"loop that adds {axis}": lambda x, i, j, u: lax.fori_loop(
            0, some, lambda k, y: (y + lax.rev(y, (axis,))) % 8, x
        ),
    }
    return rng.choice(list(ops.items()))


def arguments(rng: np.random.Generator) -> list[np.ndarray]:
    x, u = (rng.integers(-9, 9, (ROWS, COLUMNS)).astype("f4") for _ in range(2))
    x[::2] *= -1
    i, j = (rng.integers(0, COLUMNS, n).astype("i4") for n in (ROWS, (ROWS, 3)))
    return [x, i, j, u]


def compare(seed: int, sizes: Sequence[int] = (4,), axis: str = "x") -> tuple[str, str]:
    """Draw a program for arrays that are cut along one axis of a mesh of these sizes. Gives ``equal`` or
    ``differs``, or ``stays`` if nothing was rewritten; and what was drawn."""
    rng = random.Random(seed)
    chain = [drawn(rng) for _ in range(rng.choice((1, 1, 2, 4)))]
    rows, columns = P(axis), P(None, axis)
    specs = [rng.choice((rows, rows, rows, columns)), rows, rows, rng.choice((rows, P()))]
    out = rng.choice((rows, rows, rows, columns))

    def f(x: jax.Array, *more: jax.Array) -> jax.Array:
        for _, op in chain:
            x = op(x, *more)
        return x

    over = mesh(*sizes)
    given = arguments(np.random.default_rng(seed))
    placed = tuple(NamedSharding(over, s) for s in specs)
    function = jax.jit(
        f, in_shardings=placed, out_shardings=NamedSharding(over, out), keep_unused=True
    )
    module = compiled(function, *given, num_devices=over.devices.size)
    said = f"{', '.join(name for name, _ in chain)}; {specs} -> {out}"
    if not module.rewrites:
        return "stays", said
    parts = [shards(a, over, s) for a, s in zip(given, specs, strict=True)]
    got, wanted = (Interpreter(m.program).run(*parts)[0] for m in (module, module.as_written()))
    equal = all(a.tobytes() == b.tobytes() for a, b in zip(got, wanted, strict=True))
    silent = "equal, nothing sent" if not kinds(module) else "equal"
    return silent if equal else "differs", said


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m random_rows", description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mesh", type=int, nargs="+", default=[4], help="the sizes of its axes")
    parser.add_argument("--axis", default="x", choices="xyz", help="along which arrays are cut")
    options = parser.parse_args(given)
    found: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        outcome, said = compare(seed, options.mesh, options.axis)
        found[outcome] += 1
        if outcome == "differs":
            print(f"{seed}: {said}", flush=True)
    print(dict(found), flush=True)
    return 1 if found["differs"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
