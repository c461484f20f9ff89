"""What the backward pass would compute again of what a stage gives, for a head in the loop, is kept, if it is
the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from random_steps import Step, WrittenStep, check_hops, gradient_step
from training_steps import Draw

from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.pipelines.given import as_given

STAGES, TRIPS, LAYERS = 2, 4, 2

# What a stage gives: run(weights, i, x), with the weights of its layers and the number of the iteration.
Run = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def step(there: Run, back: Run) -> WrittenStep:
    """A loop whose stages give what ``there`` does, and its gradient, in which a head on the last stage reads
    what ``back`` computes of the same microbatch."""

    def local(weights, xs):
        stage = lax.axis_index("x")

        @jax.custom_vjp
        def given(x, weights, is_last, i):
            return there(weights, i, x)

        def forward(*taken):
            return given(*taken), taken

        def backward(kept, dy):
            x, weights, is_last, i = kept
            y = back(weights, i, x)
            head = jnp.where(is_last, y * jnp.abs(y), 0)
            _, pull = jax.vjp(lambda weights, x: there(weights, i, x), weights, x)
            dw, dx = pull(dy + head)
            return dx, dw, None, None

        given.defvjp(forward, backward)

        @jax.checkpoint
        def iteration(received, i):
            x = jnp.where(stage == 0, xs[i], received)
            y = given(x, weights, stage == STAGES - 1, i)
            return lax.ppermute(y, "x", [(0, 1), (1, 0)]), None

        last, _ = lax.scan(iteration, jnp.ones_like(xs[0]), jnp.arange(TRIPS))
        return jnp.sum(last**2)[None]

    return gradient_step(local, STAGES, (STAGES * LAYERS, 4, 4), (TRIPS, 2, 4))


def made(found: WrittenStep) -> tuple[Module, Module | None]:
    """A step as it is written, and with what stages give in stacks."""
    module = Module.parse(found.module.source.hlo)
    names = [i.name for i in module.entry.instructions if i.opcode == "while"]
    return module, as_given(module, names, 1, STAGES)


def carried(module: Module) -> list[int]:
    """How many arrays each loop carries."""
    return [len(i.shape.tuple_shapes) for i in module.entry.instructions if i.opcode == "while"]


def layer(x, w, scale=1.5):  # so that its gradient does not need what it gives
    return jnp.tanh(x @ w) * scale


def unrolled(weights, i, x):
    for n in range(LAYERS):
        x = layer(x, weights[n])
    return x


def scanned(weights, i, x, scale=1.5):
    return lax.scan(lambda x, w: (layer(x, w, scale), None), x, weights)[0]


def often(weights, i, x, count=3):
    return lax.scan(lambda x, _: (layer(x, weights[0]), None), x, length=count)[0]


def under_cond(weights, i, x, first=1, otherwise=0.5):
    return lax.cond(
        i >= first,
        lambda x: scanned(weights, i, x),
        lambda x: jnp.full_like(x, otherwise),
        x,
    )


def number(weights, i, x, plus=0):
    return unrolled(weights, i, x) * ((i * 3 + plus) % 5)


RUNS = {
    "unrolled": unrolled,
    "scan": scanned,
    "often": often,
    "cond": under_cond,
    "number": number,
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_it_is_kept(run: Run) -> None:
    found = step(run, run)
    written, module = made(found)
    assert module is not None
    assert [n + 1 for n in carried(written)] == carried(module)
    found.check_bits(module.proto.SerializeToString())
    found.check_written()


OTHERS: dict[str, tuple[Run, Run]] = {
    "other layers": (unrolled, lambda weights, i, x: unrolled(weights[::-1], i, x)),
    "another input": (unrolled, lambda weights, i, x: unrolled(weights, i, x + 1)),
    "another iteration": (unrolled, lambda weights, i, x: unrolled(weights, i, x * (i + 1))),
    "a constant": (scanned, partial(scanned, scale=2.5)),
    "a length": (often, partial(often, count=2)),
    "a predicate": (under_cond, partial(under_cond, first=2)),
    "a branch": (under_cond, partial(under_cond, otherwise=0.25)),
    "a number": (number, partial(number, plus=1)),
    "a stage": (
        unrolled,
        lambda weights, i, x: unrolled(weights * (1 + lax.axis_index("x")), i, x),
    ),
}


@pytest.mark.parametrize(("there", "back"), OTHERS.values(), ids=OTHERS)
def test_what_is_computed_otherwise_stays(there: Run, back: Run) -> None:
    found = step(there, back)
    assert made(found)[1] is None
    found.check_written()


ITERATION = Draw(mask="where", loss="squares", again="iteration", head="cond")
STEPS = {
    "scan": ITERATION,
    "one layer": replace(ITERATION, stage="unrolled", layers=1, microbatches=3),
    "conditional": replace(ITERATION, stage="two", mask="cond", stages=3, head="where"),
    "barriers": replace(ITERATION, stage="before", again="barriers", collect="scan"),
    "one array": replace(ITERATION, stage="behind", shift="roll", head="where"),
    "sent on": replace(ITERATION, mask="cond", travels="segments", balance="sent"),
    "labels": replace(ITERATION, stage="behind", travels="labels", loss="cross"),
    "groups": replace(ITERATION, shift="where", axes="dx", dtype="bfloat16", head="where"),
    "random numbers": replace(ITERATION, stage="unrolled", dropout="carry"),
    "random numbers in loops": replace(ITERATION, stage="two", layers=4, dropout="stack"),
    "tensors": replace(ITERATION, axes="xy", stage="two", balance="stack", head="where"),
}


@pytest.mark.quick("scan")
@pytest.mark.parametrize("d", STEPS.values(), ids=STEPS)
def test_an_iteration_with_a_head_that_is_computed_again(d: Draw) -> None:
    """Nothing is sent again."""
    written = Step(d)
    for schedule in ("1f1b", "zb_h1"):
        found = written.judged(schedule)
        (report,) = found.module.interleaved
        assert report.rows == min(d.stages, d.microbatches)
        if d.axes == "x" and not d.travels and not d.balance:
            check_hops(found, d)
    written.check_written()


@pytest.mark.thorough
def test_chunks_of_layers_with_a_head_that_is_computed_again() -> None:
    Step(replace(ITERATION, layers=4)).judged("interleaved_1f1b", interleave=2)
