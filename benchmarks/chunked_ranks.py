"""One rank of stretto that runs the programs of `chunked_programs` (see `chunked`).

Cases: ``{"program", "part", "size", "calls"}``, and where they differ ``"rows"`` and ``"width"``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

os.sched_setaffinity(0, [int(core) for core in os.environ["BENCH_CORES"].split(",")])

import jax  # noqa: E402
import numpy as np  # noqa: E402
from chunked_programs import build  # noqa: E402
from harness import serve, time_calls  # noqa: E402
from jax.sharding import Mesh  # noqa: E402


def main() -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))

    @functools.cache
    def program(name: str, part: str, size: int, **shape: int) -> Callable[[], Any]:
        return build(name, part, size, mesh, **shape)

    def measure(case: dict[str, Any]) -> float:
        shape = {k: case[k] for k in ("rows", "width") if k in case}
        step = program(case["program"], case["part"], case["size"], **shape)
        return time_calls(step, case["calls"])

    serve(jax.process_index(), measure)


if __name__ == "__main__":
    main()
