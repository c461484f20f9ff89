"""Training steps of two ranks over a slow link, with and without the overlap of communication and compute.

The link is made slow on purpose: a collective returns no sooner than latency and bandwidth allow, and its
thread sleeps meanwhile, as it would with a network card at work. Bandwidth is chosen so that communication
takes as long as compute, which is where overlap pays most. The table of costs names the link's figures and
the compute rate that was measured before.

Also printed: what the plan predicts, and steps whose collectives are too small to be worth it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from harness import Contender, in_turns, options, serve, show, start, time_calls

LAYERS, WIDTH, ROWS = 8, 512, 512
LATENCY = 1e-4
GOALS = {"sharded weights": "overlap ≤ 0.69x", "small": "overlap ≤ 1.03x"}


def slow_link(latency: float, rate: float) -> None:
    """Have every collective of this process take at least what such a link takes."""
    from stretto.collectives import hierarchy
    from stretto.hlo_frontend.overlap.costs import span, wire_bytes

    create = hierarchy.create_communicator

    class Slow:
        def __init__(self, bound: Any) -> None:
            self._bound = bound
            size = span(bound.collective)[1]
            self._seconds = latency + wire_bytes(bound.collective, size) / rate if size > 1 else 0.0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._bound, name)

        def run(self, operands: Any, **options: Any) -> Any:
            until = time.perf_counter() + self._seconds
            results = self._bound.run(operands, **options)
            time.sleep(max(0.0, until - time.perf_counter()))
            return results

    def create_slow(comm: Any, stream: int) -> Any:
        communicator = create(comm, stream)
        bind = communicator.bind
        communicator.bind = lambda *args: Slow(bind(*args))  # type: ignore[method-assign]
        return communicator

    hierarchy.create_communicator = create_slow


def steps(mesh: Any) -> dict[str, Callable[[], Any]]:
    """By name: a jitted step on its arguments."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    def placed(shape: tuple[int, ...], spec: Any) -> Any:
        data = np.random.default_rng(0).normal(size=shape).astype(np.float32) / WIDTH**0.5
        return jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda i: data[i])

    def sharded_weights(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ lax.all_gather(w, "x", tiled=True))
        return (x**2).sum()

    def scanned_weights(ws: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ lax.all_gather(w, "x", tiled=True)), None

        return (lax.scan(jax.checkpoint(layer, prevent_cse=False), x, ws)[0] ** 2).sum()

    def tensor_parallel(ws: Any, x: Any) -> Any:
        for a, b in zip(ws[::2], ws[1::2], strict=True):
            x = x + lax.psum(jnp.tanh(x @ a) @ b, "x")
        return (x**2).sum()

    def local(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    def reduced(ws: Any, x: Any) -> Any:
        return [lax.psum(g, "x") for g in jax.grad(local)(ws, x)]

    def step(f: Any, specs: Any, out: Any, *arguments: Any) -> Callable[[], Any]:
        mapped = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
        jitted = jax.jit(mapped)
        return lambda: jax.block_until_ready(jitted(*arguments))

    rows, columns, batch = P("x"), P(None, "x"), P("x")
    weights = [placed((WIDTH, WIDTH), rows) for _ in range(LAYERS)]
    stacked = placed((LAYERS, WIDTH, WIDTH), P(None, "x"))
    x = placed((2 * ROWS, WIDTH), batch)
    alternating = [columns if i % 2 == 0 else rows for i in range(LAYERS)]
    split = [placed((WIDTH, WIDTH), s) for s in alternating]
    whole = [placed((WIDTH, WIDTH), P()) for _ in range(LAYERS)]
    few = [placed((WIDTH,), P()) for _ in range(LAYERS)]
    sharded = [rows] * LAYERS
    return {
        "sharded weights": step(jax.grad(sharded_weights), (sharded, batch), sharded, weights, x),
        "scanned weights": step(
            jax.grad(scanned_weights), (P(None, "x"), batch), P(None, "x"), stacked, x
        ),
        "tensor-parallel": step(
            jax.grad(tensor_parallel),
            (alternating, P()),
            alternating,
            split,
            placed((ROWS, WIDTH), P()),
        ),
        "data-parallel": step(reduced, ([P()] * LAYERS, batch), [P()] * LAYERS, whole, x),
        "compute alone": step(jax.grad(local), ([P()] * LAYERS, batch), [P()] * LAYERS, whole, x),
        "small": step(
            lambda ws, x: [lax.psum(w * x.sum(), "x") for w in ws],
            ([P()] * LAYERS, batch),
            [P()] * LAYERS,
            few,
            x,
        ),
    }


def worker() -> None:
    if "BENCH_RATE" in os.environ:
        slow_link(LATENCY, float(os.environ["BENCH_RATE"]))
    import jax
    from jax.sharding import Mesh

    cases = steps(Mesh(np.array(jax.devices()), ("x",)))
    serve(jax.process_index(), lambda case: time_calls(cases[case["step"]], case["calls"]))


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ("without", "overlap"):
        return worker()
    args = options(__doc__ or "")

    def begin(stack: ExitStack, name: str, **env: str) -> Contender:
        contender = start(name, "overlap.py", 2, "mpi", JAX_PLATFORMS="stretto,cpu", **env)
        stack.callback(contender.close)
        return contender

    with ExitStack() as stack:
        probe = begin(stack, "without", STRETTO_OVERLAP="0")
        compute = min(probe.run({"step": "compute alone", "calls": 5}) for _ in range(3))
    # Forward, and two products of the same size backward; each layer moves 1.5 times its bytes.
    flops = LAYERS * 3 * 2.0 * ROWS * WIDTH * WIDTH / compute
    rate = 1.5 * LAYERS * WIDTH * WIDTH * 4 / compute
    table = {
        "compute": {"flops_per_s": flops, "bytes_per_s": 1e10, "launch_s": 3e-5},
        "links": [{"axis_stride": 1, "group_size": 2, "latency_s": LATENCY, "bytes_per_s": rate}],
    }
    print(f"compute {compute * 1e3:.1f} ms ({flops / 1e9:.0f} GF/s), link {rate / 1e6:.0f} MB/s")
    names = ("sharded weights", "scanned weights", "tensor-parallel", "data-parallel", "small")
    cases: Mapping[str, Mapping[str, Any]] = {
        name: {"step": name, "calls": 2 if args.quick else 5} for name in names
    }
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        costs = Path(directory, "costs.json")
        costs.write_text(json.dumps(table))
        link = {"BENCH_RATE": str(rate)}
        contenders = [
            begin(stack, "without", STRETTO_OVERLAP="0", **link),
            begin(stack, "overlap", STRETTO_COSTS=str(costs), **link),
        ]
        times = in_turns(contenders, cases, 5 if args.quick else 15)
    show("a training step over a slow link", times, "without", GOALS, target=args.json)


if __name__ == "__main__":
    main()
