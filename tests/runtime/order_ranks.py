"""A rank for test_order_faults: runs programs that do not fit those of the other rank.

Two ranks with two devices each. The first argument names what to do; what came of every case is printed as
one line of JSON, which begins with the rank.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import stretto.lax as sl
from stretto.hlo_frontend.compile import compile_hlo
from stretto.runtime.engines.engine import create_engine
from stretto.runtime.execution.executor import Executor
from stretto.runtime.execution.value import Value
from stretto.runtime.job import world

Function = Callable[[jax.Array], Any]

MESH = jax.make_mesh((2, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
SPEC = P(("i", "j"))
X = np.arange(32, dtype=np.float32)
# By axis i, which spans the ranks: device k talks to device k + 2.
ACROSS = [(0, 1)]


def placed() -> jax.Array:
    return jax.make_array_from_callback(X.shape, NamedSharding(MESH, SPEC), lambda i: X[i])


def run(function: Function) -> np.ndarray:
    """This rank's part of ``function`` of each device's part of X, summed over its results."""

    def local(x: jax.Array) -> jax.Array:
        leaves = [jnp.sum(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(function(x))]
        return jnp.stack(leaves).sum()[None]

    local.__name__ = function.__name__
    mapped = jax.shard_map(local, mesh=MESH, in_specs=SPEC, out_specs=SPEC, check_vma=False)
    out = jax.jit(mapped)(placed())
    return np.concatenate([s.data for s in out.addressable_shards])


def healthy(x: jax.Array) -> jax.Array:
    return lax.psum(x, ("i", "j"))


def psum(x: jax.Array) -> jax.Array:
    return lax.psum(x, "i")


def psum_twice(x: jax.Array) -> jax.Array:
    return lax.psum(jnp.sin(lax.psum(x, "i")), "i")


def psum_and_gather(x: jax.Array) -> Any:
    return lax.psum(x, "i"), lax.all_gather(x * 2, "i")


def psum_half(x: jax.Array) -> jax.Array:
    return lax.psum(x.astype(jnp.bfloat16), "i")


def psum_part(x: jax.Array) -> jax.Array:
    return lax.psum(x[:5], "i")


def psum_other_axis(x: jax.Array) -> jax.Array:
    return lax.psum(x, "j")


def gather(x: jax.Array) -> jax.Array:
    return lax.all_gather(x, "i")


def pmax(x: jax.Array) -> jax.Array:
    return lax.pmax(x, "i")


def gather_then_scatter(x: jax.Array) -> Any:
    token = sl.create_token()
    a, token = sl.all_gather(x, "i", token=token)
    b, token = sl.psum_scatter(x + 1, "i", token=token, tiled=True)
    return a, b


def scatter_then_gather(x: jax.Array) -> Any:
    token = sl.create_token()
    b, token = sl.psum_scatter(x + 1, "i", token=token, tiled=True)
    a, token = sl.all_gather(x, "i", token=token)
    return a, b


def loop(count: int) -> Function:
    def looped(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, count, lambda _, v: lax.psum(v, "i") / 2, x)

    return looped


def doubled_and_psum(x: jax.Array) -> jax.Array:
    """Communicates as `psum_after_sine` does; everything else is different."""
    return lax.psum(x * 2, "i") + 1


def psum_after_sine(x: jax.Array) -> jax.Array:
    return jnp.tanh(lax.psum(jnp.sin(x) * 0 + 2 * x, "i")) * 0 + 5


# What rank 0 runs and what rank 1 runs.
FAULTS: dict[str, tuple[Function, Function]] = {
    "missing": (psum_and_gather, psum),
    "extra": (psum, psum_twice),
    "dtype": (psum, psum_half),
    "shape": (psum_part, psum),
    "group": (psum, psum_other_axis),
    "kind": (psum, gather),
    "reducer": (pmax, psum),
    "swapped tokens": (gather_then_scatter, scatter_then_gather),
    "swapped tokens, the other way": (scatter_then_gather, gather_then_scatter),
    "trip count": (loop(3), loop(4)),
}

HEAD = "HloModule {name}, num_partitions=4\n"
SUM = "add { a = f32[] parameter(0)\n b = f32[] parameter(1)\n ROOT c = f32[] add(a, b) }\n"
GROUPS = "channel_id=1, replica_groups={{0,2},{1,3}}, use_global_device_ids=true"


def message(kind: str, pair: tuple[int, int], channel: int, operands: str) -> str:
    shape = "(f32[4], u32[], token[])"
    return (
        f"{shape} {kind}({operands}), channel_id={channel}, frontend_attributes="
        f"{{_xla_send_recv_source_target_pairs={{{{{pair[0]},{pair[1]}}}}}}}"
    )


SEND_ALONE = f"""{HEAD.format(name="send_alone")}
ENTRY main {{
  x = f32[4] parameter(0)
  t = token[] after-all()
  s = {message("send", (0, 2), 1, "x, t")}
  d = token[] send-done(s), channel_id=1
  ROOT r = (f32[4], token[]) tuple(x, d)
}}
"""
RECV_ALONE = f"""{HEAD.format(name="recv_alone")}
ENTRY main {{
  t = token[] after-all()
  r = {message("recv", (0, 2), 1, "t")}
  ROOT d = (f32[4], token[]) recv-done(r), channel_id=1
}}
"""
# Each device receives before it sends what it received.
RECV_CYCLE = f"""{HEAD.format(name="recv_cycle")}
ENTRY main {{
  t = token[] after-all()
  r1 = {message("recv", (0, 2), 1, "t")}
  d1 = (f32[4], token[]) recv-done(r1), channel_id=1
  x1 = f32[4] get-tuple-element(d1), index=0
  t1 = token[] get-tuple-element(d1), index=1
  r2 = {message("recv", (2, 0), 2, "t1")}
  d2 = (f32[4], token[]) recv-done(r2), channel_id=2
  x2 = f32[4] get-tuple-element(d2), index=0
  t2 = token[] get-tuple-element(d2), index=1
  p1 = {message("send", (0, 2), 1, "x2, t2")}
  e1 = token[] send-done(p1), channel_id=1
  p2 = {message("send", (2, 0), 2, "x1, e1")}
  e2 = token[] send-done(p2), channel_id=2
  ROOT out = (f32[4], f32[4], token[]) tuple(x1, x2, e2)
}}
"""


def gather_and_scatter(rank: int, tokens: bool) -> str:
    """An all-gather and a reduce-scatter that do not depend on each other, in opposite text order by rank;
    compute differs everywhere. ``tokens``: the all-gather comes first in the token chain.
    """
    with_token = ", t0" if tokens else "", ", t1" if tokens else ""

    def result(shape: str) -> str:
        return f"({shape}, token[])" if tokens else shape

    def value(name: str, shape: str) -> str:
        return f"get-tuple-element({name}), index=0" if tokens else f"copy({name})"

    gathered = [
        "t0 = token[] after-all()" if tokens else "",
        f"ag = {result('f32[8]')} all-gather(u{with_token[0]}), dimensions={{0}}, {GROUPS}",
        f"g = f32[8] {value('ag', 'f32[8]')}",
        "t1 = token[] get-tuple-element(ag), index=1" if tokens else "",
    ]
    scattered = [
        f"rs = {result('f32[2]')} reduce-scatter(v{with_token[1]}), dimensions={{0}}, to_apply=add, {GROUPS}",
        f"s = f32[2] {value('rs', 'f32[2]')}",
    ]
    zero = "z = f32[] constant(0)\n zs = f32[4] broadcast(z), dimensions={}"
    compute = (
        ["u = f32[4] add(x, zs)", "v = f32[4] negate(x)"]
        if rank == 0
        else [
            "w = f32[4] multiply(x, x)",
            "w2 = f32[4] subtract(w, w)",
            "u = f32[4] subtract(x, w2)",
            "v = f32[4] subtract(w2, x)",
        ]
    )
    # XLA's parser wants a definition before its use: with tokens the text order is that of the chain, and
    # only the compute differs.
    middle = gathered + scattered if rank == 0 or tokens else scattered + gathered
    lines = "\n  ".join(line for line in [zero, *compute, *middle] if line)
    name = f"step_{rank}"
    return (
        f"{HEAD.format(name=name)}{SUM}"
        f"ENTRY main {{\n  x = f32[4] parameter(0)\n  {lines}\n"
        "  ROOT out = (f32[8], f32[2]) tuple(g, s)\n}\n"
    )


def report(case: str, **found: Any) -> None:
    joined = world.current()
    line = json.dumps({"case": case, **found})
    os.write(1, f"{joined.rank if joined else 0} {line}\n".encode())


def attempt(case: str, action: Callable[[], Any]) -> None:
    """Run a case, report its error, and see that the job goes on."""
    try:
        action()
        error = ""
    except Exception as raised:
        error = str(raised)
    report(case, error=error, healthy=run(healthy).tolist())


class Direct:
    """HLO run by an executor, without JAX in between."""

    def __init__(self) -> None:
        self.world = world.bootstrap()
        self.engine = create_engine("xla:cpu", self.world.local_devices)
        self.executor = Executor(self.engine, self.world)

    def load(self, text: str) -> Any:
        compiled = compile_hlo(text, 1, 4)
        return self.executor.load(
            compiled.program,
            range(4),
            schedule=compiled.schedule,
            with_order=compiled.with_order,
        )

    def run(self, loaded: Any, times: int = 1) -> list[list[float]]:
        """Results of the last run, device by device. Device k's parameter is 10 k + (0, 1, 2, 3)."""
        rows = []
        for logical, ordinal in loaded.local:
            row = []
            for type_ in loaded.input_types:
                host = np.arange(4, dtype=np.float32) + 10 * logical
                array = self.engine.put(host, type_, ordinal)
                row.append(Value.of(self.engine, array, type_, ordinal))
            rows.append(row)
        for _ in range(times):
            results = loaded.execute(rows)
        return [[float(x) for v in row for x in v.host_view().reshape(-1)] for row in results]


def faults(rank: int) -> None:
    run(healthy)
    for name, functions in FAULTS.items():
        attempt(name, lambda functions=functions: run(functions[rank]))
    direct = Direct()
    for name, texts in {
        "send without recv": (SEND_ALONE, SEND_ALONE),
        "send without recv, on one rank": (SEND_ALONE, RECV_ALONE.replace("{0,2}", "{1,3}")),
        "recv without send": (RECV_ALONE, RECV_ALONE),
        "recv cycle": (RECV_CYCLE, RECV_CYCLE),
    }.items():
        attempt(name, lambda texts=texts: direct.run(direct.load(texts[rank])))


def refused_again(rank: int) -> None:
    """A program that was refused is refused again at once, and so is what needs its result."""
    mapped = jax.shard_map(
        (psum, pmax)[rank], mesh=MESH, in_specs=SPEC, out_specs=SPEC, check_vma=False
    )
    function = jax.jit(mapped)
    after = jax.jit(
        jax.shard_map(healthy, mesh=MESH, in_specs=SPEC, out_specs=SPEC, check_vma=False)
    )
    for case in ("once", "again"):
        attempt(case, lambda: jax.block_until_ready(function(placed())))
    attempt("what depends on it", lambda: jax.block_until_ready(after(function(placed()))))


def orders(rank: int) -> None:
    report("other compute", result=run((doubled_and_psum, psum_after_sine)[rank]).tolist())
    direct = Direct()
    for name, tokens in {"chained": True, "reconciled": False}.items():
        loaded = direct.load(gather_and_scatter(rank, tokens))
        report(name, result=direct.run(loaded, 1000))


def ring(rank: int) -> None:
    """The cycle that JAX's documentation warns of: everybody sends and receives at once."""
    both = [(0, 1), (1, 0)]

    def swap(x: jax.Array) -> jax.Array:
        token = lax.psend(x, "i", both)
        return lax.precv(token, jax.ShapeDtypeStruct(x.shape, x.dtype), "i", both)

    report("ring", result=run(swap).tolist())

    def there_and_back(x: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        there = lax.precv(lax.psend(x, "i", ACROSS), shape, "i", ACROSS)
        back = [(1, 0)]
        return lax.precv(lax.psend(there + 1, "i", back), shape, "i", back)

    def chained_swap(x: jax.Array) -> jax.Array:
        token = sl.send(x, "i", both, token=sl.create_token())
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y, token = sl.recv(shape, "i", both, token=token)
        return sl.psum(y, "i", token=token)[0]

    report("chained ring", result=run(chained_swap).tolist())
    report("there and back", result=run(there_and_back).tolist())


def loaded_anew(rank: int) -> None:
    """One rank loads a program again that the other still has."""
    direct = Direct()
    text = gather_and_scatter(0, tokens=True)
    loaded = direct.load(text)
    direct.run(loaded)
    if rank == 0:
        loaded = direct.load(text)
    report("loaded anew", result=direct.run(loaded, 3))


def silent(rank: int) -> None:
    """One rank's program has no collective at all."""
    run(healthy)

    def step(x: jax.Array) -> jax.Array:
        return lax.psum(x, "i") if rank else x * 2

    run(step)
    run(healthy)


def silent_at_the_end(rank: int) -> None:
    """The same, and the rank without collectives goes on with other things."""
    run(healthy)

    def step(x: jax.Array) -> jax.Array:
        return lax.psum(x, "i") if rank else x * 2

    run(step)
    threading.Event().wait()


def other_program(rank: int, other: Function = gather) -> None:
    """Two programs that all know, run in different orders; asynchronously, so that results come late."""
    known, odd = (
        jax.jit(jax.shard_map(f, mesh=MESH, in_specs=SPEC, out_specs=SPEC, check_vma=False))
        for f in (psum, other)
    )
    x = placed()
    for f in (known, odd):
        jax.block_until_ready(f(x))
    for _ in range(100):
        known(x)
    first, second = (known, odd) if rank else (odd, known)
    results = first(x), second(x)
    jax.block_until_ready(results)


def other_compute(rank: int) -> None:
    """The same, of two programs that communicate alike, so that nothing waits."""
    other_program(rank, doubled_and_psum)
    threading.Event().wait()


def never(rank: int) -> None:
    """Rank 1 never calls."""
    run(healthy)
    if rank == 1:
        threading.Event().wait()
    run(psum)


def uncaught(rank: int) -> None:
    run((psum, pmax)[rank])


if __name__ == "__main__":
    jax.devices()
    behaviour = globals()[sys.argv[1]]
    behaviour(jax.process_index())
