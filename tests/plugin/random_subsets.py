"""Draws programs of collectives over some of the devices at random, and compares results with NumPy's.

    JAX_PLATFORMS=stretto STRETTO_LOCAL_DEVICES=2 mpiexec -n 2 python tests/plugin/random_subsets.py \\
        --first 0 --count 500

Meshes have any devices in any order, so that ranks have different numbers of them, or none. What is sent is
small or large, once or in a loop; ranks come early and late, and run programs that others have no part in.
With ``--hosts 2`` every other rank shares no memory with the rest. A seed is always the same program on all
ranks. Whole numbers of 32 bits: all is equal, bit for bit.

Each rank prints one line in the end, or says what differs, and ends with 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stretto.runtime.execution import executor

SPEC = PartitionSpec("x")
# Elements of a device, over the number of devices.
PARTS = (1, 3, 7, 100, 1000, 5000, 20_000, 60_000)
KEPT = 8  # programs that are alive beside the next one

OnDevice = Callable[[jax.Array], jax.Array]
OnAll = Callable[[np.ndarray], np.ndarray]  # rows of all devices


def tiled(row: np.ndarray, count: int) -> np.ndarray:
    return np.tile(row, (count, 1))


def summed(count: int, _: random.Random) -> tuple[OnDevice, OnAll]:
    return partial(lax.psum, axis_name="x"), lambda y: tiled(y.sum(0, dtype=y.dtype), count)


def largest(count: int, _: random.Random) -> tuple[OnDevice, OnAll]:
    return partial(lax.pmax, axis_name="x"), lambda y: tiled(y.max(0), count)


def gathered(count: int, _: random.Random) -> tuple[OnDevice, OnAll]:
    """Each device adds up what it was given, in its own way."""
    weights = np.arange(1, count + 1, dtype=np.int32)

    def on_device(y: jax.Array) -> jax.Array:
        rows = lax.all_gather(y, "x") * weights[:, None]
        return rows.sum(0, dtype=jnp.int32) + lax.axis_index("x")

    def on_all(y: np.ndarray) -> np.ndarray:
        total = (y * weights[:, None]).sum(0, dtype=y.dtype)
        return tiled(total, count) + np.arange(count, dtype=np.int32)[:, None]

    return on_device, on_all


def scattered(count: int, _: random.Random) -> tuple[OnDevice, OnAll]:
    def on_device(y: jax.Array) -> jax.Array:
        return jnp.tile(lax.psum_scatter(y, "x", tiled=True), count)

    return on_device, lambda y: np.tile(y.sum(0, dtype=y.dtype).reshape(count, -1), (1, count))


def exchanged(count: int, _: random.Random) -> tuple[OnDevice, OnAll]:
    def on_all(y: np.ndarray) -> np.ndarray:
        return y.reshape(count, count, -1).swapaxes(0, 1).reshape(count, -1)

    return lambda y: lax.all_to_all(y, "x", 0, 0, tiled=True), on_all


def moved(count: int, draw: random.Random) -> tuple[OnDevice, OnAll]:
    sources = draw.sample(range(count), draw.randint(1, count))
    targets = draw.sample(range(count), len(sources))

    def on_all(y: np.ndarray) -> np.ndarray:
        result = np.zeros_like(y)
        result[targets] = y[sources]
        return result

    pairs = list(zip(sources, targets, strict=True))
    return partial(lax.ppermute, axis_name="x", perm=pairs), on_all


def summed_in_groups(count: int, draw: random.Random) -> tuple[OnDevice, OnAll]:
    size = draw.choice([n for n in range(1, count + 1) if count % n == 0])
    order = draw.sample(range(count), count)
    groups = [order[i : i + size] for i in range(0, count, size)]

    def on_all(y: np.ndarray) -> np.ndarray:
        result = np.zeros_like(y)
        for group in groups:
            result[group] = y[group].sum(0, dtype=y.dtype)
        return result

    return partial(lax.psum, axis_name="x", axis_index_groups=groups), on_all


KINDS = (summed, largest, gathered, scattered, exchanged, moved, moved, summed_in_groups)


@dataclass(frozen=True)
class Step:
    """A collective of the program's operand, or of what the step before gave, plus a number."""

    on_device: OnDevice
    on_all: OnAll
    added: int
    chained: bool


def taken(steps: Sequence[Step], x: Any, *, on_all: bool) -> tuple[Any, list[Any]]:
    """What the next iteration is given, and all results."""
    results, last = [], x
    for step in steps:
        given = (last if step.chained else x) + np.int32(step.added)
        results.append((step.on_all if on_all else step.on_device)(given))
        last = results[-1] & 0xFFFF
    return last, results


class Program:
    """One that was drawn, with its operand and its right results."""

    def __init__(self, seed: int, devices: Sequence[jax.Device]) -> None:
        draw = random.Random(seed)
        count = draw.randint(2, len(devices))
        self.seed = seed
        self.numbers = draw.sample(range(len(devices)), count)
        self.size = count * draw.choice(PARTS)
        self.trips = draw.choice((0, 0, 0, 2, 5, 40 if self.size < 50_000 else 5))
        self.steps = [
            Step(*draw.choice(KINDS)(count, draw), draw.randint(1, 9), draw.random() < 0.5)
            for _ in range(draw.randint(1, 6))
        ]
        self.waits = [draw.random() < 0.3 for _ in range(draw.randint(2, 3))]
        self.mesh = Mesh(np.array([devices[n] for n in self.numbers]), ("x",))
        self.takes_part = any(devices[n].process_index == jax.process_index() for n in self.numbers)
        rows = np.random.default_rng(seed).integers(0, 1000, (count, self.size), np.int32)
        self.operand = rows.reshape(-1)
        with np.errstate(over="ignore"):
            self.expected = self._run(rows, on_all=True)
        self.jitted = jax.jit(
            jax.shard_map(
                partial(self._run, on_all=False),
                mesh=self.mesh,
                in_specs=SPEC,
                out_specs=SPEC,
                check_vma=False,
            )
        )

    def _run(self, x: Any, *, on_all: bool) -> tuple[Any, ...]:
        if not self.trips:
            last, results = taken(self.steps, x, on_all=on_all)
            return last, *results

        def step(_: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            last, results = taken(self.steps, carry[0], on_all=on_all)
            total = carry[1]
            for result in results:
                total = total * 5 + result
            return last, total

        carry = (x, x * 0)
        if not on_all:
            return lax.fori_loop(0, self.trips, step, carry)
        for _ in range(self.trips):
            carry = step(None, carry)
        return carry

    def check(self) -> str:
        """Run it a few times. Gives what differs, or nothing."""
        sharding = NamedSharding(self.mesh, SPEC)
        x = jax.make_array_from_callback(self.operand.shape, sharding, self.operand.__getitem__)
        for number, waits in enumerate(self.waits):
            if waits and jax.process_index() == self.seed % 2:
                time.sleep(0.004)
            for k, (result, right) in enumerate(zip(self.jitted(x), self.expected, strict=True)):
                for shard in result.addressable_shards:
                    row = (shard.index[0].start or 0) // self.size
                    found = np.asarray(shard.data)
                    if not np.array_equal(found, right[row]):
                        return (
                            f"seed {self.seed}, run {number}: result {k} differs on device "
                            f"{self.numbers[row]} of {self.numbers}"
                        )
        return ""


def pretend(hosts: int) -> None:
    """Have ranks share memory only with those of their host, of so many."""
    if hosts > 1:
        from mpi4py import MPI  # which is brought up here, and not before

        executor.memory_name = lambda: f"host {MPI.COMM_WORLD.Get_rank() % hosts}"  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--hosts", type=int, default=1)
    given = parser.parse_args()
    pretend(given.hosts)
    alive: list[Program] = []
    ran = 0
    for seed in range(given.first, given.first + given.count):
        program = Program(seed, jax.devices())
        if not program.takes_part:
            continue
        differs = program.check()
        if differs:
            print(differs, flush=True)
            return 1
        ran += 1
        alive.append(program)
        if len(alive) > KEPT:
            alive.pop(seed % KEPT)
    sys.stdout.write(f"rank {jax.process_index()}: {ran} equal\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
