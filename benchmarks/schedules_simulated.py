"""What schedules of a step of training are worth with many stages: programs as they are lowered, replayed on
all devices on virtual clocks (`stretto.testing_ranks`). No machine of that size is needed, and load changes
nothing.

A stage takes 100 ms forwards, twice as long backwards, half of that for gradients of weights; each run of a
segment 150 us beside, which is the goal for an iteration without work; a message 100 us, or 1 ms. Shown is
the share of the gain over the program as written that counting the runs of stages alone would give.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness import console, machine, options
from rich.table import Table

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=64"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import stretto
from stretto import nn
from stretto.hlo_frontend.compile import CompiledModule, CompileSpec, compile_stablehlo
from stretto.hlo_frontend.interleaved import Scheduled
from stretto.hlo_frontend.pipelines.timetable import timetable
from stretto.runtime.program import Branch, Loop, Program, Run, Start, instructions
from stretto.testing_ranks import Seconds, Taken, replay_ranks

FORWARD, DISPATCH, MESSAGES = 0.1, 150e-6, (100e-6, 1e-3)
LAYERS, ROWS, WIDTH, HEADS = 4, 256, 128, 3
FLOPS = LAYERS * 2.0 * ROWS * WIDTH**2  # of a stage, forwards
# Schedule, chunks, stages, microbatches, and the share of the gain that is the goal.
CASES = (
    ("zb_h1", 1, 4, 4, 0.90),
    ("zb_h1", 1, 8, 8, 0.85),
    ("zb_h1", 1, 64, 64, None),
    ("1f1b", 1, 4, 16, None),
    ("1f1b", 1, 64, 64, None),
    ("interleaved", 2, 4, 4, 0.95),
    ("interleaved", 4, 4, 4, 0.95),
    ("interleaved", 2, 8, 8, 0.95),
    ("interleaved", 4, 8, 8, 0.95),
    ("interleaved", 2, 64, 64, None),
    ("interleaved_1f1b", 2, 4, 16, None),
    ("interleaved_1f1b", 4, 8, 32, None),
    ("interleaved_1f1b", 2, 32, 32, None),
)
HEAD_CASE = 4, 16, 1.95  # stages, microbatches, and how many times as fast the goal is


def layer(weights: jax.Array, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ weights)


def on_all(head: jax.Array, y: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean(nn.vocab_parallel_cross_entropy(y, head, labels, "stage"))


def on_last(head: jax.Array, y: jax.Array, labels: jax.Array) -> jax.Array:
    scores = jax.nn.log_softmax(y @ head.T)
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=-1))


def written(stages: int, microbatches: int, head_on: str, chunks: int) -> str:
    """The step as StableHLO: without a head, or with one of ``HEADS`` stages' time on one or all of them."""

    def local(weights: jax.Array, head: jax.Array, xs: jax.Array, labels: jax.Array) -> jax.Array:
        if not head_on:
            return jnp.sum(stretto.pipelined(layer, weights, xs, "stage") ** 2)
        own = on_all if head_on == "all" else on_last
        more: dict[str, Any] = {"head": own, "head_params": head, "targets": labels}
        return jnp.mean(stretto.pipelined(layer, weights, xs, "stage", head_on=head_on, **more))

    mesh = jax.make_mesh(
        (stages,), ("stage",), axis_types=(AxisType.Auto,), devices=jax.devices()[:stages]
    )
    specs = P("stage"), P("stage") if head_on == "all" else P(), P(), P()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    step = jax.jit(jax.value_and_grad(mapped, (0, 1) if head_on else 0))
    shapes = (
        jax.ShapeDtypeStruct((stages * LAYERS, WIDTH, WIDTH), np.float32),
        jax.ShapeDtypeStruct((HEADS * LAYERS * WIDTH, WIDTH), np.float32),
        jax.ShapeDtypeStruct((microbatches, ROWS, WIDTH), np.float32),
        jax.ShapeDtypeStruct((microbatches, ROWS), np.int32),
    )
    return step.trace(*shapes).lower().as_text()


@dataclass(frozen=True)
class Work:
    """How long runs take. ``heavy``: of those that compute much, by identity, the seconds on each device in
    each iteration, f64[P, iterations]."""

    heavy: dict[int, np.ndarray]

    def seconds(self, run: Run, device: int, iteration: int) -> float:
        table = self.heavy.get(id(run))
        return DISPATCH + (0.0 if table is None else float(table[device, iteration]))


def heavy_runs(program: Program, loop: Loop, count: int) -> list[Run]:
    """The ``count`` runs in a loop with most arithmetic, in their order."""
    runs = [i for i in loop.body.instructions if isinstance(i, Run)]
    most = sorted(runs, key=lambda r: -program.segments[r.segment].flops)[:count]
    return [run for run in runs if run in most]


def working(stages: int, microbatches: int) -> np.ndarray:
    """Whether a stage has a microbatch, in each iteration of the loop as it is written."""
    behind = np.arange(microbatches + stages - 1) - np.arange(stages)[:, None]
    return (behind >= 0) & (behind < microbatches)


def loops(module: CompiledModule) -> Iterator[Loop]:
    return (i for i in module.program.body.instructions if isinstance(i, Loop))


def of_stages(module: CompiledModule, stages: int, microbatches: int, chunks: int) -> Work:
    """The work of a step without a head."""
    there = working(stages, microbatches)
    scheduled = [r for r in module.interleaved if isinstance(r, Scheduled)]
    heavy: dict[int, np.ndarray] = {}
    if scheduled:
        (report,) = scheduled
        letters = np.array([list(row) for row in report.runs])
        (loop,) = (i for i in loops(module) if i.trip_count == report.after)
        apart = report.left > 0
        runs = heavy_runs(module.program, loop, 1 + apart)
        own = {"F": 1.0, "B": 1.0 if apart else 2.0}
        if apart:
            heavy[id(runs[1])] = (letters == "W") * FORWARD
        heavy[id(runs[0])] = sum((letters == k) * t for k, t in own.items()) * FORWARD / chunks
        return Work(heavy)
    if chunks > 1:
        enters = range(microbatches)
        leaves = [m + stages - 1 for m in enters]
        there = timetable(stages, chunks, enters, leaves, microbatches + stages - 1).working > 0
    for loop, table, time in zip(loops(module), (there, there[::-1]), (1.0, 2.0), strict=True):
        (run,) = heavy_runs(module.program, loop, 1)
        heavy[id(run)] = table * time * FORWARD / chunks
    return Work(heavy)


def replayed(program: Program, seconds: Seconds, taken: Taken | None = None) -> list[float]:
    """Seconds of a step, for each of ``MESSAGES``."""
    return [replay_ranks(program, seconds, lambda c, m=m: m, taken).seconds for m in MESSAGES]


def compiled(text: str, stages: int, schedule: str, chunks: int) -> CompiledModule:
    found = compile_stablehlo(text, CompileSpec(1, stages), schedule=schedule, interleave=chunks)
    assert not [r.why for r in found.interleaved if r.why]
    return found


def ideal(schedule: str, chunks: int, stages: int, microbatches: int) -> float:
    """How many times as fast a step is, if only runs of stages took time."""
    before = 3 * (microbatches + stages - 1)
    if schedule == "zb_h1":
        return before / (3 * microbatches + stages - 1)
    return before / (3 * (chunks * microbatches + stages - 1) / chunks)


def with_head(stages: int, microbatches: int, head_on: str) -> list[float]:
    """Seconds of a step with a head, run as it is written. Runs take as long as they have arithmetic, in
    iterations in which they have a microbatch."""
    module = compiled(written(stages, microbatches, head_on, 1), stages, "gpipe", 1)
    program, there = module.program, working(stages, microbatches)
    trips = next(loops(module)).trip_count or 0
    late = trips - there.shape[1]  # a head on all stages comes an iteration later
    of_stage = np.pad(there, ((0, 0), (0, late)))
    at_last = np.pad(there[-1:], ((0, 0), (late, 0)))
    with_one = [head_on == "all" or stage == stages - 1 for stage in range(stages)]
    of_head = at_last & np.array(with_one)[:, None]
    heavy: dict[int, np.ndarray] = {}
    for n, loop in enumerate(loops(module)):
        # Forwards a stage comes before the head, backwards behind it.
        run_of_stage = heavy_runs(program, loop, 2)[-n]
        for run in (i for i in instructions(loop.body) if isinstance(i, Run)):
            table = (of_stage if run is run_of_stage else of_head)[:, :: -1 if n else 1]
            heavy[id(run)] = table * program.segments[run.segment].flops / FLOPS * FORWARD

    def taken(branch: Branch, device: int, iteration: int) -> int:
        """The branch that communicates is that of a microbatch."""
        busy = [any(isinstance(i, Start) for i in instructions(b)) for b in branch.branches]
        return busy.index(bool(of_head[device, iteration]))

    return replayed(program, Work(heavy).seconds, taken)


def main() -> None:
    args = options(__doc__ or "")
    table = Table(title="schedules, replayed on virtual clocks", caption=machine())
    shares = [f"messages of {m * 1e3:g} ms" for m in MESSAGES]
    for column in ("", "as written", "a step", "of the model's", *shares, "goal"):
        table.add_column(column, justify="left" if not column else "right")
    found: dict[str, Any] = {}

    def row(label: str, before: list[float], after: list[float], best: float, goal: str) -> None:
        gains = [b / a for b, a in zip(before, after, strict=True)]
        found[label] = {"before": before, "after": after, "model": best}
        cells = [f"{g:.3f}x" + (f" {(g - 1) / (best - 1):.1%}" if best > 1 else "") for g in gains]
        table.add_row(
            label, f"{before[0]:.3f} s", f"{after[0]:.3f} s", f"{best:.3f}x", *cells, goal
        )

    for schedule, chunks, stages, microbatches, goal in CASES:
        if args.quick and stages > 8:
            continue
        text = written(stages, microbatches, "", chunks)
        own = "gpipe" if schedule == "interleaved" else schedule
        times = []
        for kind, parts in (("gpipe", 1), (own, chunks)):
            module = compiled(text, stages, kind, parts)
            work = of_stages(module, stages, microbatches, parts)
            times.append(replayed(module.program, work.seconds))
        name = f"{schedule}{f', {chunks} chunks' if chunks > 1 else ''}"
        label = f"{name}, {stages} stages, {microbatches} microbatches"
        best = ideal(schedule, chunks, stages, microbatches)
        row(label, *times, best, "" if goal is None else f"{goal:.0%}")
    stages, microbatches, least = HEAD_CASE
    one, divided = (with_head(stages, microbatches, where) for where in ("last", "all"))
    best = (stages - 1 + microbatches * (1 + HEADS)) / (
        microbatches + stages - 1 + microbatches * HEADS / stages
    )
    label = f"a head of {HEADS} stages' time on all, {stages} stages, {microbatches} microbatches"
    row(label, one, divided, best, f"{least:.2f}x")
    console.print(table)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "found": found}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
