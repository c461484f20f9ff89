"""Stages that are no loop over layers, in schedules: a single layer, layers one after the other, several
loops, and a loop with more around it, as users write them.

Judged by the step as it is written, bit for bit, and by JAX's CPU backend; rows of what stages keep are
counted by hand, as many as there are stages instead of M + P - 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, mesh
from gpipe import inputs, weights
from interpreter import Interpreter
from jax import lax
from jax.sharding import NamedSharding
from random_steps import Found, WrittenStep, compiled
from schedule_judges import equal, judge
from training_steps import Draw

from stretto.hlo_frontend.compile import compile_hlo
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.pipelines.inline import masked_behind
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.pipelining import pipelined

STAGES, MICROBATCHES = 2, 4
ROWS, TOKENS, WIDTH = 2, 4, 8
ARRAY = 4 * ROWS * TOKENS * WIDTH  # bytes of what goes from stage to stage

pytestmark = pytest.mark.bits


@pytest.mark.parametrize(
    "d",
    [
        Draw(stage="unrolled", layers=1, head="cond", stages=4, microbatches=3),
        Draw(stage="unrolled", layers=1, loss="squares", mask="where", ring=False),
        Draw(stage="unrolled", head="cond", again="layer", dropout="stack"),
        Draw(stage="two", layers=3, loss="squares", axes="dx", dtype="bfloat16", inside=True),
        Draw(stage="two", head="cond", balance="sent", travels="segments"),
        Draw(stage="two", head="cond", balance="sent", mask="where", stages=3),
        Draw(stage="behind", head="cond", axes="xy", collect="scan"),
        Draw(stage="behind", loss="squares", again="stage", balance="carry", embeds=True),
        Draw(stage="before", head="cond", mask="where", travels="labels", metric=True),
        Draw(stage="before", loss="squares", shared="psum", balance="stack", travels="mask"),
        Draw(
            stage="before", head="cond", mask="where", loss="distance", counted=True, microbatches=2
        ),
    ],
    ids=[
        "single",
        "where",
        "unrolled",
        "two",
        "travels",
        "sent",
        "tensors",
        "again",
        "before",
        "stack",
        "counted",
    ],
)
@pytest.mark.quick("single", "two", "tensors", "stack")
def test_drawn(d):
    """The bits of gradients are those of the written step; what stages keep has a row for each stage."""
    (report,) = judge(d)["1f1b"].module.interleaved
    assert report.rows == min(d.stages, d.microbatches)
    assert report.rows_before == d.stages + d.microbatches - 1
    assert report.kept > 0


@pytest.mark.thorough
@pytest.mark.parametrize("stage", ["unrolled", "two", "behind"])
def test_weights_have_runs_of_their_own(stage):
    (report,) = judge(Draw(stage=stage, layers=3, head="cond"), "zb_h1")["zb_h1"].module.interleaved
    assert report.left > 0
    for row in report.runs:
        assert [row.count(letter) for letter in "FBW"] == [4, 4, 4]


# Stages as users write them.


def norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def attention(x, w):
    q, k, v = jnp.split(x @ w["qkv"], 3, axis=-1)
    scores = jnp.einsum("btd,bsd->bts", q, k) / WIDTH**0.5
    scores = jnp.where(jnp.tril(jnp.ones((TOKENS, TOKENS), bool)), scores, -1e9)
    return jax.nn.softmax(scores) @ v @ w["out"]


def block(x, w):
    x = x + attention(norm(x, w["before"]), w)
    return x + jax.nn.gelu(norm(x, w["between"]) @ w["up"]) @ w["down"]


def dense(w, x, m):
    return jnp.tanh(x @ w["out"] + w["before"])


def attends(w, x, m):
    return block(x, w)


def attends_in_parts(w, x, m):
    x = x + jax.checkpoint(lambda x, w: attention(norm(x, w["before"]), w))(x, w)
    return x + jax.nn.gelu(norm(x, w["between"]) @ w["up"]) @ w["down"]


def keeps_products(w, x, m):
    return jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)(x, w)


@jax.checkpoint
def scans_and_norms(w, x, m):
    def one(x, scale):
        return x + jnp.sin(norm(x, scale) @ w["out"]), None

    return norm(lax.scan(one, x, jnp.stack([w["before"]] * 3))[0], w["between"])


def drops(w, x, m):
    key = jax.random.fold_in(jax.random.fold_in(jax.random.PRNGKey(0), lax.axis_index("x")), m)
    y = jnp.tanh(x @ w["out"])
    return x + jnp.where(jax.random.bernoulli(key, 0.8, y.shape), y / 0.8, 0)


def chooses(w, x, m):
    """By a weight."""
    return lax.cond(w["before"][0] > 0.9, lambda: x + jnp.sin(x @ w["out"]), lambda: x * 0.5)


def switches(w, x, m):
    """By the number of the stage, over as many layers as it has."""

    def run(count):
        return lambda: lax.scan(
            lambda x, n: (x + jnp.tanh(x @ w["out"] * n), None), x, jnp.arange(1.0, 1 + count)
        )[0]

    return lax.switch(lax.axis_index("x"), [run(4), run(2)])


def tied(w, x, m):
    return x + jnp.tanh(x @ w["out"]) @ w["out"].T


USERS = [
    dense, attends, attends_in_parts, keeps_products, scans_and_norms, drops, chooses, switches, tied
]  # fmt: skip


def parameters():
    rng = np.random.default_rng(0)
    shapes = {
        "qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "before": (WIDTH,), "between": (WIDTH,),
        "up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH),
    }  # fmt: skip
    arrays = {n: rng.standard_normal((STAGES, *s)) * 0.4 for n, s in shapes.items()}
    arrays["before"] += 1
    return {n: a.astype(np.float32) for n, a in arrays.items()}


def step_of(stage, *, data: bool = False, carries=lambda stats, y: stats) -> WrittenStep:
    """A step with these stages, and a loss in the loop. ``carries``: what a stage that takes one more
    argument finds there, which the scan carries."""
    takes_stats = stage.__code__.co_argcount > 3
    over = mesh(*((2, STAGES) if data else (STAGES,)), names="dx" if data else "x")
    axes = ("d", "x") if data else ("x",)

    def local(w, xs):
        w = {n: a[0] for n, a in w.items()}
        number = lax.axis_index("x")

        def iteration(carry, i):
            received, total, stats = carry
            m = i - number
            x = jnp.where(number == 0, xs[jnp.clip(i, 0, MICROBATCHES - 1)], received)
            working = (m >= 0) & (m < MICROBATCHES)
            more = (stats,) if takes_stats else ()
            y = lax.cond(working, lambda x: stage(w, x, m, *more), jnp.zeros_like, x)
            ends = (number == STAGES - 1) & (m >= 0)
            total = total + lax.cond(ends, lambda y: jnp.mean(y**2), lambda y: jnp.float32(0), y)
            return (lax.ppermute(y, "x", [(0, 1)]), total, carries(stats, y)), None

        begin = jnp.zeros_like(xs[0]), jnp.float32(0), jnp.zeros(WIDTH)
        return lax.scan(iteration, begin, jnp.arange(MICROBATCHES + STAGES - 1))[0][1]

    specs = {n: P("x") for n in parameters()}, P(None, "d") if data else P()
    mapped = jax.shard_map(
        lambda *given: lax.psum(local(*given), axes), mesh=over, in_specs=specs, out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    shape = MICROBATCHES, ROWS * (1 + data), TOKENS, WIDTH
    arguments = parameters(), rng.standard_normal(shape).astype(np.float32)
    placed = jax.tree.map(
        lambda s: NamedSharding(over, s), specs, is_leaf=lambda s: isinstance(s, P)
    )
    step = jax.value_and_grad(mapped, argnums=(0, 1))
    jitted = jax.jit(step, in_shardings=placed, keep_unused=True)
    return WrittenStep(
        jitted, arguments, jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)), over
    )


def accepted(step: WrittenStep, schedule: str = "1f1b") -> Found:
    found = step.judged(schedule)
    step.check_written()
    return found


@pytest.mark.parametrize("stage", USERS, ids=lambda stage: stage.__name__)
@pytest.mark.quick("dense", "attends", "drops", "switches")
def test_as_users_write_them(stage):
    (report,) = accepted(step_of(stage)).module.interleaved
    assert (report.rows, report.rows_before) == (STAGES, MICROBATCHES + STAGES - 1)
    assert report.rounds == "a stage is computed apart from what stands beside it"
    if stage is scans_and_norms:  # what it begins with alone
        assert report.kept == ARRAY


@pytest.mark.thorough
@pytest.mark.parametrize(
    "stage", [dense, attends, scans_and_norms], ids=lambda stage: stage.__name__
)
def test_with_an_axis_of_data(stage):
    accepted(step_of(stage, data=True))


@pytest.mark.thorough
def test_weights_of_users_have_runs_of_their_own():
    (report,) = accepted(step_of(attends), "zb_h1").module.interleaved
    assert report.rounds and report.left > 0 and report.runs[0].count("W") == MICROBATCHES


def scans_and_doubles(w, x, m):
    def one(x, out):
        return x + jnp.sin(x @ out), None

    return 2 * lax.scan(one, x, jnp.stack([w["out"], w["out"] / 2, w["out"] / 4]))[0]


def test_a_loop_within_a_stage_is_two_where_weights_have_runs_of_their_own():
    """Each run backwards has the product that the stage before waits for, and each of weights the other."""
    found = accepted(step_of(scans_and_doubles), "zb_h1")
    assert found.module.source is not None
    computations = Module.parse(found.module.source.hlo).computations
    of = {c.name: products(c) for c in computations if c.name.startswith("schedule.")}
    assert (of["schedule.forward"], of["schedule.backward"], of["schedule.weights"]) == (1, 1, 1)


def products(computation) -> int:
    """How many there are in it, and in what it calls."""
    own = sum(i.opcode == "dot" for i in computation.instructions)
    return own + sum(products(c) for i in computation.instructions for c in i.called)


def test_pipelined_single_layers():
    """As `stretto.pipelined` writes them, with one layer for each stage."""

    def local(w, xs):
        return jnp.sum(pipelined(lambda w, x: jnp.tanh(x @ w["a"] + w["b"]), w, xs, "x") ** 2)

    over = mesh(2)
    mapped = jax.shard_map(local, mesh=over, in_specs=(P("x"), P()), out_specs=P())
    function = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1)))
    module = compiled(function, (weights(2), inputs(3)), 2, "1f1b")
    assert module.interleaved[0].why == ""
    equal(function, module, over, weights(2))


# Refused, with the reason; the program is the written one.


def normalizes(w, x, m, stats):
    return jnp.tanh(x @ w["out"]) - stats


def sums_over_stages(w, x, m):
    return x + lax.psum(x @ w["out"], "x")


def refused(step: WrittenStep, schedule: str = "1f1b") -> str:
    found = step.compare(schedule)
    (why,) = (w for w in found.whys if "with which it would be one" not in w)
    return why


def test_a_stage_that_reads_what_others_before_it_gave():
    def carries(stats, y):
        return 0.9 * stats + 0.1 * lax.stop_gradient(y.mean((0, 1)))

    assert "depends on the iterations before it" in refused(step_of(normalizes, carries=carries))


def test_a_stage_that_communicates_with_others():
    why = refused(step_of(sums_over_stages))
    assert "among devices [0, 1], of which some are stages of the same pipeline" in why


def test_chunks_need_a_loop_over_layers():
    step = step_of(attends)
    module = step.in_schedule("interleaved_1f1b", interleave=2)
    assert "a stage is not a loop over its layers" in module.interleaved[0].why
    assert module.program == step.module.program


TRANSPOSED = """HloModule transposed
body {{
  c = (s32[], f32[2,3]{{1,0}}, pred[], {result}{{1,0}}) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  one = s32[] constant(1)
  next = s32[] add(i, one)
  x = f32[2,3]{{{of_x}}} get-tuple-element(c), index=1
  works = pred[] get-tuple-element(c), index=2
  mask = pred[2,3]{{0,1}} broadcast(works), dimensions={{}}
  number = f32[] constant(7)
  rest = f32[2,3]{{0,1}} broadcast(number), dimensions={{}}
  masked = f32[2,3]{{0,1}} select(mask, x, rest)
  turned = {result}{{1,0}} bitcast(masked)
  ROOT r = (s32[], f32[2,3]{{1,0}}, pred[], {result}{{1,0}}) tuple(next, x, works, turned)
}}
condition {{
  c = (s32[], f32[2,3]{{1,0}}, pred[], {result}{{1,0}}) parameter(0)
  i = s32[] get-tuple-element(c), index=0
  trips = s32[] constant(1)
  ROOT less = pred[] compare(i, trips), direction=LT
}}
ENTRY e {{
  x = f32[2,3]{{1,0}} parameter(0)
  works = pred[] parameter(1)
  zero = s32[] constant(0)
  number = {element}[] constant(0)
  empty = {result}{{1,0}} broadcast(number), dimensions={{}}
  begin = (s32[], f32[2,3]{{1,0}}, pred[], {result}{{1,0}}) tuple(zero, x, works, empty)
  loop = (s32[], f32[2,3]{{1,0}}, pred[], {result}{{1,0}}) while(begin), condition=condition, body=body
  ROOT t = {result}{{1,0}} get-tuple-element(loop), index=3
}}
"""


@pytest.mark.parametrize("works", [True, False])
@pytest.mark.parametrize("of_x", ["0,1", "1,0"])
def test_masks_are_put_behind_what_transposes_them(of_x, works):
    module = transposed("f32", of_x)
    moved = masked_behind(module, "loop")
    assert moved is not module
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    for each in (module, moved):
        program = compile_hlo(each.proto.SerializeToString(), 1, 1).program
        ((found,),) = Interpreter(program).run([x], [np.array(works)])
        np.testing.assert_array_equal(found, x.T if works else np.full((3, 2), 7))


def test_masks_stay_before_a_bitcast_to_another_type():
    module = transposed("s32", "0,1")
    assert masked_behind(module, "loop") is module


def transposed(element: str, of_x: str) -> Module:
    text = TRANSPOSED.format(element=element, result=f"{element}[3,2]", of_x=of_x)
    return Module.parse(parse_hlo_text(text))
