"""JAX's private names that the plugin uses: each test says what to look at when it fails.

A failure here means that JAX has moved something. Read the function of `stretto.plugin.jax_private` that
uses the name, and the place in JAX that the test mentions; then run tests/plugin on that JAX.
"""

from __future__ import annotations

import atexit
import inspect
import socket
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax._src.api
import jax._src.array
import jax._src.callback
import jax._src.compilation_cache
import jax._src.compiler
import jax._src.config
import jax._src.core
import jax._src.distributed
import jax._src.dlpack
import jax._src.interpreters.mlir
import jax._src.interpreters.pxla
import jax._src.lax.parallel
import jax._src.lru_cache
import jax._src.source_info_util
import jax._src.traceback_util
import jax._src.xla_bridge
import jax._src.xla_transform
import pytest

from stretto.plugin import jax_private
from stretto.plugin.store import JaxStore


def _original(function: Any) -> Any:
    return getattr(function, "__wrapped_for_stretto__", function)


def test_register_plugin() -> None:
    """Takes a capsule as ``c_api``; ``options`` that are not None keep those of a distributed job."""
    parameters = inspect.signature(jax._src.xla_bridge.register_plugin).parameters
    assert {"plugin_name", "c_api", "options"} <= set(parameters)
    source = inspect.getsource(jax._src.xla_bridge.make_pjrt_c_api_client)
    assert "if options is not None:\n    distribute_options.update" in source


def test_backend_factories_and_the_list_without_warning() -> None:
    """``_nonexperimental_plugins`` only silences a warning: without it, drop that line."""
    assert isinstance(jax._src.xla_bridge._backend_factories, dict)
    assert isinstance(jax._src.xla_bridge._nonexperimental_plugins, set)


def test_platforms_option() -> None:
    """Read after plugins were initialized (``xla_bridge.backends``), so that `offer_cpu` has effect."""
    assert hasattr(jax._src.config.jax_platforms, "value")
    source = inspect.getsource(jax._src.xla_bridge.backends)
    assert source.index("_discover_and_register_pjrt_plugins") < source.index("jax_platforms")


def test_lower_jaxpr_to_module() -> None:
    """Where a module's lowering begins; ``pxla._cached_lowering_to_hlo`` calls it by its module."""
    parameters = inspect.signature(
        _original(jax._src.interpreters.mlir.lower_jaxpr_to_module)
    ).parameters
    for name in ("platforms", "backend"):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert "mlir.lower_jaxpr_to_module(" in inspect.getsource(jax._src.interpreters.pxla)


def test_no_backend_means_that_of_the_platform() -> None:
    """With ``backend=None`` a rule that asks gets the backend of the lowering platform, ours is hidden."""
    source = inspect.getsource(jax._src.interpreters.mlir.ModuleContext.get_backend)
    assert "return xb.get_backend(self.platforms[0])" in source


def test_platform_tables() -> None:
    """Used for modules lowered for several platforms, and by JAX's own checks."""
    mlir = jax._src.interpreters.mlir
    assert isinstance(mlir._platform_specific_lowerings["cpu"], dict)
    assert isinstance(mlir._platforms_with_donation, list)
    assert "cpu" in mlir._platforms_with_donation


def test_backend_compile_and_load() -> None:
    """Gets the list of Python callables beside the module; ``compile_or_get_cached`` calls it."""
    function = _original(jax._src.compiler.backend_compile_and_load)
    assert list(inspect.signature(function).parameters) == [
        "backend",
        "module",
        "executable_devices",
        "options",
        "host_callbacks",
    ]


def test_custom_call_of_callbacks() -> None:
    """`callbacks` looks for the target's name, and the custom call indexes the list of callables."""
    source = inspect.getsource(jax._src.callback.emit_python_callback)
    assert "_python_{device}_callback" in source
    assert "index" in source


def test_cost_analysis() -> None:
    """``jaxlib._jax.hlo_module_cost_analysis(client, HloModule)``."""
    with jax.default_device(jax.devices("cpu")[0]):
        hlo = jax.jit(lambda a: a @ a).lower(jax.numpy.ones((4, 4))).compiler_ir("hlo")
    cost = jax_private.cost_analysis(hlo.as_serialized_hlo_module_proto())
    assert cost["flops"] == 2 * 4**3


def test_transformations() -> None:
    """What is asked which platforms a transformation is for; ``cpu`` is this process's own XLA."""
    transforms = jax._src.xla_transform
    if not hasattr(transforms, "_normalize_platforms"):
        assert jax.__version_info__ < (0, 11)
        return
    function = _original(transforms._normalize_platforms)
    assert function(["cpu"]) == function("cpu") == ["cpu"]
    for user in (
        transforms.register_hlo_module_transformation,
        transforms.clear_hlo_module_transformation,
    ):
        assert "in _normalize_platforms(platforms)" in inspect.getsource(user)


def test_compilation_cache() -> None:
    """``is_cache_used`` knows no platform by other means than its list; entries are named as we name them."""
    cache, compiler = jax._src.compilation_cache, jax._src.compiler
    source = inspect.getsource(_original(cache.is_cache_used))
    assert 'supported_platforms = ["tpu", "gpu", "cpu"' in source
    assert "compilation_cache.is_cache_used(" in inspect.getsource(compiler._get_cache_key)
    assert "LRUCache(path, max_size=" in inspect.getsource(cache.get_file_cache)
    put = inspect.getsource(jax._src.lru_cache.LRUCache.put)
    assert 'cache_path = self.path / f"{key}{_CACHE_SUFFIX}"' in put
    assert "if self.eviction_enabled:\n      self.lock.acquire" in put
    write = inspect.signature(_original(compiler._compile_and_write_cache))
    assert list(write.parameters)[:5] == [
        "backend",
        "computation",
        "executable_devices",
        "compile_options",
        "host_callbacks",
    ]


def test_cross_compile_backend() -> None:
    """``backend_compile_and_load`` asks it for a client whose ``compile`` is called with a topology."""
    compiler = jax._src.compiler
    source = inspect.getsource(_original(compiler.backend_compile_and_load))
    assert "cross_compile_backend = _get_cross_compile_backend(backend)" in source
    assert "if cross_compile_backend is not None" in source


def test_dlpack() -> None:
    """``Array.__dlpack__`` imports ``to_dlpack`` when it is called; both know platforms by name."""
    function = _original(jax._src.dlpack.to_dlpack)
    assert list(inspect.signature(function).parameters)[:3] == ["x", "stream", "src_device"]
    array = jax._src.array.ArrayImpl
    assert "from jax._src.dlpack import to_dlpack" in inspect.getsource(array.__dlpack__)
    assert 'self.platform() == "cpu"' in inspect.getsource(_original(array.__dlpack_device__))


def test_cost_before_compiling() -> None:
    """``Lowered.cost_analysis`` asks ``MeshComputation``, which refuses backends made of the C API."""
    computation = jax._src.interpreters.pxla.MeshComputation
    source = inspect.getsource(_original(computation.cost_analysis))
    assert 'self.compile_args["backend"]' in source
    assert "using_pjrt_c_api(backend)" in source
    assert callable(computation.hlo)


def test_exclusions() -> None:
    """Files kept out of source lines and filtered tracebacks."""
    for module in (jax._src.source_info_util, jax._src.traceback_util):
        assert list(inspect.signature(module.register_exclusion).parameters) == ["path"]


@pytest.mark.parametrize("name", ["lower_jaxpr_to_module", "backend_compile_and_load"])
def test_wrapping_twice_wraps_once(name: str) -> None:
    jax.devices("stretto")  # has wrapped both
    module = jax._src.compiler if name == "backend_compile_and_load" else jax._src.interpreters.mlir
    before = getattr(module, name)
    jax_private.lower_as("cpu")
    jax_private.hand_over_callbacks()
    assert getattr(module, name) is before


@pytest.mark.parametrize("name", ["psend", "precv", "pbroadcast"])
def test_rules_of_gpus_alone(name: str) -> None:
    """Registered for ``gpu``, which is ``cuda`` and others; the rule asks for the module's platforms."""
    mlir = jax._src.interpreters.mlir
    primitive = getattr(jax._src.lax.parallel, f"{name}_p")
    assert callable(mlir._platform_specific_lowerings["cuda"][primitive].rule)
    assert "platforms" in inspect.signature(mlir.ModuleContext).parameters
    assert callable(mlir.ModuleContext.replace)
    assert callable(mlir.LoweringRuleContext.replace)


def test_callbacks_in_the_compilation_cache() -> None:
    """`_cache_read` passes what it was given in this order; from 0.11.1 on with the functions to call."""
    cache = jax._src.compilation_cache
    parameters = list(inspect.signature(cache.get_executable_and_time).parameters)
    assert parameters[:4] == ["cache_key", "compile_options", "backend", "executable_devices"]
    assert parameters[4:] == ["host_callbacks"] * jax_private.caches_callbacks()
    source = inspect.getsource(jax._src.compiler._cache_read)
    assert "compilation_cache.get_executable_and_time(" in source
    if jax_private.caches_callbacks():
        source = inspect.getsource(_original(cache.get_executable_and_time))
        assert "backend.deserialize_executable(" in source


def test_ffi_targets() -> None:
    """A handler is given what was registered before it, and all that is registered later."""
    from jax._src.lib import xla_client

    source = inspect.getsource(xla_client.register_custom_call_target)
    assert "_custom_callback_handler[xla_platform_name](" in source
    assert "name, fn, xla_platform_name, api_version, traits" in source
    source = inspect.getsource(xla_client.make_cpu_client)
    assert "register_custom_call_handler('cpu', _xla.register_custom_call_target)" in source
    assert "register_custom_type_handler('cpu', _xla.register_custom_type)" in source


def test_profiler() -> None:
    """What `register_plugin` calls for a plugin in a file; sessions then ask the plugin's extension."""
    from jax._src.lib import _profiler

    assert callable(_profiler.register_plugin_profiler)
    source = inspect.getsource(jax._src.xla_bridge.register_plugin)
    assert "_profiler.register_plugin_profiler(c_api)" in source


def test_tokens_in_barriers() -> None:
    """Before jax 0.12 the rule of optimization barriers asks this function about every result."""
    function = _original(jax._src.interpreters.mlir.lower_with_sharding_in_types)
    assert list(inspect.signature(function).parameters)[:3] == ["ctx", "op", "aval"]
    assert hasattr(jax._src.core, "AbstractToken")


def test_clients_outlive_what_python_frees_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, other = SimpleNamespace(platform="stretto"), SimpleNamespace(platform="cpu")
    monkeypatch.setattr(jax._src.xla_bridge, "_backends", {"stretto": ours, "cpu": other})
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    before = sys.getrefcount(ours), sys.getrefcount(other)
    jax_private.keep_clients()
    registered[0]()
    assert (sys.getrefcount(ours), sys.getrefcount(other)) == (before[0] + 1, before[1])


class Token:
    def __init__(self, error: str) -> None:
        self.error = error

    def block_until_ready(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


def test_a_failure_that_python_has_printed_is_not_told_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What JAX awaits at its end, by name: tokens by effect, and by device."""
    tokens = jax._src.dispatch.RuntimeTokenSet()
    assert set(vars(tokens)) == {"current_tokens", "output_runtime_tokens"}
    monkeypatch.setattr(jax._src.dispatch, "runtime_tokens", tokens)
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    jax_private.tell_failures_once()
    for told, left in ((None, "abc"), (RuntimeError("INTERNAL: a"), "bc")):
        monkeypatch.setattr(sys, "last_value", told, raising=False)
        tokens.current_tokens = {"a": Token("a"), "b": Token("b")}
        tokens.output_runtime_tokens = {"a": Token("a"), "c": Token("")}
        registered[0]()
        assert "".join(sorted({*tokens.current_tokens, *tokens.output_runtime_tokens})) == left


def test_launchers() -> None:
    """Subclasses of this class are asked in the order in which they were made."""
    cluster = jax._src.clusters.cluster.ClusterEnv
    source = inspect.getsource(cluster.auto_detect_unset_distributed_params)
    assert "env.opt_in_only_method == False and env.is_env_present()" in source
    assert "timeout_secs=initialization_timeout, override_coordinator_port=" in source
    before = list(cluster._cluster_types)
    try:
        jax_private.know_launchers()
        (added,) = cluster._cluster_types[len(before) :]
        assert not added.is_env_present()  # nothing started this process
    finally:
        cluster._cluster_types[:] = before


def test_distributed() -> None:
    """What ``jax.distributed.initialize`` makes, and keeps; without it, its state has no attributes."""
    distributed, bridge = jax._src.distributed, jax._src.xla_bridge
    source = inspect.getsource(distributed.State.initialize)
    for line in (
        "self.service = _jax.get_distributed_runtime_service(",
        "self.client = _jax.get_distributed_runtime_client(",
        "self.client.connect()",
    ):
        assert line in source
    assert vars(distributed.State()) == {}
    assert {"client", "service", "process_id", "num_processes", "coordinator_address"} <= set(
        vars(distributed.State)
    )
    assert hasattr(distributed._ENABLE_PREEMPTION_SERVICE, "value")
    assert "registration.factory()" in inspect.getsource(bridge._init_backend)
    assert "distributed_client=distributed.global_state.client" in inspect.getsource(
        bridge.make_cpu_client
    )
    at_end = inspect.getsource(jax._src.api.clean_up)
    assert "distributed.shutdown()" in at_end


def test_store_of_distributed() -> None:
    """What `store.JaxStore` calls, and the codes that its errors begin with."""
    from jax._src.lib import _jax

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, 1)
    client = _jax.get_distributed_runtime_client(address, 0, init_timeout=60)
    client.connect()
    store = JaxStore(client)
    assert store.try_get("key") is None
    assert store.put("key", "value")
    assert not store.put("key", "another")
    assert store.get("key", 60) == store.try_get("key") == "value"
    with pytest.raises(TimeoutError):
        store.get("no key", 0.01)
    client.shutdown()
    service.shutdown()


def test_preemption() -> None:
    """Asked through ``reached_sync_point`` and shut down, nothing else."""
    from jax.experimental import multihost_utils

    source = inspect.getsource(multihost_utils.reached_preemption_sync_point)
    assert "sync_manager.reached_sync_point(step_id)" in source
    make = inspect.getsource(jax._src.distributed.State.initialize_preemption_sync_manager)
    assert "_jax.create_preemption_sync_manager())" in make
    assert "self.preemption_sync_manager.initialize(self.client)" in make


def test_who_writes_the_cache() -> None:
    """Process 0, by a global of the module; the backend is the fourth argument."""
    function = _original(jax._src.compiler._cache_write)
    assert list(inspect.signature(function).parameters)[3] == "backend"
    assert "distributed.global_state.process_id != 0" in inspect.getsource(function)
    assert not function.__closure__
