"""ci/gpu_steps.py: a step that fails or hangs costs the others nothing, and all are in the table."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "ci" / "gpu_steps.py"


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_steps", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_steps", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "REPORT", tmp_path / "report")
    return module


def test_no_step_spoils_the_next(
    steps: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left = tmp_path / "left"
    later = "import sys, time; time.sleep(4); open(sys.argv[1], 'w')"
    # What hangs has started another process.
    hangs = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]);"
        "print('hanging', flush=True); time.sleep(60)"
    )
    made = [
        steps.Step("fails", 20, (sys.executable, "-c", "print('a | b'); raise SystemExit(3)")),
        steps.Step("hangs", 1, (sys.executable, "-c", hangs, later, str(left))),
        steps.Step(
            "works",
            20,
            (sys.executable, "-c", "import os; print(os.environ['X'])"),
            (("X", "yes"),),
        ),
    ]
    monkeypatch.setattr(steps, "FAKE", made)
    monkeypatch.setattr(sys, "argv", ["gpu_steps.py", "--fake"])
    assert steps.main() == 1
    rows = [row.split(" | ") for row in (steps.REPORT / "table.md").read_text().splitlines()[4:]]
    assert [row[1] for row in rows] == ["exit code 3", "not over after 1 s", "ok"]
    assert [row[3] for row in rows] == ["a / b |", "hanging |", "yes |"]
    time.sleep(4)
    assert not left.exists()
    assert (steps.REPORT / "works.log").read_text() == "yes\n"


def test_steps_by_name(steps: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [steps.Step(name, 20, (sys.executable, "-c", f"print({name!r})")) for name in "ab"]
    monkeypatch.setattr(steps, "FAKE", made)
    monkeypatch.setattr(sys, "argv", ["gpu_steps.py", "--fake", "b"])
    assert steps.main() == 0
    assert not (steps.REPORT / "a.log").exists()
    monkeypatch.setattr(sys, "argv", ["gpu_steps.py", "--fake", "c"])
    with pytest.raises(SystemExit):
        steps.main()
