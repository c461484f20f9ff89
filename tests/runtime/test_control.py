"""One rank's end of the control plane, with the test as its hub."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from stretto.runtime.errors import RankFailed, StrettoError
from stretto.runtime.job.control import Control
from stretto.runtime.job.run_log import RunLogs
from stretto.runtime.job.watchdog import Peer
from stretto.runtime.job.wire import Link

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
