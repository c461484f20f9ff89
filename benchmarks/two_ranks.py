"""Starts the runtimes that are compared between ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
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


def initialize_gloo() -> None:
    """Connect this process of JAX's CPU backend, which `over_ranks` has started, with the others."""
    import jax

    address, ranks, rank = (os.environ[f"BENCH_{n}"] for n in ("COORDINATOR", "RANKS", "RANK"))
    jax.distributed.initialize(address, int(ranks), int(rank))


@contextmanager
def over_ranks(script: str, ranks: int, labels: Mapping[str, str]) -> Iterator[list[Contender]]:
    """``script NAME`` on each of the ranks, for each NAME of ``labels``: stretto, gloo (JAX's CPU
    backend) or mpi."""
    starts = {
        "stretto": {"launcher": "mpi", "JAX_PLATFORMS": "stretto,cpu"},
        "gloo": {
            "launcher": "plain",
            "JAX_PLATFORMS": "cpu",
            "BENCH_COORDINATOR": free_address(),
        },
        "mpi": {"launcher": "mpi"},
    }
    with ExitStack() as stack:
        contenders = []
        for name, label in labels.items():
            contender = start(name, script, ranks, **starts[name])
            stack.callback(contender.close)
            contender.name = label
            contenders.append(contender)
        yield contenders


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
