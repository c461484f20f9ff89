"""Collectives in loops and branches, with trip counts and choices that depend on data and differ by group."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from .common import manual, mesh, normal, place, small
from .registry import CORE, program

RING = [(i, (i + 1) % 8) for i in range(8)]


@program("loops/fori_psum", exact=True, **CORE)
def fori_psum() -> dict[str, Any]:
    def f(x: jax.Array) -> jax.Array:
        body = lambda i, v: (lax.psum(v, "x") + v * i) % 13  # noqa: E731
        return lax.fori_loop(0, 50, lambda i, v: lax.pcast(body(i, v), (), to="varying"), x)

    return {"out": manual(mesh(x=8), f, small((8, 8), "int32"))}


@program("loops/scan_stack", exact=True, **CORE)
def scan_stack() -> dict[str, Any]:
    """A scan that consumes slices, carries, and stacks its outputs."""

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            carry = lax.ppermute(carry + row, "x", RING)
            return carry, lax.psum(carry, "x") % 5 + carry

        carry, stacked = lax.scan(body, x[0, 0], x[0])
        return carry[None], stacked[None]

    out = manual(mesh(x=8), f, small((8, 12, 4), "int32", 3))
    return {"carry": out[0], "stacked": out[1]}


@program("loops/scan_reverse_unroll", exact=True)
def scan_reverse_unroll() -> dict[str, Any]:
    def f(x: jax.Array) -> jax.Array:
        def body(c: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            c = lax.psum(row, "x") + c
            return c, c * 2

        c0 = jnp.zeros(4, x.dtype)
        return lax.scan(body, c0, x[0], reverse=True, unroll=3)[1][None]

    return {"out": manual(mesh(x=8), f, small((8, 10, 4), "int32", 4))}


@program("loops/while_data_dependent", **CORE)
def while_data_dependent() -> dict[str, Any]:
    """All devices leave together, when the global residual is small enough."""

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def cond(s: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            return s[1] > 1e-2

        def body(
            s: tuple[jax.Array, jax.Array, jax.Array],
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            v, _, n = s
            v = 0.5 * v + 0.5 * lax.ppermute(v, "x", RING)
            mean = lax.pmean(v, "x")
            return v, lax.pmax(jnp.abs(v - mean).max(), "x"), n + 1

        v, _, n = lax.while_loop(cond, body, (x, jnp.float32(1.0), jnp.int32(0)))
        return v, n

    out = manual(mesh(x=8), f, normal((8, 4), seed=5), out_specs=(P("x"), P()))
    return {"v": out[0], "n": out[1]}


@program("loops/nested", exact=True, **CORE)
def nested() -> dict[str, Any]:
    """A loop in a loop in a loop, collectives at every depth, inner trip count from the outer index."""

    def f(x: jax.Array) -> jax.Array:
        def inner(j: jax.Array, v: jax.Array) -> jax.Array:
            return lax.ppermute(v, "x", RING) + 1

        def middle(i: jax.Array, v: jax.Array) -> jax.Array:
            v = lax.fori_loop(0, i % 3, inner, v)
            return (v + lax.psum(v, "x")) % 17

        def outer(k: jax.Array, v: jax.Array) -> jax.Array:
            v = lax.fori_loop(0, k + 2, middle, v)
            return (lax.all_to_all(v, "x", 1, 1, tiled=True) + k) % 19

        return lax.fori_loop(0, 4, outer, x)

    return {"out": manual(mesh(x=8), f, small((8, 8), "int32", 6))}


@program("loops/zero_trips", exact=True)
def zero_trips() -> dict[str, Any]:
    def f(x: jax.Array, n: jax.Array) -> jax.Array:
        return lax.fori_loop(0, n, lambda i, v: lax.ppermute(v, "x", RING), x)

    n = np.zeros((), np.int32)
    return {"out": manual(mesh(x=8), f, small((8, 3)), n, in_specs=(P("x"), P()), out_specs=P("x"))}


@program("loops/compute_only", exact=True)
def compute_only() -> dict[str, Any]:
    """A loop without collectives between two collectives, and a collective's result as trip count."""

    def f(x: jax.Array) -> jax.Array:
        n = lax.psum(x[0, 0] * 0 + 1, "x")
        v = lax.psum(x, "x")
        v = lax.fori_loop(0, n, lambda i, u: (u * 3 + i) % 101, v)
        return lax.psum_scatter(jnp.tile(v, (1, 8)), "x", scatter_dimension=1, tiled=True)

    return {"out": manual(mesh(x=8), f, small((8, 4), "int32", 7))}


@program("loops/invariant_gather", **CORE)
def invariant_gather() -> dict[str, Any]:
    """A gather that does not depend on the loop, beside one that does; a big carry updated in place."""

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(i: jax.Array, acc: jax.Array) -> jax.Array:
            full = lax.all_gather(w, "x", tiled=True)
            row = jnp.tanh(x[0] @ full.T + i)
            row = lax.ppermute(row, "x", RING)
            return lax.dynamic_update_slice(acc, row[None], (i, 0))

        acc = lax.pcast(jnp.zeros((64, 8), jnp.float32), "x", to="varying")
        return lax.fori_loop(0, 64, body, acc)[None]

    return {"out": manual(mesh(x=8), f, normal((8, 16), seed=1), normal((8, 16), seed=2))}


@program("branches/cond", exact=True, **CORE)
def cond() -> dict[str, Any]:
    """Both ways of a branch, the same on every device, from a value that only the device knows."""

    def f(x: jax.Array) -> jax.Array:
        for threshold in (-100, 100):
            total = lax.psum(x.sum(), "x")
            x = lax.cond(
                total > threshold,
                lambda v: lax.ppermute(v, "x", RING),
                lambda v: v + lax.psum(v, "x"),
                x,
            )
        return x

    return {"out": manual(mesh(x=8), f, small((8, 5), "int32", 8))}


@program("branches/switch_in_scan", exact=True, **CORE)
def switch_in_scan() -> dict[str, Any]:
    def f(x: jax.Array) -> jax.Array:
        branches = [
            lambda v: lax.ppermute(v, "x", RING),
            lambda v: lax.all_to_all(v, "x", 1, 1, tiled=True),
            lambda v: v + 1,
            lambda v: v * 0 + lax.pmax(v, "x"),
        ]

        def body(v: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            return lax.switch(i, branches, v), None

        return lax.scan(body, x, jnp.array([0, 1, 2, 1, 3, 0, 9, -1, 2]) % 5)[0]

    return {"out": manual(mesh(x=8), f, small((8, 8), "int32", 9), check_vma=False)}


@program("branches/compute_only_differs", exact=True, **CORE)
def compute_only_differs() -> dict[str, Any]:
    """A branch without collectives that each device takes its own way."""

    def f(x: jax.Array) -> jax.Array:
        i = lax.axis_index("x")
        x = lax.cond(i % 3 == 0, lambda v: v * 10, lambda v: v - i.astype(v.dtype), x)
        return x + lax.psum(x, "x")

    return {"out": manual(mesh(x=8), f, small((8, 5), "int32", 8))}


@program("divergence/while_by_group", **CORE)
def while_by_group() -> dict[str, Any]:
    """Each group along b converges on its own: another number of iterations for each position on a."""

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def cond(s: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            return s[1] > 1e-3

        def body(
            s: tuple[jax.Array, jax.Array, jax.Array],
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            v, _, n = s
            v = v * 0.5
            return v, lax.psum(jnp.abs(v).sum(), "b"), n + 1

        start = lax.pcast(jnp.float32(1), "a", to="varying")
        count = lax.pcast(jnp.int32(0), "a", to="varying")
        v, _, n = lax.while_loop(cond, body, (x, start, count))
        return v, n[None]

    scale = np.repeat(10.0 ** np.arange(4), 2)[:, None].astype(np.float32)
    x = scale * (1 + np.abs(normal((8, 3), seed=10)))
    out = manual(mesh(a=4, b=2), f, x, out_specs=(P(("a", "b")), P("a")))
    return {"v": out[0], "n": out[1]}


@program("divergence/fori_by_group", exact=True, **CORE)
def fori_by_group() -> dict[str, Any]:
    """Trip count = the group's index; a collective after the loop joins all of them."""

    def f(x: jax.Array) -> jax.Array:
        n = lax.axis_index("a")
        x = lax.fori_loop(0, n, lambda i, v: v + lax.psum(v, "b") % 7, x)
        return x + lax.psum(x, ("a", "b"))

    return {"out": manual(mesh(a=4, b=2), f, small((8, 4), "int32", 11), check_vma=False)}


@program("divergence/cond_by_group", exact=True, **CORE)
def cond_by_group() -> dict[str, Any]:
    """Half of the groups take the branch with the reduction, the others one without or with another."""

    def f(x: jax.Array) -> jax.Array:
        a = lax.axis_index("a")
        x = lax.cond(a % 2 == 0, lambda v: v + lax.psum(v, "b"), lambda v: v - 1, x)
        return lax.switch(
            a,
            [
                lambda v: v + lax.pmax(v, "b"),
                lambda v: v,
                lambda v: v * lax.psum(v, "b"),
                lambda v: v - lax.pmin(v, "b"),
            ],
            x,
        )

    return {"out": manual(mesh(a=4, b=2), f, small((8, 4), "int32", 12), check_vma=False)}


@program("divergence/nested", exact=True, **CORE)
def divergence_nested() -> dict[str, Any]:
    """A scan whose body branches by group into a loop of its own length."""

    def f(x: jax.Array) -> jax.Array:
        a = lax.axis_index("a")

        def looped(v: jax.Array) -> jax.Array:
            return lax.fori_loop(0, a + 1, lambda i, u: (u + lax.psum(u, "b")) % 23, v)

        def body(v: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
            v = lax.cond((a + i) % 2 == 0, looped, lambda u: u + 1, v)
            return (v + lax.psum(v, "a")) % 29, None

        return lax.scan(body, x, jnp.arange(5))[0]

    return {"out": manual(mesh(a=4, b=2), f, small((8, 4), "int32", 13), check_vma=False)}


@program("loops/handed_through", exact=True)
def handed_through() -> dict[str, Any]:
    """Loops that run no time, and bodies and branches that hand on what they were given: the same array under
    several names, one of which is given up while another is still read."""
    m, spec = mesh(x=8), P("x")
    given = np.arange(8 * 32 * 32, dtype=np.float32).reshape(8 * 32, 32) % 7

    def no_times(x: jax.Array, n: jax.Array) -> tuple[jax.Array, ...]:
        y = lax.fori_loop(0, n, lambda i, a: lax.psum(a, "x"), x)
        return x + y, y

    def its_own(x: jax.Array, n: jax.Array) -> tuple[jax.Array, ...]:
        y = lax.psum(x, "x") % 7
        z = lax.fori_loop(0, n, lambda i, a: lax.pmax(a, "x"), y)
        return y, z, y * 3, z - x

    def swapped(x: jax.Array, n: jax.Array) -> tuple[jax.Array, ...]:
        def body(i: jax.Array, c: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return c[1], c[0], lax.pmax(c[2], "x")

        a, b, c = lax.fori_loop(0, 3, body, (x, x * 2, x * 3))
        return a + 1, b + 1, c, a * b

    def nested(x: jax.Array, n: jax.Array) -> tuple[jax.Array, ...]:
        def body(i: jax.Array, c: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            y = lax.fori_loop(0, n, lambda j, a: lax.pmax(a, "x"), c[0])
            return c[0] * 2 + 1, y

        a, b = lax.fori_loop(0, 3, body, (x, x))
        return a, b, a + b

    def branched(x: jax.Array, n: jax.Array) -> tuple[jax.Array, ...]:
        y = lax.cond(n > 0, lambda a: lax.psum(a, "x"), lambda a: a, x)
        z = lax.switch(n, [lambda a, b: (a, b), lambda a, b: (b, lax.psum(a, "x"))], x, y)
        return x + 1, y, *z

    # What comes out is nobody else's: it can be given up, one after the other.
    give_up = jax.jit(lambda a: a + 1, donate_argnums=0)
    results: dict[str, Any] = {}
    for f in (no_times, its_own, swapped, nested, branched):
        mapped = jax.shard_map(f, mesh=m, in_specs=(spec, P()), out_specs=spec, check_vma=False)
        for donated in (False, True):
            compiled = jax.jit(mapped, donate_argnums=0 if donated else ())
            for n in (0, 1):
                x = place(m, spec, given)
                made = compiled(x, place(m, P(), np.array(n, np.int32)))
                name = f"{f.__name__} {n} {donated}"
                results |= {f"{name} {k}": give_up(array) for k, array in enumerate(made)}
                if not donated:
                    results[f"{name} kept"] = x
    return results
