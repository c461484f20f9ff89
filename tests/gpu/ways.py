"""Run by every rank of test_gpu.py: every collective that MPI moves on GPUs' memory, and two others.

Arrays are larger and smaller than a piece of what goes through the host's memory, and split along dimensions
that are contiguous and that are not. Prints a line on each rank: the ways of the collectives, as they are
explained, and a digest of all results.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stretto

devices = jax.devices()
count = len(devices)
mesh = Mesh(np.array(devices), ("i",))
split = NamedSharding(mesh, PartitionSpec("i"))
ring = [(i, (i + 1) % count) for i in range(count)]


def step(x: jax.Array) -> tuple[jax.Array, ...]:
    (x,) = x
    doubled = x * 2
    total = jax.lax.psum(x, "i")
    return tuple(
        y[None]
        for y in (
            jax.lax.all_gather(doubled, "i", axis=0),
            jax.lax.all_gather(doubled, "i", axis=1),
            jax.lax.all_to_all(doubled, "i", 0, 0),
            jax.lax.all_to_all(doubled, "i", 1, 1, tiled=True),
            jax.lax.ppermute(doubled, "i", ring[:-1]),
            jax.lax.pbroadcast(doubled, "i", count - 1),
            jax.lax.pmax(doubled, "i"),
            jax.lax.psum_scatter(doubled, "i"),
            jax.lax.ppermute(total, "i", ring[:-1]),  # no run is between the two
        )
    )


for shape, dtype in (
    ((count, 3 * count, 2), np.float32),
    ((count, count * 700, 100), np.int16),
    ((count, count), jnp.bfloat16),
):
    host = np.arange(count * np.prod(shape)).reshape(count, *shape) % 61
    host = host.astype(dtype)
    x = jax.make_array_from_callback(host.shape, split, lambda i, host=host: host[i])
    everywhere = jax.shard_map(
        step, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i")
    )
    compiled = jax.jit(everywhere).lower(x).compile()
    results = compiled(x)
    digest = hashlib.sha256()
    for result in results:
        for shard in sorted(result.addressable_shards, key=lambda s: s.device.id):
            digest.update(np.asarray(shard.data).tobytes())
    explained = stretto.explain(compiled)
    ways = Counter(explained.data["ways"].values())
    assert "collectives of GPUs' arrays: " in str(explained)
    twice = (host * 2).astype(dtype)
    ours = [d.id for d in jax.local_devices()]
    rows = [np.asarray(s.data)[0] for s in results[4].addressable_shards]
    for i, row in zip(ours, rows, strict=True):
        expected = twice[i - 1] if i else np.zeros_like(twice[0])
        assert (row == expected).all(), f"permute on device {i}"
    for shard in results[1].addressable_shards:
        assert (np.asarray(shard.data)[0] == np.stack(list(twice), 1)).all(), "all-gather"
    for i, shard in zip(ours, results[3].addressable_shards, strict=True):
        parts = [np.split(one, count, 1)[i] for one in twice]
        assert (np.asarray(shard.data)[0] == np.concatenate(parts, 1)).all(), "all-to-all"
    if host.dtype != jnp.bfloat16:
        total = host.sum(0, dtype=host.dtype)
        for i, shard in zip(ours, results[8].addressable_shards, strict=True):
            assert (np.asarray(shard.data)[0] == (total if i else 0 * total)).all(), "behind a sum"
    counted = " + ".join(f"{n} {way}" for way, n in sorted(ways.items()))
    print(f"{host.dtype} rank {jax.process_index()}: {counted}; {digest.hexdigest()}", flush=True)
