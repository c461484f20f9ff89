"""Compiled programs on the executor, with XLA's CPU engine, in one process: results and what was run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np

from stretto.runtime.engines.xla import XlaSegment
from stretto.runtime.engines.xla_cpu import XlaCpuEngine
from stretto.runtime.execution.executor import Executor
from stretto.runtime.execution.value import Value
from stretto.runtime.options import Options
from stretto.runtime.program import Program, Segment
from stretto.runtime.program.check import check
from stretto.testing import MemoryTransport, MemoryWorld, Recorder

MOST_DEVICES = 8


class _Engine(XlaCpuEngine):
    """Compiles a segment once for all programs that have it: those with a plan and without share most."""

    def __init__(self) -> None:
        super().__init__(MOST_DEVICES)
        self._compile_once = lru_cache(maxsize=512)(super().compile)

    def compile(
        self, segment: Segment, *, name: str = "", host_callbacks: Sequence[Any] = ()
    ) -> XlaSegment:
        if host_callbacks:
            return super().compile(segment, name=name, host_callbacks=host_callbacks)
        return self._compile_once(segment)


@cache
def engine() -> XlaCpuEngine:
    return _Engine()


@dataclass
class Executed:
    """``results[i][device]``; how often each segment was run and left out, by its index in the program."""

    results: list[list[np.ndarray]]
    events: list[tuple]

    @property
    def bits(self) -> list[bytes]:
        return [array.tobytes() for row in self.results for array in row]

    def count(self, kind: str, name: str | None = None) -> int:
        return sum(e[0] == kind and name in (None, e[1]) for e in self.events)

    @property
    def runs(self) -> Counter:
        return Counter(e[1] for e in self.events if e[0] == "segment")


def execute(
    program: Program, arguments: Sequence[Sequence[np.ndarray]], *, poison: bool = False
) -> Executed:
    """``arguments[i][device]`` is parameter i of a device."""
    check(program)
    transport, recorder = MemoryTransport(1), Recorder()
    world = MemoryWorld(transport, 0, Options(local_devices=MOST_DEVICES, poison_skipped=poison))
    executor = Executor(
        engine(), world, communicators=transport.communicators(0), instrument=recorder
    )
    loaded = executor.load(program, range(program.num_devices))
    rows = [
        [
            Value.of(engine(), engine().put(np.array(given[d]), type, d), type, d)
            for given, type in zip(arguments, program.inputs, strict=True)
        ]
        for d in range(program.num_devices)
    ]
    outputs = loaded.execute(rows)
    results = [
        [np.array(row[i].host_view()) for row in outputs] for i in range(len(program.outputs))
    ]
    executor.close()
    return Executed(results, recorder.events)
