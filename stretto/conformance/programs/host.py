"""What JAX does around a program: transfers, global arrays, random keys, pmap, callbacks, multihost_utils."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .common import ALL_DTYPES, WIDE, bits, mesh, normal, place, small
from .registry import CORE, ONE_PROCESS, Program, add, program


def roundtrip(dtype: str) -> dict[str, Any]:
    """Host to device and back in every layout numpy has: contiguous, transposed, strided, reversed, empty."""
    x = bits((4, 6, 5), dtype, 100)
    device = jax.local_devices()[-1]
    views = {
        "plain": x,
        "transposed": x.T,
        "fortran": np.asfortranarray(x),
        "strided": x[::2, 1::3],
        "reversed": x[:, ::-1],
        "scalar": x[0, 0, 0],
        "empty": x[:0],
        "broadcast": np.broadcast_to(x[0], (3, 6, 5)),
    }
    return {name: np.asarray(jax.device_put(v, device)) for name, v in views.items()}


def roundtrip_expected(dtype: str) -> dict[str, np.ndarray]:
    x = bits((4, 6, 5), dtype, 100)
    return {
        "plain": x,
        "transposed": x.T,
        "fortran": x,
        "strided": x[::2, 1::3],
        "reversed": x[:, ::-1],
        "scalar": np.asarray(x[0, 0, 0]),
        "empty": x[:0],
        "broadcast": np.broadcast_to(x[0], (3, 6, 5)),
    }


for name in (*ALL_DTYPES, "float8_e8m0fnu", "float4_e2m1fn", "int2", "uint2"):
    add(
        Program(
            f"roundtrip/{name}",
            partial(roundtrip, name),
            expected=partial(roundtrip_expected, name),
            exact=True,
            x64=name in WIDE,
            forms=(ONE_PROCESS,),
        )
    )


def compute(dtype: str) -> dict[str, Any]:
    """A little arithmetic in the dtype, jitted on one device."""
    x = small((3, 8), dtype, 101)
    f = jax.jit(
        lambda v: (v.T, jnp.concatenate([v, v]), v == v[:1], jnp.where(v == v[0, 0], v, v[0]))
    )
    return {str(i): np.asarray(r) for i, r in enumerate(f(x))}


for name in ALL_DTYPES:
    add(
        Program(
            f"compute/{name}",
            partial(compute, name),
            exact=True,
            x64=name in WIDE,
            forms=(ONE_PROCESS,),
        )
    )


@program("host/device_put", exact=True, forms=(ONE_PROCESS,))
def device_put() -> dict[str, Any]:
    """Between devices, from one to many, and between shardings."""
    devices, m = jax.devices(), mesh(a=2, b=4)
    x = jax.device_put(normal((8, 4), seed=102), devices[3])
    y = jax.device_put(x, devices[6])
    assert y.devices() == {devices[6]}
    spread = jax.device_put(y, NamedSharding(m, P("a", "b")))
    turned = jax.device_put(spread, NamedSharding(m, P("b", None)))
    copies = jax.device_put(turned, NamedSharding(m, P()))
    return {"one": y, "spread": spread, "turned": turned, "copies": copies, "sum": (y + 1) * 2}


@program("host/reshard_device_put", exact=True)
def reshard_device_put() -> dict[str, Any]:
    """device_put to another sharding of the same devices is a program with collectives."""
    m = mesh(a=2, b=4)
    x = place(m, P("a", "b"), normal((8, 4), seed=103))
    out = {}
    for name, spec in {"rows": P(("a", "b")), "swapped": P(None, "a"), "copies": P()}.items():
        x = out[name] = jax.device_put(x, NamedSharding(m, spec))
    return out


@program("host/device_lists", exact=True, **CORE)
def device_lists() -> dict[str, Any]:
    """What every process must agree on."""
    ids = np.array([d.id for d in jax.devices()])
    owners = [d.process_index for d in jax.devices()]
    assert owners == sorted(owners)
    assert [
        d for d in jax.devices() if d.process_index == jax.process_index()
    ] == jax.local_devices()
    assert len(jax.devices()) == jax.process_count() * jax.local_device_count()
    return {"ids": ids, "count": np.array(jax.device_count())}


@program("host/make_array", exact=True, **CORE)
def make_array() -> dict[str, Any]:
    """Global arrays from single-device ones and from process-local data."""
    m = mesh(x=8)
    data = normal((16, 3), seed=104)
    sharding = NamedSharding(m, P("x"))
    pieces = [jax.device_put(data[2 * d.id : 2 * d.id + 2], d) for d in jax.local_devices()]
    whole = jax.make_array_from_single_device_arrays(data.shape, sharding, pieces)
    per_process = 16 // jax.process_count()
    mine = data[jax.process_index() * per_process :][:per_process]
    local = jax.make_array_from_process_local_data(sharding, mine)
    return {"pieces": whole, "local": local, "sum": jax.jit(lambda a, b: a + b)(whole, local)}


@program("host/multihost_utils", exact=True, expected=lambda: {"ok": np.array(True)}, **CORE)
def multihost() -> dict[str, Any]:
    """Each utility against what it must give for this number of processes."""
    rank, count = jax.process_index(), jax.process_count()
    mine = np.arange(3, dtype=np.int32) + 10 * rank
    stacked = multihost_utils.process_allgather(mine, tiled=count == 1)
    want = np.stack([np.arange(3) + 10 * r for r in range(count)]) if count > 1 else mine
    np.testing.assert_array_equal(stacked, want)
    first = multihost_utils.broadcast_one_to_all(mine)
    np.testing.assert_array_equal(first, np.arange(3))
    multihost_utils.sync_global_devices("here")
    multihost_utils.assert_equal(np.float32(7), "every process has 7")
    x = place(mesh(x=8), P("x"), small((8, 2)))
    np.testing.assert_array_equal(multihost_utils.process_allgather(x, tiled=True), small((8, 2)))
    if count > 1:
        try:
            multihost_utils.assert_equal(np.float32(rank), "ranks differ")
        except AssertionError:
            pass
        else:
            raise AssertionError("assert_equal did not see that the ranks differ")
    return {"ok": np.array(True)}


@program("random/sharded", exact=True)
def random_sharded() -> dict[str, Any]:
    """Partitionable keys give the same numbers however they are sharded."""
    m = mesh(a=2, b=4)
    out = {}
    for name, spec in {"rows": P("a"), "both": P("a", "b"), "copies": P()}.items():
        draw = jax.jit(
            lambda k: jax.random.uniform(k, (16, 8)), out_shardings=NamedSharding(m, spec)
        )
        out[name] = draw(jax.random.key(7))
    ints = jax.jit(
        lambda k: jax.random.permutation(k, 64), out_shardings=NamedSharding(m, P(("a", "b")))
    )
    return out | {"permutation": ints(jax.random.key(8))}


@program("random/normal")
def random_normal() -> dict[str, Any]:
    m = mesh(x=8)

    def f(x: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(1), lax.axis_index("x"))
        return x + jax.random.normal(key, x.shape) + jax.random.gamma(key, 2.0, x.shape)

    mapped = jax.shard_map(f, mesh=m, in_specs=P("x"), out_specs=P("x"))
    return {"out": jax.jit(mapped)(place(m, P("x"), normal((8, 5), seed=105)))}


@program("pmap", forms=(ONE_PROCESS,), exact=True)
def pmap() -> dict[str, Any]:
    x = small((8, 4), "int32", 106)
    f = jax.pmap(lambda v: (lax.psum(v, "i"), v + lax.axis_index("i")), axis_name="i")
    groups = jax.pmap(lambda v: lax.all_gather(v, "i"), axis_name="i", devices=jax.devices()[:4])
    summed, plus = f(x)
    return {
        "psum": summed,
        "plus": plus,
        "gathered": groups(x[:4]),
        "broadcast": f(np.asarray(plus))[0],
    }


@program("callback/pure", exact=True, forms=(ONE_PROCESS,))
def pure_callback() -> dict[str, Any]:
    """Python called from inside a jitted, sharded program with collectives around it."""

    def f(x: jax.Array) -> jax.Array:
        x = lax.psum(x, "x") + x
        x = jax.pure_callback(
            lambda v: np.asarray(v) * 2 + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )
        return lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)])

    m = mesh(x=8)
    mapped = jax.shard_map(f, mesh=m, in_specs=P("x"), out_specs=P("x"))
    return {"out": jax.jit(mapped)(place(m, P("x"), small((8, 5), "int32", 107)))}


@program("callback/meeting", exact=True)
def meeting_callbacks() -> dict[str, Any]:
    """What the devices of a process call back waits for the other devices' calls, in a loop too."""
    barrier = threading.Barrier(len(jax.local_devices()))

    def meet(v: np.ndarray) -> np.ndarray:
        barrier.wait(30)
        return np.asarray(v) + 1

    def f(x: jax.Array) -> jax.Array:
        def body(_: int, v: jax.Array) -> jax.Array:
            return lax.psum(jax.pure_callback(meet, jax.ShapeDtypeStruct(v.shape, v.dtype), v), "x")

        v = jax.pure_callback(meet, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return lax.fori_loop(0, 3, body, v)

    m = mesh(x=8)
    mapped = jax.shard_map(f, mesh=m, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    return {"out": jax.jit(mapped)(place(m, P("x"), small((8, 5), "int32", 113)))}


@program("callback/io_ordered", exact=True, forms=(ONE_PROCESS,))
def io_callback() -> dict[str, Any]:
    """Ordered effects on one device arrive in order, in a loop too."""
    seen: list[int] = []

    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        def body(i: jax.Array, v: jax.Array) -> jax.Array:
            jax.experimental.io_callback(lambda j: seen.append(int(j)), None, i, ordered=True)
            return v + i

        return lax.fori_loop(0, 5, body, x)

    out = f(jnp.int32(0))
    jax.effects_barrier()
    return {"out": out, "seen": np.array(seen)}
