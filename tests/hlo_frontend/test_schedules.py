"""Steps of training as 1F1B: one loop instead of two, with the same gradients bit for bit.

Judged by the step as it is written, by JAX's CPU backend, and by counts made by hand: each microbatch makes
P - 1 hops there and as many back, and P rows of what layers keep are there instead of M + P - 1.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, manual, mesh
from gpipe import by_hand, inputs, weights
from random_steps import compiled
from schedule_judges import equal, judge
from training_steps import Draw, draw, program

from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.pipelines import driver
from stretto.hlo_frontend.pipelines.slots import NONE, SCHEDULES
from stretto.pipelining import pipelined

SIZES = list(itertools.product(range(2, 9), (1, 2, 3, 5, 8, 16)))


# The schedule.


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_one_forward_one_backward(stages, microbatches):
    slots = SCHEDULES["1f1b"](stages, microbatches)
    assert slots.iterations == 2 * (microbatches + stages - 1)
    assert slots.length(1, 2) == 3 * (microbatches + stages - 1)
    assert slots.shares == pytest.approx((1 / 2, microbatches / slots.iterations))
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
        assert slots.shares == pytest.approx((1 / 3, microbatches / slots.iterations))
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


# Each with the schedules in which it is run, and the number of chunks of layers where it is interleaved.
EVERY = ("1f1b", "zb_h1", "interleaved_1f1b")
VARIANTS = {
    "plain": (Draw(stages=3, microbatches=3), EVERY[:2], 2),
    "data": (Draw(axes="dx", stages=4, loss="squares", mask="where"), EVERY[::2], 2),
    "tensors": (Draw(axes="yx", again="layer", loss="squares", microbatches=5), EVERY, 2),
    "stage-again": (
        Draw(again="stage", mask="where", layers=3, head="cond", microbatches=3, ring=False), EVERY, 3
    ),
    "scanned": (Draw(collect="scan", metric=True, inside=True, stages=4, microbatches=2), EVERY[:1], 0),
    "bfloat16": (Draw(dtype="bfloat16", loss="distance", stages=3, embeds=False), EVERY[:1], 0),
    "loss-inside": (
        Draw(head="cond", stages=4, layers=4, microbatches=5, metric=True, again="products"),
        EVERY[::2], 2
    ),
    "loss-inside-scanned": (
        Draw(head="cond", collect="scan", loss="smooth", inside=True, axes="xd", again="products"),
        EVERY[:2], 0
    ),
    "loss-inside-bfloat16": (
        Draw(head="cond", collect="scan", metric=True, inside=True, dtype="bfloat16"), EVERY[2:], 2
    ),
    "loss-inside-masked": (
        Draw(head="where", mask="where", dtype="bfloat16", microbatches=3), EVERY[:1], 0
    ),
    "one-array": (Draw(shift="roll", mask="where", loss="squares"), EVERY[2:], 2),
}  # fmt: skip


@pytest.mark.quick("scanned")
@pytest.mark.parametrize(("d", "schedules", "chunks"), VARIANTS.values(), ids=VARIANTS)
def test_however_the_step_is_written(d, schedules, chunks):
    for schedule, found in judge(d, *schedules, chunks=chunks).items():
        (report,) = found.module.interleaved
        assert report.after == len(report.runs[0])
        counts = {k: {row.count(k) for row in report.runs} for k in "FBW"}
        if schedule == "1f1b":
            assert counts == {"F": {d.microbatches}, "B": {d.microbatches}, "W": {0}}
        elif schedule == "zb_h1":
            assert report.left > 0
            assert 0 <= report.after - (3 * d.microbatches + d.stages - 1) < 2
            assert {sum(row.count(k) for row in report.runs) for k in "FBW"} == {
                len(report.runs) * d.microbatches
            }
        else:
            # Devices have the layers of other virtual stages than as written, and gradients of their own.
            assert report.longest >= 2 * (chunks * d.microbatches + d.stages - 1)
            assert counts["F"] == counts["B"] == {chunks * d.microbatches}
            assert report.rows == report.alive[0] and report.moved > 0 and report.back > 0


@pytest.mark.thorough
def test_messages_and_bytes():
    d = Draw(stages=3, microbatches=5, loss="squares")
    found = judge(d)["1f1b"]
    assert found.ran is not None
    assert sum(found.ran.messages.values()) == 2 * 5 * (3 - 1)
    (report,) = found.module.interleaved
    assert (report.alive, report.rows, report.rows_before) == ((3, 2, 1), 3, 5 + 3 - 1)
    # What a layer keeps: its input, twice as wide a tanh with its derivative, and weights that are constants.
    assert report.kept > 0 and report.before == report.after == 2 * 7


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_a_gradient_that_is_written_as_a_loop():
    """It begins within the loop, with what the forward pass has put away."""
    over = mesh(2)
    function = manual(by_hand(2, 3), over, (P("x"), P()), (P(), P("x"), P()))
    module = compiled(function, (weights(2 * 4), inputs(3)), 2, "1f1b")
    (report,) = module.interleaved
    assert (report.why, report.rounds) == ("", "")
    equal(function, module, over)
