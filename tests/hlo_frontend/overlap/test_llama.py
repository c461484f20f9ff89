"""A training step of a llama-3-8B-shaped model on 8 x 8 devices, compiled by XLA."""

from __future__ import annotations

import gzip
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from expansion import check_schedule
from overlap_support import judged

from stretto.hlo_frontend.compile import compile_hlo, explained_hlo
from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.hlo_frontend.overlap.export import to_json
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.runtime.program import Loop, Start
from stretto.testing_replay import Replayed

DATA = Path(__file__).parent / "data"
# Milliseconds as first planned, by what may run; a plan must not get worse.
KNOWN = {"L8_unroll": 41.0, "L32_unroll": 130.7, "L32_scan": 136.8}
NAMES = tuple(KNOWN)
COSTS = CostTable.read(DATA / "costs_ib.json")


def explained(name: str) -> tuple[Module, dict[str, Any], Replayed]:
    data = gzip.decompress((DATA / name).read_bytes())
    serialized = parse_hlo_text(data.decode()) if ".txt" in name else data
    found = to_json(explained_hlo(serialized, 1, 64, OverlapPolicy(COSTS)))
    return Module.parse(serialized), found, judged(found)


@cache
def scheduled(name: str) -> tuple[Module, dict[str, Any], Replayed]:
    return explained(f"llama_manual_train_8x8_{name}.post_spmd.txt.gz")


def starts(data: dict[str, Any]) -> Counter[str]:
    """How often each collective is started, in all iterations."""
    found: Counter[str] = Counter()
    for step in data["steps"]:
        if step["kind"] == "start":
            found.update(step["members"])
        for block in step.get("blocks", ()):
            times = step["trips"] if block["block"] == "body" else 0
            found += Counter({name: n * times for name, n in starts(block).items()})
    return found


@pytest.mark.quick("L32_scan")
@pytest.mark.parametrize("name", NAMES)
def test_time_is_near_the_floor_within_memory(name: str) -> None:
    _, data, replayed = scheduled(name)
    summary = data["summary"]
    assert summary["predicted_ms"] <= KNOWN[name]
    assert summary["predicted_ms"] <= 1.12 * summary["floor_ms"]
    assert replayed.peak_bytes <= 1.1 * summary["unscheduled_peak_bytes"]
    busiest = max(summary["stream_ms"].values())
    # Merging saves latencies, of which the busiest stream has most.
    assert summary["compute_ms"] <= summary["floor_ms"]
    assert 0.9 * busiest <= summary["floor_ms"]


@pytest.mark.parametrize("name", NAMES)
def test_every_collective_runs_once_an_iteration(name: str) -> None:
    _, data, _ = scheduled(name)
    layers = 8 if name == "L8_unroll" else 32
    # Gathers of 9 weights a layer forward and backward, 2 + 2 gathers and scatters of activations in each
    # direction, 9 gradients, 2 reductions of norms' gradients; and 15 at the ends of the model.
    expected = 1199 if layers == 32 else 311
    assert data["summary"]["collectives"] == sum(starts(data).values()) == expected


def test_loops_stay_loops_with_iterations_moved_out() -> None:
    """Both scans run fewer times than the layers there are, and each tells the steps of its body."""
    _, data, _ = scheduled("L32_scan")
    loops = [step for step in data["steps"] if "blocks" in step]
    moved = [bool(r["early"]) + bool(r["late"]) for r in data["summary"]["loops"]]
    assert len(loops) == 2 and sum(moved) > 0
    assert [step["trips"] for step in loops] == [32 - around for around in moved]
    assert all(any(s["kind"] == "start" for s in step["blocks"][1]["steps"]) for step in loops)
    crossing = [s for step in loops for s in step["blocks"][1]["steps"] if s.get("crosses")]
    assert {s["kind"] for s in crossing} == {"start", "wait"}


@pytest.mark.parametrize("name", ["L8_unroll", "L32_unroll"])
def test_dependencies_are_kept(name: str) -> None:
    module, data, _ = scheduled(name)
    check_schedule(module, data["steps"])


def test_memory_is_not_filled_with_what_is_ready_early() -> None:
    """Forward, as XLA:CPU schedules it: all weights are converted before they are gathered, which could all
    happen at once, while gathers are what the step waits for and memory is short."""
    module, data, replayed = explained("llama_manual_fwd_8x8_L8_unroll.pre_scheduler.pb.gz")
    assert data["summary"]["predicted_ms"] <= 32.9
    assert replayed.peak_bytes <= 1.1 * data["summary"]["unscheduled_peak_bytes"]
    check_schedule(module, data["steps"])


def test_a_scan_over_layers_takes_no_longer_than_the_unrolled_layers() -> None:
    scanned = scheduled("L32_scan")[1]["summary"]
    unrolled = scheduled("L32_unroll")[1]["summary"]
    assert scanned["predicted_ms"] <= 1.05 * unrolled["predicted_ms"]
    assert scanned["exposed_ms"] <= 1.05 * unrolled["exposed_ms"]


@pytest.mark.quick("L8_unroll")
@pytest.mark.parametrize("name", NAMES)
def test_what_is_explained_is_what_a_job_runs(name: str) -> None:
    """The program that is lowered with the same table starts the same collectives, and predicts the same."""
    module, data, _ = scheduled(name)
    compiled = compile_hlo(module.proto.SerializeToString(), 1, 64, overlap=OverlapPolicy(COSTS))
    program = compiled.program
    assert program.predicted is not None
    assert program.predicted.seconds * 1e3 == pytest.approx(data["summary"]["predicted_ms"])
    assert program.predicted.exposed * 1e3 == pytest.approx(data["summary"]["exposed_ms"], rel=0.01)
    started = [i.collective for i in program.body.instructions if isinstance(i, Start)]
    # Of copies of one collective, in iterations that stand around a loop, a bucket has the name once.
    told = ["+".join(dict.fromkeys(s["members"])) for s in data["steps"] if s["kind"] == "start"]
    assert [program.collectives[c].name for c in started] == told
    loops = [i for i in program.body.instructions if isinstance(i, Loop)]
    assert [i.trip_count for i in loops] == [s["trips"] for s in data["steps"] if "blocks" in s]
