"""Streams where Python begins no thread any more, which it does not from 3.12 on once it ends."""

from __future__ import annotations

import threading

import pytest

from stretto.runtime.execution.stream import Event, Stream


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return Stream("ending")


def test_tasks_run_where_they_are_submitted_in_order(stream: Stream) -> None:
    here, ran = threading.get_ident(), list[tuple[int, int]]()
    events = [
        stream.submit(lambda n=n: ran.append((n, threading.get_ident())) or n) for n in (1, 2)
    ]
    assert all(isinstance(event, Event) and event.done for event in events)
    assert [event.result() for event in events] == [1, 2] and ran == [(1, here), (2, here)]
    failed = stream.submit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert stream.run(lambda: 3) == 3 and stream.idle


def test_what_is_handed_over_runs_before_the_turn_ends(stream: Stream) -> None:
    assert stream.try_turn()
    held = []
    stream.hand_over(lambda: held.append(stream.idle))
    assert held == [False] and stream.idle


def test_there_is_no_thread_to_wait_for(stream: Stream) -> None:
    stream.submit(lambda: None)
    assert stream.close(1) and stream.thread_id is None
