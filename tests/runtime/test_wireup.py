"""Processes that share a key-value store get an ordinary MPI world, without a launcher of MPI."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from support.memory_store import MemoryStore

from stretto.runtime.job import wireup
from stretto.runtime.job.rendezvous import Present, Rendezvous, Roll

JOB = "0123abcd"


class Library:
    """The other end of the socket: what MPI asks."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lines = self._socket.makefile("r", newline="\n")

    def send(self, line: str) -> None:
        self._socket.sendall(f"{line}\n".encode())

    def ask(self, line: str) -> str:
        self.send(line)
        return self._lines.readline().strip()


def answering(
    rank: int,
    size: int,
    store: MemoryStore,
    timeout: float = 60.0,
    give_up: Callable[[str], None] | None = None,
    memories: str = "",
) -> AbstractContextManager[None]:
    """Answers for one process; ``memories`` has a letter for each rank's host."""
    present = tuple(Present("host", memory) for memory in memories or "a" * size)
    rendezvous = Rendezvous("a test", rank, size, store)
    return wireup.answering(rendezvous, Roll(JOB, present), timeout, give_up)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def _library() -> Library:
    return Library(int(os.environ["PMI_FD"]))


def test_what_a_process_is_told(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "before")
    monkeypatch.delenv("PMI_SIZE", raising=False)
    with answering(2, 5, store):
        assert (os.environ["PMI_RANK"], os.environ["PMI_SIZE"]) == ("2", "5")
        library = _library()
        hello = library.ask("cmd=init pmi_version=1 pmi_subversion=1")
        assert hello == "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
        assert library.ask("cmd=get_maxes").startswith("cmd=maxes rc=0 ")
        assert library.ask("cmd=get_universe_size") == "cmd=universe_size rc=0 size=5"
        assert library.ask("cmd=no_such_thing") == "cmd=no_such_thing rc=-1 msg=not_supported"
    # Programs that this one starts are not to take it for theirs.
    assert "PMI_FD" not in os.environ and "PMI_SIZE" not in os.environ
    assert os.environ["PMI_RANK"] == "before"


def test_what_one_puts_the_other_gets(store: MemoryStore) -> None:
    libraries = []
    for rank in range(2):
        with answering(rank, 2, store):
            libraries.append(_library())
            if rank == 0:
                put = "cmd=put kvsname=stretto key=address value=a#b$c:1,d"
                assert libraries[0].ask(put) == "cmd=put_result rc=0 msg=success"
            else:
                got = libraries[1].ask("cmd=get kvsname=stretto key=address")
                assert got == "cmd=get_result rc=0 msg=success value=a#b$c:1,d"
                missing = libraries[1].ask("cmd=get kvsname=stretto key=other")
                assert missing == "cmd=get_result rc=-1 msg=key_not_found"


@pytest.mark.parametrize(
    ("memories", "expected"),
    [
        ("aaaa", "(vector,(0,1,4))"),
        ("aabb", "(vector,(0,1,2),(1,1,2))"),
        ("abab", "(vector,(0,1,1),(1,1,1),(0,1,1),(1,1,1))"),
    ],
)
def test_who_shares_memory(store: MemoryStore, memories: str, expected: str) -> None:
    with answering(0, 4, store, memories=memories):
        library = _library()
        assert library.ask("cmd=get_my_kvsname") == f"cmd=my_kvsname rc=0 kvsname={JOB}"
        told = library.ask(f"cmd=get kvsname={JOB} key=PMI_process_mapping")
        assert told == f"cmd=get_result rc=0 msg=success value={expected}"


def test_what_is_longer_than_mpi_reads_is_left_to_it(store: MemoryStore) -> None:
    size = 1000
    with answering(0, size, store, memories="ab" * (size // 2)):
        library = _library()
        longest = int(library.ask("cmd=get_maxes").rpartition("vallen_max=")[2])
        told = library.ask(f"cmd=get kvsname={JOB} key=PMI_process_mapping")
        assert told == "cmd=get_result rc=-1 msg=key_not_found"
        assert len(wireup.process_mapping("ab" * (size // 2))) >= longest


def test_a_barrier_waits_for_all(store: MemoryStore) -> None:
    answers: list[str] = []
    with answering(0, 2, store):
        first = _library()
        waiting = threading.Thread(target=lambda: answers.append(first.ask("cmd=barrier_in")))
        waiting.start()
        with answering(1, 2, store):
            second = _library()
            assert not answers
            assert second.ask("cmd=barrier_in") == "cmd=barrier_out rc=0"
        waiting.join(30)
        assert answers == ["cmd=barrier_out rc=0"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_barrier_that_another_never_comes_to(store: MemoryStore, rank: int) -> None:
    """MPI would wait without end: the process is told why it ends."""
    reasons: list[str] = []
    told = threading.Event()

    def give_up(reason: str) -> None:
        reasons.append(reason)
        told.set()

    with answering(rank, 3, store, timeout=0.05, give_up=give_up):
        library = _library()
        store.put(f"stretto/{JOB}/barrier/0/{1 - rank}", "here")
        library.send("cmd=barrier_in")
        assert told.wait(60)
    assert reasons == [
        "MPI could not be brought up over a test: no answer from rank 2 within 0.05 s (STRETTO_TIMEOUT)"
    ]


def test_the_end_needs_no_store_and_no_thread(store: MemoryStore) -> None:
    """MPI's last barrier is after everything else, and its goodbye after Python's end."""
    with answering(0, 2, store):
        library = _library()
    assert library.ask("cmd=barrier_in") == "cmd=barrier_out rc=0"
    assert not store.values
    assert library.ask("cmd=finalize") == "cmd=finalize_ack rc=0"
