"""Measuring a table of costs: what collectives cost over every span of devices, and what compute costs.

Spans are the groups that meshes over the devices have: every stride s and size g with s * g a divisor of
their number, all groups of a span at once. Latency is the median time of a small all-reduce; bandwidth
follows from the medians of large all-gathers, reduce-scatters and all-reduces less their latency, by the
ring's wire bytes. Compute is measured on all local devices at once: operations by a matrix product, memory
traffic by a sum of two arrays, a launch by the smallest segment: each several times in a row, every time on
the result before, since programs wait for what they compute at their end. Operands become larger until a
run takes as long as many launches. Rank 0's medians are everybody's.

How *busy* a span keeps the cores that compute is measured by gathers and reduce-scatters beside matrix
products (`beside`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from stretto.collectives.hierarchy import create_communicator
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType
from stretto.hlo_frontend.overlap.costs import wire_bytes
from stretto.runtime.engines.engine import Engine
from stretto.runtime.errors import StrettoError
from stretto.runtime.job.world import World
from stretto.runtime.program import Segment

from .beside import Beside, measure_busy

SMALL, LARGE = 64, 1 << 20  # float32 elements that a device gives
USUAL = 1 << 17  # beside compute: as large as what programs gather and scatter
SIDE, LARGEST_SIDE = 1024, 8192  # of the matrices
# float32 of the arrays that are added: more than the caches of one core hold, and less than the C library
# gives back to the system each time: those take five times as long for their bytes, for making pages.
ELEMENTS, MOST_ELEMENTS = 1 << 22, 1 << 26
# Runs in a row: of the smallest segment so many that its end counts for little; of long ones a few.
LAUNCHES, RUNS = 64, 4
LONG = 10  # launches that a product or a sum is to take at least
BESIDE = 512  # side of the matrices that are multiplied beside collectives
# A product with a matrix of 1 / side is one of equal numbers again.
_PRODUCT = "stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : ({0}, {0}) -> {0}"
_SUM = "stablehlo.add %a, %b : {0}"


def spans(devices: int) -> Iterator[tuple[int, int]]:
    """(stride, group size) of the groups that a mesh over ``devices`` can have."""
    for size in range(2, devices + 1):
        for stride in range(1, devices // size + 1):
            if devices % (stride * size) == 0:
                yield stride, size


def groups_of(devices: int, stride: int, size: int) -> tuple[tuple[int, ...], ...]:
    """All groups of a span, which hold each device once."""
    block = stride * size
    return tuple(
        tuple(range(first + offset, first + offset + block, stride))
        for first in range(0, devices, block)
        for offset in range(stride)
    )


def collective(kind: Kind, groups: tuple[tuple[int, ...], ...], elements: int) -> Collective:
    """A float32 collective to which each device gives ``elements`` (a multiple of the groups' size)."""
    size = len(groups[0])
    results = {Kind.ALL_GATHER: elements * size, Kind.REDUCE_SCATTER: elements // size}
    return Collective(
        kind,
        (TensorType("f32", (elements,)),),
        (TensorType("f32", (results.get(kind, elements),)),),
        groups=groups,
        reduction=None if kind is Kind.ALL_GATHER else Reduction.SUM,
        dimension=-1 if kind is Kind.ALL_REDUCE else 0,
        name=f"calibrate.{kind}",
    )


def calibrate(world: World, engine: Engine, rounds: int) -> dict[str, Any]:
    """The table as JSON, equal on all ranks, which all call this. Raises `StrettoError`."""
    compute = slowest(world, measure_compute(world, engine, rounds))
    links = []
    for stride, size in spans(world.num_devices):
        groups = groups_of(world.num_devices, stride, size)
        latency, rate = measure_link(world, groups, rounds)
        beside = Beside(world, engine, _segment((BESIDE, BESIDE), _PRODUCT), _pair(groups, USUAL))
        try:
            busy = measure_busy(beside, max(1, rounds // 2), world.comm)
        finally:
            beside.close()
        links.append(
            {
                "axis_stride": stride,
                "group_size": size,
                "latency_s": latency,
                "bytes_per_s": rate,
                "busy": busy,
            }
        )
    found = {"compute": compute, "links": links}
    return found if world.comm is None else world.comm.bcast(found, root=0)  # type: ignore[no-any-return]


class _Work:
    """One operation on every local device, so many times in a row, from an array of ``first`` and one of
    ``second``."""

    def __init__(
        self, engine: Engine, shape: tuple[int, ...], line: str, times: int, second: float
    ) -> None:
        self._engine, self._times = engine, times
        segment = _segment(shape, line)
        self._segment, (type, _) = engine.compile(segment, name=segment.name), segment.inputs
        self._inputs = [
            [
                engine.put(np.full(shape, value, np.float32), type, ordinal)
                for value in (1.0, second)
            ]
            for ordinal in range(engine.num_devices)
        ]

    def __call__(self) -> None:
        """Hand it to all devices, and wait for all."""
        arrays = [first for first, _ in self._inputs]
        for _ in range(self._times):
            arrays = [
                self._segment.run(ordinal, [array, second])[0]
                for ordinal, (array, (_, second)) in enumerate(
                    zip(arrays, self._inputs, strict=True)
                )
            ]
        for array in arrays:
            self._engine.block(array)


def _segment(shape: tuple[int, ...], line: str) -> Segment:
    """One operation on two arrays."""
    type, tensor = TensorType("f32", shape), f"tensor<{'x'.join(map(str, shape))}xf32>"
    module = (
        f"module @calibrate {{\n  func.func public @main(%a: {tensor}, %b: {tensor}) -> {tensor} {{\n"
        f"    %r = {line.format(tensor)}\n    return %r : {tensor}\n  }}\n}}\n"
    )
    return Segment((type, type), (type,), module.encode(), name="calibrate")


def _pair(groups: tuple[tuple[int, ...], ...], elements: int) -> list[Collective]:
    """A gather and a reduce-scatter, of which one gives and the other takes so many elements."""
    size = len(groups[0])
    shapes = {Kind.ALL_GATHER: elements // size, Kind.REDUCE_SCATTER: elements}
    return [collective(kind, groups, n // size * size) for kind, n in shapes.items()]


def measure_link(
    world: World, groups: tuple[tuple[int, ...], ...], rounds: int
) -> tuple[float, float]:
    """(seconds of latency, bytes a second) of these groups."""
    size = len(groups[0])
    owner = {device: device // world.local_devices for device in range(world.num_devices)}
    local = [device for device, rank in owner.items() if rank == world.rank]
    communicator = create_communicator(world.comm, 0)
    try:

        def seconds(wanted: Collective) -> tuple[float, float]:
            bound = communicator.bind(wanted, owner)
            operands = {d: [np.ones(wanted.operands[0].shape, np.float32)] for d in local}
            return _median(world, lambda: bound.run(operands), rounds), wire_bytes(wanted, size)

        latency, _ = seconds(collective(Kind.ALL_REDUCE, groups, max(size, SMALL // size * size)))
        summed = collective(Kind.ALL_REDUCE, groups, LARGE // size * size)
        times, moved = zip(*map(seconds, [*_pair(groups, LARGE), summed]), strict=True)
    finally:
        communicator.close()
    beyond = sum(times) - len(times) * latency
    return latency, sum(moved) / max(beyond, 0.05 * sum(times))


def measure_compute(world: World, engine: Engine, rounds: int) -> dict[str, float]:
    """Rates of one device while all local ones compute. Raises `StrettoError` without a clock of its own."""

    def seconds(shape: tuple[int, ...], line: str, times: int = RUNS, second: float = 0.0) -> float:
        """Of one of the runs in a row."""
        return _median(world, _Work(engine, shape, line, times, second), rounds) / times

    def is_short(taken: float) -> bool:
        """On any rank: all go on with the same sizes."""
        short = taken < LONG * launch
        return short if world.comm is None else any(world.comm.allgather(short))

    launch = seconds((8,), _SUM, LAUNCHES)
    side, elements = SIDE, ELEMENTS
    while (
        is_short(product := seconds((side, side), _PRODUCT, second=1 / side))
        and side < LARGEST_SIDE
    ):
        side *= 2
    while is_short(traffic := seconds((elements,), _SUM)) and elements < MOST_ELEMENTS:
        elements *= 2
    if min(product, traffic, launch) <= 0.0:
        raise StrettoError(f"engine {engine.name} computes in no time: there is nothing to measure")
    return {
        "flops_per_s": 2.0 * side**3 / max(product - launch, 0.5 * product),
        "bytes_per_s": 3.0 * 4 * elements / max(traffic - launch, 0.5 * traffic),
        "launch_s": launch,
    }


def slowest(world: World, compute: dict[str, float]) -> dict[str, float]:
    """Rank 0's rates, or those of the slowest engine where the ranks have several."""
    if world.comm is None:
        return compute
    every = world.comm.allgather(compute)
    samples = [every[rank] for rank in world.samples]
    return {
        name: (min if name.endswith("_per_s") else max)(sample[name] for sample in samples)
        for name in compute
    }


def _median(world: World, work: Callable[[], Any], rounds: int) -> float:
    """Seconds of a call that all ranks begin together; the first two calls do not count."""
    taken = []
    for _ in range(rounds + 2):
        if world.comm is not None:
            world.comm.Barrier()
        began = perf_counter()
        work()
        taken.append(perf_counter() - began)
    return median(taken[2:])
