"""Engine over jaxlib's CPU client, with a client of its own (never JAX's own CPU backend)."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jax._src.lib import xla_client
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax

from stretto.collectives.types import TensorType

from ..cores import share_blas, to_compute_on
from ..errors import CompileError
from ..program import CONTEXT, Segment, calls_back
from .engine import Column, Joined
from .in_place import in_place
from .xla import (
    AT_ONCE,
    Array,
    End,
    XlaEngine,
    XlaError,
    XlaSegment,
    aval,
    result_handler,
    translate,
)

# In the names of custom calls that are routines of SciPy's library.
_LINEAR_ALGEBRA = (b"lapack_", b"blas_")
_registered: set[str] = set()
# Segments whose modules have so many bytes are compiled for all devices at once; with loops in them, so many.
_LARGE, _LARGE_LOOPS = 32768, 16384
# And segments that have so many results: arrays of each device are made, and given up, one by one.
_MANY = 32
# Operations by XLA's estimate up to which it runs a program in the thread that starts it, of a client that
# runs others in threads of its own.
_CHEAP = 1000


def create(num_devices: int) -> XlaCpuEngine:
    """Factory of the entry-point group ``stretto.engines``."""
    return XlaCpuEngine(num_devices)


@cache
def _target() -> str:
    """jaxlib's version and the CPU with its features, as far as the system tells them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    features = next((i for i in lines if i.startswith(("flags", "Features"))), "".join(lines[:1]))
    digest = hashlib.sha256(" ".join(sorted(set(features.split()))).encode()).hexdigest()[:16]
    return f"jaxlib {version('jaxlib')} on {platform.machine()} with features {digest}"


class _Run:
    """One run on several devices. XLA ends it as a whole: once it is ``over``, all that it gave is there."""

    __slots__ = ("ordinals", "over")

    def __init__(self, ordinals: tuple[int, ...]) -> None:
        self.ordinals = ordinals
        self.over = False


class XlaJoined(Joined):
    """One array of jaxlib's on several devices, as those of `XlaCpuTogether` are."""

    __slots__ = ("_arrays", "_run", "ordinals", "whole")

    def __init__(self, whole: Any, run: _Run) -> None:
        self.whole = whole
        self.ordinals = run.ordinals
        self._run = run
        self._arrays: list[Array] | None = None

    def __len__(self) -> int:
        return len(self.ordinals)

    def __getitem__(self, position: int) -> Array:
        return self._split()[position]

    def __iter__(self) -> Iterator[Array]:
        return iter(self._split())

    def _split(self) -> list[Array]:
        if self._arrays is None:
            self._arrays = self.whole._arrays
        return self._arrays

    def is_ready(self) -> bool:
        return self._run.over or self.whole.is_ready()

    def block(self) -> None:
        if self._run.over:
            return
        try:
            self.whole.block_until_ready()
        except JaxRuntimeError as error:
            raise translate(error, XlaError) from error
        self._run.over = True


class XlaCpuTogether:
    """A segment compiled for several devices, which run it at once. See `CallingEngine`."""

    def __init__(
        self,
        engine: XlaCpuEngine,
        segment: Segment,
        name: str,
        ordinals: Sequence[int],
        code: bytes = b"",
        host_callbacks: Sequence[Any] = (),
    ) -> None:
        self._engine = engine
        self._name = name
        self._code = code
        engine.expect(segment)
        self._ordinals = tuple(ordinals)
        self._devices, options = engine.together(ordinals, segment.reproducible)
        # As far as jaxlib knows every array of all devices has the same content everywhere.
        mesh = Mesh(np.array(list(self._devices)), ("device",))
        self._sharding = NamedSharding(mesh, PartitionSpec())
        self._handlers = [result_handler(type, self._sharding) for type in segment.outputs]
        self._for_one = engine.result_handlers(segment.outputs, self._ordinals[0])
        context = (CONTEXT,) if segment.sites else ()
        self._avals = [aval(type) for type in (*context, *segment.inputs)]
        self.executable = (
            engine.load_together(code, self._devices, options)
            if code
            else engine.compile_on(segment, name, self._devices, options, host_callbacks)
        )

    def run_alone(self, ordinal: int, arrays: list[Array]) -> list[Array]:
        """See `stretto.runtime.engines.engine.LoadedAlone`."""
        try:
            return self.executable.execute_sharded(arrays).consume_with_handlers(self._for_one)
        except JaxRuntimeError as error:
            raise translate(error, XlaError) from error

    def run_together(self, columns: Sequence[Column]) -> list[XlaJoined]:
        try:
            results = self.executable.execute_sharded(self._wholes(columns))
        except JaxRuntimeError as error:
            raise translate(error, XlaError) from error
        return self._results(results)

    def run_together_with_end(self, columns: Sequence[Column]) -> tuple[list[XlaJoined], Any]:
        try:
            results = self.executable.execute_sharded(self._wholes(columns), with_tokens=True)
        except JaxRuntimeError as error:
            raise translate(error, XlaError) from error
        end = End(results.consume_token())
        return self._results(results), end

    def join(self, type: TensorType, arrays: list[Array]) -> XlaJoined:
        """See `stretto.runtime.engines.engine.Joins`."""
        joined = XlaJoined(self._whole(aval(type), arrays), _Run(self._ordinals))
        joined._arrays = arrays
        return joined

    def _wholes(self, columns: Sequence[Column]) -> list[Any]:
        ordinals = self._ordinals
        return [
            column.whole
            if type(column) is XlaJoined and column.ordinals == ordinals
            else self._whole(aval, list(column))
            for aval, column in zip(self._avals, columns, strict=True)
        ]

    def _whole(self, aval: Any, arrays: list[Array]) -> Any:
        return _jax.ArrayImpl(aval, self._sharding, arrays, True, _skip_checks=True)

    def _results(self, results: Any) -> list[XlaJoined]:
        run = _Run(self._ordinals)
        return [XlaJoined(whole, run) for whole in results.consume_with_handlers(self._handlers)]

    @property
    def scratch_bytes(self) -> int:
        """As of `XlaSegment`."""
        return self.executable.get_compiled_memory_stats().temp_size_in_bytes

    def serialize(self) -> bytes:
        """The machine code. Raises ``JaxRuntimeError`` where XLA cannot."""
        if not self._code:
            self._code = self._engine.serialize_executable(self.executable)
        return self._code


class XlaCpuSideBySide(XlaCpuTogether):
    """A segment compiled once for several devices, and again for one that runs it alone."""

    def __init__(
        self,
        engine: XlaCpuEngine,
        segment: Segment,
        name: str,
        ordinals: Sequence[int],
        host_callbacks: Sequence[Any],
        code: bytes = b"",
    ) -> None:
        super().__init__(engine, segment, name, ordinals, code, host_callbacks)
        self._alone = cache(lambda: XlaSegment(engine, segment, name, host_callbacks))
        self._serializable = not engine.goes_side_by_side(segment)

    @cached_property
    def hands_over(self) -> bool:
        """See `stretto.runtime.engines.engine.LoadedTogether`."""
        return self.executable.cost_analysis().get("flops", 0.0) > 2 * _CHEAP

    def run(self, ordinal: int, inputs: list[Array]) -> list[Array]:
        return self._alone().run(ordinal, inputs)

    def run_with_end(self, ordinal: int, inputs: list[Array]) -> tuple[list[Array], Any]:
        return self._alone().run_with_end(ordinal, inputs)

    def serialize(self) -> bytes:
        """Raises `CompileError` where XLA cannot, or whoever loads it has other functions."""
        if self._serializable:
            return super().serialize()
        raise CompileError(f"segment {self._name or '(unnamed)'} sorts or calls back into Python")


class XlaCpuEngine(XlaEngine):
    """``num_devices`` CPU devices."""

    name = "xla:cpu"
    host_memory = True
    jax_arrays = True
    reproducible = True

    def __init__(self, num_devices: int) -> None:
        self._cores = self.callers = to_compute_on()
        super().__init__(xla_client.make_cpu_client(num_devices=num_devices), num_devices)

    def put_copy(self, host: np.ndarray, type: TensorType, ordinal: int) -> Array:
        """See `stretto.runtime.engines.engine.CopyingEngine`."""
        return self._put(host, aval(type), ordinal, AT_ONCE)

    def compile_on(
        self, segment: Segment, name: str, devices: Any, options: Any,
        host_callbacks: Sequence[Any] = (),
    ) -> Any:  # fmt: skip
        if segment.reproducible:  # as the segments of a pipeline's loop are
            segment = replace(segment, module=in_place(segment.module))
        return super().compile_on(segment, name, devices, options, host_callbacks)

    def register_handler(self, target: str, handler: object) -> None:
        """See `stretto.runtime.engines.engine.CallingEngine`. It is the process's, whatever the client."""
        if target not in _registered:
            _registered.add(target)
            xla_client.register_custom_call_target(target, handler, platform="cpu", api_version=1)

    def expect(self, segment: Segment) -> None:
        """Prepare the process for running a segment."""
        if any(library in segment.module for library in _LINEAR_ALGEBRA):
            share_blas(self.num_devices, self._cores)

    def together(self, ordinals: Sequence[int], reproducible: bool) -> tuple[Any, Any]:
        """jaxlib's devices with these ordinals, and options to compile for all of them."""
        devices = [self._device_lists[ordinal][0] for ordinal in ordinals]
        ids = np.array([[device.id] for device in devices])
        options = self._compile_options(devices[0].id, reproducible)
        options.num_replicas = len(devices)
        options.device_assignment = xla_client.DeviceAssignment.create(ids)
        return xla_client.DeviceList(tuple(devices)), options

    def compile_together(
        self,
        segment: Segment,
        ordinals: Sequence[int],
        *,
        name: str = "",
        code: bytes = b"",
        host_callbacks: Sequence[Any] = (),
    ) -> XlaCpuTogether:
        """See `stretto.runtime.engines.engine.CallingEngine`."""
        return XlaCpuTogether(self, segment, name or segment.name, ordinals, code, host_callbacks)

    def goes_side_by_side(self, segment: Segment) -> bool:
        """See `stretto.runtime.engines.engine.SideBySideEngine`. XLA cannot serialize the order of a sort."""
        return calls_back(segment.module) or b"sort" in segment.module

    def rather_side_by_side(self, segment: Segment) -> bool:
        """See `stretto.runtime.engines.engine.SideBySideEngine`.

        A copy for another device takes XLA 2 us for each byte of a module, a twelfth of what compiling it
        takes; beginning 8 devices at once 0.2 ms more than one run after the other, which a short loop of
        small steps does not make up for. Where each device's results are arrays of their own, making and
        giving up 32 for 8 devices takes as long.
        """
        if len(segment.outputs) >= _MANY:
            return True
        limit = _LARGE_LOOPS if b"while" in segment.module else _LARGE
        return len(segment.module) >= limit

    def compile_side_by_side(
        self,
        segment: Segment,
        ordinals: Sequence[int],
        host_callbacks: Sequence[Any],
        *,
        name: str = "",
        code: bytes = b"",
    ) -> XlaCpuSideBySide:
        """See `stretto.runtime.engines.engine.SideBySideEngine`."""
        return XlaCpuSideBySide(self, segment, name or segment.name, ordinals, host_callbacks, code)

    def load_together(self, code: bytes, devices: Any, options: Any) -> Any:
        """jaxlib's executable for several devices, from machine code. Raises `CompileError`."""
        try:
            return self._client.deserialize_executable(code, devices, options)
        except JaxRuntimeError as error:
            prefix = f"a segment cannot be restored on engine {self.name}: "
            raise translate(error, CompileError, prefix) from error

    @property
    def target(self) -> str:
        return _target()

    def memory_stats(self, ordinal: int) -> dict[str, int]:
        """``bytes_in_use`` of live arrays, counted when asked; XLA's CPU client keeps no peak.

        Arrays on several devices may be there as a whole and in parts: what counts is the memory. Of what is
        still computed each part counts: jaxlib would wait, with the GIL, to tell where that memory is, and it
        asks for these counts itself whenever JAX compiles a program.
        """
        (device,) = self._device_lists[ordinal]
        live: dict[int, int] = {}
        pending: list[Array] = []
        for array in self._client.live_arrays():
            if array.is_deleted() or device not in array.devices():
                continue
            parts = [array] if len(array.devices()) == 1 else array._arrays
            for part in parts:
                if part.devices() != {device}:
                    continue
                if not part.is_ready():
                    pending.append(part)
                    continue
                with suppress(JaxRuntimeError):  # it has an error in the place of memory
                    live[part.unsafe_buffer_pointer()] = part.on_device_size_in_bytes()
        in_use = sum(live.values()) + sum(part.nbytes for part in pending)
        return {"bytes_in_use": in_use, "num_allocs": len(live) + len(pending)}
