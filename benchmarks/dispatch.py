"""What one ``jit`` call costs on one device: stretto and JAX's CPU backend in the same process.

*chained*: calls that feed each other, waited for at the end. *waited for*: each call's result is awaited.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from harness import clean_environment, options, show, time_calls

GOALS = {
    "x + 1, chained": "stretto ≤ 1.5x",
    "x + 1, waited for": "stretto ≤ 3x",
}


def measurements() -> dict[str, dict[str, Callable[[], float]]]:
    """By case and contender, a function that measures once: seconds a call."""
    import jax
    import jax.numpy as jnp

    found: dict[str, dict[str, Callable[[], float]]] = {}
    for platform, label in (("cpu", "JAX CPU"), ("stretto", "stretto")):
        device = jax.devices(platform)[0]

        def add_case(
            case: str, f: Callable[..., jax.Array], x: jax.Array, label: str = label
        ) -> None:
            def chained() -> float:
                y = [x]

                def call() -> None:
                    y[0] = f(y[0])

                took = time_calls(call, 1000)
                y[0].block_until_ready()
                return took

            waited = lambda: time_calls(lambda: f(x).block_until_ready(), 1000)  # noqa: E731
            found.setdefault(f"{case}, chained", {})[label] = chained
            found.setdefault(f"{case}, waited for", {})[label] = waited

        add_case("x + 1", jax.jit(lambda x: x + 1), jax.device_put(jnp.float32(1), device))
        vector = jax.device_put(jnp.ones(1024), device)
        add_case("1024 x tanh", jax.jit(jnp.tanh), vector)
        small = jax.device_put(jnp.ones((64, 64)) / 64, device)
        add_case("64 x 64 matmul", jax.jit(lambda x: x @ x), small)
    return found


def main() -> None:
    args = options(__doc__ or "")
    if os.environ.get("JAX_PLATFORMS") != "stretto,cpu":
        env = clean_environment(JAX_PLATFORMS="stretto,cpu", STRETTO_LOCAL_DEVICES="1")
        os.execve(sys.executable, [sys.executable, *sys.argv], env)
    cases = measurements()
    times: dict[str, dict[str, list[float]]] = {}
    for case, contenders in cases.items():
        row = times[case] = {name: [] for name in contenders}
        for turn in range(6 if args.quick else 21):
            for name, measure in contenders.items():
                value = measure()
                if turn:
                    row[name].append(value)
    show("one jit call, one device", times, "JAX CPU", GOALS, target=args.json)


if __name__ == "__main__":
    main()
