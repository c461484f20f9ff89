"""Run by every rank of test_gpus.py: collectives over the fake NCCL, against their definitions.

Arguments: the number of devices of each rank, as ``2,2``. The tests' directory and the fake libraries are on
their paths. The memory of the fake's devices is the host's, so arrays of NumPy serve. All cases are enqueued
before the first result is read. Prints ``checked N`` and the kinds on rank 0; a rank with a wrong result
says which and exits with 1.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from mpi4py import MPI
from support.collective_cases import Case, as_results, difference, every_case, make, operands_of

from stretto.collectives.bound_on_gpus import BoundOnGpus, Buffers, bind
from stretto.collectives.cuda import cuda
from stretto.collectives.gpus import Gpus, Joined
from stretto.collectives.hierarchy import Hierarchy, create_communicator
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType

comm = MPI.COMM_WORLD.Dup()
rank = comm.Get_rank()
counts = [int(n) for n in sys.argv[1].split(",")]
owner = {i: r for i, r in enumerate(np.repeat(np.arange(len(counts)), counts).tolist())}
local = [i for i, r in owner.items() if r == rank]
communicator = create_communicator(comm, 0)
assert isinstance(communicator, Hierarchy)
gpus = Gpus(communicator.mpi, patience=60)
joined = gpus.join(owner, {i: n for n, i in enumerate(local)})
assert isinstance(joined, Joined), joined
under_way: list[tuple[Case, dict[int, list[np.ndarray]], Any]] = []
bound_kinds = set()
wrong: list[str] = []


def enqueue(case: Case, present: frozenset[int] | None = None) -> None:
    collective = case.collective
    bound = bind(joined, collective, communicator.bind(collective, owner))
    if bound is None:
        return
    assert isinstance(bound, BoundOnGpus)
    bound_kinds.add(collective.kind)
    here = [i for i in local if present is None or i in present]
    results, kept = {}, []
    buffers = {}
    for i in here:
        operands = [np.ascontiguousarray(a) for a in case.inputs[i]]
        results[i] = [np.full(t.nbytes, 0xEE, np.uint8) for t in collective.results]
        scratch = np.full(bound.scratch, 0xDD, np.uint8)
        kept.append((operands, scratch))
        buffers[i] = Buffers(
            [a.ctypes.data for a in operands],
            [a.ctypes.data for a in results[i]],
            scratch.ctypes.data,
        )
    if here:
        bound.enqueue(buffers, case.skip)
    views = as_results(collective, results)
    under_way.append((case, views, kept))


for case in every_case(len(owner)):
    enqueue(case)
half = len(owner) // 2
if len(owner) % 2 == 0 and half > 1:  # only some groups are entered
    groups = tuple((i, i + half) for i in range(half))
    rng = np.random.default_rng(6)
    for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER):
        reduces = kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
        summed = Reduction.SUM if reduces else None
        collective = make(kind, groups, "f32", (2, 2), reduction=summed)
        case = Case(collective, operands_of(rng, collective, len(owner)))
        for entered in groups:
            enqueue(case, frozenset(entered))
for device in range(len(local)):
    cuda().use(device)
    cuda().synchronize(gpus.stream(device))
for case, views, _ in under_way:
    problem = difference(case.collective, views, case.expected())
    if problem:
        wrong.append(problem)
alone = [i for i in local if i != local[0]]
if alone:
    collective = make(Kind.ALL_REDUCE, (tuple(owner),), "f32", (2,), reduction=Reduction.SUM)
    bound = bind(joined, collective, communicator.bind(collective, owner))
    try:
        bound.enqueue({alone[0]: Buffers([0], [0])})
        wrong.append("part of a group was taken for all of it")
    except RuntimeError as error:
        assert "take part in this all-reduce, but devices" in str(error), error
else:
    collective = make(Kind.ALL_REDUCE, (tuple(owner),), "f32", (2,), reduction=Reduction.SUM)
    bind(joined, collective, communicator.bind(collective, owner))
# NCCL's maximum of floats ignores NaN, and HLO's does not.
type_ = TensorType("f32", (2,))
for reduction in (Reduction.MAX, Reduction.MIN):
    maximum = Collective(Kind.ALL_REDUCE, (type_,), (type_,), (tuple(owner),), reduction=reduction)
    assert bind(joined, maximum, communicator.bind(maximum, owner)) is None
comm.Barrier()
gpus.close()
communicator.close()
if wrong:
    print(f"rank {rank}: {len(wrong)} wrong; the first:\n{wrong[0]}", file=sys.stderr)
    sys.exit(1)
if rank == 0:
    print(f"checked {len(under_way)}: {' '.join(sorted(bound_kinds))}")
