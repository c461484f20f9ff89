"""Pipelines whose layers send among the devices of a further axis, as ring attention does, interleaved and in
schedules; and layers that send to other stages, which are refused.

Judged by the program as it is written. That is judged by JAX's CPU backend where all devices run all layers,
for permutes in a branch that not all devices take give other numbers there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gpipe
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, manual, mesh
from jax import lax
from random_steps import WrittenStep

STAGES, MICROBATCHES, AROUND = 2, 3, 3
LAYERS, SPREAD = P("x"), P(None, "y")
Layer = Callable[[jax.Array, dict[str, jax.Array]], tuple[jax.Array, None]]


def attended(x: jax.Array, keys: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple:
    scores = jnp.exp(jnp.tanh(x @ keys.T))
    return sums[0] + scores @ keys, sums[1] + scores.sum(-1, keepdims=True)


def to_next(keys: jax.Array) -> jax.Array:
    return lax.ppermute(keys, "y", [(n, (n + 1) % AROUND) for n in range(AROUND)])


def hop(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """Ring attention, the hops one after the other."""
    keys, sums = x @ w["a"] + w["b"], (jnp.zeros_like(x), jnp.zeros_like(x[:, :1]))
    for n in range(AROUND):
        keys = to_next(keys) if n else keys
        sums = attended(x, keys, sums)
    return x + sums[0] / sums[1], None


def looped(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """The same in a loop."""

    def iteration(carry: tuple, _: None) -> tuple[tuple, None]:
        keys, sums = carry
        return (to_next(keys), attended(x, keys, sums)), None

    sums = jnp.zeros_like(x), jnp.zeros_like(x[:, :1])
    begin = x @ w["a"] + w["b"], sums
    (_, sums), _ = lax.scan(iteration, begin, None, length=AROUND)
    return x + sums[0] / sums[1], None


def causal(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """The same, of which a row sees no later one: masks are of the device, and the same in all layers."""
    own, rows = lax.axis_index("y"), jnp.arange(len(x))

    def iteration(carry: tuple, n: jax.Array) -> tuple[tuple, None]:
        keys, total = carry
        seen = (own * len(x) + rows)[:, None] >= ((own - n) % AROUND * len(x) + rows)[None]
        scores = jnp.where(seen, jnp.tanh(x @ keys.T), 0)
        return (to_next(keys), total + scores @ keys), None

    begin = x @ w["a"] + w["b"], jnp.zeros_like(x)
    return x + lax.scan(iteration, begin, jnp.arange(AROUND))[0][1], None


def pushed(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """What the last device gives goes to none."""
    y = jnp.tanh(x @ w["a"] + w["b"])
    return y + lax.ppermute(y, "y", [(n, n + 1) for n in range(AROUND - 1)]), None


RINGS: dict[str, Layer] = {
    "hops": hop,
    "looped": looped,
    "again": jax.checkpoint(hop),
    "causal": causal,
    "pushed": pushed,
}


def step_of(layer: Layer, mask: str, layers: int = 4) -> WrittenStep:
    """What comes of microbatches whose rows are divided, and the gradient of the sum of its squares."""
    over = mesh(STAGES, AROUND)
    local = gpipe.where(STAGES, MICROBATCHES, layer=layer, mask=mask)
    mapped = manual(local, over, (LAYERS, SPREAD), SPREAD)

    def loss(layers: dict[str, jax.Array], xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        ys = mapped(layers, xs)
        return (ys**2).sum(), ys

    rng = np.random.default_rng(0)
    xs = rng.standard_normal((MICROBATCHES, 2 * AROUND, gpipe.WIDTH)).astype(np.float32)
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    given = gpipe.weights(layers * STAGES), xs
    return WrittenStep(step, given, [LAYERS, LAYERS, SPREAD], over)


@pytest.mark.quick("hops")
@pytest.mark.parametrize("layer", RINGS.values(), ids=RINGS)
def test_layers_that_send_around(layer: Layer) -> None:
    step = step_of(layer, "cond")
    everywhere = step_of(layer, "zeros")
    everywhere.check_written()
    for own, other in zip(step.written, everywhere.written, strict=True):
        np.testing.assert_allclose(np.stack(own), np.stack(other), rtol=1e-5, atol=1e-5)
    for schedule in ("1f1b", "zb_h1"):
        found = step.judged(schedule)
        (report,) = found.module.interleaved
        assert (report.stages, report.microbatches) == (STAGES, MICROBATCHES)
    step.judged("interleaved_1f1b", interleave=2)
    found = step.compare("gpipe", interleave=2)
    if layer is causal:
        assert "is not known to be the same on all devices" in found.whys[0]
        return
    assert found.verdict == "equal"
    assert len(found.module.interleaved) == 2


SENT = {
    "to the next stage": ("x", [(0, 1), (1, 0)], "its layers communicate by collective-permute"),
    "to one of others": (("x", "y"), [(1, 5), (5, 1)], "not every microbatch goes once through"),
}


@pytest.mark.parametrize(("axes", "pairs", "said"), SENT.values(), ids=SENT)
def test_layers_that_send_to_other_stages(axes: Any, pairs: Any, said: str) -> None:
    def sent(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ w["a"] + w["b"]) + lax.ppermute(x, axes, pairs), None

    (why, _) = step_of(sent, "cond").compare("1f1b").whys
    assert said in why
