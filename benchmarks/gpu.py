"""What engine xla:cuda takes on GPUs, with JAX's own CUDA backend beside it where it is installed.

    python benchmarks/gpu.py [DEVICES]

DEVICES (1) are those of this process; each measurement is a process of its own, and its row the median of 20.
No GPU has run it yet.

- dispatch: `jit(x + 1)` of 8 floats, awaited, on one device.
- all-reduce: of 64 MiB over the devices, with bytes of one device by seconds.
- layers: products and an all-reduce of each, which the scheduler may hide, with and without overlap.
"""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import statistics, sys, time
import jax, jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def median(function):
    for _ in range(3):
        jax.block_until_ready(function())
    times = []
    for _ in range(20):
        began = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - began)
    return statistics.median(times)

devices = jax.devices()
mesh = Mesh(np.array(devices), ("i",))

def dispatch():
    x = jnp.ones(8)
    add = jax.jit(lambda x: x + 1)
    return f"{median(lambda: add(x)) * 1e6:.0f} us"

def all_reduce():
    n = 1 << 24
    x = jax.device_put(np.ones((len(devices), n), np.float32), NamedSharding(mesh, P("i")))
    total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))
    seconds = median(lambda: total(x))
    return f"{seconds * 1e3:.2f} ms, {4 * n / seconds / 1e9:.1f} GB/s"

def layers():
    n = 4096
    x = jax.device_put(np.ones((len(devices), n, n), np.float32), NamedSharding(mesh, P("i")))
    def stack(x):
        sums = []
        for k in range(8):
            x = jnp.tanh(x[0] @ x[0] / n)[None]
            sums.append(jax.lax.psum(x, "i"))
        return x, sum(sums)
    run = jax.jit(jax.shard_map(stack, mesh=mesh, in_specs=P("i"), out_specs=(P("i"), P())))
    return f"{median(lambda: run(x)) * 1e3:.2f} ms"

print(globals()[sys.argv[1]]())
"""


def row(name: str, what: str, **variables: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, what],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or [
        "nothing"
    ]
    print(f"{name:44} {lines[-1][:100]}", flush=True)


def main() -> None:
    devices = sys.argv[1] if len(sys.argv) > 1 else "1"
    engine = os.environ.get("STRETTO_ENGINE", "xla:cuda")
    stretto = {
        "JAX_PLATFORMS": "stretto",
        "STRETTO_ENGINE": engine,
        "STRETTO_LOCAL_DEVICES": devices,
    }
    row("dispatch, stretto", "dispatch", **stretto)
    row("dispatch, JAX's CUDA backend", "dispatch", JAX_PLATFORMS="cuda")
    row("all-reduce, NCCL", "all_reduce", **stretto)
    row("all-reduce, through the host", "all_reduce", **stretto, STRETTO_NCCL="0")
    row("layers, overlap", "layers", **stretto)
    row("layers, no overlap", "layers", **stretto, STRETTO_OVERLAP="0")
    row("layers, through the host", "layers", **stretto, STRETTO_NCCL="0")


if __name__ == "__main__":
    main()
