"""Measured times of segments: what they say of a program, and the plan of the next compilation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, manual, mesh
from jax import lax

from stretto.hlo_frontend.compile import CompiledModule
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.overlap import measured
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.costs import Compute, CostTable, Link
from stretto.hlo_frontend.overlap.measured import Measured, key_of, slower
from stretto.hlo_frontend.profiled import ProfiledModule, measure
from stretto.runtime.errors import InvalidProgramError
from stretto.runtime.program import Loop, Program, Run, Start, instructions
from stretto.testing_replay import replay_program

# As in `overlap/test_apply`: a layer's gather takes as long as its product, and compute is paid by flops.
FLOPS_PER_S, LATENCY, RATE, LAUNCH = 1e9, 1e-6, 3e7, 1e-6
LINKS = (Link(1, 4, LATENCY, RATE),)
RIGHT = OverlapPolicy(CostTable(Compute(FLOPS_PER_S, 1e30, LAUNCH), LINKS))
# A table by which compute takes no time at all: there is nothing to hide anything behind.
FREE = OverlapPolicy(CostTable(Compute(1e18, 1e30, LAUNCH), LINKS))
LAYERS, WIDTH, ROWS, DEVICES = 6, 32, 64, 4


def unrolled(ws: jax.Array, x: jax.Array) -> jax.Array:
    for w in ws:
        x = jnp.tanh(x @ lax.all_gather(w, "x", tiled=True))
    return (x**2).sum()


def scanned(ws: jax.Array, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ lax.all_gather(w, "x", tiled=True)), None

    return (lax.scan(layer, x, ws)[0] ** 2).sum()


@cache
def module_of(policy: OverlapPolicy, loss: Callable[..., jax.Array] = unrolled) -> CompiledModule:
    ws = np.zeros((LAYERS, WIDTH, WIDTH), np.float32)
    x = np.zeros((DEVICES * ROWS, WIDTH), np.float32)
    f = manual(jax.grad(loss), mesh(DEVICES), (P(None, "x"), P("x")), P(None, "x"))
    return compiled(f, ws, x, num_devices=DEVICES, overlap=policy)


def by_flops(program: Program) -> list[float | None]:
    """What each segment takes on a device with the rates of `RIGHT`."""
    return [LAUNCH + segment.flops / FLOPS_PER_S for segment in program.segments]


def seconds(program: Program, segments: list[float | None]) -> float:
    """What a program takes whose segments take that, replayed by code that shares nothing with the pass."""

    def of(what: Run | Start) -> float:
        if isinstance(what, Run):
            return segments[what.segment] or 0.0
        collective = program.collectives[what.collective]
        largest = max(t.nbytes for t in (*collective.operands, *collective.results))
        return LATENCY + 3 / 4 * largest / RATE

    return replay_program(program, of).seconds


def measured_of(policy: OverlapPolicy, loss: Callable[..., jax.Array] = unrolled) -> ProfiledModule:
    module = module_of(policy, loss)
    assert module.source is not None
    return measure(module.source, policy, module.program, by_flops(module.program))


def next_one(
    policy: OverlapPolicy, module: CompiledModule, found: ProfiledModule
) -> CompiledModule:
    """The module compiled by what was measured, which was written to a file and read again."""
    assert module.source is not None
    known = measured.read(measured.write({module.source.key(): found.times}))
    return module.source.compiled(replace(policy, measured=known))


@pytest.mark.parametrize("loss", [unrolled, scanned])
def test_a_program_that_a_wrong_table_left_alone_gets_a_plan(
    loss: Callable[..., jax.Array],
) -> None:
    module = module_of(FREE, loss)
    assert module.overlap is not None and not module.overlap.changed
    found = measured_of(FREE, loss)
    # What is said of the program holds, and what was modelled before did not.
    took = seconds(module.program, by_flops(module.program))
    assert found.seconds == pytest.approx(took, rel=0.05)
    assert found.predicted < 0.7 * took
    new = next_one(FREE, module, found).program
    assert new.predicted is not None
    takes = seconds(new, by_flops(new))
    assert new.predicted.seconds == pytest.approx(takes, rel=0.06)
    assert takes < 0.8 * took
    # It is as good as what the right table gives.
    right = module_of(RIGHT, loss).program
    assert takes < 1.02 * seconds(right, by_flops(right))
    if loss is scanned:
        assert any(i.carried for i in instructions(new.body) if isinstance(i, Loop))


def test_a_plan_that_loses_by_what_was_measured_is_not_made_again() -> None:
    """Its loop was staged behind compute that takes no time, and is left with more launches than before."""
    launch = 20 * LAUNCH
    slow, free = (
        replace(p, costs=replace(p.costs, compute=replace(p.costs.compute, launch_s=launch)))
        for p in (RIGHT, FREE)
    )
    module = module_of(slow, scanned)
    assert module.overlap is not None and module.overlap.changed
    assert module.source is not None
    nothing: list[float | None] = [launch] * len(module.program.segments)
    found = measure(module.source, slow, module.program, nothing)
    new = next_one(slow, module, found).program
    alone = module_of(free, scanned).program
    assert len(new.segments) == len(alone.segments) < len(module.program.segments)


def test_times_as_modelled_say_what_the_table_says_and_give_the_same_plan() -> None:
    found, module = measured_of(RIGHT), module_of(RIGHT)
    assert found.seconds == pytest.approx(found.predicted, rel=0.05)
    new = next_one(RIGHT, module, found).program
    assert seconds(new, by_flops(new)) == pytest.approx(
        seconds(module.program, by_flops(module.program)), rel=0.02
    )


def test_what_busy_links_take_from_compute_is_charged() -> None:
    links = tuple(replace(link, busy=0.2) for link in LINKS)
    busy = replace(RIGHT, costs=replace(RIGHT.costs, links=links))
    planned = module_of(busy).overlap
    assert planned is not None and planned.changed
    assert planned.timeline is not None
    assert planned.timeline.held > 0.05 * planned.timeline.seconds
    # A launch for each collective comes on top.
    assert measured_of(busy).predicted == pytest.approx(planned.seconds, rel=0.03)


def test_the_kernels_of_a_segment_sum_up_to_what_was_measured() -> None:
    module = module_of(RIGHT)
    assert module.source is not None
    per_flop = by_flops(module.program)
    thrice = [LAUNCH + 3.0 * (t - LAUNCH) for t in per_flop if t is not None]
    once = measure(module.source, RIGHT, module.program, per_flop).times
    found = measure(module.source, RIGHT, module.program, thrice).times
    assert found.ratio == pytest.approx(3.0 * once.ratio)
    assert found.seconds == pytest.approx({k: 3.0 * t for k, t in once.seconds.items()})
    # Every segment runs as often as in the program: its kernels, over all places, take its times.
    runs = [i.segment for i in instructions(module.program.body) if isinstance(i, Run)]
    whole = sum((per_flop[s] or 0.0) - LAUNCH for s in runs)
    assert sum(once.seconds.values()) == pytest.approx(whole)


def test_segments_that_never_ran_are_priced_like_those_that_did() -> None:
    module = module_of(RIGHT)
    assert module.source is not None
    times = by_flops(module.program)
    double: list[float | None] = [LAUNCH + 2.0 * ((t or 0.0) - LAUNCH) for t in times]
    heaviest = max(range(len(times)), key=lambda i: times[i] or 0.0)
    whole = measure(module.source, RIGHT, module.program, double)
    double[heaviest] = None
    found = measure(module.source, RIGHT, module.program, double)
    assert len(found.times.seconds) < len(whole.times.seconds)
    assert found.seconds == pytest.approx(whole.seconds, rel=0.05)


def test_a_program_of_another_module_is_refused() -> None:
    module, other = module_of(RIGHT), module_of(RIGHT, scanned)
    assert module.source is not None
    with pytest.raises(InvalidProgramError, match="is not what its module compiles to"):
        measure(module.source, RIGHT, other.program, by_flops(other.program))


def test_what_was_measured_of_another_module_changes_nothing() -> None:
    module = module_of(FREE)
    assert module.source is not None
    other = {"another": measured_of(FREE).times}
    assert module.source.compiled(replace(FREE, measured=other)).program == module.program


def test_a_module_is_known_by_what_it_computes_and_not_by_its_lines() -> None:
    module = module_of(FREE)
    assert module.source is not None
    plain = Module.parse(module.source.hlo)
    key = key_of(plain, 1, DEVICES)
    assert key == module.source.key()
    assert key != key_of(plain, DEVICES, 1)
    for computation in plain.proto.computations:
        for instruction in computation.instructions:
            instruction.metadata.Clear()
    assert key == key_of(Module(plain.proto), 1, DEVICES)
    plain.proto.computations[0].instructions[-1].name = "renamed"
    assert key != key_of(Module(plain.proto), 1, DEVICES)


def test_the_last_modules_are_kept_as_far_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = {f"m{i}": Measured({"main/dot": 1.23456e-3 * (i + 1)}, 2.0) for i in range(70)}
    found = measured.read(measured.write(many))
    assert list(found) == [f"m{i}" for i in range(70 - measured.MOST_MODULES, 70)]
    assert found["m69"] == many["m69"]
    monkeypatch.setattr(measured, "MOST_CHARACTERS", 150)
    assert list(measured.read(measured.write(many))) == ["m68", "m69"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "modules": {}}',
        '{"version": 1, "modules": {"m": {"seconds": {"a": -1.0}, "ratio": 1.0}}}',
        '{"version": 1, "modules": {"m": {"seconds": {"a": "x"}, "ratio": 1.0}}}',
        '{"version": 1, "modules": {"m": {"seconds": {}, "ratio": Infinity}}}',
        json.dumps({"version": 1, "modules": {"m": {"seconds": [], "ratio": 1.0}}}),
    ],
)
def test_what_is_no_table_of_times_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        measured.read(text)


def test_of_two_engines_the_longer_times_count() -> None:
    one, other = Measured({"a": 1.0, "b": 4.0}, 2.0), Measured({"b": 3.0, "c": 5.0}, 7.0)
    assert slower(one, other) == Measured({"a": 1.0, "b": 4.0, "c": 5.0}, 7.0)
    assert slower(other, one).seconds == {"a": 1.0, "b": 4.0, "c": 5.0}
