"""Run logs and what the audit concludes from them: plain data, no processes, no clock."""

from __future__ import annotations

import json

import pytest

from stretto.runtime.job import audit
from stretto.runtime.job.audit import PATIENCE, Audit
from stretto.runtime.job.run_log import (
    INTERVAL,
    KEPT,
    Record,
    RunLog,
    RunLogs,
    read,
    read_account,
    read_post,
    spell,
)

F, G = Record("jit_f", "a.py:1 in main", 11), Record("jit_g", "a.py:2 in main", 22)


def first(log: RunLog, record: Record) -> None:
    log.begin(record.program, record.line)
    log.settle(record, log.number, log.history)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [((0, 1, 2, 3), "0-3"), ((0, 2, 3, 7), "0,2-3,7"), ((5,), "5"), ((1, 3), "1,3")],
)
def test_sets_of_processes_are_spelled_and_read(numbers: tuple[int, ...], text: str) -> None:
    assert spell(numbers) == text
    assert read(text) == numbers


def test_a_log_tells_only_news() -> None:
    logs = RunLogs()
    assert logs.of((1, 0, 1)) is logs.of((0, 1))
    log = logs.of((0, 1))
    assert logs.posts() == {}
    log.begin("jit_f", "")
    (post,) = logs.posts().values()
    assert (post.number, post.first, post.history) == (1, True, None)
    assert logs.posts() == {}
    log.settle(F, 1, 0)
    assert logs.posts()["0-1"].history == log.history
    log.ran(F)
    post = logs.posts()["0-1"]
    assert (post.number, post.first, post.history) == (2, False, log.history)


def test_posts_and_accounts_survive_the_wire() -> None:
    log = RunLog((0, 1))
    first(log, F)
    log.loaded("jit_local", "b.py:1", communicates=False)
    log.loaded("jit_later", "b.py:2", communicates=True)
    for _ in range(3 * INTERVAL):
        log.ran(F)
    post = log.post()
    assert post is not None
    assert [number for number, _ in post.hashes][:3] == [INTERVAL, 2 * INTERVAL, 3 * INTERVAL]
    assert read_post(json.loads(json.dumps(post))) == post
    account = log.account()
    assert len(account.runs) == KEPT
    assert account.pending == ("jit_later",)
    assert read_account(json.loads(json.dumps(account))) == account


def logs_of(*histories: list[Record]) -> list[RunLog]:
    logs = []
    for records in histories:
        log = RunLog((0, 1))
        first(log, F)
        first(log, G)
        for record in records:
            log.ran(record)
        logs.append(log)
    return logs


def contradiction(logs: list[RunLog]) -> list[bool]:
    hub = Audit()
    heard = []
    for rank, log in enumerate(logs):
        post = log.post()
        assert post is not None
        heard.append(hub.hear(rank, {"0-1": read_post(json.loads(json.dumps(post)))}, 0.0))
    return heard


def explained(logs: list[RunLog]) -> str | None:
    return audit.explain({rank: {"0-1": log.account()} for rank, log in enumerate(logs)})


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([F, G], [F, G]),
        ([F] * 500, [F] * 300),  # one is ahead
        ([], [G] * 1000),
    ],
)
def test_the_same_runs_contradict_nobody(left: list[Record], right: list[Record]) -> None:
    logs = logs_of(left, right)
    assert contradiction(logs) == [False, False]
    assert explained(logs) is None


@pytest.mark.parametrize(
    ("left", "right", "number"),
    [
        ([F, G], [G, F], 3),
        ([F, F], [F, G], 4),
        ([F] * 70 + [G] * 10, [F] * 80, 73),
    ],
)
def test_the_first_run_that_differs_is_named(
    left: list[Record], right: list[Record], number: int
) -> None:
    logs = logs_of(left, right)
    assert contradiction(logs) == [False, True]
    text = explained(logs)
    assert text is not None
    head, zero, one, _ = text.splitlines()
    assert head.endswith(f"run {number} of processes 0-1 is")
    assert {zero.split()[2], one.split()[2]} == {"jit_f", "jit_g"}
    assert "(called at a.py:" in zero


def test_a_difference_too_long_ago_is_still_noticed() -> None:
    logs = logs_of([G] + [F] * 1000, [F] * 1200)
    assert contradiction(logs) == [False, True]
    assert explained(logs_of([G] + [F] * 1000, [F] * 1001)).startswith(  # type: ignore[union-attr]
        "the ranks run different programs, or in different orders: they differ before run"
    )


def test_a_first_run_where_the_other_rank_takes_it_as_agreed() -> None:
    logs = logs_of([], [])
    logs[0].begin("jit_h", "a.py:3")
    logs[1].ran(F)
    assert contradiction(logs) == [False, True]
    text = explained(logs)
    assert text is not None
    assert "  rank 0: jit_h (called at a.py:3), for the first time\n" in text
    assert "  rank 1: jit_f (called at a.py:1 in main), which has run before\n" in text


def test_who_waits_long_to_agree_is_asked_about_once() -> None:
    hub = Audit()
    (log,) = logs_of([])
    log.begin("jit_h", "")
    post = log.post()
    assert post is not None
    assert hub.next_look() is None
    assert not hub.hear(0, {"0-1": post}, 10.0)
    assert hub.next_look() == 10.0 + PATIENCE
    assert not hub.look(10.0 + PATIENCE / 2)
    assert hub.look(10.0 + PATIENCE)
    assert not hub.look(20.0)
    assert hub.next_look() is None
    log.settle(Record("jit_h", "", 1), log.number, log.history)
    post = log.post()
    assert post is not None
    hub.hear(0, {"0-1": post}, 21.0)
    assert hub.next_look() is None


def test_a_program_that_communicates_on_one_rank_only() -> None:
    logs = logs_of([], [])
    logs[0].begin("jit_h", "a.py:3")
    assert explained(logs) is None  # rank 1 may yet come to it
    logs[1].loaded("jit_other", "a.py:4", communicates=False)
    assert explained(logs) is None
    logs[1].loaded("jit_h", "a.py:5", communicates=False)
    assert explained(logs) == (
        "the ranks do not communicate the same things:\n"
        "  rank 0: jit_h (called at a.py:3) has collectives with processes 0-1\n"
        "  rank 1: jit_h (called at a.py:5) has none"
    )
    logs[0].loaded("jit_h", "a.py:5", communicates=False)  # rank 0 has that one too
    assert explained(logs) is None


def test_a_program_that_is_loaded_and_has_yet_to_run_is_waited_for() -> None:
    logs = logs_of([], [])
    for log in logs:
        log.loaded("jit_h", "a.py:3", communicates=True)
    logs[1].loaded("jit_h", "a.py:5", communicates=False)
    logs[0].begin("jit_h", "a.py:3")
    assert explained(logs) is None
    logs[1].begin("jit_h", "a.py:3")
    assert explained(logs) is None
