"""Loops that compiled code runs whole, with their collectives, and that call back into Python.

Expected values are NumPy's, written by hand; how often, and with what, a function is called is counted. Most
of these run on several processes too (`native_ranks`), where a process sees the calls of its own devices.
"""

from __future__ import annotations

import re
import threading
from collections import Counter

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.on_rows import everywhere, is_native, on_rows

import stretto

pytestmark = pytest.mark.usefixtures("on_stretto")

N = 4
RING = [(i, (i + 1) % N) for i in range(N)]
STEPS = 5
ROWS = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
KIND = jax.ShapeDtypeStruct((3,), np.float32)


@pytest.fixture
def mesh(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), ("x",))


def own(mesh: Mesh) -> list[int]:
    """Positions of this process's devices."""
    return [i for i, d in enumerate(mesh.devices) if d.process_index == jax.process_index()]


def test_a_function_is_called_in_each_iteration(mesh: Mesh) -> None:
    calls: Counter[int] = Counter()

    def function(i: np.ndarray, a: np.ndarray) -> np.ndarray:
        calls[int(i)] += 1
        return np.asarray(a) + np.float32(i)

    def f(x: jax.Array) -> jax.Array:
        def step(_: jax.Array, x: jax.Array) -> jax.Array:
            x = jax.pure_callback(function, KIND, lax.axis_index("x"), x)
            return x + lax.psum(x, "x")

        return lax.fori_loop(0, STEPS, step, x)

    got, compiled = on_rows(mesh, f, ROWS)
    want = ROWS
    for _ in range(STEPS):
        want = want + np.arange(N, dtype=np.float32)[:, None]
        want = want + want.sum(0)
    np.testing.assert_array_equal(got, want)
    assert is_native(compiled)
    assert calls == dict.fromkeys(own(mesh), STEPS)


def test_functions_of_several_devices_may_wait_for_each_other(mesh: Mesh) -> None:
    """None could come to the barrier from within another's stack, or behind it in its thread."""
    meeting = threading.Barrier(len(own(mesh)))

    def function(a: np.ndarray) -> np.ndarray:
        meeting.wait(60)
        return np.asarray(a) * 2

    def f(x: jax.Array) -> jax.Array:
        def step(_: jax.Array, x: jax.Array) -> jax.Array:
            there = lax.ppermute(x, "x", RING)
            return lax.pmax(jax.pure_callback(function, KIND, there), "x") - x

        return lax.fori_loop(0, STEPS, step, x)

    got, compiled = on_rows(mesh, f, ROWS)
    want = ROWS
    for _ in range(STEPS):
        want = (want * 2).max(0) - want
    np.testing.assert_array_equal(got, want)
    assert is_native(compiled)


def test_what_a_branch_calls_on_some_devices(mesh: Mesh) -> None:
    """As a program prints how far it is: now and then, and one device does."""
    seen: list[tuple[int, float]] = []

    def note(i: np.ndarray, total: np.ndarray) -> None:
        seen.append((int(i), float(total)))

    def f(x: jax.Array) -> jax.Array:
        def step(i: jax.Array, x: jax.Array) -> jax.Array:
            total = lax.psum(x.sum(), "x")
            speaks = (i % 2 == 0) & (lax.axis_index("x") == 0)
            lax.cond(speaks, lambda: jax.debug.callback(note, i, total), lambda: None)
            return x + 1

        return lax.fori_loop(0, STEPS, step, x)

    got, compiled = on_rows(mesh, f, ROWS)
    jax.effects_barrier()
    np.testing.assert_array_equal(got, ROWS + STEPS)
    assert is_native(compiled)
    expected = [(i, ROWS.sum() + i * ROWS.size) for i in range(0, STEPS, 2)]
    assert seen == (expected if 0 in own(mesh) else [])


def test_a_loop_that_nobody_counts(mesh: Mesh) -> None:
    """Its condition needs what a function gives."""

    def half(a: np.ndarray) -> np.ndarray:
        return np.asarray(a) / 2

    def f(x: jax.Array) -> jax.Array:
        def goes_on(x: jax.Array) -> jax.Array:
            return lax.pmax(x.max(), "x") > 1

        def step(x: jax.Array) -> jax.Array:
            return jax.pure_callback(half, KIND, x)

        return lax.while_loop(goes_on, step, x)

    got, compiled = on_rows(mesh, f, ROWS)
    np.testing.assert_array_equal(got, ROWS / 16)  # the largest is 11
    assert is_native(compiled)


def test_a_function_that_runs_programs_with_collectives(mesh: Mesh) -> None:
    """Each device's function runs the same program on all devices, within a run of one that is like it."""
    spec = PartitionSpec("x")
    ones = np.ones((N, 2), np.float32)
    placed = jax.make_array_from_callback(
        ones.shape, NamedSharding(mesh, spec), lambda index: ones[index]
    )

    def sums(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 2, lambda _, x: lax.psum(x, "x"), x)

    inner = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    inner(placed)

    def function(a: np.ndarray) -> np.ndarray:
        (total, *_) = (np.asarray(s.data)[0, 0] for s in inner(placed).addressable_shards)
        return np.asarray(a) + total

    def f(x: jax.Array) -> jax.Array:
        def step(_: jax.Array, x: jax.Array) -> jax.Array:
            return lax.psum(jax.pure_callback(function, KIND, x), "x") / N

        return lax.fori_loop(0, 2, step, x)

    got, compiled = on_rows(mesh, f, ROWS)
    want = np.broadcast_to(ROWS.mean(0) + 2 * N**2, ROWS.shape)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert is_native(compiled)


def test_calls_in_an_order_stay_with_the_walk(mesh: Mesh) -> None:
    """Compiled code keeps no order among segments that hand each other nothing."""
    seen: list[int] = []

    def f(x: jax.Array) -> jax.Array:
        def step(i: jax.Array, x: jax.Array) -> jax.Array:
            io_callback(lambda i: seen.append(int(i)), None, i * 2, ordered=True)
            x = x + x.mean()
            io_callback(lambda i: seen.append(int(i)), None, i * 2 + 1, ordered=True)
            return x

        return lax.fori_loop(0, STEPS, step, x)

    one = Mesh(mesh.devices[:1], ("x",))
    x = jax.device_put(ROWS, one.devices[0])
    jax.block_until_ready(jax.jit(f)(x))
    jax.effects_barrier()
    assert seen == list(range(2 * STEPS))

    def g(x: jax.Array) -> jax.Array:
        def step(i: jax.Array, x: jax.Array) -> jax.Array:
            io_callback(lambda i: seen.append(int(i)), None, i, ordered=True)
            return x - x.mean()

        return lax.fori_loop(0, STEPS, step, x)

    seen.clear()
    sharded = jax.device_put(ROWS, NamedSharding(mesh, PartitionSpec("x")))
    compiled = jax.jit(g).lower(sharded).compile()
    jax.block_until_ready(compiled(sharded))
    jax.effects_barrier()
    assert seen == list(range(STEPS))
    explained = stretto.explain(compiled)
    assert 'loop "' in str(explained.program)
    assert "in an order" in str(explained)


def test_calls_outside_of_loops_leave_the_loop_to_compiled_code(mesh: Mesh) -> None:
    def f(x: jax.Array) -> jax.Array:
        x = lax.fori_loop(0, STEPS, lambda _, x: lax.psum(x, "x") / N + 1, x)
        return jax.pure_callback(lambda a: np.asarray(a) * 3, KIND, x)

    got, compiled = on_rows(mesh, f, ROWS)
    want = np.broadcast_to((ROWS.mean(0) + STEPS) * 3, ROWS.shape)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert is_native(compiled)


def test_a_function_that_raises_while_others_wait_for_its_device(mesh: Mesh) -> None:
    """Nobody would come to the collective. The error names the line, and later runs work."""
    raises = threading.Event()
    raises.set()

    def function(i: np.ndarray, a: np.ndarray) -> np.ndarray:
        if raises.is_set() and i == 2 and a[0] > 100:
            raise ValueError("more than a hundred")
        return np.asarray(a)

    def f(x: jax.Array) -> jax.Array:
        def step(_: jax.Array, x: jax.Array) -> jax.Array:
            return lax.psum(jax.pure_callback(function, KIND, lax.axis_index("x"), x), "x")

        return lax.fori_loop(0, STEPS, step, x)

    def run() -> np.ndarray:
        return everywhere(compiled(placed))

    spec = PartitionSpec("x")
    whole = jax.jit(
        jax.shard_map(
            lambda x: f(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    )
    placed = jax.device_put(ROWS, NamedSharding(mesh, spec))
    compiled = whole.lower(placed).compile()
    assert is_native(compiled)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="more than a hundred") as told:
            run()
        assert re.search(r'test_native_callbacks\.py", line \d+, in function', str(told.value))
    raises.clear()
    np.testing.assert_array_equal(
        run(), np.broadcast_to(ROWS.sum(0) * N ** (STEPS - 1), ROWS.shape)
    )


def test_functions_that_wait_for_one_that_raises(mesh: Mesh) -> None:
    """The engine's run does not end before they do; the error is there before."""
    told, raises = threading.Event(), threading.Event()
    raises.set()

    def function(i: np.ndarray, a: np.ndarray) -> np.ndarray:
        if i == 1 and raises.is_set():
            raise ValueError("does not come")
        assert told.wait(60)
        return np.asarray(a)

    def f(x: jax.Array) -> jax.Array:
        def step(_: jax.Array, x: jax.Array) -> jax.Array:
            x = lax.psum(x, "x")
            return jax.pure_callback(function, KIND, lax.axis_index("x"), x)

        return lax.fori_loop(0, STEPS, step, x)

    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match="does not come"):
            on_rows(mesh, f, ROWS)
    finally:
        told.set()
    raises.clear()
    got, compiled = on_rows(mesh, f, ROWS)
    np.testing.assert_array_equal(got, np.broadcast_to(ROWS.sum(0) * N ** (STEPS - 1), ROWS.shape))
    assert is_native(compiled)
