"""Ranks that ask for memory in common: each prints its rank and the numbers of those it shares some with."""

from __future__ import annotations

import json
import os
import sys

from mpi4py import MPI

from stretto.collectives import nearby
from stretto.collectives._native import Shared


class Elsewhere:
    """Memory that says it is another process's."""

    def __init__(self, count: int, me: int, pid: int) -> None:
        self._shared, self._pid = Shared(count, me), pid
        self.join = self._shared.join

    @property
    def told(self) -> tuple[int, int, bytes]:
        return self._pid, *self._shared.told[1:]


def main() -> None:
    comm, case = MPI.COMM_WORLD, sys.argv[1]
    rank = comm.Get_rank()
    memory = str(rank % 2) if case == "hosts" else "" if (rank, case) == (1, "unwilling") else "one"
    if rank == 1 and case in ("another", "nobody"):
        pid = os.getppid() if case == "another" else 1 << 30
        nearby._shared = lambda count, me: Elsewhere(count, me, pid)  # type: ignore[assignment, return-value]
    met = nearby.meet(comm, memory)
    print(json.dumps([rank, None if met is None else dict(met.numbers)]), flush=True)


if __name__ == "__main__":
    main()
