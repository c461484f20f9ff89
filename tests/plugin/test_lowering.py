"""What JAX programs ask of the platform beyond running: effects that end, exports, options, layouts."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax._src import effects
from jax._src.interpreters import mlir
from jax.experimental import io_callback
from jax.experimental.layout import Format, Layout
from jax.extend import xla as jax_extend_xla
from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

pytestmark = pytest.mark.usefixtures("on_stretto")


def _slow_zero(device: jax.Device | NamedSharding) -> jax.Array:
    """Zeros that the engine takes a while to compute, on a thread of its own."""
    large = jax.device_put(np.zeros((4, 1500, 1500), np.float32), device)
    return jax.jit(lambda a: (a @ a @ a @ a)[:, 0, 0])(large)


def test_the_barrier_waits_for_callables_that_give_nothing(devices: list[jax.Device]) -> None:
    seen: list[int] = []
    f = jax.jit(lambda a: jax.debug.callback(lambda value: seen.append(int(value[0])), a + 7))
    f(_slow_zero(devices[0]))
    jax.effects_barrier()
    assert seen == [7]


def test_also_where_the_program_gives_something_else(devices: list[jax.Device]) -> None:
    """The segment that calls back gives nothing; what the program gives is there before it."""
    seen: list[int] = []
    mesh = Mesh(np.array(devices), ("x",))
    spec = PartitionSpec("x")

    def f(slow: jax.Array, a: jax.Array) -> jax.Array:
        jax.debug.callback(lambda value: seen.append(int(value)), slow[0] + 7)
        return jax.lax.psum(a, "x")

    g = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    )
    result = g(_slow_zero(NamedSharding(mesh, spec)), np.arange(4, dtype=np.int32))
    jax.effects_barrier()
    assert seen == [7] * 4
    np.testing.assert_array_equal(np.asarray(result), [6])


def test_a_callback_in_a_branch_whose_result_nobody_wants(devices: list[jax.Device]) -> None:
    """Partitioned, a callback for one device lies in a conditional that gives nothing."""
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    called = threading.Event()
    seen: list[int] = []

    def take(value: np.ndarray) -> None:
        seen.append(int(value.sum()))
        called.set()

    def f(a: jax.Array) -> jax.Array:
        io_callback(take, None, a)
        return a

    jax.block_until_ready(jax.jit(f, in_shardings=sharding)(np.arange(4)))
    jax.effects_barrier()
    assert called.wait(30) and seen == [6]


def test_what_was_exported_for_stretto_can_be_called_here() -> None:
    exported = export.export(jax.jit(lambda a: jnp.sin(a) * 2), platforms=["stretto"])(
        jax.ShapeDtypeStruct((3,), np.float32)
    )
    assert exported.platforms == ("stretto",)
    argument = np.arange(3, dtype=np.float32)
    result = jax.jit(lambda a: exported.call(a) + 1)(argument)
    np.testing.assert_allclose(np.asarray(result), np.sin(argument) * 2 + 1, rtol=1e-6)


class _Order(effects.Effect):
    """An effect that is ordered by a token."""


def test_also_if_it_has_ordered_effects() -> None:
    order = _Order()
    effects.lowerable_effects.add_type(_Order)
    effects.ordered_effects.add_type(_Order)
    twice_p = Primitive("twice_in_order")
    twice_p.def_effectful_abstract_eval(lambda aval: (aval, {order}))

    def lower(ctx: Any, a: Any) -> Any:
        ctx.set_tokens_out(mlir.TokenSet({order: ctx.tokens_in.get(order)}))
        return [mlir.hlo.add(a, a)]

    mlir.register_lowering(twice_p, lower)
    exported = export.export(jax.jit(twice_p.bind), platforms=["stretto"])(np.float32(0))
    assert exported.ordered_effects == (order,)
    assert float(jax.jit(exported.call)(np.float32(2))) == 4


def test_and_what_was_exported_for_cpu() -> None:
    exported = export.export(jax.jit(lambda a: a + 1), platforms=["cpu"])(np.float32(0))
    assert float(jax.jit(exported.call)(np.float32(2))) == 3


def test_what_was_exported_for_others_cannot() -> None:
    exported = export.export(jax.jit(lambda a: a + 1), platforms=["tpu"])(np.float32(0))
    with pytest.raises(ValueError, match="was exported for platforms"):
        jax.jit(exported.call)(np.float32(2))


def test_options_of_xla_are_checked_for_one_device_too() -> None:
    good = jax.jit(lambda a: a + 1, compiler_options={"xla_embed_ir_in_executable": True})
    assert float(good(1.0)) == 2
    with pytest.raises(Exception, match="No such compile option: 'no_such_option'"):
        jax.jit(lambda a: a + 1, compiler_options={"no_such_option": "1"})(1.0)


class TestLayouts:
    """Executables take and give the layouts that were asked for, and JAX knows them of their results."""

    def test_left_to_the_compiler(self, devices: list[jax.Device]) -> None:
        argument = np.arange(32, dtype=np.int32).reshape(8, 4)
        mesh = Mesh(np.array(devices), ("x",))
        placements = (
            Format(Layout.AUTO),
            Format(Layout.AUTO, NamedSharding(mesh, PartitionSpec("x"))),
        )
        for placement in placements:
            f = jax.jit(lambda a: (a * 2, a.T), in_shardings=placement, out_shardings=placement)
            compiled = f.lower(argument).compile()
            (taken,), _ = compiled.input_formats
            results = compiled(jax.device_put(argument, taken.sharding))
            # Transposed in the layout in which that moves nothing.
            for result, format_, expected, order in zip(
                results,
                compiled.output_formats,
                (argument * 2, argument.T),
                ((0, 1), (1, 0)),
                strict=True,
            ):
                assert format_.layout.major_to_minor == order
                assert result.format.layout.major_to_minor == order
                np.testing.assert_array_equal(np.asarray(result), expected)

    def test_row_major(self) -> None:
        device = jax.devices("stretto")[0]
        argument = np.arange(6, dtype=np.int32).reshape(2, 3)
        placement = Format(Layout((0, 1)), SingleDeviceSharding(device))
        result = jax.jit(lambda a: a + 1, in_shardings=placement)(argument)
        np.testing.assert_array_equal(np.asarray(result), argument + 1)

    def test_in_and_out(self, devices: list[jax.Device]) -> None:
        argument = np.arange(4 * 3 * 5, dtype=np.float32).reshape(4, 3, 5)
        mesh = Mesh(np.array(devices), ("x",))
        for sharding in (
            SingleDeviceSharding(devices[1]),
            NamedSharding(mesh, PartitionSpec("x")),
        ):
            placement = Format(Layout((1, 2, 0)), sharding)
            placed = jax.device_put(argument, placement)
            assert placed.format.layout.major_to_minor == (1, 2, 0)
            assert placed.sharding == sharding
            np.testing.assert_array_equal(np.asarray(placed), argument)
            other = Format(Layout((2, 1, 0)), sharding)
            f = jax.jit(lambda a: jnp.cumsum(a, 1), in_shardings=placement, out_shardings=other)
            result = f(placed)
            assert result.format.layout.major_to_minor == (2, 1, 0)
            np.testing.assert_array_equal(np.asarray(result), np.cumsum(argument, 1))
            np.testing.assert_array_equal(np.asarray(result + placed), result + argument)
            with pytest.raises(ValueError, match="does not match the layout"):
                jax.jit(lambda a: a, in_shardings=placement)(result)

    def test_memory_of_an_array_lies_in_its_layout(self) -> None:
        """Asked for by address. Who is told strides, as NumPy is, gets what the strides say."""
        device = jax.devices("stretto")[0]
        argument = np.arange(6, dtype=np.int32).reshape(2, 3)
        placed = jax.device_put(argument, Format(Layout((1, 0)), SingleDeviceSharding(device)))
        assert np.asarray(placed).tolist() == argument.tolist()
        address = placed.unsafe_buffer_pointer()
        memory = (ctypes.c_int32 * 6).from_address(address)
        assert list(memory) == argument.T.ravel().tolist()
        assert placed.unsafe_buffer_pointer() == address

    def test_tiles_are_refused(self) -> None:
        device = jax.devices("stretto")[0]
        placement = Format(Layout((0, 1), tiling=((8, 128),)), SingleDeviceSharding(device))
        with pytest.raises(Exception, match=r"argument 0 .* layout .*without tiles"):
            jax.jit(lambda a: a + 1, in_shardings=placement)(np.zeros((2, 3)))


@pytest.mark.parametrize("platform", ["stretto", "cpu"])
def test_ffi_targets_of_the_program(platform: str, devices: list[jax.Device]) -> None:
    """A handler that jaxlib brings along, under a name of the program's own; on each device by itself."""
    from jaxlib.cpu import _lapack

    name = f"factor_for_{platform}"
    _lapack.initialize()
    handler = _lapack.registrations()["lapack_dpotrf_ffi"]
    jax.ffi.register_ffi_target(name, handler, platform=platform)

    def factor(a: jax.Array) -> jax.Array:
        results = [jax.ShapeDtypeStruct(a.shape, a.dtype), jax.ShapeDtypeStruct((), jnp.int32)]
        layouts = [(1, 0), ()]
        call = jax.ffi.ffi_call(name, results, input_layouts=layouts[:1], output_layouts=layouts)
        return jnp.tril(call(a, uplo=np.uint8(ord("L")))[0])

    with jax.enable_x64(True):
        given = np.array([[4.0, 2.0], [2.0, 10.0]]) * np.array([1.0, 4.0, 9.0, 16.0])[:, None, None]
        mesh = Mesh(np.array(devices), ("x",))
        each = jax.shard_map(
            lambda a: lax.psum(factor(a[0]), "x"),
            mesh=mesh,
            in_specs=PartitionSpec("x"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        # By hand: [[2, 0], [1, 3]] for the first, and 2, 3 and 4 times that for the others.
        assert np.asarray(jax.jit(each)(given)).tolist() == [[20.0, 0.0], [10.0, 30.0]]


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="only cpu is told of transformations")
@pytest.mark.parametrize("platforms", ["stretto", None])
def test_transformations_of_hlo(
    platforms: str | None, on_stretto: jax.Device, cpu: jax.Device
) -> None:
    seen: list[bytes] = []
    jax_extend_xla.register_hlo_module_transformation(seen.append, name="look", platforms=platforms)
    try:
        jax.jit(lambda a: jnp.sin(a) + 41)(1.0)
    finally:
        assert jax_extend_xla.clear_hlo_module_transformation("look", platforms=platforms)
    assert any(b"sine" in module for module in seen)  # opcodes are spelled out in HloModuleProto
    seen.clear()
    jax.jit(lambda a: jnp.sin(a) + 42)(1.0)
    assert not seen


def _result_of(start: Any) -> jax.Array:
    """What an asynchronous collective gives: jax 0.10 calls that a future."""
    return start.done() if hasattr(start, "done") else start


@pytest.mark.parametrize("kind", ["psum", "psum_scatter", "all_gather", "all_to_all", "ppermute"])
def test_collectives_that_are_started_and_awaited(devices: list[jax.Device], kind: str) -> None:
    """They are among the newest operations of StableHLO, which an old version of it cannot say."""
    from jax._src.lax import parallel  # psum_start and the others have no public name yet

    n = len(devices)
    a = np.arange(n * n * 3, dtype=np.float32).reshape(n * n, 3)
    parts = a.reshape(n, n, 3)  # by device
    ring = [(i, (i + 1) % n) for i in range(n)]
    start: Any = getattr(parallel, f"{kind}_start")
    begin, expected = {
        "psum": (lambda x: start(x, "x"), np.tile(parts.sum(0), (n, 1))),
        "psum_scatter": (lambda x: start(x, "x", tiled=True), parts.sum(0)),
        "all_gather": (lambda x: start(x, "x", tiled=True), np.tile(a, (n, 1))),
        "all_to_all": (
            lambda x: start(x, "x", 0, 0, tiled=True),
            parts.swapaxes(0, 1).reshape(n * n, 3),
        ),
        "ppermute": (lambda x: start(x, "x", ring), np.roll(parts, 1, 0).reshape(n * n, 3)),
    }[kind]

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        begun = begin(x)
        meanwhile = jnp.tanh(x)
        return _result_of(begun), meanwhile

    mesh, spec = Mesh(np.array(devices), ("x",)), PartitionSpec("x")
    got, beside = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )(a)
    np.testing.assert_array_equal(np.asarray(got), expected)
    np.testing.assert_allclose(np.asarray(beside), np.tanh(a), rtol=1e-6)
