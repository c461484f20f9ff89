"""Errors of runs: where they are raised, what they take with them, and that work goes on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, shard_map
from jax.sharding import Mesh, PartitionSpec

from stretto.collectives.native import Table, handler

pytestmark = pytest.mark.usefixtures("on_stretto")


def _mesh(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), ("x",))


@pytest.fixture(autouse=True)
def _healthy_tokens(devices: list[jax.Device]) -> Iterator[None]:
    """JAX keeps the token of each device's last program with callbacks, and with it its error."""
    yield
    f = jax.jit(lambda a: jax.pure_callback(np.sin, a, a))
    mesh = _mesh(devices)
    spec = PartitionSpec("x")
    g = jax.jit(shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    jax.block_until_ready(g(np.zeros(len(devices), np.float32)))
    jax.effects_barrier()


def test_a_failing_callback_reaches_the_array() -> None:
    def fail(_: object) -> object:
        raise ValueError("the reason")

    def f(a: jax.Array) -> jax.Array:
        return jax.pure_callback(fail, a, a) + 1

    with pytest.raises(Exception, match="the reason"):
        jax.block_until_ready(jax.jit(f)(1.0))


@pytest.mark.parametrize("donated", [(), (0,)])
def test_and_is_raised_by_the_call_on_one_device(donated: tuple[int, ...]) -> None:
    """As on JAX's CPU backend: equinox's own tests wait for no result."""

    def fail(_: object) -> object:
        raise ValueError("the reason")

    f = jax.jit(lambda a: jax.pure_callback(fail, a, a) + 1, donate_argnums=donated)
    argument = jax.block_until_ready(jnp.float32(1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the reason"):
        f(argument)
    assert argument.is_deleted() == bool(donated)


def test_and_what_is_computed_from_it(devices: list[jax.Device]) -> None:
    def fail(_: object) -> object:
        raise ValueError("the reason")

    mesh = _mesh(devices)

    @jax.jit
    @partial(
        shard_map,
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    def f(a: jax.Array) -> jax.Array:
        return lax.psum(jax.pure_callback(fail, a, a), "x")

    with pytest.raises(Exception, match="the reason"):
        jax.block_until_ready(f(jnp.arange(4.0)) + 1)


def test_and_what_is_computed_on_one_device_from_an_array_that_failed() -> None:
    """The engine's array has the error, which only it knows of: a handler of XLA's FFI has returned it."""
    table = Table(1)
    table.add("all-reduce", [], 0, [], "")
    table.begin()
    table.abort("the reason")
    jax.ffi.register_ffi_target("fails_in_tests", handler(), platform="cpu")
    result = jax.ShapeDtypeStruct((), np.float32)
    with jax.enable_x64(True):
        context = jnp.array([table.address, 0, 0, 0], np.uint64)
        fail = jax.jit(lambda c: jax.ffi.ffi_call("fails_in_tests", result)(c, site=np.int64(0)))
        fail = fail.lower(context).compile()
        # XLA fails at once where arguments are there, and later where it has to wait for them.
        large = jnp.zeros((1500, 1500), np.float32)
        work = jax.jit(lambda c, a: c + (0 * (a @ a @ a)[0, 0]).astype(np.uint64))
        failed = fail(work(context, large))
    add = jax.jit(lambda a: a + 1)
    keep = jax.jit(lambda a, b: b + 1, keep_unused=True)
    good = jax.block_until_ready(jnp.float32(1))
    for computed in (add(failed), add(add(failed)), keep(failed, good), failed):
        with pytest.raises(Exception, match="the reason"):
            jax.block_until_ready(computed)
    for computed in (add(failed), keep(failed, good)):
        with pytest.raises(Exception, match="the reason"):
            jax.block_until_ready(computed)
    assert float(keep(add(good), add(good))) == 3


def test_a_deleted_argument() -> None:
    argument = jnp.arange(3.0)
    argument.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        jax.jit(lambda a: a + 1)(argument)


def test_too_many_devices(devices: list[jax.Device]) -> None:
    with pytest.raises(ValueError, match="devices"):
        jax.make_mesh((len(devices) + 1,), ("x",), devices=devices)


def test_work_goes_on_after_an_error() -> None:
    def fail(_: object) -> object:
        raise ValueError("the reason")

    with pytest.raises(Exception, match="the reason"):
        jax.block_until_ready(jax.jit(lambda a: jax.pure_callback(fail, a, a))(1.0))
    assert float(jax.jit(lambda a: a + 1)(1.0)) == 2
