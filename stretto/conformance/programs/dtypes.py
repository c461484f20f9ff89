"""Every collective in every dtype, over all eight devices.

Reductions use integers that every dtype sums exactly, so that order and width of the accumulation cannot
show; ``reduce_random`` adds rounding where users meet it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .common import ALL_DTYPES, WIDE, bits, manual, mesh, normal, np_dtype, small
from .registry import ALL_FORMS, Program, add

COMPARABLE = tuple(d for d in ALL_DTYPES if not d.startswith("complex"))
EVERYWHERE = ("float32", "bfloat16", "int8", "bool")


def moves(dtype: str) -> dict[str, Any]:
    """All collectives that only move data."""

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        return (
            lax.all_gather(x, "x"),
            lax.all_gather(x, "x", tiled=True, axis=1),
            lax.all_to_all(x, "x", 1, 0),
            lax.ppermute(x, "x", [(i, (i + 3) % 8) for i in range(8)]),
        )

    names = ("all_gather", "all_gather_tiled", "all_to_all", "ppermute")
    return dict(zip(names, manual(mesh(x=8), f, bits((8, 8, 3), dtype)), strict=True))


def sums(dtype: str) -> dict[str, Any]:
    """psum and psum_scatter of values whose sums are exact."""

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.psum(x, "x"), lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True)

    names = ("psum", "psum_scatter")
    return dict(zip(names, manual(mesh(x=8), f, small((8, 16, 3), dtype, 1)), strict=True))


def extremes(dtype: str) -> dict[str, Any]:
    """pmax and pmin, on values from the dtype's whole range."""

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.pmax(x, "x"), lax.pmin(x, "x")

    return dict(
        zip(("pmax", "pmin"), manual(mesh(x=8), f, bits((8, 16, 3), dtype, 2)), strict=True)
    )


def mean(dtype: str) -> dict[str, Any]:
    return {"pmean": manual(mesh(x=8), lambda x: lax.pmean(x, "x"), normal((8, 5), dtype, 3))}


def quarters() -> dict[str, Any]:
    """XLA's simplifier multiplies by a quarter, which floats of four bits do not have."""

    def f(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float4_e2m1fn)
        return lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)]) / x.dtype.type(4)

    values = np.array([-6, 4, 2, -0.5, 0, 6, -2, 1], np.float32)
    return {"quarters": manual(mesh(x=8), f, values)}


def reduce_random(dtype: str) -> dict[str, Any]:
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.psum(x, "x"), lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True)

    values = normal((8, 1024), dtype, 4)
    return dict(zip(("psum", "psum_scatter"), manual(mesh(x=8), f, values), strict=True))


def special_values() -> np.ndarray:
    """A column each for NaN, infinities of one and of both signs, negative zeros, and mixtures."""
    x = np.zeros((8, 6), np.float32)
    x[3, 0] = np.nan
    x[2, 1] = np.inf
    x[2, 2], x[5, 2] = np.inf, -np.inf
    x[:, 3] = -0.0
    x[7, 4] = -np.inf
    x[0, 5], x[1, 5] = np.nan, np.inf
    return x


def special_floats(dtype: str) -> dict[str, Any]:
    """NaN wins in sum, max and min (in the CPU backend's max and min it depends on the device)."""

    def f(v: jax.Array) -> tuple[jax.Array, ...]:
        v = v.astype(jnp.dtype(dtype))
        return lax.psum(v, "x"), lax.pmax(v, "x"), lax.pmin(v, "x")

    return dict(zip(("psum", "pmax", "pmin"), manual(mesh(x=8), f, special_values()), strict=True))


def special_expected(dtype: str) -> dict[str, np.ndarray]:
    x = special_values()
    with np.errstate(invalid="ignore"):
        rows = {"psum": x.sum(0), "pmax": x.max(0), "pmin": x.min(0)}
    return {k: np.broadcast_to(v, x.shape).astype(np_dtype(dtype)) for k, v in rows.items()}


def register() -> None:
    for dtype in ALL_DTYPES:
        options: dict[str, Any] = {"x64": dtype in WIDE, "exact": True}
        if dtype in EVERYWHERE:
            options["forms"] = ALL_FORMS
        add(Program(f"moves/{dtype}", partial(moves, dtype), **options))
        if dtype != "bool":
            add(Program(f"sums/{dtype}", partial(sums, dtype), **options))
        if dtype in COMPARABLE:
            add(Program(f"extremes/{dtype}", partial(extremes, dtype), **options))
    for dtype in ("float8_e8m0fnu", "float4_e2m1fn"):
        add(Program(f"moves/{dtype}", partial(moves, dtype), exact=True))
    add(Program("quarters/float4_e2m1fn", quarters, exact=True))
    for dtype in ("float32", "bfloat16", "float16", "float64", "complex64", "complex128"):
        x64 = dtype in WIDE
        add(Program(f"mean/{dtype}", partial(mean, dtype), x64=x64))
        add(Program(f"reduce_random/{dtype}", partial(reduce_random, dtype), x64=x64))
    for dtype in ("float32", "bfloat16", "float16", "float64", "float8_e5m2"):
        x64 = dtype in WIDE
        add(
            Program(
                f"special_floats/{dtype}",
                partial(special_floats, dtype),
                expected=partial(special_expected, dtype),
                exact=True,
                x64=x64,
            )
        )


register()
