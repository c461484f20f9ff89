"""The ranks of `vocab_head`: a step of training of a pipeline, its head on the last stage or on all.

Every rank keeps to one core. The head's products take ``heads`` times as long as a stage's.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from harness import serve, time_calls


def program(
    head_on: str, microbatches: int, layers: int, rows: int, width: int, heads: int
) -> Callable[[], Any]:
    """A call of the step: the gradients of all weights, with the loss."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import stretto
    from stretto import nn

    stages, words = jax.device_count(), heads * layers * width
    mesh = Mesh(np.array(jax.devices()), ("stage",))
    rng = np.random.default_rng(0)

    def drawn(spec: P, *shape: int) -> jax.Array:
        array = (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        return jax.make_array_from_callback(
            shape, NamedSharding(mesh, spec), lambda index: array[index]
        )

    def layer(weights: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ weights)

    def on_all(head: jax.Array, y: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.mean(nn.vocab_parallel_cross_entropy(y, head, labels, "stage"))

    def on_last(head: jax.Array, y: jax.Array, labels: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(y @ head.T)
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=-1))

    def local(weights: jax.Array, head: jax.Array, xs: jax.Array, labels: jax.Array) -> jax.Array:
        losses = stretto.pipelined(
            layer,
            weights,
            xs,
            "stage",
            head=on_all if head_on == "all" else on_last,
            head_params=head,
            targets=labels,
            head_on=head_on,
        )
        return jnp.mean(losses)

    of_head = P("stage") if head_on == "all" else P()
    f = jax.shard_map(local, mesh=mesh, in_specs=(P("stage"), of_head, P(), P()), out_specs=P())
    step = jax.jit(jax.value_and_grad(f, (0, 1)))
    given = (
        drawn(P("stage"), stages * layers, width, width),
        drawn(of_head, words, width),
        drawn(P(), microbatches, rows, width),
        np.arange(microbatches * rows, dtype=np.int32).reshape(microbatches, rows) % words,
    )
    compiled = step.lower(*given).compile()
    return lambda: jax.block_until_ready(compiled(*given))


def main() -> None:
    rank = int(os.environ.get("PMI_RANK", "0"))
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import jax

    jax.devices()
    cached = functools.cache(program)

    def measure(case: dict[str, Any]) -> float:
        keys = ("head_on", "microbatches", "layers", "rows", "width", "heads")
        return time_calls(cached(*(case[k] for k in keys)), case["calls"])

    serve(jax.process_index(), measure)


if __name__ == "__main__":
    sys.exit(main())
