"""One process of one runtime that sums arrays between two ranks (see ``two_ranks``).

``python contenders.py NAME``, NAME one of: stretto (under mpiexec), gloo (JAX's CPU backend over
jax.distributed), mpi (bare mpi4py), mpi4jax. Cases: ``{"bytes": n, "calls": c}`` sums n bytes
of f32 in one jitted call, waiting for each; with ``"trips": t`` t times in a fori_loop.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import serve, time_calls
from two_ranks import initialize_gloo

Call = Callable[[], Any]


def jax_setup(name: str) -> tuple[int, Callable[[int, int], Call]]:
    """Stretto or JAX's CPU backend: psum over a mesh of all devices, under shard_map in jit."""
    import jax
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    if name == "gloo" and int(os.environ["BENCH_RANKS"]) > 1:
        initialize_gloo()
    ranks = int(os.environ["BENCH_RANKS"])
    devices = jax.device_count()
    wanted = int(os.environ.get("STRETTO_LOCAL_DEVICES", "1")) * ranks
    if (jax.process_count(), devices) != (ranks, wanted):
        raise RuntimeError(f"{jax.process_count()} processes, {devices} devices")
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def program(size: int, trips: int) -> Call:
        def once(x: jax.Array) -> jax.Array:
            return lax.psum(x, "x")

        def loop(x: jax.Array) -> jax.Array:
            body = lambda _, v: lax.pcast(lax.psum(v, "x") * 0.5, "x", to="varying")  # noqa: E731
            return lax.fori_loop(0, trips, body, x)

        f = jax.jit(
            jax.shard_map(loop if trips else once, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        )
        data = np.ones((devices, size // 4), np.float32)
        x = jax.make_array_from_callback(data.shape, NamedSharding(mesh, P("x")), lambda i: data[i])
        return lambda: f(x).block_until_ready()

    return jax.process_index(), program


def mpi_setup() -> tuple[int, Callable[[int, int], Call]]:
    """MPI_Allreduce on numpy arrays, nothing else: what the others cannot undercut."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def program(size: int, trips: int) -> Call:
        x, y = np.ones(size // 4, np.float32), np.ones(size // 4, np.float32)

        def call() -> None:
            for _ in range(trips or 1):
                comm.Allreduce(x, y)

        return call

    return comm.Get_rank(), program


def mpi4jax_setup() -> tuple[int, Callable[[int, int], Call]]:
    """mpi4jax's allreduce inside jit, on JAX's CPU backend."""
    import jax
    import jax.numpy as jnp
    import mpi4jax
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def program(size: int, trips: int) -> Call:
        def once(x: jax.Array) -> jax.Array:
            return mpi4jax.allreduce(x, op=MPI.SUM, comm=comm)

        def loop(x: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, trips, lambda _, v: once(v) * 0.5, x)

        f = jax.jit(loop if trips else once)
        x = jnp.ones(size // 4, jnp.float32)
        return lambda: f(x).block_until_ready()

    return comm.Get_rank(), program


def main(name: str) -> None:
    setups = {"mpi": mpi_setup, "mpi4jax": mpi4jax_setup}
    rank, make = setups[name]() if name in setups else jax_setup(name)
    program = functools.cache(make)

    def measure(case: dict[str, Any]) -> float:
        call = program(case["bytes"], case.get("trips", 0))
        return time_calls(call, case["calls"])

    serve(rank, measure)


if __name__ == "__main__":
    main(sys.argv[1])
