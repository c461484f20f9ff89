"""The ranks of `interleave`: a GPipe program, as it is written or with chunks of layers a device, or a step
of training with it.

Every rank keeps to one core, so that a stage that waits leaves nothing to the others. A layer of real compute
is a block of two matrix products, four times as wide inside, as transformers have them; a simulated one
sleeps, which takes no core at all.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from harness import serve, time_calls


def program(
    chunks: int, microbatches: int, layers: int, rows: int, width: int, nap: float, gradients: bool,
    schedule: str = "gpipe",
) -> tuple[Callable[[], Any], int]:  # fmt: skip
    """A call of the pipeline: f32[microbatches, rows, width] through ``layers`` layers a device; and the
    bytes that a device needs for what it computes on the way.

    It ends for all ranks together, with a sum over them, as a training step does with its loss. With
    ``gradients`` it is one: those of all weights are computed as well.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    stages = jax.device_count()
    mesh = jax.make_mesh((stages,), ("stage",), axis_types=(AxisType.Auto,))
    ring = [(s, (s + 1) % stages) for s in range(stages)]

    def sleep(x: np.ndarray) -> np.ndarray:
        time.sleep(nap)
        return np.asarray(x)

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        if nap:
            return jax.pure_callback(sleep, x, x) + w[0, 0, 0], None
        return x + jnp.tanh(x @ w[0]) @ w[1].T, None

    def local(weights: jax.Array, xs: jax.Array) -> jax.Array:
        stage = lax.axis_index("stage")

        def iteration(
            carry: tuple[jax.Array, jax.Array], i: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            received, outputs = carry
            x = jnp.where(stage == 0, xs[jnp.minimum(i, microbatches - 1)], received)
            working = (i >= stage) & (i < stage + microbatches)
            y = lax.cond(working, lambda x: lax.scan(layer, x, weights)[0], jnp.zeros_like, x)
            out = i - (stages - 1)
            put = outputs.at[jnp.clip(out, 0, microbatches - 1)].set(y)
            outputs = jnp.where((stage == stages - 1) & (out >= 0), put, outputs)
            return (lax.ppermute(y, "stage", ring), outputs), None

        start = (jnp.zeros_like(xs[0]), jnp.zeros_like(xs))
        outputs = lax.scan(iteration, start, jnp.arange(microbatches + stages - 1))[0][1]
        return lax.psum(jnp.where(stage == stages - 1, jnp.mean(outputs), 0), "stage")

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P(), check_vma=False
    )
    function = jax.value_and_grad(mapped) if gradients else mapped
    asked = {"stretto_interleave": chunks, "stretto_schedule": schedule}
    rng = np.random.default_rng(0)

    def place(shape: tuple[int, ...], scale: float, spec: P) -> jax.Array:
        array = (rng.standard_normal(shape) * scale).astype(np.float32)
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(shape, sharding, lambda index: array[index])

    weights = place((stages * layers, 2, width, 4 * width), width**-0.5 / 2, P("stage"))
    xs = place((microbatches, rows, width), 1.0, P())
    run = jax.jit(function, compiler_options=asked).lower(weights, xs).compile()
    memory = run.memory_analysis().temp_size_in_bytes
    return lambda: jax.block_until_ready(run(weights, xs)), memory


def main() -> None:
    rank = int(os.environ.get("PMI_RANK", "0"))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import jax

    jax.devices()
    cached = functools.cache(program)

    def measure(case: dict[str, Any]) -> float:
        keys = ("chunks", "microbatches", "layers", "rows", "width", "nap", "gradients")
        made, memory = cached(*(case[k] for k in keys), case.get("schedule", "gpipe"))
        return memory if case.get("memory") else time_calls(made, case["calls"])

    serve(jax.process_index(), measure)


if __name__ == "__main__":
    sys.exit(main())
