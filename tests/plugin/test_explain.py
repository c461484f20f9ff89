"""`stretto.explain` of compiled JAX functions."""

from __future__ import annotations

import json

from support import scripts

SCRIPT = """
import json, sys, jax, jax.numpy as jnp, numpy as np, stretto

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))

def step(w, x):
    for _ in range(3):
        whole = jax.lax.all_gather(w, "x", tiled=True)
        x = jnp.tanh(x @ whole)
        w = w * 2
    return x

specs = (jax.P("x"), jax.P())
f = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=False))
w, x = np.ones((512, 512), np.float32), np.ones((64, 512), np.float32)
other = jax.jit(lambda x: x + 1).lower(x).compile()
compiled = f.lower(w, x).compile()
found = stretto.explain(compiled)
local = stretto.explain(other)
try:
    stretto.explain(f)
except TypeError as error:
    told = str(error)
starts = [s for s in (found.plan or {"steps": ()})["steps"] if s["kind"] == "start"]
print(json.dumps({
    "kinds": [c["kind"] for c in found.data["collectives"]],
    "program": str(found.program),
    "text": str(found),
    "starts": len(starts),
    "predicted": [found.plan["summary"]["predicted_ms"], found.program.predicted.seconds * 1e3]
    if found.plan else None,
    "local": [local.data["collectives"], local.plan],
    "told": told,
    "hlo": compiled.as_text()[:9],
}))
"""


def test_with_a_table_of_costs(tmp_path) -> None:
    costs = tmp_path / "costs.json"
    link = {"axis_stride": 1, "group_size": 4, "latency_s": 1e-5, "bytes_per_s": 1e9}
    compute = {"flops_per_s": 1e11, "bytes_per_s": 1e11, "launch_s": 1e-6}
    costs.write_text(json.dumps({"compute": compute, "links": [link]}))
    done = scripts.run(SCRIPT, devices=4, STRETTO_COSTS=str(costs))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kinds"] == ["all-gather"] * 3
    assert found["program"].count("start ") == found["starts"] == 3
    predicted, of_program = found["predicted"]
    assert abs(predicted - of_program) < 0.01 * predicted
    assert "3 collectives" in found["text"] and "floor" in found["text"]
    assert found["local"] == [[], None]
    assert "stretto.explain takes what jax.jit(f).lower(...).compile() gives" in found["told"]
    assert found["hlo"] == "HloModule"


def test_without_one_there_is_no_plan() -> None:
    found = json.loads(scripts.passes(SCRIPT))
    assert found["predicted"] is None and "all-gather" in found["text"]


def test_what_another_platform_compiled_is_refused() -> None:
    script = """
    import jax, stretto
    try:
        stretto.explain(jax.jit(lambda x: x + 1).lower(1.0).compile())
    except TypeError as error:
        print(error)
    """
    assert "on the platform stretto, not" in scripts.passes(script, "cpu")
