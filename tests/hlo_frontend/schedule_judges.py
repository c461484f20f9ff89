"""What judges a step of training that is run in a schedule, for the tests of schedules."""

from __future__ import annotations

import jax
import numpy as np
from frontend_support import P, shards
from gpipe import inputs, weights
from interpreter import Interpreter
from random_steps import Found, compare, compiled
from training_steps import Draw


def judge(d: Draw, schedule: str = "1f1b", **how) -> Found:
    """Run a step in a schedule: gradients are as JAX's, and those of the written step, bit for bit where no
    head is computed row by row. A head in the loop that stands in no branch, and chunks of one layer, are
    equal here; not everywhere, as the report says."""
    found = compare(d, schedule, **how)
    assert found.whys == ()
    (report,) = found.module.interleaved
    behind = d.loss != "squares" and d.head == "behind"
    single = d.layers == how.get("interleave")
    rounds = behind or d.head == "where" or schedule == "zb_h1" or single
    assert bool(report.rounds) == rounds
    assert behind or schedule == "zb_h1" or found.differs == ()
    return found


def refused(d: Draw, schedule: str = "1f1b", **how) -> str:
    """The reason why a step is not run in another schedule; the program is the written one."""
    found = compare(d, schedule, **how)
    assert len(found.whys) == 2
    (why,) = (w for w in found.whys if "with which it would be one" not in w)
    return why


def equal(function, module, over):
    """A step of `weights` and three `inputs` gives what it gives as it is written, and with JAX."""
    layers = weights(2 * 4)
    given = [shards(layers["a"], over, P("x")), shards(layers["b"], over, P("x"))]
    given.append(shards(inputs(3), over, P()))
    found = Interpreter(module.program, skipped=np.nan).run(*given)
    written = Interpreter(compiled(function, (layers, inputs(3)), 2, "gpipe").program).run(*given)
    for result, expected in zip(found, written, strict=True):
        np.testing.assert_array_equal(np.array(result), np.array(expected))
    whole = jax.tree.leaves(function(layers, inputs(3)))
    np.testing.assert_allclose(np.concatenate(found[1]), whole[1], rtol=2e-5, atol=2e-5)
