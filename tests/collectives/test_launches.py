"""Calls of NCCL by a thread of their own: what is called, in which order, by whom. NCCL is Python here."""

from __future__ import annotations

import threading

import pytest
from support.nccl_in_python import Library

from stretto.collectives._launches import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    RECEIVE,
    REDUCE_SCATTER,
    SEND,
)

IN_PROGRESS = 7
WAIT = 60.0  # seconds, of which a test that passes needs none


def test_every_call_has_its_arguments() -> None:
    library = Library()
    launches = library.launches
    calls = [
        (SEND, 0x10, 0, 3, 1, 5, 0xC0, 0xA0),
        (RECEIVE, 0, 0x20, 3, 1, 6, 0xC0, 0xA0),
        (ALL_GATHER, 0x10, 0x20, 4, 7, 0, 0xC0, 0xA0),
        (ALL_REDUCE, 0x10, 0x20, 2**40, 7, 2, 0xC0, 0xA0),
        (REDUCE_SCATTER, 0x10, 0x20, 4, 8, 1, 0xC1, 0xA0),
        (BROADCAST, 0x10, 0x20, 4, 1, 3, 0xC1, 0xA0),
    ]
    launches.put([(0xD0, calls[:2]), (0xD1, calls[2:])])
    assert launches.wait(WAIT)
    assert launches.failure() is None
    assert library.called == [
        ("start",),
        ("use", 0xD0),
        ("ncclSend", 0x10, 3, 1, 5, 0xC0, 0xA0),
        ("ncclRecv", 0x20, 3, 1, 6, 0xC0, 0xA0),
        ("use", 0xD1),
        ("ncclAllGather", 0x10, 0x20, 4, 7, 0xC0, 0xA0),
        ("ncclAllReduce", 0x10, 0x20, 2**40, 7, 2, 0xC0, 0xA0),
        ("ncclReduceScatter", 0x10, 0x20, 4, 8, 1, 0xC1, 0xA0),
        ("ncclBroadcast", 0x10, 0x20, 4, 1, 3, 0xC1, 0xA0),
        ("end",),
    ]
    assert library.asked == [0xC0, 0xC1]
    library.called.clear()
    launches.put([(0xD0, [(ALL_REDUCE, 1, 2, 3, 4, 0, 0xC0, 0xA0)])])  # one alone is no group
    assert launches.wait(WAIT)
    assert library.called == [("use", 0xD0), ("ncclAllReduce", 1, 2, 3, 4, 0, 0xC0, 0xA0)]
    with pytest.raises(ValueError, match="has the number 6"):
        launches.put([(0xD0, [(6, 1, 2, 3, 4, 0, 0xC0, 0xA0)])])
    launches.put([])
    assert launches.wait(0.0)


def test_calls_are_made_while_nobody_waits() -> None:
    """By another thread than the one that put them, which may wait for as long as it likes."""
    library, made = Library(), threading.Event()
    library.on_call = made.set
    library.launches.put([(0xD0, [(ALL_REDUCE, 1, 2, 3, 4, 0, 0xC0, 0xA0)])])
    assert made.wait(WAIT)
    assert library.launches.wait(WAIT)
    assert threading.get_ident() not in library.threads


def test_what_fails_is_named() -> None:
    library = Library()
    launches, call = library.launches, (1, 2, 3, 4, 0, 0xC0, 0xA0)
    library.answers = {"ncclAllReduce": 5, "ncclBroadcast": IN_PROGRESS, "end": IN_PROGRESS}
    launches.put([(0xD0, [(BROADCAST, *call), (ALL_REDUCE, *call), (ALL_GATHER, *call)])])
    assert launches.wait(WAIT)
    assert launches.failure() == ("ncclAllReduce", 5, 0xC0)
    assert [name for name, *_ in library.called][-2:] == ["ncclAllReduce", "end"]
    for answers, failure in (
        ({"end": 3}, ("ncclGroupEnd", 3, 0xC0)),
        ({"use": 201}, ("cuCtxSetCurrent", 201, 0)),
        ({}, None),
    ):
        library.answers = answers
        launches.put([(0xD0, [(BROADCAST, *call), (ALL_GATHER, *call)])])
        assert launches.wait(WAIT)
        assert launches.failure() == failure


def test_a_launch_is_over_when_its_communicators_say_so() -> None:
    library = Library()
    launches = library.launches
    library.states[0xC0] = IN_PROGRESS
    library.answers["ncclAllReduce"] = IN_PROGRESS
    one = [(0xD0, [(ALL_REDUCE, 1, 2, 3, 4, 0, 0xC0, 0xA0)])]
    launches.put(one)
    assert not launches.wait(0.0)
    assert launches.state(0xC0) == IN_PROGRESS
    with pytest.raises(RuntimeError, match="are not over"):
        launches.put(one)
    library.states[0xC0] = 6
    assert launches.wait(WAIT)
    assert launches.failure() == ("", 6, 0xC0)
    assert launches.state(0xC0) == 6


def test_nothing_is_called_once_stopped() -> None:
    """And not before the call that is under way has returned."""
    library, called, returns, stopped = Library(), *(threading.Event() for _ in range(3))
    launches = library.launches
    said: list[str] = []

    def on_call() -> None:
        called.set()
        returns.wait(WAIT)
        said.append("returned")

    def stop() -> None:
        launches.stop(WAIT)  # for longer than this test may be kept from its core
        said.append("stopped")
        stopped.set()

    library.on_call = on_call
    launches.put([(0xD0, [(ALL_REDUCE, 1, 2, 3, 4, 0, 0xC0, 0xA0)])])
    assert called.wait(WAIT)
    threading.Thread(target=stop, daemon=True).start()
    assert not stopped.wait(0.05)
    returns.set()
    assert stopped.wait(WAIT)
    assert launches.wait(WAIT)
    count = len(library.called)
    assert said[-1] == "stopped"
    assert library.asked == []
    assert launches.state(0xC0) is None
    launches.put([(0xD0, [(ALL_REDUCE, 1, 2, 3, 4, 0, 0xC0, 0xA0)])])
    assert launches.wait(WAIT)
    assert len(library.called) == count
