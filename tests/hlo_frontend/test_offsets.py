"""Segments that differ in offsets: one segment, and the bits that each of them gave."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, judge, manual, mesh
from jax import lax

from stretto.hlo_frontend import offsets
from stretto.runtime.program import Run, instructions

LAYERS = 5
WEIGHTS = np.linspace(-1.0, 1.0, LAYERS * 4 * 4, dtype=np.float32).reshape(LAYERS, 4, 4)
X = np.arange(16, dtype=np.float32).reshape(4, 4) - 7


def layers(x, w):
    for i in range(LAYERS):
        x = jnp.tanh(lax.psum(x @ w[i], "x"))
    return x


def gradient(x, w):
    return jax.grad(lambda w: layers(x, w).sum())(w)


def windows(x, w):
    """Slices of several elements, at two offsets that differ, and one that does not."""
    rows = w.reshape(-1, 4)
    for i in range(LAYERS):
        x = lax.psum(x[:, 1:3] @ rows[3 * i : 3 * i + 2] + rows[i + 1 : i + 5], "x")
    return x


def padded(x, w):
    """Pads that move along one dimension and stay in another, of a value that is no zero."""
    total = x
    for i in range(4):
        row = lax.psum(total[1:2, :3] + w[0, 0, 0], "x")
        total = total + lax.pad(row, np.float32(0.5), [(i, 3 - i, 0), (1, 0, 0)])
    return total


def in_a_loop(x, w):
    """The body has the layers; its first segment reads an offset itself."""
    return lax.fori_loop(0, 2, lambda _, c: layers(c, w), x)


PROGRAMS = {f.__name__: f for f in (layers, gradient, windows, padded, in_a_loop)}


def distinct(program):
    return len({i.segment for i in instructions(program.body) if isinstance(i, Run)})


@pytest.mark.parametrize("name", PROGRAMS)
def test_fewer_segments_give_what_jax_gives(name, monkeypatch):
    over = mesh(2)
    step = manual(PROGRAMS[name], over, (P(), P()), P())
    judge(step, over, (P(), P()), X, WEIGHTS, exact=name != "gradient")
    shared = distinct(compiled(step, X, WEIGHTS, num_devices=2).program)
    monkeypatch.setattr(offsets, "LEAST_SHARED", LAYERS + 1)
    assert shared < distinct(compiled(step, X, WEIGHTS, num_devices=2).program)
