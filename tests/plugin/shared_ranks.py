"""Messages through shared memory that a symmetric program does not make; two ranks with one device each, or
with two."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SPEC = PartitionSpec("x")
MESH = Mesh(np.array(jax.devices()), ("x",))


def on_rows(f: Callable[[jax.Array], jax.Array]) -> Callable[[np.ndarray], np.ndarray]:
    """``f`` of each device's row, jitted; gives this process's."""
    whole = jax.jit(jax.shard_map(f, mesh=MESH, in_specs=SPEC, out_specs=SPEC, check_vma=False))

    def run(rows: np.ndarray) -> np.ndarray:
        placed = jax.make_array_from_callback(
            rows.shape, NamedSharding(MESH, SPEC), rows.__getitem__
        )
        (shard,) = whole(placed).addressable_shards
        return np.asarray(shard.data)[0]

    return run


def files() -> int:
    """Files of memory that this process has made."""
    links = (p.readlink() for p in Path("/proc/self/fd").iterdir() if p.is_symlink())
    return sum("memfd:stretto" in str(link) for link in links)


def resident() -> int:
    """Bytes that this process's files of memory take."""
    links = (p for p in Path("/proc/self/fd").iterdir() if p.is_symlink())
    return sum(os.stat(p).st_blocks * 512 for p in links if "memfd:stretto" in str(p.readlink()))


def one_sided() -> None:
    """Rank 0 sends in each iteration and receives nothing, and rank 1 is slower: what was sent is there until
    it is read."""

    def f(x: jax.Array) -> jax.Array:
        def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            given, total = carry
            came = lax.ppermute(given, "x", [(0, 1)])
            slow = lax.fori_loop(0, 50 * lax.axis_index("x"), lambda _, t: t * 1.0000001, total)
            return given + 1, total + came + 0 * slow

        return lax.fori_loop(0, 200, step, (x, x * 0))[1]

    for size in (4, 5000):  # in a stage that is there twice, and once
        rows = np.ones((2, size * 4), np.float32)
        expected = [0, sum(range(1, 201))][jax.process_index()]
        run = on_rows(f)
        for _ in range(3):
            np.testing.assert_array_equal(run(rows), np.full(size * 4, expected, np.float32))


def many_programs() -> None:
    """What programs that are gone had is others'."""
    rows = np.ones((2, 200_000), np.float32)
    counts = []
    for number in range(24):
        run = on_rows(lambda x, n=number: lax.psum(x, "x") + n)
        np.testing.assert_array_equal(run(rows), np.full(200_000, 2 + number, np.float32))
        del run
        jax.clear_caches()
        gc.collect()
        counts.append(files())
    assert max(counts) <= 5, counts
    # The collection above may have freed what held the last program, whose parts hold each other: the next
    # one frees these.
    gc.collect()
    # Before the second one of these begins, the other rank has read what the last one sent.
    for number in range(2):
        on_rows(lambda x, n=number: lax.psum(x, "x") - n)(rows[:, :4])
    if counts[0] > 0:
        assert resident() < rows[0].nbytes // 2, resident()


def far_apart() -> None:
    """Either rank comes late, by more than a caller waits, to programs that the caller began."""
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    run = on_rows(lambda x: lax.psum(lax.psum(x, "x") * (1 + lax.axis_index("x")), "x"))
    expected = rows.sum(0) * 3
    for turn in range(6):
        if jax.process_index() == turn % 2:
            time.sleep(0.02)
        np.testing.assert_array_equal(run(rows), expected)


def forked() -> None:
    """A child of a rank may read arrays, but has no part in the job, and its parent does not notice that it
    asks for one."""
    rows = np.ones((2, 4), np.float32)
    run = on_rows(lambda x: lax.psum(x, "x"))
    run(rows)
    array = jax.device_put(rows[0], jax.local_devices()[0])
    child = os.fork() if jax.process_index() else -1
    if not child:
        signal.alarm(15)
        try:
            np.testing.assert_array_equal(array, rows[0])
            run(rows)
        except jax.errors.JaxRuntimeError as error:
            os._exit(0 if "was forked from rank 1" in str(error) else 3)
        finally:
            os._exit(4)
    for _ in range(20):
        np.testing.assert_array_equal(run(rows), [2, 2, 2, 2])
    if child > 0:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def unevenly() -> None:
    """One rank has two devices of three, whose sites take turns with memory; the other has one, whose runs
    may be given up and resumed."""
    mesh = Mesh(np.array(jax.devices()[:3]), ("x",))

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        moved = lax.ppermute(x, "x", [(i, (i + 1) % 3) for i in range(3)])
        sums = [lax.psum(x + k, "x") for k in range(4)]
        return (*sums, lax.pmax(x, "x"), moved, lax.psum(moved * 2, "x"))

    run = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=SPEC, out_specs=SPEC))
    for size in (3, 40_000):  # in a stage that is there twice, and once
        rows = np.arange(3 * size, dtype=np.float32).reshape(3, size)
        total = rows.sum(0)
        expected = [np.tile(total + 3 * k, (3, 1)) for k in range(4)]
        expected += [np.tile(rows[2], (3, 1)), np.roll(rows, 1, 0), np.tile(total * 2, (3, 1))]
        placed = jax.make_array_from_callback(
            rows.shape, NamedSharding(mesh, SPEC), rows.__getitem__
        )
        for _ in range(3):
            for result, right in zip(run(placed), expected, strict=True):
                for shard in result.addressable_shards:
                    np.testing.assert_array_equal(shard.data, right[shard.index])


def main() -> None:
    shared = os.environ.get("STRETTO_SHARED_MEMORY") != "0"
    one_each = (one_sided, far_apart, forked, many_programs)
    for case in one_each if len(jax.devices()) == 2 else (unevenly,):
        case()
    assert (files() > 0) == shared, files()


if __name__ == "__main__":
    sys.exit(main())
