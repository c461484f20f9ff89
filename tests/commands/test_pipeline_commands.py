"""`stretto explain --svg` and `stretto run --check-skips` on pipelines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from support.mpi import run_ranks

from stretto.commands.check_skips import compare, variants
from stretto.commands.schedule_svg import svg
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.runtime.options import Options

sys.path.append(str(Path(__file__).parent.parent / "hlo_frontend"))
from pipelines import circular

SVG = "{http://www.w3.org/2000/svg}"
WRONG = "{{0,3},{1,3},{2,5},{1,0}}"  # what stage 1 sends in iteration 4 is read
TRUST = {"STRETTO_TRUST_VALID_ITERATIONS": "1"}


def stretto(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stretto.cli", *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "pipeline.hlo"
    path.write_text(text)
    return str(path)


def cells(path: Path) -> list[str]:
    """Rows of the picture as the text has them."""
    root = ElementTree.parse(path).getroot()
    rows = [g for g in root.iter(f"{SVG}g") if g.get("class") == "device"]
    return [
        "".join("■" if r.get("class") == "busy" else "□" for r in row.iter(f"{SVG}rect"))
        for row in rows
    ]


def test_the_picture_is_that_of_the_text(tmp_path: Path) -> None:
    out = tmp_path / "schedule.svg"
    done = stretto("explain", written(tmp_path, circular(3, 4)), "--svg", str(out))
    assert done.returncode == 0, done.stderr
    assert cells(out) == ["■■■■□□", "□■■■■□", "□□■■■■"]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[1] for line in lines if line and line[0].isdigit()] == cells(out)
    texts = [t.text for t in ElementTree.parse(out).getroot().iter(f"{SVG}text")]
    assert texts[0] in done.stdout.splitlines()


def test_a_picture_of_anything_is_valid_xml(tmp_path: Path) -> None:
    loop = {"busy": (), "trips": 0}
    drawn = svg([loop, {"busy": ((True,),), "trips": 1}], ['a < b & \x07 "c"', "loop"])
    assert len(list(ElementTree.fromstring(drawn.encode()).iter(f"{SVG}rect"))) == 1
    assert "no loop" in "".join(ElementTree.fromstring(svg([], []).encode()).itertext())


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    out = tmp_path / "missing" / "schedule.svg"
    done = stretto("explain", written(tmp_path, circular(2, 2)), "--svg", str(out))
    assert done.returncode == 2
    assert "cannot be written" in done.stderr


def test_skips_that_change_nothing(tmp_path: Path) -> None:
    done = stretto("run", written(tmp_path, circular(3, 3, 2)), "--check-skips")
    assert done.returncode == 0, done.stderr
    assert "nothing that is left out changes a result" in done.stdout


@pytest.mark.thorough
def test_trusted_bounds_that_leave_out_what_is_read(tmp_path: Path) -> None:
    done = stretto("run", written(tmp_path, circular(4, 4, 1, WRONG)), "--check-skips", **TRUST)
    assert done.returncode == 1
    # The last microbatch goes through stage 1 in iteration 4.
    assert "result 0 of device 3 differs: at [3, 0] it is" in done.stderr
    assert "with nothing left out" in done.stderr
    assert "with zeros for what is left out" in done.stderr


@pytest.mark.thorough
@pytest.mark.mpi
def test_all_ranks_end_alike(tmp_path: Path) -> None:
    file = written(tmp_path, circular(4, 4, 1, WRONG))
    done = run_ranks(4, ["-m", "stretto.cli", "run", file, "--check-skips"], env=TRUST)
    assert done.returncode == 1
    assert done.stderr.count("result 0 of device 3 differs") == 1


def test_the_first_difference_is_named() -> None:
    ways = variants(ValidPolicy(), Options())
    right = {0: [np.zeros((2, 2), np.float32)], 1: [np.ones(3, np.int8)]}
    assert compare([right, right, right], ways) == ""
    nan = {**right, 0: [np.array([[0, 0], [np.nan, 0]], np.float32)]}
    assert compare([right, right, nan], ways) == (
        "result 0 of device 0 differs: at [1, 0] it is 0.0 with nothing left out, "
        "nan with NaN for what is left out"
    )
    minus = {**right, 0: [-right[0][0]]}
    assert "-0.0 with zeros" in compare([right, minus, right], ways)
