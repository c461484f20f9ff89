"""What the watchdog concludes from given states: no processes, no clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from stretto.runtime.job import progress, watchdog
from stretto.runtime.job.progress import Entry, Progress, Snapshot
from stretto.runtime.job.watchdog import Peer, State

PEERS = [Peer(r, 100 + r, "node") for r in range(3)]


def entry(name: str = "all-reduce.3", sequence: int = 2, age: float = 5.0) -> Entry:
    return Entry(name, "train.py:12", sequence, (0, 1, 2), age)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[itertools.count]:
    seconds = itertools.count(10)
    monkeypatch.setattr(progress, "monotonic", lambda: float(next(seconds)))
    yield seconds


def test_progress_says_what_a_stream_does(clock: itertools.count) -> None:
    state = Progress(1)
    assert state.snapshot(0.0) == Snapshot(1, None, None)
    state.begin("a", "x.py:1", 1, (0, 1))  # at 10
    assert state.snapshot(12.0) == Snapshot(1, Entry("a", "x.py:1", 1, (0, 1), 2.0), None)
    state.end()  # at 11
    assert state.snapshot(15.0) == Snapshot(1, None, Entry("a", "x.py:1", 1, (0, 1), 4.0))
    state.begin("b", "", 2, (0,))
    assert state.snapshot(15.0).current == Entry("b", "", 2, (0,), 3.0)


def test_the_longest_wait_is_overdue() -> None:
    streams = [Snapshot(0, entry(age=4.0), None), Snapshot(1, entry("b", age=6.0), None)]
    assert watchdog.overdue(streams, 3.0) == (1, streams[1].current)
    assert watchdog.overdue(streams, 10.0) is None
    assert watchdog.overdue([Snapshot(0, None, entry(age=100.0))], 1.0) is None


def test_a_report_names_the_missing_rank_and_what_each_does() -> None:
    waiting = State((Snapshot(0, entry(), entry(sequence=1, age=9.0)),), "train.py:40 in step")
    busy = State((Snapshot(0, None, entry(sequence=1, age=9.0)),), "data.py:7 in load")
    text = watchdog.report(0, entry(), {0: waiting, 1: busy, 2: waiting}, PEERS, 3.0)
    first, second, *rest = text.splitlines()
    assert first == (
        "all-reduce.3 (train.py:12) timed out after 3 s (STRETTO_TIMEOUT): rank 1 did not reach it"
    )
    assert second == (
        "  rank 1 (pid 101 on node): in no collective, last completed all-reduce.3 (train.py:12) "
        "9.0 s ago, main thread at data.py:7 in load"
    )
    assert [line.split(" (")[0] for line in rest] == ["  rank 0", "  rank 2"]


def test_ranks_that_left_or_are_silent_are_missing() -> None:
    waiting = State((Snapshot(0, entry(), None),), "")
    text = watchdog.report(0, entry(), {0: waiting, 1: None}, PEERS, 3.0)
    assert "ranks 1, 2 did not reach it" in text
    assert "rank 1 (pid 101 on node): has left the job" in text
    assert "rank 2 (pid 102 on node): did not answer" in text


def test_a_rank_in_another_collective_is_missing() -> None:
    here = State((Snapshot(0, entry(), None),), "")
    elsewhere = State((Snapshot(0, entry("all-gather.1"), None),), "")
    text = watchdog.report(0, entry(), {0: here, 1: elsewhere, 2: here}, PEERS, 3.0)
    assert "rank 1 did not reach it" in text
    assert "in all-gather.1 (train.py:12) for 5.0 s" in text


def test_nobody_missing_means_a_slow_transfer() -> None:
    here = State((Snapshot(0, entry(), None),), "")
    assert "every rank has reached it" in watchdog.report(
        0, entry(), {0: here, 1: here, 2: here}, PEERS, 3
    )


def test_who_left_before_a_collective_abandoned_it() -> None:
    waiting = [Snapshot(0, entry(sequence=2), None)]
    before = (Snapshot(0, None, entry(sequence=1)),)
    after = (Snapshot(0, None, entry(sequence=2)),)
    assert watchdog.abandoned(waiting, {1: (5.0, before)}) == (1, waiting[0].current)
    assert watchdog.abandoned(waiting, {1: (5.0, after)}) is None
    assert watchdog.abandoned(waiting, {1: (0.5, before)}) is None, "it may be on its way out"
    assert watchdog.abandoned([Snapshot(0, None, entry())], {1: (5.0, before)}) is None
    assert watchdog.abandoned(waiting, {7: (5.0, ())}) is None, "7 is not of the group"


def test_long_lists_of_ranks_are_cut() -> None:
    peers = [Peer(r, r, "node") for r in range(40)]
    late = Entry("x", "", 1, tuple(range(40)), 9.0)
    text = watchdog.report(0, late, {}, peers, 1.0)
    assert "and 24 more did not reach it" in text
    assert text.splitlines()[-1] == "  and 24 more ranks"
