"""The judge of JAX's own tests: scores, misses, accepted failures, and the lists of those."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "ci"))

from jax_suite_runner import __main__ as command  # noqa: E402
from jax_suite_runner import environment, judge, selection  # noqa: E402
from jax_suite_runner.results import CRASHED, FAILED, PASSED, SKIPPED, FileResult, Outcome  # noqa: E402


def result(**outcomes: str) -> FileResult:
    tests = {f"Test::{name}": Outcome(outcome) for name, outcome in outcomes.items()}
    return FileResult(tests, seconds=2.0, processor_seconds=4.0)


CPU = result(a=PASSED, b=PASSED, c=PASSED, d=FAILED, e=SKIPPED)


def test_only_what_passes_on_cpu_counts() -> None:
    verdict = judge.Verdict(
        "x_test", CPU, result(a=PASSED, b=FAILED, c=SKIPPED, d=FAILED, e=PASSED)
    )
    assert verdict.scored == (1, 3)
    assert verdict.missed == ["Test::b", "Test::c"]


def test_a_crash_is_a_miss_whatever_cpu_did() -> None:
    verdict = judge.Verdict("x_test", CPU, result(a=PASSED, b=PASSED, c=PASSED, d=CRASHED))
    assert verdict.scored == (3, 3)
    assert verdict.unexpected == ["Test::d"]


@pytest.mark.parametrize(
    ("known", "good"),
    [
        ({}, False),
        ({"Test::b": "why", "Test::c": "why"}, True),
        ({"Test::b": "why", "Test::c": "why", "Test::a": "passes"}, False),
    ],
)
def test_misses_are_to_be_accepted_and_accepted_ones_are_to_miss(
    known: dict[str, str], good: bool
) -> None:
    missing = result(a=PASSED, b=FAILED, c=SKIPPED)
    text, found = judge.report([judge.Verdict("x_test", CPU, missing, known)])
    assert found is good
    assert "1 of 3 tests that pass on CPU pass: 33.33%" in text


def test_what_passes_on_stretto_is_taken_to_pass_on_cpu() -> None:
    found = result(a=PASSED, b=FAILED, c=FAILED, d=SKIPPED)
    cpu = judge.completed(result(b=PASSED, c=FAILED, d=SKIPPED), found)
    text, good = judge.report([judge.Verdict("x_test", cpu, found)])
    assert not good
    assert "1 of 2 tests that pass on CPU pass" in text
    assert "x_test  Test::b" in text
    assert "times" not in text


def test_a_run_of_nothing_is_not_good() -> None:
    assert judge.report([judge.Verdict("x_test", FileResult(), FileResult())])[1] is False


def test_both_kinds_of_seconds_are_compared() -> None:
    slow = FileResult(CPU.tests, seconds=5.0, processor_seconds=6.0)
    text, _ = judge.report([judge.Verdict("x_test", CPU, slow)])
    assert "2.50 times the CPU backend's seconds, 1.50 times its processor seconds" in text


def test_seconds_of_files_that_ran_on_stretto_alone_are_not_compared() -> None:
    found = FileResult(CPU.tests, seconds=5.0, processor_seconds=6.0)
    alone = judge.Verdict("y_test", judge.completed(FileResult(), found), found)
    text, _ = judge.report([judge.Verdict("x_test", CPU, found), alone])
    assert "2.50 times the CPU backend's seconds, 1.50 times its processor seconds" in text


def test_results_are_kept_whole(tmp_path: Path) -> None:
    CPU.save(tmp_path / "folder/x.json")
    assert FileResult.load(tmp_path / "folder/x.json") == CPU


@pytest.mark.parametrize(("outcome", "runs"), [(PASSED, 1), (FAILED, 1), (CRASHED, 2)])
def test_what_crashed_on_cpu_is_run_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, runs: int
) -> None:
    (tmp_path / "x_test.py").touch()
    env = environment.Environment("1.2.3", tmp_path / "python", tmp_path, tmp_path)
    ran = []

    def run(_env: object, _selection: object, platform: str, *_: object) -> FileResult:
        ran.append(platform)
        return result(a=outcome)

    monkeypatch.setattr(command, "_run", run)
    for _ in range(2):
        found = command._baseline(env, selection.Selection("x_test.py"), limit=1.0)
        assert found == result(a=outcome)
    assert ran == ["cpu"] * runs


@pytest.mark.parametrize("file", ["tests/x_test.py", "tests/multiprocess/x_test.py"])
def test_a_run_that_is_ended_ends_its_tests(tmp_path: Path, file: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    started = tmp_path / "started"
    os.mkfifo(started)
    for name in ("pytest", "python"):
        tests = tmp_path / name
        tests.write_text(f"#!/bin/sh\necho $$ > {started}\nexec sleep 300\n")
        tests.chmod(0o755)
    program = f"""
from pathlib import Path
from jax_suite_runner import __main__ as command, environment
folder = Path({str(tmp_path)!r})
(folder / "tests").mkdir(exist_ok=True)
environment.make = lambda *_: environment.Environment("1.2.3", folder / "python", folder, folder)
raise SystemExit(command.main())
"""
    name = file.removeprefix("tests/").removesuffix("_test.py")
    runner = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), "--jax", "1.2.3", "--files", name],
        env=os.environ | {"PYTHONPATH": str(ROOT / "ci")},
        stdout=subprocess.DEVNULL,
    )
    try:
        pid = int(started.read_text())
        runner.send_signal(signal.SIGTERM)
        assert runner.wait(60) == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        runner.kill()


def test_a_known_failure_without_a_reason_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x_test.txt").write_text("# a comment\n\nTest::a  # why\nTest::b\n")
    with pytest.raises(judge.KnownFailuresError, match=r"x_test\.txt:4"):
        judge.known_failures("x_test", tmp_path)


@pytest.mark.parametrize("path", sorted(judge.KNOWN.glob("*.txt")), ids=lambda path: path.stem)
def test_the_lists_of_known_failures(path: Path) -> None:
    known = judge.known_failures(path.stem)
    assert known
    assert all(re.fullmatch(r"\w+::\w+", test) for test in known)


@pytest.mark.thorough
def test_the_record_names_errors_that_python_could_not_raise(tmp_path: Path) -> None:
    file = tmp_path / "test_hidden.py"
    file.write_text(
        """
class Hidden:
    def __init__(self, error): self.error = error
    def __del__(self): raise self.error
def test_two(): Hidden(RuntimeError("the loop is closed")), Hidden(ValueError("the other"))
def test_raised(): assert False, "as it is"
"""
    )
    record = tmp_path / "record.jsonl"
    settings = {"RECORD": str(record), "MODULUS": "1", "RESIDUE": "0", "LEFT_OUT": ""}
    env = os.environ | {f"JAX_SUITE_{name}": value for name, value in settings.items()}
    env |= {"PYTHONPATH": str(ROOT / "ci/jax_suite_runner/inside"), "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-W", "error", "-p", "jax_suite_recorder", str(file)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
        check=False,
    )
    told = map(json.loads, record.read_text().splitlines())
    details = {line["end"]: line["detail"] for line in told if "end" in line}
    assert details["::test_two"].startswith(
        "RuntimeError: the loop is closed; ValueError: the other; "
    )
    assert details["::test_raised"].startswith("AssertionError: as it is")


def test_what_only_tests_import_comes_from_the_checkout(tmp_path: Path) -> None:
    checkout, installed = tmp_path / "jax", tmp_path / "venv"
    theirs, ours = checkout / "jax/_src", installed / "lib/python3.12/site-packages/jax/_src"
    theirs.mkdir(parents=True)
    ours.mkdir(parents=True)
    for name in ("hypothesis_test_util.py", "core.py"):
        (theirs / name).write_text("# of the checkout")
    environment._complete(checkout, installed)
    assert [path.name for path in ours.iterdir()] == ["hypothesis_test_util.py"]
    (ours / "hypothesis_test_util.py").write_text("# of the release")
    environment._complete(checkout, installed)
    assert (ours / "hypothesis_test_util.py").read_text() == "# of the release"
