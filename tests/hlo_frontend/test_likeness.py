"""Keys of segment plans: equal only where the modules are, and equal where layers are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, manual, mesh
from jax import lax

from stretto.hlo_frontend.likeness import Likeness
from stretto.hlo_frontend.segments import ModuleBuilder, SegmentPool

LAYERS = 4
X = np.arange(16, dtype=np.float32).reshape(4, 4) - 7
WEIGHTS = np.linspace(-1.0, 1.0, LAYERS * 16, dtype=np.float32).reshape(LAYERS, 4, 4)


def layer(x, w):
    total = lax.psum(x @ w, "x")
    return jnp.tanh(total - total.max(1, keepdims=True)) * 0.5


def separate(x, *weights):
    for w in weights:
        x = layer(x, w)
    return x


def gradient(x, *weights):
    return jax.grad(lambda w: separate(x, *w).sum())(weights)


def computed_again(x, *weights):
    """The backward pass computes each layer again, behind a barrier."""

    def loss(weights):
        a = x
        for w in weights:
            a = jax.checkpoint(layer)(a, w)
        return a.sum()

    return jax.grad(loss)(weights)


def stacked(x, *weights):
    """Slices at different offsets, which become an input, and pads."""
    return jax.grad(lambda w: separate(x, *w).sum())(jnp.stack(weights) * x[0, 0])


def sorted_(x, *weights):
    """Computations that are called, and results that are several."""
    for w in weights:
        x = lax.psum(lax.sort((x, x @ w), num_keys=1)[1], "x")
    return x


EQUAL = {f.__name__: f for f in (separate, gradient, computed_again, stacked, sorted_)}

# Steps between collectives that are alike but for one thing.
DIFFERENT = {
    "constant": [lambda a: a * 2 + 1, lambda a: a * 2 + 3],
    "array of constants": [lambda a: a + np.eye(4), lambda a: a + np.tri(4)],
    "opcode": [jnp.sin, jnp.cos],
    "order of operands": [lambda a: jnp.sin(a) - jnp.cos(a), lambda a: jnp.cos(a) - jnp.sin(a)],
    "which operand": [
        lambda a: (jnp.sin(a), jnp.sin(a) @ jnp.cos(a))[1],
        lambda a: (jnp.sin(a), jnp.cos(a) @ jnp.cos(a))[1],
    ],
    "attribute": [lambda a: a @ a, lambda a: a @ a.T, lambda a: a.T @ a],
    "dimension": [lambda a: a.sum(0) + a, lambda a: a.sum(1) + a],
    "reducer": [
        lambda a: a + lax.reduce(a, np.float32(2), lax.add, (0,)),
        lambda a: a + lax.reduce(a, np.float32(2), lax.mul, (0,)),
    ],
    "comparator": [
        lambda a: lax.sort(a, 0),
        lambda a: lax.sort(a, 1),
        lambda a: -lax.sort(-a, 0),
    ],
    "offset": [lambda a: a[:2].sum() + a, lambda a: a[1:3].sum() + a],
    "type": [
        lambda a: a.astype(jnp.bfloat16).astype(jnp.float32) * 3,
        lambda a: a.astype(jnp.float16).astype(jnp.float32) * 3,
    ],
    "number of operands": [
        lambda a: lax.sort(jnp.concatenate([jnp.sin(a), a]), 0)[2:6],
        lambda a: lax.sort(jnp.concatenate([jnp.sin(a), a, a]), 0)[2:6],
    ],
    "barrier": [
        lambda a: jnp.subtract(*lax.optimization_barrier((jnp.sin(a), jnp.cos(a)))),
        lambda a: jnp.subtract(*lax.optimization_barrier((jnp.sin(a), jnp.cos(a)))[::-1]),
        lambda a: jnp.subtract(*lax.optimization_barrier((jnp.sin(a), a * 2))),
    ],
    "what enters a barrier": [
        lambda a: (
            jnp.sin(a) @ jnp.cos(a)
            - jnp.subtract(*lax.optimization_barrier((jnp.sin(a), jnp.cos(a))))
        ),
        lambda a: (
            jnp.sin(a) @ jnp.cos(a)
            - jnp.subtract(*lax.optimization_barrier((jnp.cos(a), jnp.sin(a))))
        ),
    ],
    "iterations": [
        lambda a: lax.fori_loop(0, 3, lambda _, c: jnp.sin(c), a),
        lambda a: lax.fori_loop(0, 4, lambda _, c: jnp.sin(c), a),
    ],
}


def chain(steps):
    def f(x):
        for step in steps:
            x = lax.psum(step(x).astype(jnp.float32), "x")
        return x

    return f


def plans_of(f, arguments, monkeypatch):
    """The plans of the segments of a program, on two devices."""
    found = []
    add = SegmentPool.add

    def noted(pool, plan, aliases):
        found.append(plan)
        return add(pool, plan, aliases)

    monkeypatch.setattr(SegmentPool, "add", noted)
    mapped = manual(f, mesh(2), (P(),) * len(arguments), P())
    compiled(mapped, *arguments, num_devices=2)
    assert len(found) > 1
    return found


def by_key(plans):
    """By key the modules of the plans. A plan without a key is alone."""
    likeness, modules = Likeness(), {}
    for plan in plans:
        key = likeness.key(plan)
        module = ModuleBuilder().plan(plan).SerializeToString(deterministic=True)
        modules.setdefault(id(plan) if key is None else key, set()).add(module)
    return modules


@pytest.mark.parametrize("name", EQUAL)
def test_equal_layers_have_equal_keys(name, monkeypatch):
    plans = plans_of(EQUAL[name], (X, *WEIGHTS), monkeypatch)
    modules = by_key(plans)
    assert all(len(equal) == 1 for equal in modules.values())
    assert len(modules) == len(set().union(*modules.values())) < len(plans)


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_in_one_thing_has_another_key(name, monkeypatch):
    plans = plans_of(chain(DIFFERENT[name] * 2), (X,), monkeypatch)
    modules = by_key(plans)
    assert all(len(equal) == 1 for equal in modules.values())
    assert len(modules) >= len(DIFFERENT[name])
