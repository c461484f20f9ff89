"""`stretto.kth_largest` against a sort of all values by NumPy: types, ties, NaN, masks, gradients, counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.scripts import reports_of

import stretto

TYPES = [
    *("bool", "int2", "int4", "int8", "int16", "int32", "int64"),
    *("uint2", "uint4", "uint8", "uint16", "uint32", "uint64"),
    *("float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("float16", "bfloat16", "float32", "float64"),
]
COUNT = 64


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("stretto")), ("x",))


@pytest.fixture
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def kth(mesh: Mesh, masked: bool = False, axes: object = "x") -> Callable:
    """A jitted ``f(x, k[, where])`` over values that are divided over the mesh."""

    def local(x, k, *where):
        return stretto.kth_largest(x, k, axes, where=where[0] if where else None)

    specs = (P(mesh.axis_names), P(), *(P(mesh.axis_names),) * masked)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))


def any_bits(name: str) -> np.ndarray:
    """Values of a type, of random bits: NaNs, infinities, denormals and both zeros among them."""
    dtype, rng = jnp.dtype(name), np.random.default_rng(len(name))
    raw = rng.integers(0, 256, COUNT * dtype.itemsize, dtype=np.uint8)
    if name == "bool":
        return raw % 2 == 1
    if name in ("int2", "int4", "uint2", "uint4"):
        info = jnp.iinfo(dtype)
        return (raw.astype(np.int32) % (1 << info.bits) + int(info.min)).astype(dtype)
    values = (raw % 16 if name == "float4_e2m1fn" else raw).view(dtype)
    if name.startswith(("float16", "bfloat", "float32", "float64")):
        values[:8] = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.0]
        values[8:10] = np.array([1, 3], f"u{dtype.itemsize}").view(dtype)  # denormal
    return values


@pytest.mark.thorough
def test_every_type_and_every_k(mesh: Mesh, wide: None) -> None:
    values = {name: any_bits(name) for name in TYPES}
    f = jax.jit(lambda x, k: {name: kth(mesh)(v, k) for name, v in x.items()})
    ks = (1, 2, 3, 17, 31, 32, 62, COUNT)
    given = {name: jnp.asarray(v) for name, v in values.items()}
    results = {k: f(given, k) for k in ks}
    for name, own in values.items():
        exact = own if own.dtype.itemsize == 8 else own.astype(np.float64)
        descending = np.sort(exact)[::-1]  # NaN first
        found = [np.asarray(results[k][name]) for k in ks]
        assert all(v.dtype == own.dtype for v in found)
        wanted = [descending[k - 1] for k in ks]
        np.testing.assert_array_equal([v.astype(exact.dtype) for v in found], wanted, name)


@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "float32"])
def test_what_does_not_count_and_k_beyond(mesh: Mesh, name: str) -> None:
    values = any_bits(name)
    where = np.random.default_rng(1).random(COUNT) < 0.4
    where[:16] = False  # one device has nothing that counts
    descending = np.sort(values[where].astype(np.float64))[::-1]
    f = kth(mesh, masked=True)
    for k in (1, 2, len(descending)):
        found = np.asarray(f(jnp.asarray(values), k, where)).astype(np.float64)
        np.testing.assert_array_equal(found, descending[k - 1])
    info = jnp.iinfo(values.dtype) if "int" in name else jnp.finfo(values.dtype)
    ends = [float(info.min), float(info.max)]
    if name in ("bfloat16", "float32"):
        ends = [-np.inf, np.inf]
    for k, end in ((len(descending) + 1, 0), (1000, 0), (0, 1), (-3, 1)):
        assert float(f(jnp.asarray(values), k, where)) == ends[end]
    assert float(f(jnp.asarray(values), 1, np.zeros(COUNT, bool))) == ends[0]


def test_ties_zeros_and_one_value_everywhere(mesh: Mesh) -> None:
    x = jnp.asarray(np.array([-0.0, 0.0] * 4 + [5.0] * 3 + [3.0] * 5, np.float32))
    f = kth(mesh)
    assert [float(f(x, k)) for k in (1, 3, 4, 8, 9, 16)] == [5, 5, 3, 3, 0, 0]
    assert not np.signbit(f(x, 16))
    assert float(f(jnp.full(8, -2.5), 7)) == -2.5


def test_two_axes_and_one_of_them() -> None:
    """Over both axes of a mesh, and over one: then each row of devices has a result of its own."""
    over = Mesh(np.array(jax.devices("stretto")).reshape(2, 2), ("y", "x"))
    x = np.random.default_rng(2).standard_normal(32).astype(np.float32)
    assert float(kth(over, axes=("y", "x"))(jnp.asarray(x), 7)) == np.sort(x)[-7]
    rows = jax.jit(
        jax.shard_map(
            lambda x: stretto.kth_largest(x, 3, "x")[None],
            mesh=over,
            in_specs=P(("y", "x")),
            out_specs=P("y"),
        )
    )(jnp.asarray(x))
    np.testing.assert_array_equal(rows, np.sort(x.reshape(2, 16))[:, -3])


def test_the_gradient_is_shared_by_ties(mesh: Mesh) -> None:
    x = jnp.asarray([1.0, 4.0, 2.0, 2.0, 0.0, 2.0, 3.0, 2.0])
    gradient = jax.jit(jax.grad(lambda x: 3 * kth(mesh)(x, 4)))(x)
    np.testing.assert_array_equal(gradient, [0, 0, 0.75, 0.75, 0, 0.75, 0, 0.75])


def test_four_sums_in_one_loop(mesh: Mesh) -> None:
    x = jnp.asarray(any_bits("float32"))
    compiled = jax.jit(lambda x: kth(mesh)(x, 5)).lower(x).compile()
    assert compiled.as_text().count(" all-reduce(") == 1
    before = stretto.stats()
    compiled(x).block_until_ready()
    after = stretto.stats()
    assert after.collectives - before.collectives == 4


@pytest.mark.parametrize("k", [0, -1, COUNT + 1])
def test_no_such_k(mesh: Mesh, k: int) -> None:
    with pytest.raises(ValueError, match=f"of {COUNT} values over 'x': there is no k = {k}"):
        jax.shard_map(
            lambda x: stretto.kth_largest(x, k, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
        )(jnp.zeros(COUNT))


def test_what_it_does_not_take(mesh: Mesh) -> None:
    def call(x, k=1, where=None):
        return jax.shard_map(
            lambda x: stretto.kth_largest(x, k, "x", where=where),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P(),
        )(x)

    with pytest.raises(TypeError, match="complex64"):
        call(jnp.zeros(4, jnp.complex64))
    with pytest.raises(TypeError, match="not one integer"):
        call(jnp.zeros(4), k=jnp.float32(1))
    with pytest.raises(ValueError, match=r"where is .*, not bool\[1\]"):
        call(jnp.zeros(4), where=jnp.ones(3, bool))
    abstract = jax.ShapeDtypeStruct((1 << 31,), np.int8)
    with pytest.raises(ValueError, match="set jax_enable_x64"):
        jax.eval_shape(call, abstract)


SCRIPT = """
import json, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import stretto

mesh = jax.make_mesh((4,), ("x",))
x = np.random.default_rng(5).standard_normal(4000).astype(np.float32)
place = NamedSharding(mesh, P("x"))
given = jax.make_array_from_callback(x.shape, place, lambda index: x[index])
f = jax.jit(jax.shard_map(lambda x, k: stretto.kth_largest(x, k, "x"), mesh=mesh,
                          in_specs=(P("x"), P()), out_specs=P()))
found = [float(f(given, k)) for k in (1, 1234, 4000)]
with open(f"{sys.argv[1]}/{jax.process_index()}.json", "w") as file:
    json.dump(found == [float(np.sort(x)[-k]) for k in (1, 1234, 4000)], file)
"""


@pytest.mark.mpi
def test_on_ranks(tmp_path: Path) -> None:
    assert reports_of(tmp_path, SCRIPT, 4, ranks=2)[0] == [True, True]


def test_on_jax_cpu_backend(tmp_path: Path) -> None:
    flags = "--xla_force_host_platform_device_count=4"
    assert reports_of(tmp_path, SCRIPT, 4, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)[0] == [True]
