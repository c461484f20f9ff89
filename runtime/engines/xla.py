"""What engines over a client of jaxlib's share: compiling, running, arrays.

jaxlib's names that are not public API are used here, in `_runs` and in the engines' own files only;
``tests/runtime/test_engines.py`` pins them. A segment is compiled once, for device 0; other devices get the
same machine code by deserializing it, which takes a tenth of a compilation. Code that refuses to be
serialized (host callbacks) is compiled again for each device. The same machine code is what `serialize`
gives and `restore` takes: it is for this version of jaxlib and the engine's ``target``.

XLA runs cheap computations inside ``run`` and others on its own threads. Arrays are jaxlib arrays on
one device: row-major, sub-byte types one byte an element towards the host.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from typing import Any, Protocol

import numpy as np
from jax._src import core
from jax._src.interpreters import mlir
from jax._src.lib import cuda_path, xla_client
from jax.errors import JaxRuntimeError
from jax.sharding import NamedSharding, SingleDeviceSharding
from jaxlib import _jax
from jaxlib.mlir import ir

from stretto.collectives.types import TensorType

from ..errors import CompileError, StrettoError
from ..program import Segment, calls_back
from ._runs import Runs
from .code_room import CodeRoom

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
_room = CodeRoom()
# Whether XLA may go on using what the host lends it, or copies it at once.
_IN_USE = _jax.HostBufferSemantics.ZERO_COPY
AT_ONCE = _jax.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
# Bytes up to which `copy` goes by way of the host.
_SMALL = 1 << 14
# Transfer guards are about a program's own transfers. jaxlib checks those of the thread that calls, be it the
# program's or one of ours, and of all threads.
_guards, _ALLOW = _jax.guard_lib.thread_local_state, _jax.guard_lib.TransferGuardLevel.ALLOW


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
def aval(type: TensorType) -> core.ShapedArray:
    """A type as JAX has it."""
    return core.ShapedArray(type.shape, type.numpy)


def result_handler(type: TensorType, sharding: SingleDeviceSharding | NamedSharding) -> Any:
    """Makes committed arrays. Checks nothing: from jaxlib 0.12 on that goes without saying."""
    unchecked = (
        {"_skip_checks": True} if "_skip_checks" in _jax.array_result_handler.__doc__ else {}
    )
    return _jax.array_result_handler(aval(type), sharding, True, **unchecked)


class End:
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


class Serializable(Protocol):
    """What has machine code of XLA's."""

    def serialize(self) -> bytes:
        """The machine code. Raises ``JaxRuntimeError`` where XLA cannot, or `CompileError`."""
        ...


class XlaSegment(Runs):  # type: ignore[misc]
    """A segment compiled for device 0 and, once it has run there, for other devices."""

    _by_device: list[Any]
    _handlers: list[list[Any]]

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
        self._by_device = [None] * engine.num_devices
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

    @staticmethod
    def _tell(error: Exception) -> None:
        if isinstance(error, JaxRuntimeError):
            raise translate(error, XlaError) from error

    def run_with_end(self, ordinal: int, inputs: list[Array]) -> tuple[list[Array], Any]:
        """`run`, and the token of the run, which is ready when all of it is over."""
        try:
            results = self._load(ordinal).execute_sharded(inputs, with_tokens=True)
            arrays = results.consume_with_handlers(self._handlers[ordinal])
        except JaxRuntimeError as error:
            raise translate(error, XlaError) from error
        return arrays, End(results.consume_token())

    @property
    def executable(self) -> Any:
        """jaxlib's executable for device 0, for its analyses (memory, layouts)."""
        return self._by_device[0]

    @property
    def scratch_bytes(self) -> int:
        """What XLA allocates for a run beside operands and results; 0 where it does not say."""
        try:
            return self.executable.get_compiled_memory_stats().temp_size_in_bytes
        except JaxRuntimeError:
            return 0

    @property
    def optimized_hlo(self) -> bytes:
        """A serialized ``HloModuleProto`` of what XLA made of it; empty where it does not say."""
        try:
            (module,) = self.executable.hlo_modules()
            return module.as_serialized_hlo_module_proto()
        except (JaxRuntimeError, ValueError):
            return b""

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
        debug = options.executable_build_options.debug_options
        if cuda_path is not None:  # of NVIDIA's wheels: where XLA finds libdevice and ptxas
            debug.xla_gpu_cuda_data_dir = cuda_path
        if reproducible:
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
            # A program's other segments are like those of any program.
            if host_callbacks and calls_back(segment.module):
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

    def serialize(self, segment: Serializable) -> bytes:
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
        return [result_handler(type, self._shardings[ordinal]) for type in types]

    def put(self, host: np.ndarray, type: TensorType, ordinal: int) -> Array:
        return self._put(host, aval(type), ordinal)

    def _put(
        self, host: np.ndarray, type: core.ShapedArray, ordinal: int, semantics: Any = _IN_USE
    ) -> Array:
        guards = _guards()
        before, guards.host_to_device = guards.host_to_device, _ALLOW
        try:
            return _jax.batched_device_put(
                type,
                self._shardings[ordinal],
                [host],
                self._device_lists[ordinal],
                host_buffer_semantics=semantics,
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
        if self.host_memory and array.nbytes <= _SMALL and array.dtype.kind in "biufc":
            small = self._copy_small(array, ordinal)
            if small is not None:
                return small
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

    def _copy_small(self, array: Array, ordinal: int) -> Array | None:
        """As `copy`, by way of the host; None for what is not computed, or failed.

        It takes as long as XLA's copy (7 us), but is there at once. XLA's is there a moment later, and a run
        that reads it is handed to another thread for that. A call with a key of random numbers that is
        copied to 7 devices takes 0.88 to 0.9 times as long.
        """
        if not array.is_ready():
            return None
        try:
            content = ctypes.string_at(self.pointer(array), array.nbytes)
        except XlaError:
            return None
        host = np.frombuffer(content, array.dtype).reshape(array.shape)
        return self._put(host, array.aval, ordinal)

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
