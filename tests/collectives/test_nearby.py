"""Who shares memory with whom: see `stretto.collectives.nearby`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from support.mpi import run_ranks

from stretto.collectives._native import Shared
from stretto.collectives.native import Peers, Table, table_of
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="such memory is Linux's"
)


def found(case: str, ranks: int = 3) -> list[dict[str, int] | None]:
    """What each rank was given."""
    done = run_ranks(ranks, [str(Path(__file__).with_name("nearby_ranks.py")), case])
    assert done.returncode == 0, done.stdout + done.stderr
    return [line[1] for line in sorted(json.loads(line) for line in done.stdout.splitlines())]


@pytest.mark.mpi
class TestRanks:
    def test_all_of_a_host(self) -> None:
        assert found("all") == [{"0": 0, "1": 1, "2": 2}] * 3

    def test_one_that_does_not_take_part(self) -> None:
        assert found("unwilling") == [{"0": 0, "2": 1}, None, {"0": 0, "2": 1}]

    def test_two_hosts(self) -> None:
        assert found("hosts", 4) == [{"0": 0, "2": 1}, {"1": 0, "3": 1}] * 2

    def test_where_one_cannot_be_reached_nobody_is(self) -> None:
        """Another process has its number, or there is none with it."""
        assert found("another") == [None] * 3
        assert found("nobody") == [None] * 3


def test_a_file_that_is_another_ones_is_not_taken_for_a_box() -> None:
    one, other, stranger = Shared(2, 0), Shared(2, 1), Shared(2, 1)
    pid, file, _ = stranger.told
    assert not one.join(1, (pid, file, other.told[2]))


def test_a_box_that_is_smaller_is_not_mapped() -> None:
    one, smaller = Shared(3, 0), Shared(1, 0)
    assert not one.join(1, smaller.told)


def files() -> list[int]:
    """The files of memory of this process."""
    links = (p for p in Path("/proc/self/fd").iterdir() if p.is_symlink())
    return [int(p.name) for p in links if "memfd:stretto" in str(p.readlink())]


def test_files_are_closed_with_the_memory() -> None:
    before = len(files())
    shared = Shared(2, 0)
    assert len(files()) == before + 1
    del shared
    assert len(files()) == before


def test_a_forked_child_gives_nothing_back() -> None:
    """Its copy of a program's table ends; the pages are the parent's."""
    before = set(files())
    shared = Shared(2, 0)
    tables = [a_sum_over_processes(shared, 1 << 18)]
    _, chunk = sorted(set(files()) - before)
    os.pwrite(chunk, b"\1" * os.fstat(chunk).st_size, 0)
    whole = os.fstat(chunk).st_blocks
    child = os.fork()
    if child == 0:
        tables.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.fstat(chunk).st_blocks == whole
    tables.clear()
    assert os.fstat(chunk).st_blocks < whole


def a_sum_over_processes(shared: Shared, count: int) -> Table:
    """The table of a program, about to run, of this one of two processes."""
    of = TensorType("f32", (count,))
    everyone = {0: 0, 1: 1}
    collective = Collective(
        kind=Kind.ALL_REDUCE,
        operands=(of,),
        results=(of,),
        groups=((0, 1),),
        reduction=Reduction.SUM,
    )
    peers = Peers(0, everyone, everyone, last_tag=9, shared=shared, near=everyone)
    table = table_of([collective], {0: 0}, peers)
    table.begin()
    return table
