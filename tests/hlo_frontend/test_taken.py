"""What the backward pass would make again of what a stage received is kept as the stage took it, with the
bits of the program as it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, mesh
from jax import lax
from random_steps import Step, WrittenStep, check_hops, gradient_step
from training_steps import Draw

from stretto.hlo_frontend.collectives import CollectiveReader
from stretto.hlo_frontend.flatten import flatten
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.pipelines.one_layer import moved_from
from stretto.hlo_frontend.pipelines.recognize import follow
from stretto.hlo_frontend.pipelines.taken import as_taken

STAGES, TRIPS = 2, 4

# What a stage takes of what it received, and of microbatches: where(stage, i, received, own).
Where = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def step(there: Where, back: Where) -> WrittenStep:
    """A loop whose stages take ``there``, and its gradient, which computes them again with what is taken
    ``back``."""

    def local(weight, xs):
        stage = lax.axis_index("x")

        def run(weight, x):
            return jnp.tanh(x @ weight)

        @jax.custom_vjp
        def given(received, xs, weight, stage, i):
            return run(weight, there(stage, i, received, xs[i]))

        def forward(*taken):
            return given(*taken), taken

        def backward(kept, dy):
            received, xs, weight, stage, i = kept
            _, pull = jax.vjp(run, weight, back(stage, i, received, xs[i]))
            dw, dx = pull(dy)
            return dx, jnp.zeros_like(xs), dw, None, None

        given.defvjp(forward, backward)

        def iteration(received, i):
            return lax.ppermute(given(received, xs, weight, stage, i), "x", [(0, 1), (1, 0)]), None

        last, _ = lax.scan(iteration, jnp.ones_like(xs[0]), jnp.arange(TRIPS))
        return jnp.sum(last**2)[None]

    return gradient_step(local, STAGES, (STAGES * 4, 4), (TRIPS, 2, 4))


def kept(module: Module) -> list[str]:
    """The opcodes of what the loops put into stacks."""
    loops = [i for i in module.entry.instructions if i.opcode == "while"]
    rows = [
        i.operands[1]
        for loop in loops
        for i in loop.called[0].instructions
        if i.opcode == "dynamic-update-slice"
    ]
    return [moved_from(row).opcode for row in rows]


def made(found: WrittenStep) -> tuple[Module, Module | None]:
    """A step as it is written, and with what stages take in stacks."""
    module = Module.parse(found.module.source.hlo)
    entry = flatten(module.entry, CollectiveReader(1, STAGES))
    loops = [n for n in entry.nodes if n.instruction.opcode == "while"]
    return module, as_taken(module, loops, follow(entry, 1, STAGES))


def first(stage, i, received, own):
    return jnp.where(stage == 0, own, received)


def zeros(stage, i, received, own):
    return jnp.where(i >= stage, jnp.where(stage == 0, own, received), 0)


@pytest.mark.parametrize("there", [first, zeros])
def test_it_is_kept_as_it_was_taken(there: Where) -> None:
    found = step(there, there)
    written, module = made(found)
    assert module is not None
    assert kept(written).count("select") + 1 == kept(module).count("select")
    found.check_bits(module.proto.SerializeToString())
    found.check_written()


def whole_numbers(divisor: int, otherwise: bool) -> WrittenStep:
    """Whole numbers go from stage to stage in a loop, of which the first stage takes quotients of
    microbatches by 3. A second loop takes again what stages received, and such quotients by ``divisor``.
    ``otherwise``: it reads all that they received, too."""
    over = mesh(STAGES)

    def local(xs):
        stage = lax.axis_index("x")

        def taken(i, received, by):
            return jnp.where(stage == 0, xs[i] // by, received)

        def there(received, i):
            given = taken(i, received, 3) + i * stage
            return lax.ppermute(given, "x", [(0, 1), (1, 0)]), received

        def back(total, i):
            row = taken(i, kept[i], divisor)
            more = jnp.sum(jnp.where(kept > i, kept, 0)) if otherwise else 0
            return lax.ppermute(total + row * (i + 2) + more, "x", [(0, 1), (1, 0)]), None

        last, kept = lax.scan(there, jnp.zeros_like(xs[0]), jnp.arange(TRIPS))
        total, _ = lax.scan(back, last, jnp.arange(TRIPS - 1, -1, -1))
        return total[None]

    mapped = jax.shard_map(local, mesh=over, in_specs=P(), out_specs=P("x"), check_vma=False)
    xs = np.random.default_rng(0).integers(-20, 20, (TRIPS, 4)).astype(np.int32)
    return WrittenStep(jax.jit(mapped), (xs,), [P()], over)


@pytest.mark.parametrize(("divisor", "otherwise"), [(3, False), (2, False), (3, True)])
def test_whole_numbers_are_computed_in_the_same_way(divisor: int, otherwise: bool) -> None:
    found = whole_numbers(divisor, otherwise)
    _, module = made(found)
    assert (module is not None) == (divisor == 3 and not otherwise)
    if module is not None:
        found.check_bits(module.proto.SerializeToString())
    found.check_written()


OTHERS = {
    "another stage's": lambda stage, i, received, own: jnp.where(stage == 1, own, received),
    "another iteration's": lambda stage, i, received, own: jnp.where(i == 1, own, received),
    "zeros": lambda stage, i, received, own: jnp.where((stage == 0) | (i == 2), 0, received),
    "as it was received": lambda stage, i, received, own: received,
    "both": lambda stage, i, received, own: first(stage, i, received, own) + received,
}


@pytest.mark.parametrize("back", OTHERS.values(), ids=OTHERS)
def test_what_is_taken_otherwise_stays(back: Where) -> None:
    assert made(step(first, back))[1] is None


ITERATION = Draw(mask="where", loss="squares", again="iteration")
STEPS = {
    "one layer": replace(ITERATION, stage="unrolled", layers=1, microbatches=3),
    "conditional": replace(ITERATION, stage="two", mask="cond", stages=3),
    "barriers": replace(ITERATION, stage="before", again="barriers", collect="scan"),
    "one array": replace(ITERATION, stage="behind", shift="roll", travels="mask"),
    "numbers": replace(
        ITERATION, stage="before", mask="cond", travels="segments", dropout="stack", layers=1
    ),
    "put away": replace(ITERATION, stage="behind", mask="cond", collect="cond", balance="sent"),
    "groups": replace(ITERATION, shift="where", axes="dx", travels="segments", dtype="bfloat16"),
    "pad": replace(ITERATION, stage="unrolled", shift="pad", again="barriers", axes="xy"),
}


@pytest.mark.quick("one layer")
@pytest.mark.parametrize("d", STEPS.values(), ids=STEPS)
def test_an_iteration_that_is_computed_again(d: Draw) -> None:
    """Nothing is sent again: of each array a microbatch makes a hop to each next stage, and of its gradient
    as many back."""
    written = Step(d)
    found = written.judged("1f1b")
    (report,) = found.module.interleaved
    assert report.rows == min(d.stages, d.microbatches)
    if d.axes == "x" and not d.travels:
        check_hops(found, d)
    written.check_written()
