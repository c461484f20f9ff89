"""`stretto conform`: it finds what is broken, and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import defects, pjrt

from stretto.cli import main
from stretto.conformance import cases
from stretto.conformance.pattern import fits
from stretto.runtime.engines.engine import Engine

TESTS = Path(__file__).parents[1]
FAILING = """
import json, re, sys
from stretto.engine_check import Unsupported, checks_of
from support import defects

LEFT_OUT = re.compile(r"types/(?!bf16|f32)")  # exact sums of one type stand for those of all
failed = {}
for name, check in checks_of(getattr(defects, sys.argv[1])).items():
    if not LEFT_OUT.match(name):
        try:
            check()
        except Unsupported:
            continue
        except Exception as error:
            failed[name] = str(error)
print(json.dumps(failed))
"""


def failing(factory: type[Engine]) -> dict[str, str]:
    """What fails, and why. In a process of its own: where large tests have run, what small arrays take of the
    memory that these gave back looks like a leak for long."""
    done = subprocess.run(
        [sys.executable, "-c", FAILING, factory.__name__],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.quick("Plain-None", "Overwriting-donation", "Swallowing-run_errors", "Early-outputs")
@pytest.mark.parametrize(
    ("defect", "check"),
    [
        (defects.Plain, None),
        (defects.Overwriting, "donation"),
        (defects.Borrowing, "transfers"),
        (defects.Forgetting, "transfers"),
        (defects.Swallowing, "run_errors"),
        (defects.Early, "outputs"),
        (defects.Rounding, "types/bf16"),
        (defects.Keeping, "growth"),
        (defects.Elsewhere, "devices"),
        (defects.Aliasing, "outputs"),
    ],
)
def test_a_defect_is_found_by_the_check_that_is_about_it(
    defect: type[Engine], check: str | None
) -> None:
    found = failing(defect)
    assert found.keys() == ({check} if check else set()), found


def conform(*arguments: str, **variables: str) -> tuple[int, dict[str, str], str]:
    """Exit code, status by case, and all that is said."""
    done = subprocess.run(
        [sys.executable, "-m", "stretto.cli", "conform", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    lines = re.findall(r"^(PASS|FAIL|UNSUPPORTED) +(\S+)$", done.stdout, re.MULTILINE)
    return done.returncode, {name: status for status, name in lines}, done.stdout + done.stderr


@pytest.mark.thorough
def test_a_check_that_hangs_or_crashes_does_not_keep_others_from_being_made() -> None:
    path = str(TESTS)
    only = ("--only", "protocol/[crt][uho][nrm]*")  # compile_errors, run_errors, runs, threads
    code, found, said = conform(
        "support.defects:Hanging", *only, "--seconds", "3", "--lines", "0", PYTHONPATH=path
    )
    assert code == 1
    assert {n.partition("/")[2]: s for n, s in found.items()} == {
        **{"runs": "PASS", "compile_errors": "PASS", "run_errors": "PASS", "threads": "FAIL"}
    }
    assert "Timeout (0:00:03)!" in said  # with the stacks of all threads
    code, found, said = conform(
        "support.defects:Crashing", *only, "--seconds", "30", PYTHONPATH=path
    )
    assert code == 1
    assert {n.partition("/")[2]: s for n, s in found.items()} == {
        **{"runs": "PASS", "compile_errors": "FAIL", "run_errors": "PASS", "threads": "PASS"}
    }
    assert "the process ended with exit status -6" in said


@pytest.mark.thorough
def test_programs_on_a_plugin_of_somebody_else(tmp_path: Path) -> None:
    """Without rules for its platform JAX lacks eigendecompositions: absent, not broken."""
    engine = pjrt.engine(pjrt.build(tmp_path), 8)
    code, found, said = conform(engine, "--only", "programs/partitioned/e*")
    assert code == 0, said
    assert found == {
        "programs/partitioned/einsum": "PASS",
        "programs/partitioned/eigh": "UNSUPPORTED",
    }
    assert "1 PASS, 0 FAIL, 1 UNSUPPORTED" in said


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.mpi)])
def test_fewer_devices_than_programs_want(ranks: str) -> None:
    """The engine is asked for no more than it has."""
    chosen = ("--only", "programs/matmul", "--devices", "1", "--ranks", ranks)
    code, found, said = conform("support.defects:one_device", *chosen, PYTHONPATH=str(TESTS))
    assert (code, set(found.values())) == (0, {"PASS"}), said


@pytest.mark.mpi
def test_faults_on_ranks() -> None:
    code, found, said = conform("xla:cpu", "--ranks", "2", "--only", "faults/raises")
    assert (code, found) == (0, {"faults/raises": "PASS"}), said


def test_report_and_what_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def verdicts(*given: tuple[str, str]) -> None:
        made = [cases.Verdict(name, status, "seen 1, expected 2", 0.5) for name, status in given]
        monkeypatch.setattr(cases, "conform", lambda *a: iter(made))

    report = tmp_path / "report.json"
    verdicts(("a", "PASS"), ("b", "FAIL"), ("c", "PASS"))
    assert main(["conform", "mychip", "--json", str(report)]) == 1
    kept = json.loads(report.read_text())
    assert kept["engine"] == "mychip" and kept["totals"] == {"PASS": 2, "FAIL": 1, "UNSUPPORTED": 0}
    assert kept["cases"][1] == {
        **{"name": "b", "status": "FAIL", "text": "seen 1, expected 2", "seconds": 0.5}
    }
    capsys.readouterr()
    verdicts(("a", "PASS"), ("b", "PASS"), ("d", "UNSUPPORTED"))
    assert main(["conform", "mychip", "--diff", str(report)]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        f"since {report}:",
        "  b: FAIL, now PASS",
        "  d: absent, now UNSUPPORTED",
        "  c: PASS, now absent",
    ]


def test_what_cannot_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "xla:cpu", "--ranks", "3"]) == 2
    assert "3 ranks: programs are for 8 devices, as many on each rank" in capsys.readouterr().err
    assert main(["conform", "xla:cpu", "--only", "nothing"]) == 2
    assert "no case fits 'nothing'" in capsys.readouterr().err
    assert main(["conform", "xla:cpu", "--diff", str(tmp_path / "none")]) == 2
    assert "none cannot be read" in capsys.readouterr().err


@pytest.mark.thorough
def test_an_engine_that_cannot_be_made() -> None:
    code, found, said = conform("nobody", "--only", "protocol/run")
    assert (code, found) == (1, {"protocol/runs": "FAIL", "protocol/run_errors": "FAIL"})
    assert "no engine 'nobody'; installed engines: " in said


def test_patterns() -> None:
    assert fits("programs/psum/tuple", "programs/psum") and fits("programs/psum", "*psum")
    assert not fits("programs/psum", "protocol*")
    assert all(name.startswith("protocol/") for name in cases.names_of(only="prot"))
    assert {n.partition("/")[0] for n in cases.names_of(2)} == {"protocol", "programs", "faults"}
