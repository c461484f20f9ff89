"""Heads behind the loop of a pipeline whose classes the stages divide: all stages compute them together.

Judged by the step as it is written, and that by JAX's CPU backend.
"""

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

from stretto.hlo_frontend.pipelines.merged_runs import Runs
from stretto.nn import vocab_parallel_cross_entropy
from stretto.pipelining import pipelined

ROWS, WIDTH, WORDS, LAYERS = 4, 8, 12, 2

Head = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def layer(weights: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def ready_made(ys: jax.Array, shard: jax.Array, labels: jax.Array) -> jax.Array:
    return vocab_parallel_cross_entropy(ys, shard, labels, "x")


def by_hand(ys: jax.Array, shard: jax.Array, labels: jax.Array) -> jax.Array:
    logits = ys @ shard.T
    top = lax.pmax(lax.stop_gradient(logits.max(-1)), "x")
    total = lax.psum(jnp.exp(logits - top[..., None]).sum(-1), "x")
    own = jax.nn.one_hot(labels - len(shard) * lax.axis_index("x"), len(shard))
    return jnp.log(total) + top - lax.psum((logits * own).sum(-1), "x")


def gathered(ys: jax.Array, shard: jax.Array, labels: jax.Array) -> jax.Array:
    """Of the scores of all stages."""
    scores = jax.nn.log_softmax(lax.all_gather(ys @ shard.T, "x", axis=2, tiled=True))
    return -jnp.take_along_axis(scores, labels[..., None], -1)


def centered(ys: jax.Array, shard: jax.Array, labels: jax.Array) -> jax.Array:
    return by_hand(ys - ys.mean(0), shard, labels)


def step_of(
    head: Head, *, stages: int = 2, data: int = 1, checked: bool = True, given: bool = False
) -> WrittenStep:
    """``checked``: whether JAX knows what is the same on all stages (``check_vma``). ``given``: whether the
    head is given to `pipelined`."""
    count = 2 * stages
    over = mesh(stages, data, names="xd")
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return 0.3 * rng.standard_normal(shape).astype(np.float32)

    layers = {name: drawn(stages * LAYERS, WIDTH, WIDTH) for name in ("up", "down")}
    parameters = {"layers": layers, "embedding": drawn(WORDS, WIDTH), "head": drawn(WORDS, WIDTH)}
    words = rng.integers(0, WORDS, (2, count, ROWS * data), dtype=np.int32)
    specs = {"layers": dict.fromkeys(layers, P("x")), "embedding": P(), "head": P("x")}
    batch = P(None, None, "d")

    def loss(parameters: Any, words: jax.Array) -> jax.Array:
        xs = parameters["embedding"][words[0]]
        if given:
            losses = pipelined(
                layer, parameters["layers"], xs, "x", head=lambda w, y, n: head(y, w, n),
                head_params=parameters["head"], targets=words[1], head_on="behind",
            )  # fmt: skip
        else:
            ys = pipelined(layer, parameters["layers"], xs, "x")
            losses = head(ys, parameters["head"], words[1])
        return lax.pmean(losses.mean(), ("d", "x")[: 2 - checked])

    mapped = jax.shard_map(
        loss, mesh=over, in_specs=(specs, batch), out_specs=P(), check_vma=checked
    )
    leaves = [*jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)), batch]
    placed = jax.tree.map(
        lambda s: NamedSharding(over, s), (specs, batch), is_leaf=lambda s: isinstance(s, P)
    )
    step = jax.jit(jax.value_and_grad(mapped), in_shardings=placed, keep_unused=True)
    return WrittenStep(step, (parameters, words), leaves, over)


@pytest.mark.parametrize(
    ("head", "how", "meetings"),
    [
        (ready_made, {}, 3),
        pytest.param(ready_made, {"given": True, "stages": 4}, 3, marks=pytest.mark.thorough),
        (by_hand, {"checked": False}, 6),
        pytest.param(by_hand, {"stages": 4}, 4, marks=pytest.mark.thorough),
        pytest.param(by_hand, {"data": 2}, 4, marks=pytest.mark.thorough),
        pytest.param(gathered, {"checked": False}, 4, marks=pytest.mark.thorough),
    ],
)
def test_all_stages_compute_it(head: Head, how: dict[str, Any], meetings: int) -> None:
    """With one collective that gives all what the last stage gave, and those of the head."""
    step = step_of(head, **how)
    for schedule in ("1f1b", "zb_h1"):
        found = step.judged(schedule)
        (report,) = found.module.interleaved
        assert report.meetings == meetings
        assert f"with {meetings} collectives for each microbatch" in report.describe()
        assert report.rows == step.devices // how.get("data", 1)
    step.check_written()


def test_what_mixes_microbatches_is_refused() -> None:
    found = step_of(centered).compare("1f1b")
    assert any("the rows of microbatches are not separate" in why for why in found.whys)


def test_another_microbatch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Runs.heads

    def heads(runs: Runs) -> Any:
        emit = made(runs)
        return lambda b, begins, given, share: emit(b, begins, [b.constant(0), *given[1:]], share)

    monkeypatch.setattr(Runs, "heads", heads)
    found = step_of(by_hand).compare("1f1b")
    assert any("not all stages compute the head that they divide" in why for why in found.whys)
