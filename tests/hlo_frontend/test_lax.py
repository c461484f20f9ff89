"""`stretto.lax`: tokens become order, on every jaxlib, and cost no instruction of the program."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, judge, manual, mesh
from jax import lax

import stretto.lax as sl
from stretto.runtime.program import Run, Start, instructions

OVER = mesh(4)
X = np.arange(32, dtype=np.float32).reshape(8, 4)

PERM = [(0, 1), (1, 2), (2, 3), (3, 0)]
CHAINED = {
    "psum": lambda x, t: sl.psum(x, "x", token=t),
    "pmax": lambda x, t: sl.pmax(x, "x", token=t),
    "pmin": lambda x, t: sl.pmin(x, "x", token=t),
    "all_gather": lambda x, t: sl.all_gather(x, "x", token=t),
    "psum_scatter": lambda x, t: sl.psum_scatter(x.reshape(-1), "x", token=t, tiled=True),
    "all_to_all": lambda x, t: sl.all_to_all(x.reshape(4, 2), "x", 0, 0, token=t),
    "ppermute": lambda x, t: sl.ppermute(x, "x", PERM, token=t),
}
KINDS = {
    "psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def function(body):
    return manual(body, OVER, P("x"), P("x"))


def ordered(body) -> list[tuple[str, tuple[int, ...]]]:
    schedule = compiled(function(body), X, num_devices=4).schedule
    return [(entry.kind, entry.after) for entry in schedule.entries]


@pytest.mark.quick("ppermute-psum", "psum-psum", "psum-all_gather", "ppermute-ppermute")
@pytest.mark.parametrize("second", CHAINED)
@pytest.mark.parametrize("first", ["ppermute", "psum"])
def test_a_chain_orders_collectives_that_share_no_data(first: str, second: str) -> None:
    def body(x):
        a, token = CHAINED[first](jnp.sin(x), sl.create_token())
        b, token = CHAINED[second](x + 1, token)
        return jnp.sum(b)[None] + x[0], jnp.sum(a)[None] * x[0]

    (one, after_one), (two, after_two) = ordered(body)
    assert (one, two) == (KINDS[first], KINDS[second])
    assert (after_one, after_two) == ((), (0,))
    judge(function(body), OVER, P("x"), X)


def test_a_chain_adds_no_instruction() -> None:
    def free(x):
        for _ in range(5):
            x = lax.psum(x * 0.5, "x")
        return x

    def chain(x):
        token = sl.create_token()
        for _ in range(5):
            x, token = sl.psum(x * 0.5, "x", token=token)
        return x

    counts = []
    for body in (free, chain):
        program = compiled(function(body), X, num_devices=4).program
        kinds = Counter(type(i).__name__ for i in instructions(program.body))
        inputs = [len(i.inputs) for i in instructions(program.body) if isinstance(i, Run | Start)]
        counts.append((kinds, inputs))
    assert counts[0] == counts[1]
    assert counts[0][0]["Start"] == 5


def test_a_token_carried_by_a_scan() -> None:
    def body(x):
        def step(carry, row):
            token, total = carry
            a, token = sl.ppermute(row, "x", PERM, token=token)
            b, token = sl.psum(row * 2, "x", token=token)
            return (token, total + a + b), jnp.sum(a)

        (_, total), sums = lax.scan(step, (sl.create_token(), jnp.zeros(4)), x)
        return total[None] + jnp.sum(sums)

    (loop,) = compiled(function(body), X, num_devices=4).schedule.entries
    inside = loop.children[1].entries
    assert [entry.kind for entry in inside] == ["collective-permute", "all-reduce"]
    assert inside[1].after == (0,)
    judge(function(body), OVER, P("x"), X)


def test_gradients_and_batches_pass_through_a_chain() -> None:
    def loss(x):
        a, token = sl.ppermute(jnp.sin(x), "x", PERM, token=sl.create_token())
        b, _ = sl.psum(x * a, "x", token=token)
        return jnp.sum(b)

    judge(function(jax.grad(loss)), OVER, P("x"), X)

    def batched(row):
        a, token = sl.all_gather(row, "x", token=sl.create_token())
        b, _ = sl.psum(row, "x", token=token)
        return jnp.sum(a) + b

    judge(function(jax.vmap(batched)), OVER, P("x"), X)
