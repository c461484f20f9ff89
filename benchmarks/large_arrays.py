"""Programs over arrays of 32 MiB and more on one device, with the C library's memory as it comes and in huge
pages (``GLIBC_TUNABLES=glibc.malloc.hugetlb=1``): stretto and JAX's CPU backend, a process each, in turns.

Memory of such arrays goes back to the system when they are given up, and the next one's pages are made one by
one, 4 KiB each, when they are first written; huge pages are 2 MiB. Nothing changes where
/sys/kernel/mm/transparent_hugepage/enabled says ``always`` or ``never``.

*stencil*: a step of a diffusion on 3,000 x 3,000. *eager*: ``sin(a) * 2 + a**2`` of as many, op by op.
*attention*: the gradient of one over 512 positions, 8 x 12 heads. *adam*: a step of 34 M parameters.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any

from harness import Contender, in_turns, options, serve, show, start, time_calls

CASES = ("stencil", "eager", "attention", "adam")
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
CONTENDERS = {
    "stretto": {"JAX_PLATFORMS": "stretto,cpu"},
    "stretto, huge pages": {"JAX_PLATFORMS": "stretto,cpu", **HUGE},
    "JAX CPU": {"JAX_PLATFORMS": "cpu"},
    "JAX CPU, huge pages": {"JAX_PLATFORMS": "cpu", **HUGE},
}


def program(case: str) -> Callable[[], Any]:
    """A call that runs a case once and waits for it."""
    import jax
    import jax.numpy as jnp

    key = jax.random.key(0)
    state: list[Any] = []

    def stencil(a: jax.Array) -> jax.Array:
        near = jnp.roll(a, 1, 0) + jnp.roll(a, -1, 0) + jnp.roll(a, 1, 1) + jnp.roll(a, -1, 1)
        return a + 0.1 * (near - 4 * a)

    def eager(a: jax.Array) -> jax.Array:
        return jnp.sin(a) * 2 + a**2

    def attention(q: jax.Array) -> jax.Array:
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, q)
        return (jax.nn.softmax(scores) @ q).sum()

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = x + jax.nn.gelu(x @ up) @ down
        return (x**2).mean()

    def adam(weights: Any, first: Any, second: Any) -> tuple[Any, Any, Any]:
        x = jax.random.normal(key, (128, 1024))
        slopes = jax.grad(loss)(weights, x)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, slopes)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, slopes)
        change = jax.tree.map(lambda m, v: 1e-3 * m / (jnp.sqrt(v) + 1e-8), first, second)
        return jax.tree.map(jnp.subtract, weights, change), first, second

    def again(step: Callable[..., Any]) -> Callable[[], Any]:
        """Calls that hand on what they give."""

        def call() -> None:
            state[:] = step(*state)
            jax.block_until_ready(state)

        return call

    grid = jax.random.normal(key, (3000, 3000))
    if case == "stencil":
        state.append(grid)
        step = jax.jit(stencil)
        return again(lambda a: [step(a)])
    if case == "eager":
        return lambda: jax.block_until_ready(eager(grid))
    if case == "attention":
        q = jax.random.normal(key, (8, 12, 512, 64))
        slope = jax.jit(jax.grad(attention))
        return lambda: jax.block_until_ready(slope(q))
    shapes = ((1024, 4096), (4096, 1024)) * 4
    weights = [0.01 * jax.random.normal(key, shape) for shape in shapes]
    state += [weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2))]
    return again(jax.jit(adam))


def contender() -> None:
    """One of the processes."""
    known = cache(program)
    serve(0, lambda case: time_calls(known(case["case"]), case["calls"]))


def main() -> int:
    args = options(__doc__ or "")
    repeats, calls = (5, 3) if args.quick else (15, 5)
    with ExitStack() as stack:
        runtimes: list[Contender] = []
        for name, env in CONTENDERS.items():
            runtimes.append(start(name, "large_arrays.py", 1, "plain", **env))
            stack.callback(runtimes[-1].close)
        cases = {case: {"case": case, "calls": calls} for case in CASES}
        rows = in_turns(runtimes, cases, repeats)
    show("arrays of 32 MiB and more on one device", rows, "stretto, huge pages", target=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(contender() if "BENCH_SOCKET" in os.environ else main())
