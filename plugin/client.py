"""The client: one process's view of the world, its engine and its executor."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import Any
from weakref import WeakSet

import numpy as np

from stretto.collectives.types import TensorType
from stretto.hlo_frontend import stablehlo
from stretto.hlo_frontend.native import NativePolicy
from stretto.hlo_frontend.overlap.policy import policy_of
from stretto.runtime import dump
from stretto.runtime.engines.engine import CopyingEngine, StreamedEngine, create_engine
from stretto.runtime.execution.executor import Executor
from stretto.runtime.execution.regions import can_call
from stretto.runtime.execution.value import Promise, Value
from stretto.runtime.job.rendezvous import Rendezvous
from stretto.runtime.job.world import bootstrap
from stretto.runtime.options import Options
from stretto.runtime.recording import trace
from stretto.runtime.recording.instrument import Instrument

from . import _capi, abi, jax_private, store
from .device import PLATFORM, make_devices
from .later import answers, rest
from .profile import known
from .structs import NamedValues, read_int64s
from .table import entry
from .target import target
from .topology import Text, Topology, platform_version, pointers

_TYPE_NAMES = {code: name for name, code in abi.BUFFER_TYPES.items()}

# Seconds for which threads that still compute rest when Python ends, should Python wait for one of them.
# Where there are other processes it may have to wait for those, and such a thread can run nothing any more.
REST_ALONE, REST_OF_RANKS = 1.0, 10.0

clients: WeakSet[Client] = WeakSet()


class Client(_capi.Handle):  # type: ignore[misc]
    """Devices of the world, and what is needed to compile for and run on those of this process.

    Raises `WorldError` when the ranks cannot work together, ``LookupError`` for an engine that is not
    installed.
    """

    def __init__(self, rendezvous: Rendezvous | None = None) -> None:
        # It reads the options itself, so that a bad one on this rank is told to the others.
        self.world = bootstrap(rendezvous=rendezvous)
        chosen = self.world.options
        rank, size, local = self.world.rank, self.world.size, self.world.local_devices
        cores, place = self.world.cores, self.world.place
        self.engine = create_engine(chosen.engine, local, cores=cores, place=place)
        lowered_as = getattr(self.engine, "lowered_as", "cpu")
        jax_private.lower_as(lowered_as)
        self.dumps = dump.begin(chosen.dump, rank)
        self.trace = trace.begin(self.world, self.engine, _capi.Rows)
        self.executor = Executor(
            self.engine,
            self.world,
            chosen,
            instrument=self.trace,
            signals=_capi.interrupts,
        )
        costs, hosts = self.world.costs, [p.host for p in self.world.peers]
        self.overlap = policy_of(
            costs.text,
            hosts,
            origin=costs.origin,
            named=costs.named,
            enabled=chosen.overlap,
            lowered_as=lowered_as,
        )
        if self.overlap is not None and chosen.profile:
            self.overlap = replace(self.overlap, measured=known(self.world.measured, rank))
        self.put_copy = self.engine.put_copy if isinstance(self.engine, CopyingEngine) else None
        self.jax_arrays = getattr(self.engine, "jax_arrays", False)
        self.unaligned = getattr(self.engine, "unaligned", False)
        # Whether buffers of equal numbers may have one array.
        self.shares_scalars = self.jax_arrays and self.put_copy is not None
        self.calls = self._calls()
        self.devices = make_devices(size, local, rank)
        for device in self.devices:
            device.serve(self, on_host=getattr(self.engine, "host_memory", False))
        self.local_devices = self.devices[rank * local : (rank + 1) * local]
        self.memories = tuple(m for d in self.local_devices for m in d.memories)
        self.platform_name, self.platform_version = Text(PLATFORM), Text(platform_version())
        self.topology = Topology(self.devices, self)
        self.device_pointers = pointers(self.devices)
        self.local_device_pointers = pointers(self.local_devices)
        self.memory_pointers = pointers(self.memories)
        self._executables: WeakSet[_capi.LoadedExecutable] = WeakSet()
        self._lock = threading.Lock()
        self._array_types: dict[tuple[TensorType, tuple[int, ...]], _capi.ArrayType] = {}

        clients.add(self)

    def _calls(self) -> NativePolicy | None:
        """Where segments may call collectives themselves."""
        world = self.world
        if not can_call(self.engine, world.options):
            return None
        if isinstance(self.engine, StreamedEngine):
            return NativePolicy.over_nccl() if world.calls_nccl else None
        return NativePolicy.of(world.local_devices, world.size, world.nodes)

    @property
    def options(self) -> Options:
        return self.world.options

    @cached_property
    def target(self) -> dict[str, str]:
        """What programs that are compiled for this client depend on."""
        world = self.world
        return target(self.engine, world.options, world.size, self.overlap)

    def array_type(self, type: TensorType, order: tuple[int, ...] = ()) -> _capi.ArrayType:
        """The C form of a type, made once. Raises ``KeyError`` for types that PJRT lacks."""
        known = self._array_types.get((type, order))
        if known is None:
            known = self._array_types[type, order] = _capi.ArrayType(type, order)
        return known

    def loads(self, executable: _capi.LoadedExecutable) -> None:
        """An executable is made for this client."""
        with self._lock:
            self._executables.add(executable)

    def ways(self, executable: object) -> dict[str, str]:
        """How an executable's collectives move GPUs' arrays, by name, once it has run here."""
        with self._lock:
            loaded = [e.loaded for e in self._executables if e.executable is executable]
        return next(filter(None, (made.walker.ways() for made in loaded)), {})

    def observe(self, instrument: Instrument) -> Callable[[], None]:
        """Tell ``instrument`` what is run from now on, until what this gives is called."""
        end = self.executor.observe(instrument)
        self._reconsider()

        def ends() -> None:
            end()
            self._reconsider()

        return ends

    def _reconsider(self) -> None:
        """The short way of runs is no way where somebody watches."""
        with self._lock:
            for executable in list(self._executables):
                executable.use_single(executable.loaded.single)

    def device(self, id: int) -> _capi.Device:
        """The device with this id. Raises ``LookupError``."""
        if not 0 <= id < len(self.devices):
            raise LookupError(f"no device with id {id}: there are {len(self.devices)} devices")
        return self.devices[id]

    def put(
        self,
        host: np.ndarray,
        type: TensorType,
        memory: _capi.Memory,
        order: tuple[int, ...] = (),
    ) -> _capi.Buffer:
        """A buffer with the content of a host array, which nobody may write to any more.

        ``order``: the layout that the buffer is to have, its dimensions from minor to major.
        """
        ordinal = memory.device.ordinal
        value = Value.of(self.engine, self.engine.put(host, type, ordinal), type, ordinal)
        return _capi.make_buffer(value, self.array_type(type, order), memory)

    def copy(self, value: Value) -> Value:
        """A copy on the same device that shares no memory with ``value``."""
        array = self.engine.copy(value.array(), value.ordinal)
        return Value.of(self.engine, array, value.type, value.ordinal)


def value_of(
    array: Any, promise: Promise | None, position: int, type: TensorType, memory: _capi.Memory
) -> Value:
    """The value of an array of the engine that has the memory; where there is none, of what is promised."""
    device = memory.device
    other = None if array is not None else promise
    return Value(type, device.ordinal, device.client.engine, array, other, position)


def element_name(code: int) -> str:
    """The element type of a PJRT_Buffer_Type. Raises ``NotImplementedError`` for those without data."""
    name = _TYPE_NAMES.get(code, "invalid")
    if name in ("invalid", "token"):
        raise NotImplementedError(f"stretto has no arrays of PJRT buffer type {code} ({name})")
    return name


@lru_cache(maxsize=4096)
def tensor_type(code: int, dimensions: tuple[int, ...]) -> TensorType:
    """The type of an array of a PJRT_Buffer_Type, made once. Raises as `element_name` does."""
    return TensorType(element_name(code), dimensions)


def memory_of(device: int | None, memory: int | None) -> _capi.Memory:
    """The memory meant by a (device, memory) pair of pointers: the device's default one if null."""
    found = _capi.take(memory) if memory else None
    if found is None:
        owner: _capi.Device = _capi.take(device)
        if not owner.memories:
            raise ValueError(f"{owner.name} belongs to process {owner.process_index}")
        return owner.memories[0]
    return found


_plugin_attributes: list[NamedValues] = []


@entry("PJRT_Plugin_Initialize")
def plugin_initialize(args: Any) -> None:
    pass


@entry("PJRT_Plugin_Attributes")
def plugin_attributes(args: Any) -> None:
    if not _plugin_attributes:  # kept for good: the attributes have the lifetime of the process
        attributes = {
            "stretto_version": version("stretto"),
            # jaxlib sends modules in the form of the version that a plugin names. Unasked it takes one that
            # is months old, which lacks the newest operations.
            "stablehlo_current_version": stablehlo.current_version(),
        }
        _plugin_attributes.append(NamedValues(attributes))
    values = _plugin_attributes[0]
    args.attributes, args.num_attributes = values.address, values.count


@entry("PJRT_Client_Create")
def create(args: Any) -> None:
    client = Client(store.rendezvous())
    args.client = _capi.give(client)
    answers.start()
    rest.expect(REST_ALONE if client.world.size == 1 else REST_OF_RANKS)
    _guard_signals()


def _guard_signals() -> None:
    """Have handlers in Python, such as that of Ctrl-C, wait while the main thread is in the plugin."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        if callable(signal.getsignal(number)):
            _capi.guard(int(number))
            return
    # A shell's background jobs ignore Ctrl-C, and the program may set handlers later. Of a signal that is
    # ignored by default nobody notices for a moment what its handler is.
    if signal.getsignal(signal.SIGURG) is signal.SIG_DFL:
        signal.signal(signal.SIGURG, lambda *_: None)
        try:
            _capi.guard(int(signal.SIGURG))
        finally:
            signal.signal(signal.SIGURG, signal.SIG_DFL)


@entry("PJRT_Client_PlatformName")
def client_platform_name(args: Any) -> None:
    client: Client = _capi.take(args.client)
    args.platform_name, args.platform_name_size = (
        client.platform_name.address,
        client.platform_name.size,
    )


@entry("PJRT_Client_PlatformVersion")
def client_platform_version(args: Any) -> None:
    text = _capi.take(args.client).platform_version
    args.platform_version, args.platform_version_size = text.address, text.size


@entry("PJRT_Client_ProcessIndex")
def process_index(args: Any) -> None:
    args.process_index = _capi.take(args.client).world.rank


@entry("PJRT_Client_TopologyDescription")
def topology_description(args: Any) -> None:
    args.topology = _capi.lend(_capi.take(args.client).topology)


@entry("PJRT_Client_Devices")
def client_devices(args: Any) -> None:
    client: Client = _capi.take(args.client)
    args.devices, args.num_devices = ctypes.addressof(client.device_pointers), len(client.devices)


@entry("PJRT_Client_AddressableDevices")
def addressable_devices(args: Any) -> None:
    client: Client = _capi.take(args.client)
    args.addressable_devices = ctypes.addressof(client.local_device_pointers)
    args.num_addressable_devices = len(client.local_devices)


@entry("PJRT_Client_AddressableMemories")
def addressable_memories(args: Any) -> None:
    client: Client = _capi.take(args.client)
    args.addressable_memories = ctypes.addressof(client.memory_pointers)
    args.num_addressable_memories = len(client.memories)


@entry("PJRT_Client_LookupDevice")
def lookup_device(args: Any) -> None:
    args.device = _capi.lend(_capi.take(args.client).device(args.id))


@entry("PJRT_Client_LookupAddressableDevice")
def lookup_addressable_device(args: Any) -> None:
    local = _capi.take(args.client).local_devices
    if not 0 <= args.local_hardware_id < len(local):
        raise LookupError(
            f"no local device {args.local_hardware_id}: this process has {len(local)} devices"
        )
    args.addressable_device = _capi.lend(local[args.local_hardware_id])


@entry("PJRT_Client_DefaultDeviceAssignment")
def default_device_assignment(args: Any) -> None:
    client: Client = _capi.take(args.client)
    count = args.num_replicas * args.num_partitions
    if count > args.default_assignment_size:
        raise ValueError(f"no room for {count} devices in {args.default_assignment_size}")
    # A program for this process alone runs on its own devices.
    chosen = client.local_devices if count <= len(client.local_devices) else client.devices
    if count > len(chosen):
        raise ValueError(f"{count} devices asked for; there are {len(chosen)}")
    if count:
        ids = (ctypes.c_int * count).from_address(args.default_assignment)
        ids[:] = [device.id for device in chosen[:count]]


@entry("PJRT_Client_UpdateGlobalProcessInfo")
def update_global_process_info(args: Any) -> None:
    pass  # news of jax.distributed; stretto watches over its ranks itself


@entry("PJRT_Device_MemoryStats")
def memory_stats(args: Any) -> None:
    device: _capi.Device = _capi.take(args.device)
    if device.ordinal < 0:
        raise ValueError(f"{device.name} belongs to process {device.process_index}")
    stats = device.client.engine.memory_stats(device.ordinal)
    args.bytes_in_use = stats.get("bytes_in_use", 0)
    fields = {name for _, name in abi.fields(abi.STRUCTS["PJRT_Device_MemoryStats_Args"])}
    for name in fields:
        if name.endswith("_is_set"):
            field = name.removesuffix("_is_set")
            setattr(args, name, field in stats)
            setattr(args, field, stats.get(field, 0))


@entry("PJRT_Device_CreateAsyncTrackingEvent")
def create_async_tracking_event(args: Any) -> None:
    args.event = _capi.give(_capi.Handle())


@entry("PJRT_ExecuteContext_Create")
def create_execute_context(args: Any) -> None:
    args.context = _capi.give(_capi.Handle())


def shape_of(args: Any) -> TensorType:
    """The type in the ``shape_…`` fields of several structs."""
    return tensor_type(args.shape_element_type, read_int64s(args.shape_dims, args.shape_num_dims))


@entry("PJRT_Client_CreateUninitializedBuffer")
def create_uninitialized_buffer(args: Any) -> None:
    client: Client = _capi.take(args.client)
    type = shape_of(args)
    host = np.zeros(type.shape, type.numpy)
    args.buffer = _capi.give(client.put(host, type, memory_of(args.device, args.memory)))
