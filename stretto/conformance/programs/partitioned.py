"""``jit`` over a mesh with shardings: the partitioner, not the program, makes the collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .common import mesh, normal, place, small
from .registry import CORE, Program, add, program

LEFT = {"rows": P("a", None), "columns": P(None, "a"), "both": P("a", "b"), "replicated": P()}
RIGHT = {"rows": P("b", None), "columns": P(None, "b"), "both": P("b", "a"), "replicated": P()}
RESULT = {"rows": P(("a", "b"), None), "both": P("a", "b"), "replicated": P()}


def matmul(left: str, right: str, result: str) -> dict[str, Any]:
    m = mesh(a=2, b=4)
    x, y = (
        place(m, LEFT[left], normal((16, 24), seed=50)),
        place(m, RIGHT[right], normal((24, 8), seed=51)),
    )
    f = jax.jit(jnp.matmul, out_shardings=NamedSharding(m, RESULT[result]))
    return {"out": f(x, y)}


for lhs in LEFT:
    for rhs in RIGHT:
        for res in RESULT:
            chosen = (lhs, rhs, res) in (
                ("rows", "columns", "both"),
                ("columns", "rows", "replicated"),
                ("both", "both", "both"),
                ("both", "replicated", "rows"),
                ("replicated", "columns", "rows"),
            )
            run = partial(matmul, lhs, rhs, res)
            add(Program(f"matmul/{lhs}-{rhs}-{res}", run, only_full=not chosen))


def simple(
    name: str,
    f: Callable[..., Any],
    *arrays: tuple[np.ndarray, P],
    out: P | None = None,
    **options: Any,
) -> None:
    """Register ``jit(f)`` on arrays placed over the 2 x 4 mesh (axes a, b); results named by position."""

    def run() -> dict[str, Any]:
        m = mesh(a=2, b=4)
        placed = [place(m, spec, value) for value, spec in arrays]
        shardings: dict[str, Any] = {} if out is None else {"out_shardings": NamedSharding(m, out)}
        results = jax.jit(f, **shardings)(*placed)
        return {str(i): r for i, r in enumerate(jax.tree.leaves(results))}

    add(Program(f"partitioned/{name}", run, **options))


MATRIX = normal((16, 32), seed=52)
ROWS, BOTH, FLAT = P(("a", "b")), P("a", "b"), P(None, ("b", "a"))

simple("sum_all", lambda x: (x.sum(), x.sum(0), x.mean(1), x.var()), (MATRIX, BOTH), **CORE)
simple(
    "max_argmax",
    lambda x: (x.max(0), x.argmax(0), x.argmin(1), x.any()),
    (MATRIX, BOTH),
    exact=True,
)
simple("reshard_transpose", lambda x: x.T * 2, (MATRIX, BOTH), out=BOTH, exact=True, **CORE)
simple("reshard_rows_columns", lambda x: x + 1, (MATRIX, ROWS), out=FLAT, exact=True)
simple("replicate", lambda x: x + 1, (MATRIX, FLAT), out=P(), exact=True)
simple("reshape", lambda x: x.reshape(8, 64).reshape(64, 8), (MATRIX, BOTH), out=BOTH, exact=True)
simple("roll", lambda x: jnp.roll(x, (3, 5), (0, 1)), (MATRIX, BOTH), out=BOTH, exact=True)
simple("reverse", lambda x: x[::-1, ::-1], (MATRIX, BOTH), out=BOTH, exact=True)
simple("slice_pad", lambda x: jnp.pad(x[1:-2, 3:30], ((0, 3), (5, 0))), (MATRIX, BOTH), exact=True)
simple("concatenate", lambda x: jnp.concatenate([x, x * 2, x[:4]]), (MATRIX, ROWS), exact=True)
simple("sort", lambda x: (jnp.sort(x, 0), jnp.argsort(x, 1)), (MATRIX, BOTH), exact=True)
simple("top_k", lambda x: lax.top_k(x, 5), (MATRIX, BOTH), exact=True)
simple("cumsum", lambda x: (jnp.cumsum(x, 0), jnp.cumsum(x, 1)), (MATRIX, BOTH))
simple("softmax", lambda x: jax.nn.softmax(x, 0) + jax.nn.logsumexp(x, 1)[:, None], (MATRIX, BOTH))
simple(
    "gather_rows",
    lambda x, i: (x[i], jnp.take(x, i, axis=1)),
    (MATRIX, BOTH),
    (np.array([3, 15, 0, 7, 7, 1, 2, 14], np.int32), P("b")),
    exact=True,
)
simple(
    "scatter_add",
    lambda x, i: (x.at[i].add(1.5), x.at[:, i].set(0)),
    (MATRIX, BOTH),
    (np.array([3, 15, 0, 7, 7, 1, 2, 14], np.int32), P("b")),
)
simple(
    "rows_by_number",
    lambda x, i: (
        x[jnp.arange(16), i],
        jax.grad(lambda x: jnp.sin(x[jnp.arange(16), i]).sum())(x),
        x.at[jnp.arange(16), i].set(1.5),
        x.at[jnp.arange(16)[:, None], i[:, None] + jnp.arange(3)].add(0.5),
        x.at[3:9].set(2.5),
    ),
    (MATRIX, ROWS),
    (np.array([3, 15, 0, 7, 7, 1, 2, 14, 4, 9, 9, 0, 29, 8, 6, 5], np.int32), ROWS),
    exact=True,
)
simple(
    "dynamic_slice",
    lambda x, i: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (i, 3), (4, 9)) * 2, (i + 2, 11)),
    (MATRIX, BOTH),
    (np.full((), 5, np.int32), P()),
    exact=True,
)
simple("fft", lambda x: jnp.fft.fft2(x).real, (MATRIX, ROWS))
simple(
    "convolution",
    lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME"),
    (normal((4, 3, 16, 16), seed=53), P("a", None, "b")),
    (normal((8, 3, 3, 3), seed=54), P()),
)
simple(
    "pooling",
    lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (1, 1), "SAME"),
    (MATRIX, BOTH),
)
simple("einsum", lambda x, y: jnp.einsum("ij,kj,ik->k", x, y, y.T @ x), (normal((32, 32), seed=5), BOTH),
       (normal((32, 32), seed=6), FLAT))  # fmt: skip
simple("uneven", lambda x: (x @ x.T).sum(0), (normal((16, 20), seed=55), P("a", "b")), out=P())
simple(
    "integers",
    lambda x: (x.sum(0), (x % 3).prod(1)),
    (small((16, 32), "int32", 56), BOTH),
    exact=True,
)
simple("bfloat16", lambda x: (x @ x.T, x.sum()), (normal((16, 32), "bfloat16", 57), BOTH))
simple(
    "x64",
    lambda x: (x @ x.T, jnp.linalg.norm(x)),
    (normal((16, 32), "float64", 58), BOTH),
    x64=True,
)
simple("cholesky", lambda x: jnp.linalg.cholesky(x @ x.T + 32 * jnp.eye(16)), (MATRIX, BOTH))
simple("eigh", lambda x: jnp.linalg.eigvalsh(x @ x.T), (MATRIX, BOTH), rtol=1e-4)
simple("qr", lambda x: jnp.abs(jnp.linalg.qr(x.T)[1]), (MATRIX, BOTH), rtol=1e-4)
simple("svd", lambda x: jnp.linalg.svd(x, compute_uv=False), (MATRIX, BOTH), rtol=1e-4)
simple("solve", lambda x: jnp.linalg.solve(x @ x.T + 9 * jnp.eye(16), x), (MATRIX, BOTH), rtol=1e-3)
simple(
    "batched_linalg",
    lambda x: (jnp.linalg.det(x), jnp.linalg.inv(x)),
    (normal((8, 4, 4), seed=59) + 4 * np.eye(4, dtype=np.float32), ROWS),
    rtol=1e-3,
)
simple(
    "while_in_jit",
    lambda x: lax.while_loop(
        lambda s: jnp.abs(s[0]).sum() > 1, lambda s: (s[0] * 0.7, s[1] + 1), (x, 0)
    ),
    (MATRIX, BOTH),
    **CORE,
)
simple(
    "scan_in_jit",
    lambda x: lax.scan(
        lambda c, r: (jnp.tanh(c + r @ x), c.sum()), x.sum(0), jnp.stack([x.T.sum(0)] * 5)
    ),
    (MATRIX, BOTH),
)
simple("grad", jax.grad(lambda v: jnp.sin(v @ v.T).sum()), (MATRIX, BOTH), rtol=1e-3)
simple("no_collective", lambda x: jnp.exp(x) * 2, (MATRIX, BOTH), **CORE)
simple("many_outputs", lambda x: [x.sum() * i + i for i in range(30)], (MATRIX, BOTH))
simple("passthrough", lambda x: (x, x, 3.0), (MATRIX, BOTH), exact=True)


@program("partitioned/constraint", **CORE)
def constraint() -> dict[str, Any]:
    """Shardings that change in the middle of a program."""
    m = mesh(a=2, b=4)
    at = lambda v, *spec: lax.with_sharding_constraint(v, NamedSharding(m, P(*spec)))  # noqa: E731

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        y = at(x @ x.T, "a", "b")
        y = at(jnp.sin(y), ("a", "b"), None)
        y = at(y.T + 1, None, ("b", "a"))
        return at(y, "b", "a")

    return {"out": f(place(m, P("a", "b"), MATRIX))}


def constraint_gspmd() -> dict[str, Any]:
    return constraint()


add(Program("gspmd/constraint", constraint_gspmd, shardy=False))
add(Program("gspmd/matmul", partial(matmul, "columns", "rows", "both"), shardy=False))


@program("gspmd/shard_map", shardy=False, exact=True)
def shard_map_gspmd() -> dict[str, Any]:
    """shard_map inside jit under the older partitioner, with work around it."""
    return nested_shard_map()


@program("mixed/shard_map_in_jit", exact=True, **CORE)
def nested_shard_map() -> dict[str, Any]:
    m = mesh(a=2, b=4)
    local = jax.shard_map(
        lambda v: lax.psum(v, "a") + lax.ppermute(v, "b", [(i, (i + 1) % 4) for i in range(4)]),
        mesh=m,
        in_specs=P("a", "b"),
        out_specs=P("a", "b"),
    )

    @jax.jit
    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            c = local(c) % 9 + jnp.flip(c, 0)
            return c, c.sum()

        return lax.scan(body, x, None, length=4)

    carry, sums = f(place(m, P("a", "b"), small((8, 16), "int32", 60)))
    return {"carry": carry, "sums": sums}


@program("mixed/partial_manual", exact=True)
def partial_manual() -> dict[str, Any]:
    """Manual over one axis, automatic over the other."""
    m = mesh(a=2, b=4)

    def local(v: jax.Array) -> jax.Array:
        return lax.psum(v, "a") * 2 + v.sum(1, keepdims=True)

    f = jax.jit(jax.shard_map(local, mesh=m, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}))
    return {"out": f(place(m, P("a", "b"), small((8, 16), "int32", 61)))}


@program("explicit_axes", **CORE)
def explicit_axes() -> dict[str, Any]:
    """Explicit mesh axes: shardings are part of the types."""
    m = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(m):
        x = place(m, P("a", "b"), MATRIX)

        @jax.jit
        def f(v: jax.Array) -> tuple[jax.Array, jax.Array]:
            gram = jnp.einsum("ij,kj->ik", v, v, out_sharding=P("a", None))
            return jax.sharding.reshard(gram, P(None, "b")), v.sum(0)

        gram, sums = f(x)
    return {"gram": gram, "sums": sums}


@program("make_mesh", exact=True)
def made_mesh() -> dict[str, Any]:
    """Meshes of jax.make_mesh, with the axis types that this JAX gives by default."""
    m = jax.make_mesh((4, 2), ("a", "b"))
    with jax.set_mesh(m):
        x = place(m, P("a", "b"), small((8, 16), "int32", 62))
        return {"sum": jax.jit(lambda v: v.sum(0) + 1)(x), "plus": jax.jit(lambda v: v + v)(x)}


@program("donation", **CORE)
def donation() -> dict[str, Any]:
    """Donated inputs are deleted, and the result is right whether or not the memory was reused."""
    m = mesh(a=2, b=4)
    x, y = place(m, P("a", "b"), MATRIX), place(m, P("a", "b"), MATRIX + 1)
    f = jax.jit(lambda u, v: (u * 2 + v.mean(), v), donate_argnums=(0, 1))
    first, second = f(x, y)
    deleted = np.array([x.is_deleted(), y.is_deleted()])
    return {"first": first, "second": second, "deleted": deleted}
