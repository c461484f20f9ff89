"""Steps of training of small models, on two and four ranks of one host: stretto, and gloo.

A perceptron with two hidden layers of 64, 128, 256 or 512, or with seven of 64 or 128 of which a scan runs
six, momentum, plain `jit`: the batch is divided over the ranks, parameters are on all of them, and the state
is donated. XLA makes one all-reduce of all gradients.
Times are of one step, whose loss is waited for. ``python data_parallel.py`` compares, ``python
data_parallel.py NAME`` is one process of one runtime.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import numpy as np
from harness import in_turns, options, serve, show, time_calls
from two_ranks import initialize_gloo, over_ranks

LABELS = {"stretto": "stretto", "gloo": "JAX CPU (gloo)"}
WIDTHS = (64, 128, 256, 512)
# Widths of models that have so many layers in a scan in the place of the second.
SCANNED, LAYERS = (64, 128), 6
ROWS, FEATURES, CLASSES = 32, 64, 10


def contender(name: str) -> None:
    """Answer cases ``{"width": n, "layers": l, "calls": c}`` with the seconds of a step. ``layers``: how many
    a scan has; 0: there is no scan."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    ranks = int(os.environ["BENCH_RANKS"])
    if name == "gloo":
        initialize_gloo()
    mesh = Mesh(np.array(jax.devices()), ("x",))
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))

    def placed(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    def loss(parameters: dict[str, jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ parameters["in"])
        hidden = parameters["hidden"]
        if hidden.ndim == 2:
            h = jnp.tanh(h @ hidden)
        else:
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, hidden)
        scores = jax.nn.log_softmax(h @ parameters["out"])
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    def step(state: Any, x: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        parameters, momentum = state
        value, gradient = jax.value_and_grad(loss)(parameters, x, labels)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        parameters = jax.tree.map(lambda p, m: p - 0.01 * m, parameters, momentum)
        return (parameters, momentum), value

    @functools.cache
    def program(width: int, layers: int) -> Any:
        rng = np.random.default_rng(0)
        hidden = (layers, width, width) if layers else (width, width)
        shapes = {"in": (FEATURES, width), "hidden": hidden, "out": (width, CLASSES)}
        drawn = {n: 0.1 * rng.standard_normal(s, np.float32) for n, s in shapes.items()}
        state = [
            {n: placed(scale * a, everywhere) for n, a in drawn.items()} for scale in (1.0, 0.0)
        ]
        batch = rng.standard_normal((ROWS * ranks, FEATURES), np.float32)
        labels = rng.integers(0, CLASSES, ROWS * ranks, np.int32)
        x, y = placed(batch, rows), placed(labels, rows)
        run = jax.jit(step, donate_argnums=0, out_shardings=(everywhere, everywhere))
        kept = [tuple(state)]

        def call() -> None:
            kept[0], value = run(kept[0], x, y)
            value.block_until_ready()

        return call

    def measure(case: dict[str, Any]) -> float:
        return time_calls(program(case["width"], case["layers"]), case["calls"])

    serve(jax.process_index(), measure)


def main() -> None:
    args = options(__doc__ or "")
    for ranks in (2, 4):
        calls = 20 if args.quick else 100
        cases = {f"width {n}": {"width": n, "layers": 0, "calls": calls} for n in WIDTHS}
        for n in SCANNED:
            cases[f"width {n}, scanned"] = {"width": n, "layers": LAYERS, "calls": calls}
        with over_ranks("data_parallel.py", ranks, LABELS) as contenders:
            times = in_turns(contenders, cases, 5 if args.quick else 11)
        show(f"steps of small models, {ranks} ranks", times, LABELS["stretto"], target=args.json)


if __name__ == "__main__":
    known = [name for name in sys.argv[1:] if name in LABELS]
    if known:
        contender(known[0])
    else:
        main()
