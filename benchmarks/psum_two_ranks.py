"""``psum`` inside ``jit`` between two ranks with one device each, by message size.

stretto under mpiexec, JAX's CPU backend with gloo, a bare MPI_Allreduce, and mpi4jax where it is installed.
"""

from __future__ import annotations

from harness import in_turns, options, show
from two_ranks import LABELS, two_ranks

SIZES = {
    "8 B": (8, 300),
    "4 KiB": (4096, 300),
    "128 KiB": (2**17, 100),
    "1 MiB": (2**20, 30),
    "16 MiB": (2**24, 4),
}
GOALS = {
    "8 B": "gloo ≥ 15x",
    "4 KiB": "gloo ≥ 10x",
    "1 MiB": "gloo ≥ 3x",
    "16 MiB": "gloo ≥ 2x, MPI_Allreduce ≥ 0.71x",
}


def main() -> None:
    args = options(__doc__ or "")
    cases = {
        label: {"bytes": size, "calls": max(2, calls // (5 if args.quick else 1))}
        for label, (size, calls) in SIZES.items()
    }
    with two_ranks() as contenders:
        times = in_turns(contenders, cases, 5 if args.quick else 15)
    show("psum inside jit, 2 ranks", times, LABELS["stretto"], GOALS, target=args.json)


if __name__ == "__main__":
    main()
