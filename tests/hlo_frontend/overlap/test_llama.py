"""A training step of a llama-3-8B-shaped model on 8 x 8 devices, compiled by XLA."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from expansion import check_schedule

from stretto.hlo_frontend.graph import Module
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.hlo_frontend.overlap.export import to_json
from stretto.hlo_frontend.overlap.plan import plan_module
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.testing_replay import Replayed, replay_steps

DATA = Path(__file__).parent / "data"
NAMES = ("L8_unroll", "L32_unroll", "L32_scan")


@cache
def scheduled(name: str) -> tuple[Module, dict[str, Any], Replayed]:
    path = DATA / f"llama_manual_train_8x8_{name}.post_spmd.txt.gz"
    module = Module.parse(parse_hlo_text(gzip.decompress(path.read_bytes()).decode()))
    data = to_json(plan_module(module, CostTable.read(DATA / "costs_ib.json"), 64))
    return module, data, replay_steps(data["steps"])


@pytest.mark.parametrize("name", NAMES)
def test_exposed_time_is_near_the_floor_within_memory(name: str) -> None:
    _, data, replayed = scheduled(name)
    summary = data["summary"]
    assert replayed.seconds * 1e3 == pytest.approx(summary["predicted_ms"])
    assert replayed.exposed_seconds * 1e3 == pytest.approx(summary["exposed_ms"])
    assert replayed.exposed_seconds * 1e3 <= 1.05 * summary["exposed_floor_ms"]
    assert replayed.peak_bytes <= 1.1 * summary["unscheduled_peak_bytes"]
    busiest = max(summary["stream_ms"].values())
    assert summary["floor_ms"] >= max(busiest, summary["compute_ms"])
    # Merging lowers even what no order of the module's own collectives could reach.
    assert summary["predicted_ms"] < summary["unbucketed_floor_ms"]


@pytest.mark.parametrize("name", NAMES)
def test_every_collective_runs_once_an_iteration(name: str) -> None:
    _, data, _ = scheduled(name)
    layers = 8 if name == "L8_unroll" else 32
    # Gathers of 9 weights a layer forward and backward, 2 + 2 gathers and scatters of activations in each
    # direction, 9 gradients, 2 reductions of norms' gradients; and 15 at the ends of the model.
    assert data["summary"]["collectives"] == (1199 if layers == 32 else 311)


@pytest.mark.parametrize("name", NAMES)
def test_dependencies_are_kept(name: str) -> None:
    module, data, _ = scheduled(name)
    check_schedule(module, data["steps"])


def test_memory_is_not_filled_with_what_is_ready_early() -> None:
    """Forward, as XLA:CPU schedules it: all weights are converted before they are gathered, which could all
    happen at once, while gathers are what the step waits for and memory is short."""
    path = DATA / "llama_manual_fwd_8x8_L8_unroll.pre_scheduler.pb.gz"
    module = Module.parse(gzip.decompress(path.read_bytes()))
    data = to_json(plan_module(module, CostTable.read(DATA / "costs_ib.json"), 64))
    replayed, summary = replay_steps(data["steps"]), data["summary"]
    assert replayed.exposed_seconds * 1e3 <= 1.05 * summary["exposed_floor_ms"]
    assert replayed.peak_bytes <= 1.1 * summary["unscheduled_peak_bytes"]
    check_schedule(module, data["steps"])


def test_a_scan_over_layers_takes_no_longer_than_the_unrolled_layers() -> None:
    scanned = scheduled("L32_scan")[1]["summary"]
    unrolled = scheduled("L32_unroll")[1]["summary"]
    assert scanned["predicted_ms"] <= 1.05 * unrolled["predicted_ms"]
    assert scanned["exposed_ms"] <= 1.05 * unrolled["exposed_ms"]


def test_gathers_run_ahead_into_the_iteration_before_theirs() -> None:
    """In the forward scan the next layer's weights are on their way while this layer computes."""
    module, data, _ = scheduled("L32_scan")
    forward = next(i for i in module.entry.instructions if i.opcode == "while")
    inside = {i.name for computation in forward.called for i in computation.instructions}
    first_start: dict[int, int] = {}
    last_kernel: dict[int, int] = {}
    for position, step in enumerate(data["steps"]):
        if step["name"] in inside and step["kind"] == "compute":
            last_kernel[step["iteration"][0]] = position
        elif step["kind"] == "start" and step["op"] == "all-gather":
            for member, iteration in zip(step["members"], step["iterations"], strict=True):
                if member in inside:
                    first_start.setdefault(iteration[0], position)
    assert sorted(last_kernel) == list(range(32))
    assert all(first_start[i + 1] < last_kernel[i] for i in range(31))
