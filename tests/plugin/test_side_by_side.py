"""A program on several devices: what runs on all at once, what stays joined, who may wait for whom."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stretto.collectives.types import TensorType
from stretto.plugin import _capi
from stretto.runtime.engines import xla_cpu
from stretto.runtime.engines.xla_cpu import XlaCpuEngine, XlaCpuTogether, XlaJoined
from stretto.runtime.execution.value import Promise

pytestmark = pytest.mark.usefixtures("on_stretto")


def in_use(devices: list[jax.Device]) -> list[int]:
    return [device.memory_stats()["bytes_in_use"] for device in devices]


def give_up(devices: list[jax.Device], before: list[int]) -> bool:
    """Whether each device has an array of 4000 bytes less in use, before long: the thread that has run a
    program may hold what it was given and gave for a moment longer than whoever waits for its results."""
    end = time.monotonic() + 30
    while True:
        gc.collect()
        if all(b - now >= 4000 for b, now in zip(before, in_use(devices), strict=True)):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.01)


def program(
    devices: list[jax.Device], function: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[jax.stages.Compiled, jax.Array]:
    mesh = Mesh(np.array(devices), ("x",))
    spec = PartitionSpec("x")

    def f(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(function, shape, lax.axis_index("x"), x) * 2

    whole = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.device_put(np.arange(8, dtype=np.float32), NamedSharding(mesh, spec))
    return whole.lower(x).compile(), x


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each compilation of the engine."""
    found: list[object] = []
    compile_on = XlaCpuEngine.compile_on

    def counted(self: XlaCpuEngine, *arguments: Any) -> Any:
        found.append(arguments)
        return compile_on(self, *arguments)

    monkeypatch.setattr(XlaCpuEngine, "compile_on", counted)
    return found


def test_what_compiles_compiles_before_the_first_run(
    devices: list[jax.Device], compilations: list[object]
) -> None:
    compiled, x = program(devices, lambda i, a: np.asarray(a) + np.float32(i))
    before = len(compilations)
    np.testing.assert_array_equal(
        np.asarray(compiled(x)), (np.arange(8) + np.repeat(np.arange(4), 2)) * 2
    )
    assert 0 < before == len(compilations)


@pytest.mark.parametrize("sums", [False, True])
def test_sorting_too(devices: list[jax.Device], compilations: list[object], sums: bool) -> None:
    """XLA cannot copy a sort's code to another device. Alone in a program, and behind a collective."""
    mesh, spec = Mesh(np.array(devices), ("x",)), PartitionSpec("x")

    def f(a: jax.Array) -> jax.Array:
        return jnp.sort(a + lax.psum(a, "x") if sums else a, axis=1)

    rows = np.random.default_rng(0).integers(0, 99, (4, 9)).astype(np.float32)
    whole = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    x = jax.device_put(rows, NamedSharding(mesh, spec))
    compiled = whole.lower(x).compile()
    before = len(compilations)
    for _ in range(2):
        expected = np.sort(rows + rows.sum(0) if sums else rows, axis=1)
        np.testing.assert_array_equal(np.asarray(compiled(x)), expected)
    assert 0 < before == len(compilations)


def test_large_loops_too(
    devices: list[jax.Device], compilations: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copying their code takes long. What is kept of it is one code for all devices."""
    monkeypatch.setattr(xla_cpu, "_LARGE_LOOPS", 1)
    loaded: list[object] = []
    for method in ("load_for", "load_together"):
        load = getattr(XlaCpuEngine, method)
        monkeypatch.setattr(
            XlaCpuEngine, method, lambda *a, load=load: (loaded.append(a), load(*a))[1]
        )
    mesh, spec = Mesh(np.array(devices), ("x",)), PartitionSpec("x")

    def f(a: jax.Array, count: jax.Array) -> jax.Array:
        def step(_: Any, b: jax.Array) -> jax.Array:
            for k in range(3):
                b = (jnp.sin(b) + jnp.roll(b, k, axis=1)) * 0.5
            return b

        return lax.fori_loop(0, count, step, a)

    rows = np.random.default_rng(0).standard_normal((4, 9)).astype(np.float32)
    x = jax.device_put(rows, NamedSharding(mesh, spec))
    whole = jax.jit(f, in_shardings=(NamedSharding(mesh, spec), None)).lower(x, 2)
    compiled = whole.compile()
    for _ in range(2):
        found = np.asarray(compiled(x, 2))
    expected = rows
    for k in (*range(3), *range(3)):
        expected = (np.sin(expected) + np.roll(expected, k, axis=1)) * np.float32(0.5)
    np.testing.assert_allclose(found, expected, 1e-4)
    assert len(compilations) == 1 and not loaded
    code = serialize_executable.serialize(compiled)
    again = serialize_executable.deserialize_and_load(
        *code, backend="stretto", execution_devices=devices
    )
    np.testing.assert_array_equal(np.asarray(again(x, 2)), found)
    assert (len(compilations), len(loaded)) == (1, 1)


def test_many_results_stay_together(
    devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No array of one device is made before somebody wants it, and each can be given up by itself."""
    split: list[object] = []
    of_one = XlaJoined._split
    monkeypatch.setattr(XlaJoined, "_split", lambda a: (split.append(a), of_one(a))[1])
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    x = jax.device_put(np.arange(8, dtype=np.float32), sharding)
    many = jax.jit(lambda a: [a + k for k in range(40)])
    doubled = jax.jit(lambda many: [2 * a for a in many], donate_argnums=0)
    for _ in range(2):
        before = jax.block_until_ready(many(x))
        after = jax.block_until_ready(doubled(before))
        assert not split and all(a.is_deleted() for a in before)
        after[39].delete()
        np.testing.assert_array_equal(np.asarray(after[3]), 2 * np.arange(3, 11))
        assert split
        split.clear()


def test_arguments_are_joined_once(
    devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that many runs are given are one array after the first, until they are deleted."""
    joined: list[object] = []
    join = XlaCpuTogether._whole
    monkeypatch.setattr(
        XlaCpuTogether, "_whole", lambda *given: (joined.append(given[1]), join(*given))[1]
    )
    mesh, spec = Mesh(np.array(devices), ("x",)), PartitionSpec("x")
    sharding = NamedSharding(mesh, spec)

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return a + lax.psum(b, "x")

    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)
    keeping, donating = jax.jit(mapped), jax.jit(mapped, donate_argnums=0)
    x, y = (jax.device_put(np.arange(4.0) + k, sharding) for k in range(2))
    jax.block_until_ready((keeping(y, y), donating(y + 0, y)))  # all that is its own is there
    joined.clear()
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(keeping(x, y)), np.arange(4) + 10.0)
    assert len(joined) == 1  # of x: those of y were joined before
    shard = x.addressable_shards[1].data
    np.testing.assert_array_equal(np.asarray(shard + 1), [2.0])
    np.testing.assert_array_equal(np.asarray(donating(x, y)), np.arange(4) + 10.0)
    assert x.is_deleted() and len(joined) == 1
    with pytest.raises((ValueError, RuntimeError), match="deleted"):  # the latter from 0.12 on
        keeping(x, y)
    np.testing.assert_array_equal(np.asarray(keeping(y, y)), np.arange(4) + 11.0)
    more = jax.device_put(np.ones((4, 1000), np.float32), sharding)
    result = jax.block_until_ready(keeping(more, y))
    before = in_use(devices)
    more.delete()  # as a whole and in parts
    assert give_up(devices, before)
    assert not result.is_deleted()


def test_nobody_waits_for_what_a_later_run_is_given() -> None:
    """Of a step that trains most is: waiting for arrays that are gone raises, once for each."""

    class Array:
        def __init__(self, deleted: bool) -> None:
            self.deleted = deleted

        def is_deleted(self) -> bool:
            return self.deleted

    asked: list[object] = []
    engine = SimpleNamespace(block=asked.append, is_ready=lambda array: False)
    arrays = [Array(True), Array(False), Array(True), Array(False)]
    promises = [Promise.of(TensorType("f32", ()), [array]) for array in arrays]
    references = tuple(weakref.ref(promise) for promise in promises)
    _capi.Outputs(references, None, False, engine, 0).block()
    assert asked == [arrays[1], arrays[3]]
    asked.clear()
    _capi.Outputs(references, None, True, engine, 0).block()  # one tells of all
    assert asked == [arrays[1]]


@pytest.mark.parametrize("given", [False, True])
def test_a_part_that_is_kept_keeps_no_others(devices: list[jax.Device], given: bool) -> None:
    """Once it was read. ``given``: of an argument, otherwise of a result."""
    mesh, spec = Mesh(np.array(devices), ("x",)), PartitionSpec("x")
    sharding = NamedSharding(mesh, spec)
    summed = jax.jit(
        jax.shard_map(lambda a: a + lax.psum(a, "x"), mesh=mesh, in_specs=spec, out_specs=spec)
    )
    x = jax.device_put(np.ones((4, 1000), np.float32), sharding)
    for _ in range(2):
        y = jax.block_until_ready(summed(x))
    part = (x if given else y).addressable_shards[0].data
    np.testing.assert_array_equal(np.asarray(part), np.full((1, 1000), 1.0 if given else 5.0))
    again = summed(x)
    np.testing.assert_array_equal(np.asarray(again), np.full((4, 1000), 5.0))
    gc.collect()
    before = in_use(devices[1:2])
    if given:
        del x
    else:
        del y
    assert give_up(devices[1:2], before)
    assert not part.is_deleted() and not again.is_deleted()


def test_they_meet(devices: list[jax.Device]) -> None:
    barrier = threading.Barrier(len(devices))

    def function(i: np.ndarray, a: np.ndarray) -> np.ndarray:
        barrier.wait(60)
        return np.asarray(a)

    compiled, x = program(devices, function)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(compiled(x)), np.arange(8) * 2)


def test_one_raises_while_the_others_wait_for_it(devices: list[jax.Device]) -> None:
    barrier = threading.Barrier(len(devices))

    def function(i: np.ndarray, a: np.ndarray) -> np.ndarray:
        if i == 1:
            raise ValueError("device 1 is odd")
        barrier.wait()
        return np.asarray(a)

    compiled, x = program(devices, function)
    try:
        with pytest.raises(Exception, match="ValueError: device 1 is odd"):
            compiled(x).block_until_ready()
    finally:
        barrier.abort()
    compiled, x = program(devices, lambda i, a: np.asarray(a))
    np.testing.assert_array_equal(np.asarray(compiled(x)), np.arange(8) * 2)
    jax.effects_barrier()
