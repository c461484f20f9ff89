"""How far apart the ranks' clocks are, by round trips through MPI.

A round trip tells rank 0's time to half its length, if both ways take equally long; the shortest of several
is used (Cristian's algorithm). Collective: all ranks call it together.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

ROUND_TRIPS = 16
CLOSE = 2e-4  # a round trip that is short enough to end with
MOST = 512  # where cores are short: as many until one was
_TAG = 7


def offset_to_first(comm: Any) -> float:
    """Seconds to add to this rank's ``perf_counter()`` for that of rank 0 of ``comm``."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if rank == 0:
        for other in range(1, size):
            while comm.recv(source=other, tag=_TAG):
                comm.send(perf_counter(), dest=other, tag=_TAG)
        return 0.0
    best, offset, trips = float("inf"), 0.0, 0
    while trips < ROUND_TRIPS or (best > CLOSE and trips < MOST):
        left = perf_counter()
        comm.send(True, dest=0, tag=_TAG)
        there = comm.recv(source=0, tag=_TAG)
        back = perf_counter()
        trips += 1
        if back - left < best:
            best, offset = back - left, there - (left + back) / 2
    comm.send(False, dest=0, tag=_TAG)
    return offset
