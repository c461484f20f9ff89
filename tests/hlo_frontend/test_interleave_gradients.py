"""Steps of training, interleaved: forward and backward loop together, with the same gradients bit for bit.

Judged by the step as it is written, by JAX's CPU backend, and by messages counted by hand: each microbatch
makes P * R - 1 hops there and as many back, and weights and their gradients change places before and after.
"""

from __future__ import annotations

import itertools
import os
import random

import gpipe
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, manual, mesh, same, shards
from gpipe import PARALLEL, by_hand, inputs, parallel_weights, squared, taken, weights, where
from interpreter import Interpreter
from jax import lax
from random_steps import DEAD_ONLY, bits

from stretto.commands.explain import explain, to_text
from stretto.commands.hlo_input import compile_file
from stretto.hlo_frontend.compile import CompiledModule, CompileSpec, compile_stablehlo
from stretto.hlo_frontend.pipelines import driver
from stretto.hlo_frontend.pipelines.layers import LayerLoop
from stretto.hlo_frontend.pipelines.timetable import Timetable, timetable
from stretto.runtime import options

LAYERS = 6  # of a device: 2 and 3 chunks
EVERY = list(itertools.product(range(2, 5), range(2, 7), (2, 3)))
# All 30 with STRETTO_TEST_FULL=1.
SOME = [(2, 5, 3), (4, 2, 2), *random.Random(5).sample(EVERY, 1)]
SHAPES = EVERY if os.environ.get("STRETTO_TEST_FULL") else SOME


def compiled(function, arguments, devices: int, chunks: int, **how) -> CompiledModule:
    text = function.trace(*arguments).lower().as_text()
    return compile_stablehlo(text, CompileSpec(1, devices), interleave=chunks, **how)


def judge(function, arguments, specs, over, chunks: int = 2, **how) -> Interpreter:
    """Compare with the step as it is written, bit for bit, and with JAX; gives what ran the interleaved one.

    What is received where a transfer is left out is NaN.
    """
    devices = over.devices.size
    module = compiled(function, arguments, devices, chunks, valid=DEAD_ONLY, **how)
    assert len(module.interleaved) > 1
    assert [loop.why for loop in module.interleaved] == [""] * len(module.interleaved)
    given = [shards(a, over, s) for a, s in zip(jax.tree.leaves(arguments), specs, strict=True)]
    interpreter = Interpreter(module.program, skipped=np.nan)
    found = interpreter.run(*given)
    written = Interpreter(compiled(function, arguments, devices, 1).program).run(*given)
    reference = jax.tree.leaves(function(*arguments))
    for result, expected, array in zip(found, written, reference, strict=True):
        by_device = {s.device: np.asarray(s.data) for s in array.addressable_shards}
        for d, device in enumerate(over.devices.flat):
            np.testing.assert_array_equal(bits(result[d]), bits(expected[d]))
            if len(by_device) == devices:
                same(result[d], by_device[device])
    return interpreter


def moved(stages: int, chunks: int) -> int:
    """Chunks that are not where they should be, counted one by one."""
    layers = np.arange(stages * chunks)
    return int(np.sum(layers // chunks != layers % stages))


def step(stages: int, microbatches: int, **how):
    """A step of training on a line of stages, its shardings and the mesh."""
    over = mesh(stages)
    return squared(where(stages, microbatches, **how), over, (P("x"), P())), over


SPECS = (P("x"), P("x"), P())


@pytest.mark.thorough
@pytest.mark.parametrize(("stages", "microbatches", "chunks"), SHAPES)
def test_gradients_are_those_of_the_written_step(stages, microbatches, chunks):
    function, over = step(stages, microbatches)
    arguments = weights(stages * LAYERS), inputs(microbatches)
    ran = judge(function, arguments, SPECS, over, chunks)
    hops = 2 * microbatches * (stages * chunks - 1)
    # Two arrays of weights, moved once for both passes, and their gradients.
    assert sum(ran.messages.values()) == hops + 4 * moved(stages, chunks)


@pytest.mark.thorough
@pytest.mark.bits
def test_with_a_layer_that_is_computed_again():
    """On stages that are no ring, as others here are."""
    function, over = step(3, 4, layer=jax.checkpoint(gpipe.layer), ring=False)
    ran = judge(function, (weights(3 * 4), inputs(4)), SPECS, over)
    assert sum(ran.messages.values()) == 2 * 4 * 5 + 4 * moved(3, 2)


@pytest.mark.thorough
@pytest.mark.bits
@pytest.mark.parametrize(
    ("shape", "policy"),
    [((2, 3, 2), None), ((3, 4, 3), jax.checkpoint_policies.dots_saveable)],
    ids=["nothing-kept", "products-kept"],
)
def test_with_a_stage_that_is_computed_again(shape, policy):
    """Each chunk from what it began with, and what a policy keeps of its layers: nothing more is sent."""
    stages, microbatches, chunks = shape

    def again(layer, x, layers):
        return jax.checkpoint(lambda x, w: lax.scan(layer, x, w), policy=policy)(x, layers)

    function, over = step(stages, microbatches, scan=again)
    ran = judge(function, (weights(stages * LAYERS), inputs(microbatches)), SPECS, over, chunks)
    hops = 2 * microbatches * (stages * chunks - 1)
    assert sum(ran.messages.values()) == hops + 4 * moved(stages, chunks)


@pytest.mark.thorough
def test_a_masked_stage_without_a_conditional():
    """The weights are masked too, or what padding gives would count."""

    def masked(layer, x, layers, i):
        slot = i - lax.axis_index("x")
        working = (slot >= 0) & (slot < 3)
        own = jax.tree.map(lambda w: jnp.where(working, w, 0), layers)
        return lax.scan(layer, jnp.where(working, x, 0), own)

    function, over = step(2, 3, scan=masked, numbered=True, mask="nothing")
    judge(function, (weights(2 * 4), inputs(3)), SPECS, over)


@pytest.mark.thorough
@pytest.mark.parametrize("masked", ["input", "result"])
def test_a_loss_in_the_loop(masked):
    """Of what the last stage gives; elsewhere it must not be computed from what is there."""

    def local(layers, xs):
        stage, last = lax.axis_index("x"), 2

        def iteration(carry, i):
            received, loss = carry
            x = jnp.where(stage == 0, xs[jnp.clip(i, 0, 3)], received)
            working = (i >= stage) & (i - stage < 4)
            y = lax.cond(working, lambda x: lax.scan(gpipe.layer, x, layers)[0], jnp.zeros_like, x)
            given = (stage == last) & (i >= last)
            seen = jnp.where(given, y, 0) if masked == "input" else y
            own = jnp.mean((seen - 0.5) ** 2)
            loss = loss + jnp.where(given, own, 0)
            return (lax.ppermute(y, "x", [(0, 1), (1, 2), (2, 0)]), loss), None

        start = (jnp.zeros_like(xs[0]), jnp.float32(0))
        return lax.psum(lax.scan(iteration, start, jnp.arange(6))[0][1], "x")

    function = squared(local, mesh(3), (P("x"), P()))
    arguments = weights(3 * 4), inputs(4)
    if masked == "input":
        judge(function, arguments, SPECS, mesh(3))
    else:
        why = refused(function, arguments, 3)
        assert any("not, bit for bit, what another one gave" in w and "by add" in w for w in why)


@pytest.mark.thorough
@pytest.mark.parametrize("names", ["dx", "xd"])
def test_pipelines_side_by_side(names):
    """Gradients are summed up over the halves of the batch after the loop."""
    over = mesh(2, 2, names=names)
    specs = (P("x"), P(None, "d"))
    function = squared(where(2, 3), over, specs, P(None, "d"))
    judge(function, (weights(2 * 4), inputs(3)), (P("x"), *specs), over)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("names", "how"), [("xy", "plain"), ("yx", "layer"), ("xy", "stage"), ("yx", "stage")]
)
def test_layers_that_communicate_within_their_stage(names, how):
    """Tensor parallelism: layers are divided over an axis of the mesh, stages lie along the other one."""

    def again(layer, x, layers):
        return jax.checkpoint(lambda x, w: lax.scan(layer, x, w))(x, layers)

    over = mesh(2, 2, names=names)
    layer = jax.checkpoint(gpipe.parallel_layer) if how == "layer" else gpipe.parallel_layer
    local = where(2, 3, layer=layer, scan=again if how == "stage" else lax.scan)
    function = squared(local, over, (PARALLEL, P()))
    arguments = parallel_weights(2 * 4), inputs(3)
    specs = (PARALLEL["down"], PARALLEL["up"], P())
    ran = judge(function, arguments, specs, over)
    assert sum(ran.messages.values()) == 2 * (2 * 3 * 3 + 4 * moved(2, 2))


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["gathered", "exchanged"])
def test_layers_that_communicate_in_other_ways(how):
    """Rows divided over the axis are gathered and scattered again, or exchanged with columns."""

    def layer(x, w):
        if how == "exchanged":
            x = lax.all_to_all(x, "y", 1, 0, tiled=True)
            return lax.all_to_all(jnp.tanh(x + w["b"]), "y", 0, 1, tiled=True), None
        whole = lax.all_gather(x, "y", tiled=True)
        given = jnp.tanh(whole @ w["up"]) @ w["down"]
        return x + lax.psum_scatter(given, "y", tiled=True), None

    over = mesh(2, 2)
    if how == "exchanged":
        arguments, of_weights = {"b": weights(2 * 4)["b"]}, {"b": P("x", "y")}
    else:
        arguments, of_weights = parallel_weights(2 * 4), PARALLEL
    batch = P(None, "y")
    function = squared(where(2, 3, layer=layer), over, (of_weights, batch), batch)
    given = arguments, inputs(3)
    specs = [of_weights[name] for name in sorted(arguments)]
    judge(function, given, (*specs, batch), over)


@pytest.mark.thorough
def test_weights_that_all_devices_have():
    over = mesh(3)
    function = squared(taken(where(3, 4), 3, 4), over, (P(), P()))
    arguments = weights(3 * 4), inputs(4)
    ran = judge(function, arguments, (P(), P(), P()), over)
    assert sum(ran.messages.values()) == 2 * 4 * 5 + 2 * moved(3, 2)  # gradients alone
    forward, backward = compiled(function, arguments, 3, 2).interleaved
    assert (forward.moved, forward.taken, backward.moved) == (0, 2, 0)
    layer = 4 * (gpipe.WIDTH * gpipe.WIDTH + gpipe.WIDTH)
    assert backward.back == moved(3, 2) * 2 * layer
    assert f"{backward.back} bytes of their gradients after it" in backward.describe()


@pytest.mark.thorough
@pytest.mark.bits
def test_small_floats():
    dtype = jnp.dtype("bfloat16")
    function, over = step(2, 3)
    judge(function, (weights(2 * 4, dtype), inputs(3, dtype)), SPECS, over)


@pytest.mark.thorough
def test_zeros_of_both_signs():
    """A gradient may be -0; where zeros are added to it between stages, it becomes 0 as it is written."""

    @jax.custom_vjp
    def signed(x):
        return x

    def pulled(_, dy):
        # 1 where dy is -0, and -0 where it is 0: whatever happens to a sign is seen in the end.
        return (jnp.where(lax.bitcast_convert_type(dy, np.int32) < 0, 1.0, -0.0),)

    signed.defvjp(lambda x: (x, None), pulled)

    def layer(x, w):
        return signed(x * w["b"]), None

    function, over = step(2, 3, layer=layer)
    arguments = {"b": weights(2 * 4)["b"]}, inputs(3)
    judge(function, arguments, (P("x"), P()), over)


@pytest.mark.thorough
def test_not_a_number_stays_where_it_is():
    stages, microbatches, chunks = SOME[0]  # whose segments are compiled already
    function, over = step(stages, microbatches)
    arguments = weights(stages * LAYERS), inputs(microbatches)
    arguments[1][1, 0, 0] = np.nan
    judge(function, arguments, SPECS, over, chunks)


@pytest.mark.thorough
def test_two_passes_written_by_hand():
    over = mesh(3)
    function = manual(by_hand(3, 4), over, (P("x"), P()), (P(), P("x"), P()))
    ran = judge(function, (weights(3 * 4), inputs(4)), SPECS, over)
    # The ways of gradients; and the bias is moved for the passes together.
    assert sum(ran.messages.values()) == 2 * 4 * 5 + 4 * moved(3, 2)


@pytest.mark.thorough
def test_a_backward_pass_in_another_order():
    """Each microbatch takes, on all stages, what was kept for the next one."""

    def read(kept, at):
        stage = lax.axis_index("x")
        return kept[stage + (at - stage + 1) % 4]

    function = manual(by_hand(3, 4, read=read), mesh(3), (P("x"), P()), (P(), P("x"), P()))
    judge(function, (weights(3 * 4), inputs(4)), SPECS, mesh(3))


@pytest.mark.thorough
def test_pipelines_one_after_the_other():
    """The second takes what the first gives; four loops."""
    first, second = where(2, 3), where(2, 3)

    def local(layers, xs):
        return second(layers, jnp.sin(first(layers, xs)))

    over = mesh(2)
    function = squared(local, over, (P("x"), P()))
    judge(function, (weights(2 * 4), inputs(3)), SPECS, over)


# What is refused, and stays as it is written.


def refused(function, arguments, devices: int) -> list[str]:
    module = compiled(function, arguments, devices, 2)
    assert module.program == compiled(function, arguments, devices, 1).program
    return [loop.why for loop in module.interleaved]


def variant(**changes) -> list[str]:
    local = by_hand(2, 3, **changes)
    function = manual(local, mesh(2), (P("x"), P()), (P(), P("x"), P()))
    forward, backward = refused(function, (weights(2 * 4), inputs(3)), 2)
    assert "read otherwise than by a pipeline that is interleaved with it" in forward
    return [forward, backward]


def test_slices_of_another_microbatch():
    """On the second stage only."""

    def read(kept, at):
        stage = lax.axis_index("x")
        return kept[stage + at % 3]

    _, why = variant(read=read)
    assert "is not what the same layers kept for the same microbatch" in why


def test_slices_of_other_layers():
    _, why = variant(read=lambda kept, at: jnp.roll(kept[at], 1, 0))
    assert "changes from iteration to iteration" in why


def test_slices_that_were_changed_between_the_passes():
    _, why = variant(between=lambda kept: kept * 0.5)
    assert "changes from iteration to iteration" in why


def test_slices_that_are_summed_up_over_microbatches():
    _, why = variant(keep=lambda last, kept: last + kept)
    assert "changes from iteration to iteration" in why


def test_a_stage_that_is_computed_again_from_something_else():
    def almost(layer, x, layers):
        @jax.custom_vjp
        def stage(x, w):
            return lax.scan(layer, x, w)[0]

        def pulled(given, dy):
            x, w = given
            return jax.vjp(lambda x, w: lax.scan(layer, x, w)[0], 2 * x, w)[1](dy)

        stage.defvjp(lambda x, w: (stage(x, w), (x, w)), pulled)
        return stage(x, layers), None

    function, _ = step(2, 3, scan=almost)
    _, why = refused(function, (weights(2 * 4), inputs(3)), 2)
    assert "does not compute again what a pipeline that is interleaved did" in why


def test_gradients_that_are_seen_on_the_way():
    function = manual(
        by_hand(2, 3, spy=lambda dw: jnp.sum(dw["a"] ** 2)), mesh(2), (P("x"), P()), (P(), P("x"), P())
    )  # fmt: skip
    _, why = refused(function, (weights(2 * 4), inputs(3)), 2)
    assert "is read otherwise than" in why


def test_gradients_that_are_not_just_added():
    _, why = variant(add=lambda total, dw: 0.9 * total + dw)
    assert "is read otherwise than" in why


@pytest.mark.parametrize("mask", ["zeros", "nothing"])
def test_gradients_of_padding(mask):
    function, _ = step(2, 3, mask=mask)
    whys = refused(function, (weights(2 * 4), inputs(3)), 2)
    assert any("give on padding counts too" in why for why in whys)


# The rewritten loops are proved again: here they are made wrongly.


def other_rows(self, rests):
    return np.roll(self.microbatch_(rests), 1, axis=1)


def no_seams(self, chunks):
    return np.zeros_like(self.seams_(chunks))


def other_slices(self, start, size):
    return start


def test_wrong_rows_are_seen(monkeypatch):
    monkeypatch.setattr(Timetable, "microbatch_", Timetable.microbatch, raising=False)
    monkeypatch.setattr(Timetable, "microbatch", other_rows)
    function, _ = step(2, 3)
    whys = refused(function, (weights(2 * 4), inputs(3)), 2)
    assert any("reads what other layers kept, or for another microbatch" in why for why in whys)


def test_a_lost_sign_of_zero_is_seen(monkeypatch):
    monkeypatch.setattr(Timetable, "seams_", Timetable.seams, raising=False)
    monkeypatch.setattr(Timetable, "seams", no_seams)
    function, _ = step(2, 3)
    _, why = refused(function, (weights(2 * 4), inputs(3)), 2)
    assert "is changed on its way" in why


def test_another_order_of_microbatches_is_seen(monkeypatch):
    """Two microbatches whose gradients are added the other way round."""

    def wrong(stages, chunks, enters, leaves, trips):
        return timetable(stages, chunks, enters[::-1], leaves[::-1], trips)

    monkeypatch.setattr(driver, "timetable", wrong)
    function, _ = step(2, 3)
    assert all(refused(function, (weights(2 * 4), inputs(3)), 2))


def test_other_slices_are_seen(monkeypatch):
    monkeypatch.setattr(LayerLoop, "first_slice", other_slices)
    function, _ = step(2, 3)
    assert all(refused(function, (weights(2 * 4), inputs(3)), 2))


@pytest.mark.thorough
def test_explain_shows_both_passes(monkeypatch):
    """The backward pass begins on the last device."""
    function, _ = step(3, 3)
    written = compiled(function, (weights(3 * 4), inputs(3)), 3, 1)
    assert written.source is not None
    monkeypatch.setattr(options, "in_force", lambda: options.Options(interleave=2))
    lines = to_text(explain(compile_file(written.source.hlo, 3, guarded=False))).split("\n")
    assert sum("3 stages x 2 chunks of 2 layers, 3 microbatches" in line for line in lines) == 2
    rows = ["■■■■■■□□", "□■■■■■■□", "□□■■■■■■"]
    assert [line.split()[-1] for line in lines if "■" in line] == rows + rows[::-1]
