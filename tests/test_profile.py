"""``STRETTO_PROFILE=1``: JAX programs that a wrong table leaves alone get a plan in the next job.

The table has compute take no time, so that nothing can be hidden behind it; what is measured takes as long as
it takes, and the modelled link is slow enough for that to pay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support import defects
from support.scripts import reports_of

from stretto.hlo_frontend.overlap import measured
from stretto.runtime.execution.profiling import MEASURED, WARM_UP

RUNS = WARM_UP + MEASURED + 3
TABLE = {
    "compute": {"flops_per_s": 1e18, "bytes_per_s": 1e18, "launch_s": 1e-7},
    "links": [{"axis_stride": 1, "group_size": 2, "latency_s": 1e-6, "bytes_per_s": 1e8}],
}
SCRIPT = f"""
import dataclasses, hashlib, json, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import stretto
from stretto.plugin.client import clients
from stretto.runtime.execution.negotiation import Proposal
from stretto.runtime.program.communicated import strict

def digest(program):
    return Proposal(program, strict(program), ()).fingerprint().hex()

devices = jax.devices()
mesh = Mesh(np.array(devices), ("x",))

def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ lax.all_gather(w, "x", tiled=True))
    return (x**2).sum()

over = NamedSharding(mesh, P("x"))
step = jax.jit(jax.shard_map(
    lambda ws, x: [w - 0.1 * g for w, g in zip(ws, jax.grad(loss)(ws, x))],
    mesh=mesh, in_specs=([P("x")] * 4, P("x")), out_specs=[P("x")] * 4))
put = lambda a: jax.make_array_from_callback(a.shape, over, lambda i: a[i])
rng = np.random.default_rng(0)
start = [put((rng.standard_normal((256, 256)) / 16).astype(np.float32)) for _ in range(4)]
x = put(rng.standard_normal((256, 256)).astype(np.float32))
(client,) = clients
found, programs = [], []
for run in range({RUNS}):
    if run == 4 and jax.process_index() == 1 and "clear" in sys.argv[1]:
        jax.clear_caches()
    found.append(step(start, x))
    if run in (0, {WARM_UP + MEASURED - 1}, {RUNS - 1}):
        jax.block_until_ready(found)
        programs.append([digest(p.program) for p in client.executor._loaded if p.program.collectives][-1])
bits = [hashlib.sha256(b"".join(np.asarray(s.data).tobytes() for w in ws for s in w.addressable_shards))
        .hexdigest() for ws in found]
profiles = [dataclasses.asdict(p) for p in stretto.profiles()]
report = {{"bits": bits, "programs": programs, "profiles": profiles}}
Path(sys.argv[1], f"{{jax.process_index()}}.json").write_text(json.dumps(report))
"""


def reports(
    folder: Path,
    ranks: int,
    cache: Path,
    rank_env: Mapping[int, Mapping[str, str]] | None = None,
    **environment: str,
) -> tuple[list[Any], str]:
    folder.mkdir()
    costs = folder / "table"
    costs.write_text(json.dumps(TABLE))
    env = {"STRETTO_COSTS": str(costs), "XDG_CACHE_HOME": str(cache), **environment}
    return reports_of(folder, SCRIPT, 2, ranks, rank_env, **env)


def one_program(found: list[Any]) -> str:
    """Check that all ranks ran one program throughout, and that rank 0 measured it; gives what it is."""
    for rank, report in enumerate(found):
        assert len(report["profiles"]) == (rank == 0)
        assert len(set(report["bits"])) == 1
        assert report["programs"] == [found[0]["programs"][0]] * 3
    (done,) = found[0]["profiles"]
    assert done["runs"] == MEASURED and done["segments"] > 0
    assert done["measured"] > 1.1 * done["predicted"]
    first: str = found[0]["programs"][0]
    return first


@pytest.mark.thorough
def test_in_one_process_for_the_next_one(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found, _ = reports(tmp_path / "first", 1, cache, STRETTO_PROFILE="1")
    old = one_program(found)
    again, _ = reports(tmp_path / "again", 1, cache, STRETTO_PROFILE="1")
    (new,) = set(again[0]["programs"])
    assert again[0]["profiles"] == [] and new != old
    assert again[0]["bits"] == found[0]["bits"]
    # Without the option what was kept is not read, and nothing is measured. With it every program is walked.
    off, _ = reports(tmp_path / "off", 1, cache, STRETTO_NATIVE="0")
    assert off[0]["profiles"] == [] and off[0]["programs"] == [old] * 3
    assert off[0]["bits"] == found[0]["bits"]


@pytest.mark.thorough
@pytest.mark.mpi
def test_under_mpiexec_even_if_a_rank_compiles_anew_meanwhile(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found, _ = reports(tmp_path / "clear", 2, cache, STRETTO_PROFILE="1")
    old = one_program(found)
    (kept,) = (cache / "stretto" / "costs").glob("*.times.json")
    again, _ = reports(tmp_path / "again", 2, cache, STRETTO_PROFILE="1")
    (new,) = {name for report in again for name in report["programs"]}
    assert new != old and not any(report["profiles"] for report in again)
    assert [report["bits"] for report in again] == [report["bits"] for report in found]
    kept.write_text(kept.read_text()[:-20])
    found, errors = reports(tmp_path / "damaged", 2, cache, STRETTO_PROFILE="1")
    assert one_program(found) == old
    assert errors.count("measured times are left out") == 1
    json.loads(kept.read_text())


@pytest.mark.thorough
@pytest.mark.mpi
def test_the_slower_engine_counts(tmp_path: Path) -> None:
    """The first rank with each engine measures; what is kept is the longer time of each instruction."""
    cache = tmp_path / "cache"
    slow = {"STRETTO_ENGINE": "support.defects:Slow", "PYTHONPATH": str(Path(__file__).parent)}
    found, _ = reports(tmp_path / "first", 2, cache, {1: slow}, STRETTO_PROFILE="1")
    assert [len(report["profiles"]) for report in found] == [1, 1]
    (kept,) = (cache / "stretto" / "costs").glob("*.times.json")
    (times,) = measured.read(kept.read_text()).values()
    ((done,), _) = (report["profiles"] for report in found)
    assert sum(times.seconds.values()) > done["segments"] * defects.PAUSE
    again, _ = reports(tmp_path / "again", 2, cache, {1: slow}, STRETTO_PROFILE="1")
    assert not any(report["profiles"] for report in again)
    assert len({name for report in again for name in report["programs"]}) == 1


def test_without_scheduling_nothing_is_measured(tmp_path: Path) -> None:
    env = {"STRETTO_PROFILE": "1", "STRETTO_OVERLAP": "0"}
    (found,), _ = reports(tmp_path / "off", 1, tmp_path / "cache", **env)
    assert found["profiles"] == [] and len(set(found["programs"])) == 1
    assert not (tmp_path / "cache").exists()
