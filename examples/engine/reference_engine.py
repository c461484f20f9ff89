"""An engine for stretto, whole: StableHLO's reference interpreter, which comes with jaxlib, computes.

It is slow, and exact in what it promises. Each device is a thread that does one thing after another, as a
real device does, so arrays are pending until their turn comes. `stretto conform reference` tries it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from stretto.collectives.types import TensorType
from stretto.runtime.errors import CompileError, StrettoError, UnsupportedError
from stretto.runtime.program import Segment

# Operations at which the interpreter would end the process.
LACKS = {"cholesky", "custom_call", "fft", "rng", "rng_bit_generator", "triangular_solve"}
# Types whose elements numpy and MLIR's attributes can give each other.
TYPES = {"pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64", "f16", "f32", "f64"}


def create(num_devices: int) -> ReferenceEngine:
    """What the entry point names."""
    return ReferenceEngine(num_devices)


class Array:
    """A device array: its content is there once the device has come to it."""

    def __init__(self, content: Future[np.ndarray]) -> None:
        self.content: Future[np.ndarray] | None = content

    def result(self) -> np.ndarray:
        """Waits; raises the error of what should have computed it."""
        if self.content is None:
            raise StrettoError("the array has been deleted or donated")
        return self.content.result()


class Loaded:
    """A compiled segment: a module that the interpreter accepts."""

    def __init__(self, engine: ReferenceEngine, segment: Segment, name: str) -> None:
        self.engine, self.segment, self.name = engine, segment, name
        with mlir.make_ir_context(), ir.Location.unknown():
            try:
                self.module = ir.Module.parse(segment.module)
            except ir.MLIRError as error:
                raise CompileError(f"segment {name}: {error}") from error
            operations: list[ir.OpView] = []
            self.module.operation.walk(
                lambda o: operations.append(o.opview) or ir.WalkResult.ADVANCE
            )
            for operation in operations:
                kind = operation.operation.name.removeprefix("stablehlo.")
                if kind in LACKS:
                    raise UnsupportedError(
                        f"segment {name}: the reference interpreter has no {kind}"
                    )
                if kind == "dot":  # the older spelling of a matrix product
                    as_dot_general(operation)
                if kind == "scatter":  # writes into its operands, even where others read them
                    own_operands(operation)

    def run(self, ordinal: int, inputs: list[Array]) -> list[Array]:
        """Enqueues; a wrong number of inputs or a wrong shape is an error of the run."""
        given = [array.content for array in inputs]
        done = self.engine.threads[ordinal].submit(self._compute, given)
        for i in self.segment.donated:
            inputs[i].content = None
        return [
            Array(self.engine.threads[ordinal].submit(lambda i=i: done.result()[i]))
            for i in range(len(self.segment.outputs))
        ]

    def _compute(self, given: Sequence[Future[np.ndarray] | None]) -> list[np.ndarray]:
        values = []
        for future, type in zip(given, self.segment.inputs, strict=True):
            if future is None:
                raise StrettoError(f"segment {self.name}: an input has been deleted or donated")
            values.append(future.result())
            if values[-1].shape != type.shape or values[-1].dtype != type.numpy:
                raise StrettoError(f"segment {self.name}: an input is no {type}")
        with self.module.context, ir.Location.unknown():
            attributes = [to_attribute(value) for value in values]
            results = stablehlo.eval_module(self.module, attributes)
        outputs = zip(results, self.segment.outputs, strict=True)
        return [np.array(a).astype(t.numpy).reshape(t.shape) for a, t in outputs]


def as_dot_general(dot: ir.OpView) -> None:
    left, right = dot.operands
    numbers = stablehlo.DotDimensionNumbers.get([], [], [left.type.rank - 1], [0])
    with ir.InsertionPoint(dot):
        made = stablehlo.DotGeneralOp(dot.result.type, left, right, numbers)
    dot.result.replace_all_uses_with(made.result)
    dot.operation.erase()


def own_operands(scatter: ir.OpView) -> None:
    with ir.InsertionPoint(scatter):
        for n, operand in enumerate(scatter.inputs):
            scatter.operation.operands[n] = stablehlo.ReshapeOp(operand.type, operand).result


def to_attribute(value: np.ndarray) -> ir.Attribute:
    type = mlir.dtype_to_ir_type(value.dtype)
    return ir.DenseElementsAttr.get(np.ascontiguousarray(value), type=type, shape=value.shape)


class ReferenceEngine:
    """See `stretto.runtime.engines.engine.Engine`."""

    name = "reference"
    host_memory = False  # nobody may read arrays at an address: they have none
    lowered_as = "reference"  # a platform that JAX does not know: rules of all platforms

    def __init__(self, num_devices: int) -> None:
        self.num_devices = num_devices
        self.threads = [ThreadPoolExecutor(1, f"reference-{n}") for n in range(num_devices)]

    def compile(
        self, segment: Segment, *, name: str = "", host_callbacks: Sequence[Any] = ()
    ) -> Loaded:
        name = name or segment.name
        lacking = {t.dtype for t in (*segment.inputs, *segment.outputs)} - TYPES
        if lacking:
            raise UnsupportedError(
                f"segment {name}: engine {self.name} has no {', '.join(sorted(lacking))}"
            )
        return Loaded(self, segment, name)

    def put(self, host: np.ndarray, type: TensorType, ordinal: int) -> Array:
        content: Future[np.ndarray] = Future()
        content.set_result(np.array(host, type.numpy, order="C").reshape(type.shape))
        return Array(content)

    def host_view(self, array: Array) -> np.ndarray:
        view = array.result().view()
        view.flags.writeable = False
        return view

    def copy(self, array: Array, ordinal: int) -> Array:
        array.result()
        return Array(self.threads[ordinal].submit(np.array, array.result()))

    def is_ready(self, array: Array) -> bool:
        return array.content is None or array.content.done()

    def block(self, array: Array) -> None:
        array.result()

    def pointer(self, array: Array) -> int:
        raise StrettoError("arrays of the reference engine have no address")

    def delete(self, array: Array) -> None:
        array.content = None

    def memory_stats(self, ordinal: int) -> dict[str, int]:
        return {}
