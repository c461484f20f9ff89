"""Small models that use parallelism as people do: each returns losses or states after a few steps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .common import manual, mesh, normal, place
from .registry import CORE, program

LOOSE = 1e-3


@program("model/transformer_dp_tp", rtol=LOOSE)
def transformer() -> dict[str, Any]:
    """Two transformer layers, data x tensor parallel by shardings alone, three SGD steps."""
    m = mesh(data=2, model=4)
    d, h, f, vocab, length = 16, 4, 32, 11, 6
    specs = {
        "embed": P(None, "model"),
        "qkv": P(None, None, "model", None),
        "out": P("model", None, None),
        "up": P(None, "model"),
        "down": P("model", None),
    }
    shapes = {
        "embed": (vocab, d),
        "qkv": (3, d, h, d // h),
        "out": (h, d // h, d),
        "up": (d, f),
        "down": (f, d),
    }

    def parameters(layer: int) -> dict[str, jax.Array]:
        return {
            k: place(m, specs[k], 0.3 * normal(s, seed=70 + layer * 10 + i))
            for i, (k, s) in enumerate(shapes.items())
            if layer == 0 or k != "embed"
        }

    def loss(layers: list[dict[str, jax.Array]], tokens: jax.Array) -> jax.Array:
        x = layers[0]["embed"][tokens]
        mask = jnp.tril(jnp.ones((length, length), bool))
        for p in layers:
            q, k, v = jnp.einsum("bld,cdhe->cblhe", x, p["qkv"])
            scores = jnp.where(mask, jnp.einsum("blhe,bmhe->bhlm", q, k) / 2, -1e9)
            x = x + jnp.einsum("bhlm,bmhe,hed->bld", jax.nn.softmax(scores), v, p["out"])
            x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        logits = jax.nn.log_softmax(x[:, :-1] @ layers[0]["embed"].T)
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    @jax.jit
    def step(layers: list[dict[str, jax.Array]], tokens: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(layers, tokens)
        return jax.tree.map(lambda p, g: p - 0.5 * g, layers, grads), value

    tokens = np.random.default_rng(79).integers(0, vocab, (8, length)).astype(np.int32)
    batch = place(m, P("data"), tokens)
    layers, losses = [parameters(0), parameters(1)], []
    for _ in range(3):
        layers, value = step(layers, batch)
        losses.append(value)
    result = {f"loss{i}": v for i, v in enumerate(losses)}
    return result | {"up": layers[1]["up"], "embed": layers[0]["embed"]}


@program("model/moe", rtol=LOOSE, **CORE)
def mixture_of_experts() -> dict[str, Any]:
    """One expert a device; tokens travel to their experts and back by all_to_all; with gradient."""

    def layer(x: jax.Array, gate: jax.Array, w: jax.Array) -> jax.Array:
        tokens, capacity = x.shape[0], 4
        expert = jnp.argmax(x @ gate, -1)
        mask = jax.nn.one_hot(expert, 8, dtype=x.dtype)
        slot = ((jnp.cumsum(mask, 0) - 1) * mask).sum(-1).astype(jnp.int32)
        position = jax.nn.one_hot(slot, capacity, dtype=x.dtype)
        dispatch = jnp.einsum("te,tc->tec", mask, position)
        sent = jnp.einsum("tec,td->ecd", dispatch, x)
        received = lax.all_to_all(sent, "x", 0, 0, tiled=True)
        worked = jnp.tanh(received @ w[0])
        back = lax.all_to_all(worked, "x", 0, 0, tiled=True)
        weight = jax.nn.softmax(x @ gate).max(-1)[:, None]
        return x + weight * jnp.einsum("tec,ecd->td", dispatch, back).reshape(tokens, -1)

    def f(x: jax.Array, gate: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = layer(x, gate, w)
        dw = jax.grad(lambda u: (layer(x, gate, u) ** 2).sum())(w)
        return out, dw

    arrays = (normal((64, 8), seed=80), normal((8, 8), seed=81), normal((8, 8, 8), seed=82))
    specs = (P("x"), P(), P("x"))
    out = manual(mesh(x=8), f, *arrays, in_specs=specs, out_specs=(P("x"), P("x")))
    return {"out": out[0], "dw": out[1]}


@program("model/ring_attention", rtol=LOOSE)
def ring_attention() -> dict[str, Any]:
    """Keys and values go round the ring in a scan; a running softmax; with gradient."""
    ring = [(i, (i + 1) % 8) for i in range(8)]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def body(carry: Any, _: None) -> tuple[Any, None]:
            k, v, top, total, out = carry
            scores = q @ k.T
            new = jnp.maximum(top, scores.max(-1))
            scale, p = jnp.exp(top - new), jnp.exp(scores - new[:, None])
            total, out = total * scale + p.sum(-1), out * scale[:, None] + p @ v
            k, v = lax.ppermute((k, v), "x", ring)
            return (k, v, new, total, out), None

        start = (k, v, q[:, 0] * 0 - 1e9, q[:, 0] * 0, v * 0)
        (_, _, _, total, out), _ = lax.scan(body, start, None, length=8)
        return out / total[:, None]

    def f(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        out = attend(q, k, v)
        grads = jax.grad(lambda *a: (attend(*a) ** 2).sum(), argnums=(0, 1, 2))(q, k, v)
        return out, *grads

    out = manual(mesh(x=8), f, *(normal((32, 8), seed=83 + i) for i in range(3)))
    return dict(zip(("out", "dq", "dk", "dv"), out, strict=True))


@program("model/fsdp", rtol=LOOSE, **CORE)
def fsdp() -> dict[str, Any]:
    """Parameters and batch sharded over the same axis; layers scanned; Adam-like states; donated."""
    m = mesh(x=8)
    w = {"w": place(m, P(None, "x"), 0.2 * normal((4, 16, 16), seed=90))}
    state = (w, jax.tree.map(jnp.zeros_like, w))
    batch = place(m, P("x"), normal((16, 16), seed=91))

    def loss(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda h, wi: (jnp.tanh(h @ wi) + h, None))
        return (lax.scan(layer, x, p["w"])[0] ** 2).mean()

    keep = NamedSharding(m, P(None, "x"))

    def step(s: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        p, momentum = s
        value, g = jax.value_and_grad(loss)(p, x)
        momentum = jax.tree.map(
            lambda a, b: lax.with_sharding_constraint(0.9 * a + b, keep), momentum, g
        )
        return (jax.tree.map(lambda a, b: a - 0.1 * b, p, momentum), momentum), value

    compiled = jax.jit(step, donate_argnums=0)
    losses = []
    for _ in range(4):
        state, value = compiled(state, batch)
        losses.append(value)
    return {f"loss{i}": v for i, v in enumerate(losses)} | {"w": state[0]["w"]}


@program("model/pipeline", rtol=LOOSE)
def pipeline() -> dict[str, Any]:
    """GPipe in a scan: eight stages, microbatches handed on by ppermute; differentiated through."""
    micro = 5
    forward = [(i, i + 1) for i in range(7)]

    def run(w: jax.Array, x: jax.Array) -> jax.Array:
        stage = lax.axis_index("x")

        def tick(h: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = jnp.where(stage == 0, x[jnp.minimum(t, micro - 1)], h)
            h = jnp.tanh(h @ w[0])
            return lax.ppermute(h, "x", forward), h

        h0 = lax.pcast(jnp.zeros(x.shape[1:]), "x", to="varying")
        _, outs = lax.scan(tick, h0, jnp.arange(micro + 7))
        return lax.psum(jnp.where(stage == 7, outs[7:], 0), "x")

    def f(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return run(w, x), jax.grad(lambda u: (run(u, x) ** 2).sum())(w)

    arrays = (0.5 * normal((8, 6, 6), seed=92), normal((micro, 3, 6), seed=93))
    out = manual(mesh(x=8), f, *arrays, in_specs=(P("x"), P()), out_specs=(P(), P("x")))
    return {"out": out[0], "dw": out[1]}


@program("model/conjugate_gradient", rtol=LOOSE, **CORE)
def conjugate_gradient() -> dict[str, Any]:
    """A solver with dot products over the mesh and a stopping rule: HPC's usual shape."""
    a = normal((32, 32), seed=94)
    a = (a @ a.T + 32 * np.eye(32)).astype(np.float32)

    def f(rows: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        dot = lambda u, v: lax.psum(u @ v, "x")  # noqa: E731
        multiply = lambda v: rows @ lax.all_gather(v, "x", tiled=True)  # noqa: E731

        def body(s: Any) -> Any:
            x, r, p, rr, n = s
            ap = multiply(p)
            alpha = rr / dot(p, ap)
            x, r = x + alpha * p, r - alpha * ap
            new = dot(r, r)
            return x, r, r + new / rr * p, new, n + 1

        start = (b * 0, b, b, dot(b, b), jnp.int32(0))
        x, _, _, _, n = lax.while_loop(lambda s: (s[3] > 1e-6) & (s[4] < 50), body, start)
        return x, n

    out = manual(mesh(x=8), f, a, normal((32,), seed=95), out_specs=(P("x"), P()))
    return {"x": out[0]}
