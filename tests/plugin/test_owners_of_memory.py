"""Who owns memory: random sequences of donation, deletion, copies, DLPack and views of NumPy.

NumPy computes the expected values. A view that a program has taken of an array never changes, whoever gets
its memory later; and no array changes when its source is overwritten or deleted.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

SHAPE = (16, 16)
STEPS = 60

add = jax.jit(lambda x: x + 1, donate_argnums=0)
loop = jax.jit(
    lambda x: lax.scan(lambda c, _: (c + 1, None), x, None, length=3)[0], donate_argnums=0
)
update = jax.jit(lambda x: x.at[3].set(7), donate_argnums=0)
swap = jax.jit(lambda x, y: (y, x * 2), donate_argnums=(0, 1))
thrice = jax.jit(lambda x: (x, x, x + 0))


class Owners:
    """Arrays with the values they should have, views with the values that they had when they were taken."""

    def __init__(self, seed: int, devices: list[jax.Device]) -> None:
        mesh = Mesh(np.array(devices), ("x",))
        self.draw = random.Random(seed)
        self.shardings: list[Sharding] = [
            SingleDeviceSharding(devices[0]),
            SingleDeviceSharding(devices[-1]),
            *(NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), (), (None, "x"))),
        ]
        self.arrays: list[tuple[jax.Array, np.ndarray]] = []
        self.views: list[tuple[str, np.ndarray, np.ndarray]] = []
        self.made = 0

    def make(self) -> None:
        """An array of what the host has, in memory that the device may use as it is, or not."""
        self.made += 1
        value = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE) + self.made * 1000
        raw = np.empty(value.nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64 + self.draw.choice((0, 0, 4))
        given = raw[start : start + value.nbytes].view(np.float32).reshape(SHAPE)
        given[...] = value
        self.views.append(("what the host gave", given, value))
        self.arrays.append((jax.device_put(given, self.draw.choice(self.shardings)), value))

    def view(self, x: jax.Array, value: np.ndarray) -> None:
        self.views.append(("np.asarray", np.asarray(x), value))

    def view_of_shard(self, x: jax.Array, value: np.ndarray) -> None:
        shard = self.draw.choice(x.addressable_shards)
        self.views.append(("np.asarray of a shard", np.asarray(shard.data), value[shard.index]))

    def lend(self, x: jax.Array, value: np.ndarray) -> None:
        shard = self.draw.choice(x.addressable_shards)
        self.views.append(("DLPack", np.from_dlpack(shard.data), value[shard.index]))

    def addresses(self, x: jax.Array, value: np.ndarray) -> None:
        for shard in x.addressable_shards:
            shard.data.unsafe_buffer_pointer()

    def delete(self, x: jax.Array, value: np.ndarray) -> None:
        x.delete()

    def forget(self, x: jax.Array, value: np.ndarray) -> None:
        self.arrays = [entry for entry in self.arrays if entry[0] is not x]

    def donate(self, x: jax.Array, value: np.ndarray) -> None:
        updated = value.copy()
        updated[3] = 7
        choices = ((add, value + 1), (loop, value + 3), (update, updated))
        function, expected = self.draw.choice(choices)
        self.arrays.append((function(x), expected))
        assert x.is_deleted()

    def donate_two(self, x: jax.Array, value: np.ndarray) -> None:
        others = [e for e in self.arrays if e[0].sharding.device_set == x.sharding.device_set]
        y, other = self.draw.choice(others)
        if _addresses(x).isdisjoint(_addresses(y)):  # what is donated twice is refused
            a, b = swap(x, y)
            self.arrays += [(a, other), (b, value * 2)]

    def results(self, x: jax.Array, value: np.ndarray) -> None:
        self.arrays += [(result, value) for result in thrice(x)]

    def put(self, x: jax.Array, value: np.ndarray) -> None:
        self.arrays.append((jax.device_put(x, self.draw.choice(self.shardings)), value))

    def copied(self, x: jax.Array, value: np.ndarray) -> None:
        self.arrays.append((copy.deepcopy(x), value))

    def begin_copy(self, x: jax.Array, value: np.ndarray) -> None:
        x.copy_to_host_async()

    def reuse(self, x: jax.Array, value: np.ndarray) -> None:
        """Takes memory that was given back, and fills it."""
        for shape in (SHAPE, (2, 16), (16, 2)):
            kept = [np.full(shape, -1, np.float32) for _ in range(20)]
            jax.block_until_ready(
                [jax.device_put(k, s) for k in kept[:2] for s in self.shardings[:2]]
            )

    def step(self) -> str:
        self.arrays = [entry for entry in self.arrays if not entry[0].is_deleted()]
        if not self.arrays or self.draw.random() < 0.2:
            self.make()
            return "make"
        operations: tuple[Callable[[jax.Array, np.ndarray], Any], ...] = (
            *(self.view, self.view_of_shard, self.lend, self.addresses, self.delete, self.forget),
            *(self.donate, self.donate, self.donate_two, self.results, self.put, self.copied),
            *(self.begin_copy, self.reuse),
        )
        operation = self.draw.choice(operations)
        operation(*self.draw.choice(self.arrays))
        return operation.__name__

    def check(self, done: list[str]) -> int:
        """How many arrays and views were compared."""
        for how, view, value in self.views:
            np.testing.assert_array_equal(view, value, f"a view by {how} changed: {done}")
        alive = [(x, value) for x, value in self.arrays if not x.is_deleted()]
        for x, value in alive:
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(shard.data, value[shard.index], str(done))
        return len(self.views) + len(alive)


def _addresses(x: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}


@pytest.mark.parametrize("seed", range(12))
def test_nothing_changes_what_others_hold(seed: int, devices: list[jax.Device]) -> None:
    owners = Owners(seed, devices)
    done: list[str] = []
    compared = 0
    for _ in range(STEPS):
        done.append(owners.step())
        if owners.draw.random() < 0.3:
            compared += owners.check(done)
    assert compared + owners.check(done) > STEPS
