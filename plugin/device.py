"""Devices of the world and their memories, as JAX sees them.

Device ids count over all ranks: ``process_index * local_devices + ordinal``. Every device of this process
has three memories, as JAX's CPU devices do, all of them the same host memory; ``device`` is the default.
"""

from __future__ import annotations

from ._capi import Device, Memory
from .structs import NamedValues

PLATFORM = "stretto"
MEMORY_KINDS = ("device", "pinned_host", "unpinned_host")


def make_devices(num_processes: int, local_devices: int, rank: int) -> tuple[Device, ...]:
    """The devices of the world in the order of their ids; those of this rank with memories."""
    devices = tuple(
        _device(process * local_devices + ordinal, process, ordinal if process == rank else -1)
        for process in range(num_processes)
        for ordinal in range(local_devices)
    )
    for device in devices:
        if device.process_index == rank:
            device.attach(tuple(_memory(device, i) for i in range(len(MEMORY_KINDS))))
    return devices


def _device(id: int, process_index: int, ordinal: int) -> Device:
    return Device(
        id,
        process_index,
        ordinal,
        PLATFORM,
        f"{PLATFORM}:{id}",
        f"StrettoDevice(id={id})",
        NamedValues({}),
    )


def _memory(device: Device, index: int) -> Memory:
    kind = MEMORY_KINDS[index]
    id = device.id * len(MEMORY_KINDS) + index
    return Memory(
        id, index, kind, f"{kind} memory of {device.name}", f"{kind.upper()}_{id}", device
    )
