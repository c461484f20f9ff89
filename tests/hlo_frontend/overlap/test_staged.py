"""Loops whose collectives begin an iteration early or end an iteration late: same bits, less time.

Predictions are judged by the replay of the lowered program, which walks its loops; results by the executor.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from executed import Executed, execute
from frontend_support import P, compiled, manual, mesh
from jax import lax
from overlap_support import NEAR, block, table
from overlap_support import module as hlo_module
from test_apply import POLICY, TABLE, seconds_of

from stretto.collectives.ops import Collective, Kind
from stretto.hlo_frontend.compile import CompiledModule
from stretto.hlo_frontend.overlap.apply import OverlapPolicy, Planned
from stretto.hlo_frontend.overlap.staged import LoopReport
from stretto.hlo_frontend.overlap.stages import LoopBody, movable, stages_of
from stretto.runtime.program import Loop, Program, Run, Start, Wait, instructions
from stretto.runtime.program.communicated import starts, walked
from stretto.testing_replay import ReplayError, replay_program

DEVICES, WIDTH, ROWS = 4, 32, 64
# Whatever can move does, however little it gains and however much memory it takes; nothing is bucketed.
AT_ONCE = tuple(replace(link, latency_s=0.0) for link in TABLE.links)
EAGER = OverlapPolicy(replace(TABLE, links=AT_ONCE), least_gain=-10.0, memory_factor=10.0)


def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(h @ lax.all_gather(w, "x", tiled=True)), None


def scanned(ws: jax.Array, x: jax.Array) -> jax.Array:
    step = jax.checkpoint(layer, prevent_cse=False)
    return (lax.scan(step, x, ws)[0] ** 2).sum()


def kept_apart(ws: jax.Array, x: jax.Array) -> jax.Array:
    """With the barrier that `jax.checkpoint` puts before what it computes again."""
    return (lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2).sum()


def unrolled(ws: jax.Array, x: jax.Array) -> jax.Array:
    for w in ws:
        x = jax.checkpoint(layer)(x, w)[0]
    return (x**2).sum()


Arguments = list[np.ndarray]


def weights(layers: int, count: int = 1) -> Arguments:
    rng = np.random.default_rng(layers)
    shapes = [(layers, WIDTH, WIDTH)] * count + [(DEVICES * ROWS, WIDTH)]
    return [rng.normal(size=s).astype(np.float32) / 5 for s in shapes]


@cache
def training(layers: int, policy: OverlapPolicy | None, loss: Any = scanned) -> CompiledModule:
    specs = (P(None, "x"), P("x"))
    f = manual(jax.grad(loss), mesh(DEVICES), specs, P(None, "x"))
    return compiled(f, *weights(layers), num_devices=DEVICES, overlap=policy)


def reports(planned: Planned | None) -> list[LoopReport]:
    assert planned is not None
    inner = [p for plans in planned.inner.values() for one in plans for p in reports(one)]
    return [*planned.loops, *inner]


def seconds(module: CompiledModule) -> float:
    return replay_program(module.program, seconds_of(module.program)).seconds


def loops(program: Program) -> list[Loop]:
    return [i for i in instructions(program.body) if isinstance(i, Loop)]


def split(arguments: Arguments, axes: tuple[int, ...]) -> list[list[np.ndarray]]:
    """Each argument's parts for the devices."""
    return [np.split(a, DEVICES, axis) for a, axis in zip(arguments, axes, strict=True)]


def names(run: Executed) -> list[str]:
    """Names of the collectives that were run."""
    return [e[1] for e in run.events if e[0] == "start"]


def test_what_a_program_with_loops_takes_is_predicted() -> None:
    for module in (training(8, POLICY), training(2, POLICY)):
        replayed = replay_program(module.program, seconds_of(module.program))
        predicted = module.program.predicted
        assert predicted is not None
        assert predicted.seconds == pytest.approx(replayed.seconds, rel=0.05)
        assert predicted.exposed == pytest.approx(
            replayed.exposed_seconds, abs=0.05 * replayed.seconds
        )


def test_gathers_begin_early_and_scatters_end_late() -> None:
    module = training(8, POLICY)
    forward, backward = reports(module.overlap)
    assert (len(forward.early), len(forward.late)) == (1, 0)
    assert (len(backward.early), len(backward.late)) == (1, 1)
    assert [loop.trip_count for loop in loops(module.program)] == [7, 6]
    assert [len(loop.carried) for loop in loops(module.program)] == [1, 2]


@pytest.mark.thorough
def test_the_barrier_of_a_recomputation_lets_gathers_begin_early() -> None:
    module = training(8, POLICY, kept_apart)
    assert [(len(r.early), len(r.late)) for r in reports(module.overlap)] == [(1, 0), (1, 1)]
    assert seconds(module) == pytest.approx(seconds(training(8, POLICY)), rel=0.01)
    parts = split(weights(8), (1, 0))
    without = execute(training(8, None, kept_apart).program, parts)
    assert without.bits == execute(module.program, parts).bits


def test_no_loop_is_changed_where_the_cores_that_compute_move_the_data() -> None:
    links = tuple(replace(link, busy=1.0) for link in TABLE.links)
    module = training(8, OverlapPolicy(replace(TABLE, links=links)))
    assert module.program == training(8, None).program
    assert all("gains too little" in report.why for report in reports(module.overlap))


def test_it_takes_the_time_that_was_claimed_about_that_of_the_unrolled_program() -> None:
    module = training(24, POLICY)
    assert module.overlap is not None
    found = seconds(module)
    assert found == pytest.approx(module.overlap.seconds, rel=0.01)
    assert found < 0.7 * seconds(training(24, None))
    assert found < 1.05 * seconds(training(24, POLICY, unrolled))


# Forward and backward: a loop of two iterations has none left where two stand around it.
@pytest.mark.thorough
@pytest.mark.parametrize(("layers", "moved"), [(1, []), (2, [True, False]), (4, [True, True])])
def test_bits_and_collectives_stay_the_same(layers: int, moved: list[bool]) -> None:
    parts = split(weights(layers), (1, 0))
    without, found = (training(layers, p) for p in (None, POLICY))
    assert [bool(r.early or r.late) for r in reports(found.overlap)] == moved
    a, b = execute(without.program, parts), execute(found.program, parts)
    assert a.bits == b.bits
    assert Counter(names(a)) == Counter(names(b))
    assert set(Counter(names(a)).values()) == {layers}


def test_equal_programs_come_of_equal_modules() -> None:
    again = training.__wrapped__(8, POLICY)
    assert walked(again.program) == walked(training(8, POLICY).program)
    assert again.program == training(8, POLICY).program


def test_collectives_that_cross_use_the_stream_of_their_group() -> None:
    program = training(8, POLICY).program
    assert program.num_streams == 1
    assert {stream for _, stream in starts(program)} == {0}


def test_which_gathers_of_one_reader_begin_early_follows_from_the_module() -> None:
    """Ranks decide alike: those that the module has first, which XLA lists as they are read."""
    listed = [3, 1, 5, 2, 7, 0, 6, 4]
    weights = "".join(f"%w{k} = f32[16] parameter({k})\n" for k in range(8))
    gathers = "".join(
        f"%g{k} = f32[32] all-gather(%w{k}), {NEAR}, dimensions={{0}}\n" for k in range(8)
    )
    body = f"""
        {weights} {gathers} %p = f32[256] parameter(8)
        %c = f32[256] concatenate({", ".join(f"%g{k}" for k in listed)}), dimensions={{0}}
        %s = f32[256] add(%p, %c)
        ROOT %t = ({"f32[16], " * 8}f32[256]) tuple({"".join(f"%w{k}, " for k in range(8))}%s)
    """
    loop_body = LoopBody(block(hlo_module(body)))
    found = movable(loop_body, table())
    assert [node.instruction.name for node in found.early] == [f"g{k}" for k in listed]
    half = stages_of(loop_body, found, 0.5).moved
    assert [node.instruction.name for node in half] == [f"g{k}" for k in listed[:4]]


def test_memory_for_the_next_weights_is_charged() -> None:
    """A layer's weights are larger than all else that is alive: two layers' of them are too much."""

    def f(ws: jax.Array, x: jax.Array) -> jax.Array:
        def wide(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            full = lax.all_gather(w, "x", axis=1, tiled=True)
            return jnp.tanh(h @ full) @ full.T, None

        return lax.scan(wide, x, ws)[0]

    rng = np.random.default_rng(0)
    ws = rng.normal(size=(6, 8, 4096)).astype(np.float32)
    x = rng.normal(size=(DEVICES, 8)).astype(np.float32)
    function = manual(f, mesh(DEVICES), (P(None, None, "x"), P("x")), P("x"))
    costs = replace(TABLE, links=(replace(TABLE.links[0], bytes_per_s=1e9),))
    tight, ample = (
        compiled(
            function,
            ws,
            x,
            num_devices=DEVICES,
            overlap=OverlapPolicy(costs, memory_factor=factor),
        )
        for factor in (1.1, 3.0)
    )
    assert reports(ample.overlap)[0].early
    (kept,) = reports(tight.overlap)
    assert not kept.early and kept.why


# As long as what it takes to send a small weight.
SLOW_START = 1e-4
LATENT = replace(TABLE, links=tuple(replace(link, latency_s=SLOW_START) for link in TABLE.links))


def gathered(of: Any, x: jax.Array) -> jax.Array:
    """Layers with two sharded weights and a sharded bias each."""

    def wide(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        first, second, bias = (lax.all_gather(part, "x", tiled=True) for part in w)
        return jnp.tanh(jnp.tanh(h @ first) @ second + bias), None

    return (lax.scan(jax.checkpoint(wide, prevent_cse=False), x, of)[0] ** 2).sum()


@jax.custom_vjp
def replicated(w: jax.Array) -> jax.Array:
    """A weight that all devices have: its gradient is summed over them."""
    return w


replicated.defvjp(lambda w: (w, None), lambda _, g: (lax.psum(g, "x"),))


def averaged(of: Any, x: jax.Array) -> jax.Array:
    def wide(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        first, second, bias = (replicated(part) for part in w)
        return jnp.tanh(jnp.tanh(h @ first) @ second + bias), None

    return (lax.scan(wide, x, of)[0] ** 2).sum()


def small_weights(layers: int) -> Arguments:
    rng = np.random.default_rng(3)
    shapes = [(layers, WIDTH, WIDTH), (layers, WIDTH, WIDTH), (layers, WIDTH)]
    shapes.append((DEVICES * ROWS, WIDTH))
    return [rng.normal(size=s).astype(np.float32) / 5 for s in shapes]


def bucketed(loss: Any, sharded: bool, policy: OverlapPolicy | None) -> CompiledModule:
    weights_spec = P(None, "x") if sharded else P()
    gradient = manual(
        lambda a, b, c, x: jax.grad(loss)((a, b, c), x),
        mesh(DEVICES),
        (weights_spec, weights_spec, weights_spec, P("x")),
        (weights_spec,) * 3,
    )
    return compiled(gradient, *small_weights(6), num_devices=DEVICES, overlap=policy)


def crossing(module: CompiledModule) -> list[Collective]:
    """The collectives that loops carry."""
    events = {carried.event for loop in loops(module.program) for carried in loop.carried}
    found = [i for i in instructions(module.program.body) if isinstance(i, Start)]
    return [module.program.collectives[i.collective] for i in found if i.event in events]


@pytest.mark.thorough
def test_small_gathers_and_scatters_cross_together() -> None:
    policies = None, OverlapPolicy(LATENT, memory_factor=3.0)
    without, found = (bucketed(gathered, True, policy) for policy in policies)
    merged = [c.kind for c in crossing(found) if len(c.operands) > 1]
    assert sorted(merged) == [Kind.ALL_GATHER, Kind.ALL_GATHER, Kind.REDUCE_SCATTER]
    parts = split(small_weights(6), (1, 1, 1, 0))
    a, b = execute(without.program, parts), execute(found.program, parts)
    assert a.bits == b.bits
    together = {member for name in names(b) for member in name.split("+")}
    assert together == set(names(a))
    assert len(names(b)) < len(names(a))


@pytest.mark.thorough
def test_gradients_that_are_summed_in_every_iteration_cross_together() -> None:
    """XLA combines them; they are taken apart, and merged again where that is as fast."""
    policies = None, OverlapPolicy(LATENT, memory_factor=3.0)
    without, found = (bucketed(averaged, False, policy) for policy in policies)
    assert not crossing(without)
    assert [len(c.operands) for c in crossing(found)] == [3]
    *weights, x = small_weights(6)
    parts = [*([w] * DEVICES for w in weights), np.split(x, DEVICES)]
    assert execute(without.program, parts).bits == execute(found.program, parts).bits


def test_a_bucket_that_crosses_takes_the_time_that_was_claimed() -> None:
    found = bucketed(gathered, True, OverlapPolicy(LATENT, memory_factor=3.0))
    assert found.overlap is not None
    costs = seconds_of(found.program)

    def with_latency(what: Run | Start) -> float:
        if isinstance(what, Run):
            return costs(what)
        collective = found.program.collectives[what.collective]
        sent = sum(t.nbytes for t in collective.operands)
        whole = max(sent, sum(t.nbytes for t in collective.results))
        return SLOW_START + (DEVICES - 1) / DEVICES * whole / TABLE.links[0].bytes_per_s

    replayed = replay_program(found.program, with_latency)
    assert replayed.seconds == pytest.approx(found.overlap.seconds, rel=0.03)


def kept_because(f: Callable[..., Any], *arguments: np.ndarray, specs: Any, out: Any) -> str:
    function = manual(f, mesh(DEVICES), specs, out)
    module = compiled(function, *arguments, num_devices=DEVICES, overlap=EAGER)
    (report,) = reports(module.overlap)
    assert not report.early and not report.late
    return report.why


def test_loops_that_stay_as_they_are_say_why() -> None:
    x = np.ones((DEVICES, 8), np.float32)

    def endless(x: jax.Array) -> jax.Array:
        return lax.while_loop(
            lambda h: lax.psum(h.sum(), "x") > 1, lambda h: h * lax.pmax(h, "x"), x
        )

    assert "not known" in kept_because(endless, x, specs=P("x"), out=P("x"))

    def chained(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 5, lambda i, h: jnp.tanh(h @ h.T @ lax.psum(h, "x")), x)

    assert "can move" in kept_because(chained, x, specs=P("x"), out=P("x"))

    def behind_a_barrier(ws: jax.Array, x: jax.Array) -> jax.Array:
        def step(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            h, w = lax.optimization_barrier((h, w))
            return layer(jnp.sin(lax.all_gather(h, "x", tiled=True)[: len(h)]), w)

        return lax.scan(step, x, ws)[0]

    specs = (P(None, "x"), P("x"))
    assert "can move" in kept_because(behind_a_barrier, *weights(4), specs=specs, out=P("x"))


def test_in_a_loop_of_unknown_length_what_is_only_carried_crosses() -> None:
    def f(x: jax.Array) -> jax.Array:
        def step(state: Any) -> Any:
            i, h, seen = state
            h = jnp.tanh(h @ (h.T @ h))
            return i + 1, h + 0.1 * seen, lax.pmax(h, "x")

        return lax.while_loop(lambda s: s[0] < s[1].shape[0] + s[0] * 0 - 60, step, (0, x, x))[1]

    x = np.random.default_rng(0).normal(size=(DEVICES * ROWS, WIDTH)).astype(np.float32)
    function = manual(f, mesh(DEVICES), P("x"), P("x"))
    without, found = (compiled(function, x, num_devices=DEVICES, overlap=p) for p in (None, POLICY))
    (loop,) = loops(found.program)
    if loop.trip_count is None:
        assert len(loop.carried) == 1
    parts = split([x], (0,))
    assert execute(without.program, parts).bits == execute(found.program, parts).bits


# What a body may do, by name: (carries, weights, number of the op) -> output or None; carries are changed.
def _gather(c: dict[str, Any], w: jax.Array, k: int) -> None:
    c["h"] = jnp.tanh(c["h"] @ lax.all_gather(w, "x", tiled=True))


def _gather_and_keep(c: dict[str, Any], w: jax.Array, k: int) -> jax.Array:
    full = lax.all_gather(w * 2, "x", tiled=True)
    c["h"] = c["h"] + c["h"] @ full
    return full[:2]


def _compute(c: dict[str, Any], w: jax.Array, k: int) -> None:
    c["h"] = jnp.sin(c["h"] @ c["h"].T @ c["h"] * 0.1 + k)


def _sum_out(c: dict[str, Any], w: jax.Array, k: int) -> jax.Array:
    return lax.psum(c["h"] * (k + 1), "x")


def _scatter_out(c: dict[str, Any], w: jax.Array, k: int) -> jax.Array:
    return lax.psum_scatter(c["h"].T @ c["h"], "x", tiled=True)


def _sum_on(c: dict[str, Any], w: jax.Array, k: int) -> None:
    c["h"] = c["h"] + 0.1 * lax.psum(c["h"], "x")


def _accumulate(c: dict[str, Any], w: jax.Array, k: int) -> None:
    c["sum"] = c["sum"] + lax.psum(c["h"].sum() + k, "x")


def _swap(c: dict[str, Any], w: jax.Array, k: int) -> None:
    c["p"], c["q"] = c["q"], c["p"] + c["sum"]


def _permute(c: dict[str, Any], w: jax.Array, k: int) -> None:
    ring = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
    c["p"] = lax.ppermute(c["p"] + c["h"], "x", ring)


def _read(c: dict[str, Any], w: jax.Array, k: int) -> None:
    c["h"] = c["h"] + c["p"] * 0.5


def _inner_loop(c: dict[str, Any], w: jax.Array, k: int) -> None:
    def step(i: Any, h: jax.Array) -> jax.Array:
        full = lax.all_gather(w, "x", tiled=True)
        return jnp.tanh(h + lax.psum(h, "x") * 0.01 + full[: len(h)] * i)

    c["h"] = lax.fori_loop(0, 3, step, c["h"])


def _by_device(c: dict[str, Any], w: jax.Array, k: int) -> jax.Array:
    return lax.all_gather(w * lax.axis_index("x"), "x", tiled=True)[:1]


OPS = (
    _gather, _gather_and_keep, _compute, _sum_out, _scatter_out, _sum_on, _accumulate, _swap, _permute,
    _read, _inner_loop, _by_device,
)  # fmt: skip
STACKED = {_gather_and_keep: P(), _sum_out: P(), _scatter_out: P(None, "x"), _by_device: P()}


@pytest.mark.quick("5")
@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_body_does(seed: int) -> None:
    chosen = random.Random(seed)
    trips = chosen.randint(2, 5)
    ops = [chosen.choice(OPS) for _ in range(chosen.randint(3, 7))]
    backward = chosen.random() < 0.4

    def f(ws: jax.Array, x: jax.Array) -> Any:
        def step(state: Any, w: jax.Array) -> Any:
            c = dict(zip(("h", "sum", "p", "q"), state, strict=True))
            given = [op(c, w, k) for k, op in enumerate(ops)]
            return tuple(c.values()), [g for g in given if g is not None]

        begun = (x + ws.sum(), jnp.float32(0), x * 0 + 1, x + 2)
        return lax.scan(step, begun, ws, reverse=backward)

    out = ((P("x"), P(), P("x"), P("x")), [STACKED[op] for op in ops if op in STACKED])
    function = manual(f, mesh(DEVICES), (P(None, "x"), P("x")), out)
    arguments = [a[..., :16, :16] for a in weights(trips)]
    modules = [
        compiled(function, *arguments, num_devices=DEVICES, overlap=p) for p in (None, EAGER)
    ]
    parts = split(arguments, (1, 0))
    without, found = (execute(m.program, parts) for m in modules)
    assert without.bits == found.bits
    assert sorted(names(without)) == sorted(names(found))
    replay_program(modules[1].program, lambda what: 1.0)


def test_the_replay_minds_what_is_under_way() -> None:
    program = training(8, POLICY).program
    loop = loops(program)[0]
    unawaited = tuple(i for i in loop.body.instructions if not isinstance(i, Wait))
    broken = replace(loop, body=replace(loop.body, instructions=unawaited))
    steps = tuple(broken if i is loop else i for i in program.body.instructions)
    with pytest.raises(ReplayError, match="not there yet"):
        replay_program(
            replace(program, body=replace(program.body, instructions=steps)), lambda _: 1.0
        )
