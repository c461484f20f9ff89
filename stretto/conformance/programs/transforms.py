"""JAX's transformations through collectives: grad, jvp, vmap, remat, custom_vjp, linearize."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from .common import manual, mesh, normal, place
from .registry import CORE, program

RING = [(i, (i + 1) % 8) for i in range(8)]


def everything(x: jax.Array) -> jax.Array:
    """A differentiable function that uses all collectives once; x: (1, 8, 4) on each device."""
    y = jnp.sin(x) * lax.psum(jnp.cos(x), "x")
    y = y + lax.all_to_all(y, "x", 1, 1, tiled=True)
    y = lax.ppermute(y, "x", RING) * x
    z = lax.psum_scatter(y, "x", scatter_dimension=1, tiled=True)
    w = lax.all_gather(z * z, "x", axis=1, tiled=True)
    return (w * y).sum() + lax.pmean(y, "x").sum()


@program("grad/inside", **CORE)
def grad_inside() -> dict[str, Any]:
    """Gradient taken inside shard_map."""

    def f(x: jax.Array) -> jax.Array:
        return jax.grad(lambda v: lax.psum(everything(v), "x"))(x)

    return {"out": manual(mesh(x=8), f, normal((8, 8, 4), seed=30))}


@program("grad/outside", **CORE)
def grad_outside() -> dict[str, Any]:
    """Gradient taken of a shard_map, with a replicated and a sharded argument."""
    m = mesh(x=8)

    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.psum(everything(jnp.tanh(x * w)), "x")

    loss = jax.shard_map(local, mesh=m, in_specs=(P(), P("x")), out_specs=P())
    w, x = place(m, P(), normal((4,), seed=31)), place(m, P("x"), normal((8, 8, 4), seed=32))
    value, (dw, dx) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(w, x)
    return {"value": value, "dw": dw, "dx": dx}


@program("grad/scan")
def grad_scan() -> dict[str, Any]:
    """A scan of collectives differentiated in reverse: residuals are stacked and read back."""
    m = mesh(x=8)

    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, wi: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.tanh(h @ wi + lax.ppermute(h, "x", RING))
            return h, lax.pmean(h.sum(), "x")

        h, means = lax.scan(body, x, w)
        return lax.psum((h**2).sum(), "x") + means.sum()

    loss = jax.shard_map(local, mesh=m, in_specs=(P(), P("x")), out_specs=P())
    w, x = place(m, P(), normal((5, 4, 4), seed=33)), place(m, P("x"), normal((8, 4), seed=34))
    dw, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, x)
    return {"dw": dw, "dx": dx}


@program("grad/remat")
def grad_remat() -> dict[str, Any]:
    """Rematerialized collectives run again in the backward pass."""

    def f(x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda v: jnp.sin(lax.all_gather(v, "x", axis=1, tiled=True)).sum(1))
        return jax.grad(lambda v: lax.psum((layer(v) ** 2).sum(), "x"))(x)

    return {"out": manual(mesh(x=8), f, normal((8, 8, 4), seed=35))}


@program("jvp")
def jvp() -> dict[str, Any]:
    def f(x: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, tangent = jax.jvp(everything, (x,), (t,))
        return out[None], tangent[None]

    out = manual(mesh(x=8), f, normal((8, 8, 4), seed=36), normal((8, 8, 4), seed=37))
    return {"out": out[0], "tangent": out[1]}


@program("vjp_of_vmap")
def vjp_of_vmap() -> dict[str, Any]:
    def f(x: jax.Array) -> jax.Array:
        batched = jax.vmap(lambda v: lax.psum(jnp.sin(v), "x") * v)
        return jax.vjp(batched, x)[1](jnp.ones_like(x))[0]

    return {"out": manual(mesh(x=8), f, normal((8, 8, 4), seed=38))}


@program("vmap/axes", exact=True)
def vmap_axes() -> dict[str, Any]:
    """Collectives over a mesh axis, a vmapped axis, and both at once."""

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        over = partial(jax.vmap, axis_name="v", in_axes=1, out_axes=1)
        x = jnp.round(x * 4)
        return (
            over(lambda u: lax.psum(u, "x"))(x),
            over(lambda u: lax.psum(u, "v"))(x),
            over(lambda u: lax.psum(u, ("x", "v")))(x),
            over(lambda u: lax.all_gather(u, "x", tiled=True))(x),
            over(lambda u: lax.ppermute(u, "x", RING))(x),
            over(lambda u: lax.all_to_all(u, "x", 1, 1, tiled=True))(x),
        )

    names = ("mesh", "vmapped", "both", "all_gather", "ppermute", "all_to_all")
    out = manual(mesh(x=8), f, normal((8, 3, 16), seed=39), check_vma=False)
    return dict(zip(names, out, strict=True))


@program("custom_vjp")
def custom_vjp() -> dict[str, Any]:
    """The tensor-parallel pair: identity forward and psum backward, and the other way around."""

    @jax.custom_vjp
    def enter(x: jax.Array) -> jax.Array:
        return x

    enter.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "x"),))

    @jax.custom_vjp
    def leave(x: jax.Array) -> jax.Array:
        return lax.psum(x, "x")

    leave.defvjp(lambda x: (lax.psum(x, "x"), None), lambda _, g: (g,))

    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda v, u: (leave(jnp.tanh(enter(v) @ u)) ** 2).sum(), argnums=(0, 1))(
            x, w
        )

    specs = {"in_specs": (P(), P(None, "x")), "out_specs": (P(), P(None, "x"))}
    out = manual(
        mesh(x=8), f, normal((4, 8), seed=40), normal((8, 16), seed=41), check_vma=False, **specs
    )
    return {"dx": out[0], "dw": out[1]}


@program("hessian_vector")
def hessian_vector() -> dict[str, Any]:
    def f(x: jax.Array) -> jax.Array:
        loss = lambda v: lax.psum((jnp.sin(v) * lax.pmean(v, "x")).sum(), "x")  # noqa: E731
        return jax.jvp(jax.grad(loss), (x,), (jnp.ones_like(x),))[1]

    return {"out": manual(mesh(x=8), f, normal((8, 6), seed=42))}
