"""The topology: platform and devices, as descriptions that need no client."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from . import _capi
from .device import PLATFORM
from .structs import NamedValues
from .table import entry


def pointers(handles: tuple[_capi.Handle, ...]) -> Any:
    """An array of the handles' pointers, to be kept as long as the handles."""
    return (ctypes.c_void_p * len(handles))(*map(_capi.lend, handles))


class Text:
    """A string that jaxlib reads, with the lifetime of its owner."""

    def __init__(self, text: str) -> None:
        self._data = ctypes.create_string_buffer(text.encode())
        self.address, self.size = ctypes.addressof(self._data), len(self._data) - 1


class Topology(_capi.Handle):
    """Devices of the world with their descriptions; owned by a client."""

    def __init__(
        self,
        devices: tuple[_capi.Device, ...],
        version: str,
        target: Callable[[], Mapping[str, str]],
    ) -> None:
        self.devices, self._target = devices, target
        self.descriptions = pointers(devices)
        self.platform_name = Text(PLATFORM)
        self.platform_version = Text(version)
        self.attributes = NamedValues({})

    @cached_property
    def serialized(self) -> bytes:
        """What programs for these devices depend on: JAX makes keys of its compilation cache of it."""
        devices = [[d.id, d.process_index] for d in self.devices]
        return json.dumps({"platform": PLATFORM, **self._target(), "ids": devices}).encode()


@entry("PJRT_TopologyDescription_PlatformName")
def platform_name(args: Any) -> None:
    topology: Topology = _capi.take(args.topology)
    args.platform_name = topology.platform_name.address
    args.platform_name_size = topology.platform_name.size


@entry("PJRT_TopologyDescription_PlatformVersion")
def platform_version(args: Any) -> None:
    topology: Topology = _capi.take(args.topology)
    args.platform_version = topology.platform_version.address
    args.platform_version_size = topology.platform_version.size


@entry("PJRT_TopologyDescription_GetDeviceDescriptions")
def device_descriptions(args: Any) -> None:
    topology: Topology = _capi.take(args.topology)
    args.descriptions = ctypes.addressof(topology.descriptions)
    args.num_descriptions = len(topology.devices)


@entry("PJRT_TopologyDescription_Attributes")
def attributes(args: Any) -> None:
    topology: Topology = _capi.take(args.topology)
    args.attributes, args.num_attributes = topology.attributes.address, topology.attributes.count


@entry("PJRT_TopologyDescription_Serialize")
def serialize(args: Any) -> None:
    topology: Topology = _capi.take(args.topology)
    data = _capi.Bytes(topology.serialized)
    args.serialized_bytes, args.serialized_bytes_size = data.address, len(data.data)
    args.serialized_topology = _capi.give(data)
    args.serialized_topology_deleter = _capi.deleter()
