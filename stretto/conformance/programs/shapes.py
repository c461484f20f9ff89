"""Every form of a collective's arguments: dimensions, tiling, shapes (empty, scalar), tuples, sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .common import manual, mesh, normal, place, small
from .registry import CORE, Program, add, program

EXACT: dict[str, Any] = {"exact": True}


def gather(axis: int, tiled: bool) -> dict[str, Any]:
    x = normal((8, 3, 4), seed=5)
    out = manual(mesh(x=8), lambda v: lax.all_gather(v, "x", axis=axis, tiled=tiled), x)
    return {"out": out}


def scatter(dimension: int, tiled: bool) -> dict[str, Any]:
    shape = [64, 16, 8] if tiled else [8 * (8 if dimension == 0 else 2), 8, 8]
    x = small(tuple(shape), seed=6)

    def f(v: jax.Array) -> jax.Array:
        out = lax.psum_scatter(v, "x", scatter_dimension=dimension, tiled=tiled)
        return out if out.ndim == 3 else out[None]

    return {"out": manual(mesh(x=8), f, x)}


def exchange(split: int, concat: int, tiled: bool) -> dict[str, Any]:
    shape = tuple(8 * n for n in (2, 1, 3)) if tiled else (8, 8, 8)
    x = normal((shape[0] * 8, *shape[1:]), seed=7)
    return {
        "out": manual(mesh(x=8), lambda v: lax.all_to_all(v, "x", split, concat, tiled=tiled), x)
    }


for axis in (0, 1, 2):
    for tiled in (False, True):
        kind = "tiled" if tiled else "stacked"
        core = CORE if (axis, tiled) in ((0, True), (1, False)) else {}
        add(
            Program(
                f"all_gather/{kind}/axis{axis}",
                partial(gather, axis, tiled),
                **EXACT,
                **core,
            )
        )
        add(
            Program(
                f"psum_scatter/{kind}/axis{axis}",
                partial(scatter, axis, tiled),
                **EXACT,
                **(CORE if axis == 0 else {}),
            )
        )
for split in (0, 1, 2):
    for concat in (0, 1, 2):
        for tiled in (False, True):
            kind = "tiled" if tiled else "stacked"
            diagonal = (split, concat) in ((0, 0), (1, 0), (0, 2), (2, 2))
            add(
                Program(
                    f"all_to_all/{kind}/{split}to{concat}",
                    partial(exchange, split, concat, tiled),
                    only_full=not diagonal,
                    **EXACT,
                )
            )


@program("ppermute/forms", exact=True, **CORE)
def ppermute_forms() -> dict[str, Any]:
    """Rings both ways, a swap, a partial permutation (others get zeros), self edges, no edges at all."""
    perms = {
        "ring": [(i, (i + 1) % 8) for i in range(8)],
        "back": [(i, (i - 1) % 8) for i in range(8)],
        "swap": [(0, 7), (7, 0)],
        "partial": [(0, 3), (3, 5), (6, 1)],
        "self": [(i, i) for i in range(8)],
        "mixed": [(0, 0), (1, 2), (2, 1), (7, 4)],
        "none": [],
    }

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(lax.ppermute(x, "x", p) for p in perms.values())

    return dict(zip(perms, manual(mesh(x=8), f, normal((8, 6), seed=8)), strict=True))


@program("pshuffle", exact=True)
def pshuffle() -> dict[str, Any]:
    f = lambda x: lax.pshuffle(x, "x", [3, 1, 0, 2, 7, 6, 4, 5])  # noqa: E731
    return {"out": manual(mesh(x=8), f, normal((8, 6), seed=9))}


@program("pswapaxes", exact=True)
def pswapaxes() -> dict[str, Any]:
    return {
        "out": manual(mesh(x=8), lambda x: lax.pswapaxes(x, "x", 1), normal((64, 8, 3), seed=9))
    }


@program("axis_index", exact=True, **CORE)
def axis_index() -> dict[str, Any]:
    def f(x: jax.Array) -> jax.Array:
        i, j, both = lax.axis_index("a"), lax.axis_index("b"), lax.axis_index(("a", "b"))
        return x + jnp.stack([i, j, both, jnp.int32(lax.axis_size("a"))])[None]

    return {"out": manual(mesh(a=2, b=4), f, small((8, 4), "int32"))}


@program("psum/tuple", exact=True, **CORE)
def psum_tuple() -> dict[str, Any]:
    """One psum over a tree: shapes and dtypes differ, one leaf is a scalar, one is empty."""

    def f(x: jax.Array, n: jax.Array) -> dict[str, jax.Array]:
        tree = {"x": x, "n": n, "scalar": x[0, 0], "empty": x[:, :0], "flag": n > 0}
        return lax.psum(tree, "x")

    out_specs = P()
    return dict(manual(mesh(x=8), f, small((8, 5)), small((8, 3), "int32", 2), out_specs=out_specs))


@program("psum/constants", exact=True)
def psum_constants() -> dict[str, Any]:
    """A Python number and an unsharded argument are summed over the axis too."""

    def f(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x * lax.psum(1, "x"), lax.psum(lax.pcast(y, "x", to="varying"), "x")

    out = manual(
        mesh(x=8), f, small((8, 2)), small((3,)), in_specs=(P("x"), P()), out_specs=(P("x"), P())
    )
    return {"count": out[0], "replicated": out[1]}


@program("shapes/empty", exact=True, **CORE)
def empty() -> dict[str, Any]:
    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        return (
            lax.psum(x, "x"),
            lax.all_gather(x, "x"),
            lax.ppermute(x, "x", [(0, 1), (1, 0)]),
            lax.all_to_all(x, "x", 1, 1, tiled=True),
            lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True),
            lax.pmax(x, "x"),
        )

    names = ("psum", "all_gather", "ppermute", "all_to_all", "psum_scatter", "pmax")
    return dict(zip(names, manual(mesh(x=8), f, small((8, 16, 0))), strict=True))


@program("shapes/scalar", exact=True, **CORE)
def scalar() -> dict[str, Any]:
    def f(x: jax.Array) -> jax.Array:
        s = x[0]
        t = lax.ppermute(s, "x", [(i, (i + 1) % 8) for i in range(8)])
        return jnp.stack([lax.psum(s, "x"), lax.pmax(s, "x"), t, lax.all_gather(s, "x")[3]])

    return {"out": manual(mesh(x=8), f, normal((8,), "float32", 3).round())}


@program("shapes/one_element_groups", exact=True)
def one_element_groups() -> dict[str, Any]:
    """An axis of size one: every collective is the identity."""

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        return (
            lax.psum(x, "y"),
            lax.all_gather(x, "y", tiled=True),
            lax.all_to_all(x, "y", 1, 1, tiled=True),
            lax.ppermute(x, "y", [(0, 0)]),
            lax.psum_scatter(x, "y", tiled=True),
        )

    names = ("psum", "all_gather", "all_to_all", "ppermute", "psum_scatter")
    return dict(zip(names, manual(mesh(x=8, y=1), f, normal((8, 4))), strict=True))


@program("shapes/large", exact=True, **CORE)
def large() -> dict[str, Any]:
    """4 MiB a device (32 MiB altogether); results are condensed to keep the comparison small."""

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        total = lax.psum(x, "x")
        turned = lax.all_to_all(x, "x", 1, 1, tiled=True)
        moved = lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)])
        part = lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True)
        every = lax.all_gather(x[:, ::64], "x", tiled=True, axis=1)
        return (
            total[:, ::1001],
            turned[:, ::1001],
            moved[:, ::1001],
            part[:, ::1001],
            every[:, ::1001],
        )

    names = ("psum", "all_to_all", "ppermute", "psum_scatter", "all_gather")
    x = (np.arange(8 * 2**20, dtype=np.float32).reshape(8, 2**20) % 251).astype(np.float32)
    return dict(zip(names, manual(mesh(x=8), f, x), strict=True))


@program("shapes/odd_sizes", exact=True)
def odd_sizes() -> dict[str, Any]:
    """Element counts around block and chunk borders."""
    out: dict[str, Any] = {}
    for n in (1, 7, 63, 1025, 65537):
        x = small((8, n), "bfloat16", n)
        out[f"psum{n}"] = manual(mesh(x=8), lambda v: lax.psum(v, "x"), x)
    return out


@program("many/chain", exact=True, **CORE)
def chain() -> dict[str, Any]:
    """Sixty dependent collectives of changing kinds in one program."""

    def f(x: jax.Array) -> jax.Array:
        for i in range(20):
            x = lax.ppermute(x, "x", [(d, (d + i) % 8) for d in range(8)])
            x = lax.all_to_all(x, "x", 1, 1, tiled=True)
            x = lax.psum(x, "x") % 7 + lax.axis_index("x").astype(x.dtype)
        return x

    return {"out": manual(mesh(x=8), f, small((8, 8)))}


@program("many/independent", exact=True)
def independent() -> dict[str, Any]:
    """Forty collectives that do not depend on each other: an order must be agreed on."""

    def f(x: jax.Array) -> jax.Array:
        parts = []
        for i in range(20):
            parts.append(lax.psum(x * i, "a"))
            parts.append(lax.ppermute(x + i, "b", [(0, 1), (1, 2), (2, 3), (3, 0)]))
        return sum(parts[1:], parts[0])

    return {"out": manual(mesh(a=2, b=4), f, small((8, 8)), check_vma=False)}


def small_programs_expected() -> dict[str, np.ndarray]:
    x = small((8, 4), "int32")
    for i in range(200):
        x = x.sum(0, dtype=np.int32) * (i * 7 % 20 + 1) % 11 + x
    return {"out": x}


@program("many/small_programs", exact=True, expected=small_programs_expected)
def small_programs() -> dict[str, Any]:
    """Twenty programs, two hundred calls in flight at once: the CPU backend runs out of threads and hangs."""
    m = mesh(x=8)
    spec = P("x")
    x = place(m, spec, small((8, 4), "int32"))
    steps = [
        jax.jit(
            jax.shard_map(
                lambda v, i=i: lax.psum(v, "x") * (i + 1) % 11 + v,
                mesh=m,
                in_specs=spec,
                out_specs=spec,
            )
        )
        for i in range(20)
    ]
    for i in range(200):
        x = steps[i * 7 % 20](x)
    return {"out": x}
