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


def test_devices_run_a_loop_on_threads(
    devices: list[jax.Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[int] = []
    among = compute.among

    def recorded(threads: int, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        shared.append(len(calls))
        return among(threads, calls)

    monkeypatch.setattr(compute, "among", recorded)
    monkeypatch.setattr(compute, "LONG", -1.0)  # whatever it takes
    spec = PartitionSpec("x")

    def double(row: jax.Array) -> jax.Array:
        return lax.while_loop(lambda a: a[0] < 1000, lambda a: a * 2, row)

    mesh = Mesh(np.array(devices[:N]), ("x",))
    loop = jax.jit(jax.shard_map(double, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    begin = np.array([1, 3, 5, 2000], np.int32)
    rows = jax.make_array_from_callback(begin.shape, NamedSharding(mesh, spec), begin.__getitem__)
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
    mesh, spec = Mesh(np.array(devices[:N]), ("x",)), PartitionSpec("x")
    compiled = jax.jit(
        jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    begin = np.array([1, 3, 5, 2000], np.int32)
    rows = jax.make_array_from_callback(begin.shape, NamedSharding(mesh, spec), begin.__getitem__)
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
    shared: list[int] = []
    among = loaded.among

    def recorded(threads: int, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        shared.append(len(calls))
        return among(threads, calls)

    monkeypatch.setattr(loaded, "among", recorded)
    monkeypatch.setattr(compute, "LONG", -1.0)  # whatever it takes
    mesh, spec = Mesh(np.array(devices[:N]), ("x",)), PartitionSpec("x")
    many = jax.jit(lambda row: [row + i for i in range(1, 5)])
    begin = np.arange(N, dtype=np.int32)
    rows = jax.make_array_from_callback(begin.shape, NamedSharding(mesh, spec), begin.__getitem__)
    for _ in range(3):
        for i, result in enumerate(many(rows), 1):
            for shard in result.addressable_shards:
                assert np.asarray(shard.data).tolist() == [begin[shard.index[0]][0] + i]
    if len(usable()) > 1:
        assert shared == [N] * 3
