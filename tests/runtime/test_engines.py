"""The engines: conformance of each, what is special to them, and jaxlib's private names in use."""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.scripts import conforming

from stretto import engine_check
from stretto.collectives.gpus import chosen
from stretto.collectives.types import TensorType
from stretto.engine_check import DONATED, DOUBLE, F32, check_engine
from stretto.runtime.engines import code_room, engine, null, xla_cpu
from stretto.runtime.engines.engine import create_engine
from stretto.runtime.engines.xla import XlaSegment
from stretto.runtime.errors import CompileError, StrettoError
from stretto.runtime.program import Segment
from stretto.testing import NullEngine, VirtualClock

RAMP = np.arange(16, dtype=np.float32)


@pytest.fixture(scope="module")
def xla() -> xla_cpu.XlaCpuEngine:
    return xla_cpu.create(2)


@pytest.mark.bits
def test_xla_cpu_conforms() -> None:
    assert len(conforming("xla:cpu")) == 14 + 27  # of these one for each type but pred


def test_null_conforms() -> None:
    assert len(check_engine(null.create, computes=False)) == 4


class _Careless(NullEngine):
    """Breaks one promise: a donated input is written to where the host put it."""

    def compile(self, segment: Segment, **more: object) -> null.NullSegment:
        class InPlace(null.NullSegment):
            def run(self, ordinal: int, inputs: list[null.NullArray]) -> list[null.NullArray]:
                host = inputs[0].host
                assert host is not None
                host *= 2
                return [inputs[0]]

        return InPlace(self, segment, "double")


class _Keeping(NullEngine):
    """Frees arrays only when told to."""

    def put(self, *args: Any) -> null.NullArray:
        self.kept = super().put(*args)
        return self.kept


def test_conformance_finds_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_check, "_FREED_WITHIN", 0.1)
    with pytest.raises(AssertionError, match="a donated input is not written there"):
        check_engine(_Careless, computes=False)
    with pytest.raises(AssertionError, match="an array that nobody refers to is freed"):
        check_engine(_Keeping, computes=False)
    with pytest.raises(AssertionError, match="same content"):
        check_engine(null.create)  # it does not compute


def test_engines_are_found_by_name() -> None:
    assert create_engine("null", 3).num_devices == 3
    with pytest.raises(
        LookupError, match=r"no engine 'none'; installed engines: .*null.*, xla:cpu"
    ):
        create_engine("none", 1)


def test_an_engine_whose_plugin_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
        monkeypatch.setitem(sys.modules, name, None)  # as if not installed
    with pytest.raises(
        StrettoError, match=r"needs jax's CUDA plugin: pip install 'stretto\[cuda13\]'"
    ):
        create_engine("xla:cuda", 1)


def test_gpus_of_the_ranks_of_a_host() -> None:
    assert chosen(2, 8, (1, 3)) == [2, 3]
    assert chosen(1, 8, (7, 8)) == [7]
    assert chosen(2, 4, (1, 3)) == [0, 1]  # there are not enough for all


def test_engines_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = EntryPoint("broken", "no_such_package:create", "stretto.engines")
    monkeypatch.setattr(engine, "entry_points", lambda group: [broken])
    with pytest.raises(
        StrettoError,
        match=r"engine 'broken' \(STRETTO_ENGINE\) cannot be loaded from no_such_package:create: "
        "ModuleNotFoundError: No module named 'no_such_package'",
    ):
        create_engine("broken", 1)


def test_the_client_is_not_jax_own(xla: xla_cpu.XlaCpuEngine) -> None:
    array = xla.put(RAMP, F32, 1)
    assert array.devices().isdisjoint(jax.devices("cpu"))


def test_aligned_host_memory_is_not_copied(xla: xla_cpu.XlaCpuEngine) -> None:
    raw = np.zeros(64 + 64, np.uint8)
    host = raw[-raw.ctypes.data % 64 :][:64].view(np.float32)
    array = xla.put(host, F32, 0)
    assert xla.pointer(array) == host.ctypes.data == xla.host_view(array).ctypes.data


def test_a_pointer_is_asked_for_when_the_array_is_there(xla: xla_cpu.XlaCpuEngine) -> None:
    """jaxlib waits for it with the GIL: for ever, where the array comes of a function called back."""
    calls: list[str] = []

    class Pending:
        def block_until_ready(self) -> None:
            calls.append("wait")

        def unsafe_buffer_pointer(self) -> int:
            calls.append("pointer")
            return 64

    assert xla.pointer(Pending()) == 64
    assert calls == ["wait", "pointer"]


def test_donation_reuses_the_memory_of_a_computed_array(xla: xla_cpu.XlaCpuEngine) -> None:
    double, donated = xla.compile(DOUBLE), xla.compile(DONATED)
    (array,) = double.run(0, [xla.put(RAMP, F32, 0)])
    pointer = xla.pointer(array)
    (result,) = donated.run(0, [array])
    assert xla.pointer(result) == pointer
    assert array.is_deleted()


def test_errors_of_computations_arrive_at_their_outputs(xla: xla_cpu.XlaCpuEngine) -> None:
    def refuse(x: np.ndarray) -> np.ndarray:
        raise ValueError("not today")

    shape = jax.ShapeDtypeStruct((16,), np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        lowered = jax.jit(lambda x: jax.pure_callback(refuse, shape, x)).lower(RAMP)
    callbacks = lowered._lowering.compile_args["host_callbacks"]
    module = str(lowered.compiler_ir("stablehlo")).encode()
    loaded = xla.compile(Segment((F32,), (F32,), module), host_callbacks=callbacks)
    for ordinal in (0, 1):
        with pytest.raises(StrettoError, match="not today") as caught:
            (result,) = loaded.run(ordinal, [xla.put(RAMP, F32, ordinal)])
            xla.block(result)
        assert caught.value.code in ("INTERNAL", "UNKNOWN")
        assert not str(caught.value).startswith(caught.value.code)


def test_compile_errors_name_segment_and_engine(xla: xla_cpu.XlaCpuEngine) -> None:
    bad = Segment((F32,), (F32,), b"module { func.func public @main() { nonsense } }")
    with pytest.raises(CompileError, match=r"segment layer\.3 does not compile on engine xla:cpu"):
        xla.compile(bad, name="layer.3")


def test_memory_in_use_counts_live_arrays(xla: xla_cpu.XlaCpuEngine) -> None:
    before = xla.memory_stats(1)["bytes_in_use"]
    array = xla.put(np.zeros(1000, np.float32), TensorType("f32", (1000,)), 1)
    assert xla.memory_stats(1)["bytes_in_use"] - before == 4000
    xla.delete(array)
    assert xla.memory_stats(1)["bytes_in_use"] == before


def test_memory_in_use_does_not_wait(
    xla: xla_cpu.XlaCpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jaxlib waits with the GIL to tell where the memory of a pending array is."""
    (device,) = xla._device_lists[1]
    pending = SimpleNamespace(
        is_deleted=lambda: False,
        devices=lambda: {device},
        is_ready=lambda: False,
        nbytes=4000,
        on_device_size_in_bytes=lambda: 4000,
        unsafe_buffer_pointer=lambda: pytest.fail("waits"),
    )
    monkeypatch.setattr(xla, "_client", SimpleNamespace(live_arrays=lambda: [pending]))
    assert xla.memory_stats(1) == {"bytes_in_use": 4000, "num_allocs": 1}


def test_a_pass_that_goes_by_the_size_of_a_loop(xla) -> None:
    """XLA makes one call of a loop with small carries, except in segments that are to be reproducible.

    If it does so in neither, the pass has another name or is gone: find out with XLA_FLAGS=--xla_dump_to
    what else XLA:CPU does to a loop by its size, and look at ``_BY_SIZE`` in ``xla.py``.
    """

    def loop(x, w):
        return jax.lax.fori_loop(0, 5, lambda i, x: jnp.sin(x) * 1.5 + w, x)

    module = jax.jit(loop).lower(RAMP, RAMP).as_text().encode()

    def calls(reproducible: bool) -> int:
        segment = Segment((F32, F32), (F32,), module, reproducible=reproducible)
        (optimized,) = xla.compile(segment).executable.hlo_modules()
        return optimized.to_string().count(" call(")

    assert (calls(False), calls(True)) == (1, 0)


class _BySize(xla_cpu.XlaCpuEngine):
    """Claims to be reproducible, and is not: small loops give other bits."""

    def compile(self, segment: Segment, **more: Any) -> Any:
        loaded = super().compile(segment, **more)
        if b"@layers" not in segment.module or segment.inputs[2].shape != (1,):
            return loaded

        class Rounded:
            def run(self, ordinal: int, inputs: list[Any]) -> list[Any]:
                (array,) = loaded.run(ordinal, inputs)
                return [array * np.float32(1 + 2**-23)]

        return Rounded()


@pytest.mark.thorough
def test_conformance_finds_loops_that_are_not_reproducible() -> None:
    with pytest.raises(AssertionError, match="same bits in loops of any length and size"):
        check_engine(_BySize)


def test_private_names_of_jaxlib() -> None:
    """If this fails, a jaxlib has changed what ``xla.py`` or ``xla_cpu.py`` uses: read that file with it."""
    from jax._src.lib import xla_client
    from jaxlib import _jax

    assert "num_devices" in inspect.signature(xla_client.make_cpu_client).parameters
    client = xla_client.make_cpu_client(num_devices=1)
    for name in (
        "compile_and_load",
        "deserialize_executable",
        "serialize_executable",
        "live_arrays",
        "local_devices",
    ):
        assert callable(getattr(client, name)), name
    assert "host_callbacks" in client.compile_and_load.__doc__
    for parameter in ("aval", "sharding", "devices", "host_buffer_semantics", "enable_x64"):
        assert parameter in _jax.batched_device_put.__doc__
    for semantics in ("ZERO_COPY", "IMMUTABLE_ONLY_DURING_CALL"):
        assert hasattr(_jax.HostBufferSemantics, semantics)
    for parameter in ("aval", "sharding", "committed"):
        assert parameter in _jax.array_result_handler.__doc__
    assert callable(_jax.LoadedExecutable.execute_sharded)
    for name in ("consume_with_handlers", "consume_token"):
        assert callable(getattr(_jax.ExecuteResults, name)), name
    assert _jax.ArrayCopySemantics.ALWAYS_COPY is not None
    assert callable(_jax.batched_copy_array_to_devices_with_sharding)
    for name in ("host_to_device", "device_to_device"):
        assert hasattr(_jax.guard_lib.thread_local_state(), name), name
    assert _jax.guard_lib.TransferGuardLevel.ALLOW is not None
    options = xla_client.CompileOptions()
    for name in ("num_replicas", "num_partitions", "device_assignment"):
        assert hasattr(options, name), name
    assert xla_client.DeviceAssignment.create(np.array([[0]])) is not None


def test_private_names_of_jaxlib_for_gpus() -> None:
    """The same for ``xla_cuda.py`` and ``cuda_loans.py``."""
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib import _jax

    for name in (
        "initialize_pjrt_plugin",
        "load_pjrt_plugin_dynamically",
        "make_c_api_client",
        "pjrt_plugin_initialized",
    ):
        assert callable(getattr(xla_client, name)), name
    for parameter in ("buffer", "stream"):
        assert parameter in _jax.buffer_to_dlpack_managed_tensor.__doc__
    assert callable(_jax.ExecuteResults.disassemble_into_single_device_arrays)
    assert hasattr(_jax.Device, "local_hardware_id")
    with mlir.make_ir_context():
        assert str(mlir.dtype_to_ir_type(np.dtype(np.float32))) == "f32"


def test_null_time_passes_on_devices_side_by_side() -> None:
    clock = VirtualClock()
    engine = NullEngine(2, clock=clock, cost=lambda segment: 3.0)
    loaded = engine.compile(DOUBLE)
    (a,) = loaded.run(0, [engine.put(RAMP, F32, 0)])
    (b,) = loaded.run(0, [a])
    (c,) = loaded.run(1, [engine.put(RAMP, F32, 1)])
    assert [array.ready_at for array in (a, b, c)] == [3.0, 6.0, 3.0]
    assert not engine.is_ready(a)
    engine.block(c)
    assert clock.now == 3.0
    assert [engine.is_ready(array) for array in (a, b)] == [True, False]
    engine.block(b)
    assert clock.now == 6.0


def test_null_refuses_what_a_device_would() -> None:
    engine = NullEngine(2)
    loaded = engine.compile(DONATED, name="double")
    array = engine.put(RAMP, F32, 0)
    with pytest.raises(StrettoError, match=r"double on device 1 is given f32\[16\] on 0"):
        loaded.run(1, [array])
    loaded.run(0, [array])
    with pytest.raises(StrettoError, match="double is given a deleted array"):
        loaded.run(0, [array])


def test_null_counts_memory_until_arrays_are_dropped() -> None:
    engine = NullEngine(1)
    arrays = [engine.put(RAMP, F32, 0) for _ in range(3)]
    assert engine.memory_stats(0) == {"bytes_in_use": 192, "peak_bytes_in_use": 192}
    del arrays[1:]
    assert engine.memory_stats(0) == {"bytes_in_use": 64, "peak_bytes_in_use": 192}


@pytest.mark.thorough
def test_more_devices_than_there_are() -> None:
    """Arrays of the program's devices lie on the engine's in turn."""
    assert "growth" in conforming("shared:2:xla:cpu")
    engine = create_engine("shared:2:xla:cpu", 5)
    assert engine.num_devices == 5 and engine.host_memory
    placed = [engine.put(np.ones(3, np.float32), TensorType("f32", (3,)), i) for i in range(5)]
    assert [next(iter(array.devices())).id for array in placed] == [0, 1, 0, 1, 0]
    for wrong in ("shared", "shared:0:xla:cpu", "shared:xla:cpu", "shared:2"):
        with pytest.raises(StrettoError, match="is not shared:N:ENGINE"):
            create_engine(wrong, 2)


@pytest.mark.thorough
def test_copies_of_code_are_dropped_before_the_process_has_no_room_for_more(
    xla: xla_cpu.XlaCpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy takes three mappings of memory, of which Linux allows a process 65,530 (NetKet's tests on 8
    devices ended in XLA)."""
    room = code_room.CodeRoom()
    monkeypatch.setattr("stretto.runtime.engines.xla._room", room)
    assert code_room.mappings() > 0
    made: list[XlaSegment] = []
    # Those of the process depend on what else it collects meanwhile.
    monkeypatch.setattr(
        code_room,
        "mappings",
        lambda: 3 * sum(copy is not None for loaded in made for copy in loaded._by_device),
    )
    monkeypatch.setattr(code_room, "_OFTEN", 4)
    room._left = 4
    monkeypatch.setattr(code_room, "most_mappings", lambda: 2 * 3 * 40)
    for k in range(40):
        function = jax.jit(lambda x, k=k: jnp.sin(x) * k)
        text = str(function.lower(RAMP).compiler_ir())
        segment = Segment(module=text.encode(), inputs=(F32,), outputs=(F32,))
        loaded = xla.compile(segment)
        loaded.make_ready([0, 1])
        made.append(loaded)
    assert sum(loaded._by_device[1] is not None for loaded in made) < 30
    assert all(loaded._by_device[0] is not None for loaded in made)
    for k, loaded in enumerate(made):
        (result,) = loaded.run(1, [xla.put(RAMP, F32, 1)])
        np.testing.assert_allclose(np.asarray(result), np.sin(RAMP) * k, rtol=1e-6)
