"""Small programs written by hand, and a null engine that computes their segments with numpy.

A segment's name is its rule: ``RULES[name](*inputs)`` gives its outputs. So tests of the executor need no
compiler, and what they expect can be computed by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType
from stretto.runtime.execution.executor import Executor, LoadedProgram
from stretto.runtime.execution.value import Value
from stretto.runtime.options import Options
from stretto.runtime.program import Block, Instruction, Program, Segment
from stretto.runtime.recording.instrument import Instrument
from stretto.testing import MemoryTransport, MemoryWorld, NullEngine

F32 = TensorType("f32", (4,))
PRED = TensorType("pred", ())
S32 = TensorType("s32", ())
U32 = TensorType("u32", ())


def _boom(*inputs: np.ndarray) -> list[np.ndarray]:
    raise ValueError("boom")


RULES: dict[str, Callable[..., list[np.ndarray]]] = {
    "increment": lambda x: [x + 1],
    "halve": lambda x: [x / 2],
    "add": lambda x, y: [x + y],
    "below": lambda x, limit: [np.array(x[0] < limit[0])],
    "parity": lambda x: [np.array(int(x[0]) % 3, np.int32)],
    "is_even": lambda x: [np.array(int(x[0]) % 2 == 0)],
    "to_float": lambda i: [np.full(4, i, np.float32)],
    "combine": lambda x, y: [2 * x + y],
    "boom": _boom,
}


def compute(segment: Segment, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """What the null engine computes."""
    return RULES[segment.name](*inputs)


def segment(
    name: str,
    inputs: Sequence[TensorType] = (F32,),
    outputs: Sequence[TensorType] = (F32,),
    donated: tuple[int, ...] = (),
) -> Segment:
    return Segment(tuple(inputs), tuple(outputs), name.encode(), donated, name=name)


def all_reduce(*groups: tuple[int, ...], type: TensorType = F32, name: str = "sum") -> Collective:
    return Collective(
        Kind.ALL_REDUCE, (type,), (type,), groups=groups, reduction=Reduction.SUM, name=name
    )


def permute(*pairs: tuple[int, int], name: str = "shift", **more: Any) -> Collective:
    return Collective(Kind.PERMUTE, (F32,), (F32,), pairs=pairs, name=name, **more)


def program(
    types: Sequence[TensorType],
    body: Block,
    *,
    devices: int = 1,
    segments: Sequence[Segment] = (),
    collectives: Sequence[Collective] = (),
    donated: tuple[int, ...] = (),
    streams: int = 1,
    name: str = "test",
) -> Program:
    return Program(
        name,
        1,
        devices,
        tuple(types),
        tuple(segments),
        tuple(collectives),
        body,
        donated,
        streams,
    )


def block(
    parameters: tuple[int, ...], instructions: Sequence[Instruction], results: tuple[int, ...]
) -> Block:
    return Block(parameters, tuple(instructions), results)


class Rig:
    """An executor over a null engine that computes, for one process (or one rank of ``world``)."""

    def __init__(
        self,
        local_devices: int = 1,
        *,
        world: MemoryWorld | None = None,
        transport: MemoryTransport | None = None,
        instrument: Instrument | None = None,
        rules: Any = compute,
        **engine: Any,
    ) -> None:
        transport = transport or MemoryTransport(1)
        world = world or MemoryWorld(transport, 0, Options(local_devices=local_devices))
        self.engine = NullEngine(world.local_devices, compute=rules, **engine)
        self.world = world
        self.executor = Executor(
            self.engine,
            world,
            communicators=transport.communicators(world.rank),
            instrument=instrument,
        )

    def load(self, program: Program, devices: Sequence[int] | None = None) -> LoadedProgram:
        return self.executor.load(program, tuple(devices or range(program.num_devices)))

    def value(self, host: Any, type: TensorType = F32, ordinal: int = 0) -> Value:
        host = np.broadcast_to(np.asarray(host, type.numpy), type.shape)
        return Value.of(self.engine, self.engine.put(host, type, ordinal), type, ordinal)

    def arguments(self, loaded: LoadedProgram, *hosts: Sequence[Any]) -> list[list[Value]]:
        """``hosts[i][logical]`` is parameter i of that logical device, broadcast to its type."""
        return [
            [
                self.value(host[logical], type, ordinal)
                for host, type in zip(hosts, loaded.input_types, strict=True)
            ]
            for logical, ordinal in loaded.local
        ]

    def run(self, program: Program, *hosts: Sequence[Any]) -> list[list[np.ndarray]]:
        """Load and run; ``result[i][k]`` is output i of local device k."""
        loaded = self.load(program)
        rows = loaded.execute(self.arguments(loaded, *hosts))
        return [[row[i].host_view() for row in rows] for i in range(len(loaded.output_types))]


def firsts(outputs: list[np.ndarray]) -> list[float]:
    """First element of each array."""
    return [float(np.asarray(o).reshape(-1)[0]) for o in outputs]
