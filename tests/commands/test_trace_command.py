"""`stretto trace DIR`: measured times by hand, counts as `stretto run` gives them, the trace and the page."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from support.handmade import F32, block, permute, program, segment
from support.mpi import run_ranks

from stretto.cli import main
from stretto.commands.trace_totals import counts
from stretto.runtime.program import Prediction, Program, Run, Start, Wait
from stretto.runtime.recording.statistics import Profiled
from stretto.runtime.recording.trace_events import measure, union
from stretto.runtime.recording.trace_file import (
    ALL_ACTIVE,
    SET_UNIT,
    Header,
    Kind,
    beginning,
    chunk,
    file_name,
    program_chunk,
    read,
)
from stretto.runtime.recording.trace_runs import runs_of

NAN = float("nan")
SHIFT = permute((0, 1), (1, 0), name="shift")
PROFILED = Profiled("step", 5, 1, 0.004, 0.003)


def written(
    folder: Path,
    rank: int = 0,
    size: int = 1,
    offset: float = 0.0,
    job: str = "",
    skipped: tuple[int, ...] = (0, 1),
) -> Path:
    """A rank with one device of two: a segment for 2 s, one for 3 s, and two calls of a permute, the second
    of which skips these pairs."""
    body = block((0,), [Run(0, (0,), (1,)), Start(0, (1,), (2,), 0, 0), Wait(0)], (2,))
    loaded: Program = program(
        [F32] * 3, body, devices=2, segments=[segment("work")], collectives=[SHIFT], name="step"
    )
    header = Header(rank, size, "host", 7, 1, "null", offset, 0.0, job=job)
    events = [
        (Kind.SEGMENT, 0, 0, 0, 0.0, 2.0, 0),
        # Handed over while the first still runs; donated, so that nobody saw its end.
        (Kind.SEGMENT, 0, 0, 0, 1.0, NAN, 0),
        (Kind.SEGMENT, 0, 0, 0, 1.5, 5.0, 0),
        (Kind.LEFT_OUT, 0, 0, 0, 6.0, 6.0, 0),
        (Kind.COLLECTIVE, 0, 0, 0, 1.0, 3.0, ALL_ACTIVE),
        (Kind.COLLECTIVE, 0, 0, 0, 4.0, 8.0, ALL_ACTIVE + SET_UNIT),
        (Kind.AWAITED, 0, 0, 0, 6.0, 8.0, 5.5),
        (Kind.PROGRAM, 0, 1, 0, 0.0, 8.5, 0),
        (Kind.PROGRAM, 0, 2, 1, 8.0, 9.0, 0),  # called without a walk, beside one
    ]
    folder.mkdir(exist_ok=True)
    path = folder / file_name(rank)
    path.write_bytes(
        beginning(header)
        + program_chunk(loaded, ((rank, 0),))
        + chunk(b"S", json.dumps(skipped).encode())
        + chunk(b"M", json.dumps(asdict(PROFILED)).encode())
        + chunk(b"E", np.array(events, "<f8").tobytes())
    )
    return path


def test_times_by_hand(tmp_path: Path) -> None:
    found = measure(read(written(tmp_path)))
    assert runs_of(found, 0) == []  # three segments in two runs
    assert union(found.compute) == [(0.0, 5.0)]
    assert found.times() == {
        "wall_ms": 8000.0,
        "compute_ms": 5000.0,
        "communication_ms": 6000.0,
        "exposed_ms": 3000.0,
        "overlapped_ms": 3000.0,
    }
    assert [t.exposed for t in found.transfers] == [0.0, 3.0]
    # The device computes one segment at a time; the end that nobody saw is the next one's.
    assert [(b, e) for *_, b, e in found.segments] == [(0.0, 2.0), (2.0, 5.0), (5.0, 5.0)]
    assert counts(found) == {
        "collectives": {"collective-permute": 2},
        "messages": 1,
        "bytes": 16,
        "skipped": 1,
        "arithmetic": 0,
        "skipped_runs": 1,
        "skipped_arithmetic": 0,
        "order": ["shift"],
    }


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "t"
    written(folder, 0, 2)
    written(folder, 1, 2, offset=100.0)
    link = {"axis_stride": 1, "group_size": 2, "latency_s": 0.5, "bytes_per_s": 32.0}
    compute = {"flops_per_s": 1.0, "bytes_per_s": 1.0, "launch_s": 0.0}
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"compute": compute, "links": [link]}))
    assert main(["trace", str(folder), "--json", "--costs", str(costs)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["messages"], found["skipped"], found["bytes"]) == (2, 2, 32)
    assert (found["exposed_ms"], found["overlapped_ms"]) == (3000.0, 3000.0)
    assert [r["rank"] for r in found["ranks"]] == [0, 1]
    (entry,) = found["ledger"]
    assert (entry["calls"], entry["seconds"], entry["predicted"]) == (4, 3.0, 1.0)
    assert (entry["exposed"], entry["exposed_total"], entry["skipped"]) == (1.5, 3.0, 2)
    assert found["profiles"] == [asdict(PROFILED)]
    assert list(folder.glob("trace.*")) == []

    assert main(["trace", str(folder), "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "collective-permute %shift of step" in printed
    assert (
        "step: 1 segments measured in 5 runs; a run should take 3.000 ms by that, 4.000" in printed
    )
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for track in names:
        of_track = [e for e in events if (e["pid"], e["tid"]) == track and e["ph"] != "M"]
        assert [e["ts"] for e in of_track] == sorted(e["ts"] for e in of_track)
    assert set(names.values()) == {"programs", "calls", "device 0", "device 1", "stream 0"}
    walked = [
        [e["ts"] for e in events if e["tid"] == tid and e["name"] == "step"] for tid in (0, 1)
    ]
    assert walked == [[0.0, 100e6], [8e6, 108e6]]
    skipped = [(e["pid"], e["ts"], e["name"]) for e in events if e["ph"] == "i"]
    # The second call of each rank moved nothing; rank 1's clock is brought to rank 0's.
    assert (0, 4e6, "skipped shift") in skipped and (1, 104e6, "skipped shift") in skipped
    moved = [e for e in events if e.get("cat") == "collective"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in moved] == [(0, 1e6, 2e6), (1, 101e6, 2e6)]

    page = (tmp_path / "out.html").read_text()
    assert not re.search(r"(src|href)\s*=|https?:|@import|url\(|fetch\(", page)
    assert "<td>shift</td><td>collective-permute</td>" in page
    drawn = json.loads(page[page.index("const tracks=") + 13 : page.index(";\nconst canvas")])
    assert [m[:3] for t in drawn if t["name"] == "rank 1 stream 0" for m in t["marks"]] == [
        [101e6, 2e6, "shift"],
        [104e6, -1.0, "skipped shift"],
    ]


def test_what_only_arrives_is_drawn_with_its_time(tmp_path: Path) -> None:
    """Rank 0's own pair is skipped, that of rank 1 is not: rank 0 waits for what comes."""
    written(tmp_path / "t", 0, 2, skipped=(0,))
    written(tmp_path / "t", 1, 2, skipped=(0,))
    assert main(["trace", str(tmp_path / "t"), "-o", str(tmp_path / "x.json")]) == 0
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    moved = [e for e in events if e.get("cat") == "collective" and e["pid"] == 0]
    assert [(e["ts"], e["dur"]) for e in moved] == [(1e6, 2e6), (4e6, 4e6)]
    assert [e["pid"] for e in events if e["name"] == "skipped shift"] == [0]


def test_one_file_where_its_ending_is_named(tmp_path: Path) -> None:
    written(tmp_path / "t")
    assert main(["trace", str(tmp_path / "t"), "-o", str(tmp_path / "x.html")]) == 0
    assert [p.name for p in tmp_path.glob("x*")] == ["x.html"]


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "t"
    path = written(folder, 1, 3)
    path.write_bytes(path.read_bytes()[:-8])
    assert main(["trace", str(folder), "--json"]) == 0
    captured = capsys.readouterr()
    (warning,) = json.loads(captured.out)["warnings"]
    assert "ends in the middle" in warning and "lacks ranks 0, 2 of 3" in warning
    assert "stretto trace: warning: " in captured.err


def test_folders_that_hold_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path / "none")]) == 2
    assert "is no folder" in capsys.readouterr().err
    assert main(["trace", str(tmp_path)]) == 2
    assert f"run the program with STRETTO_TRACE={tmp_path}" in capsys.readouterr().err
    written(tmp_path, 0, 2)
    written(tmp_path, 1, 3)
    assert main(["trace", str(tmp_path)]) == 2
    assert "several jobs" in capsys.readouterr().err
    written(tmp_path, 1, 2, job="another")
    assert main(["trace", str(tmp_path)]) == 2
    assert "several jobs" in capsys.readouterr().err
    written(tmp_path, 0, 1).write_bytes(b"stretto trace 7\n{}\n")
    assert main(["trace", str(tmp_path)]) == 2
    assert "of version 7" in capsys.readouterr().err


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
def f(x):
    def body(x, _):
        return jax.lax.ppermute(jnp.tanh(x), "x", [(0, 1), (1, 2), (2, 3)]), None
    x, _ = jax.lax.scan(body, x, length=5)
    return jax.lax.psum(x, "x")
g = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P()))
for _ in range(3):
    g(jnp.ones((4, 8))).block_until_ready()
"""


def test_what_was_predicted_beside_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = block((0,), [Run(0, (0,), (1,)), Start(0, (1,), (2,), 0, 0), Wait(0)], (2,))
    step = replace(
        program([F32] * 3, body, devices=2, segments=[segment("work")], collectives=[SHIFT]),
        predicted=Prediction(4.0, 1.0, 0.25),
    )
    for rank, slower in ((0, 0.0), (1, 0.5)):
        rows = [
            row
            for at in (0.0, 10.0)
            for row in (
                (Kind.PROGRAM, 0, 1, 0, at, at, 0),
                (Kind.SEGMENT, 0, 0, 0, at, at + 2.0, 0),
                (Kind.COLLECTIVE, 0, 0, 0, at + 1.0, at + 3.0 + slower, ALL_ACTIVE),
            )
        ]
        (tmp_path / file_name(rank)).write_bytes(
            beginning(Header(rank, 2, "host", 7, 1, "null", 0.0, 0.0))
            + program_chunk(step, ((rank, 0),))
            + chunk(b"E", np.array(rows, "<f8").tobytes())
        )
    assert main(["trace", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["programs"] == [
        {
            "program": "test",
            "runs": 4,
            "predicted_ms": 4000.0,
            "predicted_exposed_ms": 1000.0,
            "predicted_held_ms": 250.0,
            "measured_ms": 3250.0,
            "measured_exposed_ms": 1250.0,
        }
    ]
    assert main(["trace", str(tmp_path)]) == 0
    assert (
        "test: 4 runs, predicted 4000.000 ms (exposed 1000.000 ms, held 250.000 ms), measured "
        "3250.000 ms (exposed 1250.000 ms)"
    ) in capsys.readouterr().out


@pytest.mark.mpi
def test_a_job_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "t"
    env = {
        "JAX_PLATFORMS": "stretto",
        "STRETTO_LOCAL_DEVICES": "2",
        "STRETTO_TRACE": str(folder),
        "STRETTO_DERIVE_VALID_ITERATIONS": "0",
    }
    done = run_ranks(2, ["-c", SCRIPT], env=env)
    assert done.returncode == 0, done.stderr
    assert main(["trace", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Each rank, three times: five permutes of f32[1,8], with three messages in all, and a reduction.
    assert found["collectives"] == {"all-reduce": 6, "collective-permute": 30}
    assert (found["messages"], found["skipped"]) == (3 * 5 * 3, 0)
    assert found["bytes"] == 32 * (3 * 5 * 3 + 3 * 4)
    assert len(found["ledger"]) == 2 and found["warnings"] == []
    for rank in found["ranks"]:
        whole = rank["exposed_ms"] + rank["overlapped_ms"]
        assert whole == pytest.approx(rank["communication_ms"])
        assert 0 < rank["communication_ms"] <= rank["wall_ms"]
    ranks = [measure(read(folder / file_name(rank))) for rank in (0, 1)]
    # The reductions of one run meet: on one clock each begins before the other ends.
    first, second = ([t for t in r.transfers if not t.collective.pairs] for r in ranks)
    assert len(first) == len(second) == 3
    slack = 1e-3  # what round trips leave open
    assert all(
        a.begin < b.end + slack and b.begin < a.end + slack
        for a, b in zip(first, second, strict=True)
    )
    assert np.isfinite([t.exposed for r in ranks for t in r.transfers]).all()
