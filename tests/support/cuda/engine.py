"""The engines `xla:cuda` and `pjrt:cuda` on the fake driver, whose kernels compute nothing: here XLA's CPU
client computes what is in a segment.

A segment becomes a module of one custom call, JAX's Python callback for GPUs, with the segment's own types,
so buffers, transfers, streams and events are those of a GPU program, and the function that is called runs the
segment on the CPU. Donation is left out of the CPU's half.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax._src.interpreters import mlir
from jax.errors import JaxRuntimeError
from jaxlib.mlir import ir

from stretto.runtime.engines.cuda_loans import ARRIVAL, ROOM
from stretto.runtime.engines.pjrt import PjrtEngine
from stretto.runtime.engines.xla import XlaEngine
from stretto.runtime.engines.xla_cpu import XlaCpuEngine
from stretto.runtime.engines.xla_cuda import XlaCudaEngine
from stretto.runtime.errors import UnsupportedError
from stretto.runtime.program import CONTEXT, Segment

PACKED = {"s2", "u2", "s4", "u4", "f4e2m1fn"}  # several elements a byte


class Computing(XlaEngine):
    """What makes them compute."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lowered_as = "cpu"
        self._cpu = XlaCpuEngine(1)
        self._sources: dict[Any, Segment] = {}
        self._computing: dict[bytes, Any] = {}

    def compile_on(
        self,
        segment: Segment,
        name: str,
        devices: Any,
        options: Any,
        host_callbacks: Sequence[Any] = (),
    ) -> Any:
        if name in (ROOM, ARRIVAL):  # computes nothing, and takes memory as XLA's own code does
            executable = super().compile_on(segment, name, devices, options, host_callbacks)
            self._sources[executable] = segment
            return executable
        packed = {t.dtype for t in (*segment.inputs, *segment.outputs)} & PACKED
        if packed:
            raise UnsupportedError(f"segment {name}: no callback of JAX for GPUs takes {packed}")
        # Compiled once, not for each device: that is most of the time that a program of the tests takes.
        computes = self._computing.get(segment.module)
        if computes is None or host_callbacks:
            computes = self._cpu.compile(segment, name=name, host_callbacks=host_callbacks)
            if not host_callbacks:
                self._computing[segment.module] = computes

        def call(*operands: Any) -> tuple[np.ndarray, ...]:
            types = ((CONTEXT,) if segment.sites else ()) + segment.inputs
            given = [
                self._cpu.put(np.array(a).astype(t.numpy, copy=False), t, 0)
                for a, t in zip(operands, types, strict=True)
            ]
            return tuple(np.array(self._cpu.host_view(a)) for a in computes.run(0, given))

        with mlir.make_ir_context():
            wrapped = _wrapped(ir.Module.parse(segment.module))
            executable = self._client.compile_and_load(wrapped, devices, options, [call])
        self._sources[executable] = segment
        return executable

    def serialize_executable(self, executable: Any) -> bytes:
        """What it was compiled from: the function that it calls is this process's."""
        return pickle.dumps(self._sources[executable])

    def load_for(self, ordinal: int, code: bytes) -> Any:
        """Compiles again what `serialize_executable` gave. Raises ``JaxRuntimeError``."""
        try:
            segment = pickle.loads(code)
        except pickle.UnpicklingError as error:
            raise JaxRuntimeError(f"INVALID_ARGUMENT: {error}") from error
        return self.compile_for(ordinal, segment, segment.name, ())


class FakeCudaEngine(Computing, XlaCudaEngine):
    """Devices of the fake driver. Code that calls collectives runs on the host, which waits for each."""

    @property
    def call_stream(self) -> int:  # type: ignore[override]
        return self.loans.stream(0)

    def register_handler(self, target: str, handler: object) -> None:
        self._cpu.register_handler(target, handler)


class FakePjrtEngine(Computing, PjrtEngine):
    """The same devices, as those of any plugin."""


def _wrapped(module: ir.Module) -> ir.Module:
    """A module with the same signature that calls the function with index 0."""
    (main,) = [f for f in module.body.operations if f.attributes["sym_name"].value == "main"]
    types = [str(t) for t in main.type.inputs]
    results = [str(t) for t in main.type.results]
    attributes = [str(a) for a in main.arg_attrs] if types else []
    parameters = ", ".join(
        f"%a{i}: {t} {a if 'aliasing' in a else ''}"
        for i, (t, a) in enumerate(zip(types, attributes, strict=True))
    )
    names = ", ".join(f"%a{i}" for i in range(len(types)))
    many = len(results) > 1
    given = ", ".join(f"%r#{i}" if many else "%r" for i in range(len(results)))
    return ir.Module.parse(f"""
module @fake {{
  func.func public @main({parameters}) -> ({", ".join(results)}) {{
    {f"%r:{len(results)} =" if many else "%r =" if results else ""}
        stablehlo.custom_call @xla_ffi_python_gpu_callback({names}) {{
          api_version = 4 : i32, has_side_effect = true, backend_config = {{index = 0 : ui64}}
        }} : ({", ".join(types)}) -> ({", ".join(results)})
    return {given} {":" if results else ""} {", ".join(results)}
  }}
}}
""")


def create(num_devices: int, place: tuple[int, int] = (0, 1)) -> FakeCudaEngine:
    """Factory of the entry-point group ``stretto.engines``."""
    return FakeCudaEngine(num_devices, place)


def create_pjrt(num_devices: int) -> FakePjrtEngine:
    """Another one."""
    return FakePjrtEngine(num_devices, "cuda")
