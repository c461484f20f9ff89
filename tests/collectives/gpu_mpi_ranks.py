"""Run by every rank of test_gpu_mpi.py: collectives by MPI on device memory, against their definitions.

Arguments: the number of devices of each rank, as ``2,2``. The tests' directory and the fake driver are on
their paths. The memory of the fake's devices is the host's, so any MPI moves it. Operands come onto the
devices by copies on their streams, which are late, and results are read behind them. Prints ``checked N``
and the kinds on rank 0; a rank with a wrong result says which and exits with 1. With ``hasty`` as second
argument nobody waits for what the messages need.
"""

from __future__ import annotations

import sys
import time

import numpy as np
from mpi4py import MPI
from support.collective_cases import Case, as_results, difference, every_case, make, operands_of

from stretto.collectives.bound_on_gpus import Buffers
from stretto.collectives.cuda import cuda
from stretto.collectives.gpu_mpi import OnDevices, is_supported
from stretto.collectives.hierarchy import Hierarchy, create_communicator
from stretto.collectives.ops import Kind, Reduction

comm = MPI.COMM_WORLD.Dup()
rank = comm.Get_rank()
counts = [int(n) for n in sys.argv[1].split(",")]
hasty = "hasty" in sys.argv
owner = {i: r for i, r in enumerate(np.repeat(np.arange(len(counts)), counts).tolist())}
local = [i for i, r in owner.items() if r == rank]
devices = {i: n for n, i in enumerate(local)}
communicator = create_communicator(comm, 0)
assert isinstance(communicator, Hierarchy) and communicator.mpi is not None
by_mpi = OnDevices(communicator.mpi, "1")
assert by_mpi.problem(owner) == ""
driver = cuda()
streams = {}
for i, device in devices.items():
    driver.use(device)
    streams[i] = driver.stream()
wrong: list[str] = []
kinds = set()
checked = 0


def mark(i: int) -> int:
    driver.use(devices[i])
    event = driver.event()
    driver.record(event, streams[i])
    return event


def run(case: Case, present: frozenset[int] | None = None) -> None:
    global checked
    collective = case.collective
    bound = by_mpi.bind(collective, owner, devices, communicator.bind(collective, owner))
    if bound is None:
        return
    here = [i for i in local if present is None or i in present]
    plan = bound.plan(dict.fromkeys(here), case.skip)
    results, kept, buffers = {}, [], {}
    for i in here:
        given = [np.ascontiguousarray(a) for a in case.inputs[i]]
        operands = [np.full(a.nbytes, 0xCC, np.uint8) for a in given]
        results[i] = [np.full(t.nbytes, 0xEE, np.uint8) for t in collective.results]
        scratch = np.full(bound.scratch, 0xDD, np.uint8)
        kept.append((given, operands, scratch))
        driver.use(devices[i])
        for operand, array in zip(operands, given, strict=True):
            driver.copy(operand.ctypes.data, array.ctypes.data, array.nbytes, streams[i])
        buffers[i] = Buffers(
            [a.ctypes.data for a in operands],
            [a.ctypes.data for a in results[i]],
            scratch.ctypes.data,
        )
    there = {i: mark(i) for i in here}
    for i in here:
        driver.use(devices[i])
        for source in plan.awaited.get(i, ()):
            driver.wait(streams[i], there[source])
        bound.before(plan, i, buffers, streams[i])
    marks = [mark(i) for i in here]
    while not hasty and not all(driver.passed(event) for event in marks):
        time.sleep(1e-4)
    bound.exchange(plan, buffers, lambda: None)
    for i in here:
        bound.after(plan, i, buffers, streams[i])
    for i in here:
        driver.use(devices[i])
        driver.synchronize(streams[i])
    views = as_results(collective, results)
    problem = difference(collective, views, case.expected())
    kinds.add(collective.kind)
    checked += 1
    if problem:
        wrong.append(problem)


for case in every_case(len(owner)):
    run(case)
half = len(owner) // 2
if len(owner) % 2 == 0 and half > 1:  # only some groups are entered
    groups = tuple((i, i + half) for i in range(half))
    rng = np.random.default_rng(6)
    for kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST):
        collective = make(kind, groups, "f32", (2, 2))
        case = Case(collective, operands_of(rng, collective, len(owner)))
        for entered in groups:
            run(case, frozenset(entered))
everyone = (tuple(owner),)
total = make(Kind.ALL_REDUCE, everyone, "f32", (2, 2), reduction=Reduction.SUM)
assert not is_supported(total)
if len(local) > 1:
    collective = make(Kind.ALL_GATHER, everyone, "f32", (2, 2))
    bound = by_mpi.bind(collective, owner, devices, communicator.bind(collective, owner))
    assert bound is not None
    try:
        bound.plan({local[0]: None})
        wrong.append("part of a group was taken for all of it")
    except RuntimeError as error:
        assert "take part in this all-gather, but devices" in str(error), error
comm.Barrier()
if wrong:
    print(f"rank {rank}: {len(wrong)} wrong; the first:\n{wrong[0]}", file=sys.stderr)
    sys.exit(1)
if rank == 0:
    print(f"checked {checked}: {' '.join(sorted(kinds))}")
