"""The ranks' side of `test_native_ranks`: the cases of `test_native` with devices in several processes.

Every rank compares the results of all devices. Prints what failed, and ends with 1 if something did.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np
from jax.sharding import Mesh
from mpi4py import MPI

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import test_native as cases
import test_native_callbacks as callbacks

import stretto
from stretto.collectives.wires import PARTED
from stretto.plugin.client import clients
from stretto.runtime.execution import dispatch, loaded
from stretto.runtime.execution.regions import Region


def chosen() -> dict[str, Callable[[], None]]:
    devices = jax.devices()
    assert len(devices) == cases.N and jax.process_count() > 1
    mesh = Mesh(np.array(devices), ("x",))
    sums = ["int8", "uint32", "float64", "complex64", "bool"]
    return {
        **{f"sums of {d}": partial(cases.test_sums, mesh, d) for d in sums},
        **{
            f"{name} of {d}": partial(cases.test_extremes, mesh, name, f, d)
            for d in ("int16", "float32")
            for name, f in (("pmin", np.minimum), ("pmax", np.maximum))
        },
        **{
            f"moves {d} along {axis}": partial(cases.test_data_that_moves, mesh, d, axis)
            for d, axis in (("int32", 0), ("bfloat16", 1))
        },
        **{
            f"{name} of halves": partial(
                cases.test_halves_are_accumulated_in_f32, mesh, name, "bfloat16"
            )
            for name in ("psum", "psum_scatter")
        },
        **{f"scatter along {a}": partial(cases.test_reduce_scatter, mesh, a) for a in (0, 1)},
        "several operands": partial(cases.test_several_operands_and_groups, devices),
        "groups that leave": partial(
            cases.test_groups_that_leave_a_loop_at_different_times, devices
        ),
        "unsent": partial(cases.test_what_nobody_reads_stays_unsent, mesh),
        "pairs that differ": partial(cases.test_pairs_that_differ_in_what_they_skip, mesh),
        "condition": partial(cases.test_a_condition_that_communicates_alone, mesh),
        "donation": partial(cases.test_a_donated_argument_is_used_up, mesh),
        "beside a walk": partial(cases.test_native_and_walk_beside_each_other, mesh),
        "denormal numbers": partial(cases.test_denormal_numbers_are_zeros_on_each_thread, mesh),
        "late": partial(late, mesh),
        "middling": partial(middling, mesh, donated=False),
        "donated": partial(middling, mesh, donated=True),
        "in parts": partial(middling, mesh, donated=False, size=PARTED // 4 + 3),
        "few iterations": partial(looped, mesh, 5, True),
        "few iterations, donated": partial(looped, mesh, 5, True, donated=True),
        "a loop beside a sum": partial(beside_a_sum, mesh, 20, True),
        "a long loop beside a sum": partial(beside_a_sum, mesh, 600, False),
        "many iterations": partial(looped, mesh, 300, False),
        **({"together": partial(together, mesh)} if jax.local_device_count() > 1 else {}),
        "large": partial(large, mesh),
        "code of the user's": partial(users_code, mesh),
        "functions in a loop": partial(callbacks.test_a_function_is_called_in_each_iteration, mesh),
        "functions that meet": partial(
            callbacks.test_functions_of_several_devices_may_wait_for_each_other, mesh
        ),
        "functions in a branch": partial(callbacks.test_what_a_branch_calls_on_some_devices, mesh),
        "functions in a condition": partial(callbacks.test_a_loop_that_nobody_counts, mesh),
        "functions that run programs": partial(
            callbacks.test_a_function_that_runs_programs_with_collectives, mesh
        ),
    }


def before_the_others(compiled: Callable[[jax.Array], jax.Array], given: jax.Array) -> jax.Array:
    """What a program gives that rank 0 calls first: its results are on their way then, and the others are
    told to come."""
    world = MPI.COMM_WORLD
    if world.Get_rank() > 0:
        world.recv(source=0)
        return compiled(given)
    got = compiled(given)
    assert not got.is_ready()
    for other in range(1, world.Get_size()):
        world.send(None, other)
    return got


def late(mesh: Mesh) -> None:
    """Rank 0 is told that its results are on their way while the others have not come. They come when told;
    what it had sent and received before counts once."""
    n = len(mesh.devices)

    def f(x: jax.Array) -> jax.Array:
        return jax.lax.psum(jax.lax.psum(x, "x") * x, "x") + jax.lax.ppermute(x, "x", cases.RING)

    rows = np.arange(n * 3, dtype=np.float32).reshape(n, 3)
    spec = jax.sharding.PartitionSpec("x")
    placed = jax.make_array_from_callback(
        rows.shape, jax.sharding.NamedSharding(mesh, spec), rows.__getitem__
    )
    whole = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))
    compiled = whole.lower(placed).compile()
    if jax.process_count() == n:
        assert cases.is_native(compiled), stretto.explain(compiled)
    compiled(placed).block_until_ready()
    expected = rows.sum(0) ** 2 + np.roll(rows, 1, 0)
    before = stretto.stats()
    here = Region.run_here
    with (
        # For the thread that has ended the run before.
        patch.object(dispatcher(), "patience", 30.0),
        patch.object(Region, "run_here", autospec=True, side_effect=here) as alone,
    ):
        for _ in range(5):
            got = before_the_others(compiled, placed)
            for shard in got.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[shard.index])
    assert alone.call_count == (5 if jax.process_count() == n else 0)
    after = stretto.stats()
    assert after.collectives - before.collectives == 5 * 3
    assert after.seconds > before.seconds


def middling(mesh: Mesh, *, donated: bool, size: int = 1 << 15) -> None:
    """A sum of 128 KiB among processes of one host: in the thread of the caller, also where others are late,
    and rank 0 gives it up."""
    rows = np.arange(len(mesh.devices) * size, dtype=np.float32).reshape(-1, size)
    check_late(
        mesh, lambda x: jax.lax.psum(x, "x") - x, rows, rows.sum(0) - rows, 1, donated=donated
    )


def looped(mesh: Mesh, trips: int, here: bool, *, donated: bool = False) -> None:
    """A loop of few sums is run in the thread of the caller, which gives it up before the first alone."""
    n = len(mesh.devices)
    rows = np.arange(n * 3, dtype=np.float32).reshape(n, 3)

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        return x + jax.lax.psum(x, "x") / (2 * n) + jax.lax.ppermute(x, "x", cases.RING)

    def f(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, trips, step, x)

    want = rows
    for _ in range(trips):
        want = want + want.sum(0) / (2 * n) + np.roll(want, 1, 0)
    check_late(mesh, f, rows, want, 2 * trips, here=here, donated=donated, rtol=1e-5)


def beside_a_sum(mesh: Mesh, trips: int, here: bool) -> None:
    """Sums before and behind a loop that communicates nothing: each is called once, however often the loop
    goes round, and gives its results again where the run is made anew."""
    n = len(mesh.devices)
    rows = np.arange(n * 3, dtype=np.float32).reshape(n, 3)

    def f(x: jax.Array) -> jax.Array:
        total = jax.lax.psum(x, "x")
        turned = jax.lax.fori_loop(0, trips, lambda i, a: a + i * x, total)
        return jax.lax.psum(turned, "x")

    want = n * rows.sum(0) + trips * (trips - 1) // 2 * rows.sum(0)
    check_late(mesh, f, rows, np.tile(want, (n, 1)), 2, here=here)


def check_late(
    mesh: Mesh,
    f: Callable[[jax.Array], jax.Array],
    rows: np.ndarray,
    want: np.ndarray,
    collectives: int,
    *,
    here: bool = True,
    donated: bool = False,
    rtol: float = 0.0,
) -> None:
    """Four runs of ``f`` of each device's row, which calls so many collectives; in two the others are late.

    ``here``: whether the caller's thread runs it, where each process has one device. What is donated is there
    for a run that is made anew.
    """
    spec = jax.sharding.PartitionSpec("x")
    sharding = jax.sharding.NamedSharding(mesh, spec)

    def place() -> jax.Array:
        return jax.make_array_from_callback(rows.shape, sharding, rows.__getitem__)

    whole = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(whole, donate_argnums=0 if donated else ()).lower(place()).compile()
    compiled(place()).block_until_ready()
    before = stretto.stats()
    run_here = Region.run_here
    with patch.object(Region, "run_here", autospec=True, side_effect=run_here) as alone:
        for late in (False, True, True, False):
            placed = place()
            settle()
            got = before_the_others(compiled, placed) if late else compiled(placed)
            assert placed.is_deleted() == donated
            for shard in got.addressable_shards:
                np.testing.assert_allclose(shard.data, want[shard.index], rtol=rtol)
    one_each = jax.process_count() == len(mesh.devices)
    assert alone.call_count == (4 if here and one_each else 0)
    assert stretto.stats().collectives - before.collectives == 4 * collectives


def together(mesh: Mesh) -> None:
    """Where a process has several devices, the caller begins them all, and polls for them, for a moment."""
    n = len(mesh.devices)
    spec = jax.sharding.PartitionSpec("x")
    rows = np.arange(n * 3, dtype=np.float32).reshape(n, 3)
    placed = jax.make_array_from_callback(
        rows.shape, jax.sharding.NamedSharding(mesh, spec), rows.__getitem__
    )
    whole = jax.shard_map(
        lambda x: jax.lax.psum(x, "x") - x, mesh=mesh, in_specs=spec, out_specs=spec
    )
    compiled = jax.jit(whole).lower(placed).compile()
    compiled(placed).block_until_ready()
    enqueue = dispatch.Dispatcher.enqueue
    with (
        patch.object(dispatcher(), "patience", 30.0),
        patch.object(loaded, "MOMENT", 30.0),
        patch.object(loaded, "AWAITED", 30.0),
        patch.object(
            dispatch.Dispatcher, "enqueue", autospec=True, side_effect=enqueue
        ) as enqueued,
    ):
        for _ in range(3):
            settle()
            got = compiled(placed)
            for shard in got.addressable_shards:
                np.testing.assert_array_equal(shard.data[0], rows.sum(0) - rows[shard.index][0])
    assert not enqueued.called


def large(mesh: Mesh) -> None:
    """Compiled code calls these sums, but not in the caller's thread, which would give them up."""
    n = len(mesh.devices)

    def f(x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = jax.lax.psum(x, "x") / n + 1
        return x

    rows = np.ones((n, 1 << 17), np.float32)
    spec = jax.sharding.PartitionSpec("x")
    placed = jax.make_array_from_callback(
        rows.shape, jax.sharding.NamedSharding(mesh, spec), rows.__getitem__
    )
    whole = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    compiled = whole.lower(placed).compile()
    assert cases.is_native(compiled), stretto.explain(compiled)
    here = Region.run_here
    with patch.object(Region, "run_here", autospec=True, side_effect=here) as alone:
        for _ in range(2):
            for shard in compiled(placed).addressable_shards:
                np.testing.assert_array_equal(shard.data, 9)
    assert not alone.called


def users_code(mesh: Mesh) -> None:
    """A run that the caller's thread gives up is made anew, which would call the user's code again, with the
    effects that it may have. JAX's own has none."""
    from jaxlib.cpu import _lapack

    n = len(mesh.devices)
    _lapack.initialize()
    handler = _lapack.registrations()["lapack_spotrf_ffi"]
    jax.ffi.register_ffi_target("users_code", handler, platform="stretto")

    def f(target: str, a: jax.Array) -> jax.Array:
        results = [jax.ShapeDtypeStruct((1, 1), a.dtype), jax.ShapeDtypeStruct((), np.int32)]
        root = jax.ffi.ffi_call(target, results)(a[:, :1], uplo=np.uint8(ord("L")))[0]
        return jax.lax.psum(root, "x")

    rows = np.full((n, 1), 9, np.float32)
    spec = jax.sharding.PartitionSpec("x")
    placed = jax.make_array_from_callback(
        rows.shape, jax.sharding.NamedSharding(mesh, spec), rows.__getitem__
    )
    for target, runs in (("users_code", 0), ("lapack_spotrf_ffi", 2)):
        whole = jax.shard_map(
            partial(f, target), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        compiled = jax.jit(whole).lower(placed).compile()
        compiled(placed).block_until_ready()
        here = Region.run_here
        with patch.object(Region, "run_here", autospec=True, side_effect=here) as alone:
            for _ in range(2):
                settle()
                for shard in compiled(placed).addressable_shards:
                    np.testing.assert_array_equal(shard.data, 3 * n)
        assert alone.call_count == (runs if jax.process_count() == n else 0), target


def settle() -> None:
    """Wait until the dispatch thread has no turn, as it may have for a moment after a run whose peers were
    late."""
    while not (dispatcher().idle and dispatcher().stream.idle):
        time.sleep(1e-3)


def dispatcher() -> dispatch.Dispatcher:
    (client,) = clients
    return client.executor.dispatcher


def main() -> int:
    failed = 0
    for name, case in chosen().items():
        try:
            case()
        except Exception:
            failed += 1
            print(f"rank {jax.process_index()}: {name}\n{traceback.format_exc()}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
