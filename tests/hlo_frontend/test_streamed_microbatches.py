"""Pipelines whose microbatches are divided over the stages, and handed on in the loop, inputs towards the
first stage and outputs from the last one, as praxis and MaxText write them: as 1F1B, ZB-H1 and interleaved.

Judged by the program as it is written, and that by JAX's CPU backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, mesh
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from random_steps import WrittenStep
from training_steps import trained

from stretto.hlo_frontend.graph import Module, all_instructions
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.hlo_frontend.pipelines.unstreamed import unstreamed

ROWS, WIDTH, WORDS = 4, 8, 12
FINITE = ValidPolicy(dead_only=True, finite_padding=True)


@dataclass(frozen=True)
class Form:
    """``shift``: how arrays are handed on, by a roll, or by `ppermute` within `shard_map`, a pad and a
    slice, or a concatenation, where the first stage gets zeros. ``head``: what is
    done with the outputs: "gathered" has a head of all on each stage, and others of those that a stage holds,
    "focal" with a loss that is not linear in what it takes by number, "ignored" with one that counts; but
    "squares" are summed up as they lie. Of "classes" each stage has a part.
    ``layers``: of a stage, in a scan, or a block if that is 0.
    ``data``: devices that divide the rows of microbatches, or, if ``tensor`` says so, what is between the two
    products of a layer. ``training``: within a loop over steps. ``mask``:
    of padding. ``again``: what is under `jax.checkpoint`, a ``stage`` or an ``iteration``, which keeps what
    stages take, as MaxText does. ``once``: whether the first stage takes what its slots hold only as long as
    these are microbatches. ``rounds``: how often a microbatch goes through all stages. ``reads``: what of the
    microbatches is read besides. ``packed``: how an array of numbers is divided, of which each stage takes
    those of its microbatch, as positions: by "stages", by "stages and data" at once, or not at all, "whole";
    ``numbers``: their type; ``within``: whether each layer reads them, as segments. ``barriers``: whether
    `jax.checkpoint` puts barriers around the iteration."""

    stages: int = 2
    microbatches: int = 4
    shift: str = "roll"
    head: str = "divided"
    layers: int = 0
    data: int = 1
    again: str = ""
    training: bool = False
    mask: bool = True
    once: bool = False
    rounds: int = 1
    reads: Callable[[jax.Array], jax.Array] | None = None
    packed: str = ""
    numbers: Any = np.int32
    within: bool = False
    barriers: bool = False
    tensor: bool = False

    @property
    def rows(self) -> str | None:
        """The axis of the mesh that divides the rows of microbatches."""
        return None if self.tensor else "d"


def layer(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None


def block(weights: Any, x: jax.Array) -> jax.Array:
    return layer(x, weights)[0]


def scanned(weights: Any, x: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    def within(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        if segments is None:
            return layer(x, weights)
        alike = jnp.where(segments[:, None] == segments, 0.5, 0.0)
        return layer(x + alike @ x, weights)

    return lax.scan(within, x, weights)[0]


def written(form: Form, *, gradients: bool = True) -> WrittenStep:
    """The loss and its gradients, or losses of two steps and the parameters after them; or the outputs."""
    stages, count = form.stages, form.microbatches
    each = count // stages
    over = mesh(stages, form.data, names="xd")
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return 0.3 * rng.standard_normal(shape).astype(np.float32)

    own = (stages, form.layers) if form.layers else (stages,)
    layers = {name: drawn(*own, WIDTH, WIDTH) for name in ("up", "down")}
    parameters: dict[str, Any] = {"layers": layers, "embedding": drawn(WORDS, WIDTH)}
    if form.head != "squares":
        parameters["head"] = drawn(WIDTH, WORDS)
    words = rng.integers(0, WORDS, (2, count, ROWS), dtype=np.int32)
    run = scanned if form.layers else block
    run = jax.checkpoint(run) if form.again == "stage" else run
    on_stages = NamedSharding(over, P("x", form.rows))
    all_slots = NamedSharding(over, P("x", None, form.rows))
    ids = jnp.arange(stages)
    first, last = (ids[:, None, None] == n for n in (0, stages - 1))

    def stage(weights: Any, x: jax.Array, works: jax.Array, *segments: jax.Array) -> jax.Array:
        if form.mask:
            weights, x = jax.tree.map(lambda a: jnp.where(works, a, 0), (weights, x))
        return run(weights, x, *segments)

    def handed(array: jax.Array, by: int) -> jax.Array:
        if form.shift == "roll":
            return jnp.roll(array, by, 0)
        if form.shift == "pad":
            low, high = max(by, 0), max(-by, 0)
            wide = jnp.pad(array, ((low, high), *[(0, 0)] * (array.ndim - 1)))
            return lax.slice_in_dim(wide, high, high + stages)
        if form.shift == "concatenate":
            zeros = jnp.zeros_like(array[:1])
            ends = [zeros, array[:-1]] if by > 0 else [array[1:], zeros]
            return jnp.concatenate(ends)
        pairs = [(s, (s + by) % stages) for s in range(stages)]

        def sent(own: jax.Array) -> jax.Array:
            own = lax.ppermute(own, "x", pairs)
            return own if by < 0 else jnp.where(lax.axis_index("x") == 0, 0, own)

        own = P("x", form.rows)
        return jax.shard_map(sent, mesh=over, in_specs=own, out_specs=own)(array)

    def positions(numbers: jax.Array, i: jax.Array) -> jax.Array:
        """Those of the stages' microbatches."""
        own = lax.with_sharding_constraint(
            jnp.maximum(i - ids, 0) % count, NamedSharding(over, P("x"))
        )
        taken = jax.vmap(lambda n: numbers[n])(own)
        return lax.with_sharding_constraint(taken, NamedSharding(over, P("x", P.UNCONSTRAINED)))

    def outputs(parameters: Any, given: jax.Array, numbers: jax.Array | None) -> jax.Array:
        if numbers is not None:
            numbers = numbers.reshape(count, ROWS)

        def iteration(carry: Any, i: jax.Array) -> tuple[Any, None]:
            state, stream = carry
            slot = stream[:, i % each]
            repeats = form.once or form.rounds > 1
            begins = jnp.where(i < count, slot, state) if repeats else slot
            state = jnp.where(first, begins, state)
            if form.reads is not None:
                state = state + form.reads(slot)
            works = (i >= ids) & (i - ids < form.rounds * count)
            state = lax.with_sharding_constraint(state, on_stages)
            state = checkpoint_name(state, "taken")
            own = [] if numbers is None else [positions(numbers, i)]
            if own and not form.within:
                state = state + jnp.cos(own.pop().astype(jnp.float32))[..., None]
            state = jax.vmap(stage)(parameters["layers"], state, works, *own)
            state = lax.with_sharding_constraint(state, on_stages)
            moved = jnp.where(last, state, handed(slot, -1))[:, None]
            stream = lax.dynamic_update_slice_in_dim(stream, moved, i % each, 1)
            stream = lax.with_sharding_constraint(stream, all_slots)
            return (lax.with_sharding_constraint(handed(state, 1), on_stages), stream), None

        if form.again == "iteration":
            keeps = jax.checkpoint_policies.save_only_these_names("taken")
            iteration = jax.checkpoint(iteration, policy=keeps, prevent_cse=form.barriers)
        stream = parameters["embedding"][given].reshape(stages, each, ROWS, WIDTH)
        begin = jnp.zeros((stages, ROWS, WIDTH)), lax.with_sharding_constraint(stream, all_slots)
        (_, stream), _ = lax.scan(iteration, begin, jnp.arange(form.rounds * count + stages - 1))
        in_order = (np.arange(each) + stages - 1) % each
        return stream[:, in_order].reshape(count, ROWS, WIDTH)

    def loss(parameters: Any, words: jax.Array, numbers: jax.Array | None = None) -> jax.Array:
        ys = outputs(parameters, words[0], numbers)
        if form.head == "squares":
            return (ys**2).sum()
        if form.head in ("gathered", "classes"):
            ys = lax.with_sharding_constraint(ys, NamedSharding(over, P(None, form.rows)))
        scores = ys @ parameters["head"]
        if form.head == "classes":
            divided = NamedSharding(over, P(None, form.rows, "x"))
            scores = jax.nn.log_softmax(lax.with_sharding_constraint(scores, divided))
            return -(scores * jax.nn.one_hot(words[1], WORDS)).sum(-1).mean()
        scores = jax.nn.log_softmax(scores)
        given = jnp.take_along_axis(scores, words[1][..., None], -1)
        if form.head == "focal":
            given = (1 - jnp.exp(given)) ** 2 * given
        if form.head == "ignored":
            counts = words[1] > 2
            return -jnp.where(counts, given[..., 0], 0).sum() / counts.sum()
        return -given.mean()

    specs = jax.tree.map(lambda _: P(), parameters)
    within = "d" if form.tensor else None
    own_axes = [None] * bool(form.layers)
    specs["layers"] = {
        "up": P("x", *own_axes, None, within), "down": P("x", *own_axes, within)
    }  # fmt: skip
    specs |= {"head": P(None, "x")} if form.head == "classes" else {}
    placed = jax.tree.map(lambda s: NamedSharding(over, s), specs)
    everywhere = NamedSharding(over, P())
    function = trained(loss) if form.training else jax.value_and_grad(loss)
    results: Any = (everywhere, placed)
    if not gradients:
        function, results = (
            (lambda parameters, words: outputs(parameters, words[0], None)),
            everywhere,
        )
    arguments: list[Any] = [parameters, words]
    leaves = [*jax.tree.leaves(specs), P()]
    if form.packed:
        numbers = rng.integers(0, 7, count * ROWS).astype(form.numbers)
        leaves.append(
            {"stages": P("x"), "stages and data": P(("x", "d")), "whole": P()}[form.packed]
        )
        arguments.append(numbers)
    given = (
        placed,
        *(NamedSharding(over, spec) for spec in leaves[len(leaves) - len(arguments) + 1 :]),
    )
    step = jax.jit(function, in_shardings=given, out_shardings=results)
    return WrittenStep(step, tuple(arguments), leaves, over)


FORMS = {
    "divided": Form(microbatches=6),
    "one each": Form(microbatches=2, shift="ppermute", head="gathered"),
    "gathered": Form(head="gathered", again="stage"),
    "stages": Form(stages=4, microbatches=8, head="ignored"),
    "layers": Form(stages=4, microbatches=4, head="gathered", layers=2),
    "rows": Form(data=2, head="focal"),
    "training": Form(training=True, again="stage"),
    "once": Form(shift="ppermute", once=True),
    "round": Form(once=True),
    "iteration": Form(shift="ppermute", once=True, again="iteration"),
    "its layers": Form(once=True, again="iteration", layers=2, head="ignored"),
    "layers and rows": Form(data=2, layers=2, again="stage", head="focal"),
    "layers and tensors": Form(data=2, layers=2, tensor=True),
    "pads": Form(shift="pad", stages=4, microbatches=8),
    "concatenations": Form(shift="concatenate", data=2, layers=2),
}


def held_by_streams(form: Form) -> int:
    """Bytes of inputs, of outputs and of both's gradients that a device has besides its own."""
    slot = ROWS // (1 if form.tensor else form.data) * WIDTH * 4
    trips = form.microbatches + form.stages - 1
    return slot * (form.microbatches + 2 * trips - 3 * (form.microbatches // form.stages))


def first_of(forms: Mapping[str, Form], quick: int = 1) -> pytest.MarkDecorator:
    """A test of each form, of which those behind the first ones are thorough."""
    marked = [
        pytest.param(f, marks=[pytest.mark.thorough] * (n >= quick))
        for n, f in enumerate(forms.values())
    ]
    return pytest.mark.parametrize("form", marked, ids=forms)


@first_of(FORMS, 2)
def test_a_step_is_run_in_schedules(form: Form) -> None:
    step = written(form)
    for schedule in ("1f1b", "zb_h1"):
        found = step.judged(schedule)
        (report,) = found.module.interleaved
        assert report.rows == min(form.stages, form.microbatches)
        assert "each device holds all microbatches" in report.describe()
        assert report.held == held_by_streams(form)
    step.check_written()


# As MaxText writes steps, without masks, and others like them.
MAXTEXT = Form(shift="ppermute", once=True, mask=False, again="iteration")
UNMASKED = {
    "maxtext": MAXTEXT,
    "stages": replace(MAXTEXT, stages=4, microbatches=8, head="ignored"),
    "one each": replace(MAXTEXT, stages=4, microbatches=4, head="gathered"),
    "layers": replace(MAXTEXT, stages=4, microbatches=4, layers=2),
    "rows": replace(MAXTEXT, data=2, head="focal"),
    "layers and rows": replace(MAXTEXT, data=2, layers=2, head="focal"),
    "tensors": replace(MAXTEXT, data=2, tensor=True),
    "layers and tensors": replace(MAXTEXT, data=2, layers=2, tensor=True),
    "training": replace(MAXTEXT, training=True),
    "roll": Form(mask=False, once=True, again="iteration"),
    "wraps": Form(mask=False, stages=4, microbatches=8),
    "stage again": Form(mask=False, again="stage", layers=2),
    "pads": replace(MAXTEXT, shift="pad"),
    "concatenations": replace(MAXTEXT, shift="concatenate", stages=4, microbatches=8),
}


@first_of(UNMASKED)
def test_a_step_without_masks_is_run_in_schedules(form: Form) -> None:
    """Where it is said that padding is finite: then what it adds to gradients is proved to be zeros."""
    step = written(form)
    for schedule in ("1f1b", "zb_h1"):
        found = step.judged(schedule, valid=FINITE)
        (report,) = found.module.interleaved
        assert report.unmasked and report.rows == min(form.stages, form.microbatches)
        assert report.rows < report.rows_before
        assert "gradients are NaN as written, and are not here" in report.describe()
    step.check_written()


CLASSES = {
    "maxtext": replace(MAXTEXT, head="classes"),
    "stages": Form(stages=4, microbatches=8, head="classes"),
    "rows": Form(data=2, head="classes"),
    "training": Form(head="classes", again="stage", training=True),
}


@first_of(CLASSES)
def test_stages_divide_the_classes(form: Form) -> None:
    """They get outputs of the last one, and make maxima, sums and the gradient together."""
    step = written(form)
    for schedule in ("1f1b", "zb_h1"):
        (report,) = step.judged(schedule, valid=FINITE).module.interleaved
        assert report.meetings == 4
        assert report.rows == min(form.stages, form.microbatches)
        assert report.held == held_by_streams(form)
    step.check_written()


PACKED = {
    "stages": replace(MAXTEXT, packed="stages"),
    "whole": replace(MAXTEXT, packed="whole", layers=2),
    "one each": replace(MAXTEXT, packed="stages", stages=4, head="gathered"),
    "rows": replace(MAXTEXT, packed="stages and data", data=2, head="focal"),
    "floats": replace(MAXTEXT, packed="stages", numbers=np.float32, layers=2, again=""),
    "masked": Form(packed="stages", mask=True, once=True),
}


@first_of(PACKED)
def test_stages_take_numbers_of_their_microbatch(form: Form) -> None:
    """Which the stages divide: then each of them has all, and takes its own."""
    step = written(form)
    parts = form.stages * form.data
    each = form.microbatches * ROWS // parts * 4
    # Where each has one, XLA gathers them before the loop itself.
    gathers = form.packed != "whole" and form.microbatches > form.stages
    more = each * (parts - 1) if gathers else 0
    for schedule in ("1f1b", "zb_h1"):
        (report,) = step.judged(schedule, valid=FINITE).module.interleaved
        assert report.rows == min(form.stages, form.microbatches)
        assert report.held == held_by_streams(form) + more
    step.check_written()


@pytest.mark.parametrize("layers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_with_numbers_what_is_linear_is_equal(layers: int) -> None:
    form = replace(MAXTEXT, head="squares", packed="stages", layers=layers)
    assert written(form).judged("1f1b", valid=FINITE).differs == ()


BARRIERS = {
    "masked": Form(shift="ppermute", once=True, again="iteration", barriers=True),
    "maxtext": replace(MAXTEXT, barriers=True),
    "stages": replace(MAXTEXT, barriers=True, layers=2, stages=4, microbatches=8, head="classes"),
    "packed": replace(MAXTEXT, barriers=True, packed="stages", head="focal", shift="roll"),
}


@first_of(BARRIERS)
def test_barriers_around_an_iteration_are_left_out(form: Form) -> None:
    step = written(form)
    for schedule in ("1f1b", "zb_h1"):
        (report,) = step.judged(schedule, valid=FINITE).module.interleaved
        assert report.rounds
        assert report.rows == min(form.stages, form.microbatches)
    step.check_written()


def test_what_padding_would_need_is_named() -> None:
    found = written(MAXTEXT).compare("1f1b")
    assert any("STRETTO_FINITE_PADDING=1" in why for why in found.whys)


@pytest.mark.parametrize("layers", [0, pytest.param(2, marks=pytest.mark.thorough)])
def test_without_masks_what_is_linear_is_equal(layers: int) -> None:
    found = written(replace(MAXTEXT, head="squares", layers=layers)).judged("1f1b", valid=FINITE)
    assert found.differs == ()


def test_what_is_linear_is_equal() -> None:
    found = written(Form(head="squares", layers=2)).judged("1f1b")
    (report,) = found.module.interleaved
    assert (report.rounds, found.differs) == ("", ())


@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_layers_are_interleaved(gradients: bool) -> None:
    """With the same bits: nothing is computed otherwise."""
    step = written(Form(head="squares", layers=2), gradients=gradients)
    found = step.compare("gpipe", interleave=2)
    assert (found.whys, found.differs) == ((), ())
    assert {(r.chunks, r.held > 0) for r in found.module.interleaved} == {(2, True)}
    step.check_written()


@pytest.mark.thorough
def test_layers_are_interleaved_as_1f1b() -> None:
    written(Form(head="squares", layers=2)).judged("interleaved_1f1b", interleave=2)


WITHIN = {
    "masked": Form(packed="stages", layers=2, within=True, once=True, again="stage"),
    "maxtext": replace(MAXTEXT, packed="stages", layers=2, within=True),
    "whole": replace(MAXTEXT, packed="whole", layers=2, within=True, head="classes"),
    "stages": replace(MAXTEXT, packed="stages", layers=2, within=True, stages=4, microbatches=8),
}


@first_of(WITHIN)
def test_layers_of_chunks_take_numbers_of_their_microbatch(form: Form) -> None:
    """Also those that other devices have as the step is written."""
    step = written(form)
    found = step.judged("interleaved_1f1b", valid=FINITE, interleave=2)
    (report,) = found.module.interleaved
    assert report.chunks == 2
    step.check_written()


def test_what_a_stage_adds_itself_is_not_for_chunks() -> None:
    form = Form(packed="stages", layers=2, once=True)
    found = written(form).compare("interleaved_1f1b", interleave=2)
    assert any("it must add in its layers, where these are divided" in why for why in found.whys)


REFUSED = {
    "padding": (Form(mask=False), "reads what another one put into the buffer"),
    "circular": (Form(microbatches=2, rounds=2), "the pipeline is circular as written"),
    "outputs": (Form(reads=lambda slot: slot), "reads what another one put into the buffer"),
}


@pytest.mark.parametrize(("form", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(form: Form, why: str) -> None:
    step = written(form)
    found = step.compare("1f1b")
    assert any(why in w for w in found.whys)


def streams_left(step: WrittenStep) -> tuple[int, str]:
    """How many permutes the loops of a step have without their streams, and why these stay."""
    assert step.module.source is not None
    made = unstreamed(step.module.source.hlo, 1, step.devices, computes=True)
    loops = [i for i in Module.parse(made.module).entry.instructions if i.opcode == "while"]
    inside = [i for loop in loops for i in all_instructions(loop.called[0])]
    return sum(i.opcode == "collective-permute" for i in inside), "".join(made.whys)


def test_nothing_else_is_left_in_the_loops() -> None:
    """Outputs of stages and their gradients go on to the next stage, and no other permute stays."""
    form = Form(shift="ppermute")
    assert streams_left(written(form)) == (2, "")
    count, why = streams_left(written(replace(form, mask=False)))
    assert count == 4 and why
