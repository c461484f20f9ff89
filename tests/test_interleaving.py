"""A pipeline on stretto, interleaved by an option of one `jit` and by STRETTO_INTERLEAVE: its forward pass,
and a step of training.

Messages are counted by hand: each of M microbatches makes P * R - 1 hops, and of each array of weights the
chunks move that are not where they should be. A step makes as many hops back, and its gradients move too.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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
frontend_support.mesh = lambda n: jax.make_mesh((n,), ("x",))
import gpipe
from frontend_support import P

def on(mesh, array, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

def place(array, spec):
    return on(frontend_support.mesh(4), array, spec)

weights = jax.tree.map(lambda w: place(w, P("x")), gpipe.weights(4 * 4))
inputs = place(gpipe.inputs(4), P())
def bits(tree):
    shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
    return [np.asarray(s.data).tobytes().hex() for s in shards]

found = {{}}
forward = jax.shard_map(gpipe.where(4, 4), mesh=frontend_support.mesh(4),
                        in_specs=(P("x"), P()), out_specs=P(), check_vma=False)
step = jax.value_and_grad(lambda w, x: (forward(w, x) ** 2).sum())
over = jax.make_mesh((2, 2), ("y", "x"))
parallel = jax.shard_map(gpipe.where(2, 3, layer=gpipe.parallel_layer), mesh=over,
                         in_specs=(gpipe.PARALLEL, P()), out_specs=P(), check_vma=False)
divided = jax.tree.map(lambda w, s: on(over, w, s), gpipe.parallel_weights(2 * 4), gpipe.PARALLEL)
given = {{
    "": (forward, weights, inputs),
    " step": (step, weights, inputs),
    " parallel": (jax.value_and_grad(lambda w, x: (parallel(w, x) ** 2).sum()), divided,
                  on(over, gpipe.inputs(3), P())),
}}
for name, options in (("plain", {{}}), ("asked", {{"stretto_interleave": 2}})):
    for kind, (function, *arguments) in given.items():
        before = stretto.stats().messages
        result = bits(jax.jit(function, compiler_options=options)(*arguments))
        found[name + kind] = [result, stretto.stats().messages - before]
with open(f"{{sys.argv[1]}}/{{jax.process_index()}}.json", "w") as file:
    json.dump(found, file)
"""
HOPS = 4 * (4 - 1)
MOVED = 2 * 6  # of 8 chunks of each of two arrays two stay
INTERLEAVED = 4 * (4 * 2 - 1) + MOVED


def run(tmp_path: Path, ranks: int = 1, **environment: str) -> tuple[dict[str, int], str]:
    """Messages of all processes, of each of the two runs; and what was written to standard error."""
    text = SCRIPT.format(here=str(HERE))
    reports, said = reports_of(tmp_path, text, 4, ranks, **environment)
    for report in reports:
        for kind in ("", " step", " parallel"):
            assert report["plain" + kind][0] == report["asked" + kind][0]  # bit for bit
    return {name: sum(r[name][1] for r in reports) for name in reports[0]}, said


@pytest.mark.thorough
def test_by_an_option_of_one_jit(tmp_path):
    messages, _ = run(tmp_path)
    assert messages["asked"] - messages["plain"] == INTERLEAVED - HOPS
    assert messages["asked step"] - messages["plain step"] == 2 * (INTERLEAVED - HOPS)
    # Two pipelines of two stages, three microbatches, two arrays of which two of four chunks move.
    more = 3 * (2 * 2 - 1) + 2 * 2 - 3 * (2 - 1)
    # In both passes 7 iterations of 2 layers instead of 4 of 4, of which each has an all-reduce; it counts as
    # 4 messages, those of both stages, whichever of them takes part.
    fewer = 4 * (4 * 4 - 7 * 2)
    assert messages["asked parallel"] - messages["plain parallel"] == 2 * (2 * more - fewer)


@pytest.mark.thorough
def test_for_the_whole_process_and_refused_with_a_reason(tmp_path):
    def told(chunks: str) -> tuple[dict[str, int], str]:
        folder = tmp_path / chunks
        folder.mkdir()
        return run(folder, STRETTO_INTERLEAVE=chunks)

    with ThreadPoolExecutor() as pool:  # each compiles for long, in a process of its own
        (messages, errors), refused = pool.map(told, ("2", "3"))
    assert messages["plain"] == messages["asked"]
    assert messages["plain step"] == messages["asked step"]
    assert "is not interleaved" not in errors
    messages, errors = refused
    assert messages["asked"] - messages["plain"] == INTERLEAVED - HOPS
    assert "is not interleaved: 4 layers of a device are not 3 equal chunks" in errors


@pytest.mark.thorough
@pytest.mark.mpi
def test_on_ranks(tmp_path):
    messages, _ = run(tmp_path, 2)
    assert messages["asked"] > messages["plain"]
    assert messages["asked step"] > messages["plain step"]
    assert messages["asked parallel"] > messages["plain parallel"]
