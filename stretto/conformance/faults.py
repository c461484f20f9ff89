"""A rank of a job in which something goes wrong: ``python -m stretto.conformance.faults CASE``.

On all ranks; the last rank does what the case says while the others wait for it in a sum.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def total() -> jax.Array:
    """A sum over all devices of the job."""
    devices = jax.devices()
    mesh, spec = Mesh(np.array(devices), ("x",)), PartitionSpec("x")
    sum_ = jax.shard_map(
        lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
    )
    ones = np.ones(len(devices), np.float32)
    given = jax.make_array_from_callback(
        ones.shape, NamedSharding(mesh, spec), lambda index: ones[index]
    )
    return jax.jit(sum_)(given)


def main(case: str) -> None:
    assert np.asarray(total()).item() == len(jax.devices())
    if jax.process_index() == jax.process_count() - 1:
        os.write(2, f"the last rank {case}\n".encode())
        match case:
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raises":
                raise ValueError("what this rank says")
            case "stalls":
                threading.Event().wait()
    total().block_until_ready()


if __name__ == "__main__":
    main(sys.argv[1])
