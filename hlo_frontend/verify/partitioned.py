"""Checks that a module for several partitions has been through XLA's SPMD partitioner.

Before partitioning, shapes are those of whole arrays, and shardings say how they are divided. The partitioner
leaves shardings on parameters, and on instructions that XLA later copies from those.
"""

from __future__ import annotations

from typing import Any

from ..graph import Module
from ..schema import OpSharding

# Sources: ``OpSharding.Type`` in ``xla/xla_data.proto``.
_TUPLE, _TILED = 2, 3


def check_partitioned(module: Module, num_partitions: int) -> None:
    """Raise `UnsupportedError` if shardings show that the module is not partitioned yet.

    A module that communicates counts as partitioned. Manually partitioned parts of a module that is not are
    recognized by their custom calls (see `flatten`).
    """
    if num_partitions < 2 or module.entry.needs_runtime:
        return
    root = module.entry.root
    if root.opcode not in ("parameter", "copy") and _divides(
        OpSharding.FromString(root.proto.sharding)
    ):
        raise root.unsupported(
            "its sharding is of a module that is not partitioned yet; give it as XLA's SPMD partitioner "
            "leaves it, or run the JAX program"
        )


def _divides(sharding: Any) -> bool:
    if sharding.type == _TUPLE:
        return any(_divides(part) for part in sharding.tuple_shardings)
    return bool(sharding.type == _TILED or sharding.HasField("named_sharding"))
