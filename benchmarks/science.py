"""Shallow water and conjugate gradients of ``examples/`` on two and four ranks: stretto, and gloo.

*Spectral* is a step of a heat equation under plain `jit`: forward and inverse transform of a real grid that
is sharded by rows, which XLA gathers on every device for each of the two.

The same programs on both: JAX's CPU backend connects its processes by gloo. Grids are 100 x 100 and 1,000 x
1,000 cells a rank. Times are of one step and of one iteration. ``python science.py`` compares, ``python
science.py NAME`` is one process of one runtime.

mpi4jax programs are written with its own functions, so it does not run these; `loop_psum.py` and
`psum_two_ranks.py` compare with it where it is installed. It builds against the project's MPI, in an
environment with its ``mpicc`` first on the path and no ``nvcc`` on it: ``pip install cython nanobind
setuptools``, then ``MPICC=mpicc pip install --no-build-isolation mpi4jax``.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from harness import in_turns, options, serve, show, time_calls
from two_ranks import initialize_gloo, over_ranks

LABELS = {"stretto": "stretto", "gloo": "JAX CPU (gloo)"}
# Cells of a rank's side, and the steps of a call.
GRIDS = {100: 200, 1000: 4}


def contender(name: str) -> None:
    """Answer cases ``{"program": p, "cells": n, "steps": s, "calls": c}`` with the seconds of a step."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    ranks = int(os.environ["BENCH_RANKS"])
    if name == "gloo":
        initialize_gloo()
    if (jax.process_count(), jax.device_count()) != (ranks, ranks):
        raise RuntimeError(f"{jax.process_count()} processes, {jax.device_count()} devices")
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import conjugate_gradient
    import shallow_water

    mesh = shallow_water.mesh_of(jax.devices())
    rows, columns = mesh.shape["y"], mesh.shape["x"]

    def spectral(cells: int, steps: int) -> tuple[Any, Any]:
        by_rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
        shape = (ranks * cells, cells)
        waves = np.fft.fftfreq(shape[0])[:, None] ** 2 + np.fft.rfftfreq(shape[1]) ** 2
        decay = np.exp(-waves).astype(np.float32)

        def step(_: object, x: jax.Array) -> jax.Array:
            x = jnp.fft.irfft2(jnp.fft.rfft2(x) * decay, s=shape)
            return jax.lax.with_sharding_constraint(x, by_rows)

        grid = np.random.default_rng(0).random(shape, np.float32)
        given = jax.make_array_from_callback(shape, by_rows, lambda i: grid[i])
        return jax.jit(lambda x: jax.lax.fori_loop(0, steps, step, x)), given

    @functools.cache
    def program(kind: str, cells: int, steps: int) -> Any:
        if kind == "spectral":
            run, given = spectral(cells, steps)
        elif kind == "shallow water":
            begin = shallow_water.initial_state(rows * cells, columns * cells)
            run, given = shallow_water.simulation(mesh, steps), shallow_water.placed(begin, mesh)
        else:
            density = np.zeros((rows * cells, columns * cells), np.float32)
            density[cells // 2, cells // 3] = 1
            # No tolerance: all iterations.
            run = conjugate_gradient.solver(mesh, 0.0, steps)
            given = conjugate_gradient.placed(density, mesh)
        return lambda: jax.block_until_ready(run(given))

    def measure(case: dict[str, Any]) -> float:
        call = program(case["program"], case["cells"], case["steps"])
        return time_calls(call, case["calls"]) / case["steps"]

    serve(jax.process_index(), measure)


def main() -> None:
    args = options(__doc__ or "")
    for ranks in (2, 4):
        cases = {
            f"{kind}, {cells} x {cells} a rank": {
                "program": kind,
                "cells": cells,
                "steps": steps,
                "calls": 1 if args.quick else 3,
            }
            for kind in ("shallow water", "conjugate gradient", "spectral")
            for cells, steps in GRIDS.items()
        }
        with over_ranks("science.py", ranks, LABELS) as contenders:
            times = in_turns(contenders, cases, 5 if args.quick else 11)
        goals = {label: "gloo ≥ 3x" for label, case in cases.items() if case["cells"] == 100}
        show(f"science codes, {ranks} ranks", times, LABELS["stretto"], goals, target=args.json)


if __name__ == "__main__":
    known = [name for name in sys.argv[1:] if name in LABELS]
    if known:
        contender(known[0])
    else:
        main()
