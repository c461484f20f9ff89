"""Pipelines whose stage is one block of a transformer, all stages one array, with further axes of a mesh, as
1F1B and ZB-H1. Weights are divided and gathered in the loop, or rows or positions of microbatches are.

Judged by the program as it is written, and that by JAX's CPU backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, mesh
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from random_steps import WrittenStep
from training_steps import trained

MICROBATCHES, POSITIONS, WIDTH, WORDS = 5, 6, 8, 12
STAGES, WHOLE = P("x"), P()
MATRICES = {"q": 1, "k": 1, "v": 1, "o": 1, "up": 3, "down": 3}  # how many times as wide


@dataclass(frozen=True)
class Layout:
    """``states``: of [stage, row, position, feature]; ``into`` and ``out``: of [stage, feature, feature], of
    matrices that read what goes from stage to stage, and of those that add to it. ``training``: within a
    loop over steps. ``head``: of [feature, word]. ``inside``: whether losses are computed in the loop, of
    what leaves the last stage. ``rows``: of a microbatch."""

    stages: int
    others: tuple[int, ...]
    states: PartitionSpec
    into: PartitionSpec = STAGES
    out: PartitionSpec = STAGES
    again: bool = False
    training: bool = False
    head: PartitionSpec = WHOLE
    inside: bool = False
    rows: int = 4

    def spec(self, name: str) -> PartitionSpec:
        if name not in MATRICES:
            return STAGES
        return self.out if name in ("o", "down") else self.into


LAYOUTS = {
    "rows": Layout(2, (2,), P("x", "d")),
    "weights": Layout(2, (2,), P("x", "d"), P("x", "d"), P("x", "d")),
    "positions": Layout(2, (2,), P("x", None, "d"), again=True),
    "positions and features": Layout(2, (2,), P("x", None, "d"), P("x", None, "d"), P("x", "d")),
    "rows, weights and features": Layout(
        2, (2, 2), P("x", "d"), P("x", "d", "y"), P("x", "y", "d"), again=True
    ),
    "training": Layout(2, (2,), P("x", "d"), training=True),
    "training, weights": Layout(2, (2,), P("x", "d"), P("x", "d"), P("x", "d"), True, True),
    "words": Layout(2, (2,), STAGES, head=P(None, "d"), inside=True),
    "training, rows, and a loss in the loop": Layout(
        2, (3,), P("x", "d"), training=True, inside=True, rows=3
    ),
}


def normed(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * (1 + gain)


def block(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    h = normed(x, weights["first"])
    q, k, v = (h @ weights[name] for name in "qkv")
    scores = jnp.einsum("btd,bsd->bts", q, k) / np.sqrt(WIDTH)
    earlier = jnp.tril(jnp.ones((POSITIONS, POSITIONS), bool))
    attended = jax.nn.softmax(jnp.where(earlier, scores, -1e9)) @ v
    x = x + attended @ weights["o"]
    return x + jax.nn.gelu(normed(x, weights["second"]) @ weights["up"]) @ weights["down"]


def written(layout: Layout) -> WrittenStep:
    """The loss and its gradients, or the losses of two steps and the parameters after them."""
    stages = layout.stages
    over = mesh(stages, *layout.others, names="xdy"[: 1 + len(layout.others)])
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return 0.3 * rng.standard_normal(shape).astype(np.float32)

    blocks = {name: drawn(stages, WIDTH) for name in ("first", "second")}
    for name, wide in MATRICES.items():
        last = name == "down"
        blocks[name] = drawn(stages, WIDTH * (wide if last else 1), WIDTH * (1 if last else wide))
    words = rng.integers(0, WORDS, (2, MICROBATCHES, layout.rows, POSITIONS), dtype=np.int32)
    parameters = {"blocks": blocks, "embedding": drawn(WORDS, WIDTH), "head": drawn(WIDTH, WORDS)}
    run = jax.checkpoint(block) if layout.again else block
    on_stages = NamedSharding(over, layout.states)

    def stage(weights: Any, x: jax.Array, works: jax.Array) -> jax.Array:
        weights = jax.tree.map(lambda w: jnp.where(works, w, 0), weights)
        return run(weights, jnp.where(works, x, 0))

    def loss_of(head: jax.Array, ys: jax.Array, wanted: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(ys @ head)
        return -jnp.take_along_axis(scores, wanted[..., None], -1).mean()

    def loss(parameters: Any, words: jax.Array) -> jax.Array:
        given, wanted = words
        xs, ids = parameters["embedding"][given], jnp.arange(stages)

        def iteration(state: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            new = xs[jnp.clip(i, 0, MICROBATCHES - 1)]
            state = jnp.roll(state, 1, axis=0).at[0].set(new)
            works = (i >= ids) & (i - ids < MICROBATCHES)
            state = lax.with_sharding_constraint(state, on_stages)
            state = jax.vmap(stage)(parameters["blocks"], state, works)
            state = lax.with_sharding_constraint(state, on_stages)
            if not layout.inside:
                return state, state[-1]
            out, head = i - (stages - 1), parameters["head"]
            own = wanted[jnp.maximum(out, 0)]
            return state, lax.cond(
                out >= 0, lambda y: loss_of(head, y, own), lambda y: jnp.float32(0), state[-1]
            )

        begin = jnp.zeros((stages, layout.rows, POSITIONS, WIDTH))
        _, ys = lax.scan(iteration, begin, jnp.arange(MICROBATCHES + stages - 1))
        ys = ys[stages - 1 :]
        return ys.mean() if layout.inside else loss_of(parameters["head"], ys, wanted)

    specs = jax.tree.map(lambda _: P(), parameters)
    specs |= {"blocks": {name: layout.spec(name) for name in blocks}, "head": layout.head}
    placed = jax.tree.map(lambda s: NamedSharding(over, s), specs)
    step = jax.jit(
        trained(loss) if layout.training else jax.value_and_grad(loss),
        in_shardings=(placed, NamedSharding(over, P())),
        out_shardings=(NamedSharding(over, P()), placed),
    )
    return WrittenStep(step, (parameters, words), [*jax.tree.leaves(specs), P()], over)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.thorough] * (n not in ("weights", "training")))
        for n in LAYOUTS
    ],
)
def test_a_block_is_a_stage(name: str) -> None:
    layout = LAYOUTS[name]
    step = written(layout)
    for schedule in ("1f1b", "zb_h1"):
        found = step.compare(schedule)
        assert found.whys == ()
        assert found.verdict != "differs"
        (report,) = found.module.interleaved
        assert report.rows == min(layout.stages, MICROBATCHES)
        for result, expected in zip(found.results, step.written, strict=True):
            np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-6)
    step.check_written()


def test_what_moves_within_a_stage_is_named() -> None:
    """Halves of a product whose features an axis divides: a device has one of them, and needs both."""
    over = mesh(2, 2, names="xd")
    by_stage = NamedSharding(over, STAGES)

    def stage(into: jax.Array, out: jax.Array, x: jax.Array, works: jax.Array) -> jax.Array:
        into, out, x = (jnp.where(works, a, 0) for a in (into, out, x))
        scale, value = jnp.split(x @ into, 2, -1)
        return x + jnp.tanh(scale) * value @ out

    def loss(weights: tuple[jax.Array, jax.Array], xs: jax.Array) -> jax.Array:
        def iteration(state: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.roll(state, 1, axis=0).at[0].set(xs[jnp.clip(i, 0, 3)])
            works = (i >= jnp.arange(2)) & (i - jnp.arange(2) < 4)
            state = lax.with_sharding_constraint(state, by_stage)
            state = jax.vmap(stage)(*weights, state, works)
            return lax.with_sharding_constraint(state, by_stage), state[-1]

        _, ys = lax.scan(iteration, jnp.zeros((2, 4, 8)), jnp.arange(5))
        return (ys[1:] ** 2).sum()

    rng = np.random.default_rng(0)
    shapes = (2, 8, 16), (2, 8, 8), (4, 4, 8)
    *weights, xs = (0.3 * rng.standard_normal(s).astype(np.float32) for s in shapes)
    specs = [P("x", None, "d"), P("x", "d"), P()]
    placed = [NamedSharding(over, s) for s in specs]
    step = jax.jit(jax.grad(loss), in_shardings=(tuple(placed[:2]), placed[2]))
    found = WrittenStep(step, (tuple(weights), xs), specs, over).compare("1f1b")
    (why, _) = sorted(found.whys, key=len, reverse=True)
    assert "its layers communicate by collective-permute" in why
    assert "moves something within a stage" in why
