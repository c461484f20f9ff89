"""Pipelines whose stages are one array, under `vmap`, partitioned by XLA: interleaved, and as 1F1B and ZB-H1.

Judged by the program as it is written and by JAX's CPU backend. Messages are counted, and what must not be
moved out of its loop is written so that moving it would give other numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, manual, mesh, shards
from gpipe import inputs, layer, weights
from interpreter import Interpreter
from jax import lax
from jax.sharding import NamedSharding
from random_steps import Step, WrittenStep, check_hops, compare, compiled
from training_steps import Draw, program, stacked_outputs

from stretto.collectives.types import TensorType
from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.graph import Module, all_instructions
from stretto.hlo_frontend.pipelines.partitioned import localized
from stretto.runtime.program import Loop

STEPS = {
    "roll": Draw(stages=4, microbatches=5, shift="roll", embeds=True),
    "where": Draw(stages=3, microbatches=2, shift="where", collect="scan", again="layer"),
    "data": Draw(
        axes="dx", microbatches=3, shift="roll", dtype="bfloat16", again="stage", travels="mask"
    ),
    "iteration": Draw(stages=3, shift="roll", again="iteration", dtype="bfloat16"),
    "pad": Draw(stages=4, microbatches=5, shift="pad", again="stage"),
    "dynamic": Draw(axes="xd", shift="dynamic", collect="scan", dtype="bfloat16"),
    "concatenate": Draw(stages=3, microbatches=2, shift="concatenate", again="layer"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("d", STEPS.values(), ids=STEPS)
def test_a_step_is_run_as_1f1b(d):
    found = compare(Draw(**{**vars(d), "mask": "where", "loss": "squares"}), "1f1b")
    assert found.whys == ()
    (report,) = found.module.interleaved
    assert (report.rounds, found.differs) == ("", ())
    assert report.rows == min(d.stages, d.microbatches)
    if d.axes == "x":
        check_hops(found, d)


@pytest.mark.thorough
def test_an_iteration_that_is_computed_again():
    """Nothing is sent again. With barriers around what is computed again an engine may round."""
    for again, shift in (("iteration", "pad"), ("barriers", "concatenate")):
        d = Draw(stages=2, microbatches=3, shift=shift, again=again, mask="where", loss="squares")
        found = compare(d, "1f1b")
        assert (found.whys, found.differs) == ((), ())
        check_hops(found, d)


def test_where_to_put_what_is_computed_again_is_said():
    """What draws random numbers may be simplified otherwise where it is computed again."""
    found = compare(Draw(again="iteration", head="cond", mask="where", dropout="shared"), "1f1b")
    assert "put jax.checkpoint around the stage, not around the iteration" in found.whys[0]


STAGES = {
    "one layer": Draw(stage="unrolled", layers=1, shift="roll"),
    "computed again": Draw(stage="unrolled", layers=1, shift="where", again="stage"),
    "unrolled": Draw(stages=3, stage="unrolled", shift="roll", collect="scan", loss="cross"),
    "two scans": Draw(stage="two", shift="roll", again="stage", axes="dx", dtype="bfloat16"),
    "norm before": Draw(stage="before", shift="where", axes="xy", travels="segments"),
    "norm behind": Draw(stage="behind", shift="roll", again="layer", microbatches=2),
}


@pytest.mark.parametrize(
    "d",
    [
        pytest.param(d, marks=[pytest.mark.thorough] * (n > 1))
        for n, d in enumerate(STAGES.values())
    ],
    ids=STAGES,
)
def test_stages_that_are_no_loop_over_layers(d):
    step = Step(Draw(**{**vars(d), "mask": "where"}))
    for schedule in ("1f1b", "zb_h1"):
        found = step.judged(schedule)
        (report,) = found.module.interleaved
        assert report.rows == min(d.stages, d.microbatches)
    step.check_written()


HEADS = {
    "under a cond": Draw(stages=3, head="cond", collect="put"),
    "under a where": Draw(head="where", collect="scan", stage="unrolled", layers=1),
    "of a scan": Draw(head="cond", collect="scan", again="stage", dtype="bfloat16"),
    "tensors": Draw(axes="xy", head="cond", collect="put", loss="smooth"),
    "rows of data": Draw(axes="xd", head="cond", collect="put", stage="unrolled", layers=1),
    "rows of data, under a where": Draw(axes="xd", head="where", collect="scan", again="stage"),
    "rows of data, smooth": Draw(axes="dx", head="where", loss="smooth", microbatches=3),
}


@pytest.mark.parametrize(
    "d",
    [
        pytest.param(d, marks=[pytest.mark.thorough] * (n not in (0, 1, 4)))
        for n, d in enumerate(HEADS.values())
    ],
    ids=HEADS,
)
def test_a_head_that_all_stages_compute_in_the_loop(d):
    """It is left to the last stage. Losses and their gradients are given to all behind the loops."""
    step = Step(Draw(**{**vars(d), "mask": "where", "shift": "roll"}))
    for schedule in ("1f1b", "zb_h1"):
        found = step.judged(schedule)
        (report,) = found.module.interleaved
        assert report.rounds
        assert report.rows == min(d.stages, d.microbatches)
        if d.axes == "x":
            check_hops(found, d)
    step.check_written()


def test_the_gradient_of_a_head_is_summed_up_in_its_turns():
    """The loop carries the sum beside the head's weights, and so nothing of each microbatch for it."""
    d = Draw(stages=2, microbatches=3, head="cond", collect="put", mask="where", shift="roll")
    step = Step(d)
    module = step.judged("1f1b").module
    (report,) = module.interleaved
    (loop,) = (
        i
        for i in module.program.body.instructions
        if isinstance(i, Loop) and i.trip_count == report.after
    )
    types = [module.program.slot_types[slot] for slot in loop.outputs]
    assert types.count(TensorType("f32", (d.width, d.classes))) == 2


@pytest.mark.thorough
def test_a_step_is_run_as_zb_h1():
    d = Draw(stages=2, microbatches=3, shift="roll", mask="where", loss="squares")
    found = compare(d, "zb_h1")
    assert found.whys == ()
    (report,) = found.module.interleaved
    assert report.left > 0


@pytest.mark.thorough
@pytest.mark.parametrize("shift", ["roll", "concatenate"])
def test_a_forward_pass_is_interleaved(shift):
    d = Draw(stages=3, microbatches=4, shift=shift, mask="where", layers=4)
    over = jax.sharding.Mesh(np.array(jax.devices("cpu")[:3]), ("x",))
    _, (parameters, _, wanted), _, _ = program(d)
    xs = np.random.default_rng(1).standard_normal((4, 4, 8)).astype(np.float32)
    by_stage, all_of_it = NamedSharding(over, P("x")), NamedSharding(over, P())
    function = jax.jit(
        lambda layers, xs: stacked_outputs(d, over, layers, xs, wanted, parameters["head"]),
        in_shardings=(by_stage, all_of_it),
    )
    given = parameters["layers"], xs
    module = compiled(function, given, 3, "gpipe", interleave=2)
    (report,) = module.interleaved
    assert (report.why, report.before, report.after) == ("", 6, 10)
    parts = [shards(w, over, P("x")) for w in jax.tree.leaves(given[0])] + [shards(xs, over, P())]
    found = Interpreter(module.program, skipped=np.nan).run(*parts)
    written = Interpreter(compiled(function, given, 3, "gpipe").program).run(*parts)
    np.testing.assert_array_equal(np.array(found), np.array(written))
    np.testing.assert_allclose(np.array(found)[0][0], function(*given), rtol=2e-5, atol=2e-5)


# Communication in the loop of a program that is written for a device.


def looped(stages: int, microbatches: int, given, start=jnp.zeros_like):
    """Outputs are what ``given(stage, y)`` is, from the iteration on in which the first microbatch leaves."""

    def local(layers, xs):
        stage = lax.axis_index("x")

        def iteration(carry, i):
            received, outputs = carry
            x = jnp.where(stage == 0, xs[jnp.clip(i, 0, microbatches - 1)], received)
            y = lax.scan(layer, x, layers)[0]
            out = i - (stages - 1)
            put = outputs.at[jnp.clip(out, 0, microbatches - 1)].set(given(stage, y))
            outputs = jnp.where(out >= 0, put, outputs)
            return (lax.ppermute(y, "x", [(s, s + 1) for s in range(stages - 1)]), outputs), None

        begin = jnp.zeros_like(xs[0]), start(xs)
        (_, outputs), _ = lax.scan(iteration, begin, jnp.arange(microbatches + stages - 1))
        return outputs

    return manual(local, mesh(stages), (P("x"), P()), P())


GIVEN = weights(3 * 4), inputs(4)


def bits_of(module) -> bytes:
    """Of what a pipeline of 3 stages gives."""
    layers, xs = GIVEN
    over = mesh(3)
    parts = [shards(w, over, P("x")) for w in jax.tree.leaves(layers)] + [shards(xs, over, P())]
    return np.array(Interpreter(module.program, skipped=np.nan).run(*parts)).tobytes()


def interleaved(function) -> tuple[str, bool]:
    """Why a pipeline of 3 stages is not interleaved, and whether it gives the same bits as it is written."""
    module = compiled(function, GIVEN, 3, "gpipe", interleave=2)
    (report,) = module.interleaved
    return report.why, bits_of(module) == bits_of(compiled(function, GIVEN, 3, "gpipe"))


def left_to_one(function) -> tuple[int, str, bool]:
    """How many all-reduces are left in the loop of such a pipeline, why, if one is, and whether it gives the
    same bits."""
    written = compiled(function, GIVEN, 3, "gpipe")
    found = localized(written.source.hlo, 1, 3)
    assert found.left == (found.module != written.source.hlo)
    loops = [i for i in Module.parse(found.module).entry.instructions if i.opcode == "while"]
    inside = [i for loop in loops for i in all_instructions(loop.called[0])]
    count = sum(i.opcode == "all-reduce" for i in inside)
    equal = bits_of(compile_hlo(found.module, 1, 3)) == bits_of(written)
    return count, "".join(found.whys.values()), equal


def of_the_last(stage, y):
    return lax.psum(jnp.where(stage == 2, y, 0), "x")


def test_outputs_that_a_sum_gives_to_all():
    assert interleaved(looped(3, 4, of_the_last)) == ("", True)


LEFT = {
    "goes-on": (lambda stage, y: jnp.sin(of_the_last(stage, y)), jnp.zeros_like),
    "begins": (of_the_last, jnp.ones_like),
    "signs": (lambda stage, y: 1 / of_the_last(stage, y * 0 - 0.0), jnp.zeros_like),
    "minus": (lambda stage, y: -jnp.abs(of_the_last(stage, y) * 0), jnp.zeros_like),
    "looked-at": (lambda stage, y: (of_the_last(stage, y) > 0).astype(y.dtype), jnp.zeros_like),
}


@pytest.mark.parametrize(("given", "start"), LEFT.values(), ids=LEFT)
def test_what_all_compute_in_the_loop_is_left_to_one(given, start):
    """With the bits that all had. Interleaving, which promises all bits, refuses it."""
    function = looped(3, 4, given, start)
    count, _, equal = left_to_one(function)
    assert (count, equal) == (0, True)
    why, equal = interleaved(function)
    assert equal and "not only by permutes" in why


KEPT = {
    "all-give": (lambda stage, y: lax.psum(y, "x"), jnp.zeros_like, "given by 3 devices"),
    "two-give": (
        lambda stage, y: lax.psum(jnp.where(stage > 0, y, 0), "x"),
        jnp.zeros_like,
        "given by 2 devices",
    ),
    "gathered": (
        lambda stage, y: lax.all_gather(of_the_last(stage, y), "x").sum(0),
        jnp.zeros_like,
        "is read in the loop by",
    ),
    "differs": (
        lambda stage, y: jnp.where(stage == 1, 0, of_the_last(stage, y)),
        jnp.zeros_like,
        "differs from device to device",
    ),
}


@pytest.mark.parametrize(("given", "start", "why"), KEPT.values(), ids=KEPT)
def test_sums_that_stay_in_the_loop(given, start, why):
    count, found, equal = left_to_one(looped(3, 4, given, start))
    assert count >= 1 and equal and why in found
    found, equal = interleaved(looped(3, 4, given, start))
    assert equal and "not only by permutes" in found and why in found


def test_sums_that_are_one_are_taken_apart():
    """What the last stage gives is put away behind the loop. What all give, in the same sum, stays."""

    def given(stage, y):
        mine, _ = lax.psum((jnp.where(stage == 2, y, 0), jnp.sin(y)), "x")
        return mine

    def both(stage, y):
        mine, of_all = lax.psum((jnp.where(stage == 2, y, 0), jnp.sin(y)), "x")
        return mine + of_all

    for own, left in (given, []), (both, [1]):
        written = compiled(looped(3, 4, own), GIVEN, 3, "gpipe")
        made = localized(written.source.hlo, 1, 3).module
        loops = [i for i in Module.parse(made).entry.instructions if i.opcode == "while"]
        inside = [i for loop in loops for i in all_instructions(loop.called[0])]
        assert [len(i.operands) for i in inside if i.opcode == "all-reduce"] == left
        assert bits_of(compile_hlo(made, 1, 3)) == bits_of(written)


@pytest.mark.thorough
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_what_an_encoder_gave_goes_with_a_microbatch(schedule):
    """Two arrays go from stage to stage, and the gradients of both come back, to what was before the loop."""
    stages, microbatches, over = 2, 4, mesh(2)
    numbers = jnp.arange(stages)

    def step(layers, code, xs):
        memory = jnp.tanh(xs @ code)

        def iteration(carry, i):
            taken = [jnp.roll(c, 1, 0) for c in carry[:2]]
            entering = jnp.clip(i, 0, microbatches - 1)
            taken = [t.at[0].set(a[entering]) for t, a in zip(taken, (xs, memory), strict=True)]

            def one(w, x, read, working):
                def layer(x, w):
                    return x + jnp.tanh(x @ w["w1"] + read) @ w["w2"], None

                w, x, read = jax.tree.map(lambda a: jnp.where(working, a, 0), (w, x, read))
                return lax.scan(layer, x, w)[0], read

            working = (i >= numbers) & (i - numbers < microbatches)
            y, read = jax.vmap(one)(layers, *taken, working)
            y, read = (lax.with_sharding_constraint(a, by_stage) for a in (y, read))
            out = i - (stages - 1)
            put = carry[2].at[jnp.clip(out, 0, microbatches - 1)].set(y[-1])
            return (y, read, jnp.where(out >= 0, put, carry[2])), None

        zeros = jnp.zeros((stages, *xs.shape[1:]), xs.dtype)
        trips = jnp.arange(microbatches + stages - 1)
        (_, _, outputs), _ = lax.scan(iteration, (zeros, zeros, jnp.zeros_like(xs)), trips)
        return jnp.sum(outputs**2)

    by_stage, all_of_it = NamedSharding(over, P("x")), NamedSharding(over, P())
    rng = np.random.default_rng(0)
    layers = {
        k: (rng.standard_normal((stages, 2, 8, 8)) * 0.4).astype(np.float32) for k in ("w1", "w2")
    }
    code = rng.standard_normal((8, 8)).astype(np.float32)
    given = layers, code, rng.standard_normal((microbatches, 4, 8)).astype(np.float32)
    function = jax.jit(
        jax.value_and_grad(step, argnums=(0, 1, 2)),
        in_shardings=(by_stage, all_of_it, all_of_it),
    )
    found = WrittenStep(function, given, [P("x"), P("x"), P(), P()], over)
    ran = found.judged(schedule).ran
    found.check_written()
    assert ran is not None
    # All stages have what the encoder gave, which is not sent there. Two gradients are sent back.
    assert ran.messages == {(0, 1): microbatches, (1, 0): 2 * microbatches}


def test_what_stages_compute_together_is_not_left_to_one():
    function = looped(3, 4, lambda stage, y: lax.psum(jnp.sin(of_the_last(stage, y)), "x"))
    count, why, equal = left_to_one(function)
    assert count >= 1 and equal
    assert "It is not left to one stage" in why
    assert "is among devices of which only some have it" in why


def test_a_loop_that_ends_by_what_a_stage_gave_is_not_left_to_one():
    """With the zeros that other stages would compute of it, it might never end."""

    def halved(stage, y):
        given = of_the_last(stage, y)
        return lax.while_loop(lambda a: jnp.sum(a * a) > 1, lambda a: a / 2, given)

    count, why, equal = left_to_one(looped(3, 4, halved))
    assert count >= 1 and equal
    assert "It is not left to one stage: it is not known how long" in why


def test_a_step_without_a_mask_says_what_to_mask():
    def local(d, over, layers, xs):
        def iteration(state, i):
            x = xs[jnp.clip(i, 0, 2)]
            shifted = jnp.roll(state, 1, axis=0).at[0].set(x)
            state = jax.vmap(lambda x, w: lax.scan(layer, x, w)[0])(shifted, layers)
            return lax.with_sharding_constraint(state, NamedSharding(over, P("x"))), state[-1]

        start = jnp.zeros((2, *xs.shape[1:]))
        return jnp.sum(lax.scan(iteration, start, jnp.arange(4))[1][1:] ** 2)

    over = mesh(2)
    layers = jax.tree.map(lambda w: w.reshape(2, 4, *w.shape[1:]), weights(2 * 4))
    by_stage = NamedSharding(over, P("x"))
    function = jax.jit(
        jax.grad(lambda layers, xs: local(None, over, layers, xs)),
        in_shardings=(by_stage, NamedSharding(over, P())),
    )
    module = compiled(function, (layers, inputs(3)), 2, "1f1b")
    assert any("mask its input and its weights with jnp.where" in r.why for r in module.interleaved)
