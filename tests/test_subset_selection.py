"""`examples/subset_selection.py`: its bounds against all sets there are, its set against greedy's; on ranks.

Values are computed here from the files, by the objective's definition.
"""

from __future__ import annotations

import heapq
import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.mpi import run_ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "subset_selection.py"
ALPHA = 0.9


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        return {n: importlib.import_module(n) for n in ("subset_selection", "nearest_neighbours")}
    finally:
        sys.path.remove(str(EXAMPLE.parent))


class Reference:
    """A graph, read as a whole."""

    def __init__(self, folder: Path, alpha: float = ALPHA) -> None:
        def exact(name: str, factor: float) -> np.ndarray:
            values = np.load(folder / f"{name}.npy").astype(np.float64)
            return np.rint(values * factor * 2.0**16) / 2.0**16

        self.gain, self.loss = exact("utilities", alpha), exact("similarities", 1 - alpha)
        self.offsets, self.near = (
            np.load(folder / "offsets.npy"),
            np.load(folder / "neighbours.npy"),
        )
        self.rows = np.repeat(np.arange(len(self.gain)), np.diff(self.offsets))

    def value(self, taken: np.ndarray) -> float:
        both = taken[self.rows] & taken[self.near]
        return float(self.gain[taken].sum() - self.loss[both].sum() / 2)

    def greedy(self, k: int) -> np.ndarray:
        """The set of the centralized greedy algorithm."""
        gain, taken = self.gain.copy(), np.zeros(len(self.gain), bool)
        heap = [(-g, v) for v, g in enumerate(gain)]
        heapq.heapify(heap)
        while taken.sum() < k:
            negative, v = heapq.heappop(heap)
            if taken[v] or -negative != gain[v]:
                continue
            taken[v] = True
            for e in range(self.offsets[v], self.offsets[v + 1]):
                gain[self.near[e]] -= self.loss[e]
                heapq.heappush(heap, (-gain[self.near[e]], self.near[e]))
        return taken


def test_an_edge_stands_in_the_rows_of_both_its_points(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    graph = modules["nearest_neighbours"]
    graph.make(tmp_path, 300, 4)
    found = {}
    for rows, near, similarity in graph.Graph(tmp_path).windows(0, 300):
        found |= {(int(v), int(w)): s for v, w, s in zip(rows, near, similarity, strict=True)}
    assert all(found[w, v] == s and v != w and 0 < s < 1 for (v, w), s in found.items())
    assert len(found) == graph.Graph(tmp_path).edges_between(0, 300)
    degrees = np.bincount([v for v, _ in found], minlength=300)
    assert degrees.min() >= 4


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2))
def test_all_best_sets_have_what_bounds_take_and_lack_what_they_discard(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    selection, points, k = modules["subset_selection"], 14, 4
    monkeypatch.setattr(selection, "CHUNK", 8)  # edges come in several chunks
    modules["nearest_neighbours"].make(tmp_path, points, 3, seed)
    mesh = Mesh(np.array(jax.devices("stretto")), ("points",))
    part = selection.placed(selection.Graph(tmp_path), mesh, 0.85)
    bound = selection.over(mesh, selection.bounded(points, k), 0, (P("points"), P(), P(), P()))
    status, left, undecided, _ = map(np.asarray, bound(part))
    status = status[:points]
    taken = set(np.flatnonzero(status == selection.TAKEN))
    discarded = set(np.flatnonzero(status == selection.DISCARDED))
    assert (k - left, points - undecided) == (len(taken), len(taken) + len(discarded))
    reference = Reference(tmp_path, 0.85)
    values = {}
    for chosen in itertools.combinations(range(points), k):
        mask = np.zeros(points, bool)
        mask[list(chosen)] = True
        values[chosen] = reference.value(mask)
    best = max(values.values())
    for chosen, value in values.items():
        if value == best:
            assert taken <= set(chosen) and not discarded & set(chosen)
    assert taken | discarded  # it decided something


def chosen_by(folder: Path, platform: str, devices: int, *arguments: str) -> tuple[bytes, dict]:
    """What one process takes, and its report."""
    env = {**os.environ, "JAX_PLATFORMS": platform, "STRETTO_LOCAL_DEVICES": str(devices)}
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments, str(folder)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return (folder / "taken").read_bytes(), json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def small(modules: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    modules["nearest_neighbours"].make(folder, 2001)
    return folder


@pytest.fixture(scope="module")
def alone(small: Path) -> bytes:
    return chosen_by(small, "stretto", 1, "--rounds", "2")[0]


@pytest.mark.thorough
@pytest.mark.mpi
def test_four_ranks_take_what_one_process_takes(small: Path, alone: bytes) -> None:
    env = {"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": "1"}
    done = run_ranks(4, [str(EXAMPLE), "--rounds", "2", str(small)], env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (small / "taken").read_bytes() == alone
    assert sum(alone) == 200 and len(alone) == 2001


@pytest.mark.thorough
def test_so_do_three_devices_of_jax_cpu_backend(small: Path, alone: bytes) -> None:
    assert chosen_by(small, "cpu", 3, "--rounds", "2")[0] == alone


@pytest.mark.thorough
def test_99_percent_of_the_greedy_value(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    modules["nearest_neighbours"].make(tmp_path, 10_000)
    raw, report = chosen_by(tmp_path, "stretto", 4)
    taken, reference = np.frombuffer(raw, bool), Reference(tmp_path)
    assert taken.sum() == report["taken"] == 1000
    assert reference.value(taken) == pytest.approx(report["value"], abs=1e-9)
    assert reference.value(taken) >= 0.99 * reference.value(reference.greedy(1000))
    assert report["bounds_took"] > 0 and report["bounds_discarded"] > 5000


def test_more_points_than_there_are(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    modules["nearest_neighbours"].make(tmp_path, 20, 2)
    with pytest.raises(SystemExit, match="no 21 of 20 points"):
        modules["subset_selection"].main([str(tmp_path), "--k", "21"])
