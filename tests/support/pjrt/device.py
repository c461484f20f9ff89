"""The far device of ``plugin.c``: arrays and programs, behind a pair of pipes. ``python device.py DEVICES``

A request is two numbers of 64 bits, its kind and its size, and that many bytes; an answer a code (0, or that
of an error), a size and that many bytes. XLA's CPU client computes.
"""

from __future__ import annotations

import os
import struct
import sys
from typing import Any, BinaryIO

import numpy as np
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from stretto.collectives.types import TensorType
from stretto.plugin.abi import BUFFER_TYPES, ERROR_CODES
from stretto.runtime.engines.xla_cpu import create
from stretto.runtime.errors import StrettoError
from stretto.runtime.program import Segment

COMPILE, PUT, RUN, GET, FREE, COPY = range(6)
TYPES = {code: name for name, code in BUFFER_TYPES.items()}
_ELEMENTS = {
    "i1": "pred",
    **{f"i{n}": f"s{n}" for n in (2, 4, 8, 16, 32, 64)},
    **{f"ui{n}": f"u{n}" for n in (2, 4, 8, 16, 32, 64)},
    "complex<f32>": "c64",
    "complex<f64>": "c128",
}


def read(file: BinaryIO, size: int) -> bytes:
    """So many bytes; ends the process where there are no more."""
    data = file.read(size)
    if len(data) < size:
        sys.exit(0)
    return data


class Device:
    """What the plugin has asked for."""

    def __init__(self, devices: int) -> None:
        self.engine = create(devices)
        # By its name an array, or the error of what should have computed it.
        self.arrays: dict[int, Any] = {}
        self.programs: list[tuple[Any, Segment]] = []

    def answer(self, kind: int, body: bytes) -> bytes:
        """Raises `StrettoError`."""
        if kind == COMPILE:
            return self.compile(body)
        if kind == PUT:
            name, ordinal, code, rank = struct.unpack_from("<4q", body)
            dims = struct.unpack_from(f"<{rank}q", body, 32)
            type = TensorType(TYPES[code], dims)
            content = np.frombuffer(body, type.numpy, offset=32 + 8 * rank).reshape(dims)
            self.arrays[name] = self.engine.put(content, type, ordinal)
        elif kind == RUN:
            self.run(struct.unpack(f"<{len(body) // 8}q", body))
        elif kind == GET:
            return np.asarray(
                self.engine.host_view(self.find(*struct.unpack("<q", body)))
            ).tobytes()
        elif kind == FREE:
            self.arrays.pop(*struct.unpack("<q", body), None)
        elif kind == COPY:
            name, copied, ordinal = struct.unpack("<3q", body)
            self.arrays[copied] = self.engine.copy(self.find(name), ordinal)
        return b""

    def find(self, name: int) -> Any:
        found = self.arrays[name]
        if isinstance(found, StrettoError):
            raise found
        return found

    def compile(self, artifact: bytes) -> bytes:
        """What `PJRT_Client_Compile` in ``plugin.c`` reads."""
        with mlir.make_ir_context() as context:
            module = stablehlo.deserialize_portable_artifact(context, artifact)
            (main,) = (
                op for op in module.body if ir.StringAttr(op.attributes["sym_name"]).value == "main"
            )
            types = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
            names = [name for name in ("arg_attrs",) if name in main.attributes]
            given = [attributes for name in names for attributes in main.attributes[name]]
            donated = tuple(
                i
                for i, attributes in enumerate(given)
                if {"jax.buffer_donor", "tf.aliasing_output"}
                & {a.name for a in ir.DictAttr(attributes)}
            )
            inputs, outputs = (
                tuple(tensor_type(ir.RankedTensorType(t)) for t in side)
                for side in (types.inputs, types.results)
            )
            text = str(module).encode()
        segment = Segment(inputs, outputs, text, donated)
        self.programs.append((self.engine.compile(segment), segment))
        numbers = [len(self.programs) - 1, len(donated), *donated, len(outputs)]
        for type in outputs:
            size = type.numpy.itemsize * int(np.prod(type.shape))
            numbers += [BUFFER_TYPES[type.dtype], size, len(type.shape), *type.shape]
        return struct.pack(f"<{len(numbers)}q", *numbers)

    def run(self, numbers: tuple[int, ...]) -> None:
        number, ordinal, count = numbers[:3]
        loaded, segment = self.programs[number]
        names, results = numbers[3 : 3 + count], numbers[3 + count :]
        try:
            inputs = [self.find(name) for name in names]
            for i in segment.donated:  # who asks may still hold it
                inputs[i] = self.engine.copy(inputs[i], ordinal)
            made = loaded.run(ordinal, inputs)
            for array in made:
                self.engine.block(array)
        except StrettoError as error:
            self.arrays.update(dict.fromkeys(results, error))
            raise
        self.arrays.update(zip(results, made, strict=True))


def tensor_type(type: ir.RankedTensorType) -> TensorType:
    name = str(type.element_type)
    element = _ELEMENTS.get(name, name.lower())
    return TensorType(element, tuple(type.shape))


def main() -> None:
    back = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints goes to standard error
    device = Device(int(sys.argv[1]))
    while True:
        kind, size = struct.unpack("<2Q", read(sys.stdin.buffer, 16))
        body = read(sys.stdin.buffer, size)
        code, answer = 0, b""
        try:
            answer = device.answer(kind, body)
        except StrettoError as error:
            code, answer = ERROR_CODES.get(getattr(error, "code", ""), 13), str(error).encode()
        back.write(struct.pack("<2Q", code, len(answer)) + answer)
        back.flush()


if __name__ == "__main__":
    main()
