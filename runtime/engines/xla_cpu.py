"""Engine over jaxlib's CPU client, with a client of its own (never JAX's own CPU backend).

Every jaxlib name that is not public API is used in this file only; ``tests/runtime/test_xla_cpu.py``
pins them. A segment is compiled once, for device 0; other devices get the same machine code by
deserializing it, which takes a tenth of a compilation. Code that refuses to be serialized (host callbacks) is
compiled again for each device. The same machine code is what
`serialize` gives and `restore` takes: it is for this version of jaxlib and this kind of CPU (``target``).

XLA runs cheap computations inside ``run`` and others on its own threads. Arrays are jaxlib arrays on
one device: row-major, sub-byte types one byte an element towards the host.
"""

from __future__ import annotations

import hashlib
import platform
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jax._src import core
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxlib import _jax
from jaxlib.mlir import ir

from stretto.collectives.types import TensorType

from ..cores import share_blas, to_compute_on
from ..errors import CompileError, StrettoError
from ..program import CONTEXT, Segment, calls_back
from .code_room import CodeRoom
from .engine import Column, Joined
from .in_place import in_place

Array = Any
_STATUS = re.compile(r"^([A-Z_]{2,}): ", re.ASCII)
# XLA compiles a loop whose carries are small into one kernel, with dots as plain loops; in larger ones its
# libraries make the dots, with other roundings on some processors (AVX2 without AVX-512, AVX, SSE4).
_BY_SIZE = "small-while-loop-hoisting"
# Loops of pipelines put what layers keep into arrays that go through conditionals. Without this, and without
# `in_place`, XLA copies these whole in each branch: a step run as 1F1B takes twice the processor time, one
# interleaved four times.
_IN_PLACE = [("xla_cpu_copy_insertion_use_region_analysis", True)]
# Calls with this attribute are to be one kernel each (`hlo_frontend.one_kernel`).
_ONE_KERNEL, _ATTRIBUTES = b"xla_cpu_small_call", "mhlo.frontend_attributes"
# In the names of custom calls that are routines of SciPy's library.
_LINEAR_ALGEBRA = (b"lapack_", b"blas_")
_registered: set[str] = set()
_room = CodeRoom()
# Transfer guards are about a program's own transfers. jaxlib checks those of the thread that calls, be it the
# program's or one of ours, and of all threads.
_guards, _ALLOW = _jax.guard_lib.thread_local_state, _jax.guard_lib.TransferGuardLevel.ALLOW


def create(num_devices: int) -> XlaCpuEngine:
    """Factory of the entry-point group ``stretto.engines``."""
    return XlaCpuEngine(num_devices)


class XlaError(StrettoError):
    """A computation failed inside XLA, ``code`` says how. To be caught as JAX's run-time error is."""


def translate(error: Exception, kind: type[StrettoError], prefix: str = "") -> StrettoError:
    """The same error without XLA's leading status code, which becomes ``code``."""
    text = str(error)
    status = _STATUS.match(text)
    code = status[1] if status else "INTERNAL"
    translated = kind(prefix + (text[status.end() :] if status else text))
    translated.code = code
    return translated


def _in_kernels(module: bytes) -> bytes:
    """The module with functions that were to be one kernel each inlined, as others are."""
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)

        def visit(operation: Any) -> Any:
            attributes = operation.attributes
            if operation.name == "func.call" and _ATTRIBUTES in attributes:
                del attributes[_ATTRIBUTES]
            return ir.WalkResult.ADVANCE

        parsed.operation.walk(visit)
        written = BytesIO()
        parsed.operation.write_bytecode(written)
        return written.getvalue()


@cache
def _aval(type: TensorType) -> core.ShapedArray:
    return core.ShapedArray(type.shape, type.numpy)


def _result_handler(type: TensorType, sharding: SingleDeviceSharding | NamedSharding) -> Any:
    """Makes committed arrays. Checks nothing: from jaxlib 0.12 on that goes without saying."""
    unchecked = (
        {"_skip_checks": True} if "_skip_checks" in _jax.array_result_handler.__doc__ else {}
    )
    return _jax.array_result_handler(_aval(type), sharding, True, **unchecked)


@cache
def _target() -> str:
    """jaxlib's version and the CPU with its features, as far as the system tells them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    features = next((i for i in lines if i.startswith(("flags", "Features"))), "".join(lines[:1]))
    digest = hashlib.sha256(" ".join(sorted(set(features.split()))).encode()).hexdigest()[:16]
    return f"jaxlib {version('jaxlib')} on {platform.machine()} with features {digest}"


class _End:
    """The end of one run."""

    __slots__ = ("_token",)

    def __init__(self, token: Any) -> None:
        self._token = token

    def block_until_ready(self) -> None:
        """Wait for it. Raises `XlaError` if the run failed."""
        try:
            self._token.block_until_ready()
        except JaxRuntimeError as error:
            raise translate(error, XlaError) from error


class XlaSegment:
    """A segment compiled for device 0 and, once it has run there, for other devices."""

    __slots__ = (
        "__weakref__",
        "_by_device",
        "_callbacks",
        "_code",
        "_engine",
        "_handlers",
        "_lock",
        "_name",
        "_segment",
    )

    def __init__(
        self,
        engine: XlaEngine,
        segment: Segment,
        name: str,
        host_callbacks: Sequence[Any] = (),
        code: bytes = b"",
    ) -> None:
        self._engine = engine
        self._segment = segment
        self._name = name
        engine.expect(segment)
        # A program's other segments are like those of any program.
        self._callbacks = list(host_callbacks) if calls_back(segment.module) else []
        self._lock = threading.Lock()
        self._by_device: list[Any] = [None] * engine.num_devices
        # What makes arrays of results; jaxlib else looks up type and sharding of each, which takes longer.
        self._handlers = [engine.result_handlers(segment.outputs, 0)] + [[]] * (
            engine.num_devices - 1
        )
        self._code = code  # empty until a second device asks for it
        self._by_device[0] = (
            engine.load_for(0, code)
            if code
            else engine.compile_for(0, segment, name, self._callbacks)
        )

    def run(self, ordinal: int, inputs: list[Array]) -> list[Array]:
        executable = self._by_device[ordinal]
        if executable is None:
            executable = self._load(ordinal)
        try:
            return executable.execute_sharded(inputs).consume_with_handlers(self._handlers[ordinal])
        except JaxRuntimeError as error:
            raise translate(error, XlaError) from error

    def run_with_end(self, ordinal: int, inputs: list[Array]) -> tuple[list[Array], Any]:
        """`run`, and the token of the run, which is ready when all of it is over."""
        try:
            results = self._load(ordinal).execute_sharded(inputs, with_tokens=True)
            arrays = results.consume_with_handlers(self._handlers[ordinal])
        except JaxRuntimeError as error:
            raise translate(error, XlaError) from error
        return arrays, _End(results.consume_token())

    @property
    def executable(self) -> Any:
        """jaxlib's executable for device 0, for its analyses (cost, memory, layouts)."""
        return self._by_device[0]

    @property
    def scratch_bytes(self) -> int:
        """What XLA allocates for a run beside operands and results; 0 where it does not say."""
        try:
            return self.executable.get_compiled_memory_stats().temp_size_in_bytes
        except JaxRuntimeError:
            return 0

    def cost_analysis(self) -> dict[str, float]:
        """XLA's estimate for one run: ``flops``, ``bytes accessed`` and more."""
        return self.executable.cost_analysis()

    def make_ready(self, ordinals: Sequence[int]) -> None:
        """Load the machine code for these devices."""
        for ordinal in ordinals:
            self._load(ordinal)

    def _load(self, ordinal: int) -> Any:
        with self._lock:
            executable = self._by_device[ordinal]
            if executable is not None:
                return executable
            self._handlers[ordinal] = self._engine.result_handlers(self._segment.outputs, ordinal)
            executable = self._by_device[ordinal] = self._clone(ordinal)
        _room.copied(self)
        return executable

    def drop_copies(self) -> None:
        """Drop the machine code of all devices but the first, if it can be loaded again."""
        if self._code and self._lock.acquire(blocking=False):
            self._by_device[1:] = [None] * (len(self._by_device) - 1)
            self._lock.release()

    def _clone(self, ordinal: int) -> Any:
        engine = self._engine
        if not self._callbacks:
            try:
                return engine.load_for(ordinal, self.serialize())
            except JaxRuntimeError:
                pass  # not serializable: compile it again
        return engine.compile_for(ordinal, self._segment, self._name, self._callbacks)

    def serialize(self) -> bytes:
        """The machine code. Raises ``JaxRuntimeError`` where XLA cannot, `CompileError` for a segment that
        calls back: whoever loads it has other functions.
        """
        if self._callbacks:
            raise CompileError(f"segment {self._name or '(unnamed)'} calls back into Python")
        if not self._code:
            self._code = self._engine.serialize_executable(self._by_device[0])
        return self._code


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
        self._handlers = [_result_handler(type, self._sharding) for type in segment.outputs]
        self._for_one = engine.result_handlers(segment.outputs, self._ordinals[0])
        context = (CONTEXT,) if segment.sites else ()
        self._avals = [_aval(type) for type in (*context, *segment.inputs)]
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
        end = _End(results.consume_token())
        return self._results(results), end

    def _wholes(self, columns: Sequence[Column]) -> list[Any]:
        sharding, ordinals = self._sharding, self._ordinals
        return [
            column.whole
            if type(column) is XlaJoined and column.ordinals == ordinals
            else _jax.ArrayImpl(aval, sharding, list(column), True, _skip_checks=True)
            for aval, column in zip(self._avals, columns, strict=True)
        ]

    def _results(self, results: Any) -> list[XlaJoined]:
        run = _Run(self._ordinals)
        return [XlaJoined(whole, run) for whole in results.consume_with_handlers(self._handlers)]

    @property
    def scratch_bytes(self) -> int:
        """As of `XlaSegment`."""
        return self.executable.get_compiled_memory_stats().temp_size_in_bytes

    def cost_analysis(self) -> dict[str, float]:
        """As of `XlaSegment`."""
        return self.executable.cost_analysis()

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
    ) -> None:
        functions = host_callbacks if calls_back(segment.module) else ()
        super().__init__(engine, segment, name, ordinals, host_callbacks=functions)
        self._alone = cache(lambda: XlaSegment(engine, segment, name, functions))

    def run(self, ordinal: int, inputs: list[Array]) -> list[Array]:
        return self._alone().run(ordinal, inputs)

    def run_with_end(self, ordinal: int, inputs: list[Array]) -> tuple[list[Array], Any]:
        return self._alone().run_with_end(ordinal, inputs)

    def serialize(self) -> bytes:
        """Raises `CompileError`: XLA cannot, or whoever loads it has other functions."""
        raise CompileError(f"segment {self._name or '(unnamed)'} sorts or calls back into Python")


class XlaEngine:
    """Devices of a jaxlib client of its own, from ``first`` on. See `engine.Engine`."""

    name: str
    host_memory: bool

    def __init__(
        self, client: Any, num_devices: int, first: int = 0, devices: Sequence[Any] = ()
    ) -> None:
        """``devices``: instead of the client's own."""
        self.num_devices = num_devices
        self._client = client
        own = sorted(client.local_devices(), key=lambda d: d.id)
        devices = devices or own[first : first + num_devices]
        self._device_lists = [[d] for d in devices]
        self._executable_devices = [xla_client.DeviceList((d,)) for d in devices]
        # jaxlib makes the type of their iterators at the first use, in steps: not in two threads at once.
        for listed in self._executable_devices[:1]:
            list(listed)
        self._shardings = [SingleDeviceSharding(d) for d in devices]
        # By whether the segment is to be reproducible.
        self._options = {
            kind: [self._compile_options(d.id, kind) for d in devices] for kind in (False, True)
        }

    @staticmethod
    def _compile_options(device_id: int, reproducible: bool) -> Any:
        options = xla_client.CompileOptions()
        if reproducible:
            debug = options.executable_build_options.debug_options
            named = [p for p in debug.xla_disable_hlo_passes.split(",") if p]  # by XLA_FLAGS
            debug.xla_disable_hlo_passes = ",".join([*named, _BY_SIZE])
            options.env_option_overrides = _IN_PLACE
        options.num_replicas = 1
        options.num_partitions = 1
        options.device_assignment = xla_client.DeviceAssignment.create(np.array([[device_id]]))
        return options

    def expect(self, segment: Segment) -> None:
        """Prepare the process for running a segment."""

    def compile(
        self, segment: Segment, *, name: str = "", host_callbacks: Sequence[Any] = ()
    ) -> XlaSegment:
        return XlaSegment(self, segment, name or segment.name, host_callbacks)

    def compile_for(
        self, ordinal: int, segment: Segment, name: str, host_callbacks: Sequence[Any]
    ) -> Any:
        """jaxlib's executable for one device. Raises `CompileError`."""
        devices = self._executable_devices[ordinal]
        options = self._options[segment.reproducible][ordinal]
        return self.compile_on(segment, name, devices, options, host_callbacks)

    def compile_on(
        self,
        segment: Segment,
        name: str,
        devices: Any,
        options: Any,
        host_callbacks: Sequence[Any] = (),
    ) -> Any:
        """jaxlib's executable for these devices. Raises `CompileError`."""
        try:
            if host_callbacks:
                with mlir.make_ir_context():  # jaxlib takes callbacks only beside a parsed module
                    parsed = ir.Module.parse(segment.module)
                    return self._client.compile_and_load(
                        parsed, devices, options, list(host_callbacks)
                    )
            try:
                return self._client.compile_and_load(segment.module, devices, options)
            except JaxRuntimeError:
                if _ONE_KERNEL not in segment.module:
                    raise
                # XLA has put into a function what is no kernel of its own, such as a library's call.
                module = _in_kernels(segment.module)
                return self._client.compile_and_load(module, devices, options)
        except (JaxRuntimeError, ir.MLIRError, ValueError) as error:
            prefix = f"segment {name or '(unnamed)'} does not compile on engine {self.name}: "
            raise translate(error, CompileError, prefix) from error

    def serialize(self, segment: XlaSegment | XlaCpuTogether) -> bytes:
        try:
            return segment.serialize()
        except JaxRuntimeError as error:
            raise translate(error, CompileError, "cannot be serialized: ") from error

    def restore(self, code: bytes, segment: Segment, *, name: str = "") -> XlaSegment:
        try:
            return XlaSegment(self, segment, name or segment.name, code=code)
        except JaxRuntimeError as error:
            prefix = f"segment {name or '(unnamed)'} cannot be restored on engine {self.name}: "
            raise translate(error, CompileError, prefix) from error

    def serialize_executable(self, executable: Any) -> bytes:
        """Machine code of one of jaxlib's executables. Raises ``JaxRuntimeError`` where XLA cannot."""
        return self._client.serialize_executable(executable)

    def load_for(self, ordinal: int, code: bytes) -> Any:
        """jaxlib's executable for one device, from machine code. Raises ``JaxRuntimeError``."""
        return self._client.deserialize_executable(
            code, self._executable_devices[ordinal], self._options[False][ordinal]
        )

    def result_handlers(self, types: Sequence[TensorType], ordinal: int) -> list[Any]:
        """For results of these types on a device: what ``consume_with_handlers`` makes its arrays with."""
        return [_result_handler(type, self._shardings[ordinal]) for type in types]

    def put(self, host: np.ndarray, type: TensorType, ordinal: int) -> Array:
        guards = _guards()
        before, guards.host_to_device = guards.host_to_device, _ALLOW
        try:
            return _jax.batched_device_put(
                _aval(type),
                self._shardings[ordinal],
                [host],
                self._device_lists[ordinal],
                enable_x64=True,
            )
        finally:
            guards.host_to_device = before

    def host_view(self, array: Array) -> np.ndarray:
        try:
            view = np.asarray(array)
        except JaxRuntimeError as error:
            raise translate(error, XlaError) from error
        return view if view.flags.c_contiguous else np.ascontiguousarray(view)

    def copy(self, array: Array, ordinal: int) -> Array:
        guards = _guards()
        before, guards.device_to_device = guards.device_to_device, _ALLOW
        try:
            (copied,) = _jax.batched_copy_array_to_devices_with_sharding(
                [array],
                [self._executable_devices[ordinal]],
                [self._shardings[ordinal]],
                [_jax.ArrayCopySemantics.ALWAYS_COPY],
            )
        except JaxRuntimeError as error:
            raise translate(error, XlaError) from error
        finally:
            guards.device_to_device = before
        return copied

    def is_ready(self, array: Array) -> bool:
        return array.is_ready()

    def block(self, array: Array) -> None:
        try:
            array.block_until_ready()
        except JaxRuntimeError as error:
            raise translate(error, XlaError) from error

    def pointer(self, array: Array) -> int:
        # jaxlib would wait for the array with the GIL, which a function that is called back needs.
        self.block(array)
        try:
            return array.unsafe_buffer_pointer()
        except JaxRuntimeError as error:
            raise translate(error, XlaError) from error

    def delete(self, array: Array) -> None:
        array.delete()


class XlaCpuEngine(XlaEngine):
    """``num_devices`` CPU devices."""

    name = "xla:cpu"
    host_memory = True
    jax_arrays = True
    reproducible = True

    def __init__(self, num_devices: int) -> None:
        self._cores = self.callers = to_compute_on()
        super().__init__(xla_client.make_cpu_client(num_devices=num_devices), num_devices)

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
        self, segment: Segment, ordinals: Sequence[int], *, name: str = "", code: bytes = b""
    ) -> XlaCpuTogether:
        """See `stretto.runtime.engines.engine.CallingEngine`."""
        return XlaCpuTogether(self, segment, name or segment.name, ordinals, code)

    def goes_side_by_side(self, segment: Segment) -> bool:
        """See `stretto.runtime.engines.engine.SideBySideEngine`. XLA cannot serialize the order of a sort."""
        return calls_back(segment.module) or b"sort" in segment.module

    def compile_side_by_side(
        self,
        segment: Segment,
        ordinals: Sequence[int],
        host_callbacks: Sequence[Any],
        *,
        name: str = "",
    ) -> XlaCpuSideBySide:
        """See `stretto.runtime.engines.engine.SideBySideEngine`."""
        return XlaCpuSideBySide(self, segment, name or segment.name, ordinals, host_callbacks)

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
        """``bytes_in_use`` of live arrays, counted when asked; XLA's CPU client keeps no peak."""
        (device,) = self._device_lists[ordinal]
        live = [
            a for a in self._client.live_arrays() if not a.is_deleted() and device in a.devices()
        ]
        return {
            "bytes_in_use": sum(a.on_device_size_in_bytes() for a in live),
            "num_allocs": len(live),
        }
