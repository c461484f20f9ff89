"""Compute that nobody reads: it is not run, and no result changes by a bit."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pipelines
import pytest
from executed import execute
from frontend_support import P, manual, mesh, shards
from jax import lax
from pipelines import circular, expected
from test_valid import EVERY, mutants

from stretto.hlo_frontend.compile import CompileSpec, compile_hlo, compile_stablehlo
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.runtime.program import Loop, Program, Run, instructions
from stretto.runtime.program.work import work

ALL = ValidPolicy(least_flops=0.0)  # whatever little it saves
NONE = ValidPolicy(derive=False)
POISONED = ValidPolicy(least_flops=0.0, dead_only=True)

SHAPES = [(4, 4, 1), (2, 1, 3), *random.Random(1).sample(EVERY, 3)]


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


def test_by_default_it_is_left_out_where_it_saves_much(monkeypatch):
    monkeypatch.setattr(pipelines, "WIDTH", 400_000)
    found = work(compiled(circular(4, 4), 4, ValidPolicy(pipeline=False)))
    # A segment at the start, and in 7 iterations on 4 devices: indices, the stage, the result taken.
    assert (found.runs, found.skipped_runs) == (4 + 7 * 4 * 3, 12)
    assert 0.25 < found.skipped_flops / found.flops < 12 / 28


@pytest.mark.thorough
def test_broken_pipelines_compute_the_same():
    """A part of the mutants of `test_valid`, on the executor with NaN for all that is left out."""
    skipped = 0
    for number, stages, text, changes in mutants(2, 400):
        if number % 40:
            continue
        count = int(text.split("xs = f32[")[1].split(",")[0])
        xs, ws = arguments_of(stages, count, number)
        arguments = [xs] * stages, list(ws)
        whole = execute(compiled(text, stages, NONE), arguments)
        for policy in (ALL, POISONED):
            found = execute(compiled(text, stages, policy), arguments, poison=policy is POISONED)
            assert found.bits == whole.bits, (number, changes)
            skipped += found.count("skipped")
    assert skipped > 60


# From JAX, backwards as well.


def pipeline(stages: int, count: int, width: int = 4):
    """A masked pipeline as a function of weights [stage, w, w] and inputs [count, 2, w]."""
    ring = [(s, (s + 1) % stages) for s in range(stages)]

    def run(w, xs):
        stage = lax.axis_index("x")

        def step(carry, i):
            state, outputs = carry
            x = jnp.where(stage == 0, xs[jnp.minimum(i, count - 1)], state)
            working = (i >= stage) & (i < stage + count)
            # With the weights masked as well, their gradient is known to be zero in the bubble.
            y = jnp.tanh(jnp.where(working, x, 0) @ jnp.where(working, w[0], 0))
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


@pytest.mark.thorough
def test_a_gradient():
    stages = count = 3
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
        for loop in loops:
            runs = [i for i in loop.body.instructions if isinstance(i, Run) and i.valid]
            assert max(length(b) for run in runs for b in run.valid) == count
        assert found.count("skipped") > 0


def length(bounds: tuple[int, ...]) -> int:
    return sum(hi - lo + 1 for lo, hi in zip(bounds[::2], bounds[1::2], strict=True))


# What must run all the same.

STEERED = """HloModule m
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
stays {
  c = (f32[2], f32[2]) parameter(0)
  x = f32[2] get-tuple-element(c), index=0
  zero = f32[] constant(0)
  total = f32[] reduce(x, zero), dimensions={0}, to_apply=sum
  limit = f32[] constant(100)
  ROOT less = pred[] compare(total, limit), direction=LT
}
doubles {
  c = (f32[2], f32[2]) parameter(0)
  x = f32[2] get-tuple-element(c), index=0
  y = f32[2] get-tuple-element(c), index=1
  twice = f32[2] add(x, x)
  more = f32[2] add(y, x)
  ROOT t = (f32[2], f32[2]) tuple(twice, more)
}
body {
  c = (s32[], f32[2], f32[2], f32[2]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = f32[2] get-tuple-element(c), index=1
  kept = f32[2] get-tuple-element(c), index=2
  state = f32[2] get-tuple-element(c), index=3
  one = s32[] constant(1)
  next = s32[] add(i, one)
  start = f32[2] exponential(state)
  pair = (f32[2], f32[2]) tuple(start, x)
  grown = (f32[2], f32[2]) while(pair), condition=stays, body=doubles
  y = f32[2] get-tuple-element(grown), index=1
  reads = pred[] compare(i, one), direction=EQ
  moved = f32[2] collective-permute(y), channel_id=1, source_target_pairs={{0,1},{1,0}}
  sum_ = f32[2] select(reads, moved, kept)
  ROOT t = (s32[], f32[2], f32[2], f32[2]) tuple(next, x, sum_, state)
}
condition {
  c = (s32[], f32[2], f32[2], f32[2]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  three = s32[] constant(3)
  ROOT less = pred[] compare(i, three), direction=LT
}
ENTRY e {
  p = f32[2] parameter(0)
  zero = s32[] constant(0)
  init = (s32[], f32[2], f32[2], f32[2]) tuple(zero, p, p, p)
  loop = (s32[], f32[2], f32[2], f32[2]) while(init), condition=condition, body=body
  ROOT r = f32[2] get-tuple-element(loop), index=2
}
"""


def test_what_decides_how_long_a_loop_runs_is_never_padding():
    """On zeros the inner loop would double for ever; it and its start are left out together or not at all."""
    program = compiled(STEERED, 2)
    (run,) = partial_runs(program)
    assert run.valid == ((1, 1), (1, 1))
    start = [np.full(2, d + 1, np.float32) for d in range(2)]
    found = execute(program, [start])
    assert found.bits == execute(compiled(STEERED, 2, NONE), [start]).bits
    assert found.count("skipped") == 4
    assert always(program).count("f32[2]") == 2  # where the inner loop begins, what is kept


def always(program: Program) -> list[str]:
    """Types of what the segments of the only loop give that no device leaves out."""
    body = next(i for i in instructions(program.body) if isinstance(i, Loop)).body
    runs = [i for i in body.instructions if isinstance(i, Run) and not i.valid]
    return [str(program.slot_types[slot]) for run in runs for slot in run.outputs]


OFFSETS = """HloModule m
body {
  c = (s32[], f32[2], f32[2], s32[2]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  x = f32[2] get-tuple-element(c), index=1
  kept = f32[2] get-tuple-element(c), index=2
  n = s32[2] get-tuple-element(c), index=3
  one = s32[] constant(1)
  next = s32[] add(i, one)
  offsets = s32[2] add(n, n)
  sent = f32[2] negate(x)
  got = f32[2] collective-permute(sent), channel_id=1, source_target_pairs={{0,1},{1,0}}
  reads = pred[] compare(i, one), direction=EQ
  sum_ = f32[2] select(reads, got, kept)
  given = f32[2] exponential(x)
  everyone = f32[2] ragged-all-to-all(given, x, offsets, n, offsets, n), channel_id=2,
    replica_groups={{0,1}}
  ROOT t = (s32[], f32[2], f32[2], s32[2]) tuple(next, x, sum_, n)
}
condition {
  c = (s32[], f32[2], f32[2], s32[2]) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  three = s32[] constant(3)
  ROOT less = pred[] compare(i, three), direction=LT
}
ENTRY e {
  p = f32[2] parameter(0)
  n = s32[2] parameter(1)
  zero = s32[] constant(0)
  init = (s32[], f32[2], f32[2], s32[2]) tuple(zero, p, p, n)
  loop = (s32[], f32[2], f32[2], s32[2]) while(init), condition=condition, body=body
  ROOT r = f32[2] get-tuple-element(loop), index=2
}
"""


def test_members_agree_on_offsets_though_nobody_reads_what_comes():
    program = compiled(OFFSETS, 2)
    assert always(program).count("s32[2]") == 1
    left = {i.valid for i in partial_runs(program)}
    assert left == {((1, 0), (1, 0)), ((1, 1), (1, 1))}  # their data, and what the permute sends
