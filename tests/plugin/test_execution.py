"""Running programs on one device and on several: results, donation, callbacks, what JAX asks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, shard_map
from jax.experimental import io_callback, serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stretto.runtime.execution import execution
from stretto.runtime.execution.dispatch import Dispatcher
from stretto.runtime.execution.loaded import LoadedProgram

pytestmark = pytest.mark.usefixtures("on_stretto")


def _mesh(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), ("x",))


def test_devices(devices: list[jax.Device]) -> None:
    assert [d.id for d in devices] == [0, 1, 2, 3]
    assert {d.platform for d in devices} == {"stretto"}
    assert {d.device_kind for d in devices} == {"stretto"}
    assert {d.process_index for d in devices} == {0}
    assert (str(devices[2]), repr(devices[2])) == ("stretto:2", "StrettoDevice(id=2)")
    version = devices[0].client.platform_version.lower()
    assert not any(word in version for word in ("cuda", "rocm", "oneapi"))


def test_runs_where_its_arguments_are(devices: list[jax.Device]) -> None:
    increment = jax.jit(lambda a: a + 1)
    for device in devices:
        result = increment(jax.device_put(np.arange(3.0), device))
        assert result.devices() == {device}
        np.testing.assert_array_equal(np.asarray(result), [1, 2, 3])


def test_no_arguments_no_results_many_results() -> None:
    assert int(jax.jit(lambda: jnp.int32(7))()) == 7
    assert jax.jit(lambda a: ())(1.0) == ()
    results = jax.jit(lambda a: [a + i for i in range(40)])(jnp.arange(3))
    for i, result in enumerate(results):
        np.testing.assert_array_equal(np.asarray(result), np.arange(3) + i)


def test_partitioned_program(devices: list[jax.Device], cpu: jax.Device) -> None:
    mesh = Mesh(np.array(devices).reshape(2, 2), ("a", "b"))
    rng = np.random.default_rng(1)
    left, right = rng.random((8, 6), np.float32), rng.random((6, 4), np.float32)

    def f(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.tanh(a @ b).sum(0)

    placed = (
        jax.device_put(left, NamedSharding(mesh, PartitionSpec("a", "b"))),
        jax.device_put(right, NamedSharding(mesh, PartitionSpec("b", None))),
    )
    result = jax.jit(f)(*placed)
    with jax.default_device(cpu):
        expected = np.asarray(jax.jit(f)(left, right))
    np.testing.assert_allclose(np.asarray(result), expected, rtol=1e-5)


def test_collective_over_some_of_the_devices(devices: list[jax.Device]) -> None:
    mesh = _mesh([devices[3], devices[1]])  # in this order
    f = shard_map(
        lambda a: lax.all_gather(a * (lax.axis_index("x") + 1), "x"),
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec(None, "x"),
    )
    placed = jax.device_put(np.array([1.0, 10.0]), NamedSharding(mesh, PartitionSpec("x")))
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(placed)), [[1, 1], [20, 20]])


class TestDonation:
    def test_a_donated_argument_is_deleted(self) -> None:
        argument = jnp.arange(1000.0)
        result = jax.jit(lambda a: a + 1, donate_argnums=0)(argument)
        assert argument.is_deleted()
        np.testing.assert_array_equal(np.asarray(result), np.arange(1000.0) + 1)
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(argument)

    def test_memory_is_reused(self) -> None:
        step = jax.jit(lambda a: a.at[0].add(1), donate_argnums=0)
        state = step(jnp.zeros(1 << 16))
        address = state.unsafe_buffer_pointer()
        for _ in range(3):
            state = step(state)
        assert state.unsafe_buffer_pointer() == address
        assert float(state[0]) == 4

    @pytest.mark.parametrize("size", [16, 1 << 18])
    @pytest.mark.parametrize(
        "f",
        [
            lambda a: a * 2 + 1,
            lambda a: a - 0.5 * lax.psum(jnp.sin(a), "x"),
            lambda a: lax.fori_loop(0, 3, lambda _, b: b + lax.psum(b, "x") * 0.25, a),
            lambda a: lax.fori_loop(0, 3, lambda _, b: b + lax.psum(b[:2], "x")[0], a),
        ],
        ids=["elementwise", "update", "loop", "loop of small sums"],
    )
    def test_memory_of_every_device_is_reused(
        self, devices: list[jax.Device], f: Callable[[jax.Array], jax.Array], size: int
    ) -> None:
        mesh, spec = Mesh(np.array(devices), ("x",)), PartitionSpec("x")
        mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        step = jax.jit(mapped, donate_argnums=0)
        given = np.ones(size * len(devices) + 1, np.float32)[1:]  # nobody can use it in place
        state = jax.device_put(given, NamedSharding(mesh, spec))
        addresses = [s.data.unsafe_buffer_pointer() for s in state.addressable_shards]
        for _ in range(2):
            state = step(state)
            assert [s.data.unsafe_buffer_pointer() for s in state.addressable_shards] == addresses

    def test_memory_of_numpy_is_not_written_to(self) -> None:
        host = np.zeros(1 << 16, np.float32)
        result = jax.jit(lambda a: a + 1, donate_argnums=0)(jax.device_put(host, may_alias=True))
        assert float(result[0]) == 1
        assert not host.any()

    def test_an_argument_that_fits_no_result_stays(self, devices: list[jax.Device]) -> None:
        """It is the partitioned program that tells: JAX leaves the choice to XLA."""
        sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
        argument = jax.device_put(np.ones((8, 2), np.float32), sharding)
        jax.jit(lambda a: a @ a.T, donate_argnums=0)(argument)
        assert not argument.is_deleted()
        jax.jit(lambda a: a + a.sum(), donate_argnums=0)(argument)
        assert argument.is_deleted()

    def test_what_is_donated_is_no_other_argument(self, devices: list[jax.Device]) -> None:
        sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
        argument = jax.device_put(np.ones((8, 1 << 14), np.float32), sharding)
        f = jax.jit(lambda a, b: (a.at[0].set(5), b + a.sum()), donate_argnums=0)
        with pytest.raises(RuntimeError, match="is donated and given as argument 1 too"):
            f(argument, argument)
        assert not argument.is_deleted()
        assert float(f(argument, jnp.copy(argument))[0].sum()) == 12 * (1 << 14)

    def test_a_view_of_a_donated_argument_keeps_its_content(self) -> None:
        argument = jnp.arange(50_000.0) + 0
        view = np.asarray(argument)
        result = jax.jit(lambda a: a * 2, donate_argnums=0)(argument)
        np.testing.assert_array_equal(np.asarray(result), np.arange(50_000.0) * 2)
        np.testing.assert_array_equal(view, np.arange(50_000.0))

    def test_in_a_program_over_devices(self, devices: list[jax.Device]) -> None:
        sharding = NamedSharding(_mesh(devices), PartitionSpec("x"))
        argument = jax.device_put(np.arange(8.0, dtype=np.float32), sharding)

        @partial(jax.jit, donate_argnums=0)
        def f(a: jax.Array) -> jax.Array:
            return a + a.sum()

        result = f(argument)
        assert argument.is_deleted()
        np.testing.assert_array_equal(np.asarray(result), np.arange(8.0) + 28)


class TestCallbacks:
    def test_one_that_is_over_is_waited_for_by_no_thread(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As is a program that calls back only where something is wrong, the engine runs it at once."""
        f = jax.jit(lambda a: lax.cond(a > 0, lambda: a, lambda: jax.pure_callback(np.sin, a, a)))
        argument = jax.block_until_ready(jnp.float32(2))
        jax.block_until_ready(f(argument))
        waited: list[object] = []
        monkeypatch.setattr(execution, "completions", SimpleNamespace(submit=waited.append))
        here = Dispatcher.walk_here
        with patch.object(Dispatcher, "walk_here", autospec=True, side_effect=here) as walked:
            assert f(argument) == 2
        assert not (waited or walked.called)

    def test_a_program_that_a_function_runs_is_part_of_its_run(self) -> None:
        """Both on one device and called back, so that neither is walked."""
        inner = jax.jit(lambda a: jax.pure_callback(lambda v: v + np.float32(1), a, a) * 2)

        def run(value: np.ndarray) -> np.ndarray:
            return np.asarray(inner(value))

        outer = jax.jit(lambda a: jax.pure_callback(run, a, a) + 1)
        assert [float(outer(jnp.float32(k))) for k in range(3)] == [3, 5, 7]

    def test_a_function_may_wait_for_a_program_of_another_thread(
        self, devices: list[jax.Device]
    ) -> None:
        mesh = Mesh(np.array(devices), ("x",))
        spec = PartitionSpec("x")
        total = jax.jit(
            jax.shard_map(
                partial(lax.psum, axis_name="x"), mesh=mesh, in_specs=spec, out_specs=spec
            )
        )
        rows = jax.device_put(np.ones((len(devices), 2), np.float32), NamedSharding(mesh, spec))
        with ThreadPoolExecutor(1) as other:

            def run(value: np.ndarray) -> np.ndarray:
                return value + other.submit(lambda: np.asarray(total(rows))[0]).result(timeout=60)

            outer = jax.jit(lambda a: jax.pure_callback(run, a, a) * 2)
            for k in range(3):  # the first time it is compiled
                assert outer(jnp.full(2, k, np.float32)).tolist() == [2 * (k + len(devices))] * 2

    @pytest.mark.parametrize("walked", [False, True])
    def test_a_function_of_several_devices_may_wait_for_programs_on_one_that_call_back(
        self, devices: list[jax.Device], walked: bool
    ) -> None:
        """As Pallas's interpreter of several cores does: two threads for each device, which meet."""
        spec = PartitionSpec("x")
        together = [threading.Barrier(2) for _ in devices]
        seen: list[tuple[int, int]] = []

        def meet(device: np.ndarray, thread: np.ndarray) -> np.ndarray:
            together[int(device)].wait(timeout=30)
            seen.append((int(device), int(thread)))
            return device + thread

        # Compiled ahead: the first call of a jitted function keeps those of other threads waiting.
        zero = np.int32(0)
        inner = jax.jit(lambda a, b: io_callback(meet, a, a, b)).lower(zero, zero).compile()

        def run(place: np.ndarray) -> np.ndarray:
            device = np.int32(place)
            threads = ThreadPoolExecutor(2)
            try:
                runs = [
                    threads.submit(lambda k=k: int(inner(device, np.int32(k)))) for k in range(2)
                ]
                return np.int32(sum(run.result(timeout=30) for run in runs))
            finally:
                threads.shutdown(wait=False)

        def outer() -> jax.Array:
            return io_callback(run, jax.ShapeDtypeStruct((), np.int32), lax.axis_index("x"))[None]

        mesh = Mesh(np.array(devices), ("x",))
        program = jax.jit(jax.shard_map(outer, mesh=mesh, in_specs=(), out_specs=spec))
        # Programs that are observed are walked.
        not_short = patch.object(LoadedProgram, "_run_calling", return_value=None)
        with not_short if walked else nullcontext():
            result = np.asarray(program())
        assert result.tolist() == [2 * k + 1 for k in range(len(devices))]
        assert sorted(seen) == [(d, k) for d in range(len(devices)) for k in range(2)]

    def test_pure_callback(self) -> None:
        result = jax.jit(lambda a: jax.pure_callback(np.sin, a, a))(jnp.arange(4.0))
        np.testing.assert_allclose(np.asarray(result), np.sin(np.arange(4.0, dtype=np.float32)))

    def test_each_program_has_its_own(self) -> None:
        lowered = [
            jax.jit(lambda a, k=k: jax.pure_callback(lambda v: v + k, a, a)).lower(jnp.float32(0))
            for k in range(3)
        ]
        compiled = [program.compile() for program in reversed(lowered)]
        assert [float(program(jnp.float32(0))) for program in compiled] == [2, 1, 0]

    def test_ordered_and_unordered_effects(self) -> None:
        seen: list[int] = []

        @jax.jit
        def f(a: jax.Array) -> None:
            for i in range(5):
                io_callback(lambda v, i=i: seen.append(int(v) + i), None, a, ordered=True)

        f(10)
        jax.effects_barrier()
        assert seen == [10, 11, 12, 13, 14]
        jax.jit(lambda a: jax.debug.callback(seen.append, a))(1)
        jax.effects_barrier()
        assert len(seen) == 6

    def test_debug_print(self, capfd: pytest.CaptureFixture[str]) -> None:
        jax.jit(lambda a: jax.debug.print("a is {}", a))(jnp.int32(3))
        jax.effects_barrier()
        assert "a is 3" in capfd.readouterr().out

    def test_on_another_device_than_the_first(self, devices: list[jax.Device]) -> None:
        argument = jax.device_put(np.float32(2), devices[2])
        result = jax.jit(lambda a: jax.pure_callback(np.square, a, a))(argument)
        assert float(result) == 4


class TestLoweredAsCpu:
    def test_platform_dependent(self) -> None:
        f = jax.jit(
            lambda a: lax.platform_dependent(a, cpu=lambda v: v + 1, default=lambda v: v - 1)
        )
        assert float(f(1.0)) == 2

    def test_linear_algebra(self) -> None:
        matrix = np.random.default_rng(2).random((5, 5), np.float32) + np.eye(5, dtype=np.float32)
        np.testing.assert_allclose(
            np.asarray(jnp.linalg.inv(matrix)), np.linalg.inv(matrix), rtol=2e-3
        )
        values, vectors = jnp.linalg.eigh(matrix + matrix.T)
        np.testing.assert_allclose(
            np.asarray(vectors * values @ vectors.T), matrix + matrix.T, atol=1e-4
        )
        assert jnp.linalg.eigvals(matrix).dtype == np.complex64  # the rule exists for cpu alone

    def test_source_lines_are_the_programs(self) -> None:
        text = jax.jit(lambda a: a + 1).lower(1.0).as_text(debug_info=True)
        assert "test_execution.py" in text
        assert "jax_private.py" not in text


class TestWhatJaxAsks:
    def test_compiled(self) -> None:
        compiled = jax.jit(lambda a: a @ a).lower(jnp.ones((4, 4))).compile()
        assert compiled.memory_analysis().argument_size_in_bytes == 64
        assert compiled.memory_analysis().output_size_in_bytes == 64
        assert compiled.cost_analysis()["flops"] >= 112
        assert "HloModule" in compiled.as_text()

    def test_memory_and_cost(self, devices: list[jax.Device], cpu: jax.Device) -> None:
        """Against JAX's CPU backend, for one device; and a carry that is updated in place."""
        argument = np.ones((64, 64), np.float32)

        def f(a: jax.Array) -> jax.Array:
            return jnp.sort(jnp.sin(a @ a)) @ a

        lowered = jax.jit(f).lower(argument)
        compiled = lowered.compile()
        with jax.default_device(cpu):
            expected = jax.jit(f).lower(argument)
        assert lowered.cost_analysis() == expected.cost_analysis()
        assert compiled.cost_analysis()["flops"] == expected.compile().cost_analysis()["flops"]
        memory, reference = compiled.memory_analysis(), expected.compile().memory_analysis()
        assert memory.temp_size_in_bytes == reference.temp_size_in_bytes >= argument.nbytes
        peak = 2 * argument.nbytes + memory.temp_size_in_bytes
        assert memory.peak_memory_in_bytes == peak

        sharding = NamedSharding(_mesh(devices), PartitionSpec("x"))
        placed = jax.device_put(np.zeros((4, 1024), np.float32), sharding)
        f = jax.jit(lambda a: lax.fori_loop(0, 9, lambda i, b: b + b.sum(), a), donate_argnums=0)
        memory = f.lower(placed).compile().memory_analysis()
        assert memory.alias_size_in_bytes == 4096
        assert 4096 <= memory.peak_memory_in_bytes < 2 * 4096  # the carry is updated in place

    def test_fingerprints(self) -> None:
        def fingerprint(k: int) -> bytes:
            executable = jax.jit(lambda a: a + k).lower(1.0).compile().runtime_executable()
            return executable.fingerprint

        assert fingerprint(1) == fingerprint(1) != fingerprint(2)

    def test_serialized_and_loaded(self, devices: list[jax.Device]) -> None:
        sharding = NamedSharding(_mesh(devices), PartitionSpec("x"))
        argument = jax.device_put(np.arange(4.0, dtype=np.float32), sharding)
        compiled = jax.jit(lambda a: a / a.sum()).lower(argument).compile()
        loaded = serialize_executable.deserialize_and_load(
            *serialize_executable.serialize(compiled), backend="stretto", execution_devices=devices
        )
        np.testing.assert_array_equal(np.asarray(loaded(argument)), np.asarray(compiled(argument)))

    def test_calls_from_many_threads(self) -> None:
        f = jax.jit(lambda a: a * 2)
        results: list[float] = []

        def work(k: int) -> None:
            for _ in range(50):
                results.append(float(f(jnp.float32(k))) / 2 - k)

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [0.0] * 200
