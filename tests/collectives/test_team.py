"""What a team asks of MPI, seen from one process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from stretto.collectives.ops import Reduction
from stretto.collectives.posted import Postable
from stretto.collectives.team import Team
from stretto.collectives.waiting import Waiting


class Recorder:
    """A communicator of two processes that keeps what it is called with, and does nothing."""

    def __init__(self) -> None:
        self.sources: list[Any] = []

    def Get_rank(self) -> int:
        return 0

    def Allreduce(self, source: Any, result: Any, op: MPI.Op) -> None:
        self.sources.append(source)

    def Iallreduce(self, source: Any, result: Any, op: MPI.Op) -> MPI.Request:
        self.sources.append(source)
        return MPI.REQUEST_NULL


@pytest.mark.parametrize("count", [4, 1 << 16])
@pytest.mark.parametrize("patience", [0.0, math.inf])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_reductions_are_in_place_however_many_devices_a_process_has(
    count: int, patience: float, elsewhere: bool
) -> None:
    """On all processes or on none: with one device the partial result is its operand, with several it is
    where the result goes. Open MPI's processes do not match otherwise."""
    comm = Recorder()
    reduce = Team(comm, (0, 1), Waiting(patience)).all_reduce("s32", Reduction.SUM, count, "s32")  # type: ignore[arg-type]
    partial = np.arange(count, dtype=np.int32)
    out = np.zeros_like(partial) if elsewhere else partial
    if isinstance(reduce, Postable):
        reduce.post(partial, out).wait()
    else:
        reduce(partial, out)
    assert comm.sources == [MPI.IN_PLACE]
    np.testing.assert_array_equal(out, np.arange(count))
