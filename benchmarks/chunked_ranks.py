"""One rank of stretto that runs the programs of `chunked_programs` (see `chunked`).

Cases: ``{"program", "part", "size", "calls"}``, and where they differ ``"rows"`` and ``"width"``. With
``"parts"`` the answer is how many parts each of the program's collectives was split into, if any was.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

os.sched_setaffinity(0, [int(core) for core in os.environ["BENCH_CORES"].split(",")])

import jax  # noqa: E402
import numpy as np  # noqa: E402
from chunked_programs import build, jitted  # noqa: E402
from harness import serve, time_calls  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

import stretto  # noqa: E402


def main() -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))

    @functools.cache
    def program(name: str, part: str, size: int, **shape: int) -> Callable[[], Any]:
        return build(name, part, size, mesh, **shape)

    def measure(case: dict[str, Any]) -> float | list[int]:
        shape = {k: case[k] for k in ("rows", "width") if k in case}
        if "parts" in case:
            function, arguments = jitted(case["program"], case["part"], case["size"], mesh, **shape)
            told = stretto.explain(function.lower(*arguments).compile()).data["splits"]
            return [split["parts"] for split in told if split["parts"] > 1 or split["shared"]]
        step = program(case["program"], case["part"], case["size"], **shape)
        return time_calls(step, case["calls"])

    serve(jax.process_index(), measure)


if __name__ == "__main__":
    main()
