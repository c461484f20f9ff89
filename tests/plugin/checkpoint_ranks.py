"""One rank of `test_checkpoints`: saves an array with orbax, or restores it onto another layout.

Arguments: the folder; ``save``, ``save_async`` or ``restore``; the layout: ``rows``, ``columns`` or ``grid``.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

folder, what, layout = sys.argv[1:]
devices = np.array(jax.devices())
flat, grid = Mesh(devices, ("x",)), Mesh(devices.reshape(2, -1), ("x", "y"))
sharding = {
    "rows": NamedSharding(flat, PartitionSpec("x")),
    "columns": NamedSharding(flat, PartitionSpec(None, "x")),
    "grid": NamedSharding(grid, PartitionSpec("y", "x")),
}[layout]
numbers = np.arange(64, dtype=np.float32).reshape(8, 8)


def state(step: int) -> dict[str, object]:
    array = jax.make_array_from_callback((8, 8), sharding, lambda index: (numbers + step)[index])
    return {"array": array, "step": step}


options = ocp.CheckpointManagerOptions(enable_async_checkpointing=what == "save_async")
with ocp.CheckpointManager(folder, options=options) as manager:
    if what.startswith("save"):
        for step in range(2):
            assert manager.save(step, args=ocp.args.StandardSave(state(step)))
        manager.wait_until_finished()
    wanted = {"array": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding), "step": 0}
    found = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(wanted))
assert found["step"] == 1
assert found["array"].sharding == sharding
for shard in found["array"].addressable_shards:
    np.testing.assert_array_equal(shard.data, (numbers + 1)[shard.index])
print("restored", flush=True)
