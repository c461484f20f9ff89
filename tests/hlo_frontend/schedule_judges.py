"""What judges a step of training that is run in a schedule, for the tests of schedules."""

from __future__ import annotations

import jax
import numpy as np
from frontend_support import P, shards
from gpipe import inputs, weights
from interpreter import Interpreter
from random_steps import CHUNKS, INTERLEAVED, Found, Step, compare, compiled
from training_steps import Draw


def compare_in(d: Draw, *schedules: str, chunks: int = CHUNKS) -> dict[str, Found]:
    """Run a step in each of these schedules, see `WrittenStep.judged`. What takes longest is done once for
    all: running it as it is written, and on JAX's CPU backend."""
    step = Step(d)
    found = {}
    for schedule in schedules:
        how = {"interleave": chunks} if schedule == INTERLEAVED else {}
        found[schedule] = step.judged(schedule, **how)
    step.check_written()
    return found


def judge(d: Draw, *schedules: str, chunks: int = CHUNKS) -> dict[str, Found]:
    """Run a step in schedules, by default as 1F1B: gradients are as JAX's, and those of the written step, bit
    for bit but where a head is computed row by row or stands in no branch, where weights have runs of their
    own, and where chunks are one layer or stages no loop over layers."""
    found = compare_in(d, *(schedules or ("1f1b",)), chunks=chunks)
    behind = d.loss != "squares" and d.head == "behind"
    for schedule, own in found.items():
        (report,) = own.module.interleaved
        single = schedule == INTERLEAVED and d.layers == chunks
        rounds = behind or d.head == "where" or schedule == "zb_h1" or single or d.stage != "scan"
        assert bool(report.rounds) == rounds, schedule
    return found


def refused(d: Draw, schedule: str = "1f1b", **how) -> str:
    """The reason why a step is not run in another schedule; the program is the written one."""
    found = compare(d, schedule, **how)
    assert len(found.whys) == 2
    (why,) = (w for w in found.whys if "with which it would be one" not in w)
    return why


def equal(function, module, over, layers=None):
    """A step of `weights` and three `inputs` gives what it gives as it is written, and with JAX."""
    layers = weights(2 * 4) if layers is None else layers
    given = [shards(layers["a"], over, P("x")), shards(layers["b"], over, P("x"))]
    given.append(shards(inputs(3), over, P()))
    found = Interpreter(module.program, skipped=np.nan).run(*given)
    written = Interpreter(compiled(function, (layers, inputs(3)), 2, "gpipe").program).run(*given)
    for result, expected in zip(found, written, strict=True):
        np.testing.assert_array_equal(np.array(result), np.array(expected))
    whole = jax.tree.leaves(function(layers, inputs(3)))
    np.testing.assert_allclose(np.concatenate(found[1]), whole[1], rtol=2e-5, atol=2e-5)
