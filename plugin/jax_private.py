"""Every private name of JAX that the plugin uses, each in one function.

JAX treats a platform whose name it does not know as one without CPU lowerings, donation or callbacks.
stretto's engines run what XLA's CPU client runs, so it is given the treatment of ``cpu``. The
signatures used here are pinned by ``tests/plugin/test_jax_private.py``, which says what to look at when
one of them moves.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from inspect import signature
from types import FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import numpy as np

if TYPE_CHECKING:
    from stretto.runtime.execution.value import Value
    from stretto.runtime.job.relay import Service
    from stretto.runtime.job.world import World

PLATFORM = "stretto"


def requested_platforms() -> list[str]:
    """The platforms that the user asked for, by ``JAX_PLATFORMS`` or ``jax_platforms``; may be empty."""
    from jax._src import config

    value = config.jax_platforms.value
    return [name.strip() for name in value.split(",") if name.strip()] if value else []


def offer_cpu() -> None:
    """Make JAX's CPU backend available after the platforms that the user asked for, if these name stretto.

    Callbacks and ``jax.devices("cpu")`` need it; what comes first stays the default.
    """
    from jax._src import config

    requested = requested_platforms()
    if PLATFORM in requested and "cpu" not in requested:
        config.config.update("jax_platforms", ",".join([*requested, "cpu"]))


def register(capsule: Any) -> None:
    """Register the plugin with JAX, unless that has been done."""
    from jax._src import xla_bridge

    if PLATFORM in xla_bridge._backend_factories:
        return
    # An empty `options` keeps those of jax_pjrt_client_create_options in a distributed job; the name
    # on this list spares users a warning that the platform is experimental.
    xla_bridge._nonexperimental_plugins.add(PLATFORM)
    xla_bridge.register_plugin(PLATFORM, c_api=capsule, options={})


def keep_clients() -> None:
    """Have JAX's clients outlive all that Python has when it ends.

    A NumPy array that shares an array's memory gives it back through jaxlib's client, which it does not keep:
    where Python ends by freeing the client first, that is gone.
    """
    atexit.register(_keep_clients)


def _keep_clients() -> None:
    from jax._src import xla_bridge

    for backend in list(xla_bridge._backends.values()):
        if backend.platform == PLATFORM:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def tell_failures_once() -> None:
    """Have JAX not tell of a failed run at its end, twice, where Python has printed its error already.

    JAX awaits the runs of programs with side effects then. On other platforms their calls have raised.
    """
    atexit.register(_forget_told)


def _forget_told() -> None:
    from jax._src import dispatch

    told = getattr(sys, "last_value", None)  # of the exception that ends the program
    if not isinstance(told, RuntimeError):
        return
    tokens = dispatch.runtime_tokens
    for table in (tokens.current_tokens, tokens.output_runtime_tokens):
        for key, token in list(table.items()):
            try:
                token.block_until_ready()
            except RuntimeError as error:
                if str(error) in str(told):
                    del table[key]


def know_launchers() -> None:
    """Have ``jax.distributed.initialize()`` find launchers of MPI that JAX does not know, after its own.

    The ranks then join as they do without it, a little earlier, and rank 0 has a port for JAX's service.
    """
    from jax._src.clusters import cluster

    from stretto.runtime.job import launcher, world
    from stretto.runtime.options import in_force

    class MpiLauncher(cluster.ClusterEnv):
        name = PLATFORM

        @classmethod
        def is_env_present(cls) -> bool:
            found = launcher.detect()
            return found is not None and found.size > 1 and in_force().launcher in ("auto", "mpi")

        @classmethod
        def get_coordinator_address(
            cls, timeout_secs: int | None = None, override_coordinator_port: str | None = None
        ) -> str:
            return world.bootstrap().service_address(override_coordinator_port)

        @classmethod
        def get_process_count(cls) -> int:
            return world.bootstrap().size

        @classmethod
        def get_process_id(cls) -> int:
            return world.bootstrap().rank


def join_distributed() -> None:
    """Give the ranks of a job the client and the service of `jax.distributed`, as its ``initialize`` does.

    Only where the program has not called it. stretto's client is made as if there were none (`store`), and
    unless the program has called it JAX's own CPU client too: each process has one of its own.
    """
    from jax._src import distributed, xla_bridge

    from stretto.runtime.job.world import current

    from . import store

    ours, cpu = (xla_bridge._backend_factories[name] for name in (PLATFORM, "cpu"))
    make_ours, make_its = ours.factory, cpu.factory
    if hasattr(make_ours, "__wrapped_for_stretto__"):
        return

    state = distributed.global_state

    def alone(factory: Any) -> Any:
        client, place = state.client, (state.process_id, state.num_processes)
        state.client, state.process_id, state.num_processes = None, 0, 1
        try:
            return factory()
        finally:
            state.client, (state.process_id, state.num_processes) = client, place

    def make() -> Any:
        if state.client is not None and state.client not in _joined:
            store.joined(state.client, state.process_id, state.num_processes)
        made = alone(make_ours)
        world = current()
        if state.client is None and world is not None and world.service is not None:
            _join_distributed(world, world.service)
        return made

    def make_cpu() -> Any:
        return alone(make_its) if state.client in _joined else make_its()

    make.__wrapped_for_stretto__ = make_ours  # type: ignore[attr-defined]
    ours.factory, cpu.factory = make, make_cpu


def _join_distributed(world: World, service: Service) -> None:
    from jax._src import distributed
    from jax._src.lib import _jax

    from stretto.runtime.job.relay import Relay

    relay = Relay(service, world.peers[0].host == world.host)
    state = distributed.global_state
    proxies = os.environ.get(_NO_PROXY)
    os.environ[_NO_PROXY] = "127.0.0.1"
    try:
        if world.rank == 0:
            state.service = _jax.get_distributed_runtime_service(
                f"{service.host}:{service.port}",
                world.size,
                heartbeat_timeout=_NEVER,
                shutdown_timeout=_LEAVE_WITHIN,
            )
        client = _jax.get_distributed_runtime_client(
            relay.address,
            world.rank,
            init_timeout=_JOIN_WITHIN,
            heartbeat_timeout=_NEVER,
            use_compression=True,
        )
        client.connect()
    finally:
        del os.environ[_NO_PROXY]
        if proxies is not None:
            os.environ[_NO_PROXY] = proxies
    state.client, state.process_id, state.num_processes = client, world.rank, world.size
    state.coordinator_address = f"{service.addresses[0]}:{service.port}"
    if distributed._ENABLE_PREEMPTION_SERVICE.value:
        state.preemption_sync_manager = _Preemption(client)
    for kept in (client, state.service):
        _joined.append(kept)
        # In a forked child nobody answers, and neither can be freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    os.register_at_fork(after_in_child=_leave_distributed)


def _leave_distributed() -> None:
    from jax._src import distributed

    if distributed.global_state.client in _joined:
        vars(distributed.global_state).clear()


_joined: list[Any] = []
# Seconds. The control plane watches over the ranks; a relay keeps from JAX that one is gone.
_NEVER = 10**8
_JOIN_WITHIN = 300
_LEAVE_WITHIN = 10
# gRPC would ask a proxy for the way to this host.
_NO_PROXY = "no_grpc_proxy"


class _Preemption:
    """Begins the preemption service when somebody asks it: it takes SIGTERM, which otherwise ends ranks."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._manager: Any = None

    def reached_sync_point(self, step: int) -> bool:
        from jax._src.lib import _jax

        if self._manager is None:
            self._manager = _jax.create_preemption_sync_manager()
            self._manager.initialize(self._client)
        return bool(self._manager.reached_sync_point(step))

    def shutdown(self) -> None:
        if self._manager is not None:
            self._manager.shutdown()


def register_profiler(capsule: Any) -> None:
    """Have `jax.profiler` ask stretto for what it has seen, as JAX does for plugins in files."""
    from jax._src.lib import _profiler

    if not _profiled:
        _profiler.register_plugin_profiler(capsule)
        _profiled.append(True)


_profiled: list[bool] = []


def lower_as(platform: str) -> None:
    """Lower programs for stretto alone as JAX lowers them for this platform, which is the engine's.

    For ``cpu``, as which they are lowered until an engine says otherwise, that gives stretto the CPU rules
    (LAPACK and the rest), donation, Python callbacks and the ``cpu`` branches of ``lax.platform_dependent``.
    A platform that JAX does not know has the rules that hold for all platforms, and donation. Done where a
    module's lowering begins.
    """
    from jax._src import xla_bridge
    from jax._src.interpreters import mlir

    rules = mlir._platform_specific_lowerings
    known = platform in xla_bridge.known_platforms()
    _lowered_as[:] = [platform if known else PLATFORM]
    # Also where a module is lowered for several platforms. One table, so rules that are registered later are
    # shared, too.
    rules[PLATFORM] = rules[platform] if known else {}
    _lower_beyond(*_lowered_as)
    for name in (PLATFORM, *_lowered_as):
        if name not in mlir._platforms_with_donation:
            mlir._platforms_with_donation.append(name)

    original = mlir.lower_jaxpr_to_module
    if hasattr(original, "__wrapped_for_stretto__"):
        return

    @wraps(original)
    def lower_jaxpr_to_module(*args: Any, platforms: Sequence[str], **kwargs: Any) -> Any:
        if tuple(platforms) == (PLATFORM,):
            platforms = tuple(_lowered_as)
            # JAX's CPU backend is there always, another platform's where there are such devices.
            own = None if platforms == ("cpu",) else _AsPlatform(kwargs.get("backend"), *platforms)
            kwargs["backend"] = own
        return original(*args, platforms=platforms, **kwargs)

    lower_jaxpr_to_module.__wrapped_for_stretto__ = original  # type: ignore[attr-defined]
    mlir.lower_jaxpr_to_module = lower_jaxpr_to_module


_lowered_as = ["cpu"]


class _AsPlatform:
    """A backend to lowering rules, which ask for its platform's name first."""

    def __init__(self, backend: Any, platform: str) -> None:
        self._backend = backend
        self.platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def _lower_beyond(platform: str) -> None:
    """Lower what JAX lowers for GPUs alone, though nothing about it is a GPU's: send, receive, broadcast.

    The rules become those of a platform that stretto is lowered as, too. JAX's own CPU backend then refuses
    such a program when it compiles it, instead of JAX when it lowers it.
    """
    from jax._src.interpreters import mlir
    from jax._src.lax import parallel

    def as_gpu(rule: Any) -> Any:
        def lower(ctx: Any, *operands: Any, **parameters: Any) -> Any:
            module = ctx.module_context.replace(platforms=("cuda",))
            return rule(ctx.replace(module_context=module), *operands, **parameters)

        return lower

    for name in ("psend", "precv", "pbroadcast"):
        primitive = getattr(parallel, f"{name}_p")
        if primitive not in mlir._platform_specific_lowerings[platform]:
            rule = mlir._platform_specific_lowerings["cuda"][primitive].rule
            mlir.register_lowering(primitive, as_gpu(rule), platform=platform)


def lower_tokens_in_barriers() -> None:
    """Let tokens of the compiler, which order sends and receives, pass optimization barriers.

    From jax 0.12 on JAX does so itself; before, it asks a token for its sharding.
    """
    from jax._src import core
    from jax._src.interpreters import mlir

    original = mlir.lower_with_sharding_in_types
    if hasattr(core.AbstractToken, "sharding") or hasattr(original, "__wrapped_for_stretto__"):
        return

    @wraps(original)
    def lower_with_sharding_in_types(ctx: Any, op: Any, aval: Any, *more: Any) -> Any:
        return op if isinstance(aval, core.AbstractToken) else original(ctx, op, aval, *more)

    lower_with_sharding_in_types.__wrapped_for_stretto__ = original  # type: ignore[attr-defined]
    mlir.lower_with_sharding_in_types = lower_with_sharding_in_types


def call_what_was_exported() -> None:
    """Let programs for stretto, lowered as for another platform, call what was exported for stretto."""
    from jax._src.export import _export
    from jax._src.interpreters import mlir

    original = _export._call_exported_lowering

    def lower(ctx: Any, *operands: Any, exported: Any) -> Any:
        module, exported_for = ctx.module_context, exported.platforms
        (lowered_as,) = _lowered_as
        alike = tuple(module.platforms) == (lowered_as,) and lowered_as not in exported_for
        if not (alike and PLATFORM in exported_for):
            return original(ctx, *operands, exported=exported)
        inner = ctx.replace(module_context=module.replace(platforms=(PLATFORM,)))
        results = original(inner, *operands, exported=exported)
        if inner.tokens_out is not None:
            ctx.set_tokens_out(inner.tokens_out)
        return results

    mlir.register_lowering(_export.call_exported_p, lower)


def hide_from_source_lines() -> None:
    """Keep this file out of the source lines that JAX gives to operations and errors."""
    from jax._src import source_info_util, traceback_util

    source_info_util.register_exclusion(__file__)
    traceback_util.register_exclusion(__file__)


def share_ffi_targets() -> None:
    """Hand FFI targets and types that a program registers for stretto to XLA's CPU client, which compiles.

    Those registered before this are kept by jaxlib until it is called. Registered for ``cpu``, they are
    the client's own anyway.
    """
    from jax._src.lib import xla_client

    xla, host = xla_client._xla, xla_client.xla_platform_names["cpu"]

    def target(name: str, function: Any, platform: str, api_version: int, traits: Any) -> None:
        del platform
        xla.register_custom_call_target(name, function, host, api_version, traits)

    xla_client.register_custom_call_handler(PLATFORM, target)
    xla_client.register_custom_type_handler(PLATFORM, xla.register_custom_type)


def hand_over_callbacks() -> None:
    """Register the Python callables of a module in `callbacks` while jaxlib compiles it.

    jaxlib takes them beside the module and does not pass them on to plugins.
    """
    from jax._src import compiler
    from jaxlib.mlir import ir

    from . import callbacks

    original = compiler.backend_compile_and_load
    if hasattr(original, "__wrapped_for_stretto__"):
        return

    @wraps(original)
    def backend_compile_and_load(
        backend: Any, module: Any, executable_devices: Any, options: Any, host_callbacks: Any
    ) -> Any:
        if not host_callbacks or backend.platform != PLATFORM:
            return original(backend, module, executable_devices, options, host_callbacks)
        with callbacks.registered(host_callbacks) as mark, module.context:
            module.operation.attributes[callbacks.ATTRIBUTE] = ir.StringAttr.get(mark)
            return original(backend, module, executable_devices, options, host_callbacks)

    backend_compile_and_load.__wrapped_for_stretto__ = original  # type: ignore[attr-defined]
    compiler.backend_compile_and_load = backend_compile_and_load


def use_compilation_cache() -> None:
    """Let programs for stretto be kept in JAX's persistent compilation cache.

    JAX asks a list of platforms whether to use it; stretto answers as cpu does. JAX writes from process 0
    alone, which not all programs run on: here the process of a program's first device writes it, as if it
    were process 0, whole or not at all, since others may be reading. Programs that call back into
    Python are written where JAX hands the functions to call to whoever reads them.
    """
    from jax._src import compilation_cache, compiler, distributed, lru_cache

    used, write = compilation_cache.is_cache_used, compiler._compile_and_write_cache
    read: Any = compilation_cache.get_executable_and_time
    if hasattr(used, "__wrapped_for_stretto__"):
        return

    write_entry = compiler._cache_write
    as_process_0 = {
        **vars(compiler),
        "distributed": SimpleNamespace(global_state=distributed.State()),
    }
    write_entry_as_0 = FunctionType(write_entry.__code__, as_process_0)

    @wraps(write_entry)
    def cache_write(*args: Any) -> None:
        backend = args[3]
        (write_entry_as_0 if backend.platform == PLATFORM else write_entry)(*args)

    @wraps(used)
    def is_cache_used(backend: Any) -> bool:
        return used(_SAVES_EXECUTABLES if backend.platform == PLATFORM else backend)

    @wraps(write)
    def compile_and_write_cache(*args: Any) -> Any:
        backend, _, devices, _, host_callbacks = args[:5]
        first = min(devices, key=lambda device: device.id)
        if backend.platform == PLATFORM and (
            (host_callbacks and not caches_callbacks())
            or first.process_index != backend.process_index()
        ):
            return compiler.backend_compile_and_load(*args[:5])
        return write(*args)

    @wraps(read)
    def get_executable_and_time(
        cache_key: str, options: Any, backend: Any, devices: Any, host_callbacks: Any = ()
    ) -> Any:
        if host_callbacks and backend.platform == PLATFORM:
            backend = _HandingOver(backend)
        return read(cache_key, options, backend, devices, host_callbacks)

    class AtomicCache(lru_cache.LRUCache):
        """Entries appear with all of their content. With a limit of size there is a lock for that."""

        def put(self, key: str, value: bytes) -> None:
            path = self.path / f"{key}{lru_cache._CACHE_SUFFIX}"
            if self.eviction_enabled or not key or path.exists():
                super().put(key, value)
                return
            unfinished = self.path / f"{key}-{uuid4().hex}"
            try:
                unfinished.write_bytes(value)
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)

    is_cache_used.__wrapped_for_stretto__ = used  # type: ignore[attr-defined]
    compile_and_write_cache.__wrapped_for_stretto__ = write  # type: ignore[attr-defined]
    compilation_cache.is_cache_used = is_cache_used
    compilation_cache.LRUCache = AtomicCache  # type: ignore[misc]
    if caches_callbacks():
        compilation_cache.get_executable_and_time = get_executable_and_time  # type: ignore[assignment]
    compiler._compile_and_write_cache = compile_and_write_cache  # type: ignore[assignment]
    cache_write.__wrapped_for_stretto__ = write_entry  # type: ignore[attr-defined]
    compiler._cache_write = cache_write  # type: ignore[assignment]


@cache
def caches_callbacks() -> bool:
    """Whether JAX keeps programs that call back in its cache, as from 0.11.1 on, and hands the functions to
    call to whoever reads them.
    """
    from jax._src import compilation_cache

    return "host_callbacks" in signature(compilation_cache.get_executable_and_time).parameters


class _HandingOver:
    """A backend that hands Python functions to the plugin beside an executable, which jaxlib does not."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def deserialize_executable(
        self, serialized: bytes, devices: Any, options: Any, host_callbacks: Sequence[Any]
    ) -> Any:
        from . import callbacks

        with callbacks.handed_over(host_callbacks):
            return self._backend.deserialize_executable(serialized, devices, options)


_SAVES_EXECUTABLES = SimpleNamespace(platform="cpu", supports_executable_serialization=True)


def compile_for_topologies_without_client() -> None:
    """Compile for a topology with what JAX has for those without a client, though there may be one.

    A client has nothing to add, and jaxlib would wait for it while it holds Python's lock.
    """
    from jax._src import compiler

    original = compiler._get_cross_compile_backend
    if hasattr(original, "__wrapped_for_stretto__"):
        return

    @wraps(original)
    def get_cross_compile_backend(backend: Any) -> Any:
        return None if backend.platform == PLATFORM else original(backend)

    get_cross_compile_backend.__wrapped_for_stretto__ = original  # type: ignore[attr-defined]
    compiler._get_cross_compile_backend = get_cross_compile_backend


def lend_by_dlpack(value_of: Callable[[Any], Value]) -> None:
    """Lend memory of arrays by DLPack, as JAX's arrays on CPUs and GPUs do.

    JAX and jaxlib know by name which platforms may. Where the memory is the host's, a CPU array over it
    stands in; an engine with streams lends arrays of its own. ``value_of``: what is behind an array on one
    device.
    """
    from jax._src import api, array, dlpack, xla_bridge

    from stretto.runtime.engines.engine import StreamedEngine

    to_dlpack, device_of = dlpack.to_dlpack, array.ArrayImpl.__dlpack_device__
    if hasattr(to_dlpack, "__wrapped_for_stretto__"):
        return

    @wraps(to_dlpack)
    def lend(x: Any, stream: Any = None, src_device: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, array.ArrayImpl) and x.platform() == PLATFORM:
            device = dlpack_device(x)
            if device[0] != dlpack.DLDeviceType.kDLCPU:
                return export(x, device, stream, *args, **kwargs)
            src_device = xla_bridge.get_backend("cpu").local_devices()[0]
            x = api.device_put(np.asarray(x), src_device)
        return to_dlpack(x, stream, src_device, *args, **kwargs)

    def export(
        x: Any,
        device: Any,
        stream: Any,
        dl_device: Any = None,
        max_version: Any = None,
        copy: Any = None,
    ) -> Any:
        if copy or (dl_device is not None and tuple(dl_device) != device):
            raise BufferError("stretto lends an array on its own device only, and no copy of it")
        value = value_of(x)
        return cast(StreamedEngine, value.engine).export(value.array(), stream)

    @wraps(device_of)
    def dlpack_device(self: Any) -> Any:
        if self.platform() == PLATFORM and len(self.sharding.device_set) == 1:
            value = value_of(self)
            if isinstance(value.engine, StreamedEngine):
                return dlpack.DLDeviceType.kDLCUDA, value.engine.loans.device(value.ordinal)
            return dlpack.DLDeviceType.kDLCPU, 0
        return device_of(self)

    lend.__wrapped_for_stretto__ = to_dlpack  # type: ignore[attr-defined]
    dlpack.to_dlpack = lend
    array.ArrayImpl.__dlpack_device__ = dlpack_device  # type: ignore[method-assign]


def analyse_cost_before_compiling() -> None:
    """Give ``Lowered.cost_analysis``, which JAX refuses for plugins: XLA's own, by JAX's CPU backend."""
    from jax._src.interpreters import pxla

    original = pxla.MeshComputation.cost_analysis
    if hasattr(original, "__wrapped_for_stretto__"):
        return

    @wraps(original)
    def analyse(self: Any) -> dict[str, float]:
        if self.compile_args["backend"].platform != PLATFORM:
            return original(self)
        return cost_analysis(self.hlo().as_serialized_hlo_module_proto())

    analyse.__wrapped_for_stretto__ = original  # type: ignore[attr-defined]
    pxla.MeshComputation.cost_analysis = analyse  # type: ignore[method-assign]


def transform_as_cpu() -> None:
    """Register transformations of HLO for stretto where those for cpu are: with the XLA of this process.

    It is what compiles the segments, each of which a transformation sees as a module. Before jax 0.11 only
    those registered for cpu are told.
    """
    from jax._src import xla_transform

    original = getattr(xla_transform, "_normalize_platforms", None)
    if original is None or hasattr(original, "__wrapped_for_stretto__"):
        return

    @wraps(original)
    def normalize_platforms(platforms: Sequence[str] | str | None) -> list[str]:
        named = ("cpu" if name == PLATFORM else name for name in original(platforms))
        return list(dict.fromkeys(named))

    normalize_platforms.__wrapped_for_stretto__ = original  # type: ignore[attr-defined]
    setattr(xla_transform, "_normalize_platforms", normalize_platforms)  # noqa: B010 - not in all releases


def cost_analysis(hlo: bytes) -> dict[str, float]:
    """XLA's cost analysis of a serialized HloModuleProto, by JAX's CPU backend."""
    from jax._src import xla_bridge
    from jaxlib import _jax
    from jaxlib._hlo import XlaComputation

    module = XlaComputation(hlo).get_hlo_module()
    return dict(_jax.hlo_module_cost_analysis(xla_bridge.get_backend("cpu"), module))
