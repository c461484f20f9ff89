"""Planned programs: they compute what they computed before, in an order that hides what it can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, judge, manual, mesh
from interpreter import Interpreter
from jax import lax

from stretto.hlo_frontend.compile import CompiledModule
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.costs import Compute, CostTable, Link
from stretto.hlo_frontend.overlap.replay import replay, unscheduled
from stretto.runtime.errors import InvalidProgramError
from stretto.runtime.execution.negotiation import streams_of
from stretto.runtime.program import Block, Loop, Program, Run, Start, Wait, instructions
from stretto.runtime.program.communicated import starts
from stretto.testing import MemoryTransport, MemoryWorld, NullEngine, Recorder, run_processes
from stretto.testing_replay import replay_program

# Compute that is paid by flops alone, so that the replay below can tell what a segment takes; a link on which
# a layer's weights (1 KiB to each device) take as long as its product with 64 rows.
FLOPS_PER_S, LATENCY, RATE, LAUNCH = 1e9, 1e-6, 3e7, 1e-6
TABLE = CostTable(
    Compute(FLOPS_PER_S, 1e30, LAUNCH), (Link(1, 4, LATENCY, RATE), Link(1, 2, LATENCY, RATE))
)
POLICY = OverlapPolicy(TABLE)
# Links so slow and launches so cheap that whatever can be moved is moved.
EAGER = OverlapPolicy(
    CostTable(Compute(1e9, 1e9, 1e-9), (Link(1, 2, 1e-4, 1e8),), estimates=True), least_gain=0.0
)
LAYERS, WIDTH, ROWS = 6, 32, 64


def sharded(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    """Fully sharded weights: each layer's are gathered, and their gradients scattered."""
    for w in ws:
        x = jnp.tanh(x @ lax.all_gather(w, "x", tiled=True))
    return (x**2).sum()


def module_of(policy: OverlapPolicy | None, devices: int = 4) -> CompiledModule:
    over = mesh(devices)
    ws = [np.zeros((WIDTH, WIDTH), np.float32) for _ in range(LAYERS)]
    specs = ([P("x")] * LAYERS, P("x"))
    f = manual(jax.grad(sharded), over, specs, [P("x")] * LAYERS)
    x = np.zeros((devices * ROWS, WIDTH), np.float32)
    return compiled(f, ws, x, num_devices=devices, overlap=policy)


def sequence(program: Program, block: Block | None = None) -> list[str]:
    """``run``, ``start NAME``, ``wait NAME``, in order."""
    names = {}
    found = []
    for i in (block or program.body).instructions:
        if isinstance(i, Run):
            found.append("run")
        elif isinstance(i, Start):
            names[i.event] = program.collectives[i.collective].name
            found.append(f"start {names[i.event]}")
        elif isinstance(i, Wait):
            found.append(f"wait {names[i.event]}")
    return found


def hidden(program: Program, block: Block | None = None) -> int:
    """Collectives with a segment between start and wait."""
    order = sequence(program, block)
    begun = [s.removeprefix("start ") for s in order if s.startswith("start ")]
    return sum("run" in order[order.index(f"start {n}") : order.index(f"wait {n}")] for n in begun)


def flops_between(program: Program, block: Block, first: str, last: str) -> float:
    """Operations of the segments between two steps."""
    order = sequence(program, block)
    steps = zip(
        order, (i for i in block.instructions if isinstance(i, Run | Start | Wait)), strict=True
    )
    return sum(
        program.segments[i.segment].flops
        for position, (_, i) in enumerate(steps)
        if isinstance(i, Run) and order.index(first) < position < order.index(last)
    )


def test_collectives_run_beside_compute_and_equal_layers_stay_one_segment() -> None:
    without, program = module_of(None).program, module_of(POLICY).program
    assert hidden(without) == 0
    # All but the first gather, which nothing comes before, and the last scatter.
    assert hidden(program) >= 2 * LAYERS - 2
    assert len(program.collectives) == len(without.collectives) == 2 * LAYERS
    runs = sum(isinstance(i, Run) for i in program.body.instructions)
    assert len(program.segments) < runs, "layers that are equal must be one segment"


def seconds_of(program: Program) -> Callable[[object], float]:
    """What the table says, worked out anew: a run by its flops, a collective by its ring."""

    def seconds(what: object) -> float:
        if isinstance(what, Run):
            return LAUNCH + program.segments[what.segment].flops / FLOPS_PER_S
        assert isinstance(what, Start)
        collective = program.collectives[what.collective]
        size = len(collective.groups[0])
        largest = max(t.nbytes for t in (*collective.operands, *collective.results))
        return LATENCY + (size - 1) / size * largest / RATE

    return seconds


def test_the_program_takes_the_time_that_was_claimed() -> None:
    for policy in (None, POLICY):
        module = module_of(policy)
        replayed = replay_program(module.program, seconds_of(module.program))
        if policy is None:
            without = replayed.seconds
    found = module.overlap
    assert found is not None and found.changed
    # Elementwise operations are counted a little differently in the two places.
    assert replayed.seconds == pytest.approx(found.seconds, rel=0.03)
    assert without == pytest.approx(found.without, rel=0.03)
    assert replayed.seconds < 0.8 * without
    predicted = module.program.predicted
    assert predicted is not None and predicted.held == 0.0
    assert predicted.seconds == pytest.approx(replayed.seconds, rel=0.03)
    assert predicted.exposed == pytest.approx(replayed.exposed_seconds, abs=0.03 * without)


def test_what_is_not_scheduled_is_predicted_too() -> None:
    """Links that take all of the cores: everything is awaited where it stands, by the same table."""
    found = module_of(busy(1.0))
    replayed = replay_program(found.program, seconds_of(found.program))
    predicted = found.program.predicted
    assert predicted is not None and found.overlap is not None and not found.overlap.changed
    assert predicted.exposed + predicted.held == pytest.approx(replayed.exposed_seconds, rel=0.03)
    assert module_of(None).program.predicted is None


def busy(share: float) -> OverlapPolicy:
    links = tuple(replace(link, busy=share) for link in TABLE.links)
    return OverlapPolicy(replace(TABLE, links=links))


def test_nothing_is_hidden_by_the_cores_that_would_compute() -> None:
    found = module_of(busy(1.0))
    assert found.program == module_of(None).program
    assert found.overlap is not None and found.overlap.seconds == found.overlap.without


def test_what_collectives_take_from_compute_is_charged() -> None:
    free, half = module_of(POLICY), module_of(busy(0.5))
    assert half.program == free.program
    assert free.overlap is not None and half.overlap is not None
    program = free.program
    seconds = seconds_of(program)
    runs = sum(seconds(i) for i in instructions(program.body) if isinstance(i, Run))
    moving = sum(seconds(i) for i in instructions(program.body) if isinstance(i, Start))
    hidden = runs + moving - replay_program(program, seconds).seconds
    assert hidden > 0.5 * moving
    charged = half.overlap.seconds - free.overlap.seconds
    assert charged == pytest.approx(0.5 * hidden, rel=0.05)


def test_peak_memory_is_as_claimed_and_within_the_limit() -> None:
    module = module_of(POLICY)
    found = module.overlap
    assert found is not None and found.graph is not None and found.timeline is not None
    program = module.program
    # What a segment reads lives until its end, and not only until its last kernel that reads it.
    found_bytes = replay_program(program, seconds_of(program)).peak_bytes
    assert found_bytes <= 1.12 * found.timeline.peak_bytes
    own = replay(found.graph, unscheduled(found.graph)).peak_bytes
    assert max(found_bytes, found.timeline.peak_bytes) <= POLICY.memory_factor * own
    # The limit is what keeps it there: with less of it, less is in flight.
    tight = module_of(replace(POLICY, memory_factor=1.0)).overlap
    assert tight is not None and tight.timeline is not None
    assert tight.timeline.peak_bytes <= own


def test_all_ranks_start_in_one_order() -> None:
    module = module_of(POLICY)

    def main(world: MemoryWorld, transport: MemoryTransport) -> list[tuple]:
        from stretto.runtime.execution.executor import Executor

        recorder = Recorder()
        executor = Executor(
            NullEngine(2),
            world,
            communicators=transport.communicators(world.rank),
            instrument=recorder,
        )
        loaded = executor.load(
            module.program, range(4), schedule=module.schedule, with_order=module.with_order
        )
        from stretto.runtime.execution.value import Value

        arguments = [
            [
                Value.of(
                    executor.engine, executor.engine.put(np.zeros(t.shape, t.numpy), t, k), t, k
                )
                for t in module.program.inputs
            ]
            for k in range(2)
        ]
        for row in loaded.execute(arguments):
            for value in row:
                value.array()
        executor.close()
        return [e[1:] for e in recorder.events if e[0] == "start"]

    left, right = run_processes(2, main, local_devices=2)
    listed = [(e.name, stream) for e, stream in starts(module.program)]
    assert left == right == listed


def test_ranks_that_differ_come_back_to_one_stream() -> None:
    """The order that ranks agree on is that of the program without overlap."""
    module = module_of(POLICY)
    entries = len(module.schedule.entries)
    again = module.with_order({(): tuple(range(entries))})
    assert again.num_streams == 1
    assert sequence(again) == sequence(module_of(None).program)


def test_groups_that_proceed_independently_have_streams_of_their_own() -> None:
    over = mesh(2, 2)

    def f(w, v, x):
        a = x @ lax.all_gather(w, "x", tiled=True)
        b = x @ lax.all_gather(v, "y", tiled=True)
        c = lax.ppermute(x, "x", [(0, 1), (1, 0)])
        return jnp.tanh(a) @ b.T + c @ c.T @ (a + b) @ b.T

    specs = (P("x"), P("y"), P(("x", "y")))
    arguments = (
        np.ones((64, 64), np.float32),
        np.ones((64, 64), np.float32),
        np.ones((256, 64), np.float32),
    )
    function = manual(f, over, specs, P(("x", "y")))
    program = judge(function, over, specs, *arguments, overlap=EAGER).program
    streams = {
        program.collectives[i.collective].name.split(".")[0]: i.stream
        for i in instructions(program.body)
        if isinstance(i, Start)
    }
    assert program.num_streams == len(set(streams.values())) == 3 or len(streams) < 3
    assert streams_of(program, 0, dict.fromkeys(range(4), 0))


def test_what_cannot_gain_is_left_as_it_is() -> None:
    over = mesh(4)
    f = manual(lambda x: lax.psum(x, "x"), over, P("x"), P())
    x = np.ones((4, 4), np.float32)
    alone, planned = (compiled(f, x, num_devices=4, overlap=p) for p in (None, EAGER))
    assert planned.program == alone.program
    assert planned.overlap is not None and not planned.overlap.changed


def test_a_group_without_an_entry_is_an_error() -> None:
    costs = CostTable(Compute(1e9, 1e9, 0.0), (Link(1, 2, 1e-4, 1e8),))
    with pytest.raises(InvalidProgramError, match="axis_stride 1 and group_size 4"):
        module_of(OverlapPolicy(costs))


def test_the_body_of_a_loop_has_a_plan_of_its_own(rng: np.random.Generator) -> None:
    over = mesh(4)

    def f(ws, vs, x):
        def layer(h, wv):
            w, v = wv
            h = jnp.tanh(h @ lax.all_gather(w, "x", tiled=True))
            return jnp.tanh(h @ h.T @ h @ lax.all_gather(v, "x", tiled=True)), None

        return lax.scan(layer, x, (ws, vs))[0]

    specs = (P(None, "x"), P(None, "x"), P("x"))
    ws, vs = (rng.normal(size=(5, 32, 32)).astype(np.float32) for _ in range(2))
    x = rng.normal(size=(64, 32)).astype(np.float32)
    function = manual(f, over, specs, P("x"))
    program = judge(function, over, specs, ws, vs, x, overlap=EAGER).program
    (loop,) = [i for i in instructions(program.body) if isinstance(i, Loop)]
    second = program.collectives[1].name
    order = sequence(program, loop.body)
    beside = flops_between(program, loop.body, f"start {second}", f"wait {second}")
    assert beside > 2 * 16 * 16 * 32, f"the second gather runs beside the first layer: {order}"


def test_combined_reductions_are_taken_apart(rng: np.random.Generator) -> None:
    over = mesh(4)

    def local(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    def reduced(ws, x):
        return [lax.psum(g, "x") for g in jax.grad(local)(ws, x)]

    ws = [rng.normal(size=(32, 32)).astype(np.float32) / 6 for _ in range(4)]
    x = rng.normal(size=(256, 32)).astype(np.float32)
    specs = ([P()] * 4, P("x"))
    function = manual(reduced, over, specs, [P()] * 4)
    combined = compiled(function, ws, x, num_devices=4).program
    assert len(combined.collectives) == 1, "XLA does not combine them: the test shows nothing"
    program = compiled(function, ws, x, num_devices=4, overlap=POLICY).program
    assert len(program.collectives) == 4
    assert hidden(program) >= 3


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_small_collectives_become_one_with_the_operands_of_all(
    rng: np.random.Generator, share: float
) -> None:
    """Each of many small gathers costs a latency, and nothing lies between them that could hide it: that is
    saved even where the cores that compute move the data."""
    over = mesh(4)

    def f(ws, v, x):
        big = x @ lax.all_gather(v, "x", tiled=True)
        full = [lax.all_gather(w, "x", tiled=True) for w in ws]
        for w in full:
            big = jnp.tanh(big * w) @ big.T @ big
        return big

    ws = [rng.normal(size=(32,)).astype(np.float32) for _ in range(6)]
    v, x = rng.normal(size=(32, 32)).astype(np.float32) / 9, rng.normal(size=(128, 32)) / 9
    specs = ([P("x")] * 6, P("x"), P("x"))
    function = manual(f, over, specs, P("x"))
    costs = replace(TABLE, links=(Link(1, 4, 1e-3, 1e9, busy=share),))
    policy = OverlapPolicy(costs)
    arguments = (ws, v, x.astype(np.float32))
    without, program = (
        compiled(function, *arguments, num_devices=4, overlap=p).program for p in (None, policy)
    )
    assert len(program.collectives) < len(without.collectives)
    packed = [c for c in program.collectives if "+" in c.name]
    assert packed
    for c in packed:
        assert len(c.operands) == len(c.results) == len(c.name.split("+"))
    members = [n for c in program.collectives for n in c.name.split("+")]
    assert sorted(members) == sorted(c.name for c in without.collectives)
    results = [
        Interpreter(p).run(*(np.split(w, 4) for w in ws), np.split(v, 4), np.split(arguments[2], 4))
        for p in (without, program)
    ]
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
