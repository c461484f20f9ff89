"""Heads in the loop of a pipeline written for a device that communicate over a further axis of the mesh, as
1F1B and ZB-H1: the last stage turns a microbatch round in all pipelines side by side at the same time.

Judged by the program as it is written, and that by JAX's CPU backend.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, mesh
from jax import lax
from jax.sharding import NamedSharding
from random_steps import WrittenStep

STAGES, MICROBATCHES, ROWS, WIDTH, CLASSES = 2, 4, 4, 8, 12


def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return x + jnp.tanh(x @ w), None


def rows_divided(y: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    scores = jax.nn.log_softmax(y @ head)
    return lax.pmean(-jnp.take_along_axis(scores, labels[:, None], -1).mean(), "d")


def classes_divided(y: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    scores = y @ head
    most = lax.pmax(lax.stop_gradient(scores.max(-1)), "d")
    total = lax.psum(jnp.exp(scores - most[:, None]).sum(-1), "d")
    own = lax.axis_index("d") * scores.shape[1] + jnp.arange(scores.shape[1])
    right = lax.psum(jnp.where(own == labels[:, None], scores, 0).sum(-1), "d")
    return (jnp.log(total) + most - right).mean()


def of_stages(y: jax.Array, head: jax.Array, labels: jax.Array) -> jax.Array:
    return rows_divided(y, head, labels) + 0.1 * lax.pmean((y @ head).mean(), "x")


def written(loss_of: Any, form: str) -> WrittenStep:
    """``form``: under a ``cond`` or a ``where``."""
    over = mesh(STAGES, 2, names="xd")
    classes = loss_of is classes_divided

    def local(parameters: Any, xs: jax.Array, labels: jax.Array) -> jax.Array:
        stage, head = lax.axis_index("x"), parameters["head"]

        def iteration(carry: Any, i: jax.Array) -> tuple[Any, None]:
            received, total = carry
            x = jnp.where(stage == 0, xs[jnp.clip(i, 0, MICROBATCHES - 1)], received)
            works = (i >= stage) & (i - stage < MICROBATCHES)
            y = lax.cond(
                works, lambda x: lax.scan(layer, x, parameters["layers"])[0], jnp.zeros_like, x
            )
            out = i - (STAGES - 1)
            last = (stage == STAGES - 1) & (out >= 0)
            own = labels[jnp.maximum(out, 0)]
            if form == "cond":
                loss = lax.cond(last, lambda y: loss_of(y, head, own), lambda y: jnp.float32(0), y)
            else:
                masked = jnp.where(last, y, 0), jnp.where(last, head, 0)
                loss = jnp.where(last, loss_of(*masked, own), 0)
            sent = lax.ppermute(y, "x", [(0, 1), (1, 0)])
            return (sent, total + loss), None

        begin = jnp.zeros_like(xs[0]), jnp.float32(0)
        (_, total), _ = lax.scan(iteration, begin, jnp.arange(MICROBATCHES + STAGES - 1))
        return lax.psum(total, "x") / MICROBATCHES

    rows = P() if classes else P(None, "d")
    parts = {"layers": P("x"), "head": P(None, "d") if classes else P()}, rows, rows
    loss = jax.shard_map(local, mesh=over, in_specs=parts, out_specs=P(), check_vma=False)
    placed = jax.tree.map(lambda s: NamedSharding(over, s), parts)
    step = jax.jit(jax.value_and_grad(loss), in_shardings=placed)
    rng = np.random.default_rng(0)
    shapes = (STAGES * 2, WIDTH, WIDTH), (WIDTH, CLASSES), (MICROBATCHES, ROWS, WIDTH)
    layers, head, xs = (0.3 * rng.standard_normal(s).astype(np.float32) for s in shapes)
    labels = rng.integers(0, CLASSES, (MICROBATCHES, ROWS), dtype=np.int32)
    arguments = {"layers": layers, "head": head}, xs, labels
    return WrittenStep(step, arguments, jax.tree.leaves(parts), over)


@pytest.mark.parametrize(
    ("loss_of", "form"),
    [
        (rows_divided, "cond"),
        pytest.param(rows_divided, "where", marks=pytest.mark.thorough),
        pytest.param(classes_divided, "cond", marks=pytest.mark.thorough),
        pytest.param(classes_divided, "where", marks=pytest.mark.thorough),
    ],
)
def test_a_head_communicates_among_devices_of_its_stage(loss_of: Any, form: str) -> None:
    step = written(loss_of, form)
    for schedule in ("1f1b", "zb_h1"):
        (report,) = step.judged(schedule).module.interleaved
        assert report.rounds
        assert report.rows == STAGES
    step.check_written()


def test_a_head_that_communicates_with_other_stages_is_refused() -> None:
    found = written(of_stages, "where").compare("1f1b")
    assert any("not only by permutes" in why for why in found.whys)
