"""One rank of one runtime that runs the programs of `sharded_steps` (see `two_hosts`).

``python host_ranks.py NAME``, NAME ``stretto`` (under mpiexec) or ``gloo`` (JAX's CPU backend over
jax.distributed). Cases: ``{"program", "part", "layers", "width", "batch", "calls"}``.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

os.sched_setaffinity(0, [int(core) for core in os.environ["BENCH_CORES"].split(",")])

import jax  # noqa: E402
import numpy as np  # noqa: E402
from harness import serve, time_calls  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from sharded_steps import Sizes, Step, build  # noqa: E402
from two_ranks import initialize_gloo  # noqa: E402


def main(name: str) -> None:
    ranks = int(os.environ["BENCH_RANKS"])
    if name.startswith("gloo"):
        initialize_gloo()
    if jax.process_count() != ranks or jax.device_count() != ranks:
        raise RuntimeError(f"{jax.process_count()} processes, {jax.device_count()} devices")
    mesh = Mesh(np.array(jax.devices()), ("x",))

    @functools.cache
    def program(name: str, part: str, layers: int, width: int, batch: int) -> Step:
        return build(name, part, Sizes(layers, width, batch), mesh)

    def measure(case: dict[str, Any]) -> float:
        step = program(case["program"], case["part"], case["layers"], case["width"], case["batch"])
        return time_calls(step, case["calls"])

    serve(jax.process_index(), measure)


if __name__ == "__main__":
    main(sys.argv[1])
