"""Steps in schedules with what each run of a stage has for itself: losses of layers, random keys."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_steps
from frontend_support import P, manual, mesh
from jax import lax
from random_steps import compare, compiled
from schedule_judges import compare_in, judge, refused
from training_steps import Draw

from stretto.hlo_frontend.pipelines import training

# What runs have for themselves, and what is read of all of them.

# Losses of more layers than a row has numbers.
NARROW = Draw(balance="stack", head="cond", rows=1, width=4, layers=4, dtype="bfloat16")

OWN = {
    "balance-sent": (Draw(balance="sent", head="cond", stages=3, again="layer"), "1f1b"),
    "balance-stacked": (
        Draw(balance="stack", head="cond", microbatches=3, again="stage"), "zb_h1 interleaved_1f1b"
    ),
    "balance-stacked-narrow": (NARROW, "1f1b"),
    "keys": (
        Draw(dropout="carry", balance="carry", loss="squares", inside=True), "1f1b interleaved_1f1b"
    ),
    "keys-shared": (Draw(dropout="shared", head="cond", again="stage", axes="dx"), "1f1b"),
    "keys-stacked": (Draw(dropout="stack", head="cond", microbatches=3), "interleaved_1f1b"),
    "mask": (
        Draw(travels="mask", head="cond", again="layer", mask="where", microbatches=3),
        "zb_h1 interleaved_1f1b",
    ),
    "segments": (Draw(travels="segments", loss="squares", again="stage", stages=3), "1f1b"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("d", "schedules"), OWN.values(), ids=OWN)
def test_what_each_run_has_for_itself(d, schedules):
    """Losses that a stage adds up over its own layers, keys that it folds from numbers, and what goes from
    stage to stage with a microbatch."""
    judge(d, *schedules.split())


def test_what_is_too_large_to_be_kept_of_all_microbatches(monkeypatch):
    """Without chunks a stage is put into a loop together with the sum of what its layers give."""
    monkeypatch.setattr(training, "_SMALL", 0)
    why = refused(NARROW, "interleaved_1f1b", interleave=2)
    assert "16 bytes, is read by others than their gradient" in why and "stage, 8 bytes" in why


@pytest.mark.thorough
@pytest.mark.parametrize(
    "d", [Draw(collect="cond", loss="squares"), Draw(collect="cond", head="cond")]
)
def test_outputs_put_away_under_a_conditional(d):
    judge(d)


def test_a_loss_of_layers_that_is_not_linear(monkeypatch):
    """Its gradient is known only when all microbatches have been through all layers."""
    written = training_steps.outputs_of

    def outputs_of(*arguments):
        *found, total, wanted = written(*arguments)
        return *found, total**2, wanted

    monkeypatch.setattr(training_steps, "outputs_of", outputs_of)
    why = refused(Draw(balance="carry", head="cond"))
    assert "which depends on the forward pass of all microbatches" in why


@pytest.mark.thorough
def test_layers_with_a_loop_that_gives_more_than_one_array(monkeypatch):
    """As random bits are drawn; of it, runs of weights are left the arrays that they read."""

    def layer(x, w):
        begin = lax.stop_gradient((x, x * 2))
        one, other = lax.fori_loop(0, 3, lambda _, c: (c[1], c[0] * 0.5), begin)
        return x + jnp.tanh((x * one) @ w["up"]) @ w["down"] * other, None

    monkeypatch.setattr(training_steps, "layer", layer)
    judge(Draw(loss="squares", again="layer", microbatches=3), "zb_h1")


def test_a_number_that_depends_on_the_stages(monkeypatch):
    written = training_steps.outputs_of

    def outputs_of(*arguments):
        found, metric, count, *others = written(*arguments)
        return found, metric, count + metric, *others

    monkeypatch.setattr(training_steps, "outputs_of", outputs_of)
    why = refused(Draw(counted=True, head="cond", metric=True))
    assert "which depends on the forward pass of all microbatches" in why


def test_a_mask_on_the_loss_alone_in_the_loop():
    why = refused(Draw(head="loss", stages=3))
    assert "put the head under lax.cond where a microbatch leaves the last stage" in why


def beginning_anew(own):
    """Reasons why a step is not run as 1F1B, and not interleaved, whose layers hand on a sum of their own.
    ``own``: what a stage begins it with, of what the scan carries, which it gives anew."""
    count, stages = 4, 2

    def loss(w, xs):
        stage = lax.axis_index("x")

        def one(carry, w):
            x, total = carry
            y = jnp.tanh(x @ w)
            return (y, total + jnp.sum(y)), None

        def iteration(carry, i):
            received, total, state = carry
            x = jnp.where(stage == 0, xs[jnp.clip(i, 0, count - 1)], received)
            working = (i >= stage) & (i - stage < count)
            begun, state = own(state, total)
            y, more = lax.cond(
                working,
                lambda b: lax.scan(one, b, w)[0],
                lambda b: (b[0] * 0, jnp.float32(0)),
                (x, begun),
            )
            return (lax.ppermute(y, "x", [(0, 1)]), total + more, state), None

        start = jnp.zeros_like(xs[0]), jnp.float32(0), jnp.sin(xs[0, 0, 0])
        return lax.psum(lax.scan(iteration, start, jnp.arange(count + 1))[0][1], "x")

    over = mesh(stages)
    step = jax.value_and_grad(manual(loss, over, (P("x"), P()), P()))
    arguments = np.ones((4, 8, 8), np.float32), np.ones((count, 4, 8), np.float32)
    found = (
        compiled(jax.jit(step), arguments, stages, schedule, **how).interleaved
        for schedule, how in (("1f1b", {}), ("gpipe", {"interleave": 2}))
    )
    return [" ".join(report.why for report in reports) for reports in found]


ANEW = "f32[], which its layers hand on, begins anew in each stage"


def test_what_begins_anew_in_each_stage():
    """Interleaving would have it on other devices."""
    alone, chunks = beginning_anew(lambda state, total: (jnp.float32(0), state))
    assert not alone and ANEW in chunks


def test_what_begins_with_a_state_that_changes():
    alone, _ = beginning_anew(lambda state, total: (state, jnp.sin(state)))
    assert ANEW in alone and "depends on the iterations before it" in alone


def test_what_begins_with_what_other_runs_gave():
    alone, _ = beginning_anew(lambda state, total: (total, state))
    assert "a stage takes only a part of what another one gave" in alone


@pytest.mark.parametrize(
    ("more", "rounds"),
    [
        (lambda state, means: state + means, ""),
        (
            lambda state, means: 0.9 * state + 0.1 * means,
            "what the loops collect is computed behind them",
        ),
    ],
    ids=["sum", "average"],
)
def test_means_of_layers_that_each_stage_collects(more, rounds):
    """As norms over batches do. XLA makes one operation of a product and a sum of a moving average, another
    one than in the written loop: a step on ``xla:cpu`` differed in last bits."""
    count, stages = 4, 2

    def loss(w, xs):
        stage = lax.axis_index("x")

        def layer(x, w):
            y = jnp.tanh(x @ w)
            return y, y.mean(0)

        def iteration(carry, i):
            received, total, state = carry
            x = jnp.where(stage == 0, xs[jnp.clip(i, 0, count - 1)], received)
            working = (i >= stage) & (i - stage < count)
            y, means = lax.cond(
                working,
                lambda x: lax.scan(layer, x, w),
                lambda x: (x * 0, jnp.zeros_like(state)),
                x,
            )
            state = jnp.where(working, more(state, lax.stop_gradient(means)), state)
            ends = (stage == stages - 1) & (i >= stages - 1)
            total += lax.cond(ends, jnp.sum, lambda y: jnp.float32(0), y)
            return (lax.ppermute(y, "x", [(0, 1)]), total, state), None

        start = jnp.zeros_like(xs[0]), jnp.float32(0), jnp.zeros(w.shape[:2])
        _, total, state = lax.scan(iteration, start, jnp.arange(count + 1))[0]
        return lax.psum(total, "x"), state

    over = mesh(stages)
    mapped = manual(loss, over, (P("x"), P()), (P(), P("x")))
    arguments = np.ones((4, 8, 8), np.float32), np.ones((count, 4, 8), np.float32)
    step = jax.jit(jax.value_and_grad(mapped, has_aux=True))
    (report,) = compiled(step, arguments, stages, "1f1b").interleaved
    assert (report.why, report.rounds) == ("", rounds)


def given_on(monkeypatch, change):
    """Layers of a stage have something else than what came with the microbatch."""
    written = training_steps.stage_of
    monkeypatch.setattr(training_steps, "stage_of", lambda d, k, rows: written(d, k, change(rows)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "other",
    [jnp.logical_not, lambda mask: lax.ppermute(mask, "x", [(1, 2)])],
    ids=["flipped", "of-the-next-microbatch"],
)
def test_a_mask_that_is_another_one_on_one_stage(monkeypatch, other):
    given_on(monkeypatch, lambda mask: jnp.where(lax.axis_index("x") == 2, other(mask), mask))
    judge(Draw(travels="mask", loss="squares", stages=3))


LABELS = {
    "in-the-loop": (
        Draw(travels="labels", head="cond", stages=3, mask="where"), "1f1b interleaved_1f1b"
    ),
    "masked": (Draw(travels="labels", head="where", ring=False, axes="dx"), "zb_h1"),
    "behind": (
        Draw(travels="labels", microbatches=3, collect="scan", again="layer", accuracy=True),
        "1f1b interleaved_1f1b",
    ),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("d", "schedules"), LABELS.values(), ids=LABELS)
def test_labels_that_go_from_stage_to_stage(d, schedules):
    """The last stage computes those of its microbatch as the first stage does, of what all stages have."""
    judge(d, *schedules.split())


@pytest.mark.thorough
@pytest.mark.parametrize("head", ["cond", "behind"])
def test_labels_with_chunks_alone(head):
    """Interleaved, but otherwise as it is written."""
    found = compare(Draw(travels="labels", head=head, microbatches=3), "gpipe", interleave=2)
    assert found.whys == found.differs == ()
    assert all(report.chunks == 2 for report in found.module.interleaved)


def test_a_mask_with_chunks_alone():
    found = compare(Draw(travels="mask", loss="squares"), "gpipe", interleave=2)
    assert "which its layers take, changes from iteration to iteration" in found.whys[0]


@pytest.mark.thorough
def test_labels_that_stages_change(monkeypatch):
    """The second stage gets what the first one made of them, a third one what the second made of that."""
    monkeypatch.setattr(training_steps, "handed_on", lambda rows: (rows * 3 + 1) % 16)
    judge(Draw(travels="labels", head="cond", ring=False))
    why = refused(Draw(travels="labels", head="cond", ring=False, stages=3))
    assert "only if stages hand them on as they are" in why


@pytest.mark.thorough
def test_a_mask_of_another_part_of_the_data(monkeypatch):
    """Which only the gradient reads: it is the same on all stages of that part, not of this one."""

    @jax.custom_vjp
    def of_rows(y, mask):
        return y

    of_rows.defvjp(
        lambda y, mask: (y, mask), lambda mask, g: (jnp.where(mask[:, None], g, 0), None)
    )
    monkeypatch.setattr(training_steps, "of_rows", lambda d, mask, y, x: of_rows(y, mask))
    d = Draw(travels="mask", loss="squares", axes="dx")
    judge(d)
    given_on(monkeypatch, lambda mask: lax.ppermute(mask, "d", [(0, 1), (1, 0)]))
    assert "is of the stage's own" in refused(d)


@pytest.mark.thorough
@pytest.mark.parametrize("collect", ["put", "scan"])
def test_a_head_of_what_each_stage_gave(monkeypatch, collect):
    """The gradient of the masked loss is not known to be zeros on other stages, and is added there."""
    written = training_steps.outputs_of

    def own(d, *given):
        return written(replace(d, shared="none"), *given)

    monkeypatch.setattr(training_steps, "outputs_of", own)
    why = refused(Draw(loss="squares", collect=collect))
    assert "the gradient of a head that all stages compute" in why and "0 * x is NaN" in why


def test_a_head_with_weights_of_a_stage(monkeypatch):
    """Another stage's part of the sum cannot be computed by the last one: all compute theirs, of outputs that
    they are given, and sum up the gradient."""

    def scaled(d, head, h, wanted):
        own = lax.ppermute(head, "x", [(0, 1), (1, 0)])
        return jnp.sum((h @ own) ** 2)

    monkeypatch.setattr(training_steps, "loss_of", scaled)
    found = compare_in(Draw(shared="psum", alike=True), "1f1b", "zb_h1")
    for own in found.values():
        (report,) = own.module.interleaved
        assert report.meetings == 2
