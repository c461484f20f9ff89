"""Loops without collectives on several devices, which threads share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stretto.runtime.cores import usable
from stretto.runtime.execution import compute

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
