"""The default order: gathered weights do not pile up, gradients are reduced as soon as they are there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from frontend_support import P, compiled, manual, mesh
from jax import lax

from stretto.collectives.ops import Kind
from stretto.runtime.program import Free, Program, Run, Start

LAYERS, WIDTH = 6, 64


def layers(x, ws):
    for w in ws:
        full = lax.all_gather(w, "x", tiled=True).astype(jnp.bfloat16)
        x = jnp.tanh(lax.psum(x.astype(jnp.bfloat16) @ full, "x")).astype(jnp.float32)
    return x


def program(f, outputs) -> Program:
    ws = [np.ones((WIDTH, WIDTH), np.float32)] * LAYERS
    specs = (P(), [P("x")] * LAYERS)
    x = np.ones((4, WIDTH), np.float32)
    return compiled(manual(f, mesh(4), specs, outputs), x, ws, num_devices=4).program


def most_alive(made: Program, size: int) -> int:
    """The largest number of arrays with ``size`` elements or more that are alive at once."""
    alive: set[int] = set()
    most = 0
    for step in made.body.instructions:
        if isinstance(step, Run | Start):
            alive |= {s for s in step.outputs if made.slot_types[s].size >= size}
        most = max(most, len(alive))
        if isinstance(step, Run):
            alive -= set(step.donated)
        if isinstance(step, Free):
            alive -= set(step.slots)
    return most


def test_weights_are_gathered_where_they_are_used():
    assert most_alive(program(layers, P()), WIDTH * WIDTH) <= 2


def test_gradients_are_scattered_layer_by_layer():
    def loss(x, ws):
        return (layers(x, ws) ** 2).sum()

    made = program(jax.grad(loss, argnums=1), [P("x")] * LAYERS)
    scatters = [c for c in made.collectives if c.kind is Kind.REDUCE_SCATTER]
    assert len(scatters) == LAYERS
    # Of full size: what the forward pass kept for the backward pass, and no second set of it.
    assert most_alive(made, WIDTH * WIDTH) <= LAYERS + 3
