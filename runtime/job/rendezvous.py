"""How processes find each other that no launcher of MPI started, but that share a key-value store.

`jax.distributed` joins processes and gives them such a store. Before MPI is
touched, which cannot be interrupted, the processes call the roll in the store: each writes what the others
must know of it, and a process that sees that all are there, or has waited long enough, writes the verdict.

Invariant: of several verdicts the store keeps the first, so that all processes go on, or all raise the
same `WorldError`, also those that come late.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from time import monotonic
from typing import Protocol

from ..errors import WorldError

SPACE = "stretto"
# A process that waits for the verdict gives the one that writes it this many seconds more.
_MARGIN = 2.0
# The first process looks this often, in seconds, whether another has given up waiting.
_LOOK = 1.0


class Store(Protocol):
    """A key-value store that all processes of a job share. What is written stays."""

    def put(self, key: str, value: str) -> bool:
        """Write a value; False if the key has one already, which is kept."""
        ...

    def get(self, key: str, timeout: float) -> str:
        """Wait for a value. Raises ``TimeoutError`` after ``timeout`` seconds."""
        ...

    def try_get(self, key: str) -> str | None:
        """The value, or None if there is none yet."""
        ...


@dataclass(frozen=True)
class Rendezvous:
    """A job of ``size`` processes that share ``store``, as its process ``rank`` sees it.

    ``name`` says who started it.
    """

    name: str
    rank: int
    size: int
    store: Store


@dataclass(frozen=True)
class Present:
    """What a process says of itself: its host, and with whom it shares memory.

    ``problem``: why it cannot join; empty if it can.
    """

    host: str
    memory: str
    problem: str = ""


@dataclass(frozen=True)
class Roll:
    """All processes, by rank, and a name for the job that no other job has."""

    job: str
    present: tuple[Present, ...]


def call_roll(rendezvous: Rendezvous, problem: str, timeout: float) -> Roll:
    """Wait until all processes have called this, as often as this one.

    ``problem``: why this process cannot join, if so. Raises `WorldError`, on all processes alike, if some
    process does not come within ``timeout`` seconds, or cannot join.
    """
    store, rank, size = rendezvous.store, rendezvous.rank, rendezvous.size
    deadline = monotonic() + timeout
    own = json.dumps(asdict(Present(socket.gethostname(), memory_name(), problem)))
    # What was said in an attempt that failed is still there.
    attempt = next(n for n in count() if store.put(f"{SPACE}/roll/{n}/here/{rank}", own))
    here, verdict = f"{SPACE}/roll/{attempt}/here", f"{SPACE}/roll/{attempt}/verdict"
    if rank == 0:
        # One process asks for all, so that the number of questions grows with their number only.
        found = _wait_for_all(store, here, verdict, size, deadline)
    else:
        found = _wait(store, verdict, timeout + _MARGIN)
    if not found:
        missing = [r for r in range(size) if store.try_get(f"{here}/{r}") is None]
        if not missing and rank != 0:
            missing = [0]  # it came, but has not said that all have
        own_verdict = {"job": os.urandom(16).hex(), "missing": missing, "by": rank, "s": timeout}
        store.put(verdict, json.dumps(own_verdict))
        found = store.get(verdict, timeout)
    said = json.loads(found)
    if said["missing"]:
        raise WorldError(_nobody_came(rendezvous, said["missing"], said["by"], said["s"]))
    stored = (store.get(f"{here}/{r}", timeout) for r in range(size))
    present = tuple(Present(**json.loads(text)) for text in stored)
    for other, process in enumerate(present):
        if process.problem:
            raise WorldError(f"rank {other} cannot join: {process.problem}")
    return Roll(said["job"], present)


def _wait_for_all(store: Store, here: str, verdict: str, size: int, deadline: float) -> str:
    """Wait for all processes; returns the verdict of one that waits no longer, else an empty string."""
    for other in range(size):
        while not _wait(store, f"{here}/{other}", min(deadline - monotonic(), _LOOK)):
            found = store.try_get(verdict)
            if found or monotonic() >= deadline:
                return found or ""
    return ""


def _wait(store: Store, key: str, timeout: float) -> str:
    """The value, or an empty string if there is none in time."""
    with suppress(TimeoutError):
        return store.get(key, max(timeout, 0.0))
    return ""


def _nobody_came(rendezvous: Rendezvous, missing: Sequence[int], by: int, seconds: float) -> str:
    ranks = ", ".join(map(str, missing[:16])) + (", …" if len(missing) > 16 else "")
    who = f"process {ranks}" if len(missing) == 1 else f"processes {ranks}"
    return (
        f"{who} of the {rendezvous.size} that {rendezvous.name} joined did not make JAX's devices within "
        f"{seconds:g} s (STRETTO_TIMEOUT) of process {by}: each process must, whether it computes or "
        "not. They ended, work for long before their first use of JAX, or have STRETTO_LAUNCHER=none"
    )


def memory_name() -> str:
    """A name that is the same for processes which can share memory.

    That takes one kernel, one file system for shared memory, and process ids that mean the same:
    containers on one host may have all, or none.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            kernel = file.read().strip()
        return f"{kernel} {os.stat('/dev/shm').st_dev} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()
