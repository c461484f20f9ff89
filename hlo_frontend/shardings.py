"""Shardings of parameters, and which part of an array a device holds, by a serialized ``OpSharding``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .graph import Module
from .schema import OpSharding

_REPLICATED, _OTHER = 0, 3  # OpSharding.Type

Part = tuple[int, ...]


def shardings_of(module: Module, num_replicas: int) -> list[bytes | None]:
    """The serialized sharding of each parameter of a module; None where it has none, or there are replicas,
    of which shardings say nothing."""
    parameters = module.entry.parameters
    found = list(module.proto.spmd_parameters_shardings)
    if len(found) != len(parameters):  # HLO text has shardings only on parameters
        found = [p.proto.sharding or None for p in parameters]
    return found if num_replicas == 1 else [None] * len(found)


def parts(serialized: bytes) -> Callable[[int], Part] | None:
    """A function that gives the part of an array that a device holds, by a serialized ``OpSharding``; None
    for a sharding with anything unknown in it.

    Devices with the same part hold the same elements.
    """
    sharding = OpSharding.FromString(serialized)
    known = OpSharding()
    known.CopyFrom(sharding)
    known.DiscardUnknownFields()
    if known.ByteSize() != sharding.ByteSize():
        return None
    if sharding.HasField("named_sharding"):
        return _named_parts(sharding.named_sharding)
    if sharding.type == _REPLICATED:
        return lambda device: ()
    if sharding.type != _OTHER:
        return None
    dimensions = list(sharding.tile_assignment_dimensions)
    tiles = _arranged(
        dimensions,
        sharding.tile_assignment_devices,
        sharding.iota_reshape_dims,
        sharding.iota_transpose_perm,
    )
    copied = [len(dimensions) - 1] if sharding.replicate_on_last_tile_dim else []
    subgroups = list(sharding.last_tile_dims)
    first = len(dimensions) - len(subgroups)
    copied += [first + i for i, kind in enumerate(subgroups) if kind == _REPLICATED]
    return _by_device(tiles, [i for i in range(len(dimensions)) if i not in copied])


def _named_parts(sharding: Any) -> Callable[[int], Part] | None:
    """By axes of a mesh (from jaxlib 0.12 on); a part of an axis counts as all of it."""
    mesh = sharding.mesh
    if not mesh.axes:
        return lambda device: ()
    used = [a for d in sharding.dim_shardings for a in d.axes]
    used += [*sharding.unreduced_axes, *sharding.manual_axes]
    transform = mesh.iota_transform
    devices = _arranged(
        [axis.size for axis in mesh.axes],
        mesh.device_ids,
        transform.reshape_dims,
        transform.transpose_perm,
    )
    return _by_device(devices, sorted({axis.mesh_axis_index for axis in used}))


def _arranged(
    shape: Sequence[int], ids: Sequence[int], source: Sequence[int], order: Sequence[int]
) -> np.ndarray | None:
    """Device ids in an array of this shape: listed, or counted in one of shape ``source``, transposed."""
    count = int(np.prod(shape))
    flat = np.array(ids) if ids else np.arange(count)
    if not ids and source:
        flat = flat.reshape(source).transpose(order or range(len(source))).reshape(-1)
    return flat.reshape(shape) if flat.size == count else None


def _by_device(devices: np.ndarray | None, axes: Sequence[int]) -> Callable[[int], Part] | None:
    if devices is None:
        return None
    found = {
        int(devices[index]): tuple(index[i] for i in axes) for index in np.ndindex(*devices.shape)
    }
    return lambda device: found.get(device, (-1, device))
