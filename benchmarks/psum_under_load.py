"""``psum`` inside ``jit`` between ranks that do not have the cores for themselves.

Two ranks while no, one and two other processes compute, and four ranks on however many cores there are:
stretto under mpiexec, JAX's CPU backend with gloo, a bare MPI_Allreduce.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from harness import in_turns, options, show
from two_ranks import LABELS, over_ranks

CASES = {"8 B": {"bytes": 8, "calls": 60}, "4 KiB": {"bytes": 4096, "calls": 60}}
GOALS = {"8 B": "gloo ≥ 5x", "4 KiB": "gloo ≥ 5x"}


@contextmanager
def computing(processes: int) -> Iterator[None]:
    """While so many other processes compute without end."""
    spin = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(spin) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> None:
    args = options(__doc__ or "")
    turns = 7 if args.quick else 15
    labels = {name: LABELS[name] for name in ("stretto", "gloo", "mpi")}
    for ranks, loads in ((2, (0, 1, 2)), (4, (0,))):
        with over_ranks("contenders.py", ranks, labels) as found:
            for processes in loads:
                with computing(processes):
                    times = in_turns(found, CASES, turns)
                title = f"psum inside jit, {ranks} ranks, {processes} other processes compute"
                show(title, times, LABELS["stretto"], GOALS)


if __name__ == "__main__":
    main()
