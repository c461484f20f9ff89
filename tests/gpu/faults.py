"""Run by every rank of test_gpu.py: psums of which one is never completed. Arguments: why, and ``sums``,
or ``moves`` for all-gathers instead, ``loops`` for sums in loops that compiled code runs whole,
``endless`` for one that has no end.

``killed``: rank 1 kills itself before its third, or in an endless loop. ``late``: rank 1 does not come to
its third. ``error``: the fake NCCL fails rank 1's fourth. ``none``: all are. All that are left wait for
the content of the last one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from support.shield import behind_a_shield

behind_a_shield(__file__, *sys.argv[1:])

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

import stretto  # noqa: E402

devices = jax.devices()
mesh = Mesh(np.array(devices), ("i",))
split = NamedSharding(mesh, PartitionSpec("i"))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec(), check_vma=False)
def total(x: jax.Array) -> jax.Array:
    if sys.argv[2] == "sums":
        return jax.lax.psum(x, "i")
    if sys.argv[2] in ("loops", "endless"):
        end = len(devices) if sys.argv[2] == "loops" else -1
        return jax.lax.while_loop(
            lambda s: s[0] != end, lambda s: jax.lax.psum(jax.numpy.minimum(x, s + 1), "i"), x * 0
        )
    return jax.lax.all_gather(x, "i", tiled=True).sum(0, keepdims=True)


if jax.process_index() == 1 and sys.argv[1] == "error":
    os.environ["FAKE_NCCL_FAIL_AT"] = "4"
x = jax.make_array_from_callback(
    (len(devices),), split, lambda i: np.ones(len(devices), np.float32)[i]
)
if sys.argv[2] in ("loops", "endless"):
    assert "called by compiled code" in str(stretto.explain(total.lower(x).compile()))
if sys.argv[2] == "endless" and jax.process_index() == 1:

    def dies() -> None:
        print(f"killed at {time.time()}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    total.lower(x).compile()  # rank 1 is in the loop by then
    threading.Timer(5.0, dies).start()
for number in range(6):
    if jax.process_index() == 1 and number == 2:
        if sys.argv[1] == "killed":
            print(f"killed at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "late":
            time.sleep(60)
    s = total(x)
    if number < 2:
        assert np.asarray(s).tolist() == [len(devices)]
print("content:", np.asarray(s).tolist(), flush=True)
