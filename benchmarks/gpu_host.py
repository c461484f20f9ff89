"""The host's time for a step of 100 segments and 20 collectives on a GPU, run by each rank.

    ci/gpu --fake host        on the fake driver, which also counts how often the host waits
    mpiexec -n 2 python benchmarks/gpu_host.py [STEPS]

The step is a program written by hand: an all-reduce of 4 KiB with five segments of one addition between its
start and its wait, each of which is donated the result before, twenty times. The time is that of the walk,
from the call to where all of it is enqueued, the median over STEPS (60) that start when nothing is left to
do. On the fake the ranks take turns, and its streams are held up meanwhile: they would compute on the cores
of the host. On GPUs the ranks go on together: one alone may fill what NCCL has room for. Beside it stands
how long the walk's thread was on a core, which other load lengthens less.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import threading
import time
from typing import Any

import numpy as np

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType
from stretto.runtime.engines.engine import create_engine
from stretto.runtime.execution.executor import Executor
from stretto.runtime.execution.value import Value
from stretto.runtime.job.world import bootstrap
from stretto.runtime.program import Block, Free, Instruction, Program, Run, Segment, Start, Wait

TYPE = TensorType("f32", (1024,))
MODULE = b"""module @add {
  func.func public @main(%a: tensor<1024xf32> {tf.aliasing_output = 0 : i32}) -> tensor<1024xf32> {
    %0 = stablehlo.add %a, %a : tensor<1024xf32>
    return %0 : tensor<1024xf32>
  }
}"""
COLLECTIVES, SEGMENTS = 20, 100


def step(devices: int) -> Program:
    """The program."""
    total = Collective(
        Kind.ALL_REDUCE, (TYPE,), (TYPE,), (tuple(range(devices)),), reduction=Reduction.SUM
    )
    instructions: list[Instruction] = []
    slots = 2  # of the parameters: what is computed with, and what is summed
    computed, summed = 0, 1

    def run() -> None:
        nonlocal computed, slots
        instructions.append(Run(0, (computed,), (slots,), (computed,)))
        computed, slots = slots, slots + 1

    for event in range(COLLECTIVES):
        before, summed, slots = summed, slots, slots + 1
        instructions.append(Start(0, (before,), (summed,), event))
        for _ in range(SEGMENTS // COLLECTIVES):
            run()
        instructions += [Wait(event), Free((before,))]
    body = Block((0, 1), tuple(instructions), (computed, summed))
    segment = Segment((TYPE,), (TYPE,), MODULE, (0,), name="add")
    types = (TYPE,) * slots
    return Program("step", devices, 1, types, (segment,), (total,), body, (0, 1))


class Driver:
    """The fake driver; on a real one nothing is counted or held up."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        self._waits = getattr(library, "fake_cuda_host_waits", lambda: 0)
        self.fake = hasattr(library, "fake_cuda_hold")
        self._hold = getattr(library, "fake_cuda_hold", lambda function: 0)
        self._gates: list[threading.Event] = []
        self._wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._await_gate)

    def _await_gate(self, _: int | None) -> None:
        self._gates[-1].wait(60)

    def waits(self) -> int:
        """How often the host waited for a stream."""
        return int(self._waits())

    def hold(self) -> None:
        """Keep all streams from going on until `release`."""
        self._gates.append(threading.Event())
        self._hold(self._wait)

    def release(self) -> None:
        self._gates[-1].set()


def meet(comm: Any) -> None:
    """Wait for the other ranks, asleep."""
    if comm is not None:
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(1e-3)


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    world = bootstrap()
    engine = create_engine(world.options.engine, world.local_devices)
    executor = Executor(engine, world)
    loaded = executor.load(step(world.num_devices), tuple(range(world.num_devices)))

    def value(ordinal: int) -> Value:
        return Value.of(engine, engine.put(np.ones(1024, np.float32), TYPE, ordinal), TYPE, ordinal)

    rows: Any = [[value(ordinal), value(ordinal)] for _, ordinal in loaded.local]
    driver = Driver()
    walls: list[float] = []
    cores: list[float] = []
    waited = 0
    for number in range(steps + 3):
        for row in rows:
            for array in row:
                array.block()
        meet(world.comm)
        if number >= 3:
            driver.hold()
        own = world.rank if number >= 3 and driver.fake else 0  # first they agree on an order
        for turn in range(world.size):
            meet(world.comm)
            if turn != own:
                continue
            thread = executor.dispatcher.stream.thread_id
            clock = (
                time.CLOCK_THREAD_CPUTIME_ID
                if thread is None
                else time.pthread_getcpuclockid(thread)
            )
            on_core, before, began = time.clock_gettime(clock), driver.waits(), time.perf_counter()
            rows, event = loaded.execute_with_completion(rows)
            if event is not None:
                event.wait()
            if number >= 3:
                walls.append(time.perf_counter() - began)
                cores.append(time.clock_gettime(clock) - on_core)
                waited += driver.waits() - before
        meet(world.comm)
        if number >= 3:
            driver.release()
    wall = statistics.median(walls) * 1e3
    print(
        f"rank {world.rank}: {SEGMENTS} segments and {COLLECTIVES} collectives on {world.local_devices} "
        f"devices: {wall:.2f} ms (best {min(walls) * 1e3:.2f}), "
        f"{statistics.median(cores) * 1e3:.2f} ms on a core, {waited} waits of the host",
        flush=True,
    )


if __name__ == "__main__":
    main()
