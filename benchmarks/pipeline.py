"""A training step of ``examples/pipeline.py`` on four ranks: stretto against JAX's CPU backend with gloo.

The same program on both, as it is written: a circular pipeline of four stages and one as GPipe, forward,
backward and update. ``python pipeline.py`` compares, ``python pipeline.py NAME`` is one process of one
runtime.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
from harness import in_turns, options, serve, show, time_calls
from two_ranks import initialize_gloo, over_ranks

RANKS = 4
LABELS = {"stretto": "stretto", "gloo": "JAX CPU (gloo)"}
CASES = {"GPipe": 1, "circular, 2 repeats": 2}
GOAL = "gloo ≥ 1.5x"


def contender(name: str) -> None:
    """Answer cases ``{"repeats": r, "calls": c}`` with the seconds of a step."""
    import jax
    from jax.sharding import AxisType

    if name == "gloo":
        initialize_gloo()
    if (jax.process_count(), jax.device_count()) != (RANKS, RANKS):
        raise RuntimeError(f"{jax.process_count()} processes, {jax.device_count()} devices")
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import pipeline as example

    if not hasattr(example, "training"):
        raise RuntimeError(f"{example.__file__} is not the example")
    mesh = jax.make_mesh((RANKS,), ("stage",), axis_types=(AxisType.Auto,))
    tokens = example.batch(mesh, example.text(), np.random.default_rng(1))

    @functools.cache
    def prepared(repeats: int) -> Any:
        step, state = example.training(mesh, repeats)
        states = [state]

        def call() -> None:
            states[0], loss = step(states[0], tokens)
            float(loss)

        return call

    def measure(case: dict[str, Any]) -> float:
        return time_calls(prepared(case["repeats"]), case["calls"])

    serve(jax.process_index(), measure)


def main() -> None:
    args = options(__doc__ or "")
    calls = 2 if args.quick else 5
    cases = {label: {"repeats": repeats, "calls": calls} for label, repeats in CASES.items()}
    with over_ranks("pipeline.py", RANKS, LABELS) as contenders:
        times = in_turns(contenders, cases, 5 if args.quick else 15)
    goals = dict.fromkeys(CASES, GOAL)
    show("step of examples/pipeline.py, 4 ranks", times, LABELS["stretto"], goals, target=args.json)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1] in LABELS:
        contender(sys.argv[1])
    else:
        main()
