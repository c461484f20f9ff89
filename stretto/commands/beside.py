"""How busy collectives keep the cores that compute: matrix products with and without collectives beside them.

Both run as a program does, on the executor's streams: waits that sleep, messages that leave before their
turn, and whatever else decides how much of a core communication takes, are as they will be. Of what the
collectives take alone, the share by which they make products longer that take half as long again is the
span's ``busy``. Products are measured alone and not in turns, since what a machine computes differs by more
from minute to minute; the median counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from stretto.collectives.ops import Collective
from stretto.runtime.engines.engine import Engine
from stretto.runtime.execution.executor import Executor
from stretto.runtime.execution.loaded import LoadedProgram
from stretto.runtime.execution.value import Value
from stretto.runtime.job.world import World
from stretto.runtime.program import Block, Free, Instruction, Program, Run, Segment, Start, Wait

# Seconds of collectives beside which there are products, at least; how much longer these take.
LEAST, LONGER = 0.05, 1.5


class Beside:
    """Programs of products and collectives that do not depend on each other, on all devices.

    ``segment``: two equal arrays in, one out; ``collectives``: one operand each, of the same type.
    """

    def __init__(
        self, world: World, engine: Engine, segment: Segment, collectives: Sequence[Collective]
    ) -> None:
        self._world, self._engine = world, engine
        self._segment, self._collectives = segment, tuple(collectives)
        self._executor = Executor(engine, world)
        # The executor's threads may use the world's own at any time.
        self._comm = None if world.comm is None else world.comm.Dup()
        self._loaded: dict[tuple[int, int], tuple[LoadedProgram, list[list[Value]]]] = {}

    def close(self) -> None:
        self._executor.close()
        if self._comm is not None:
            self._comm.Free()

    def __call__(self, products: int, calls: int) -> float:
        """Seconds of so many products while each collective is made ``calls`` times. All ranks together."""
        if (products, calls) not in self._loaded:
            self._loaded[products, calls] = self._load(products, calls)
        loaded, arguments = self._loaded[products, calls]
        if self._comm is not None:
            self._comm.Barrier()
        began = perf_counter()
        for values in loaded.execute(arguments):
            for value in values:
                value.block()
        return perf_counter() - began

    def _load(self, products: int, calls: int) -> tuple[LoadedProgram, list[list[Value]]]:
        """Parameters are a product's two operands and the collectives' ones."""
        operands = [*self._segment.inputs, *(c.operands[0] for c in self._collectives)]
        types, first, count = [*operands], len(self._segment.inputs), len(self._collectives)
        body: list[Instruction] = []
        results = []
        for call in range(calls * count):
            which = call % count
            types.append(self._collectives[which].results[0])
            body.append(Start(which, (first + which,), (len(types) - 1,), call))
            results.append(len(types) - 1)
        for product in range(products):
            types.append(self._segment.outputs[0])
            body.append(Run(0, tuple(range(first)), (len(types) - 1,)))
            if product < products - 1:
                body.append(Free((len(types) - 1,)))
            else:
                results.append(len(types) - 1)
        body += [Wait(call) for call in range(calls * count)]
        program = Program(
            name="calibrate",
            num_replicas=1,
            num_partitions=self._world.num_devices,
            slot_types=tuple(types),
            segments=(self._segment,),
            collectives=self._collectives,
            body=Block(tuple(range(len(operands))), tuple(body), tuple(results)),
        )
        loaded = self._executor.load(program, tuple(range(self._world.num_devices)))
        arguments = [
            [
                Value.of(
                    self._engine,
                    self._engine.put(np.full(t.shape, 0.5, t.numpy), t, ordinal),
                    t,
                    ordinal,
                )
                for t in operands
            ]
            for _, ordinal in loaded.local
        ]
        return loaded, arguments


def measure_busy(seconds: Callable[[int, int], float], rounds: int, comm: Any = None) -> float:
    """The share of collectives' time, 0 to 1, that they take from compute beside them.

    ``seconds(products, calls)``: of so many products beside so many calls, as `Beside` measures it.
    """

    def of(products: int, calls: int) -> float:
        return median([seconds(products, calls) for _ in range(4)][1:])

    # The same on all ranks.
    product = max((of(9, 0) - of(1, 0)) / 8, 1e-9)
    calls = max(1, ceil(LEAST / max(of(0, 1), 1e-6)))
    if comm is not None:
        calls = comm.bcast(calls, root=0)
    moving = of(0, calls)
    products = max(1, ceil(LONGER * moving / product))
    if comm is not None:
        products = comm.bcast(products, root=0)
    longer = []
    for _ in range(rounds + 1):
        alone = seconds(products, 0)
        longer.append(seconds(products, calls) - alone)
    return min(1.0, max(0.0, median(longer[1:]) / max(moving, 1e-9)))
