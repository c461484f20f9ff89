"""Transfers, memories and sharing of memory, against numpy."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from stretto.collectives.types import ELEMENT_TYPES, TensorType

pytestmark = pytest.mark.usefixtures("on_stretto")


def _content(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values that every element type can hold."""
    type = TensorType(name, shape)
    bits = np.arange(type.size).reshape(shape) % 2
    return (bits + 1 if name == "f8e8m0fnu" else bits).astype(type.numpy)


@pytest.fixture(autouse=True, scope="module")
def _x64() -> object:
    with jax.enable_x64(True):
        yield


NUMBERS = [
    np.float32(0.0), np.float32(-0.0), np.int32(0), np.float32(1), np.uint32(0x3F800000), np.int8(-3),
    np.uint8(253), np.bool_(True), ml_dtypes.bfloat16(1.5), np.float16(1.5), np.float64(1e300),
    np.complex64(1 + 2j), np.int64(-1), np.uint64(2**64 - 1), np.complex128(3j),
]  # fmt: skip


def test_equal_numbers_may_have_one_array() -> None:
    """Bits of one type are no number of another one, and what one of them is, others stay."""
    one, other = ([jax.device_put(n) for n in NUMBERS] for _ in range(2))
    for array in one[::2]:
        array.delete()
    give_up = jax.jit(lambda n: n + n, donate_argnums=0)
    for number, array in zip(NUMBERS[1::2], one[1::2], strict=True):
        with np.errstate(over="ignore"):
            assert np.asarray(give_up(array)) == number + number
        assert array.is_deleted()
    for number, array in zip(NUMBERS, other, strict=True):
        assert array.dtype == number.dtype
        assert np.asarray(array).tobytes() == number.tobytes()
    many = [jax.device_put(np.int32(i)) for i in range(600)]  # more than are kept
    assert [int(a) for a in many] == list(range(600))


@pytest.mark.parametrize("name", ["pred", "s8", "bf16", "f32", "c128"])
def test_small_arrays_however_they_lie_in_memory(name: str) -> None:
    host = _content(name, (4, 6, 2))
    for seen in (
        host,
        host.T,
        host[::2],
        host[:, ::-1],
        host[:, :, 1:],
        host[:, 1:2].T,
        host[1, 2],
    ):
        kept = seen.copy()
        array = jax.device_put(seen)
        others = jax.device_put(array, jax.devices("stretto")[1])
        seen[...] = 0  # the arrays have what was there
        np.testing.assert_array_equal(array, kept)
        np.testing.assert_array_equal(others, kept)
        assert others.devices() == {jax.devices("stretto")[1]}
        seen[...] = kept


@pytest.mark.parametrize("name", ELEMENT_TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (3, 4), (2, 0, 5)])
def test_every_dtype_there_and_back(name: str, shape: tuple[int, ...]) -> None:
    host = _content(name, shape)
    array = jax.device_put(host)
    assert array.dtype == host.dtype
    assert array.shape == shape
    np.testing.assert_array_equal(np.asarray(array), host)


@pytest.mark.parametrize("name", ELEMENT_TYPES)
def test_every_dtype_through_a_program(name: str) -> None:
    host = _content(name, (3, 4))
    transposed = jax.jit(lambda a: a.T)(host)
    assert transposed.dtype == host.dtype
    np.testing.assert_array_equal(np.asarray(transposed), host.T)


@pytest.mark.parametrize("name", ["pred", "s4", "bf16", "f32", "c128"])
@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[::-1],
        lambda a: a[::2, ::-1],
        lambda a: np.broadcast_to(a[:1], a.shape),
        lambda a: a[1:, 1:],
        np.asfortranarray,
    ],
    ids=["transposed", "reversed", "strided", "broadcast", "offset", "fortran"],
)
@pytest.mark.parametrize("shape", [(6, 5), (61, 37)])
def test_strides(
    name: str, view: Callable[[np.ndarray], np.ndarray], shape: tuple[int, int]
) -> None:
    numbers = np.arange(shape[0] * shape[1], dtype="f").reshape(shape)
    host = view(_content(name, shape) if name != "f32" else numbers)
    np.testing.assert_array_equal(np.asarray(jax.device_put(host)), host)


def test_a_copy_does_not_change_with_its_source() -> None:
    host = np.arange(64.0)
    array = jnp.array(host)
    host[:] = -1
    np.testing.assert_array_equal(np.asarray(array), np.arange(64.0))


def test_memory_lent_for_good_is_released_at_the_end() -> None:
    class Owned(np.ndarray):
        pass

    raw = np.zeros(1024 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    host = raw[start : start + 1024].view(Owned)
    gone = weakref.ref(host)
    array = jax.device_put(host, may_alias=True)
    del host, raw
    assert int(np.asarray(array).sum()) == 0
    del array
    for _ in range(3):
        gc.collect()
        jax.device_put(0.0)  # jaxlib drops what it holds of Python at its next call
    assert gone() is None


def test_views_share_memory_and_are_read_only() -> None:
    array = jnp.arange(8.0)
    view = np.asarray(array)
    assert view.ctypes.data == array.unsafe_buffer_pointer()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_a_view_outlives_its_array() -> None:
    array = jnp.arange(100_000.0) + 1
    view = np.asarray(array)
    array.delete()
    del array
    others = [jnp.full(100_000, 7.0) for _ in range(3)]
    np.testing.assert_array_equal(view, np.arange(100_000.0) + 1)
    assert len(others) == 3


def test_copies_between_devices(devices: list[jax.Device]) -> None:
    array = jax.device_put(np.arange(10.0), devices[0])
    moved = jax.device_put(array, devices[3])
    assert moved.devices() == {devices[3]}
    array.delete()
    np.testing.assert_array_equal(np.asarray(moved), np.arange(10.0))


def test_to_and_from_the_cpu_backend(devices: list[jax.Device], cpu: jax.Device) -> None:
    there = jax.device_put(jax.device_put(np.arange(5.0), cpu), devices[1])
    back = jax.device_put(there * 2, cpu)
    assert back.devices() == {cpu}
    np.testing.assert_array_equal(np.asarray(back), np.arange(5.0) * 2)


def test_memory_kinds(on_stretto: jax.Device) -> None:
    kinds = [memory.kind for memory in on_stretto.addressable_memories()]
    assert kinds == ["device", "pinned_host", "unpinned_host"]
    assert on_stretto.default_memory().kind == "device"
    for kind in kinds:
        array = jax.device_put(np.arange(3.0), SingleDeviceSharding(on_stretto, memory_kind=kind))
        assert array.sharding.memory_kind == kind
        np.testing.assert_array_equal(np.asarray(array), np.arange(3.0))
        back = jax.device_put(array, SingleDeviceSharding(on_stretto, memory_kind="device"))
        assert back.sharding.memory_kind == "device"
    with pytest.raises(Exception, match="can address the following memory kinds: device, pinned"):
        on_stretto.memory("registers")


@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_programs_on_one_device_take_what_is_donated_in_any_memory(
    on_stretto: jax.Device, kind: str
) -> None:
    sharding = SingleDeviceSharding(on_stretto, memory_kind=kind)
    x, y = (jax.device_put(np.full(256, v, np.float32), sharding) for v in (1, 2))
    a, b = jax.jit(lambda x, y: (y, x + 3), donate_argnums=(0, 1))(x, y)
    assert x.is_deleted() and y.is_deleted()
    assert a.sharding.memory_kind == b.sharding.memory_kind == kind
    np.testing.assert_array_equal(np.stack([a, b]), [[2] * 256, [4] * 256])


def test_memory_statistics_follow_the_arrays(on_stretto: jax.Device) -> None:
    before = on_stretto.memory_stats()["bytes_in_use"]
    array = jax.device_put(np.zeros(1 << 20, np.uint8))
    assert on_stretto.memory_stats()["bytes_in_use"] - before >= 1 << 20
    del array
    assert on_stretto.memory_stats()["bytes_in_use"] - before < 1 << 20


@contextmanager
def _disallowed() -> Iterator[None]:
    """No transfers in any thread."""
    guards = [f"jax_transfer_guard_{way}" for way in ("host_to_device", "device_to_device")]
    before = {guard: getattr(jax.config, guard) for guard in guards}
    for guard in guards:
        jax.config.update(guard, "disallow")
    try:
        yield
    finally:
        for guard in guards:
            jax.config.update(guard, before[guard] or "allow")


@pytest.mark.parametrize("every_thread", [False, True])
def test_guards_are_about_the_program_s_transfers(
    devices: list[jax.Device], every_thread: bool
) -> None:
    """Those that a run itself makes, in the thread that calls or in the dispatch thread, are none of them."""
    mesh = Mesh(np.array(devices), ("x",))
    rows, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    array = jax.device_put(np.arange(800_000, dtype=np.float32).reshape(8, -1), rows)
    small = jax.device_put(np.arange(8.0, dtype=np.float32).reshape(8, 1), rows)
    total = jax.jit(lambda a: a.sum(0), out_shardings=whole)
    shift = jax.jit(lambda a: a + a.sum())  # so small that the thread that calls runs it
    double = jax.jit(lambda a: jax.lax.fori_loop(0, 3, lambda _, b: b * 2 + b.sum(), a))
    with _disallowed() if every_thread else jax.transfer_guard("disallow"):
        results = jax.block_until_ready([total(array), shift(small), double(small)])
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            jnp.sin(np.ones(3))
    np.testing.assert_allclose(results[0], np.asarray(array).sum(0))
    np.testing.assert_array_equal(results[1], np.asarray(small) + 28)
    assert results[2].shape == (8, 1)


def test_large_arrays() -> None:
    host = np.random.default_rng(0).random((1 << 20) + 3, np.float32)
    np.testing.assert_array_equal(np.asarray(jax.device_put(host) * 1), host)


def test_pieces_of_small_dtypes_keep_their_values() -> None:
    host = np.arange(-8, 8).astype(ml_dtypes.int4)
    np.testing.assert_array_equal(np.asarray(jax.device_put(host)[3:11]), host[3:11])


class TestSharedMemory:
    """Memory is lent and taken without copies: the same address on both sides."""

    def test_lent_by_dlpack(self, on_stretto: jax.Device) -> None:
        array = jax.jit(lambda a: a + 1)(jnp.arange(1000, dtype=jnp.float32))
        address = array.unsafe_buffer_pointer()
        assert array.__dlpack_device__()[1] == 0
        lent = np.from_dlpack(array)
        assert lent.ctypes.data == address == np.asarray(array).ctypes.data
        half = array.astype(jnp.bfloat16)
        taken = jax.dlpack.from_dlpack(half)
        assert taken.unsafe_buffer_pointer() == half.unsafe_buffer_pointer()
        assert taken.dtype == jnp.bfloat16
        del array
        gc.collect()
        np.testing.assert_array_equal(lent, np.arange(1, 1001))

    def test_lent_memory_outlives_arrays_that_are_deleted_twice(
        self, on_stretto: jax.Device
    ) -> None:
        host = np.arange(1000, dtype=np.float32)
        arrays = [jax.device_put(host, on_stretto) for _ in range(20)]
        lent = [np.asarray(array) for array in arrays]
        for array in arrays:
            array.unsafe_buffer_pointer()  # from now on jaxlib deletes twice
            array.delete()
        others = [np.zeros_like(host) for _ in range(100)]
        assert all((content == host).all() for content in lent)
        assert not any(other.any() for other in others)

    def test_taken_by_buffer_protocol_and_dlpack(self, on_stretto: jax.Device) -> None:
        raw = np.empty(1000 * 4 + 64, np.uint8)
        start = -raw.ctypes.data % 64
        host = raw[start : start + 4000].view(np.float32)
        host[:] = np.arange(1000)
        placed = jax.device_put(host, on_stretto)
        assert placed.unsafe_buffer_pointer() == host.ctypes.data
        again = jax.device_put(np.from_dlpack(placed), on_stretto)
        assert again.unsafe_buffer_pointer() == host.ctypes.data

    def test_arrays_on_several_devices_are_not_lent(self, devices: list[jax.Device]) -> None:
        sharding = jax.sharding.NamedSharding(
            jax.sharding.Mesh(np.array(devices), ("x",)), jax.sharding.PartitionSpec("x")
        )
        array = jax.device_put(np.arange(4.0), sharding)
        with pytest.raises(BufferError, match="singular device"):
            array.__dlpack__()
