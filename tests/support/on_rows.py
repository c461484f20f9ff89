"""Programs that each device runs on a row of its own, and whether compiled code calls their collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stretto

Rows = np.ndarray  # [device, ...]


def on_rows(mesh: Mesh, f: Callable[..., Any], *rows: Rows) -> tuple[Any, Any]:
    """Results of ``f`` on every device, as rows, and the executable. ``f`` takes a device's row."""
    spec = PartitionSpec("x")
    whole = jax.jit(
        jax.shard_map(
            lambda *blocks: jax.tree.map(lambda a: a[None], f(*(b[0] for b in blocks))),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    sharding = NamedSharding(mesh, spec)
    placed = [jax.make_array_from_callback(a.shape, sharding, a.__getitem__) for a in rows]
    compiled = whole.lower(*placed).compile()
    return jax.tree.map(everywhere, compiled(*placed)), compiled


def everywhere(array: jax.Array) -> np.ndarray:
    """The whole array, also where other processes have parts of it."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def is_native(compiled: Any) -> bool:
    """Whether all collectives are called by segments, so that the walk starts none."""
    text = str(stretto.explain(compiled).program)
    return "sites (" in text and "start " not in text
