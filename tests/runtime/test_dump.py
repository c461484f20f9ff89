"""Where STRETTO_DUMP writes what, and what becomes of it where that cannot be written."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from stretto.runtime.dump import MOST_LETTERS, begin
from stretto.runtime.errors import WorldError


def test_files_are_numbered_by_program_and_stage(tmp_path: Path) -> None:
    dumps = begin(str(tmp_path / "new" / "folder"), rank=3)
    assert dumps is not None
    first, second = dumps.program(), dumps.program()
    first("jit_step", "hlo", "a")
    second("jit(f)/.-/<lambda>", "hlo", "b")
    first("jit_step", "flatten", "c")
    start = f"rank-00003-{os.getpid()}"
    assert {p.name: p.read_text() for p in (tmp_path / "new" / "folder").iterdir()} == {
        f"{start}.0000.jit_step.00.hlo.txt": "a",
        f"{start}.0000.jit_step.01.flatten.txt": "c",
        f"{start}.0001.jit_f__.-__lambda_.00.hlo.txt": "b",
    }


def test_nothing_is_dumped_unasked() -> None:
    assert begin("") is None


def test_a_long_name_is_cut_off(tmp_path: Path) -> None:
    dumps = begin(str(tmp_path))
    assert dumps is not None
    dumps.program()("f" * 500, "hlo", "")
    (path,) = tmp_path.iterdir()
    assert "f" * MOST_LETTERS in path.name and len(path.name) < 255


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorldError, match=r"the dump cannot be written \(STRETTO_DUMP\): "):
        begin(str(tmp_path / "file"))


def test_a_file_that_cannot_be_written_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    dumps = begin(str(folder))
    assert dumps is not None
    folder.rmdir()
    with caplog.at_level(logging.WARNING, "stretto"):
        dumps.program()("f", "hlo", "")
        dumps.program()("f", "hlo", "")
    (record,) = caplog.records
    assert record.getMessage().startswith("the dump ends here (STRETTO_DUMP): ")
