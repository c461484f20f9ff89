"""Executables: compiling a program, running it, and what JAX asks about it.

A compiled program is described by `Executable` (types, memory kinds, optimized HLO) and run by
`LoadedExecutable`. The run itself is in the C face, which calls `LoadedProgram.execute`.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from importlib.metadata import version
from typing import Any
from weakref import WeakSet

from stretto.hlo_frontend import stablehlo
from stretto.hlo_frontend.compile import CompiledModule, CompileSpec, compile_stablehlo
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.hlo_frontend.schema import (
    CompileOptionsProto,
    DeviceAssignmentProto,
    HloModuleProtoWithConfig,
)
from stretto.runtime.errors import InvalidProgramError
from stretto.runtime.execution.compiled_segments import CompiledSegments, compile_segments
from stretto.runtime.execution.executor import LoadedProgram
from stretto.runtime.execution.side_by_side import beside
from stretto.runtime.program import calls_back
from stretto.runtime.program.memory_plan import MemoryPlan
from stretto.runtime.recording import statistics

from . import _capi, abi, callbacks, executable_codec, garbage, jax_private, sharing
from .client import Client
from .device import MEMORY_KINDS
from .executable_codec import StoredExecutable
from .profile import keeper_of
from .shardings import Shardings
from .sharing import Taken
from .structs import STRUCTS, NamedValues, read_bytes
from .table import entry
from .topology import Maker, Text, Topology, pointers

_log = logging.getLogger("stretto")
# All that are there in this process, for `stretto.explain` to find the one that JAX holds.
executables: WeakSet[Executable] = WeakSet()


@cache
def _versions() -> tuple[str, str]:
    """Of what makes machine code of a program. Looked up once: they are read from files."""
    return version("stretto"), version("jaxlib")


class Executable(_capi.Executable):  # type: ignore[misc]
    """A compiled program. ``options`` is what it was compiled with.

    ``source`` is the module it was compiled from; where it was loaded, ``stored`` is what it was loaded from.
    ``module_digest``: a digest of ``source`` without its locations, where the caller has it.
    """

    def __init__(
        self,
        maker: Maker,
        compiled: CompiledModule,
        segments: Callable[[], CompiledSegments],
        options: bytes,
        *,
        source: bytes = b"",
        stored: StoredExecutable | None = None,
        module_digest: bytes = b"",
    ) -> None:
        if module_digest:
            self.module_digest = module_digest
        self.maker, self.compiled, self._segments = maker, compiled, segments
        self.options, self._source, self._stored = options, source, stored
        program = compiled.program
        self.name = Text(program.name)
        layouts = compiled.output_layouts or ((),) * len(program.outputs)
        self.output_types = [
            maker.array_type(type, order)
            for type, order in zip(program.outputs, layouts, strict=True)
        ]
        self.set_counts(program.num_replicas, program.num_partitions, len(self.output_types))
        outputs = program.outputs
        self.type_codes = (ctypes.c_int * len(outputs))(
            *(abi.BUFFER_TYPES[t.dtype] for t in outputs)
        )
        self.ranks = (ctypes.c_size_t * len(outputs))(*(len(t.shape) for t in outputs))
        extents = [extent for t in outputs for extent in t.shape]
        self.dimensions = (ctypes.c_int64 * len(extents))(*extents)
        self.memory_kinds = tuple(kind or MEMORY_KINDS[0] for kind in compiled.output_memory_kinds)
        self._kind_texts = {kind: Text(kind) for kind in self.memory_kinds}
        texts = [self._kind_texts[kind] for kind in self.memory_kinds]
        self.kind_pointers = (ctypes.c_void_p * len(texts))(*(t.address for t in texts))
        self.kind_sizes = (ctypes.c_size_t * len(texts))(*(t.size for t in texts))
        executables.add(self)

    @cached_property
    def optimized_program(self) -> bytes:
        """A serialized HloModuleProtoWithConfig of the partitioned program; of one for one device what the
        engine made of it, where that tells."""
        if self.compiled.source is not None:
            return self.compiled.hlo_with_config()
        (segment,) = self._segments().segments or (None,)
        return self.compiled.hlo_with_config(getattr(segment, "optimized_hlo", b""))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the program, its options and what else it depends on."""
        if self._stored is not None:
            return self._stored.fingerprint
        digest = hashlib.sha256()
        for part in (*_versions(), self.maker.engine.name):
            digest.update(part.encode() + b"\0")
        # Of the options, those that are read count: the others hold maps, which are serialized in any order.
        options = CompileOptionsProto.FromString(self.options)
        options.DiscardUnknownFields()
        digest.update(options.SerializeToString(deterministic=True) + b"\0" + self.module_digest)
        return digest.hexdigest()

    @cached_property
    def module_digest(self) -> bytes:
        """A digest of the module: where it was written does not make it another program."""
        return _digest(self._source)

    @cached_property
    def fingerprint_text(self) -> Text:
        return Text(self.fingerprint)

    @cached_property
    def shardings(self) -> Shardings:
        """How arguments and results are divided among the devices."""
        source = self.compiled.source
        return Shardings(b"" if source is None else source.hlo)

    @cached_property
    def cost_analysis(self) -> NamedValues:
        """XLA's estimate for the partitioned program on one device: flops, bytes accessed and the like."""
        hlo = HloModuleProtoWithConfig.FromString(self.optimized_program).hlo_module
        return NamedValues(jax_private.cost_analysis(hlo.SerializeToString()))

    @cached_property
    def memory(self) -> MemoryPlan:
        """What a run needs on each device."""
        return self._segments().memory()

    def serialized(self) -> bytes:
        """What `PJRT_Executable_DeserializeAndLoad` takes. Raises ``NotImplementedError``."""
        return executable_codec.to_bytes(self.to_store())

    def to_store(self) -> StoredExecutable:
        """The program with the machine code of its segments. Raises ``NotImplementedError``."""
        segments = self._segments()
        if segments.has_host_callbacks and not jax_private.caches_callbacks():
            raise NotImplementedError(
                "a program that calls back into Python cannot be serialized with this release of JAX"
            )
        return StoredExecutable(
            self.maker.target,
            self.options,
            self.compiled,
            segments.code(self.compiled.program),
            self.fingerprint,
        )


class LoadedExecutable(_capi.LoadedExecutable):  # type: ignore[misc]
    """A program on its devices. ``device_ids[i]`` is the global device of logical id i."""

    def __init__(
        self,
        client: Client,
        executable: Executable,
        loaded: LoadedProgram,
        device_ids: tuple[int, ...],
    ) -> None:
        program = executable.compiled.program
        self.executable = executable
        self.loaded = loaded
        self.device_ids = device_ids
        self.devices = tuple(client.device(device_ids[logical]) for logical, _ in loaded.local)
        self.device_pointers = pointers(self.devices)
        memories = [
            [device.memories[MEMORY_KINDS.index(kind)] for kind in executable.memory_kinds]
            for device in self.devices
        ]
        client.loads(self)
        self.prepare(
            loaded.begin,
            client.copy,
            loaded.single,
            loaded.run_apart if getattr(client.engine, "callers", 1) > 1 else None,
            client.engine,
            loaded.has_host_callbacks,
            len(program.inputs),
            tuple(program.donated),
            executable.output_types,
            memories,
            self.devices,
            loaded.cannot_fail,
            loaded.ends_as_one,
            loaded.join,
            loaded.consumes,
        )

    @cached_property
    def device_assignment(self) -> bytes:
        """A serialized DeviceAssignmentProto."""
        program = self.executable.compiled.program
        proto = DeviceAssignmentProto(
            replica_count=program.num_replicas, computation_count=program.num_partitions
        )
        for partition in range(program.num_partitions):
            ids = self.device_ids[partition :: program.num_partitions]
            proto.computation_devices.add().replica_device_ids.extend(ids)
        return proto.SerializeToString()


def _digest(source: bytes) -> bytes:
    with stablehlo.parsed(source) as parsed:
        module = parsed.operation.get_asm(enable_debug_info=False)
    return hashlib.sha256(module.encode()).digest()


def compile_module(maker: Maker, source: bytes, options: bytes) -> CompiledModule:
    """Take a StableHLO module through XLA and the front end."""
    num_replicas, num_partitions, _ = _counts(options)
    statistics.compiled(programs=1)
    return compile_stablehlo(
        source,
        CompileSpec(num_replicas, num_partitions, options),
        pseudo_tokens=maker.options.pseudo_tokens,
        rewrites=maker.options.rewrite,
        valid=ValidPolicy.of(maker.options),
        overlap=maker.overlap,
        interleave=maker.options.interleave,
        schedule=maker.options.schedule,
        splits=maker.options.split,
        calls=maker.calls,
        dump=None if maker.dumps is None else maker.dumps.program(),
    )


def compile_and_load(client: Client, source: bytes, options: bytes) -> LoadedExecutable:
    """Compile a StableHLO module for the devices that the options name, or take what another rank of this
    host compiles (see `sharing`)."""
    _, _, device_ids = _placement(client, options)
    host_callbacks = callbacks.of_module(source)
    local = tuple(client.devices[i].ordinal for i in device_ids)
    ordinals = tuple(ordinal for ordinal in local if ordinal >= 0)
    entry = None if host_callbacks else sharing.shared(client, source, options, ordinals)
    if entry is None:
        return _compile_here(client, source, options, device_ids, host_callbacks)
    taken = entry.take()
    with garbage.kept():
        if taken is not None:
            return _take(client, taken, source, options, device_ids)
        made, digest = None, b""
        try:
            found = _compile_here(client, source, options, device_ids)
            made, digest = found.executable.to_store(), found.executable.module_digest
        finally:
            entry.end(made, digest)
    return found


def _compile_here(
    client: Client,
    source: bytes,
    options: bytes,
    device_ids: tuple[int, ...],
    host_callbacks: callbacks.Callables = (),
) -> LoadedExecutable:
    with garbage.kept():
        compiled = compile_module(client, source, options)
        _warn(client, compiled)
        # While the engine compiles, which leaves Python alone.
        digested = beside(partial(_digest, source))
        loaded = _onto(client, compiled, device_ids, host_callbacks)
        digest = digested.result()
    executable = Executable(
        client,
        compiled,
        lambda: loaded.compiled,
        options,
        source=source,
        module_digest=digest,
    )
    return LoadedExecutable(client, executable, loaded, device_ids)


def _take(
    client: Client, taken: Taken, source: bytes, options: bytes, device_ids: tuple[int, ...]
) -> LoadedExecutable:
    """The program as another rank has compiled it, on this rank's devices."""
    compiled = taken.stored.compiled
    _warn(client, compiled)
    loaded = _onto(client, compiled, device_ids, code=taken.stored.code)
    executable = Executable(
        client,
        compiled,
        lambda: loaded.compiled,
        options,
        source=source,
        module_digest=taken.module_digest,
    )
    return LoadedExecutable(client, executable, loaded, device_ids)


def _warn(client: Client, compiled: CompiledModule) -> None:
    """Tell, on rank 0, what the user should know of a program."""
    for loop in compiled.interleaved:
        if (loop.why or getattr(loop, "rounds", False)) and client.world.rank == 0:
            _log.warning("%s", loop.describe())
    rounding = not getattr(client.engine, "reproducible", False)
    if rounding and client.world.rank == 0 and any(not i.why for i in compiled.interleaved):
        _log.warning(
            "engine %s does not promise the same bits for loops of any length: rewritten pipelines of %s "
            "give the results of the program as it is written up to rounding",
            client.engine.name,
            compiled.program.name,
        )


def compile_only(maker: Maker, source: bytes, options: bytes) -> Executable:
    """Compile a StableHLO module for devices that need not be here, to be serialized."""
    if callbacks.of_module(source):
        raise NotImplementedError("a program that calls back into Python is compiled where it runs")
    with garbage.kept():
        compiled = compile_module(maker, source, options)
        segments = compile_segments(compiled.program, maker.engine)
    return Executable(maker, compiled, lambda: segments, options, source=source)


def load(client: Client, data: bytes, options: bytes = b"") -> LoadedExecutable:
    """Load what `Executable.serialized` gave; nothing is compiled of what it holds the code of.

    ``options``, where given, take the place of those it was compiled with: they may name other devices.
    Raises `InvalidProgramError`, or `OtherTargetError` if it was compiled for something else.
    """
    stored = executable_codec.from_bytes(data, client.target)
    options, compiled = options or stored.options, stored.compiled
    num_replicas, num_partitions, device_ids = _placement(client, options)
    program = compiled.program
    if (num_replicas, num_partitions) != (program.num_replicas, program.num_partitions):
        raise InvalidProgramError(
            f"the executable is for {program.num_replicas} replicas x {program.num_partitions} "
            f"partitions, it is to be loaded for {num_replicas} x {num_partitions}"
        )
    host_callbacks: callbacks.Callables = ()
    if any(calls_back(segment.module) for segment in program.segments):
        host_callbacks = callbacks.of_this_thread()
        if not host_callbacks:
            raise InvalidProgramError(callbacks.MISSING)
    loaded = _onto(client, compiled, device_ids, host_callbacks, stored.code)
    executable = Executable(client, compiled, lambda: loaded.compiled, options, stored=stored)
    return LoadedExecutable(client, executable, loaded, device_ids)


def _onto(
    client: Client,
    compiled: CompiledModule,
    device_ids: tuple[int, ...],
    host_callbacks: Sequence[Any] = (),
    code: Sequence[bytes] = (),
) -> LoadedProgram:
    """The program on its devices. ``code``: of segments that need not be compiled."""
    loaded = client.executor.load(
        compiled.program,
        device_ids,
        host_callbacks,
        schedule=compiled.schedule,
        with_order=compiled.with_order,
        rewritten=compiled.rewritten,
        as_written=compiled.as_written,
        code=code,
        keep=keeper_of(
            client.world, client.overlap, compiled, has_host_callbacks=bool(host_callbacks)
        ),
    )
    if compiled.source is not None:
        loaded.compile_walked = lambda: _onto(
            client, compiled.as_walked(), device_ids, host_callbacks
        )
    return loaded


def _counts(options: bytes) -> tuple[int, int, bytes]:
    """Replicas, partitions, and the device assignment."""
    build = CompileOptionsProto.FromString(options).executable_build_options
    return max(build.num_replicas, 1), max(build.num_partitions, 1), build.device_assignment


def _placement(client: Client, options: bytes) -> tuple[int, int, tuple[int, ...]]:
    """Replicas, partitions, and the global device id of every logical id."""
    num_replicas, num_partitions, assignment = _counts(options)
    device_ids = _device_ids(client, assignment, num_replicas, num_partitions)
    return num_replicas, num_partitions, device_ids


def _device_ids(
    client: Client, assignment: bytes, num_replicas: int, num_partitions: int
) -> tuple[int, ...]:
    """Global device id of every logical id, ``replica * num_partitions + partition``."""
    count = num_replicas * num_partitions
    if assignment:
        proto = DeviceAssignmentProto.FromString(assignment)
        columns = [list(c.replica_device_ids) for c in proto.computation_devices]
        if len(columns) != num_partitions or any(len(c) != num_replicas for c in columns):
            raise InvalidProgramError(
                f"the device assignment is not {num_replicas} replicas x {num_partitions} partitions"
            )
        return tuple(columns[p][r] for r in range(num_replicas) for p in range(num_partitions))
    chosen = client.local_devices if count <= len(client.local_devices) else client.devices
    if count > len(chosen):
        raise InvalidProgramError(
            f"the program is for {count} devices; there are {len(client.devices)}. "
            "Set STRETTO_LOCAL_DEVICES, or start more ranks"
        )
    return tuple(device.id for device in chosen[:count])


@entry("PJRT_Client_Compile")
def compile_program(args: Any) -> None:
    client: Client = _capi.take(args.client)
    args.executable = _capi.give(compile_and_load(client, *_source_and_options(args)))


@entry("PJRT_Compile")
def compile_for_topology(args: Any) -> None:
    topology: Topology = _capi.take(args.topology)
    args.executable = _capi.give(compile_only(topology.maker, *_source_and_options(args)))


def _source_and_options(args: Any) -> tuple[bytes, bytes]:
    program = _program(args.program)
    format = read_bytes(program.format, program.format_size)
    if format != b"mlir":
        raise NotImplementedError(f"stretto compiles StableHLO in MLIR, not {format.decode()!r}")
    source = read_bytes(program.code, program.code_size)
    return source, read_bytes(args.compile_options, args.compile_options_size)


def _program(address: int) -> Any:
    return STRUCTS["PJRT_Program"].from_address(address)


@entry("PJRT_Executable_DeserializeAndLoad")
def deserialize_and_load(args: Any) -> None:
    client: Client = _capi.take(args.client)
    data = read_bytes(args.serialized_executable, args.serialized_executable_size)
    options = read_bytes(
        args.overridden_serialized_compile_options,
        args.overridden_serialized_compile_options_size,
    )
    args.loaded_executable = _capi.give(load(client, data, options))


@entry("PJRT_LoadedExecutable_GetExecutable")
def get_executable(args: Any) -> None:
    args.executable = _capi.give(_capi.take(args.loaded_executable).executable)


@entry("PJRT_LoadedExecutable_AddressableDevices")
def executable_devices(args: Any) -> None:
    loaded: LoadedExecutable = _capi.take(args.executable)
    args.addressable_devices = ctypes.addressof(loaded.device_pointers)
    args.num_addressable_devices = len(loaded.devices)


@entry("PJRT_LoadedExecutable_GetDeviceAssignment")
def get_device_assignment(args: Any) -> None:
    data = _capi.Bytes(_capi.take(args.executable).device_assignment)
    args.serialized_bytes, args.serialized_bytes_size = data.address, len(data.data)
    args.serialized_device_assignment = _capi.give(data)
    args.serialized_device_assignment_deleter = _capi.deleter()


@entry("PJRT_LoadedExecutable_Delete")
def delete(args: Any) -> None:
    _capi.take(args.executable).delete()


@entry("PJRT_LoadedExecutable_Fingerprint")
def loaded_fingerprint(args: Any) -> None:
    _fingerprint(args, _capi.take(args.executable).executable)


@entry("PJRT_Executable_Fingerprint")
def executable_fingerprint(args: Any) -> None:
    _fingerprint(args, _capi.take(args.executable))


def _fingerprint(args: Any, executable: Executable) -> None:
    text = executable.fingerprint_text
    args.executable_fingerprint, args.executable_fingerprint_size = text.address, text.size


@entry("PJRT_Executable_Name")
def name(args: Any) -> None:
    text = _capi.take(args.executable).name
    args.executable_name, args.executable_name_size = text.address, text.size


@entry("PJRT_Executable_OptimizedProgram")
def optimized_program(args: Any) -> None:
    code = _capi.take(args.executable).optimized_program
    program = _program(args.program)
    if program.code:
        ctypes.memmove(program.code, code, len(code))
        return
    program.code_size = len(code)
    program.format, program.format_size = _HLO_WITH_CONFIG.address, _HLO_WITH_CONFIG.size


_HLO_WITH_CONFIG = Text("hlo_with_config")


@entry("PJRT_Executable_OutputElementTypes")
def output_element_types(args: Any) -> None:
    executable: Executable = _capi.take(args.executable)
    args.output_types = ctypes.addressof(executable.type_codes)
    args.num_output_types = len(executable.output_types)


@entry("PJRT_Executable_OutputDimensions")
def output_dimensions(args: Any) -> None:
    executable: Executable = _capi.take(args.executable)
    args.num_outputs = len(executable.output_types)
    args.dims = ctypes.addressof(executable.dimensions)
    args.dim_sizes = ctypes.addressof(executable.ranks)


@entry("PJRT_Executable_OutputMemoryKinds")
def output_memory_kinds(args: Any) -> None:
    executable: Executable = _capi.take(args.executable)
    args.num_outputs = len(executable.memory_kinds)
    args.memory_kinds = ctypes.addressof(executable.kind_pointers)
    args.memory_kind_sizes = ctypes.addressof(executable.kind_sizes)


@entry("PJRT_Executable_SizeOfGeneratedCodeInBytes")
def size_of_generated_code(args: Any) -> None:
    args.size_in_bytes = -1  # engines do not tell


@entry("PJRT_Executable_GetCostAnalysis")
def get_cost_analysis(args: Any) -> None:
    properties = _capi.take(args.executable).cost_analysis
    args.properties, args.num_properties = properties.address, properties.count


@entry("PJRT_Executable_GetCompiledMemoryStats")
def compiled_memory_stats(args: Any) -> None:
    memory = _capi.take(args.executable).memory
    for _, field in abi.fields(abi.STRUCTS["PJRT_Executable_GetCompiledMemoryStats_Args"])[1:]:
        setattr(args, field, 0)
    args.argument_size_in_bytes, args.output_size_in_bytes = memory.arguments, memory.results
    args.alias_size_in_bytes, args.temp_size_in_bytes = memory.reused, memory.temporary
    args.total_size_in_bytes = args.peak_memory_in_bytes = memory.peak


@entry("PJRT_Executable_Serialize")
def serialize(args: Any) -> None:
    data = _capi.Bytes(_capi.take(args.executable).serialized())
    args.serialized_bytes, args.serialized_bytes_size = data.address, len(data.data)
    args.serialized_executable = _capi.give(data)
    args.serialized_executable_deleter = _capi.deleter()


@entry("PJRT_Executable_GetCompileOptions")
def get_compile_options(args: Any) -> None:
    data = _capi.Bytes(_capi.take(args.executable).options)
    args.serialized_bytes, args.serialized_bytes_size = data.address, len(data.data)
    args.serialized_compile_options = _capi.give(data)
    args.serialized_compile_options_deleter = _capi.deleter()
