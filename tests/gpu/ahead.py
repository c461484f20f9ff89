"""Run by every rank of test_gpu.py, with kernels that compute nothing: ten steps of 20 psums each.

Prints how often the host waited meanwhile, and how many collectives each device had over NCCL.
"""

from __future__ import annotations

import ctypes

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

devices = jax.devices()
mesh = Mesh(np.array(devices), ("i",))
split = NamedSharding(mesh, PartitionSpec("i"))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))
def step(x: jax.Array) -> jax.Array:
    for k in range(20):
        x = jnp.broadcast_to(jax.lax.psum(jnp.sin(x) * k, "i"), x.shape) + 1
    return x


host = np.ones(1024 * len(devices), np.float32)
x = step(jax.make_array_from_callback(host.shape, split, lambda i: host[i]))
x.block_until_ready()
driver, nccl = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnccl.so.2")
waits, launches = driver.fake_cuda_host_waits(), nccl.fake_nccl_launches()
for _ in range(10):
    x = step(x)
waits, ready = driver.fake_cuda_host_waits() - waits, x.is_ready()
x.block_until_ready()
assert not ready, "nothing was left to do"
launches = (nccl.fake_nccl_launches() - launches) // len(jax.local_devices())
print(f"{waits} waits, {launches} over NCCL")
