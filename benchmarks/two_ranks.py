"""Starts the runtimes that sum between two ranks, and keeps those that are installed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from harness import Contender, console, installed, start

LABELS = {
    "stretto": "stretto",
    "gloo": "JAX CPU (gloo)",
    "mpi": "MPI_Allreduce",
    "mpi4jax": "mpi4jax",
}


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return f"127.0.0.1:{s.getsockname()[1]}"


@contextmanager
def two_ranks() -> Iterator[list[Contender]]:
    """stretto, JAX's CPU backend over gloo, bare MPI and (where installed) mpi4jax, two ranks each."""
    script = "contenders.py"
    starts = {
        "stretto": lambda: start("stretto", script, 2, "mpi", JAX_PLATFORMS="stretto,cpu"),
        "gloo": lambda: start(
            "gloo", script, 2, "plain", JAX_PLATFORMS="cpu", BENCH_COORDINATOR=free_address()
        ),
        "mpi": lambda: start("mpi", script, 2, "mpi"),
        "mpi4jax": lambda: start("mpi4jax", script, 2, "mpi", JAX_PLATFORMS="cpu"),
    }
    with ExitStack() as stack:
        contenders = []
        for name, begin in starts.items():
            if name == "mpi4jax" and not installed("mpi4jax"):
                console.print("mpi4jax is not installed: its column is left out")
                continue
            try:
                contender = begin()
            except RuntimeError as e:
                console.print(f"{LABELS[name]} is left out: {e}", markup=False)
                continue
            stack.callback(contender.close)
            contender.name = LABELS[name]
            contenders.append(contender)
        yield contenders
