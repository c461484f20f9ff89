"""Run by every rank of test_hierarchy.py: collectives over processes, against their definitions.

Arguments: the number of devices of each rank, as ``2,2`` or ``3,1``; n, to take every n-th case (more
ranks than cores make little way); seconds after which waits sleep. Every rank knows the operands of all
devices. The tests' directory is on the path. Prints ``checked N`` on rank 0; a rank with a wrong result says
which and exits with 1.
"""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any

import numpy as np
from mpi4py import MPI
from support.collective_cases import (
    Case,
    difference,
    every_case,
    make,
    operands_of,
    random_array,
    same,
)

from stretto.collectives.hierarchy import create_communicator
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType

comm = MPI.COMM_WORLD.Dup()
rank = comm.Get_rank()
counts = [int(n) for n in sys.argv[1].split(",")]
owner = {i: r for i, r in enumerate(np.repeat(np.arange(len(counts)), counts).tolist())}
local = [i for i, r in owner.items() if r == rank]
devices = len(owner)
communicator = create_communicator(comm, 0, float(sys.argv[3]))
checked = 0
wrong: list[str] = []
posted: set[str] = set()
ahead: set[str] = set()


def check(case: Case, present: frozenset[int] | None = None, owner=owner, reducer=None) -> None:
    """All ranks run it; compare what the local devices got."""
    global checked
    mine = [i for i, r in owner.items() if r == rank]
    bound = communicator.bind(case.collective, owner, reducer)
    operands = {i: case.inputs[i] for i in mine if present is None or i in present}
    if not operands:
        return
    options = {"skip": case.skip} if case.skip else {}
    want = case.expected()
    for turn in range(2):  # plans and buffers are used again
        # One rank may post what another runs.
        posts = turn == 1 and getattr(bound, "prompt", False) and len(operands) == len(mine)
        if posts and (rank + checked) % 3:
            pending = bound.post(operands, **options)
            if checked % 2:
                pending.wait()
            while not checked % 2 and not pending.test():
                pass
            got = pending.results
            posted.add(str(case.collective.kind))
        else:
            got = bound.run(operands, **options)
        if set(got) != set(operands):
            wrong.append(f"results for {sorted(got)}, not {sorted(operands)}")
        problem = difference(case.collective, got, want)
        if problem:
            wrong.append(problem)
    checked += 1


def several_under_way() -> None:
    """Large collectives that some ranks post all at once, while others run one after the other."""
    global checked
    group, rng = (tuple(range(devices)),), np.random.default_rng(11)
    cases = [
        Case(collective, operands_of(rng, collective, devices))
        for rows in (20011, 300007, 3000)
        for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
        for reduction in (None if kind is Kind.ALL_GATHER else Reduction.SUM,)
        for collective in (make(kind, group, "s32", (rows,), reduction=reduction),)
    ]
    # Of several operands, which end one after the other.
    types = tuple(TensorType("s32", (n,)) for n in (300007, 20011, 600000))
    summed = Collective(Kind.ALL_REDUCE, types, types, group, reduction=Reduction.SUM)
    cases.insert(1, Case(summed, operands_of(rng, summed, devices)))
    waiting: list[tuple[Case, Any]] = []

    def settle() -> None:
        for case, pending in waiting:
            pending.wait()
            problems.append(difference(case.collective, pending.results, case.expected()))
        waiting.clear()

    bound = [communicator.bind(case.collective, owner) for case in cases]
    problems: list[str | None] = []
    for case, one in zip(cases, bound, strict=True):
        operands = {i: case.inputs[i] for i in local}
        posts = getattr(one, "ahead", False)
        if posts:
            ahead.add(str(case.collective.kind))
        if posts and rank % 2 == 0:
            waiting.append((case, one.post(operands)))
            continue
        settle()
        problems.append(difference(case.collective, one.run(operands), case.expected()))
    settle()
    wrong.extend(problem for problem in problems if problem)
    checked += len(problems)


def other_placements() -> None:
    """Devices dealt round, or in falling order: groups in which processes alternate."""
    ids = range(devices)
    for placed in (
        {i: i % comm.Get_size() for i in ids},
        {i: owner[devices - 1 - i] for i in ids},
    ):
        rng = np.random.default_rng(5)
        for kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE):
            for shard in ((2, 3), (20011,)):
                reduces = kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
                reduction = Reduction.SUM if reduces else None
                collective = make(kind, (tuple(ids),), "f32", shard, reduction=reduction)
                check(Case(collective, operands_of(rng, collective, devices)), owner=placed)


def divergence() -> None:
    """Only some groups are entered."""
    if devices % 2:
        return
    half = devices // 2
    groups = tuple((i, i + half) for i in range(half))
    rng = np.random.default_rng(6)
    for kind in (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER):
        reduces = kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
        collective = make(
            kind, groups, "bf16", (2, 2), reduction=Reduction.SUM if reduces else None
        )
        case = Case(collective, operands_of(rng, collective, devices))
        for entered in range(half):
            check(case, frozenset(groups[entered]))
    ring = tuple((i, (i + 1) % devices) for i in range(devices))
    exchange = ((0, half), (half, 0), (1 % half, half + 1 % half))
    for pairs, present in ((exchange[:2], {0, half}), (ring, set(range(devices)))):
        type_ = TensorType("f32", (3,))
        collective = Collective(Kind.PERMUTE, (type_,), (type_,), pairs=pairs)
        check(Case(collective, operands_of(rng, collective, devices)), frozenset(present))


def float_extremes() -> None:
    """NaN in one process must reach all; results must be the same bits everywhere."""
    rng = np.random.default_rng(7)
    for dtype in ("f32", "f64", "bf16", "f16"):
        for size in (64, 100000):
            type_ = TensorType(dtype, (size,))
            arrays = {i: [random_array(rng, type_)] for i in range(devices)}
            for row in arrays.values():
                row[0][rng.integers(0, size, 5)] = np.nan
            for reduction in (Reduction.MIN, Reduction.MAX):
                collective = Collective(
                    Kind.ALL_REDUCE,
                    (type_,),
                    (type_,),
                    (tuple(range(devices)),),
                    reduction=reduction,
                )
                check(Case(collective, arrays))


def same_bits() -> None:
    """Sums of numbers that are not exact: what every device gets must be the same to the bit, and close."""
    global checked
    rng = np.random.default_rng(8)
    group = (tuple(range(devices)),)
    for dtype, tolerance in (("f32", 1e-5), ("f64", 1e-13), ("bf16", 2e-2), ("f16", 3e-3)):
        for size in (3, 1000, 9001, 300007):
            type_ = TensorType(dtype, (size,))
            inputs = {i: [rng.standard_normal(size).astype(type_.numpy)] for i in range(devices)}
            collective = Collective(
                Kind.ALL_REDUCE, (type_,), (type_,), group, reduction=Reduction.SUM
            )
            got = communicator.bind(collective, owner).run({i: inputs[i] for i in local})
            exact = sum(row[0].astype(np.float64) for row in inputs.values())
            bits = {row[0].tobytes() for row in got.values()}
            everywhere = set().union(*comm.allgather(bits))
            if len(everywhere) != 1:
                wrong.append(f"{type_}: devices have {len(everywhere)} different sums")
            error = np.abs(got[local[0]][0].astype(np.float64) - exact).max()
            if not error <= tolerance * max(1, np.abs(exact).max()):
                wrong.append(f"{type_}: off by {error}")
            checked += 1


def narrow_floats_round_once() -> None:
    """256 + 1 + 1 + … in bf16 stays 256 where it is rounded at every step; in f8 16 + 0.5 + …"""
    for dtype, first, rest in (("bf16", 256.0, 1.0), ("f8e4m3fn", 16.0, 1.0)):
        for size in (1, 50000):
            type_ = TensorType(dtype, (size,))
            inputs = {
                i: [np.full(size, rest if i else first).astype(type_.numpy)] for i in range(devices)
            }
            wide = dtype != "bf16" or size == 1 or max(counts) == 1
            if not wide:
                continue
            collective = Collective(
                Kind.ALL_REDUCE,
                (type_,),
                (type_,),
                (tuple(range(devices)),),
                reduction=Reduction.SUM,
            )
            check(Case(collective, inputs))


def custom_reducers() -> None:
    """A reducer of two operands that is associative but not elementwise-native."""
    global checked

    def larger(left, right):
        keep = left[0] >= right[0]
        return [np.where(keep, left[0], right[0]), np.where(keep, left[1], right[1])]

    rng = np.random.default_rng(9)
    size = 2 * devices
    types = (TensorType("f32", (size,)), TensorType("s32", (size,)))
    parts = tuple(TensorType(t.dtype, (2,)) for t in types)
    inputs = {
        i: [rng.standard_normal(size).astype(np.float32), np.full(size, i, np.int32)]
        for i in range(devices)
    }
    values = np.stack([row[0] for row in inputs.values()])
    want = [values.max(0), values.argmax(0).astype(np.int32)]
    for kind, results in ((Kind.ALL_REDUCE, types), (Kind.REDUCE_SCATTER, parts)):
        collective = Collective(
            kind,
            types,
            results,
            (tuple(range(devices)),),
            reducer=0,
            dimension=0 if kind is Kind.REDUCE_SCATTER else -1,
        )
        got = communicator.bind(collective, owner, larger).run({i: inputs[i] for i in local})
        for i in local:
            for k in range(2):
                piece = want[k] if kind is Kind.ALL_REDUCE else want[k][2 * i : 2 * i + 2]
                if not same(got[i][k], piece):
                    wrong.append(f"custom {kind} on device {i}: {got[i][k]}, not {piece}")
        checked += 1


def messages() -> None:
    """Sends and receives round a ring, several under way, on two channels, one pair skipped."""
    global checked
    type_ = TensorType("bf16", (1000,))
    pairs = tuple((i, (i + 1) % devices) for i in range(devices))
    bound = {
        (kind, channel): communicator.bind(
            Collective(
                kind,
                (type_,) if kind is Kind.SEND else (),
                (type_,) if kind is Kind.RECV else (),
                pairs=pairs,
                channel=channel,
            ),
            owner,
        )
        for channel in (1, 2)
        for kind in (Kind.SEND, Kind.RECV)
    }
    data = {
        n: {i: [np.full(1000, 10 * n + i).astype(type_.numpy)] for i in range(devices)}
        for n in range(3)
    }
    nobody = {i: [] for i in local}
    sends = [
        bound[Kind.SEND, channel].start({i: data[n][i] for i in local})
        for n, channel in ((0, 2), (1, 1), (2, 1))
    ]
    skip = frozenset({devices - 1})
    sends.append(bound[Kind.SEND, 1].start({i: data[0][i] for i in local}, skip=skip))
    receives = [
        bound[Kind.RECV, channel].start(nobody, **options)
        for channel, options in ((1, {}), (1, {}), (2, {}), (1, {"skip": skip}))
    ]
    for n, request, skipped in zip((1, 2, 0, 0), receives, (False,) * 3 + (True,), strict=True):
        got = request.wait()
        for i in local:
            source = (i - 1) % devices
            piece = data[n][source][0]
            if skipped and source == devices - 1:
                piece = np.zeros_like(piece)
            if not same(got[i][0], piece):
                wrong.append(f"message {n} to device {i}: {got[i][0][:2]}, not {piece[:2]}")
        checked += 1
    for request in sends:
        request.wait()
    if not all(request.test() for request in sends + receives):
        wrong.append("a request that was waited for is not complete")


def groups_elsewhere() -> None:
    """A collective that only one process has part in must not make the others wait."""
    global checked
    outsiders = [i for i in range(devices) if owner[i] != 0]
    for group in (tuple(outsiders), tuple(i for i in range(devices) if owner[i] == 0)):
        type_ = TensorType("f32", (5,))
        collective = Collective(
            Kind.ALL_REDUCE, (type_,), (type_,), (group,), reduction=Reduction.SUM
        )
        bound = communicator.bind(collective, owner)
        if not set(group) & set(local):
            continue
        got = bound.run({i: [np.full(5, i, np.float32)] for i in local})
        for i in local:
            total = sum(group) if i in group else 0
            if not same(got[i][0], np.full(5, total, np.float32)):
                wrong.append(f"group {group}: device {i} got {got[i][0]}")
        checked += 1


for case in islice(every_case(devices), 0, None, int(sys.argv[2])):
    check(case)
other_placements()
divergence()
float_extremes()
same_bits()
narrow_floats_round_once()
custom_reducers()
several_under_way()
messages()
groups_elsewhere()
comm.Barrier()
communicator.close()
if wrong:
    print(f"rank {rank}: {len(wrong)} wrong; the first:\n{wrong[0]}", file=sys.stderr)
    sys.exit(1)
if rank == 0:
    print(f"checked {checked}")
    print(f"posted {' '.join(sorted(posted))}")
    print(f"ahead {' '.join(sorted(ahead))}")
