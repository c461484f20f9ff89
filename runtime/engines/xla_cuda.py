"""Engine over XLA's CUDA client, which is jax's CUDA plugin loaded once more under a name of its own.

JAX's own GPU backend, if the program has one, stays apart: another client, other arrays. Ranks may share a
GPU, so the client takes memory as it needs it, and the runs of a program are enqueued ahead without a bound
that a program meets.

Arrays stay on their GPU. Collectives over NCCL borrow them (`cuda_loans`). What the executor does itself it
does in the host's memory: `host_view` waits for the array and copies it, `put` copies back.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jax._src.lib import xla_client
from jax.errors import JaxRuntimeError
from jaxlib import _jax

from stretto.collectives.cuda import CudaError, cuda
from stretto.collectives.gpus import chosen

from ..errors import StrettoError
from ..program import Segment
from . import cuda_stream
from .cuda_loans import Loans
from .cuda_target import CudaCompiler
from .engine import Column
from .xla import XlaEngine, XlaSegment

Array = Any

_NAME = "stretto_cuda"  # not "cuda", under which JAX loads it
# Of the releases of jax's plugin, the one for the newest CUDA first.
_RELEASES = ("cuda13", "cuda12")
# XLA blocks a run when so many of a device are not over; by default it is less than 1000.
_CLIENT = {"max_inflight_computations": 4096, "preallocate": False}


def create(
    num_devices: int, target: str = "", place: tuple[int, int] = (0, 1)
) -> XlaCudaEngine | CudaCompiler:
    """Factory of the entry-point group ``stretto.engines``.

    ``target``: the description of a GPU that need not exist, for which segments are compiled only. ``place``:
    which rank of its host this is, of how many.
    """
    if target:
        return CudaCompiler(num_devices, target, *_load())
    return XlaCudaEngine(num_devices, place)


@cache
def _load() -> tuple[str, Any]:
    """Load the plugin into this process; gives its release, and jaxlib's capsule of it. Raises `StrettoError`
    if there is none."""
    for release in _RELEASES:
        try:
            plugin = importlib.import_module(f"jax_plugins.xla_{release}")
            extension = importlib.import_module(f"jax_{release}_plugin.cuda_plugin_extension")
        except ImportError:
            continue
        library = Path(plugin.__path__[0], "xla_cuda_plugin.so")
        capsule = xla_client.load_pjrt_plugin_dynamically(_NAME, str(library))
        if not xla_client.pjrt_plugin_initialized(_NAME):
            xla_client.initialize_pjrt_plugin(_NAME)
        for name, type in extension.ffi_types().items():
            extension.register_custom_type(capsule, name, type)
        for name, handler in extension.ffi_handlers().items():
            extension.register_custom_call_target(capsule, name, handler, "CUDA", 1)
        found = cuda_stream.handler()
        extension.register_custom_call_target(capsule, cuda_stream.TARGET, found, "CUDA", 1)
        return release, capsule
    raise StrettoError(
        "engine xla:cuda needs jax's CUDA plugin: pip install 'stretto[cuda13]' or 'stretto[cuda12]'"
    )


@cache
def _register(release: str, target: str, handler: object) -> None:
    """Make a handler known to the plugin, once."""
    extension = importlib.import_module(f"jax_{release}_plugin.cuda_plugin_extension")
    _, capsule = _load()
    extension.register_custom_call_target(capsule, target, handler, "CUDA", 1)


class XlaCudaAlone:
    """A segment with sites, for the only device that runs it."""

    def __init__(self, segment: XlaSegment, ordinal: int) -> None:
        self._segment, self._ordinal = segment, ordinal
        segment.make_ready([ordinal])

    def run_together(self, columns: Sequence[Column]) -> list[list[Array]]:
        """See `stretto.runtime.engines.engine.LoadedTogether`."""
        return [[r] for r in self._segment.run(self._ordinal, [column[0] for column in columns])]

    def run_together_with_end(self, columns: Sequence[Column]) -> tuple[list[list[Array]], Any]:
        """See `stretto.runtime.engines.engine.LoadedTogether`."""
        given = [column[0] for column in columns]
        results, end = self._segment.run_with_end(self._ordinal, given)
        return [[r] for r in results], end

    @property
    def executable(self) -> Any:
        """As of `XlaSegment`."""
        return self._segment.executable

    @property
    def scratch_bytes(self) -> int:
        """As of `XlaSegment`."""
        return self._segment.scratch_bytes

    def serialize(self) -> bytes:
        """As of `XlaSegment`."""
        return self._segment.serialize()


class XlaCudaEngine(XlaEngine):
    """``num_devices`` of the GPUs that CUDA shows this process. See `StreamedEngine`, too."""

    name = "xla:cuda"
    lowered_as = "cuda"
    host_memory = False
    unaligned = True
    ends_as_one = True

    def __init__(self, num_devices: int, place: tuple[int, int] = (0, 1)) -> None:
        """``place``: which rank of its host this is, of how many. Raises `StrettoError` if the plugin is not
        installed, CUDA cannot be used, or there are not so many GPUs."""
        self._release, _ = _load()
        try:
            found = cuda().device_count()
            # XLA takes hundreds of MB of each GPU that it is shown.
            visible = chosen(num_devices, found, place)
            options = _CLIENT | ({"visible_devices": visible} if found >= num_devices else {})
            client = xla_client.make_c_api_client(_NAME, options, None)
        except (JaxRuntimeError, CudaError, OSError) as error:
            raise StrettoError(f"engine {self.name}: {error}") from error
        if found < num_devices:
            raise StrettoError(
                f"engine {self.name}: {num_devices} devices are asked for (STRETTO_LOCAL_DEVICES), and CUDA "
                f"shows {found} GPUs (CUDA_VISIBLE_DEVICES)"
            )
        if client.devices()[0].id != 0:
            # jaxlib 0.11 numbers them as CUDA does, and compiles for numbers below their count.
            plugin = version(f"jax-{self._release}-plugin")
            raise StrettoError(
                f"engine {self.name}: jax's CUDA plugin {plugin} cannot compile for GPUs {visible} of the "
                f"{found} that CUDA shows: take 0.12 or later, or show each rank its own GPUs alone "
                "(CUDA_VISIBLE_DEVICES)"
            )
        super().__init__(client, num_devices)
        self._failure: BaseException | None = None
        self._reading = threading.Lock()
        self._readers: dict[int, int] = {}  # streams, by CUDA's number of the device
        devices = [listed[0].local_hardware_id for listed in self._device_lists]
        streams = [cuda_stream.find(partial(self._run_on, n)) for n in range(num_devices)]
        self.loans = Loans(cuda(), devices, streams, self.compile)

    def _run_on(self, ordinal: int) -> None:
        """Run the program that finds the stream of a device."""
        executable = self._client.compile_and_load(
            cuda_stream.MODULE.encode(),
            self._executable_devices[ordinal],
            self._options[False][ordinal],
        )
        (result,) = executable.execute_sharded([]).disassemble_into_single_device_arrays()
        result[0].block_until_ready()

    # On which stream code that calls collectives has them (`stretto.collectives.called_on_gpus`): XLA says.
    call_stream = 0

    def register_handler(self, target: str, handler: object) -> None:
        """See `stretto.runtime.engines.engine.CallingEngine`."""
        _register(self._release, target, handler)

    def compile_together(
        self,
        segment: Segment,
        ordinals: Sequence[int],
        *,
        name: str = "",
        code: bytes = b"",
        host_callbacks: Sequence[Any] = (),
    ) -> XlaCudaAlone:
        """See `stretto.runtime.engines.engine.CallingEngine`: for one device."""
        (ordinal,) = ordinals
        named = name or segment.name
        if code:
            return XlaCudaAlone(self.restore(code, segment, name=named), ordinal)
        return XlaCudaAlone(XlaSegment(self, segment, named, host_callbacks), ordinal)

    def export(self, array: Array, stream: int | None) -> Any:
        """See `StreamedEngine`. Until the capsule is dropped the array cannot be donated."""
        return _jax.buffer_to_dlpack_managed_tensor(array, stream=stream)

    def fail(self, error: BaseException) -> None:
        """What borrowers had under way will be given up: no content can be relied on any more."""
        self._failure = self._failure or error

    def block(self, array: Array) -> None:
        super().block(array)
        if self._failure is not None:
            raise self._failure

    def host_view(self, array: Array) -> np.ndarray:
        view = super().host_view(array)
        if self._failure is not None:
            raise self._failure
        return view

    def read_into(self, array: Array, host: np.ndarray) -> None:
        """See `ReadingEngine`: XLA would copy into memory of its own, and keep that with the array."""
        if array.on_device_size_in_bytes() != host.nbytes:  # types below a byte are packed on GPUs
            host[...] = self.host_view(array)
            return
        self.block(array)
        (device,) = array.devices()
        driver, number = cuda(), device.local_hardware_id
        driver.use(number)
        with self._reading:
            stream = self._readers.get(number)
            if stream is None:
                stream = self._readers[number] = driver.stream()
        driver.copy(host.ctypes.data, array.unsafe_buffer_pointer(), host.nbytes, stream)
        driver.synchronize(stream)
        if array.is_deleted():  # whose memory may be another's by now
            raise StrettoError("the array was deleted or donated while it was copied to the host")

    @property
    def target(self) -> str:
        """jaxlib, the plugin, the CUDA that it runs on, the kind of GPU."""
        plugin = version(f"jax-{self._release}-plugin")
        kind = self._device_lists[0][0].device_kind
        return (
            f"jaxlib {version('jaxlib')}, {self._release} plugin {plugin}, "
            f"{self._client.platform_version}, {kind}"
        )

    def memory_stats(self, ordinal: int) -> dict[str, int]:
        """As XLA's allocator counts."""
        (device,) = self._device_lists[ordinal]
        return dict(device.memory_stats())
