"""Interleaved pipelines: what they compute is what was written, in the schedule that was asked for.

Judged by the program as it is written, bit for bit, by JAX's CPU backend, and by counts made by hand.
"""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import replace

import gpipe
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, manual, mesh, same, shards
from gpipe import collected, inputs, losses, program, taken, weights, where
from interpreter import Interpreter
from jax import lax
from jaxlib import _hlo
from pipelines import circular

import stretto.lax
from stretto.commands.explain import explain, to_text
from stretto.commands.hlo_input import compile_file
from stretto.hlo_frontend.compile import CompiledModule, CompileSpec, compile_hlo, compile_stablehlo
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.hlo_frontend.pipelines import driver
from stretto.hlo_frontend.pipelines.timetable import ENTERS, groups, timetable
from stretto.hlo_frontend.pipelines.weights import moves
from stretto.runtime import options

LAYERS = 6  # of a device: 1, 2 and 3 chunks

EVERY = list(itertools.product(range(2, 5), range(2, 7), range(1, 4)))
# All 45 with STRETTO_TEST_FULL=1.
SOME = [(2, 5, 3), (4, 2, 2), (3, 4, 2), *random.Random(3).sample(EVERY, 5)]
SHAPES = EVERY if os.environ.get("STRETTO_TEST_FULL") else SOME


def compiled(function, arguments, devices: int, chunks: int, **how) -> CompiledModule:
    text = function.trace(*arguments).lower().as_text()
    return compile_stablehlo(text, CompileSpec(1, devices), interleave=chunks, **how)


def judge(function, arguments, specs, over, chunks: int, **how) -> Interpreter:
    """Compare with the program as it is written, and with JAX; gives what ran the interleaved one.

    What is received where a transfer is left out is NaN.
    """
    devices = over.devices.size
    module = compiled(function, arguments, devices, chunks, **how)
    assert [loop.why for loop in module.interleaved] == [""] * (chunks > 1)
    given = [shards(a, over, s) for a, s in zip(jax.tree.leaves(arguments), specs, strict=True)]
    interpreter = Interpreter(module.program, skipped=np.nan)
    found = interpreter.run(*given)
    written = Interpreter(compiled(function, arguments, devices, 1).program).run(*given)
    reference = jax.tree.leaves(function(*arguments))
    for result, expected, array in zip(found, written, reference, strict=True):
        for d in range(devices):
            same(result[d], expected[d], exact=True)
        if array.sharding.is_fully_replicated:
            same(result[0], np.asarray(array))
    return interpreter


def moved(stages: int, chunks: int) -> int:
    """Chunks that are not where they should be, counted one by one."""
    layers = np.arange(stages * chunks)
    return int(np.sum(layers // chunks != layers % stages))


DEAD_ONLY = ValidPolicy(dead_only=True)


@pytest.mark.quick("3-2-1", "4-2-2")
@pytest.mark.parametrize(("stages", "microbatches", "chunks"), SHAPES)
def test_the_forward_pass_is_that_of_the_written_program(stages, microbatches, chunks):
    arguments = weights(stages * LAYERS), inputs(microbatches)
    function = program(where(stages, microbatches), stages)
    specs = (P("x"), P("x"), P())
    ran = judge(function, arguments, specs, mesh(stages), chunks, valid=DEAD_ONLY)
    hops = microbatches * (stages * chunks - 1)
    arrays = 2 if chunks > 1 else 0
    assert sum(ran.messages.values()) == hops + arrays * moved(stages, chunks)


@pytest.mark.quick("masked-line")
@pytest.mark.parametrize(
    "local",
    [
        where(3, 4, ring=False, mask="zeros"),
        where(3, 4, mask="nothing"),
        collected(3, 4),
        losses(3, 4),
    ],
    ids=["masked-line", "unmasked", "collected-by-the-scan", "losses-of-a-pair"],
)
def test_however_the_pipeline_is_written(local):
    arguments = weights(3 * 4), inputs(4)
    judge(program(local, 3), arguments, (P("x"), P("x"), P()), mesh(3), 2, valid=DEAD_ONLY)


def test_what_differs_from_layer_to_layer_counts_as_its_weights():
    def numbered(layer, x, layers):
        def one(x, w):
            return layer(x, w[0])[0] + w[1] * 0.1, None

        return lax.scan(one, x, (layers, jnp.arange(4.0)))

    function = program(where(2, 3, scan=numbered), 2)
    judge(function, (weights(2 * 4), inputs(3)), (P("x"), P("x"), P()), mesh(2), 2)


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
def test_small_floats(dtype):
    arguments = weights(2 * 4, jnp.dtype(dtype)), inputs(3, jnp.dtype(dtype))
    judge(program(where(2, 3), 2), arguments, (P("x"), P("x"), P()), mesh(2), 2)


@pytest.mark.parametrize("names", ["dx", "xd"])
def test_pipelines_side_by_side(names):
    """Two of two stages each, on halves of the batch: whichever axis of the mesh is the stages'."""
    over = mesh(2, 2, names=names)
    specs = (P("x"), P(None, "d"))
    function = manual(where(2, 3), over, specs, P(None, "d"))
    arguments = weights(2 * 4), inputs(3)
    ran = judge(function, arguments, (P("x"), *specs), over, 2, valid=DEAD_ONLY)
    assert sum(ran.messages.values()) == 2 * (3 * (2 * 2 - 1) + 2 * moved(2, 2))


def test_weights_that_all_devices_have_are_not_moved():
    local = taken(where(3, 4), 3, 4)
    function = program(local, 3, replicated=True)
    arguments = weights(3 * 4), inputs(4)
    ran = judge(function, arguments, (P(), P(), P()), mesh(3), 2, valid=DEAD_ONLY)
    assert sum(ran.messages.values()) == 4 * (3 * 2 - 1)
    (loop,) = compiled(function, arguments, 3, 2).interleaved
    assert (loop.moved, loop.taken) == (0, 2)


def test_weights_that_are_sharded_are_moved_once_and_it_is_said():
    function = program(where(4, 4), 4)
    module = compiled(function, (weights(4 * 4), inputs(4)), 4, 2)
    (loop,) = module.interleaved
    layer = 4 * (gpipe.WIDTH * gpipe.WIDTH + gpipe.WIDTH)
    assert loop.moved == 6 * 2 * layer  # of 8 chunks of 2 layers, the first and the last stay
    assert (loop.stages, loop.microbatches, loop.layers) == (4, 4, 4)
    assert (loop.before, loop.after) == (7, 11)
    for said in ("4 stages x 2 chunks of 2 layers", "bubble 43% became 27%", f"{loop.moved} bytes"):
        assert said in loop.describe()
    (report,) = module.valid.loops
    assert (report.trips, report.sent) == (11, 4 * 7)
    # Stage s works from iteration s to iteration s + 7 on the eight chunks of its microbatches.
    assert report.busy == tuple(tuple(s <= i < s + 8 for i in range(11)) for s in range(4))


def test_what_layers_share_may_be_replicated_or_constant():
    def local(layers, xs, scale):
        mask = jnp.tril(jnp.ones((gpipe.WIDTH, gpipe.WIDTH), np.float32))
        return where(
            2, 3, layer=lambda x, w: (jnp.tanh(x @ (w["a"] * mask) * scale + w["b"]), None)
        )(layers, xs)

    over = mesh(2)
    function = manual(local, over, (P("x"), P(), P()), P())
    arguments = weights(2 * 4), inputs(3), np.full(gpipe.WIDTH, 0.7, np.float32)
    judge(function, arguments, (P("x"), P("x"), P(), P()), over, 2)


def test_the_rewritten_module_is_one_that_xla_reads():
    function = program(where(3, 5), 3)
    arguments, specs = (weights(3 * 4), inputs(5)), (P("x"), P("x"), P())
    module = compiled(function, arguments, 3, 2)
    assert module.source is not None
    read = _hlo.HloModule.from_serialized_hlo_module_proto(module.source.hlo)
    again = compile_hlo(read.as_serialized_hlo_module_proto(), 1, 3)
    (loop,) = again.valid.loops
    assert (loop.trips, loop.sent) == (2 * 5 + 2, 5 * 5)
    given = [shards(a, mesh(3), s) for a, s in zip(jax.tree.leaves(arguments), specs, strict=True)]
    found = [Interpreter(m.program).run(*given) for m in (module, again)]
    np.testing.assert_array_equal(*found)


def test_explain_shows_the_interleaved_schedule(monkeypatch):
    written = compiled(program(where(3, 3), 3), (weights(3 * 4), inputs(3)), 3, 1)
    assert written.source is not None
    for chunks, said in ((2, "3 stages x 2 chunks of 2 layers"), (3, "not 3 equal chunks")):
        chosen = options.Options(interleave=chunks)
        monkeypatch.setattr(options, "in_force", lambda chosen=chosen: chosen)
        found = explain(compile_file(written.source.hlo, 3, guarded=False))
        lines = to_text(found).split("\n")
        assert any(line.startswith("loop %") and said in line for line in lines)
        rows = ["■■■■■■□□", "□■■■■■■□", "□□■■■■■■"] if chunks == 2 else ["■■■□□", "□■■■□", "□□■■■"]
        assert [line.split()[-1] for line in lines if "■" in line] == rows


def test_one_chunk_leaves_the_program_as_it_is():
    function = program(where(2, 3), 2)
    arguments = weights(2 * 4), inputs(3)
    module = compiled(function, arguments, 2, 1)
    assert module.interleaved == ()
    text = function.trace(*arguments).lower().as_text()
    assert module.program == compile_stablehlo(text, CompileSpec(1, 2)).program


# What is refused, and stays as it is written.


def refused(function, arguments, devices: int, chunks: int = 2) -> str:
    module = compiled(function, arguments, devices, chunks)
    (loop,) = [i for i in module.interleaved if i.why]
    assert loop.why in loop.describe() and "is not interleaved" in loop.describe()
    assert module.program == compiled(function, arguments, devices, 1).program
    return loop.why


def variant(**changes) -> str:
    arguments = weights(2 * 4), inputs(3)
    return refused(program(where(2, 3, **changes), 2), arguments, 2)


def test_layers_that_cannot_be_divided():
    why = refused(program(where(2, 3), 2), (weights(2 * 4), inputs(3)), 2, 3)
    assert why == "4 layers of a device are not 3 equal chunks"


def test_something_is_done_to_what_is_sent():
    assert "made by multiply" in variant(send=lambda y: y * 0.5)


def test_stages_with_loops_of_their_own():
    def stage(layer, x, layers):
        branches = [lambda x, k=k: lax.scan(layer, x, layers["a"][k:])[0] for k in (0, 1)]
        return lax.switch(lax.axis_index("x"), branches, x), None

    why = variant(scan=stage, layer=lambda x, w: (jnp.tanh(x @ w), None))
    assert "more than one loop over layers gives: %" in why and "lax.cond on a weight" in why


def test_something_is_done_to_what_is_received():
    assert "not, bit for bit, what another one gave" in variant(receive=lambda x: x * 0.5)


def test_layers_that_are_no_loop():
    def unrolled(layer, x, layers):
        for i in range(4):
            x = layer(x, jax.tree.map(lambda w: w[i], layers))[0]  # noqa: B023
        return x, None

    assert "not a loop over its layers" in variant(scan=unrolled)


def test_a_stage_of_two_loops():
    def twice(layer, x, layers):
        return lax.scan(layer, lax.scan(layer, x, layers)[0] * 2, layers)

    assert "not, bit for bit" in variant(scan=twice)


def test_layers_that_know_their_number():
    def numbered(layer, x, layers):
        def one(i, x):
            return layer(x, jax.tree.map(lambda w: w[i], layers))[0] + i * 0.1

        return lax.fori_loop(0, 4, one, x), None

    assert "the number of a layer" in variant(scan=numbered)


def test_layers_that_share_what_stages_do_not():
    def by_stage(layer, x, layers):
        own = lax.axis_index("x").astype(np.float32)
        return lax.scan(lambda x, w: (layer(x, w)[0] + own, None), x, layers)

    assert "share" in variant(scan=by_stage)


def test_layers_that_read_the_id():
    def by_stage(layer, x, layers):
        def one(x, w):
            return jnp.where(lax.axis_index("x") == 0, x, layer(x, w)[0]), None

        return lax.scan(one, x, layers)

    assert variant(scan=by_stage)


def test_weights_that_change():
    def aging(layer, x, layers, i):
        return lax.scan(layer, x, {**layers, "b": layers["b"] * i})

    assert "changes from iteration to iteration" in variant(scan=aging, numbered=True)


def test_results_of_stages_on_the_way_are_read():
    function = program(where(2, 3, everywhere=True), 2, out=P("x"))
    why = refused(function, (weights(2 * 4), inputs(3)), 2)
    assert "what device 0 computes in iteration" in why and "only what the last stage" in why


def test_other_communication_in_the_loop():
    assert "communicates by all-reduce" in variant(send=lambda y: y + lax.psum(y, "x"))


@pytest.mark.parametrize("mask", ["nothing", "cond"])
def test_layers_that_communicate_with_other_stages(mask):
    def summed(layer, x, layers):
        return lax.scan(lambda x, w: (lax.psum(layer(x, w)[0], "x"), None), x, layers)

    why = variant(scan=summed, mask=mask)
    assert "among devices [0, 1], of which some are stages of the same pipeline" in why


def test_groups_of_several_stages():
    """Layers communicate among four devices, of which two are of another stage."""
    over = mesh(2, 2)

    def local(layers, xs):
        def summed(x, w):
            return gpipe.layer(x, w)[0] + 0 * lax.psum(x, ("x", "y")), None

        return where(2, 3, layer=summed)(layers, xs)

    function = manual(local, over, (P("x"), P()), P())
    why = refused(function, (weights(2 * 4), inputs(3)), 4)
    assert "among devices [0, 1, 2, 3], of which some are stages" in why


def test_layers_that_send():
    def sent(layer, x, layers):
        return lax.scan(lambda x, w: (lax.ppermute(layer(x, w)[0], "x", [(0, 1), (1, 0)]), None),
                        x, layers)  # fmt: skip

    why = variant(scan=sent, mask="nothing")
    assert "communicate by collective-permute" in why
    assert "among devices [0, 1], of which some are stages" in why


def test_bounds_of_its_own():
    def bounded(y):
        return stretto.lax.ppermute(y, "x", [(0, 1), (1, 0)], valid_iterations=[(0, 2), (1, 0)])

    assert "valid iterations of its own" in variant(permute=bounded)


def test_an_effect():
    def printed(y):
        jax.debug.print("{}", y[0, 0])
        return y

    assert "has an effect" in variant(send=printed, mask="nothing")


def test_a_loop_that_ends_by_its_data():
    def local(layers, xs):
        def go(carry):
            return jnp.sum(carry[0]) < 1e6

        def iteration(carry):
            x, total = carry
            y = lax.scan(gpipe.layer, x, layers)[0]
            return lax.ppermute(y, "x", [(0, 1), (1, 0)]), total + y

        return lax.while_loop(go, iteration, (xs[0], xs[0]))[1]

    why = refused(program(local, 2), (weights(2 * 4), inputs(3)), 2)
    assert "cannot be followed: the number of its iterations is not known" in why


def test_a_pipeline_that_is_circular_already():
    module = compile_hlo(circular(3, 4, 2), 1, 3, interleave=2)
    assert "not a loop over its layers" in module.interleaved[0].why


def test_a_circular_pipeline_of_layers():
    def local(layers, xs):
        stage = lax.axis_index("x")

        def iteration(carry, i):
            received, outputs = carry
            x = jnp.where((stage == 0) & (i < 2), xs[jnp.clip(i, 0, 1)], received)
            y = lax.scan(gpipe.layer, x, layers)[0]
            put = outputs.at[jnp.clip(i - 3, 0, 1)].set(y)
            outputs = jnp.where((stage == 1) & (i >= 3), put, outputs)
            return (lax.ppermute(y, "x", [(0, 1), (1, 0)]), outputs), None

        start = (jnp.zeros_like(xs[0]), jnp.zeros_like(xs))
        outputs = lax.scan(iteration, start, jnp.arange(5))[0][1]
        return lax.psum(jnp.where(stage == 1, outputs, 0), "x")

    why = refused(program(local, 2), (weights(2 * 4), inputs(2)), 2)
    assert "the pipeline is circular as written" in why


def test_a_state_of_which_a_part_is_made_anew():
    def local(layers, xs):
        stage = lax.axis_index("x")

        def both(state, w):
            x, n = state
            y = gpipe.layer(x, w)[0] + n
            return (y, n + jnp.sum(y)), None

        def iteration(carry, i):
            received, outputs = carry
            x = jnp.where(stage == 0, xs[jnp.clip(i, 0, 2)], received)
            y, _ = lax.scan(both, (x, jnp.float32(0)), layers)[0]
            outputs = jnp.where((stage == 1) & (i >= 1), outputs.at[i - 1].set(y), outputs)
            return (lax.ppermute(y, "x", [(0, 1)]), outputs), None

        start = (jnp.zeros_like(xs[0]), jnp.zeros_like(xs))
        outputs = lax.scan(iteration, start, jnp.arange(4))[0][1]
        return lax.psum(jnp.where(stage == 1, outputs, 0), "x")

    why = refused(program(local, 2), (weights(2 * 4), inputs(3)), 2)
    assert "takes only a part of what another one gave" in why


def test_pipelines_side_by_side_that_differ():
    over = mesh(2, 2, names="dx")

    def local(layers, xs):
        outputs = where(2, 3)(layers, xs)
        last = jnp.arange(3)[:, None, None] == 2
        return jnp.where(last & (lax.axis_index("d") == 1), 0, outputs)

    function = manual(local, over, (P("x"), P(None, "d")), P(None, "d"))
    why = refused(function, (weights(2 * 4), inputs(3)), 4)
    assert "side by side differ" in why


def test_pipelines_over_replicas():
    module = compile_hlo(circular(2, 2), 2, 2, interleave=2)
    assert "over replicas" in module.interleaved[0].why


# The rewritten loop is proved again: here it is made from timetables that are wrong.


def swapped(table):
    """Stage 1 runs its two chunks of the first microbatch the wrong way round."""
    rows = [list(row) for row in table.runs]
    first, second = [i for i, run in enumerate(rows[1]) if run is not None and run.microbatch == 0]
    rows[1][first], rows[1][second] = rows[1][second], rows[1][first]
    return replace(table, runs=tuple(map(tuple, rows)))


def late(table):
    """The last stage goes forward one iteration too late for the first microbatch."""
    commit = table.commit.copy()
    at = int(np.flatnonzero(table.reads[-1])[0])
    commit[-1, at], commit[-1, -1] = 0, 1
    return replace(table, commit=commit)


def never_entering(table):
    return replace(table, source=np.where(table.source == ENTERS, 0, table.source))


def lost_while_waiting(table):
    """What comes back too early is put where nothing is kept."""
    assert table.rooms
    return replace(table, store=np.full_like(table.store, table.rooms))


@pytest.mark.parametrize("broken", [swapped, late, never_entering, lost_while_waiting])
def test_a_wrong_rewriting_is_seen(broken, monkeypatch):
    def wrong(*arguments):
        return broken(timetable(*arguments))

    monkeypatch.setattr(driver, "timetable", wrong)
    why = refused(program(where(2, 3), 2), (weights(2 * 4), inputs(3)), 2)
    assert "could not be verified" in why


def test_a_schedule_that_is_too_long_to_be_followed(monkeypatch):
    monkeypatch.setattr(driver, "MOST_ELEMENTS", 13)
    assert variant() == "7 iterations of 2 stages are too many to be followed"


# The schedule, and where weights go.


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"),
    list(itertools.product(range(2, 6), range(1, 10), range(1, 5))),
)
def test_every_microbatch_has_its_time(stages, microbatches, chunks):
    enters = list(range(microbatches))
    leaves = [m + stages - 1 for m in enters]
    trips = microbatches + stages - 1
    table = timetable(stages, chunks, enters, leaves, trips)
    at = {}
    for stage, row in enumerate(table.runs):
        for i, run in enumerate(row):
            if run is not None:
                at[run.microbatch, run.chunk * stages + stage] = i
    assert len(at) == microbatches * stages * chunks
    for m in range(microbatches):
        for v in range(1, stages * chunks):
            gap = at[m, v] - at[m, v - 1]
            assert gap == 1 if v % stages else gap >= 1
        # What a device of the written loop did by then, it has done.
        assert table.commit[0, : at[m, 0]].sum() == enters[m] and table.commit[0, at[m, 0]]
        last = at[m, stages * chunks - 1]
        assert table.commit[-1, :last].sum() == leaves[m] and table.commit[-1, last]
        assert table.source[0, at[m, 0]] == ENTERS
    assert (table.commit.sum(1) == trips).all()
    if microbatches >= stages:
        assert table.iterations == chunks * microbatches + stages - 1
        assert table.rooms <= microbatches % stages
    if microbatches % stages == 0:
        assert table.rooms == 0


def test_groups_are_as_small_as_can_be():
    assert groups(8, 4) == [4, 4]
    assert groups(9, 4) == [5, 4]
    assert groups(7, 4) == [7]
    assert groups(3, 4) == [3]


@pytest.mark.parametrize(("stages", "chunks"), list(itertools.product(range(2, 8), range(1, 6))))
def test_chunks_are_moved_in_as_many_rounds_as_there_are(stages, chunks):
    held = [[s * chunks + c for c in range(chunks)] for s in range(stages)]
    placed = [[-1] * chunks for _ in range(stages)]
    rounds = moves(stages, chunks)
    assert len(rounds) == chunks
    for move in rounds:
        assert sorted(move.to) == list(range(stages))
        for source, target in enumerate(move.to):
            placed[target][move.takes[target]] = held[source][move.gives[source]]
    assert placed == [[r * stages + s for r in range(chunks)] for s in range(stages)]
