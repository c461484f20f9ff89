"""One process of `test_distributed`: joins jax.distributed, computes with the others, tells what it saw.

Arguments: address of the coordinator, number of processes, number of this one, and what it does:
``compute``, ``wait`` until it is killed, or ``fail`` to make devices.
"""

from __future__ import annotations

import json
import os
import sys

import jax

address, size, rank, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
jax.distributed.initialize(address, num_processes=size, process_id=rank)
if what == "wait":
    sys.stdin.read()
if what == "fail":
    try:
        jax.devices()
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(3)  # an orderly end would wait for the processes that wait

import numpy as np  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

mesh = Mesh(np.array(jax.devices()), ("x",))
sharding = NamedSharding(mesh, PartitionSpec("x"))
numbers = jax.make_array_from_callback(
    (len(jax.devices()),), sharding, lambda index: np.arange(100.0)[: len(jax.devices())][index]
)
total = jax.jit(lambda a: a.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(numbers)
seen = [jax.process_index(), jax.process_count(), jax.device_count(), jax.local_device_count()]
print(json.dumps([*seen, float(total)]))
