"""Compiles segments for a GPU that is not there, as jax's CUDA plugin does for topologies.

A GPU is described by XLA's ``GpuTargetConfigProto`` as text, as JAX's own topologies take it
(``target_config``), or by the name of one that is known here. Nothing can be run, and no driver is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax.errors import JaxRuntimeError
from jaxlib.mlir import ir

from stretto.collectives.types import TensorType

from ..errors import CompileError, StrettoError
from ..program import Segment
from .xla import XlaEngine, translate


def _config(name: str, runtime: str, **properties: str) -> str:
    info = "\n".join(f"  {key}: {value}" for key, value in properties.items())
    return (
        f"gpu_device_info {{\n{info}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 12 }\n"
        f"runtime_version {{ {runtime} }}\n"
        f'device_description_str: "{name}"\n'
    )


# What CUDA's guide and the data sheets say of these.
_COMMON = {
    "threads_per_block_limit": "1024",
    "threads_per_warp": "32",
    "shared_memory_per_block": "49152",
    "threads_per_core_limit": "2048",
    "block_dim_limit_x": "2147483647",
    "block_dim_limit_y": "65535",
    "block_dim_limit_z": "65535",
    "registers_per_core_limit": "65536",
    "registers_per_block_limit": "65536",
}
KNOWN = {
    "sm_80": _config(
        "NVIDIA A100-SXM4-80GB",
        "major: 12 minor: 9",
        **_COMMON,
        core_count="108",
        fpus_per_core="64",
        shared_memory_per_core="167936",
        shared_memory_per_block_optin="166912",
        memory_bandwidth="2039000000000",
        l2_cache_size="41943040",
        clock_rate_ghz="1.41",
        device_memory_size="85094826000",
        cuda_compute_capability="{ major: 8 }",
    ),
    "sm_90": _config(
        "NVIDIA H100 80GB HBM3",
        "major: 12 minor: 9",
        **_COMMON,
        core_count="132",
        fpus_per_core="128",
        shared_memory_per_core="233472",
        shared_memory_per_block_optin="232448",
        memory_bandwidth="3350000000000",
        l2_cache_size="52428800",
        clock_rate_ghz="1.98",
        device_memory_size="84942979072",
        cuda_compute_capability="{ major: 9 }",
    ),
}


class CudaCompiler(XlaEngine):
    """The part of engine `xla:cuda` that compiles, for ``num_devices`` alike GPUs that need not exist."""

    name = "xla:cuda"
    lowered_as = "cuda"
    host_memory = False

    def __init__(self, num_devices: int, target: str, release: str, capsule: Any) -> None:
        """``target``: a name in `KNOWN`, or a file or text with the description. ``capsule``: the plugin.

        Raises `StrettoError` where XLA cannot read it.
        """
        text = KNOWN.get(target) or _read(target)
        try:
            topology = xla_client.make_c_api_device_topology(
                capsule, "", target_config=text, topology="1x1x1"
            )
            (device,) = topology._make_compile_only_devices()
        except (JaxRuntimeError, ValueError) as error:
            raise StrettoError(
                f"engine {self.name} cannot compile for target_config {target[:60]!r}: {error} (expected "
                f"{', '.join(KNOWN)}, or XLA's GpuTargetConfigProto as text or in a file)"
            ) from error
        self._release = release
        self._kind = device.device_kind
        super().__init__(device.client, num_devices, devices=[device] * num_devices)

    def compile_on(
        self,
        segment: Segment,
        name: str,
        devices: Any,
        options: Any,
        host_callbacks: Sequence[Any] = (),
    ) -> Any:
        try:
            with mlir.make_ir_context():
                return self._client.compile(ir.Module.parse(segment.module), devices, options)
        except (JaxRuntimeError, ir.MLIRError, ValueError) as error:
            prefix = f"segment {name or '(unnamed)'} does not compile on engine {self.name}: "
            raise translate(error, CompileError, prefix) from error

    def serialize_executable(self, executable: Any) -> bytes:
        return executable.serialize()

    def result_handlers(self, types: Sequence[TensorType], ordinal: int) -> list[Any]:
        return []  # nothing is run

    @property
    def target(self) -> str:
        """As that of the engine, for a GPU of this kind."""
        plugin = version(f"jax-{self._release}-plugin")
        return (
            f"jaxlib {version('jaxlib')}, {self._release} plugin {plugin}, elsewhere, {self._kind}"
        )


def _read(target: str) -> str:
    """A description that is in a file, or the text itself."""
    try:
        return Path(target).read_text()
    except (OSError, ValueError):  # no file has such a name
        return target
