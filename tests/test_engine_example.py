"""The example engine of `docs/writing_an_engine.md`, installed as its user would and tried by `conform`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples/engine"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which it is installed."""
    folder = tmp_path_factory.mktemp("engine")
    source = folder / "source"  # building leaves files behind
    source.mkdir()
    for name in ("pyproject.toml", "reference_engine.py"):
        (source / name).write_bytes((EXAMPLE / name).read_bytes())
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    target = str(folder / "site")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", target, str(source)]
    subprocess.run(command, check=True, timeout=120)
    return {**os.environ, "PYTHONPATH": target}


def run(environment: dict[str, str], *arguments: str, cwd: Path | None = None) -> tuple[int, str]:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.quick("arguments3")
@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "protocol"],
        ["--only", "programs/partitioned"],
        pytest.param(["--only", "programs/model", "--ranks", "2"], marks=pytest.mark.mpi),
        pytest.param(["--only", "faults/raises", "--ranks", "2"], marks=pytest.mark.mpi),
    ],
)
def test_it_conforms(installed: dict[str, str], arguments: list[str]) -> None:
    code, said = run(installed, "stretto.cli", "conform", "reference", *arguments)
    assert code == 0 and "\nPASS" in "\n" + said, said


@pytest.mark.thorough
def test_cases_are_tests_of_pytest(installed: dict[str, str], tmp_path: Path) -> None:
    """Beside others, chosen by -k, skipped where something is absent."""
    (tmp_path / "test_own.py").write_text("def test_double():\n    assert 1 + 1 == 2\n")
    options = ["-p", "stretto.conformance", "--stretto-engine=reference", "-v", "-rs"]
    chosen = ["-k", "test_double or protocol/runs or types/f16 or types/s4 or matmul/both-both"]
    code, said = run(installed, "pytest", *options, *chosen, "-p", "no:cacheprovider", cwd=tmp_path)
    assert code == 0, said
    assert "engine reference has no s4" in said
    for line in (
        "test_own.py::test_double PASSED",
        "stretto::protocol/runs PASSED",
        "stretto::protocol/types/f16 PASSED",
        "stretto::protocol/types/s4 SKIPPED",
        "stretto::programs/matmul/both-both-both PASSED",
    ):
        assert line in said, said
    assert "4 passed, 1 skipped" in said
    code, said = run(
        installed,
        *("pytest", *options[:2], "--stretto-engine=nobody", "-k", "donation", "-q"),
        cwd=tmp_path,
    )
    assert code == 1 and "no engine 'nobody'" in said and "2 failed" in said, said


@pytest.mark.thorough
def test_without_being_installed(installed: dict[str, str]) -> None:
    """STRETTO_ENGINE names the factory."""
    environment = {**installed, "PYTHONPATH": str(EXAMPLE), "PYTHONDONTWRITEBYTECODE": "1"}
    given = ["conform", "reference_engine:create", "--only", "protocol/runs"]
    code, said = run(environment, "stretto.cli", *given)
    assert code == 0 and "1 PASS" in said, said
    given[1] = "reference_engine:nothing"
    code, said = run(environment, "stretto.cli", *given)
    assert code == 1 and "cannot be loaded from reference_engine:nothing" in said, said
