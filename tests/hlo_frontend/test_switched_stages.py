"""Pipelines whose stages are branches of one `lax.switch`, with another one for iterations without a
microbatch, as 1F1B and ZB-H1. The first stage's branch may embed, the last one's compute the loss.

Judged by the program as it is written, and that by JAX's CPU backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, mesh
from jax import lax
from random_steps import WrittenStep

from stretto.hlo_frontend.graph import Module, all_instructions

MICROBATCHES, ROWS, WIDTH, WORDS, STAGES = 4, 3, 8, 10, 3
Stage = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Switched:
    """``rest``: which branch is that of iterations without a microbatch. ``embeds``, ``judges``: whether
    the first stage's branch makes its input, and the last one's the loss. ``again``: whether `jax.checkpoint`
    stands around branches."""

    rest: int = STAGES
    embeds: bool = False
    judges: bool = False
    again: bool = False


KINDS = {
    "rests last": Switched(),
    "rests first": Switched(0),
    "rests between": Switched(1),
    "embeds": Switched(embeds=True),
    "judges": Switched(judges=True),
    "all": Switched(embeds=True, judges=True),
    "all, again": Switched(2, embeds=True, judges=True, again=True),
}


def step_of(kind: Switched) -> WrittenStep:
    """The loss of a step and its gradients."""
    over, last = mesh(STAGES), STAGES - 1
    rng = np.random.default_rng(5)

    def drawn(*shape: int) -> np.ndarray:
        return 0.4 * rng.standard_normal(shape).astype(np.float32)

    parameters = {
        "embedding": drawn(WORDS, WIDTH),
        "head": drawn(WIDTH, WORDS),
        "layers": drawn(2 * STAGES, WIDTH, WIDTH),
    }
    words = rng.integers(0, WORDS, (2, MICROBATCHES, ROWS), dtype=np.int32)

    def loss(parameters: dict[str, jax.Array], words: jax.Array) -> jax.Array:
        stage, (given, wanted), layers = lax.axis_index("x"), words, parameters["layers"]

        def judged(y: jax.Array, number: jax.Array) -> jax.Array:
            scores = jax.nn.log_softmax(y @ parameters["head"])
            return -jnp.take_along_axis(scores, wanted[number][:, None], 1).mean()

        def iteration(x: jax.Array, i: jax.Array) -> tuple[jax.Array, jax.Array]:
            number = jnp.clip(i - stage, 0, MICROBATCHES - 1)
            if not kind.embeds:
                x = jnp.where(stage == 0, parameters["embedding"][given[number]], x)

            # Stages of different kinds, two of them without a loop over layers.
            def first(x: jax.Array) -> tuple[jax.Array, jax.Array]:
                x = parameters["embedding"][given[number]] if kind.embeds else x
                return jnp.tanh(x @ layers[0]), jnp.float32(0)

            def middle(x: jax.Array) -> tuple[jax.Array, jax.Array]:
                y, _ = lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w), None), x, layers)
                return y, jnp.float32(0)

            def end(x: jax.Array) -> tuple[jax.Array, jax.Array]:
                y = jnp.sin(x @ layers[0]) @ layers[1]
                return y, judged(y, number) if kind.judges else jnp.float32(0)

            def rests(x: jax.Array) -> tuple[jax.Array, jax.Array]:
                return jnp.zeros_like(x), jnp.float32(0)

            branches: list[Stage] = [first, middle, end]
            if kind.again:
                branches = [jax.checkpoint(branch) for branch in branches]
            branches.insert(kind.rest, rests)
            works = (i >= stage) & (i - stage < MICROBATCHES)
            own = stage + (stage >= kind.rest)
            y, value = lax.switch(jnp.where(works, own, kind.rest), branches, x)
            if not kind.judges:
                value = lax.cond(
                    works & (stage == last),
                    lambda y: judged(y, number),
                    lambda y: jnp.float32(0),
                    y,
                )
            return lax.ppermute(y, "x", [(n, n + 1) for n in range(last)]), value

        trips = jnp.arange(MICROBATCHES + last)
        return lax.psum(lax.scan(iteration, jnp.zeros((ROWS, WIDTH)), trips)[1].sum(), "x")

    specs: dict[str, Any] = {name: P() for name in parameters} | {"layers": P("x")}
    mapped = jax.shard_map(
        loss, mesh=over, in_specs=(specs, P()), out_specs=P(), check_vma=False
    )  # fmt: skip
    step = jax.jit(jax.value_and_grad(mapped))
    return WrittenStep(step, (parameters, words), [*jax.tree.leaves(specs), P()], over)


@pytest.mark.quick("all")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_stages_are_branches(kind: Switched) -> None:
    step = step_of(kind)
    step.check_written()
    for schedule in ("1f1b", "zb_h1"):
        found = step.judged(schedule)
        (report,) = found.module.interleaved
        assert report.stages == STAGES
    assert found.module.source is not None
    module = Module.parse(found.module.source.hlo)
    branches = {
        len(i.called) for i in all_instructions(module.entry) if i.opcode == "conditional"
    }  # fmt: skip
    assert STAGES in branches  # a stage computes its own
