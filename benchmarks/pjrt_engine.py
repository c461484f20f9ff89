"""What the engine `pjrt:` costs over the built-in one on the same runtime, jaxlib's CPU client.

*pjrt* is the engine for plugins with jaxlib's CPU client in a plugin's place: arrays are the plugin's, so
operands and results of collectives are copied, and what `xla:cpu` adds is absent (collectives in compiled
code, callbacks). *built-in, walked* is `xla:cpu` without collectives in compiled code.
Steps of the model of ``compile_time`` on 4 x 2 devices of one process, and ``psum`` of 4 KiB and 4 MiB.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from harness import options, serve, show, start, time_calls

ENGINES = {"built-in": "xla:cpu", "built-in, walked": "xla:cpu", "pjrt": "pjrt_engine:create"}
CASES = {"step": 1, "step, wide": 1, "psum of 4 KiB": 20, "psum of 4 MiB": 5}


def create(num_devices: int) -> Any:
    """The factory of *pjrt*."""
    from stretto.runtime.engines.pjrt import PjrtEngine
    from stretto.runtime.engines.xla_cpu import XlaCpuEngine

    class OnCpu(PjrtEngine):
        def _connect(self, named: str, options: dict[str, Any]) -> Any:
            return XlaCpuEngine(num_devices)._client

    return OnCpu(num_devices, "cpu")


def measure(case: dict[str, Any]) -> float:
    """Seconds a call."""
    call, calls = _call(case["name"]), CASES[case["name"]]
    return time_calls(call, calls)


_CALLS: dict[str, Callable[[], Any]] = {}


def _call(name: str) -> Callable[[], Any]:
    if name not in _CALLS:
        _CALLS[name] = _step(name) if name.startswith("step") else _psum(name)
        _CALLS[name]()
        _CALLS[name]()
    return _CALLS[name]


def _step(name: str) -> Callable[[], Any]:
    import jax
    import models

    config = models.Config(layers=4, width=512, hidden=1408) if "wide" in name else models.SMALL
    mesh = models.mesh_of(jax.devices())
    step = models.train_step(config, mesh)
    kept = list(models.concrete(config, mesh))

    def call() -> Any:
        kept[0], loss = step(*kept)
        return loss.block_until_ready()

    return call


def _psum(name: str) -> Callable[[], Any]:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("x",))
    floats = (1 if "KiB" in name else 1024) * 1024
    x = jax.device_put(np.ones((8, floats), np.float32), NamedSharding(mesh, P("x")))
    f = jax.jit(
        jax.shard_map(lambda a: jax.lax.psum(a, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    )
    return lambda: f(x).block_until_ready()


def main() -> None:
    given = options(__doc__ or "")
    here = os.path.dirname(os.path.abspath(__file__))
    contenders = [
        start(
            *(name, "pjrt_engine.py", 1, "plain"),
            JAX_PLATFORMS="stretto,cpu",
            STRETTO_LOCAL_DEVICES="8",
            STRETTO_ENGINE=engine,
            STRETTO_NATIVE="0" if "walked" in name else "1",
            PYTHONPATH=here,
        )
        for name, engine in ENGINES.items()
    ]
    rows: dict[str, dict[str, list[float]]] = {case: {n: [] for n in ENGINES} for case in CASES}
    try:
        for _ in range(5 if given.quick else 15):
            for case in CASES:
                for contender in contenders:
                    rows[case][contender.name].append(contender.run({"name": case}))
    finally:
        for contender in contenders:
            contender.close()
    show("the engine pjrt: on the built-in engine's runtime", rows, "built-in", target=given.json)


if __name__ == "__main__":
    if "BENCH_SOCKET" in os.environ:
        serve(0, measure)
    else:
        sys.exit(main())
