"""Whole programs: JAX functions to programs, walked by the interpreter, against JAX's CPU backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, compiled, judge, manual, mesh
from interpreter import Interpreter
from jax import lax

from stretto.hlo_frontend import lower
from stretto.hlo_frontend.compile import CompileSpec, compile_hlo, compile_stablehlo
from stretto.runtime.program import Loop, Run, Start, instructions


@pytest.fixture(scope="module")
def rng():
    return np.random.default_rng(0)


DTYPES = ["float32", "bfloat16", "int8", "complex64", "bool", "float8_e4m3fn", "int4"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_psum_of_every_kind_of_dtype(dtype):
    x = (np.arange(32) % 3).reshape(8, 4).astype(jnp.dtype(dtype))
    f = manual(lambda x: lax.psum(x, "x"), mesh(4), P("x"), P())
    interpreter = judge(f, mesh(4), P("x"), x)
    (collective,) = interpreter.program.collectives
    # The type that travels: JAX sums booleans as s32, XLA turns int4 into s8 early on.
    travels = {"bool": "int32", "int4": "int8"}.get(dtype, dtype)
    assert collective.operands[0].numpy == jnp.dtype(travels)


COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "x"),
    "pmax": lambda x: lax.pmax(x, "x"),
    "pmin": lambda x: lax.pmin(x, "x"),
    "pmean": lambda x: lax.pmean(x, "x"),
    "all_gather": lambda x: lax.all_gather(x, "x"),
    "all_gather tiled": lambda x: lax.all_gather(x, "x", axis=1, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True),
    "ppermute": lambda x: lax.ppermute(x, "x", [(0, 1), (1, 2), (3, 0)]),
    "axis_index": lambda x: x + lax.axis_index("x"),
    "two axes": lambda x: lax.psum(x, ("y", "x")) + lax.axis_index(("y", "x")),
    "gather two axes": lambda x: lax.all_gather(x, ("y", "x")),
    "groups": lambda x: lax.psum(x, "x", axis_index_groups=[[0, 3], [1, 2]]),
    "gather groups": lambda x: lax.all_gather(x, "x", axis_index_groups=[[3, 0], [1, 2]]),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_shard_map(name, rng):
    x = rng.normal(size=(8, 8, 4)).astype(np.float32)
    over = mesh(4, 2)
    spec = P(("x", "y"))
    judge(manual(COLLECTIVES[name], over, spec, spec), over, spec, x)


def test_collectives_that_the_partitioner_makes(rng):
    over = mesh(4, 2)
    x, w = (rng.normal(size=(16, 16)).astype(np.float32) for _ in range(2))

    def f(x, w):
        h = jnp.tanh(x @ w)
        h = lax.with_sharding_constraint(h, jax.sharding.NamedSharding(over, P("y", "x")))
        return h.T @ w, jnp.sum(h)

    shardings = [jax.sharding.NamedSharding(over, s) for s in (P("x", None), P(None, "y"))]
    f = jax.jit(f, in_shardings=shardings)
    interpreter = judge(f, over, (P("x", None), P(None, "y")), x, w)
    assert interpreter.program.collectives


def test_scan_with_collective_updates_its_stack_in_place(rng):
    over = mesh(4)

    def f(x):
        def step(carry, _):
            carry = lax.psum(carry, "x") * 0.25 + 1
            return carry, carry

        return lax.scan(step, x, None, length=6)

    x = rng.normal(size=(8, 256)).astype(np.float32)
    interpreter = judge(manual(f, over, P("x"), (P("x"), P(None, "x"))), over, P("x"), x)
    (loop,) = [i for i in instructions(interpreter.program.body) if isinstance(i, Loop)]
    assert loop.trip_count == 6
    runs = [i for i in loop.body.instructions if isinstance(i, Run)]
    types = interpreter.program.slot_types
    stack = {s for s in loop.body.parameters if types[s].shape[:1] == (6,)}
    assert stack and stack <= {s for run in runs for s in run.donated}
    assert not interpreter.counts["Copy"]


def test_carry_that_is_not_owned_is_copied_once_before_the_loop(rng):
    over = mesh(2)

    def f(x):
        body = lambda i, c: c.at[i % 4].set(lax.psum(c[0], "x"))  # noqa: E731
        return lax.fori_loop(0, 9, body, x), x * 2

    x = rng.normal(size=(8, 256)).astype(np.float32)
    interpreter = judge(manual(f, over, P("x"), (P("x"), P("x"))), over, P("x"), x)
    assert interpreter.counts["Copy"] == 1


def test_nested_loops_and_swapped_carries(rng):
    over = mesh(4)

    def f(x, y):
        def outer(i, c):
            a, b = c
            inner = lambda j, c: (c[1], lax.ppermute(c[0] + j, "x", ring))  # noqa: E731
            a, b = lax.fori_loop(0, i + 1, inner, (b, a))
            return b.at[0].add(1.0), a

        return lax.fori_loop(0, 4, outer, (x, y))

    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    x, y = (rng.normal(size=(8, 300)).astype(np.float32) for _ in range(2))
    judge(manual(f, over, (P("x"), P("x")), (P("x"), P("x"))), over, (P("x"), P("x")), x, y)


def test_loop_whose_trip_count_is_data(rng):
    over = mesh(4)

    def f(x):
        def go_on(c):
            return lax.psum(c[1].sum(), "x") < 100

        return lax.while_loop(go_on, lambda c: (c[0] + 1, c[1] * 2 + lax.axis_index("x")), (0, x))

    x = np.abs(rng.normal(size=(8, 4))).astype(np.float32)
    judge(manual(f, over, P("x"), (P(), P("x"))), over, P("x"), x)


def test_branches_with_collectives(rng):
    over = mesh(4)

    def f(x, k):
        branches = [
            lambda x: lax.psum(x, "x"),
            lambda x: lax.ppermute(x, "x", [(0, 1)]),
            lambda x: x * 3,
        ]
        return lax.switch(k[0], branches, x) + lax.cond(
            k[0] > 0, lambda x: lax.pmax(x, "x"), lambda x: x, x
        )

    x = rng.normal(size=(8, 4)).astype(np.float32)
    function = manual(f, over, (P("x"), P()), P("x"))
    for k in (-1, 0, 1, 2, 7):
        judge(function, over, (P("x"), P()), x, np.array([k], np.int32))


def test_gradient_through_collectives_and_remat(rng):
    over = mesh(4)

    def loss(w, x):
        @jax.checkpoint
        def layer(h, w):
            full = lax.all_gather(w, "x", tiled=True)
            return jnp.tanh(h @ full), None

        h, _ = lax.scan(layer, x, w)
        return lax.psum((h**2).sum(), "x")

    w = rng.normal(size=(3, 16, 16)).astype(np.float32)
    x = rng.normal(size=(8, 16)).astype(np.float32)
    specs = (P(None, "x"), P("x"))
    f = manual(jax.value_and_grad(loss), over, specs, (P(), P(None, "x")))
    judge(f, over, specs, w, x)


def test_custom_reducer(rng):
    over = mesh(4)
    x = rng.integers(1, 5, size=(8, 4)).astype(np.float32)
    text = manual(lambda x: lax.psum(x, "x"), over, P("x"), P()).lower(x).as_text()
    text = text.replace("stablehlo.add", "stablehlo.atan2")
    program = compile_stablehlo(text, CompileSpec(1, 4)).program
    (collective,) = program.collectives
    assert collective.reduction is None and collective.reducer is not None
    got = Interpreter(program).run(np.split(x, 4))
    a, b, c, d = np.split(x, 4)
    expected = np.arctan2(np.arctan2(np.arctan2(a, b), c), d)
    np.testing.assert_allclose(got[0][0], expected, rtol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_platform_only_collectives():
    """What XLA:CPU refuses to run gets through: broadcast, ragged all-to-all, send and receive."""
    over = mesh(4)
    x = np.arange(16, dtype=np.float32)
    broadcast = manual(lambda x: lax.pbroadcast(x, "x", 2), over, P("x"), P("x"))
    program = compiled(broadcast, x, num_devices=4, platform="cuda").program
    got = Interpreter(program).run(np.split(x, 4))[0]
    assert all((g == x[8:12]).all() for g in got)

    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]

    def send_and_receive(x):
        token = lax.psend(x * 2, "x", ring)
        return lax.precv(token, jax.ShapeDtypeStruct(x.shape, x.dtype), "x", ring)

    program = compiled(
        manual(send_and_receive, over, P("x"), P("x")), x, num_devices=4, platform="cuda"
    ).program
    starts = [i for i in program.body.instructions if isinstance(i, Start)]
    assert [program.collectives[s.collective].kind for s in starts] == ["send", "recv"]
    kinds = [type(i).__name__ for i in program.body.instructions]
    assert kinds.index("Wait") > max(i for i, k in enumerate(kinds) if k == "Start")
    got = Interpreter(program).run(np.split(x, 4))[0]
    np.testing.assert_array_equal(np.concatenate(got), np.roll(x * 2, 4))


def test_ragged_all_to_all():
    over = mesh(2)

    def f(data, out, io, ss, oo, rs):
        return lax.ragged_all_to_all(data, out, io, ss, oo, rs, axis_name="x")

    # Device 0 sends [1] to 0 and [2, 2] to 1; device 1 sends [3] to 0 and [4] to 1.
    data = np.array([1, 2, 2, 3, 4, 0], np.float32)
    out = np.zeros(8, np.float32)
    io, ss = np.array([0, 1, 0, 1], np.int32), np.array([1, 2, 1, 1], np.int32)
    oo, rs = np.array([0, 0, 1, 2], np.int32), np.array([1, 1, 2, 1], np.int32)
    arguments = (data, out, io, ss, oo, rs)
    program = compiled(manual(f, over, (P("x"),) * 6, P("x")), *arguments, num_devices=2).program
    got = Interpreter(program).run(*[np.split(a, 2) for a in arguments])[0]
    np.testing.assert_array_equal(got[0], [1, 3, 0, 0])
    np.testing.assert_array_equal(got[1], [2, 2, 4, 0])


def test_loops_in_loops_are_lowered_in_time_that_does_not_double_with_each(monkeypatch):
    """What a loop's body owns is found by trying; a loop inside of it remembers what it found."""
    depth = 12
    lines = [
        "HloModule m, num_partitions=2",
        "more {\n c = f32[4] parameter(0)\n ROOT r = pred[] constant(false)\n}",
        "body0 {\n a = f32[4] parameter(0)",
        " ROOT r = f32[4] collective-permute(a), channel_id=1, source_target_pairs={{0,1}}\n}",
    ]
    for i in range(1, depth):
        lines += [f"body{i} {{\n a = f32[4] parameter(0)"]
        lines += [f" ROOT r = f32[4] while(a), condition=more, body=body{i - 1}\n}}"]
    lines += ["ENTRY e {\n p = f32[4] parameter(0)"]
    lines += [f" ROOT q = f32[4] while(p), condition=more, body=body{depth - 1}\n}}"]
    blocks = []

    def emit(self):
        blocks.append(self.plan)
        return emitted(self)

    emitted = lower._Emitter.emit
    monkeypatch.setattr(lower._Emitter, "emit", emit)
    compile_hlo("\n".join(lines), 1, 2)
    assert len(blocks) < 2 * depth * depth


def test_a_loop_whose_collectives_go_is_one_segment(rng):
    """On a mesh of one place, also where compiled code may call no collectives: halos come from nobody."""
    over = mesh(1)

    def f(x):
        def step(c):
            up, down = (lax.ppermute(c[1][k], "x", []) for k in (0, -1))
            return c[0] + 1, c[1] * 0.5 + up - down, lax.psum(c[1].sum(), "x")

        return lax.while_loop(lambda c: (c[0] < 50) & (c[2] > 1), step, (0, x, jnp.float32(9)))

    x = np.abs(rng.normal(size=(8, 4))).astype(np.float32)
    function = manual(f, over, P("x"), (P(), P("x"), P()))
    (run,) = compiled(function, x, num_devices=1).program.body.instructions
    assert isinstance(run, Run)
    judge(function, over, P("x"), x)
