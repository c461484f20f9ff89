"""Steps that are not run in a schedule; new loops that are made wrongly; what `explain` says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import gpipe
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_steps
from frontend_support import P, manual, mesh
from gpipe import inputs, weights, where
from jax import lax
from random_steps import Step, compiled
from schedule_judges import compare, equal, refused
from training_steps import Draw, program

from stretto.commands.explain import explain, to_text
from stretto.commands.hlo_input import compile_file
from stretto.commands.schedule_svg import svg
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.hlo_frontend.pipelines import driver
from stretto.hlo_frontend.pipelines.slots import NONE, SCHEDULES, Slots, _slots
from stretto.pipelining import pipelined
from stretto.runtime import options
from stretto.runtime.errors import InvalidProgramError

FINITE = ValidPolicy(dead_only=True, finite_padding=True)

# Steps that are refused, and stay as they are written.


@pytest.mark.thorough
@pytest.mark.parametrize("own", [False, True])
def test_outputs_with_something_of_another_stage(own):
    """Which is the same on all of them, or what that stage alone has: then all compute the head together."""

    def local(w, xs):
        ys = pipelined(lambda w, x: jnp.tanh(x @ w["a"] + w["b"]), w, xs, "x")
        first = ys * w["b"].sum() if own else ys
        more = lax.psum(jnp.where(lax.axis_index("x") == 0, first, 0), "x")
        return jnp.sum((ys + more) ** 2)

    over = mesh(2)
    mapped = jax.shard_map(local, mesh=over, in_specs=(P("x"), P()), out_specs=P())
    function = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1)))
    module = compiled(function, (weights(2 * 4), inputs(3)), 2, "1f1b")
    assert module.interleaved[0].why == ""
    equal(function, module, over)


def test_a_head_that_mixes_microbatches(monkeypatch):
    def mixed(d, head, h, wanted):
        return jnp.sum((h - jnp.mean(h, axis=0)) ** 2)

    monkeypatch.setattr(training_steps, "loss_of", mixed)
    assert "the rows of microbatches are not separate: all of" in refused(Draw())


def test_a_head_that_reads_a_neighbour(monkeypatch):
    def shifted(d, head, h, wanted):
        return jnp.sum(h[1:] * h[:-1])

    monkeypatch.setattr(training_steps, "loss_of", shifted)
    assert "row 0 of what the backward pass begins with is padding" in refused(Draw())


def test_a_pipeline_that_is_no_loop():
    over = mesh(2)
    send = manual(lambda x: lax.ppermute(x, "x", [(0, 1)]), over, (P("x"),), P("x"))
    add = manual(lambda x: lax.psum(x, "x"), over, (P("x"),), P())
    x = np.ones((4, 2), np.float32)
    (report,) = compiled(jax.jit(send), (x,), 2, "gpipe", {"stretto_schedule": "1f1b"}).interleaved
    assert report.describe().startswith("the program is not run as 1f1b: none of its loops sends")
    (report,) = compiled(jax.jit(send), (x,), 2, "gpipe", {"stretto_interleave": 2}).interleaved
    assert report.describe().startswith("the program is not interleaved: none of its loops sends")
    assert compiled(jax.jit(add), (x,), 2, "gpipe", {"stretto_schedule": "1f1b"}).interleaved == ()


def test_a_job_in_a_schedule_has_programs_that_are_no_pipelines():
    """One that exchanges its edges sends, too; stages whose iterations are unrolled send what they were
    sent."""
    over = mesh(2)

    def edges(x):
        return lax.ppermute(x, "x", [(0, 1)]) + lax.ppermute(x, "x", [(1, 0)])

    def unrolled(x):
        for _ in range(2):
            x = lax.ppermute(jnp.tanh(x), "x", [(0, 1)])
        return x

    for function, reports in ((edges, 0), (unrolled, 1)):
        made = jax.jit(manual(function, over, (P("x"),), P("x")))
        for asked in ({"schedule": "1f1b"}, {"schedule": "gpipe", "interleave": 2}):
            found = compiled(made, (np.ones((4, 2), np.float32),), 2, **asked)
            assert len(found.interleaved) == reports


def test_a_scan_over_iterations_that_is_unrolled(monkeypatch):
    def unrolled(function, begin, given, scan=lax.scan, **how):
        over_iterations = isinstance(given, jax.Array) and given.ndim == 1
        return scan(function, begin, given, unroll=2 if over_iterations else 1, **how)

    monkeypatch.setattr(lax, "scan", unrolled)
    assert "as where lax.scan is unrolled: leave unroll at 1" in refused(Draw())
    why = refused(Draw(layers=4), "interleaved_1f1b", interleave=2)
    assert "Do not unroll the scan over iterations" in why


ON_PADDING = (
    "Run a stage under lax.cond(working, run, jnp.zeros_like, x), or mask its input and its weights"
)
HEAD_IN_LOOP = (
    "put the head under lax.cond where a microbatch leaves the last stage, or mask its input"
)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("d", "also"),
    [
        (Draw(stages=3, mask="nothing", head="loss", collect="scan"), HEAD_IN_LOOP),
        (Draw(mask="nothing", head="times", ring=False), HEAD_IN_LOOP),
        (Draw(stages=3, mask="nothing", loss="squares"), ""),
    ],
    ids=["loss", "times", "behind"],
)
def test_layers_that_run_on_padding(d, also):
    """All masks that are missing are named at once."""
    why = refused(d)
    first = "Device 1 has microbatches in iterations 1 to 4, and its layers run in iteration 0 too"
    assert first in why and ON_PADDING in why
    assert also in why and ("the gradient of a head" in why) == bool(also)


def test_stages_that_are_computed_again_on_padding():
    why = refused(Draw(mask="nothing", head="cond", again="stage"))
    first = "Going back, device 0 has microbatches in iterations 1 to 4, and its layers run in iteration 0"
    assert first in why and ON_PADDING in why


def test_gradients_of_padding_may_be_nan(monkeypatch):
    """Though all that is computed of microbatches is finite: so they may not be taken to be zeros."""

    def scaled(x, w):
        return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True)) @ w["up"] @ w["down"], None

    monkeypatch.setattr(training_steps, "layer", scaled)
    function, arguments, _, _ = program(Draw(mask="nothing", loss="squares"))
    (loss, _), gradients = function(*arguments)
    assert jnp.isfinite(loss) and jnp.isfinite(gradients["embedding"]).all()
    of_layers = jnp.isfinite(gradients["layers"]["up"]).all(axis=(1, 2))
    assert of_layers.tolist() == [True, True, False, False]  # the second stage begins with zeros
    whys = compare(Draw(mask="nothing", loss="squares"), "1f1b").whys
    assert any("STRETTO_FINITE_PADDING=1" in why for why in whys)


def test_a_program_says_for_itself_that_padding_is_finite():
    """Or that it may not be, whatever the environment says."""
    function, arguments, _, _ = program(Draw(mask="nothing", loss="squares"))
    made = partial(compiled, function, arguments, 2, "1f1b")
    (report,) = made({"stretto_finite_padding": 1}).interleaved
    assert report.why == "" and report.unmasked
    reports = made({"stretto_finite_padding": 0}, valid=FINITE).interleaved
    assert any("stretto_finite_padding" in report.why for report in reports)


def test_padding_that_is_said_to_be_finite_and_is_not(monkeypatch):
    """Its gradients are those of the microbatches alone, and the report says so."""

    def scaled(x, w):
        return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True)) @ w["up"] @ w["down"], None

    monkeypatch.setattr(training_steps, "layer", scaled)
    found = compare(Draw(mask="nothing", loss="squares"), "1f1b", valid=FINITE)
    assert found.whys == () and found.differs
    assert all(np.isfinite(array).all() for result in found.results for array in result)
    (report,) = found.module.interleaved
    assert "where that gives NaN or infinities, gradients are NaN as written" in report.describe()
    masked = compare(Draw(mask="where", loss="squares"), "1f1b", valid=FINITE)
    for own, other in zip(found.results, masked.results, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5)


@pytest.mark.parametrize("of", ["literal", "argument"])
def test_zeros_of_microbatches_are_no_padding(monkeypatch, of):
    """A loss that a program itself multiplies by zero gives NaN where its gradient is infinite."""

    def nothing(d, head, h, wanted):
        zero = 0.0 if of == "literal" else lax.stop_gradient(head[0, 0] * 0)
        return zero * jnp.sum(jnp.sqrt(h - h))

    monkeypatch.setattr(training_steps, "loss_of", nothing)
    step = Step(Draw(mask="nothing"))
    found = step.compare("1f1b", valid=FINITE)
    assert found.whys == ()
    assert any(np.isnan(array).any() for result in step.written for array in result)
    for result, expected in zip(found.results, step.written, strict=True):
        np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))


def test_a_pipeline_without_a_gradient():
    function = gpipe.program(where(2, 3), 2)
    module = compiled(function, (weights(2 * 4), inputs(3)), 2, "1f1b")
    (report,) = module.interleaved
    assert "there are no forward and backward passes to run in turns" in report.why
    assert "is not run as 1f1b" in report.describe()


def test_what_begins_with_the_last_output():
    """The input of a microbatch depends on the one before."""

    def local(layers, xs):
        stage = lax.axis_index("x")

        def iteration(carry, i):
            received, state, outputs = carry
            state = jnp.sin(state + xs[jnp.clip(i, 0, 2)])
            x = jnp.where(stage == 0, state, received)
            working = (i >= stage) & (i - stage < 3)
            y = lax.cond(working, lambda x: lax.scan(gpipe.layer, x, layers)[0], jnp.zeros_like, x)
            put = outputs.at[jnp.clip(i - 1, 0, 2)].set(y)
            outputs = jnp.where((stage == 1) & (i >= 1), put, outputs)
            return (lax.ppermute(y, "x", [(0, 1)]), state, outputs), None

        start = (jnp.zeros_like(xs[0]), jnp.zeros_like(xs[0]), jnp.zeros_like(xs))
        (_, _, outputs), _ = lax.scan(iteration, start, jnp.arange(4))
        return jnp.where(stage == 1, jnp.sum(outputs**2), 0)[None]

    mapped = jax.shard_map(
        local, mesh=mesh(2), in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False
    )
    function = jax.jit(jax.grad(lambda w, x: mapped(w, x).sum()))
    module = compiled(function, (weights(2 * 4), inputs(3)), 2, "1f1b")
    assert any("depends on the iterations before it" in r.why for r in module.interleaved)


def test_another_schedule_with_chunks():
    function, arguments, _, _ = program(Draw())
    with pytest.raises(InvalidProgramError, match=r"1f1b .*has one chunk of layers a device"):
        compiled(function, arguments, 2, "1f1b", interleave=2)


def test_chunks_that_are_not_equal():
    assert "3 layers of a device are not 2 equal chunks" in refused(
        Draw(layers=3), "interleaved_1f1b", interleave=2
    )


def test_no_number_of_chunks():
    function, arguments, _, _ = program(Draw())
    with pytest.raises(InvalidProgramError, match="needs a number of chunks"):
        compiled(function, arguments, 2, "interleaved_1f1b")


# The new loop is proved again: here it is made wrongly.


def wrong(monkeypatch, change, schedule: str = "1f1b", head: str = "behind", **how) -> str:
    made = SCHEDULES[schedule]
    monkeypatch.setattr(driver, "SCHEDULES", {schedule: lambda *sizes: change(made(*sizes))})
    return refused(Draw(microbatches=3, head=head), schedule, **how)


def test_weights_of_another_microbatch_are_seen(monkeypatch):
    def one_row(slots: Slots) -> Slots:
        return replace(slots, resumes=1 - slots.resumes)

    assert "a run of weights reads what is of another" in wrong(monkeypatch, one_row, "zb_h1")


def test_what_has_not_waited_is_seen(monkeypatch):
    def mixed(slots: Slots) -> Slots:
        assert slots.waits is not None
        waits = replace(slots.waits, fetches=slots.waits.fetches + 1)
        return replace(slots, waits=waits)

    assert "could not be verified" in wrong(monkeypatch, mixed, "zb_h1")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda slots: {"chunk": 1 - slots.chunk}, "could not be verified"),
        (
            lambda slots: {"puts": slots.puts % 2, "takes": slots.takes % 2},
            "for another microbatch",
        ),
        (lambda slots: {"delay": 1}, "could not be verified"),  # sent too early
    ],
    ids=["chunks", "rows", "delay"],
)
def test_another_chunk_is_seen(monkeypatch, change, why):
    def changed(slots: Slots) -> Slots:
        return replace(slots, **change(slots))

    assert why in wrong(monkeypatch, changed, "interleaved_1f1b", interleave=2)


def test_rows_that_are_overwritten_are_seen(monkeypatch):
    def one_row(slots: Slots) -> Slots:
        return replace(slots, puts=slots.puts * 0, takes=slots.takes * 0)

    assert "reads what was kept for another microbatch" in wrong(monkeypatch, one_row)


def test_another_order_of_sums_is_seen(monkeypatch):
    def swapped(slots: Slots) -> Slots:
        order = np.array([1, 0, 2, NONE])
        return replace(slots, forward=order[slots.forward], backward=order[slots.backward])

    assert "gradients of microbatches are added in another order" in wrong(monkeypatch, swapped)


def test_another_order_of_turns_is_seen(monkeypatch):
    """Losses are added up where microbatches turn; the runs of weights keep their order here."""

    def swapped(slots: Slots) -> Slots:
        order = np.array([1, 0, 2, NONE])
        late = np.full((slots.stages, 3), NONE, np.int32)
        weights = np.full((slots.stages, slots.iterations), NONE, np.int32)
        weights = np.concatenate([weights, late * 0 + np.arange(3)], axis=1).astype(np.int32)
        tables = (np.concatenate([order[t], late], axis=1) for t in (slots.forward, slots.backward))
        return _slots(*(t.astype(np.int32) for t in tables), weights)

    assert "microbatches turn in another order" in wrong(monkeypatch, swapped, head="cond")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("count", "why"),
    [("turned", "a turn gives something else"), ("banks", "does not turn with what it gave")],
)
def test_what_is_not_handed_on_is_seen(monkeypatch, count, why):
    made = driver.merged

    def otherwise(*given):
        serialized, names = made(*given)
        return serialized, replace(names, **{count: getattr(names, count) - 1})

    monkeypatch.setattr(driver, "merged", otherwise)
    assert why in refused(Draw(microbatches=3, head="cond"))


def test_a_microbatch_for_another_is_seen(monkeypatch):
    def late(slots: Slots) -> Slots:
        forward = slots.forward.copy()
        forward[1] = np.roll(forward[1], 2)
        return replace(slots, forward=forward)

    assert "could not be verified" in wrong(monkeypatch, late)


def test_explain_says_what_is_alive(monkeypatch):
    function, arguments, _, _ = program(Draw(stages=3))
    written = compiled(function, arguments, 3, "gpipe")
    assert written.source is not None
    monkeypatch.setattr(options, "in_force", lambda: options.Options(schedule="1f1b"))
    explained = explain(compile_file(written.source.hlo, 3, guarded=False))
    text = to_text(explained)
    assert "run as 1f1b: 3 stages, 4 microbatches, 12 iterations became 12 of one run each" in text
    assert "microbatches alive on each stage: 3, 2, 1, as written 4" in text
    rows = ["F.F.FBFB.B.B", ".F.FBFBFB.B.", "..FBFBFBFB.."]
    assert [line.split()[-1] for line in text.split("\n") if set(line[7:]) == set("FB.")] == rows
    drawn = svg(explained["loops"], ["" for _ in explained["loops"]])
    assert [drawn.count(f'class="{kind}"') for kind in "FB"] == [12, 12]
    assert drawn.count("iteration 4, forwards") == 2
    # The gradient of the scan goes through microbatches from last to first, and so does the new loop.
    assert "device 0, iteration 0, forwards, microbatch 3<" in drawn
    assert "device 2, iteration 3, backwards, microbatch 3<" in drawn
    assert "fill-opacity" not in drawn


def test_explain_says_what_chunks_take(monkeypatch):
    function, arguments, _, _ = program(Draw())
    written = compiled(function, arguments, 2, "gpipe")
    assert written.source is not None
    own = options.Options(schedule="interleaved_1f1b", interleave=2)
    monkeypatch.setattr(options, "in_force", lambda: own)
    explained = explain(compile_file(written.source.hlo, 2, guarded=False))
    text = to_text(explained)
    assert "run as interleaved_1f1b: 2 stages x 2 chunks, 4 microbatches" in text
    assert "10 iterations became 24 of one run each, bubble 11%, as written 20%" in text
    assert "chunks of microbatches alive on each stage: 5, 3, as written 8" in text
    assert "bytes of weights are moved before it" in text
    drawn = svg(explained["loops"], ["" for _ in explained["loops"]])
    assert [drawn.count(f'class="{kind}"') for kind in "FB"] == [16, 16]
    assert [drawn.count(f'fill-opacity="{shade}"') for shade in ("1.00", "0.35")] == [16, 16]
    assert "device 0, iteration 4, forwards, microbatch 3, chunk 1<" in drawn
