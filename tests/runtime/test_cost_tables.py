"""Whose table of costs is used: a named file before the cache, rank 0's before everybody's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.mpi import run_ranks

from stretto.runtime.errors import WorldError
from stretto.runtime.job.cost_tables import (
    CostText,
    find,
    find_times,
    keep,
    measured_path,
    times_path,
)
from stretto.runtime.job.world import World
from stretto.runtime.options import Options

mpi = pytest.mark.mpi
HOSTS = ("a", "a", "b")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def measured(text: str, hosts: tuple[str, ...] = HOSTS) -> Path:
    path = measured_path(hosts, 4, "xla:cpu")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_what_was_measured_is_found_for_this_machine_set_only(cache: Path) -> None:
    path = measured("{}")
    assert path.is_relative_to(cache / "stretto")
    assert find("", HOSTS, 4, "xla:cpu") == CostText("{}", str(path))
    for other in [(("a", "b"), 4, "xla:cpu"), (HOSTS, 2, "xla:cpu"), (HOSTS, 4, "null")]:
        assert find("", *other) == CostText()


def test_times_lie_beside_the_table_and_are_there_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = times_path(HOSTS, 4, "xla:cpu")
    assert path.parent == measured_path(HOSTS, 4, "xla:cpu").parent
    assert find_times(HOSTS, 4, "xla:cpu") == CostText()
    keep(path, "first")
    assert find_times(HOSTS, 4, "xla:cpu") == CostText("first", str(path))
    assert find("", HOSTS, 4, "xla:cpu") == CostText()
    write = Path.write_text

    def interrupted(self: Path, text: str) -> int:
        write(self, text[:2])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", interrupted)
    with pytest.raises(OSError, match="no space left"):
        keep(path, "second")
    assert find_times(HOSTS, 4, "xla:cpu").text == "first"


def test_a_named_file_goes_before_the_cache(tmp_path: Path) -> None:
    measured("{}")
    named = tmp_path / "costs.json"
    named.write_text("[]")
    assert find(str(named), HOSTS, 4, "xla:cpu") == CostText("[]", str(named), named=True)


def test_a_named_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"\(STRETTO_COSTS\).*none\.json"):
        find(str(tmp_path / "none.json"), HOSTS, 4, "xla:cpu")


def test_without_overlap_no_table_is_read(tmp_path: Path) -> None:
    assert World(Options(overlap=False, costs=str(tmp_path / "none.json"))).costs == CostText()


@mpi
def test_all_ranks_have_the_table_of_rank_0(tmp_path: Path) -> None:
    named = tmp_path / "costs.json"
    named.write_text('{"of": "rank 0"}')
    code = (
        "import os; from stretto.runtime.job import world; w = world.bootstrap(); "
        "os.write(1, f'{w.rank} {w.costs.text}\\n'.encode())"
    )
    own = {0: {"STRETTO_COSTS": str(named)}, 1: {"STRETTO_COSTS": str(tmp_path / "none.json")}}
    done = run_ranks(2, ["-c", code], rank_env=own, timeout=60)
    assert sorted(done.stdout.splitlines()) == ['0 {"of": "rank 0"}', '1 {"of": "rank 0"}']


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(WorldError, match=re.escape(f"(STRETTO_COSTS): {path}: 'utf-8' codec")):
        find(str(path), HOSTS, 4, "xla:cpu")


@mpi
def test_a_table_that_rank_0_cannot_read_is_an_error_on_all(tmp_path: Path) -> None:
    own = {0: {"STRETTO_COSTS": str(tmp_path / "none.json")}}
    code = "from stretto.runtime.job import world; world.bootstrap()"
    done = run_ranks(2, ["-c", code], rank_env=own, timeout=60)
    assert done.returncode != 0
    assert done.stderr.count("WorldError: the table of costs cannot be read (STRETTO_COSTS)") == 2
