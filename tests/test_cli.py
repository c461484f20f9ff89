"""The command and the public face: what they print, their exit codes, and what they do not import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import stretto
from stretto import cli
from stretto.commands import doctor
from stretto.runtime.options import Options


def command(
    *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stretto.cli", *arguments],
        env={**os.environ, "COLUMNS": "200", **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_import_is_cheap() -> None:
    code = (
        "import sys, stretto; stretto.Options(); stretto.RankFailed; "
        "print(sorted({'jax', 'numpy', 'mpi4py', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in stretto.__all__:
        assert getattr(stretto, name) is not None
    assert issubclass(stretto.RankFailed, stretto.StrettoError)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = stretto.nothing


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == stretto.__version__
    assert cli.main([]) == 2
    assert "doctor" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["--version", "--help", "run --help"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_without_room_is_told_in_one_line(arguments: str, unbuffered: str) -> None:
    full = Path("/dev/full")
    if not full.is_char_device():
        pytest.skip("no /dev/full")
    with full.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", "stretto.cli", *arguments.split()],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 1
    assert done.stderr == "stretto: cannot write the output: No space left on device\n"


def test_what_cannot_be_shown_is_no_error() -> None:
    done = command("run", "--help", env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "arrays 0, 1, ?" in done.stdout


def test_a_reader_that_stops_reading_is_no_error() -> None:
    command = [sys.executable, "-m", "stretto.cli", "--version"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_doctor_says_where_options_came_from_and_runs_an_all_reduce() -> None:
    done = command("doctor", env={"STRETTO_LOCAL_DEVICES": "4", "STRETTO_TIMOUT": "3"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines()]
    assert ["local_devices", "4", "STRETTO_LOCAL_DEVICES", "STRETTO_LOCAL_DEVICES"] in rows
    assert ["timeout", "300.0", "STRETTO_TIMEOUT", "default"] in rows
    assert ["ok", "all-reduce", "right, over 4 devices of 1 processes"] in rows
    assert "STRETTO_TIMOUT: not an option of stretto" in done.stdout
    assert "stretto is usable here" in done.stdout


def test_doctor_says_whether_measuring_feeds_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor.world, "current", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    costs = tmp_path / "costs.json"
    costs.write_text("{}")
    assert doctor.profiling(Options()) == []
    (off,) = doctor.profiling(Options(profile=True, overlap=False))
    assert off.good is None and "STRETTO_OVERLAP" in off.advice
    (bare,) = doctor.profiling(Options(profile=True))
    assert bare.good is None and "bench --calibrate" in bare.advice
    (fed,) = doctor.profiling(Options(profile=True, costs=str(costs)))
    assert fed.good and str(tmp_path) in fed.value and not fed.advice
    (wrong,) = doctor.profiling(Options(profile=True, costs=str(tmp_path / "none")))
    assert wrong.good is False and "STRETTO_COSTS" in wrong.advice


def test_doctor_fails_on_what_cannot_work() -> None:
    done = command("doctor", "--no-check", env={"STRETTO_ENGINE": "abacus"})
    assert done.returncode == 1
    assert "asked for: abacus" in done.stdout
    assert "set STRETTO_ENGINE to one that is installed" in done.stdout
    assert "stretto is not usable here" in done.stdout


@pytest.mark.mpi
def test_doctor_under_mpiexec() -> None:
    from support.mpi import run_ranks

    done = run_ranks(2, ["-m", "stretto.cli", "doctor"], env={"COLUMNS": "200"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right, over 2 devices of 2 processes") == 1


def test_a_missing_mpi_is_missing_only_where_ranks_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from stretto.runtime.job.launcher import Launcher

    monkeypatch.setattr(doctor, "mpi_library", lambda: ("", "cannot load MPI library"))
    alone = {f.subject: f for f in doctor.mpi(None)}
    ranked = {f.subject: f for f in doctor.mpi(Launcher("srun", 0, 4))}
    assert alone["MPI library"].good is None
    assert ranked["MPI library"].good is False
    assert "pip install" in ranked["MPI library"].advice
