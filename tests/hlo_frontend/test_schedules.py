"""Steps of training as 1F1B: one loop instead of two, with the same gradients bit for bit.

Judged by the step as it is written, by JAX's CPU backend, and by counts made by hand: each microbatch makes
P - 1 hops there and as many back, and P rows of what layers keep are there instead of M + P - 1.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import gpipe
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_steps
from frontend_support import P, manual, mesh, shards
from gpipe import by_hand, inputs, weights, where
from interpreter import Interpreter
from jax import lax
from random_steps import Found, Step, compare, compiled
from training_steps import Draw, draw, program

from stretto.commands.explain import explain, to_text
from stretto.commands.hlo_input import compile_file
from stretto.commands.schedule_svg import svg
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.pipelines import driver, members
from stretto.hlo_frontend.pipelines.slots import NONE, SCHEDULES, Slots, _slots
from stretto.pipelining import pipelined
from stretto.runtime import options
from stretto.runtime.errors import InvalidProgramError

SIZES = list(itertools.product(range(2, 9), (1, 2, 3, 5, 8, 16)))


def judge(d: Draw, schedule: str = "1f1b", **how) -> Found:
    """Run a step in a schedule: gradients are as JAX's, and those of the written step, bit for bit where no
    head is computed row by row. A head in the loop that stands in no branch is equal here; not everywhere, as
    the report says."""
    found = compare(d, schedule, **how)
    assert found.whys == ()
    (report,) = found.module.interleaved
    behind = d.loss != "squares" and d.head == "behind"
    assert bool(report.rounds) == (behind or d.head == "where" or schedule == "zb_h1")
    assert behind or schedule == "zb_h1" or found.differs == ()
    return found


def refused(d: Draw, schedule: str = "1f1b", **how) -> str:
    """The reason why a step is not run in another schedule; the program is the written one."""
    found = compare(d, schedule, **how)
    assert len(found.whys) == 2
    (why,) = (w for w in found.whys if "with which it would be one" not in w)
    return why


# The schedule.


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_one_forward_one_backward(stages, microbatches):
    slots = SCHEDULES["1f1b"](stages, microbatches)
    assert slots.iterations == 2 * (microbatches + stages - 1)
    assert slots.length(1, 2) == 3 * (microbatches + stages - 1)
    assert slots.alive == tuple(min(microbatches, stages - s) for s in range(stages))
    assert slots.rows == min(microbatches, stages)
    there = [{m: t for t, m in enumerate(row) if m != NONE} for row in slots.forward]
    back = [{m: t for t, m in enumerate(row) if m != NONE} for row in slots.backward]
    for m in range(microbatches):
        times = [own[m] for own in there]
        assert times == list(range(times[0], times[0] + stages))  # received where it is needed
        returns = [own[m] for own in back]
        assert returns == list(range(returns[0], returns[0] - stages, -1))
        assert returns[-1] > times[-1]
    assert not np.any((slots.forward != NONE) & (slots.backward != NONE))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_zero_bubble(stages, microbatches):
    """All that a run takes is there, or has waited in a row of its own; rows are not overwritten."""
    slots = SCHEDULES["zb_h1"](stages, microbatches)
    if stages == microbatches:
        assert slots.iterations == slots.length(1, 1, 1) == 3 * microbatches + stages - 1
    assert slots.iterations <= 3 * (microbatches + stages - 1)
    assert slots.rows <= stages and max(slots.alive) <= stages
    there, back, ends = (
        [{m: t for t, m in enumerate(row) if m != NONE} for row in table]
        for table in (slots.forward, slots.backward, slots.weights)
    )
    for stage, m in itertools.product(range(stages), range(microbatches)):
        assert there[stage][m] < back[stage][m] < ends[stage][m]
        if stage:
            assert there[stage - 1][m] < there[stage][m] and back[stage][m] < back[stage - 1][m]
    busy = [(table != NONE).astype(int) for table in (slots.forward, slots.backward, slots.weights)]
    assert np.max(sum(busy)) == 1
    for rooms, runs, way in ((slots.waits, there, 1), (slots.waits_back, back, -1)):
        for stage in range(stages) if rooms is not None else ():
            if not 0 <= stage - way < stages:
                continue
            seen: dict[int, int] = {}
            for t in range(slots.iterations):
                came = [m for m, sent in runs[stage - way].items() if sent + 1 == t]
                if came:
                    seen[int(rooms.stores[stage, t])] = came[0]
                for m, at in runs[stage].items():
                    if at == t:
                        assert seen[int(rooms.fetches[stage, t])] == m


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_interleaved(stages, microbatches, chunks):
    """Each microbatch goes through all virtual stages and back, each chunk takes them in their order, what
    waits is not overwritten, and memory does not grow with the number of microbatches."""
    slots = SCHEDULES["interleaved_1f1b"](stages, microbatches, chunks)
    runs = chunks * microbatches + stages - 1
    if microbatches % stages == 0:  # nobody waits for what is not needed
        assert (slots.length(1, 1), slots.length(1, 2)) == (2 * runs, 3 * runs)
    elif microbatches > stages:
        assert slots.length(1, 2) < 1.15 * 3 * runs
    group = min(microbatches, 2 * stages - 1)
    for stage, alive in enumerate(slots.alive):
        assert alive <= 2 * (stages - stage - 1) + (chunks - 1) * group + 1
    times: list[dict[tuple[int, int], int]] = []
    for table in (slots.forward, slots.backward):
        runs = {(int(table[s, t]), int(slots.chunk[s, t]) * stages + int(s)): int(t)
                for s, t in np.argwhere(table != NONE)}  # fmt: skip
        assert set(runs) == set(itertools.product(range(microbatches), range(stages * chunks)))
        times.append(runs)
        for v in range(stages * chunks):
            own = [runs[m, v] for m in range(microbatches)]
            assert own == sorted(own)
    there, back = times
    assert not np.any((slots.forward != NONE) & (slots.backward != NONE))
    for (m, v), t in there.items():
        assert t < back[m, v] and there.get((m, v - 1), -2) + slots.delay <= t
        come = back[m, v + 1] + slots.delay if v + 1 < stages * chunks else there[m, v] + 1
        assert come <= back[m, v]
    for rooms, runs, way in ((slots.waits, there, 1), (slots.waits_back, back, -1)):
        came = {(sent + slots.delay, (v + way) % stages): (m, v + way)
                for (m, v), sent in runs.items()}  # fmt: skip
        rows: dict[tuple[int, int], tuple[int, int]] = {}
        at = {(t, v % stages): (m, v) for (m, v), t in runs.items()}
        for t, stage in itertools.product(range(slots.iterations), range(stages)):
            now = came.get((t, stage))
            if rooms is not None and now is not None and now in runs:
                rows[stage, int(rooms.stores[stage, t])] = now
            run = at.get((t, stage))
            if run is not None and run[1] - way in range(stages * chunks):
                assert run == (now if rooms is None else rows[stage, int(rooms.fetches[stage, t])])


# Steps that are run in a schedule.


def test_messages_and_bytes():
    d = Draw(stages=3, microbatches=5)
    found = judge(d)
    assert found.ran is not None
    assert sum(found.ran.messages.values()) == 2 * 5 * (3 - 1)
    (report,) = found.module.interleaved
    assert (report.alive, report.rows, report.rows_before) == ((3, 2, 1), 3, 5 + 3 - 1)
    # What a layer keeps: its input, twice as wide a tanh with its derivative, and weights that are constants.
    assert report.kept > 0 and report.before == report.after == 2 * 7


VARIANTS = {
    "data": Draw(axes="dx", microbatches=3),
    "tensors": Draw(axes="yx", again="layer"),
    "stage-again": Draw(again="stage", ring=False),
    "masked": Draw(mask="where", loss="squares"),
    "scanned": Draw(collect="scan", metric=True, inside=True),
    "bfloat16": Draw(dtype="bfloat16", loss="distance", stages=3),
    "loss-inside": Draw(head="cond", stages=3, metric=True),
    "loss-inside-scanned": Draw(head="cond", collect="scan", loss="smooth", inside=True, axes="dx"),
    "loss-inside-masked": Draw(head="where", mask="where", dtype="bfloat16", microbatches=3),
    "few": Draw(stages=4, microbatches=2, embeds=False),
}


@pytest.mark.parametrize("d", VARIANTS.values(), ids=VARIANTS)
def test_however_the_step_is_written(d):
    judge(d)


ZERO_BUBBLE = {
    "plain": Draw(stages=3, microbatches=3),
    "tensors": Draw(axes="yx", again="layer", loss="squares", microbatches=3),
    "stage-again": Draw(again="stage", mask="where", loss="squares"),
    "loss-inside": Draw(head="cond", axes="xy"),
}


@pytest.mark.parametrize("d", ZERO_BUBBLE.values(), ids=ZERO_BUBBLE)
def test_weights_in_runs_of_their_own(d):
    found = judge(d, "zb_h1")
    (report,) = found.module.interleaved
    assert report.left > 0 and report.after == len(report.runs[0])
    assert 0 <= report.after - (3 * d.microbatches + d.stages - 1) < 2
    assert {sum(row.count(k) for row in report.runs) for k in "FBW"} == {
        len(report.runs) * d.microbatches
    }


INTERLEAVED = {
    "plain": (Draw(stages=4, layers=4, microbatches=5, head="cond"), 2),
    "tensors": (Draw(axes="yx", again="layer", loss="squares", microbatches=5), 2),
    "data": (Draw(stages=4, axes="dx", loss="squares", mask="where"), 2),
    "stage-again": (Draw(again="stage", mask="where", layers=3, head="cond", microbatches=3), 3),
    "scanned": (Draw(collect="scan", metric=True, inside=True, head="cond", dtype="bfloat16"), 2),
    "one-array": (Draw(shift="roll", mask="where", loss="squares"), 2),
}


@pytest.mark.parametrize(("d", "chunks"), INTERLEAVED.values(), ids=INTERLEAVED)
def test_chunks_of_layers(d, chunks):
    """Devices have the layers of other virtual stages than as written, and gradients of their own."""
    found = judge(d, "interleaved_1f1b", interleave=chunks)
    (report,) = found.module.interleaved
    assert report.after == len(report.runs[0])
    assert report.longest >= 2 * (chunks * d.microbatches + d.stages - 1)
    assert {row.count(k) for row in report.runs for k in "FB"} == {chunks * d.microbatches}
    assert report.rows == report.alive[0] and report.moved > 0 and report.back > 0


@pytest.mark.parametrize("seed", [4])
def test_drawn_at_random(seed):
    judge(replace(draw(random.Random(seed)), loss="squares"))


def test_a_head_in_the_loop_is_computed_once():
    """It is not there a second time behind the loop, and nothing is kept of it for each microbatch."""
    d = Draw(head="cond", classes=10, microbatches=5)
    function, arguments, _, over = program(d)
    written = compiled(function, arguments, over.devices.size, "gpipe").source
    assert written is not None
    made, _ = driver.scheduled(written.hlo, 1, over.devices.size, "1f1b")

    def heads(serialized: bytes) -> Counter[str]:
        found: Counter[str] = Counter()
        computations = [Module.parse(serialized).entry]
        seen = set(computations)
        for computation in computations:
            for instruction in computation.instructions:
                shapes = [instruction.shape, *instruction.shape.tuple_shapes]
                rows = [list(s.dimensions) for s in shapes]
                inside = computation is not computations[0]
                found["kept"] += inside and any(r[:1] == [6] and 10 in r[1:] for r in rows)
                dots = [*rows, *(list(o.shape.dimensions) for o in instruction.operands)]
                found["dots"] += instruction.opcode == "dot" and any(10 in r for r in dots)
                fresh = [c for c in instruction.called if c not in seen]
                seen |= set(fresh)
                computations += fresh
        return found

    assert heads(written.hlo)["kept"] > 0
    assert heads(made) == {"kept": 0, "dots": 3}  # the product, and its gradients


@pytest.mark.parametrize("head", [False, True], ids=["outputs", "losses"])
def test_what_the_library_writes(head):
    layers = weights(2 * 4)
    over = mesh(2)

    def layer(w, x):
        return jnp.tanh(x @ w["a"] + w["b"])

    def loss(scale, y, target):
        return jnp.sum(jax.nn.log_softmax(y * scale) * target)

    def local(w, xs):
        if head:
            return jnp.mean(pipelined(layer, w, xs, "x", head=loss, head_params=xs[0], targets=xs))
        return jnp.sum(pipelined(layer, w, xs, "x") ** 2)

    mapped = jax.shard_map(local, mesh=over, in_specs=(P("x"), P()), out_specs=P())
    function = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1)))
    module = compiled(function, (layers, inputs(3)), 2, "1f1b")
    (report,) = module.interleaved
    assert (report.why, report.rounds) == ("", "")
    equal(function, module, over)


def test_a_gradient_that_is_written_as_a_loop():
    """It begins within the loop, with what the forward pass has put away."""
    over = mesh(2)
    function = manual(by_hand(2, 3), over, (P("x"), P()), (P(), P("x"), P()))
    module = compiled(function, (weights(2 * 4), inputs(3)), 2, "1f1b")
    (report,) = module.interleaved
    assert (report.why, report.rounds) == ("", "")
    equal(function, module, over)


def equal(function, module, over):
    """A step of `weights` and three `inputs` gives what it gives as it is written, and with JAX."""
    layers = weights(2 * 4)
    given = [shards(layers["a"], over, P("x")), shards(layers["b"], over, P("x"))]
    given.append(shards(inputs(3), over, P()))
    found = Interpreter(module.program, skipped=np.nan).run(*given)
    written = Interpreter(compiled(function, (layers, inputs(3)), 2, "gpipe").program).run(*given)
    for result, expected in zip(found, written, strict=True):
        np.testing.assert_array_equal(np.array(result), np.array(expected))
    whole = jax.tree.leaves(function(layers, inputs(3)))
    np.testing.assert_allclose(np.concatenate(found[1]), whole[1], rtol=2e-5, atol=2e-5)


# A head that all stages compute, of what the last one gave to all.

SHARED = {
    "psum": Draw(shared="psum", loss="squares"),
    "psum-alike": Draw(shared="psum", alike=True, loss="squares", stages=4, microbatches=5),
    "psum-data": Draw(shared="psum", axes="dx", loss="squares", inside=True, collect="scan"),
    "psum-tensors": Draw(shared="psum", axes="yx", loss="squares", alike=True),
    "psum-cross": Draw(shared="psum", stages=3, mask="where"),
    "gather": Draw(shared="gather", loss="squares", stages=3, inside=True),
    "gather-cross": Draw(shared="gather", alike=True, collect="scan"),
}


@pytest.mark.parametrize("d", SHARED.values(), ids=SHARED)
def test_a_head_that_all_stages_compute(d):
    """What the backward pass begins with is summed up over stages; the last one computes it for all."""
    found = judge(d)
    (report,) = found.module.interleaved
    assert report.alive[0] == min(d.stages, d.microbatches) == report.rows


@pytest.mark.parametrize("schedule", ["zb_h1", "interleaved_1f1b"])
def test_a_head_that_all_stages_compute_in_other_schedules(schedule):
    how = {"interleave": 2} if schedule == "interleaved_1f1b" else {}
    judge(Draw(shared="psum", loss="squares", microbatches=3), schedule, **how)


@pytest.mark.parametrize("stages", [2, 3])
def test_what_other_stages_give_is_not_zeros(monkeypatch, stages):
    """The loss is masked on other stages: their gradient is 0 * x, NaN where x is infinite, and is added."""

    def large(d, head, h, wanted):
        scale = np.ones(h.shape, np.float32)
        scale[1, 0, 0] = 1e30
        return jnp.sum((h * scale * scale) ** 2)

    monkeypatch.setattr(training_steps, "loss_of", large)
    d = Draw(shared="psum", loss="squares", stages=stages, microbatches=3)
    step = Step(d)
    last = step.written[step.paths.index("[1]['layers']['down']")][stages - 1]
    assert np.isnan(last[-1, :, 0]).all() and not np.isinf(last).any()  # infinite without the zeros
    judge(d)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_sum_of_the_same_number_is_the_same_in_any_order(stages):
    """`members.EXACT`: for all numbers of a binade, which are like those of any other."""
    x = np.arange(1 << 23, 1 << 24, dtype=np.int64).astype(np.float32)

    def sums(count: int) -> list[np.ndarray]:
        if count == 1:
            return [x]
        return [a + b for n in range(1, count) for a in sums(n) for b in sums(count - n)]

    first, *others = sums(stages)
    assert stages <= members.EXACT and all(np.array_equal(first, other) for other in others)


def test_sums_of_more_stages_may_round():
    (report,) = compare(
        Draw(shared="psum", alike=True, loss="squares", stages=5), "1f1b"
    ).module.interleaved
    assert (report.why, report.rounds) == ("", "a head is computed row by row")


UNDER = {
    "squares": Draw(under=True, loss="squares", stages=3),
    "cross": Draw(under=True, axes="dx", inside=True, collect="scan"),
    "psum": Draw(under=True, shared="psum", stages=4, microbatches=5, mask="where"),
    "gather": Draw(under=True, shared="gather", inside=True, again="layer"),
}


@pytest.mark.parametrize("d", UNDER.values(), ids=UNDER)
def test_a_head_under_a_conditional(d):
    """Behind the loop, on the last stage alone, as its gradient is."""
    found = compare(d, "1f1b")
    assert found.whys == found.differs == ()
    (report,) = found.module.interleaved
    one_row = d.loss == "squares"
    assert report.rounds == (
        "a head under lax.cond is computed apart" if one_row else "a head is computed row by row"
    )


def test_what_other_stages_do_not_give_is_zeros(monkeypatch):
    """Under a conditional the gradient of other stages is no 0 * x."""

    def large(d, head, h, wanted):
        scale = np.ones(h.shape, np.float32)
        scale[1, 0, 0] = 1e30
        return jnp.sum((h * scale * scale) ** 2)

    monkeypatch.setattr(training_steps, "loss_of", large)
    d = Draw(shared="psum", under=True, loss="squares", stages=3, microbatches=3, layers=1)
    step = Step(replace(d, layers=2))
    assert not any(np.isnan(g).any() for g in step.written[step.paths.index("[1]['head']")])
    found = step.compare("1f1b")
    assert found.whys == found.differs == ()


COUNTED = {
    "cond": Draw(counted=True, head="cond", microbatches=5),
    "cond-data": Draw(counted=True, head="cond", axes="xd", stages=2, inside=True, collect="scan"),
    "cond-metric": Draw(counted=True, head="cond", stages=3, metric=True, again="stage"),
    "where": Draw(counted=True, head="where", loss="squares"),
}


@pytest.mark.parametrize("d", COUNTED.values(), ids=COUNTED)
def test_a_number_that_the_loop_counts(d):
    """The loss is divided by it behind the loop, so that the backward pass begins with it."""
    judge(d)


@pytest.mark.parametrize("schedule", ["zb_h1", "interleaved_1f1b"])
def test_a_number_that_the_loop_counts_in_other_schedules(schedule):
    how = {"interleave": 2} if schedule == "interleaved_1f1b" else {}
    judge(COUNTED["cond"], schedule, **how)


# What runs have for themselves, and what is read of all of them.

OWN = {
    "balance-sent": (Draw(balance="sent", head="cond", stages=3, again="layer"), "1f1b"),
    "balance-stacked": (Draw(balance="stack", head="cond", microbatches=3), "zb_h1"),
    "balance-chunks": (Draw(balance="carry", head="cond", stages=3), "interleaved_1f1b"),
    "stacked-chunks": (Draw(balance="stack", loss="squares", again="stage"), "interleaved_1f1b"),
    "keys": (Draw(dropout="carry", balance="carry", loss="squares", inside=True), "1f1b"),
    "keys-shared": (Draw(dropout="shared", head="cond", again="stage", axes="dx"), "1f1b"),
    "keys-chunks": (Draw(dropout="stack", head="cond", microbatches=3), "interleaved_1f1b"),
}


@pytest.mark.parametrize(("d", "schedule"), OWN.values(), ids=OWN)
def test_what_each_run_has_for_itself(d, schedule):
    """Losses that a stage adds up over its own layers, and keys that it folds from numbers."""
    judge(d, schedule, **({"interleave": 2} if schedule == "interleaved_1f1b" else {}))


@pytest.mark.parametrize(
    "d", [Draw(collect="cond", loss="squares"), Draw(collect="cond", head="cond")]
)
def test_outputs_put_away_under_a_conditional(d):
    judge(d)


def test_a_loss_of_layers_that_is_not_linear(monkeypatch):
    """Its gradient is known only when all microbatches have been through all layers."""
    written = training_steps.outputs_of

    def outputs_of(*arguments):
        *found, total = written(*arguments)
        return *found, total**2

    monkeypatch.setattr(training_steps, "outputs_of", outputs_of)
    why = refused(Draw(balance="carry", head="cond"))
    assert "which depends on the forward pass of all microbatches" in why


def test_layers_with_a_loop_that_gives_more_than_one_array(monkeypatch):
    """As random bits are drawn; of it, runs of weights are left the arrays that they read."""

    def layer(x, w):
        begin = lax.stop_gradient((x, x * 2))
        one, other = lax.fori_loop(0, 3, lambda _, c: (c[1], c[0] * 0.5), begin)
        return x + jnp.tanh((x * one) @ w["up"]) @ w["down"] * other, None

    monkeypatch.setattr(training_steps, "layer", layer)
    judge(Draw(loss="squares", again="layer", microbatches=3), "zb_h1")


def test_a_number_that_depends_on_the_stages(monkeypatch):
    written = training_steps.outputs_of

    def outputs_of(*arguments):
        found, metric, count, total = written(*arguments)
        return found, metric, count + metric, total

    monkeypatch.setattr(training_steps, "outputs_of", outputs_of)
    why = refused(Draw(counted=True, head="cond", metric=True))
    assert "which depends on the forward pass of all microbatches" in why


def test_a_mask_on_the_loss_alone_in_the_loop():
    why = refused(Draw(head="loss", stages=3))
    assert "put the head under lax.cond where a microbatch leaves the last stage" in why


def beginning_anew(own):
    """Reasons why a step is not run as 1F1B, and not interleaved, whose layers hand on a sum of their own.
    ``own``: what a stage begins it with, of what the scan carries, which it gives anew."""
    count, stages = 4, 2

    def loss(w, xs):
        stage = lax.axis_index("x")

        def one(carry, w):
            x, total = carry
            y = jnp.tanh(x @ w)
            return (y, total + jnp.sum(y)), None

        def iteration(carry, i):
            received, total, state = carry
            x = jnp.where(stage == 0, xs[jnp.clip(i, 0, count - 1)], received)
            working = (i >= stage) & (i - stage < count)
            begun, state = own(state, total)
            y, more = lax.cond(
                working,
                lambda b: lax.scan(one, b, w)[0],
                lambda b: (b[0] * 0, jnp.float32(0)),
                (x, begun),
            )
            return (lax.ppermute(y, "x", [(0, 1)]), total + more, state), None

        start = jnp.zeros_like(xs[0]), jnp.float32(0), jnp.sin(xs[0, 0, 0])
        return lax.psum(lax.scan(iteration, start, jnp.arange(count + 1))[0][1], "x")

    over = mesh(stages)
    step = jax.value_and_grad(manual(loss, over, (P("x"), P()), P()))
    arguments = np.ones((4, 8, 8), np.float32), np.ones((count, 4, 8), np.float32)
    found = (
        compiled(jax.jit(step), arguments, stages, schedule, **how).interleaved
        for schedule, how in (("1f1b", {}), ("gpipe", {"interleave": 2}))
    )
    return [" ".join(report.why for report in reports) for reports in found]


ANEW = "f32[], which its layers hand on, begins anew in each stage"


def test_what_begins_anew_in_each_stage():
    """Interleaving would have it on other devices."""
    alone, chunks = beginning_anew(lambda state, total: (jnp.float32(0), state))
    assert not alone and ANEW in chunks


def test_what_begins_with_a_state_that_changes():
    alone, _ = beginning_anew(lambda state, total: (state, jnp.sin(state)))
    assert ANEW in alone and "depends on the iterations before it" in alone


def test_what_begins_with_what_other_runs_gave():
    alone, _ = beginning_anew(lambda state, total: (total, state))
    assert "a stage takes only a part of what another one gave" in alone


@pytest.mark.parametrize("collect", ["put", "scan"])
def test_a_head_of_what_each_stage_gave(monkeypatch, collect):
    """The gradient of the masked loss is not known to be zeros on other stages, and is added there."""
    written = training_steps.outputs_of

    def own(d, *given):
        return written(replace(d, shared="none"), *given)

    monkeypatch.setattr(training_steps, "outputs_of", own)
    why = refused(Draw(loss="squares", collect=collect))
    assert "the gradient of a head that all stages compute" in why and "0 * x is NaN" in why


def test_a_head_with_weights_of_a_stage(monkeypatch):
    """Another stage's part of the sum cannot be computed by the last one."""

    def scaled(d, head, h, wanted):
        own = lax.ppermute(head, "x", [(0, 1), (1, 0)])
        return jnp.sum((h @ own) ** 2)

    monkeypatch.setattr(training_steps, "loss_of", scaled)
    assert "is of the stage's own" in refused(Draw(shared="psum", alike=True))


# Steps that are refused, and stay as they are written.


@pytest.mark.parametrize("own", [False, True])
def test_outputs_with_something_of_another_stage(own):
    """Which is the same on all of them, or what that stage alone has."""

    def local(w, xs):
        ys = pipelined(lambda w, x: jnp.tanh(x @ w["a"] + w["b"]), w, xs, "x")
        first = ys * w["b"].sum() if own else ys
        more = lax.psum(jnp.where(lax.axis_index("x") == 0, first, 0), "x")
        return jnp.sum((ys + more) ** 2)

    over = mesh(2)
    mapped = jax.shard_map(local, mesh=over, in_specs=(P("x"), P()), out_specs=P())
    function = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1)))
    module = compiled(function, (weights(2 * 4), inputs(3)), 2, "1f1b")
    if own:
        assert any("is of the stage's own" in report.why for report in module.interleaved)
    else:
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
