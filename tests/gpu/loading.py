"""Run by every rank of test_gpu.py: psums while memory is taken and code is loaded, which may wait for all
streams with the driver's locks held. Argument: how many rounds. Prints ``right N`` on every rank, or what is
wrong.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

rounds = int(sys.argv[1])
devices = jax.devices()
mesh = Mesh(np.array(devices), ("i",))
split = NamedSharding(mesh, PartitionSpec("i"))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec())
def total(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "i")


kept = []
numbers = np.arange(len(devices), dtype=np.float32)
x = jax.make_array_from_callback(numbers.shape, split, lambda i: numbers[i])
for number in range(rounds):
    sums = [total(x) for _ in range(3)]
    more = np.full(1 << (18 + number), number, np.float32)  # than XLA has taken so far
    kept.append(jax.device_put(more))
    scaled = jax.jit(lambda x, by=number + 1: x * by)(numbers)  # code of its own each time
    for s in sums:
        if np.asarray(s).tolist() != [sum(range(len(devices)))]:
            sys.exit(f"round {number}: {np.asarray(s).tolist()}")
    if np.asarray(scaled).tolist() != (numbers * (number + 1)).tolist():
        sys.exit(f"round {number}: {np.asarray(scaled).tolist()}")
print(f"right {rounds}")
