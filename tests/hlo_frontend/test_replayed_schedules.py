"""Steps in schedules as they are lowered, replayed on all devices: nobody waits for what is not needed yet.

How long a step takes is worked out by hand: the runs that follow each other, as long as they are said to be.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from frontend_support import P, mesh
from random_steps import compiled

from stretto.pipelining import pipelined
from stretto.runtime.program import Loop, Run
from stretto.testing_ranks import replay_ranks

STAGES, LAYERS, ROWS, WIDTH = 4, 2, 128, 64  # enough arithmetic for messages to cross iterations
SECONDS = {"F": 1.0, "B": 2.0, ".": 0.0}


def lowered(schedule: str, microbatches: int, chunks: int) -> Any:
    def local(weights, xs):
        ys = pipelined(lambda w, x: x + jnp.tanh(x @ w), weights, xs, "x")
        return jnp.sum(ys**2)

    mapped = jax.shard_map(local, mesh=mesh(STAGES), in_specs=(P("x"), P()), out_specs=P())
    given = (
        jax.ShapeDtypeStruct((STAGES * LAYERS, WIDTH, WIDTH), np.float32),
        jax.ShapeDtypeStruct((microbatches, ROWS, WIDTH), np.float32),
    )
    step = jax.jit(jax.value_and_grad(mapped))
    return compiled(step, given, STAGES, schedule, interleave=chunks)


@pytest.mark.parametrize(
    ("schedule", "microbatches", "chunks", "expected"),
    [
        ("1f1b", 6, 1, 3 * (6 + STAGES - 1)),
        ("zb_h1", 4, 1, 3 * 4 + STAGES - 1),
        ("interleaved_1f1b", 8, 2, 3 * (2 * 8 + STAGES - 1)),
    ],
)
def test_a_step_takes_as_long_as_its_runs(schedule, microbatches, chunks, expected):
    module = lowered(schedule, microbatches, chunks)
    (report,) = module.interleaved
    assert not report.why
    program = module.program
    (loop,) = (
        i for i in program.body.instructions if isinstance(i, Loop) and i.trip_count == report.after
    )
    assert len(loop.carried) == (0 if schedule == "1f1b" else 2)
    runs = [i for i in loop.body.instructions if isinstance(i, Run)]
    runs = [r for r in runs if program.segments[r.segment].flops > 5e5]
    # Where weights have runs of their own, these are behind the start of messages.
    seconds = [dict(SECONDS, W=0.0), {"F": 0.0, "B": 0.0, "W": 1.0, ".": 0.0}][: len(runs)]
    if schedule == "zb_h1":
        seconds[0]["B"] = 1.0
    assert len(runs) == len(seconds) == 1 + (schedule == "zb_h1")
    of_run = {id(r): own for r, own in zip(runs, seconds, strict=True)}

    def taken(run: Run, device: int, iteration: int) -> float:
        own = of_run.get(id(run))
        return 0.0 if own is None else own[report.runs[device][iteration]]

    assert replay_ranks(program, taken, lambda collective: 0.0).seconds == expected
