"""One rank's end of the control plane, with the test as its hub, and the hub, with the test as its ranks."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from stretto.runtime.errors import RankFailed, StrettoError
from stretto.runtime.job.control import Control
from stretto.runtime.job.hub import Hub
from stretto.runtime.job.run_log import Record, RunLogs
from stretto.runtime.job.watchdog import Peer
from stretto.runtime.job.wire import Link, Message

PEERS = [Peer(r, 100 + r, "node") for r in range(2)]


@pytest.fixture
def ends() -> Iterator[tuple[Control, Link]]:
    ours, theirs = socket.socketpair()
    hub = Link(theirs)
    control = Control(0, PEERS, Link(ours), None, 300.0, 300.0, [], RunLogs())
    control.start()
    yield control, hub
    control.close()
    hub.close()


def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python as it is from 3.12 on once the main thread has ended."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("ending", [False, True])
def test_a_failed_job_is_told_also_while_python_ends(
    ends: tuple[Control, Link], ending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, hub = ends
    told: SimpleQueue[StrettoError] = SimpleQueue()
    control.on_failure(told.put)
    control.on_failure(told.put)
    if ending:
        no_threads(monkeypatch)
    hub.send({"type": "broken", "kind": "died", "rank": 1, "text": "it was killed"})
    errors = [told.get(timeout=30) for _ in range(2)]
    control.on_failure(told.put)
    errors.append(told.get(timeout=30))
    assert all(error is control.error for error in errors)
    assert isinstance(control.error, RankFailed)
    assert "it was killed" in str(control.error)
    control.goodbye()  # waits for nobody any more


@pytest.fixture
def ranks() -> Iterator[list[Link]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours, theirs = socket.socketpair()
        Hub(listener, "token", PEERS, 300.0, theirs, 300.0).start()
        links = [Link(ours), Link(socket.create_connection(listener.getsockname()))]
        links[1].send({"rank": 1, "token": "token"})
        yield links
        for link in links:
            link.close()


def messages(link: Link) -> Iterator[Message]:
    """What a rank is told, one after the other."""
    while (came := link.receive()) is not None:
        assert came, "nothing comes"
        yield from came


def the_next(told: Iterator[Message], *types: str) -> Message:
    return next(message for message in told if message["type"] in types)


@pytest.mark.parametrize("same", [True, False])
def test_ranks_are_let_go_when_their_last_runs_are_known_to_be_the_same(
    ranks: list[Link], same: bool
) -> None:
    """Each says what it has run and takes its leave at once."""
    programs = [Record(f"jit_{name}", f"a.py:{n}", n) for n, name in enumerate("fg")]
    logs = [RunLogs(), RunLogs()]
    for rank, log in enumerate(logs):
        for number in (0, 1) if same or rank == 0 else (1, 0):
            log.of((0, 1)).ran(programs[number])
    for link, log in zip(ranks, logs, strict=True):
        link.send({"type": "runs", "sets": log.posts()})
        link.send({"type": "goodbye", "streams": []})
    told = [messages(link) for link in ranks]
    if not same:
        for link, log, of_rank in zip(ranks, logs, told, strict=True):
            assert the_next(of_rank, "account", "all left")["type"] == "account"
            link.send({"type": "accounts", "sets": log.accounts()})
    for of_rank in told:
        last = the_next(of_rank, "all left", "broken")
        if same:
            assert last["type"] == "all left"
        else:
            assert last["kind"] == "mismatch"
            assert "rank 0: jit_f" in last["text"] and "rank 1: jit_g" in last["text"]
