"""A step of training in other schedules on stretto, by an option of one `jit`, in one process and on ranks.

Bits are compared with the step as it is written; messages are counted by hand: a microbatch makes P - 1 hops
there and as many back, in both.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scripts import reports_of

HERE = Path(__file__).parent
SCRIPT = """
import json, sys
import jax, numpy as np
from jax.sharding import NamedSharding
import stretto
sys.path.insert(0, {here!r} + "/hlo_frontend")
import frontend_support
frontend_support.mesh = training_mesh = lambda *sizes, names: jax.make_mesh(sizes, tuple(names))
import training_steps
training_steps.mesh = training_mesh

def bits(tree):
    shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
    return [np.asarray(s.data).tobytes().hex() for s in shards]

found = {{}}
draws = {{
    "line": training_steps.Draw(stages=4, microbatches=5, loss="squares"),
    "tensors": training_steps.Draw(stages=2, microbatches=3, axes="yx", loss="squares"),
    "many": training_steps.Draw(stages=4, microbatches=16, head="cond"),
    "single": training_steps.Draw(
        stages=4, microbatches=16, stage="unrolled", layers=1, head="cond"),
    "norm": training_steps.Draw(
        stages=2, microbatches=5, axes="dx", stage="behind", head="cond", dtype="bfloat16"),
    "inside": training_steps.Draw(stages=2, microbatches=5, axes="dx", head="cond", collect="scan"),
}}
for name in {names!r}:
    draw = draws[name]
    step, arguments, specs, over = training_steps.program(draw)
    leaves, tree = jax.tree.flatten(arguments)
    given = tree.unflatten([
        jax.make_array_from_callback(a.shape, NamedSharding(over, s), lambda index, a=a: a[index])
        for a, s in zip(leaves, specs, strict=True)
    ])
    for schedule in {schedules!r}:
        options = {{"stretto_schedule": schedule}}
        if schedule == "interleaved_1f1b":
            options["stretto_interleave"] = 2
        run = step.lower(*given).compile(compiler_options=options)
        before = stretto.stats().messages
        result = bits(run(*given))
        memory = run.memory_analysis().temp_size_in_bytes
        found[name + " " + schedule] = [result, stretto.stats().messages - before, memory]
with open(f"{{sys.argv[1]}}/{{jax.process_index()}}.json", "w") as file:
    json.dump(found, file)
"""


def run(tmp_path: Path, ranks: int, name: str, *schedules: str) -> dict[str, int]:
    """Messages of all processes, by step and schedule."""
    text = SCRIPT.format(here=str(HERE), names=(name,), schedules=("gpipe", *schedules))
    reports, said = reports_of(tmp_path, text, 4, ranks)
    assert "is not run as" not in said
    for report in reports:
        for schedule in schedules:
            if schedule != "zb_h1":  # bit for bit
                assert report[f"{name} gpipe"][0] == report[f"{name} {schedule}"][0]
            # With few microbatches what is kept beside the layers' residuals takes more than is saved.
            if name in ("many", "single"):
                assert report[f"{name} {schedule}"][2] < report[f"{name} gpipe"][2]
    return {name: sum(r[name][1] for r in reports) for name in reports[0]}


def test_in_one_process(tmp_path):
    messages = run(tmp_path, 1, "tensors", "1f1b")
    # An all-reduce counts as 4 messages, those of both stages, whichever of them takes part: each of 2 layers
    # has one in 12 iterations instead of 8. And what the loss's gradient begins with is summed on its own.
    assert messages["tensors 1f1b"] - messages["tensors gpipe"] == 4 * (2 * (12 - 8) + 1)


@pytest.mark.thorough
@pytest.mark.mpi
def test_a_loss_in_the_loop_on_ranks(tmp_path):
    run(tmp_path, 4, "inside", "1f1b", "zb_h1")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["many", "single"])
def test_many_microbatches_take_less_memory(tmp_path, name):
    run(tmp_path, 1, name, "1f1b", "zb_h1")


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.parametrize(("name", "ranks"), [("single", 4), ("norm", 2), ("norm", 4)])
def test_stages_that_are_no_loop_on_ranks(tmp_path, name, ranks):
    run(tmp_path, ranks, name, "1f1b", "zb_h1")


@pytest.mark.thorough
@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(tmp_path, ranks):
    messages = run(tmp_path, ranks, "line", "1f1b", "zb_h1", "interleaved_1f1b")
    # XLA sums a loss together with what its gradient begins with; the new loop needs that before.
    for schedule in ("1f1b", "zb_h1"):
        assert 2 * 5 * 3 <= messages[f"line {schedule}"] <= messages["line gpipe"] + 4 * 3
    # In two rounds a microbatch makes 4 hops more each way. 6 of 8 chunks of 2 arrays of weights have another
    # device than as written, and so have their gradients.
    more = 2 * 5 * 4 + 2 * 2 * 6
    found = messages["line interleaved_1f1b"]
    assert 2 * 5 * 3 + more <= found <= messages["line gpipe"] + more + 4 * 3
