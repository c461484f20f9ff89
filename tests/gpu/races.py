"""Run by every rank of test_gpu.py: collectives beside runs that write to the memory they read.

Arguments: how many rounds, and ``sums`` or ``moves``. In each, psums, or all-gathers of which a run makes the
sum, read an array whose memory is then given to somebody else: donated to a run that counts it up in place,
or dropped, and taken by the next result. Nothing is read before the end of a round. Prints ``right N`` on
every rank, or what is wrong.
"""

from __future__ import annotations

import ctypes
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

rounds, steps = int(sys.argv[1]), 6
devices = jax.devices()
mesh = Mesh(np.array(devices), ("i",))
split = NamedSharding(mesh, PartitionSpec("i"))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))
def total(x: jax.Array) -> jax.Array:
    if sys.argv[2] == "sums":
        return jnp.broadcast_to(jax.lax.psum(x, "i"), x.shape)
    everyone = jax.lax.all_gather(x, "i")
    last = jax.lax.ppermute(x, "i", [(len(devices) - 1, 0)])
    return everyone.sum(0) + 0 * last


def count_up(x: jax.Array) -> jax.Array:
    return x + 1.0


in_place = jax.jit(count_up, donate_argnums=0)
elsewhere = jax.jit(count_up)
again = jax.jit(lambda s: s * 2.0)
spoil = jax.jit(lambda x: -x)
numbers = np.repeat(np.arange(len(devices), dtype=np.float32), 4096)
for number in range(rounds):
    step = (in_place, elsewhere)[number % 2]
    host = numbers + np.float32(number)
    x = jax.make_array_from_callback(host.shape, split, lambda i, host=host: host[i])
    sums, twice, others = [], [], []
    for _ in range(steps):
        sums.append(total(x))
        x = step(x)
        others.append(spoil(x))  # where x was, if that is free
        twice.append(again(sums[-1]))
    for k, (s, t) in enumerate(zip(sums, twice, strict=True)):
        want = float(sum(range(len(devices)))) + (number + k) * len(devices)
        for factor, array in ((1, s), (2, t)):
            for shard in array.addressable_shards:
                found = set(np.asarray(shard.data).tolist())
                if found != {factor * want}:
                    sys.exit(f"round {number}, step {k}: {sorted(found)[:4]}, not {factor * want}")
if os.environ.get("FAKE_CUDA_DEVICES"):
    through_the_host = os.environ.get("STRETTO_NCCL") == "0"
    launches = ctypes.CDLL("libnccl.so.2").fake_nccl_launches()
    a_step = 1 if sys.argv[2] == "sums" else 2
    due = 0 if through_the_host else rounds * steps * a_step * len(jax.local_devices())
    assert launches == due, launches
print(f"right {rounds}")
