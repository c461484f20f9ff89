"""What the backward pass would send again is kept as it was received, with the bits of the program as it is
written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, mesh
from jax import lax
from jax.sharding import NamedSharding
from random_steps import WrittenStep

from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.pipelines.received import received

STAGES, TRIPS = 3, 4

Body = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def step(body: Body, *, barriers: bool = False) -> WrittenStep:
    """The gradient of a scan of which each iteration is computed again; ``body(state, moved, weights)`` gives
    what the stages hand on."""
    over = mesh(STAGES)

    def iteration(carry: Any, _: None) -> tuple[Any, None]:
        state, weights = carry
        state = body(state, jnp.roll(state, 1, 0), weights)
        return (lax.with_sharding_constraint(state, NamedSharding(over, P("x"))), weights), None

    def loss(weights: jax.Array, xs: jax.Array) -> jax.Array:
        again = jax.checkpoint(iteration, prevent_cse=barriers)
        (state, _), _ = lax.scan(again, (xs, weights), None, TRIPS)
        return (state**2).sum()

    rng = np.random.default_rng(0)
    given = tuple(rng.standard_normal((STAGES, 4, 4)).astype(np.float32) for _ in range(2))
    function = jax.jit(jax.grad(loss), in_shardings=NamedSharding(over, P("x")))
    return WrittenStep(function, given, [P("x"), P("x")], over)


def sent(hlo: bytes) -> list[int]:
    """Permutes in each loop."""
    loops = [i for i in Module.parse(hlo).entry.instructions if i.opcode == "while"]
    return [
        sum(i.opcode == "collective-permute" for i in loop.called[0].instructions) for loop in loops
    ]


@pytest.mark.parametrize("barriers", [False, True])
def test_it_is_sent_once(barriers: bool) -> None:
    found = step(
        lambda _, moved, w: jnp.tanh(jnp.einsum("sij,sjk->sik", moved, w)), barriers=barriers
    )
    written = found.module.source.hlo
    made = received(written)
    assert made is not None
    there, back = sent(written)
    assert (there, sent(made)) == (1, [1, back - 1])
    found.check_bits(made)
    found.check_written()


STAYS = {
    "read otherwise": lambda state, moved, w: jnp.sin(moved) * jnp.cos(state),
    "moved in two ways": lambda state, moved, w: jnp.sin(moved) * jnp.cos(jnp.roll(state, -1, 0)),
    "not moved": lambda state, moved, w: jnp.sin(state) * w,
}


@pytest.mark.parametrize("body", STAYS.values(), ids=STAYS)
def test_what_is_used_otherwise_stays(body: Body) -> None:
    assert received(step(body).module.source.hlo) is None
