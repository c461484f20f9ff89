"""What ``STRETTO_TRACE`` costs: programs of two ranks with and without a trace, in the same processes.

The trace is switched on and off between turns of 20 ms, or of a call that takes longer, which the ranks take
by themselves; of several calls one more goes before, which does not count: what was not run for some turns is
in no cache. What the trace has to write is written each time half a second of turns was traced, as often as
a program's trace is, and its cost is that of those turns, shared out. Turns without a trace come twice, so
that the table tells what equal turns differ by (*control*). The figure is the median of ratios of turns that
follow each other, with the interval in which it lies at 95%: of elapsed time, and of the processor time that
all threads of both ranks used. The latter tells more where ranks share cores: it has the work that a trace
makes, and little of what else the machine does meanwhile.

*x + 1* and *psum* are calls of some microseconds, next to which a call of the recorder is not small.
*training step* is that of a small transformer with sharded weights, *pipeline* a scan that hands 64 KiB on to
the other rank in every iteration. Goal: these take less than 1.02 times as long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import Contender, console, machine, seconds, serve, start
from overlap_tax import Ratio
from rich.table import Table

from stretto.runtime.recording.trace import WRITE_EVERY

VARIANTS = ("off", "control", "on")
CASES = {
    "x + 1": "",
    "psum of 8 B": "",
    "training step": "on ≤ 1.02x",
    "pipeline": "on ≤ 1.02x",
}
SECONDS = 0.02  # of a turn
Times = tuple[float, float]  # elapsed, and used of all processors


def calls() -> dict[str, Callable[[], Any]]:
    """By case, a call that waits for its result."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P
    from models import SMALL, concrete, train_step

    devices = np.array(jax.devices())
    mesh = Mesh(devices, ("x",))

    def placed(data: np.ndarray, spec: P) -> jax.Array:
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(data.shape, sharding, lambda i: data[i])

    one = jax.device_put(np.float32(1), jax.local_devices()[0])
    add = jax.jit(lambda x: x + 1)
    small = placed(np.ones((len(devices), 2), np.float32), P("x"))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P())
    def total(a: jax.Array) -> jax.Array:
        return lax.psum(a, "x")

    ring = [(i, (i + 1) % len(devices)) for i in range(len(devices))]
    weight = placed(np.full((128, 128), 1 / 128, np.float32), P())
    rows = placed(np.ones((len(devices) * 128, 128), np.float32), P("x"))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("x")), out_specs=P("x"))
    def handed_on(w: jax.Array, h: jax.Array) -> jax.Array:
        def tick(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            for _layer in range(4):
                h = jnp.tanh(h @ w)
            return lax.ppermute(h, "x", ring), None

        return lax.scan(tick, h, None, length=64)[0]

    sharded = Mesh(devices.reshape(len(devices), 1), ("fsdp", "tp"))
    step = train_step(SMALL, sharded)
    state, tokens = concrete(SMALL, sharded)
    states = [state]

    def trained() -> None:
        states[0], loss = step(states[0], tokens)
        jax.block_until_ready(loss)

    return {
        "x + 1": lambda: add(one).block_until_ready(),
        "psum of 8 B": lambda: total(small).block_until_ready(),
        "training step": trained,
        "pipeline": lambda: handed_on(weight, rows).block_until_ready(),
    }


class Switch:
    """Turns a trace on and off: what is run meanwhile is as it would be in a process with or without one."""

    def __init__(self, client: Any, trace: Any) -> None:
        """All programs must have been loaded."""
        self._client, self._executor = client, client.executor
        self._programs = list(self._executor._loaded)
        off = self._state()
        end = client.observe(trace)
        on = self._state()
        end()
        self._states = {False: off, True: on}
        self(False)

    def _state(self) -> tuple[Any, list[tuple[Any, Any]]]:
        return self._executor.dispatcher.instrument, [(p.walker, p._single) for p in self._programs]

    def __call__(self, on: bool) -> None:
        self._executor.dispatcher.instrument, programs = self._states[on]
        for loaded, state in zip(self._programs, programs, strict=True):
            loaded.walker, loaded._single = state
        self._client._reconsider()


def worker(folder: str) -> None:
    import jax

    from stretto.plugin import _capi
    from stretto.plugin.client import clients
    from stretto.runtime.recording.trace import Trace, header_of

    cases = calls()
    for call in cases.values():
        call()
    (client,) = clients
    trace = Trace(Path(folder), header_of(client.world), client.engine, _capi.Rows)
    trace._stop.set()  # `measure` writes instead, and no thread in a turn
    trace._writer.join()
    switch = Switch(client, trace)

    def timed(call: Callable[[], Any], repeats: int = 1) -> Times:
        began, used = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            call()
        used = time.process_time() - used
        return (time.perf_counter() - began) / repeats, used / repeats

    def measure(case: dict[str, Any]) -> tuple[list[list[Times]], Times]:
        """Of each turn the times of a call; those of writing what was traced in them."""
        call, repeats = cases[case["case"]], case["repeats"]
        found: list[list[Times]] = []
        for each in case["orders"]:
            found.append([])
            for variant in each:
                switch(VARIANTS[variant] == "on")
                if repeats > 1:
                    call()
                found[-1].append(timed(call, repeats))
        switch(False)
        return found, timed(trace.write)

    serve(jax.process_index(), measure)


@dataclass
class Turns:
    """Seconds a call, by variant: elapsed on rank 0, and of all processors used by both ranks."""

    elapsed: dict[str, list[float]] = field(default_factory=lambda: {v: [] for v in VARIANTS})
    used: dict[str, list[float]] = field(default_factory=lambda: {v: [] for v in VARIANTS})


def measured(contender: Contender, case: str, turns: int) -> Turns:
    """``turns`` of each variant, behind some that do not count."""

    def run(orders: Sequence[Sequence[int]], repeats: int) -> list[Any]:
        return contender.answers({"case": case, "orders": orders, "repeats": repeats})

    run([[0]], 1)
    once = run([[0]], 3)[0][0][0][0][0]
    repeats = max(1, round(SECONDS / once))
    together = max(1, round(WRITE_EVERY / (once * repeats)))
    times = Turns()
    for first in range(-together, turns, together):
        orders = [order(turn) for turn in range(first, first + together)]
        ranks = run(orders, repeats)
        if first < 0:
            continue
        written = [each / (repeats * together) for each in sides(write for _, write in ranks)]
        for each, *found in zip(orders, *(turns for turns, _ in ranks), strict=True):
            for variant, *answers in zip(each, *found, strict=True):
                name, (elapsed, used) = VARIANTS[variant], sides(answers)
                share = written if name == "on" else (0.0, 0.0)
                times.elapsed[name].append(elapsed + share[0])
                times.used[name].append(used + share[1])
    return times


def sides(ranks: Iterable[Times]) -> Times:
    """Elapsed on rank 0, used by all ranks."""
    elapsed, used = zip(*ranks, strict=True)
    return elapsed[0], sum(used)


def order(turn: int) -> list[int]:
    """In which the variants come: each as often at each place, and next to each other one."""
    count = len(VARIANTS)
    return [(place * (1 + turn % 2) + turn // 2) % count for place in range(count)]


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        with tempfile.TemporaryDirectory() as folder:
            return worker(folder)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns: a look, not a figure")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--turns", type=int, help="turns of each variant")
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="those to measure")
    args = parser.parse_args()
    contender = start("worker", "trace_cost.py", 2, "mpi", JAX_PLATFORMS="stretto,cpu")
    table = Table(title="what a trace costs", caption=machine())
    for column in ("", "", "off", "control ÷ off", "on ÷ off", "goal"):
        table.add_column(column, justify="right" if "off" in column else "left")
    rows: dict[str, dict[str, Any]] = {}
    try:
        for case in args.cases:
            turns = measured(contender, case, args.turns or (25 if args.quick else 151))
            rows[case] = {}
            for what, times in (("elapsed", turns.elapsed), ("processors", turns.used)):
                off = statistics.median(times["off"])
                ratios = {v: Ratio.of(times[v], times["off"]) for v in VARIANTS[1:]}
                rows[case][what] = {"off": off} | {v: vars(r) for v, r in ratios.items()}
                name, goal = (case, CASES[case]) if what == "elapsed" else ("", "")
                shown = [
                    f"{r.median:.3f}x [dim]{r.low:.3f} to {r.high:.3f}[/]" for r in ratios.values()
                ]
                table.add_row(name, what, seconds(off), *shown, goal)
    finally:
        contender.close()
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "cases": rows}, indent=2))


if __name__ == "__main__":
    main()
