"""Loops and programs of small collectives, which run as compiled code that calls them itself.

Expected values are NumPy's: what each device holds is a row, and what a collective does to rows is written
here by hand. That a program is native is asserted of its printed form, so that none passes by the walk.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax._src.lax import parallel  # psum_start and the others have no public name yet
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.on_rows import Rows, everywhere, is_native, on_rows

import stretto
from stretto.collectives.native import can_reduce, connected, refusal
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType
from stretto.plugin.executable import executables
from stretto.runtime.engines.xla_cpu import XlaCpuEngine

pytestmark = pytest.mark.usefixtures("on_stretto")

N = 4
STEPS = 3
LARGE = 4_200_000  # of f32: compiled code calls no collective of so many
RING = [(i, (i + 1) % N) for i in range(N)]
PAIRS = [(0, 2), (3, 1)]  # 0 and 3 receive nothing


@pytest.fixture
def mesh(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), ("x",))


def in_loop(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: lax.fori_loop(0, STEPS, lambda _, a: step(a), x)


def reduced(rows: Rows, combine: Callable[[Rows, Rows], Rows]) -> Rows:
    total = rows[0]
    for row in rows[1:]:
        total = combine(total, row)
    return np.stack([total] * len(rows))


DTYPES = [
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float32",
    "float64",
]


@pytest.mark.parametrize(
    "dtype", [*DTYPES, "complex64", "complex128", "bool", "float16", "bfloat16"]
)
def test_sums(mesh: Mesh, dtype: str) -> None:
    """Integers wrap."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with jax.enable_x64(True):
        rows = np.random.default_rng(1).integers(0, 100, (N, 5)).astype(kind)
        reduce = lax.pmax if dtype == "bool" else lax.psum
        got, compiled = on_rows(mesh, in_loop(lambda a: reduce(a, "x")), rows)
    want = rows
    with np.errstate(all="ignore"):
        for _ in range(STEPS):
            want = reduced(want, np.logical_or if dtype == "bool" else lambda a, b: a + b)
    assert got.dtype == kind
    np.testing.assert_array_equal(got, want)
    assert is_native(compiled)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["psum", "pmax", "pmin", "psum_scatter"])
def test_halves_are_accumulated_in_f32(mesh: Mesh, name: str, dtype: str) -> None:
    """And rounded once in each round, where rounding after each operand would give other sums."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rows = np.random.default_rng(6).standard_normal((N, 8 * N)).astype(kind)
    rows[0, :4] = [300, -300, np.inf, np.nan]

    def step(a: jax.Array) -> jax.Array:
        if name == "psum_scatter":
            return jnp.tile(lax.psum_scatter(a, "x", tiled=True), N)
        return getattr(lax, name)(a, "x")

    got, compiled = on_rows(mesh, in_loop(step), rows)
    combine = {"pmax": np.maximum, "pmin": np.minimum}.get(name, np.add)
    want, once = rows, None
    for _ in range(STEPS):
        wide = reduced(want.astype(np.float32), combine).astype(kind)
        if once is None and combine is np.add:
            once = reduced(want, lambda a, b: (a + b).astype(kind))
            assert not np.array_equal(once.view(np.int16), wide.view(np.int16))
        if name == "psum_scatter":
            parts = np.split(wide[0], N)
            wide = np.stack([np.concatenate([part] * N) for part in parts])
        want = wide
    assert got.dtype == kind
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    assert is_native(compiled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "combine"), [("pmin", np.minimum), ("pmax", np.maximum)])
def test_extremes(mesh: Mesh, name: str, combine: Any, dtype: str) -> None:
    """NaN wherever a device has it."""
    with jax.enable_x64(True):
        rows = np.random.default_rng(2).integers(-100, 100, (N, 6)).astype(dtype)
        if np.dtype(dtype).kind == "f":
            rows[2, 1] = rows[0, 4] = np.nan
        got, compiled = on_rows(mesh, in_loop(lambda a: getattr(lax, name)(a, "x")), rows)
    np.testing.assert_array_equal(got, reduced(rows, combine))
    assert is_native(compiled)


@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "bool", "complex64", "float8_e4m3fn"])
@pytest.mark.parametrize("axis", [0, 1])
def test_data_that_moves(mesh: Mesh, dtype: str, axis: int) -> None:
    """Gather, exchange and permute, along the leading and an inner dimension; every type of whole bytes."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rows = np.random.default_rng(3).integers(0, 2, (N, N, 2 * N)).astype(kind)

    def step(a: jax.Array) -> jax.Array:
        lost = lax.ppermute(lax.ppermute(a, "x", RING), "x", PAIRS)
        gathered = lax.all_gather(lost, "x", axis=axis, tiled=True)
        begin = (lax.axis_index("x") ^ 2) * a.shape[axis]
        other = lax.dynamic_slice_in_dim(gathered, begin, a.shape[axis], axis)
        return lax.all_to_all(other, "x", axis, axis, tiled=True)

    got, compiled = on_rows(mesh, in_loop(step), rows)
    want = rows
    for _ in range(STEPS):
        round_ = np.roll(want, 1, axis=0)
        lost = np.zeros_like(round_)
        for source, target in PAIRS:
            lost[target] = round_[source]
        parts = [np.split(lost[d ^ 2], N, axis) for d in range(N)]
        want = np.stack([np.concatenate([p[d] for p in parts], axis) for d in range(N)])
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    assert is_native(compiled)


@pytest.mark.parametrize("axis", [0, 1])
def test_reduce_scatter(mesh: Mesh, axis: int) -> None:
    rows = np.random.default_rng(4).integers(0, 50, (N, 8, 12)).astype(np.int32)

    def step(a: jax.Array) -> jax.Array:
        part = lax.psum_scatter(a, "x", scatter_dimension=axis, tiled=True)
        return a + jnp.concatenate([part] * N, axis)

    got, compiled = on_rows(mesh, in_loop(step), rows)
    want = rows
    for _ in range(STEPS):
        parts = np.split(want.sum(0, dtype=np.int32), N, axis)
        want = want + np.stack([np.concatenate([p] * N, axis) for p in parts])
    np.testing.assert_array_equal(got, want)
    assert is_native(compiled)


def test_several_operands_and_groups(devices: list[jax.Device]) -> None:
    """A reduction of several arrays at once, over each axis of a mesh in turn: groups differ by site."""
    mesh = Mesh(np.array(devices).reshape(2, 2), ("a", "b"))
    spec = PartitionSpec(("a", "b"))

    def f(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(_: Any, c: Any) -> Any:
            first, second = lax.psum(c, "a")
            return second + lax.axis_index("a"), lax.psum(first, "b")

        return lax.fori_loop(0, STEPS, step, (x, y))

    whole = jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec), check_vma=False)
    )
    x, y = np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32) * 10
    compiled = whole.lower(x, y).compile()
    got = jax.tree.map(everywhere, compiled(x, y))
    for _ in range(STEPS):
        first, second = (np.tile(v.reshape(2, 2).sum(0), 2) for v in (x, y))
        x, y = second + np.array([0, 0, 1, 1]), np.repeat(first.reshape(2, 2).sum(1), 2)
    np.testing.assert_array_equal(got[0], x)
    np.testing.assert_array_equal(got[1], y)
    assert is_native(compiled)


def test_groups_that_leave_a_loop_at_different_times(devices: list[jax.Device]) -> None:
    """A group goes round as often as its own sum says, and takes its branch by it."""
    mesh = Mesh(np.array(devices).reshape(2, 2), ("a", "b"))
    spec = PartitionSpec(("a", "b"))

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(c: Any) -> Any:
            total, n = c
            return lax.psum(total, "b"), n + 1

        total, n = lax.while_loop(lambda c: c[0][0] < 100, step, (x, jnp.zeros(1, jnp.int32)))
        total = lax.cond(
            total[0] > 120, lambda t: lax.psum(t, "b"), lambda t: lax.pmax(t, "b") - 1, total
        )
        return total, n

    whole = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    compiled = whole.lower(np.zeros(4, np.int32)).compile()
    total, n = compiled(np.array([3, 3, 32, 32], np.int32))
    # 3, 6, 12, …, 192 in six rounds; 32, 64, 128 in two.
    np.testing.assert_array_equal(everywhere(n), [6, 6, 2, 2])
    np.testing.assert_array_equal(everywhere(total), [384, 384, 256, 256])
    assert is_native(compiled)


@pytest.mark.thorough
def test_a_condition_that_communicates_alone(mesh: Mesh) -> None:
    """The body has no collective, the devices have different values, and all leave together every time."""

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def stays(c: Any) -> jax.Array:
            return lax.pmax(c[0].max(), "x") < 50

        return lax.while_loop(stays, lambda c: (c[0] + 1, c[1] + 1), (x, jnp.int32(0)))

    rows = np.random.default_rng(5).random((N, 16), np.float32)
    for _ in range(20):
        (got, rounds), compiled = on_rows(mesh, f, rows)
        np.testing.assert_array_equal(rounds, [50] * N)
        np.testing.assert_allclose(got, rows + 50, rtol=1e-6)
    assert is_native(compiled)


def test_a_device_that_leaves_a_group_behind_is_an_error(mesh: Mesh) -> None:
    """Nobody waits for ever, and the devices can be used again."""

    def f(x: jax.Array) -> jax.Array:
        rounds = lax.axis_index("x") + 1
        return lax.fori_loop(0, rounds, lambda _, a: lax.psum(a, "x"), x)

    with pytest.raises(Exception, match=r"all-reduce .*devices came"):
        on_rows(mesh, f, np.ones((N, 2), np.float32))
    got, _ = on_rows(mesh, in_loop(lambda a: lax.psum(a, "x")), np.ones((N, 2), np.float32))
    np.testing.assert_array_equal(got, np.full((N, 2), 4.0**STEPS))


def test_counts_are_those_of_a_walk(mesh: Mesh) -> None:
    """A sum of 12 bytes: each device sends to the others; a permute: one message each. Seven of both."""

    def f(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 7, lambda _, a: lax.ppermute(lax.psum(a, "x"), "x", RING), x)

    before = stretto.stats()
    _, compiled = on_rows(mesh, f, np.ones((N, 3), np.float32))
    after = stretto.stats()
    assert is_native(compiled)
    assert after.collectives - before.collectives == 14
    assert after.messages - before.messages == 7 * (N + N)
    assert after.nbytes - before.nbytes == 7 * (N + N) * 12


def test_what_nobody_reads_stays_unsent(mesh: Mesh) -> None:
    """What the last of seven rounds sends, in each of two outer ones, along two rings."""
    back = [(target, source) for source, target in RING]

    def f(x: jax.Array, y: jax.Array) -> Any:
        def step(k: Any, carry: Any) -> Any:
            total, a, b = carry
            total = total + a + jnp.where(k > 0, b, 0)
            return total, lax.ppermute(a, "x", RING), lax.ppermute(y * (k + 1), "x", back)

        def outer(_: Any, total: jax.Array) -> jax.Array:
            return lax.fori_loop(0, 7, step, (total, x, y))[0]

        return lax.fori_loop(0, 2, outer, x)

    rows = np.arange(3 * N, dtype=np.float32).reshape(N, 3)
    others = rows + 1
    before = stretto.stats()
    got, compiled = on_rows(mesh, f, rows, others)
    after = stretto.stats()
    expected = rows
    for k in range(14):
        expected = expected + np.roll(rows, k % 7, axis=0) + k % 7 * np.roll(others, -1, axis=0)
    np.testing.assert_array_equal(got, expected)
    assert is_native(compiled)
    if jax.process_count() > 1:
        return  # each counts its own messages, and what gathers the results
    assert after.collectives - before.collectives == 2 * 7 * 2
    assert after.messages - before.messages == 2 * 6 * 2 * N
    assert after.skipped - before.skipped == 2 * 2 * N
    assert after.nbytes - before.nbytes == (after.messages - before.messages) * 12


def test_pairs_that_differ_in_what_they_skip(mesh: Mesh) -> None:
    """Each device reads what came in the iteration of its number, and nothing else: the walk's."""

    def f(x: jax.Array) -> jax.Array:
        def step(k: Any, carry: Any) -> Any:
            total, a = carry
            total = total + jnp.where(k == lax.axis_index("x") + 1, a, 0)
            return total, lax.ppermute(x * (k + 1), "x", RING)

        return lax.fori_loop(0, N + 1, step, (x * 0, x))[0]

    rows = np.arange(1, 3 * N + 1, dtype=np.float32).reshape(N, 3)
    before = stretto.stats()
    got, compiled = on_rows(mesh, f, rows)
    after = stretto.stats()
    reads = np.arange(1, N + 1)[:, None]
    np.testing.assert_array_equal(got, np.roll(rows, 1, axis=0) * reads)
    counted = after.messages - before.messages, after.skipped - before.skipped
    assert jax.process_count() > 1 or counted == (N, N * N)
    (why, *_) = stretto.explain(compiled).data["walked"].values()
    assert "it is skipped in some iterations" in why


def test_denormal_numbers_are_zeros_on_each_thread(mesh: Mesh) -> None:
    """As they are in XLA's own threads, also in those that run a device on once its collective is done."""

    def step(row: jax.Array) -> jax.Array:
        moved = lax.ppermute(row, "x", RING)
        return moved.at[1].add((moved[0] == 0).astype(row.dtype))

    tiny = np.float32(1e-42)
    got, compiled = on_rows(mesh, in_loop(step), np.tile(np.float32([tiny, 0]), (N, 1)))
    np.testing.assert_array_equal(got, np.tile(np.float32([tiny, STEPS]), (N, 1)))
    assert is_native(compiled)


def test_a_donated_argument_is_used_up(mesh: Mesh) -> None:
    spec = PartitionSpec("x")
    f = jax.shard_map(in_loop(lambda a: lax.psum(a, "x")), mesh=mesh, in_specs=spec, out_specs=spec,
                      check_vma=False)  # fmt: skip
    given = jax.device_put(np.ones(4 * N, np.float32), NamedSharding(mesh, spec))
    got = jax.jit(f, donate_argnums=0)(given)
    np.testing.assert_array_equal(everywhere(got), np.full(4 * N, 4.0**STEPS))
    assert given.is_deleted()


@pytest.mark.parametrize("donated", [(0, 1), (1,), (0,)])
def test_an_argument_that_is_given_back_as_it_came(mesh: Mesh, donated: tuple[int, ...]) -> None:
    """As a state of training of which a step leaves a part. Donated or not, others can restore the program,
    as from a compilation cache."""
    spec = PartitionSpec("x")
    a, b = (
        jax.device_put(np.arange(4 * N, dtype=np.float32) + k, NamedSharding(mesh, spec))
        for k in range(2)
    )
    f = jax.jit(lambda a, b: (a + a.sum(), b, a.sum()), donate_argnums=donated)
    compiled = f.lower(a, b).compile()
    assert is_native(compiled)
    stored = serialize_executable.serialize(compiled)
    restored = serialize_executable.deserialize_and_load(
        *stored, backend="stretto", execution_devices=list(mesh.devices.flat)
    )
    total = np.arange(4 * N).sum()
    for run in (compiled, restored):
        given = a + 0, b + 0
        found = run(*given)
        np.testing.assert_array_equal(everywhere(found[0]), np.arange(4 * N) + total)
        np.testing.assert_array_equal(everywhere(found[1]), np.arange(4 * N) + 1)
        assert found[2] == total
        assert [g.is_deleted() for g in given] == [k in donated for k in range(2)]


def test_native_and_walk_beside_each_other(mesh: Mesh) -> None:
    """A loop of large collectives keeps the walk; the small loop inside of it is one segment."""

    def f(x: jax.Array) -> jax.Array:
        def outer(_: Any, a: jax.Array) -> jax.Array:
            large = lax.psum(jnp.tile(a, LARGE), "x")[: a.size] * 0.25
            return lax.fori_loop(0, 5, lambda _, b: lax.psum(b, "x") * 0.25, large + 1)

        return lax.fori_loop(0, STEPS, outer, x)

    rows = np.arange(N, dtype=np.float32)[:, None]
    got, compiled = on_rows(mesh, f, rows)
    want = rows.mean() + 1 + (STEPS - 1)
    np.testing.assert_allclose(got, np.full((N, 1), want), rtol=1e-6)
    explained = stretto.explain(compiled)
    assert "sites (" in str(explained.program) and "start " in str(explained.program)
    by_size = {
        c["bytes"]: c.get("called_by") for c in explained.data["collectives"] if "bytes" in c
    }
    assert by_size == {4 * LARGE: None, 4: "compiled code"}
    program, loop = explained.data["walked"]
    assert program == "jit__lambda" and loop.startswith("while")
    for why in explained.data["walked"].values():
        assert f"{4 * LARGE} bytes" in why and why in str(explained)


def walked_instructions(compiled: Any) -> list[str]:
    """First words of the instructions that the walk has, but for what is freed."""
    program = str(stretto.explain(compiled).program)
    body = program[program.index("\nbody") :].splitlines()[2:-2]
    return [line.split()[0] for line in body if line.split()[0] != "free"]


@pytest.mark.parametrize(("small_ones", "native"), [(20, True), (0, False)])
def test_a_larger_collective_is_native_among_many(
    mesh: Mesh, small_ones: int, native: bool
) -> None:
    """One of 5 MB takes compiled code longer than the walk, unless that has many others to walk."""
    size = 1_250_000

    def f(x: jax.Array) -> jax.Array:
        def step(_: Any, a: jax.Array) -> jax.Array:
            a = lax.psum(jnp.full(size, 0.25) * a[0], "x")[size - 3 :] + lax.axis_index("x")
            for k in range(small_ones):
                a = lax.ppermute(a, "x", RING) * 0.5 + k
            return a

        return lax.fori_loop(0, STEPS, step, x)

    rows = np.arange(3 * N, dtype=np.float32).reshape(N, 3)
    got, compiled = on_rows(mesh, f, rows)
    a = rows
    for _ in range(STEPS):
        a = np.full((N, 3), 0.25 * a[:, 0].sum(), np.float32) + np.arange(N)[:, None]
        for k in range(small_ones):
            a = np.roll(a, 1, axis=0) * 0.5 + k
    np.testing.assert_allclose(got, a, rtol=1e-5)
    assert is_native(compiled) == native
    if not native:
        (why, _) = stretto.explain(compiled).data["walked"].values()
        assert f"{4 * size} bytes" in why and why.endswith("for too little beside it")


def test_stretches_around_what_is_walked(mesh: Mesh) -> None:
    """Rounds of small collectives before and behind a large one; what goes past it on both sides arrives."""
    size = LARGE

    def f(x: jax.Array, kept: jax.Array, given: jax.Array) -> Any:
        a, total = x, given
        for k in range(10):
            a = lax.psum(a * 0.5, "x") + lax.axis_index("x") + k
            total = total + a
        large = lax.psum(jnp.full(size, 1.0) * a[0], "x")
        for _ in range(10):
            a = lax.ppermute(a, "x", RING) + large[:3] * kept
            total = total * 0.5 + a
        return a, total, large[size // 2 :][:2], kept

    rows = np.arange(3 * N, dtype=np.float32).reshape(N, 3)
    kept, given = np.full((N, 3), 0.25, np.float32), np.ones((N, 3), np.float32)
    got, compiled = on_rows(mesh, f, rows, kept, given)
    ids = np.arange(N)[:, None]
    a, total = rows, given
    for k in range(10):
        a = reduced(a * 0.5, np.add) + ids + k
        total = total + a
    large = np.float32(a[:, 0].sum())
    for _ in range(10):
        a = np.roll(a, 1, axis=0) + large * kept
        total = total * 0.5 + a
    for have, want in zip(got, (a, total, np.full((N, 2), large), kept), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5)
    assert walked_instructions(compiled) == ["run", "start", "wait", "run"]
    (why,) = stretto.explain(compiled).data["walked"].values()
    assert f"{4 * size} bytes" in why


def test_stretches_of_equal_layers_are_compiled_once(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's stretch calls collectives of its own, by the same code."""
    size, layers = LARGE, 5
    compiled_together: list[bytes] = []
    original = XlaCpuEngine.compile_together

    def compile_together(self: XlaCpuEngine, segment: Any, *rest: Any, **names: Any) -> Any:
        compiled_together.append(segment.module)
        return original(self, segment, *rest, **names)

    monkeypatch.setattr(XlaCpuEngine, "compile_together", compile_together)

    def f(x: jax.Array) -> jax.Array:
        for _ in range(layers):
            for k in range(10):
                x = lax.psum(x * 0.5, "x") * 0.5 + lax.axis_index("x") + k
            x = lax.psum(jnp.full(size, 0.125) * x[0], "x")[:3] + x
        return x

    rows = np.arange(3 * N, dtype=np.float32).reshape(N, 3)
    got, compiled = on_rows(mesh, f, rows)
    want = rows
    for _ in range(layers):
        for k in range(10):
            want = reduced(want * 0.5, np.add) * 0.5 + np.arange(N)[:, None] + k
        want = np.float32(0.125) * want[:, 0].sum() + want
    np.testing.assert_allclose(got, want, rtol=1e-5)
    program = str(stretto.explain(compiled).program)
    assert len(re.findall(r"sites \(", program)) == layers
    assert len(compiled_together) == len(set(compiled_together)) <= layers - 2


def test_one_collective_is_enough(mesh: Mesh) -> None:
    rows = np.arange(2 * N, dtype=np.float32).reshape(N, 2)
    got, compiled = on_rows(mesh, lambda x: lax.psum(x, "x"), rows)
    np.testing.assert_array_equal(got, np.tile(rows.sum(0), (N, 1)))
    assert walked_instructions(compiled) == ["run"]


def test_what_a_program_computes_between_start_and_done_stays_there(mesh: Mesh) -> None:
    futures: list[bool] = []  # jax 0.12 has none here: it makes one op of start and done

    def f(x: jax.Array) -> jax.Array:
        future: Any = parallel.psum_start(x, "x")
        futures.append(hasattr(future, "done"))
        y = jnp.tanh(x * x)
        return y + (future.done() if futures[-1] else future)

    rows = np.linspace(-1, 1, 6 * N, dtype=np.float32).reshape(N, 6)
    got, compiled = on_rows(mesh, f, rows)
    np.testing.assert_allclose(got, np.tanh(rows * rows) + rows.sum(0), rtol=1e-5)
    between = ["start", "run", "wait"] if all(futures) else []
    assert walked_instructions(compiled)[1:4] == between


def test_results_that_nobody_reads_yet_leave_one_segment(mesh: Mesh) -> None:
    def f(x: jax.Array) -> list[jax.Array]:
        x = x[0]
        sums = []
        for _ in range(3):
            sums.append(lax.psum_scatter(jnp.sin(x), "x", tiled=True))
            x = jnp.tanh(x + lax.pmax(x, "x"))
        return [*sums, x]

    spec = PartitionSpec("x")
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))
    rows = np.linspace(-1, 1, N * N, dtype=np.float32).reshape(N, N)
    placed = jax.device_put(rows, NamedSharding(mesh, spec))
    *sums, last = map(np.asarray, mapped(placed))
    for got in sums:
        np.testing.assert_allclose(got, np.sin(rows).sum(0), rtol=1e-5, atol=1e-5)
        rows = np.tanh(rows + rows.max(0))
    np.testing.assert_allclose(last, rows.reshape(-1), rtol=1e-5)
    assert walked_instructions(mapped.lower(placed).compile()) == ["run"]


@pytest.mark.parametrize("loops", [False, True])
def test_what_loops_run_is_one_kernel_and_what_runs_once_is_xlas(mesh: Mesh, loops: bool) -> None:
    def step(x: jax.Array) -> jax.Array:
        y = jnp.tanh(jnp.sin(x) * 2 + 1) * jnp.exp(-x * x)
        return lax.pcast(lax.psum(y, "x"), "x", to="varying") * 0.25 + x

    def f(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, x: step(x), x) if loops else step(x)

    rows = np.linspace(-2, 2, 6 * N, dtype=np.float32).reshape(N, 6)
    before = set(executables)
    got, _ = on_rows(mesh, f, rows)
    modules = [s.module for e in set(executables) - before for s in e.compiled.program.segments]
    assert any(b"xla_cpu_small_call" in module for module in modules) == loops
    want = rows
    for _ in range(3 if loops else 1):
        y = np.tanh(np.sin(want) * 2 + 1) * np.exp(-want * want)
        want = y.sum(0) * np.float32(0.25) + want
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_results_of_several_runs_of_compiled_code_are_taken_together(mesh: Mesh) -> None:
    """And so are those of which some devices' parts come from elsewhere."""
    spec, sharding = PartitionSpec("x"), NamedSharding(mesh, PartitionSpec("x"))
    mapped = jax.shard_map(lambda x: lax.psum(x, "x") + x, mesh=mesh, in_specs=spec, out_specs=spec)
    step = jax.jit(mapped)
    rows = np.arange(2 * N, dtype=np.float32).reshape(N, 2)
    x = y = jax.device_put(rows, sharding)
    want = rows
    for _ in range(3):
        x, want = step(x), want.sum(0) + want
        np.testing.assert_array_equal(np.asarray(x), want)
        y = step(y)  # not awaited between
    np.testing.assert_array_equal(np.asarray(y), want)
    parts = [s.data for s in x.addressable_shards]
    parts[1] = jax.device_put(np.zeros((1, 2), np.float32), parts[1].device)
    mixed = jax.make_array_from_single_device_arrays(x.shape, sharding, parts)
    want[1] = 0
    np.testing.assert_array_equal(np.asarray(step(mixed)), want.sum(0) + want)
    backwards = NamedSharding(Mesh(mesh.devices[::-1], ("x",)), spec)
    turned = jax.make_array_from_single_device_arrays(x.shape, backwards, parts[::-1])
    again = jax.shard_map(
        lambda x: lax.psum(x, "x") + x, mesh=backwards.mesh, in_specs=spec, out_specs=spec
    )
    np.testing.assert_array_equal(np.asarray(jax.jit(again)(turned)), (want.sum(0) + want)[::-1])


def test_a_donated_argument_of_a_stretch(mesh: Mesh) -> None:
    spec = PartitionSpec("x")

    def f(a: jax.Array, b: jax.Array) -> Any:
        for _ in range(9):
            a = lax.psum(a, "x") * 0.25 + 1
        return a, lax.psum(b, "x")

    mapped = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    sharding = NamedSharding(mesh, spec)
    given = jax.device_put(np.ones(4 * N, np.float32), sharding)
    large = jax.device_put(np.ones(LARGE * N, np.float32), sharding)
    compiled = jax.jit(mapped, donate_argnums=0).lower(given, large).compile()
    a, b = compiled(given, large)
    np.testing.assert_array_equal(everywhere(a), np.full(4 * N, 10.0))
    np.testing.assert_array_equal(everywhere(b), np.full(LARGE * N, 4.0))
    assert given.is_deleted() and not large.is_deleted()
    assert "run" in walked_instructions(compiled) and "start" in walked_instructions(compiled)


def test_what_is_refused_says_why() -> None:
    def collective(kind: Kind, dtype: str, **what: Any) -> Collective:
        type_ = TensorType(dtype, (4,))
        return Collective(kind, (type_,), (type_,), **what)

    add = Reduction.SUM
    assert refusal(collective(Kind.ALL_REDUCE, "f32", groups=((0, 1),), reduction=add)) == ""
    narrow = collective(Kind.ALL_REDUCE, "f8e5m2", groups=((0, 1),), reduction=add)
    assert "f8e5m2" in refusal(narrow)
    assert "packed" in refusal(collective(Kind.PERMUTE, "s4", pairs=((0, 1),)))
    assert "executor" in refusal(collective(Kind.SEND, "f32", pairs=((0, 1),)))
    skipped = collective(Kind.PERMUTE, "f32", pairs=((0, 1),), valid_iterations=((0, 3),))
    assert "skipped" in refusal(skipped)
    assert "program" in refusal(collective(Kind.ALL_REDUCE, "f32", groups=((0, 1),), reducer=0))
    assert not can_reduce("minimum", "c64") and not can_reduce("and", "f32")


def test_devices_that_pairs_join() -> None:
    assert connected([(0, 1), (1, 2), (5, 4), (3, 3)]) == [(0, 1, 2), (3,), (4, 5)]


def test_results_go_on_as_they_came_or_one_by_one(mesh: Mesh) -> None:
    """Results of a run on all devices are arguments of the next one, of a program whose mesh has the devices
    in another order, and, one by one, of programs on single devices; donated at last."""
    spec = PartitionSpec("x")
    sharding = NamedSharding(mesh, spec)

    def step(a: jax.Array, b: jax.Array) -> Any:
        body = lambda _, v: (lax.psum(v[1], "x") * 0.25, v[0] + lax.axis_index("x"))  # noqa: E731
        return lax.fori_loop(0, 2, body, (a, b))

    def mapped(f: Callable[..., Any], over: Mesh = mesh, **more: Any) -> Any:
        return jax.jit(
            jax.shard_map(f, mesh=over, in_specs=spec, out_specs=spec, check_vma=False), **more
        )

    def by_hand(a: Rows, b: Rows) -> tuple[Rows, Rows]:
        for _ in range(2):
            a, b = reduced(b, np.add) * 0.25, a + np.arange(N)[:, None]
        return a, b

    rows = np.arange(2.0 * N, dtype=np.float32).reshape(N, 2)
    want = (rows, rows + 1)
    a, b = (jax.device_put(np.ravel(r), sharding) for r in want)
    run, gives_up = mapped(step), mapped(step, donate_argnums=(0, 1))
    for k in range(4):
        a, b = run(b, a) if k % 2 else run(a, b)
        want = by_hand(*(want[::-1] if k % 2 else want))
    for shard in a.addressable_shards:  # one device each
        row = shard.index[0].start // 2
        np.testing.assert_allclose(jnp.cos(shard.data), np.cos(want[0][row]), rtol=1e-6)
    backwards = Mesh(mesh.devices[::-1], ("x",))
    a_back, b_back = (
        jax.make_array_from_single_device_arrays(
            v.shape, NamedSharding(backwards, spec), [s.data for s in v.addressable_shards[::-1]]
        )
        for v in (a, b)
    )
    results = mapped(step, backwards)(a_back, b_back)
    for have, expected in zip(results, by_hand(want[0][::-1], want[1][::-1]), strict=True):
        np.testing.assert_allclose(everywhere(have), np.ravel(expected), rtol=1e-6)
    c, d = gives_up(a, b)
    assert a.is_deleted() and b.is_deleted()
    for have, expected in zip((c, d), by_hand(*want), strict=True):
        np.testing.assert_allclose(everywhere(have), np.ravel(expected), rtol=1e-6)


@pytest.mark.thorough
def test_calls_that_are_more_than_a_trace_holds_are_told(tmp_path: Path) -> None:
    code = """
import jax, numpy as np, stretto
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
body = lambda _, a: lax.psum(a, "x") * 0.5
f = jax.jit(jax.shard_map(lambda a: lax.fori_loop(0, 70_000, body, a), mesh=mesh, in_specs=P("x"),
                          out_specs=P("x"), check_vma=False))
for _ in range(2):
    f(np.ones(2, np.float32)).block_until_ready()
print(stretto.stats().collectives)
"""
    environment = os.environ | {
        "JAX_PLATFORMS": "stretto",
        "STRETTO_LOCAL_DEVICES": "2",
        "STRETTO_TRACE": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == 140_000
    rows = 1 << 16
    assert done.stderr.count("not in the trace") == 1
    assert f"70000 times in one run: the last {70_000 - rows} are counted" in done.stderr
