"""Compute that nobody reads: it is not run, and no result changes by a bit."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from executed import execute
from frontend_support import P, manual, mesh, shards
from jax import lax
from pipelines import circular, expected
from test_valid import EVERY, mutants

from stretto.hlo_frontend.compile import CompileSpec, compile_hlo, compile_stablehlo
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.runtime.program import Loop, Program, Run, instructions

ALL = ValidPolicy(least_flops=0.0)  # whatever little it saves
NONE = ValidPolicy(derive=False)
POISONED = ValidPolicy(least_flops=0.0, dead_only=True)

SHAPES = [(4, 4, 1), (2, 1, 3), *random.Random(1).sample(EVERY, 8)]


def compiled(text: str, devices: int, policy: ValidPolicy = ALL) -> Program:
    return compile_hlo(text, 1, devices, valid=policy).program


def partial_runs(program: Program) -> list[Run]:
    return [i for i in instructions(program.body) if isinstance(i, Run) and i.valid]


def arguments_of(stages: int, microbatches: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    xs = rng.standard_normal((microbatches, 2)).astype(np.float32)
    return xs, rng.standard_normal((stages, 2)).astype(np.float32)


@pytest.mark.parametrize(("stages", "microbatches", "repeats"), SHAPES)
def test_a_stage_runs_once_for_each_microbatch_and_pass(stages, microbatches, repeats):
    text = circular(stages, microbatches, repeats)
    xs, ws = arguments_of(stages, microbatches)
    arguments = [xs] * stages, list(ws)
    whole = execute(compiled(text, stages, NONE), arguments)
    program = compiled(text, stages)
    found = execute(program, arguments)
    assert found.bits == whole.bits
    np.testing.assert_allclose(found.results[0][stages - 1], expected(xs, ws, repeats), rtol=1e-4)
    poisoned = execute(compiled(text, stages, POISONED), arguments, poison=True)
    assert poisoned.bits == whole.bits
    trips = max(microbatches, stages) * (repeats - 1) + microbatches + stages - 1
    (run,) = partial_runs(program)
    name = program.segments[run.segment].name
    assert found.count("segment", name) == stages * microbatches * repeats
    assert found.count("skipped") == stages * (trips - microbatches * repeats)


def test_four_stages_four_microbatches_by_hand():
    (run,) = partial_runs(compiled(circular(4, 4), 4))
    assert run.valid == ((0, 3), (1, 4), (2, 5), (3, 6))
    (run,) = partial_runs(compiled(circular(3, 2, 2), 3))
    assert run.valid == ((0, 1, 3, 4), (1, 2, 4, 5), (2, 3, 5, 6))


def test_it_is_not_worth_a_segment_where_it_saves_little():
    program = compiled(circular(4, 4), 4, ValidPolicy())
    assert partial_runs(program) == []
    assert partial_runs(compiled(circular(4, 4), 4, ValidPolicy(least_flops=1.0))) != []
    assert partial_runs(compiled(circular(4, 4), 4, ValidPolicy(compute=False))) == []


def test_broken_pipelines_compute_the_same():
    """A part of the mutants of `test_valid`, on the executor with NaN for all that is left out."""
    skipped = 0
    for number, stages, text, changes in mutants(2, 400):
        if number % 16:
            continue
        count = int(text.split("xs = f32[")[1].split(",")[0])
        xs, ws = arguments_of(stages, count, number)
        arguments = [xs] * stages, list(ws)
        whole = execute(compiled(text, stages, NONE), arguments)
        for policy in (ALL, POISONED):
            found = execute(compiled(text, stages, policy), arguments, poison=policy is POISONED)
            assert found.bits == whole.bits, (number, changes)
            skipped += found.count("skipped")
    assert skipped > 300


# From JAX, backwards as well.


def pipeline(stages: int, count: int, width: int = 4):
    """A masked pipeline as a function of weights [stage, w, w] and inputs [count, 2, w]."""
    ring = [(s, (s + 1) % stages) for s in range(stages)]

    def run(w, xs):
        stage = lax.axis_index("x")

        def step(carry, i):
            state, outputs = carry
            x = jnp.where(stage == 0, xs[jnp.minimum(i, count - 1)], state)
            x = jnp.where((i >= stage) & (i < stage + count), x, 0)
            y = jnp.tanh(x @ w[0])
            done = (stage == stages - 1) & (i >= stages - 1)
            outputs = jnp.where(done, outputs.at[i - (stages - 1)].set(y), outputs)
            return (lax.ppermute(y, "x", ring), outputs), None

        start = jnp.zeros_like(xs[0]), jnp.zeros_like(xs)
        (_, outputs), _ = lax.scan(step, start, jnp.arange(count + stages - 1))
        return outputs

    over = mesh(stages)
    return over, manual(run, over, (P("x"), P()), P("x"))


def lowered(function, arguments, devices: int, policy: ValidPolicy) -> Program:
    text = function.trace(*arguments).lower().as_text()
    return compile_stablehlo(text, CompileSpec(1, devices), valid=policy).program


@pytest.mark.parametrize(("stages", "count"), [(2, 3), (4, 2), (5, 4)])
def test_a_gradient(stages, count):
    over, forward = pipeline(stages, count)
    gradient = jax.jit(jax.grad(lambda w, xs: (forward(w, xs) ** 2).sum()))
    rng = np.random.default_rng(0)
    w = rng.standard_normal((stages, 4, 4)).astype(np.float32)
    xs = rng.standard_normal((count, 2, 4)).astype(np.float32)
    arguments = shards(w, over, P("x")), [xs] * stages
    for function in (forward, gradient):
        whole = execute(lowered(function, (w, xs), stages, NONE), arguments)
        program = lowered(function, (w, xs), stages, ALL)
        found = execute(program, arguments)
        assert found.bits == whole.bits
        poisoned = lowered(function, (w, xs), stages, POISONED)
        assert execute(poisoned, arguments, poison=True).bits == whole.bits
        # In each of its loops a device works on each microbatch once.
        loops = [i for i in program.body.instructions if isinstance(i, Loop)]
        assert len(loops) == (1 if function is forward else 2)
        trips = count + stages - 1
        for loop in loops:
            runs = [i for i in loop.body.instructions if isinstance(i, Run) and i.valid]
            lengths = {sum(hi - lo + 1 for lo, hi in zip(b[::2], b[1::2], strict=True))
                       for run in runs for b in run.valid}  # fmt: skip
            assert lengths <= set(range(count + 1)) and count in lengths, (trips, lengths)
        assert found.count("skipped") > 0
