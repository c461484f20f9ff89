"""Loops without collectives on several devices, which threads share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stretto
from stretto.runtime.cores import usable
from stretto.runtime.execution import compute, loaded
from stretto.runtime.execution.dispatch import Dispatcher

pytestmark = pytest.mark.usefixtures("on_stretto")

N = 4
SPEC = PartitionSpec("x")


def rows_of(devices: list[jax.Device], begin: np.ndarray) -> tuple[Mesh, jax.Array]:
    """A mesh of `N` devices, and an array of which each has an element."""
    mesh = Mesh(np.array(devices[:N]), ("x",))
    sharding = NamedSharding(mesh, SPEC)
    return mesh, jax.make_array_from_callback(begin.shape, sharding, begin.__getitem__)


def on_each(f: Callable[[jax.Array], jax.Array], mesh: Mesh) -> Any:
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False))


def recorded(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls `among` gets of a module, which hands all to it, whatever they take."""
    shared: list[int] = []
    among = module.among

    def record(threads: int, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        shared.append(len(calls))
        return among(threads, calls)

    monkeypatch.setattr(module, "among", record)
    monkeypatch.setattr(compute, "LONG", -1.0)
    return shared


def test_devices_run_a_loop_on_threads(
    devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = recorded(compute, monkeypatch)

    def double(row: jax.Array) -> jax.Array:
        return lax.while_loop(lambda a: a[0] < 1000, lambda a: a * 2, row)

    mesh, rows = rows_of(devices, np.array([1, 3, 5, 2000], np.int32))
    loop = on_each(double, mesh)
    for _ in range(3):
        assert np.asarray(loop(rows)).tolist() == [1024, 1536, 1280, 2000]
    if len(usable()) > 1:
        assert shared == [N] * 3


def nested(row: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, a: lax.fori_loop(0, 5, lambda _, b: b * 2, a + 1), row)


def until(row: jax.Array) -> jax.Array:
    return lax.while_loop(lambda a: a[0] < 1000, lambda a: a * 2 + 1, row)


@pytest.mark.parametrize(
    ("loop", "iterations", "here"),
    [(nested, 3 * (1 + 5), True), (until, -1, False), (lambda row: row + 1, 0, True)],
    ids=["nested", "until", "none"],
)
def test_who_walks_a_loop(
    devices: list[jax.Device],
    monkeypatch: pytest.MonkeyPatch,
    loop: Callable[[jax.Array], jax.Array],
    iterations: int,
    here: bool,
) -> None:
    """The caller walks a program whose loops end soon, as far as their trip counts say."""
    queued: list[str] = []
    enqueue = Dispatcher.enqueue
    monkeypatch.setattr(
        Dispatcher,
        "enqueue",
        lambda self, execution: (queued.append(type(execution).__name__), enqueue(self, execution)),
    )
    begin = np.array([1, 3, 5, 2000], np.int32)
    mesh, rows = rows_of(devices, begin)
    compiled = on_each(loop, mesh)
    (segment,) = stretto.explain(compiled.lower(rows).compile()).program.segments
    assert segment.iterations == iterations
    expected = np.concatenate([np.asarray(loop(begin[i : i + 1])) for i in range(N)])
    for _ in range(2):
        np.testing.assert_array_equal(compiled(rows), expected)
    assert bool(queued) != here


def test_devices_run_what_takes_long_on_threads(
    devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA runs many small kernels in the thread that calls; each device's results are its own."""
    shared = recorded(loaded, monkeypatch)
    many = jax.jit(lambda row: [row + i for i in range(1, 5)])
    begin = np.arange(N, dtype=np.int32)
    _, rows = rows_of(devices, begin)
    for _ in range(3):
        for i, result in enumerate(many(rows), 1):
            for shard in result.addressable_shards:
                assert np.asarray(shard.data).tolist() == [begin[shard.index[0]][0] + i]
    if len(usable()) > 1:
        assert shared == [N] * 3
