"""Pipelines within a loop: steps of training in a scan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, manual, mesh, shards
from interpreter import Interpreter
from jax import lax
from random_steps import compiled

STAGES, LAYERS, COUNT, STEPS = 2, 8, 3, 2


def collected(weights, xs, collect, start):
    """What a pipeline's loop collects: ``collect(collected, y, i, ends)`` of what a stage gives in iteration
    ``i``, and of whether a microbatch ends with it."""
    stage = lax.axis_index("x")

    def iteration(carry, i):
        received, collected = carry
        x = jnp.where(stage == 0, xs[jnp.clip(i, 0, COUNT - 1)], received)
        working = (i >= stage) & (i - stage < COUNT)

        def run(x):
            return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0]

        y = lax.cond(working, run, jnp.zeros_like, x)
        ends = (stage == STAGES - 1) & (i >= STAGES - 1)
        sent = lax.ppermute(y, "x", [(0, 1), (1, 0)])
        return (sent, collect(collected, y, i, ends)), None

    return lax.scan(iteration, (jnp.zeros_like(xs[0]), start), jnp.arange(COUNT + 1))[0][1]


def pipeline(weights, xs):
    def collect(total, y, i, ends):
        return total + lax.cond(ends, lambda y: jnp.sum(y * y), lambda y: jnp.float32(0), y)

    return lax.psum(collected(weights, xs, collect, jnp.float32(0)), "x")


def trained(weights, xs):
    """Losses of some steps, and the weights behind them."""

    def step(weights, xs):
        loss, gradient = jax.value_and_grad(pipeline)(weights, xs)
        return weights - 0.01 * gradient, loss

    return lax.scan(step, weights, xs)


def evaluated(weights, xs):
    return lax.map(lambda xs: pipeline(weights, xs), xs)


RANDOM = np.random.default_rng(0)
ARGUMENTS = (
    (RANDOM.standard_normal((LAYERS, 8, 8)) / 3).astype(np.float32),
    RANDOM.standard_normal((STEPS, COUNT, 4, 8)).astype(np.float32),
)
CASES = {
    "1f1b": (trained, "1f1b", {}),
    "interleaved": (trained, "interleaved_1f1b", {"interleave": 2}),
    "chunks": (evaluated, "gpipe", {"interleave": 2}),
}


@pytest.mark.quick("chunks")
@pytest.mark.parametrize(("function", "schedule", "how"), CASES.values(), ids=CASES)
def test_pipelines_in_a_scan(function, schedule, how):
    """Gradients and losses are those of the written program, and JAX's."""
    over = mesh(STAGES)
    given = P("x") if function is trained else ()
    out = (given, P()) if given else P()
    mapped = jax.jit(manual(function, over, (P("x"), P()), out))
    module = compiled(mapped, ARGUMENTS, STAGES, schedule, **how)
    (report,) = module.interleaved
    assert report.why == ""
    parts = [shards(a, over, s) for a, s in zip(ARGUMENTS, (P("x"), P()), strict=True)]
    written = compiled(mapped, ARGUMENTS, STAGES, "gpipe").program
    found = Interpreter(module.program, skipped=0).run(*parts)
    for result, other in zip(found, Interpreter(written).run(*parts), strict=True):
        np.testing.assert_array_equal(np.array(result), np.array(other))
    losses = jax.tree.leaves(mapped(*ARGUMENTS))[-1]
    np.testing.assert_allclose(found[-1][0], losses, rtol=2e-5)
    assert str(module.program) != str(written)


def headed(same):
    """Steps with a head on all stages, of weights that each step changes. ``same``: alike on all stages."""

    def loss(head, weights, xs):
        def collect(outputs, y, i, ends):
            return jnp.where(ends, outputs.at[jnp.maximum(i - STAGES + 1, 0)].set(y), outputs)

        outputs = collected(weights, xs, collect, jnp.zeros_like(xs))
        outputs = lax.psum(jnp.where(lax.axis_index("x") == STAGES - 1, outputs, 0), "x")
        return jnp.sum(outputs * head)

    def steps(weights, xs):
        def step(carry, xs):
            own = jax.value_and_grad(loss, (0, 1))
            value, (change, gradient) = own(*carry, xs)
            change = lax.psum(change, "x") if same else change * lax.axis_index("x")
            return (carry[0] - change, carry[1] - gradient), value

        return lax.scan(step, (jnp.ones(8), weights), xs)

    over = mesh(STAGES)
    mapped = jax.jit(manual(steps, over, (P("x"), P()), ((P("x"), P("x")), P("x"))))
    return mapped, over


@pytest.mark.parametrize(("same", "meetings"), [(True, 0), (False, 1)])
def test_what_steps_leave_the_same_on_all_stages(same, meetings):
    """Such weights of a head are followed from step to step. With other weights on each stage all of them
    compute the head together: they sum up gradients, which need no outputs where a loss is linear."""
    mapped, over = headed(same)
    module = compiled(mapped, ARGUMENTS, STAGES, "1f1b")
    assert [(report.why, report.meetings) for report in module.interleaved] == [("", meetings)]
    parts = [shards(a, over, s) for a, s in zip(ARGUMENTS, (P("x"), P()), strict=True)]
    found = Interpreter(module.program, skipped=np.nan).run(*parts)
    for result, array in zip(found, jax.tree.leaves(mapped(*ARGUMENTS)), strict=True):
        np.testing.assert_allclose(np.concatenate(result), array, rtol=2e-5, atol=1e-5)
