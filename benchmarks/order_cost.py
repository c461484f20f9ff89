"""What order costs: 64 ``psum``s of 8 bytes in one ``jit`` call, two ranks, chained by tokens or free.

The figures are for one collective. Each sum needs the one before it, so that XLA makes 64 collectives of both
programs; nothing travels for a token.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Any

import numpy as np
from harness import in_turns, options, serve, show, start, time_calls

COUNT = 64
LABELS = {"free": "no chain", "chain": "chain"}


def rank(name: str) -> None:
    """One rank of one of the two programs."""
    import jax
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    import stretto.lax

    def free(x: jax.Array) -> jax.Array:
        for _ in range(COUNT):
            x = lax.psum(x * 0.5, "x")
        return x

    def chain(x: jax.Array) -> jax.Array:
        token = stretto.lax.create_token()
        for _ in range(COUNT):
            x, token = stretto.lax.psum(x * 0.5, "x", token=token)
        return x

    ranks = int(os.environ["BENCH_RANKS"])
    mesh = Mesh(np.array(jax.devices()), ("x",))
    program = {"free": free, "chain": chain}[name]
    f = jax.jit(
        jax.shard_map(program, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    )
    data = np.ones((ranks, 2), np.float32)
    x = jax.make_array_from_callback(data.shape, NamedSharding(mesh, P("x")), lambda i: data[i])
    compiled = f.lower(x).compile()
    found = sum(line.count(" all-reduce(") for line in compiled.as_text().splitlines())
    if found != COUNT:
        raise RuntimeError(f"{name}: the program has {found} all-reduces, not {COUNT}")

    def measure(case: dict[str, Any]) -> float:
        return time_calls(lambda: compiled(x).block_until_ready(), case["calls"]) / COUNT

    serve(jax.process_index(), measure)


def main() -> None:
    args = options(__doc__ or "")
    case = {"calls": 5 if args.quick else 30}
    with ExitStack() as stack:
        contenders = []
        for name, label in LABELS.items():
            contender = start(name, "order_cost.py", 2, "mpi", JAX_PLATFORMS="stretto,cpu")
            stack.callback(contender.close)
            contender.name = label
            contenders.append(contender)
        times = in_turns(contenders, {"psum of 8 bytes": case}, 7 if args.quick else 31)
    goal = {"psum of 8 bytes": "chain ≤ no chain + 2 µs"}
    show("order by tokens, 2 ranks", times, LABELS["free"], goal, target=args.json)


if __name__ == "__main__":
    if "BENCH_SOCKET" in os.environ:
        rank(sys.argv[1])
    else:
        main()
