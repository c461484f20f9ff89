"""A million small collectives: resident memory and time stay where they were.

    JAX_PLATFORMS=stretto STRETTO_LOCAL_DEVICES=2 python benchmarks/million.py
    JAX_PLATFORMS=stretto mpiexec -n 2 python benchmarks/million.py

Every call of a jitted function sums 8 floats over all devices ``--inner`` times, in a loop; 1 makes every
collective a call of its own. Prints resident memory and time per collective for each tenth, and ends with
exit code 1 if memory grew by more than ``--allowed`` MiB from the second tenth to the last, or a sum is
wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from time import perf_counter

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PARTS = 10


def resident() -> float:
    """MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=1_000_000, help="how many collectives")
    parser.add_argument("--inner", type=int, default=100, help="collectives of one call")
    parser.add_argument("--allowed", type=float, default=4.0, help="growth in MiB")
    arguments = parser.parse_args()

    devices = jax.devices()
    mesh = Mesh(np.array(devices), ("x",))
    spec = PartitionSpec("x")

    def some(x: jax.Array) -> jax.Array:
        def once(i: jax.Array, x: jax.Array) -> jax.Array:
            return lax.psum(x, "x") / len(devices) + 1

        return lax.fori_loop(0, arguments.inner, once, x)

    step = jax.jit(jax.shard_map(some, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    shape = (8 * len(devices),)
    x = jax.make_array_from_callback(
        shape, NamedSharding(mesh, spec), lambda index: np.zeros(shape, np.float32)[index]
    )
    x = jax.block_until_ready(step(x) * 0)
    calls = arguments.n // arguments.inner // PARTS
    seen = []
    for part in range(PARTS):
        began = perf_counter()
        for _ in range(calls):
            x = step(x)
        jax.block_until_ready(x)
        each = (perf_counter() - began) / (calls * arguments.inner)
        seen.append(resident())
        if jax.process_index() == 0:
            print(
                f"{part + 1:3}/{PARTS}: {seen[-1]:8.1f} MiB, {each * 1e6:7.1f} us each", flush=True
            )
    expected = np.float32(calls * arguments.inner * PARTS)  # below 2**24: exact
    right = all(bool((np.asarray(s.data) == expected).all()) for s in x.addressable_shards)
    grown = seen[-1] - seen[1]
    print(f"process {jax.process_index()}: grew by {grown:.1f} MiB, sums are {right}", flush=True)
    return 0 if right and grown <= arguments.allowed else 1


if __name__ == "__main__":
    sys.exit(main())
