"""`stretto bench --calibrate`: machines whose costs are known, and the table that is written and kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.mpi import run_ranks

from stretto.cli import main
from stretto.collectives.ops import Collective, Kind
from stretto.commands import bench, calibration
from stretto.commands.beside import LEAST, LONGER, measure_busy
from stretto.hlo_frontend.overlap.costs import CostTable
from stretto.runtime.job.world import World
from stretto.runtime.options import Options
from stretto.runtime.program import Segment

LATENCY, RATE = 1e-3, 1e9


def test_spans_of_a_mesh_by_hand() -> None:
    assert list(calibration.spans(8)) == [(1, 2), (2, 2), (4, 2), (1, 4), (2, 4), (1, 8)]
    assert list(calibration.spans(6)) == [(1, 2), (3, 2), (1, 3), (2, 3), (1, 6)]
    assert list(calibration.spans(1)) == []
    assert calibration.groups_of(8, 2, 2) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert calibration.groups_of(6, 1, 3) == ((0, 1, 2), (3, 4, 5))


class Machine:
    """A clock, links and an engine that take the time they should."""

    num_devices, name = 4, "exact"

    def __init__(self) -> None:
        self.now = 0.0
        self.computed = 0.0  # when all that was handed over will have run
        self.flops, self.bytes = 1e12, 1e10
        self.largest = (0, 0)  # side of a matrix, elements of a vector

    def create_communicator(self, comm: None, stream: int) -> Any:
        def bind(collective: Collective, owner: Mapping[int, int]) -> Any:
            (size,) = {len(group) for group in collective.groups}
            given, taken = collective.operands[0].nbytes, collective.results[0].nbytes
            wire = {
                Kind.ALL_GATHER: taken * (size - 1) / size,
                Kind.REDUCE_SCATTER: given * (size - 1) / size,
                Kind.ALL_REDUCE: 2 * given * (size - 1) / size,
            }[collective.kind]

            def run(operands: Mapping[int, Any]) -> None:
                assert set(operands) == {0, 1, 2, 3} == set(owner)
                self.now += LATENCY + wire / RATE

            return SimpleNamespace(run=run)

        return SimpleNamespace(bind=bind, close=lambda: None)

    def compile(self, segment: Segment, *, name: str) -> Any:
        size = segment.inputs[0].nbytes

        def run(ordinal: int, inputs: list[Any]) -> list[Any]:
            if ordinal == 0:  # the devices compute beside each other
                product, first = b"dot_general" in segment.module, segment.inputs[0].shape[0]
                seconds = 2 * first**3 / self.flops if product else 3 * size / self.bytes
                side, elements = self.largest
                self.largest = (
                    (max(side, first), elements) if product else (side, max(elements, first))
                )
                self.computed = max(self.computed, self.now) + 1e-4 + seconds
            return inputs[:1]

        return SimpleNamespace(run=run)

    def put(self, host: np.ndarray, type: Any, ordinal: int) -> np.ndarray:
        return host

    def block(self, array: Any) -> None:
        self.now = max(self.now, self.computed)


class Beside:
    """A product takes a millisecond; a pair of collectives ten, of which ``busy`` is the products'."""

    busy = 0.0

    def __init__(self, world: Any, engine: Any, segment: Any, collectives: Any) -> None:
        assert [c.kind for c in collectives] == [Kind.ALL_GATHER, Kind.REDUCE_SCATTER]
        self.made: list[tuple[int, int]] = []

    def __call__(self, products: int, calls: int) -> float:
        self.made.append((products, calls))
        computing, moving = 1e-3 * products, 1e-2 * calls
        beside = min(moving, computing / (1.0 - self.busy)) if self.busy < 1.0 else moving
        return max(computing + self.busy * beside, moving)

    def close(self) -> None:
        pass


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(calibration, "perf_counter", lambda: made.now)
    monkeypatch.setattr(calibration, "create_communicator", made.create_communicator)
    monkeypatch.setattr(calibration, "Beside", Beside)
    return made


def test_a_known_machine_is_measured_as_it_is(machine: Machine) -> None:
    table = calibration.calibrate(World(Options(local_devices=4)), machine, rounds=3)  # type: ignore[arg-type]
    costs = CostTable.from_json(table)
    assert [(c.axis_stride, c.group_size) for c in costs.links] == [(1, 2), (2, 2), (1, 4)]
    for link in costs.links:
        assert link.latency_s == pytest.approx(LATENCY, rel=1e-2)
        assert link.bytes_per_s == pytest.approx(RATE, rel=1e-2)
    assert costs.compute.flops_per_s == pytest.approx(1e12, rel=1e-2)
    assert costs.compute.bytes_per_s == pytest.approx(1e10, rel=1e-2)
    assert costs.compute.launch_s == pytest.approx(1e-4, rel=1e-2)


def test_operands_of_a_fast_machine_become_larger(machine: Machine) -> None:
    """A GPU multiplies small matrices in less time than it takes to ask for it."""
    machine.flops, machine.bytes = 5e14, 3e12
    table = calibration.calibrate(World(Options(local_devices=4)), machine, rounds=3)  # type: ignore[arg-type]
    assert table["compute"]["flops_per_s"] == pytest.approx(5e14, rel=1e-2)
    assert table["compute"]["bytes_per_s"] == pytest.approx(3e12, rel=1e-2)
    assert machine.largest == (8192, 1 << 26)


@pytest.mark.parametrize("busy", [0.0, 0.25, 1.0])
def test_how_busy_a_link_keeps_the_cores_is_measured(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, busy: float
) -> None:
    monkeypatch.setattr(Beside, "busy", busy)
    table = calibration.calibrate(World(Options(local_devices=4)), machine, rounds=3)  # type: ignore[arg-type]
    for link in CostTable.from_json(table).links:
        assert link.busy == pytest.approx(busy, abs=0.01)


def test_products_last_longer_than_the_collectives_beside_them() -> None:
    kinds = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    beside = Beside(None, None, None, [calibration.collective(k, ((0, 1),), 8) for k in kinds])
    assert measure_busy(beside, 3) == pytest.approx(0.0, abs=0.01)
    products, calls = beside.made[-1]
    assert calls * 1e-2 == pytest.approx(LEAST)
    assert products * 1e-3 == pytest.approx(LONGER * LEAST, abs=1e-3)
    assert beside.made[-2] == (products, 0)  # in turns


def test_an_engine_without_a_clock(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "bootstrap", lambda: World(Options(engine="null")))
    assert main(["bench", "--calibrate"]) == 1
    assert "engine null computes in no time" in capsys.readouterr().err


def test_what_is_to_be_done_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench"])
    assert "--calibrate" in capsys.readouterr().err
    assert main(["bench", "--calibrate", "--rounds", "0"]) == 2


@pytest.mark.thorough
@pytest.mark.mpi
def test_jobs_on_the_same_machines_find_the_table(tmp_path: Path) -> None:
    out = tmp_path / "new" / "costs.json"
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "STRETTO_LOCAL_DEVICES": "2"}
    command = ["-m", "stretto.cli", "bench", "--calibrate", "--rounds", "1", "--json"]
    done = run_ranks(2, [*command, "-o", str(out)], env=env)
    assert done.returncode == 0, done.stderr
    table = json.loads(out.read_text())
    assert json.loads(done.stdout) == table
    spans = [(c.axis_stride, c.group_size) for c in CostTable.from_json(table).links]
    assert spans == [(1, 2), (2, 2), (1, 4)]
    script = (
        "from stretto.runtime.job.world import bootstrap; print(bootstrap().costs.text.strip())"
    )
    found = run_ranks(2, ["-c", f"{script}"], env=env)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count('"axis_stride": 1') == 2 * 2
