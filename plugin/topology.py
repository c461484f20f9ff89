"""The topology: platform and devices, as descriptions that need no client.

A client has one of its devices. Others are made by name, ``PROCESSESxDEVICES``, for programs that are
compiled here and run elsewhere (`jax.experimental.topologies`); an empty name is this process alone.
"""

from __future__ import annotations

import ctypes
import json
import re
import socket
from functools import cached_property
from importlib.metadata import version
from typing import Any, Protocol

from stretto.collectives.types import TensorType
from stretto.hlo_frontend.native import NativePolicy
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.policy import policy_of
from stretto.runtime import dump
from stretto.runtime.dump import Dumps
from stretto.runtime.engines.engine import Engine, StreamedEngine, create_engine
from stretto.runtime.execution.regions import can_call
from stretto.runtime.job import cost_tables
from stretto.runtime.options import Options, in_force

from . import _capi, jax_private
from .device import PLATFORM, make_devices
from .structs import NamedValues, read_bytes, read_named_values
from .table import entry
from .target import difference, measured, target

MOST_DEVICES = 65536  # of a topology by name
_CONFIG = "target_config"  # the option of JAX's own topologies of GPUs


def pointers(handles: tuple[_capi.Handle, ...]) -> Any:
    """An array of the handles' pointers, to be kept as long as the handles."""
    return (ctypes.c_void_p * len(handles))(*map(_capi.lend, handles))


class Text:
    """A string that jaxlib reads, with the lifetime of its owner."""

    def __init__(self, text: str) -> None:
        self._data = ctypes.create_string_buffer(text.encode())
        self.address, self.size = ctypes.addressof(self._data), len(self._data) - 1


def platform_version() -> str:
    """What the platform reports as its version. JAX's tests look for names of other platforms in it."""
    return f"{PLATFORM} {version('stretto')}"


class Maker(Protocol):
    """What programs are compiled with: a client, or a topology that has none."""

    @property
    def engine(self) -> Engine: ...

    @property
    def target(self) -> dict[str, str]:
        """What they depend on, see `target.target`."""
        ...

    @property
    def options(self) -> Options:
        """The options in force."""
        ...

    @property
    def overlap(self) -> OverlapPolicy | None:
        """How they are scheduled; None if they are not."""
        ...

    @property
    def calls(self) -> NativePolicy | None:
        """Where segments may call collectives themselves; None if nowhere."""
        ...

    @property
    def dumps(self) -> Dumps | None:
        """Where the stages of their compilation are written; None if they are not."""
        ...

    def array_type(self, type: TensorType, order: tuple[int, ...] = ()) -> _capi.ArrayType:
        """The C form of a type and layout. Raises ``KeyError`` for types that PJRT lacks."""
        ...


class Topology(_capi.Handle):  # type: ignore[misc]
    """Devices with their descriptions. ``maker`` compiles programs for them."""

    def __init__(self, devices: tuple[_capi.Device, ...], maker: Maker) -> None:
        self.devices, self.maker = devices, maker
        self.descriptions = pointers(devices)
        self.platform_name = Text(PLATFORM)
        self.platform_version = Text(platform_version())
        self.attributes = NamedValues({})

    @cached_property
    def serialized(self) -> bytes:
        """What programs for these devices depend on: JAX makes keys of its compilation cache of it."""
        devices = [[d.id, d.process_index] for d in self.devices]
        key = {"platform": PLATFORM, **self.maker.target, "ids": devices}
        found = {"measured": measured(self.maker.overlap), "calls": repr(self.maker.calls)}
        if isinstance(self.maker, Elsewhere) and self.maker.target_config:
            found[_CONFIG] = self.maker.target_config
        return json.dumps({**key, **found}).encode()


class Elsewhere:
    """Compiles for devices that need not exist, with an engine of this process.

    ``target_config``: the GPU for which engine ``xla:cuda`` compiles; empty where it has some.
    """

    def __init__(self, processes: int, local_devices: int, target_config: str = "") -> None:
        self.options = in_force()
        self.target_config = target_config
        self._processes, self._local_devices = processes, local_devices

    @cached_property
    def dumps(self) -> Dumps | None:
        return dump.begin(self.options.dump)

    @cached_property
    def engine(self) -> Engine:
        options: dict[str, Any] = {"target": self.target_config} if self.target_config else {}
        engine = create_engine(self.options.engine, self._local_devices, **options)
        jax_private.lower_as(getattr(engine, "lowered_as", "cpu"))
        return engine

    @cached_property
    def target(self) -> dict[str, str]:
        return target(self.engine, self.options, self._processes, self.overlap)

    @cached_property
    def overlap(self) -> OverlapPolicy | None:
        """As if all of it were on this machine."""
        chosen, hosts = self.options, [socket.gethostname()] * self._processes
        if not chosen.overlap:
            return None
        costs = cost_tables.find(chosen.costs, hosts, self._local_devices, chosen.engine)
        lowered_as = getattr(self.engine, "lowered_as", "cpu")
        return policy_of(
            costs.text, hosts, origin=costs.origin, named=costs.named, lowered_as=lowered_as
        )

    @cached_property
    def calls(self) -> NativePolicy | None:
        """As if each process were on a host of its own; nowhere on GPUs, which NCCL need not serve."""
        if not can_call(self.engine, self.options) or isinstance(self.engine, StreamedEngine):
            return None
        return NativePolicy.of(self._local_devices, self._processes, self._processes)

    def array_type(self, type: TensorType, order: tuple[int, ...] = ()) -> _capi.ArrayType:
        return _capi.ArrayType(type, order)


def topology_of(processes: int, local_devices: int, target_config: str = "") -> Topology:
    """A topology of devices that need not exist. Raises ``ValueError`` where the engine compiles for its own
    devices only."""
    maker = Elsewhere(processes, local_devices, target_config)
    if target_config:
        if maker.options.engine != "xla:cuda":
            raise ValueError(
                f"{_CONFIG} describes a GPU, for engine xla:cuda, and STRETTO_ENGINE is "
                f"{maker.options.engine}"
            )
        _ = maker.engine  # JAX lowers by its rules from now on
    return Topology(make_devices(processes, local_devices, rank=-1), maker)


_NAME = re.compile(r"(\d+)x(\d+)", re.ASCII)


def named_topology(name: str, target_config: str = "") -> Topology:
    """The topology ``PROCESSESxDEVICES``. Raises ``ValueError`` for names that are none."""
    if not name:
        return topology_of(1, in_force().local_devices, target_config)
    found = _NAME.fullmatch(name)
    counts = [int(count) for count in found.groups()] if found else [0]
    if not all(counts) or counts[0] * counts[1] > MOST_DEVICES:
        raise ValueError(
            f"{name!r} is no topology of stretto: expected PROCESSESxDEVICES, '4x8' for 4 processes "
            f"with 8 devices each, at most {MOST_DEVICES} devices in all"
        )
    return topology_of(counts[0], counts[1], target_config)


@entry("PJRT_TopologyDescription_Create")
def create(args: Any) -> None:
    name = read_bytes(args.topology_name, args.topology_name_size).decode(errors="replace")
    options = read_named_values(args.create_options, args.num_options)
    config = str(options.pop(_CONFIG, ""))
    if options:
        raise ValueError(f"stretto's topologies have no option {next(iter(options))!r}")
    args.topology = _capi.give(named_topology(name, config))


@entry("PJRT_TopologyDescription_PlatformName")
def platform_name(args: Any) -> None:
    topology: Topology = _capi.take(args.topology)
    args.platform_name = topology.platform_name.address
    args.platform_name_size = topology.platform_name.size


@entry("PJRT_TopologyDescription_PlatformVersion")
def topology_platform_version(args: Any) -> None:
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


def read_topology(data: bytes) -> Topology:
    """Inverse of `Topology.serialized`. Raises ``ValueError`` for other bytes, and other versions."""
    try:
        about = json.loads(data)
        ids = [(int(id), int(process)) for id, process in about.pop("ids")]
        config = str(about.pop(_CONFIG, ""))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"these bytes are no topology of stretto: {error}") from error
    processes = 1 + max((process for _, process in ids), default=-1)
    local = len(ids) // max(processes, 1)
    if not ids or len(ids) > MOST_DEVICES or ids != [(i, i // local) for i in range(len(ids))]:
        raise ValueError("these bytes are no topology of stretto: its devices are not numbered")
    topology = topology_of(processes, local, config)
    other = difference(about, topology.maker.target)
    if other:
        raise ValueError(f"the topology is one of another stretto, of {other}")
    return topology


@entry("PJRT_TopologyDescription_Deserialize")
def deserialize(args: Any) -> None:
    data = read_bytes(args.serialized_topology, args.serialized_topology_size)
    args.topology = _capi.give(read_topology(data))
