"""The log of runs: each rank's account of the programs that it runs together with others.

All processes of a set must run the programs that they share in the same order. Every rank counts them, set
by set, and keeps a rolling hash of which they were, with the last few by name. Nothing of this is sent when a
program runs; the control plane posts how far a rank has come, and compares (`audit`).

A run is written down by the dispatch thread when it begins, and read by others without a lock: an entry is
one tuple, appended by one operation.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

KEPT = 64
# The hash of every run of this interval is kept longer, so that ranks that are far apart can be compared.
INTERVAL = 64
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Record(NamedTuple):
    """A program as the log knows it: ``identity`` is the same on all its processes (64 bits)."""

    program: str
    line: str
    identity: int


class LoggedRun(NamedTuple):
    """One run of a set of processes, the ``number``-th from 1.

    ``first``: the processes had to agree on the program. ``identity`` and ``history`` (the hash of all runs
    up to this one) are None until they have.
    """

    number: int
    program: str
    line: str
    identity: int | None
    first: bool
    history: int | None

    @property
    def what(self) -> str:
        """``jit_step (called at train.py:12)``."""
        return called(self.program, self.line)


class Local(NamedTuple):
    """A program for these processes that does not communicate."""

    program: str
    line: str

    @property
    def what(self) -> str:
        """As `LoggedRun.what`."""
        return called(self.program, self.line)


def called(program: str, line: str) -> str:
    """``jit_step (called at train.py:12)``."""
    return f"{program} (called at {line})" if line else program


class Post(NamedTuple):
    """How far a rank has come: its last run, and hashes of earlier ones as (number, history)."""

    number: int
    first: bool
    history: int | None
    hashes: tuple[tuple[int, int], ...]


class Account(NamedTuple):
    """The last runs of a rank in one set of processes, oldest first, and what it has loaded beside.

    ``local`` does not communicate; ``pending`` are names of programs that do and have not run yet.
    """

    runs: tuple[LoggedRun, ...] = ()
    local: tuple[Local, ...] = ()
    pending: tuple[str, ...] = ()


class RunLog:
    """The runs of one set of processes, in ascending order, on one of them."""

    __slots__ = (
        "_hashes",
        "_local",
        "_pending",
        "_posted",
        "_recent",
        "history",
        "number",
        "processes",
    )

    def __init__(self, processes: tuple[int, ...]) -> None:
        self.processes = processes
        self.number = 0
        self.history = 0
        # (number, record, first, history)
        self._recent: deque[tuple[int, Record, bool, int | None]] = deque(maxlen=KEPT)
        self._hashes: deque[tuple[int, int]] = deque(maxlen=KEPT)
        self._local: deque[Local] = deque(maxlen=KEPT)
        self._pending: deque[str] = deque()
        self._posted: Any = None

    def ran(self, record: Record) -> None:
        """A program that the processes have agreed on runs again."""
        self.number = number = self.number + 1
        self.history = history = ((self.history ^ record.identity) * _MULTIPLIER) & _MASK
        self._recent.append((number, record, False, history))
        if not number % INTERVAL:
            self._hashes.append((number, history))

    def begin(self, program: str, line: str) -> None:
        """A program that the processes have yet to agree on is about to run."""
        self.ended_waiting(program)
        self.number += 1
        self._recent.append((self.number, Record(program, line, 0), True, None))

    def settle(self, record: Record, number: int, history: int) -> None:
        """They have agreed, or have agreed that they cannot: ``number`` and ``history`` from here on."""
        self.number = number
        self.history = history = ((history ^ record.identity) * _MULTIPLIER) & _MASK
        self._recent[-1] = (number, record, True, history)
        if not number % INTERVAL:
            self._hashes.append((number, history))

    def loaded(self, program: str, line: str, communicates: bool) -> None:
        """A program for these processes has been loaded."""
        if communicates:
            self._pending.append(program)
        else:
            self._local.append(Local(program, line))

    def ended_waiting(self, program: str) -> None:
        """A program that was loaded runs for the first time, or never will."""
        with contextlib.suppress(ValueError):
            self._pending.remove(program)

    def post(self) -> Post | None:
        """How far it is, if that is news."""
        recent = self._recent.copy()
        if not recent or recent[-1] is self._posted:
            return None
        number, _, first, history = self._posted = recent[-1]
        before = [(n, h) for n, _, _, h in list(recent)[-2:-1] if h is not None]
        return Post(number, first, history, (*self._hashes.copy(), *before))

    def account(self) -> Account:
        """The last runs."""
        runs = tuple(
            LoggedRun(n, r.program, r.line, None if h is None else r.identity, first, h)
            for n, r, first, h in self._recent.copy()
        )
        return Account(runs, tuple(self._local.copy()), tuple(self._pending.copy()))


class RunLogs:
    """All logs of a process, by set of processes."""

    def __init__(self) -> None:
        self._logs: dict[tuple[int, ...], RunLog] = {}

    def of(self, processes: Sequence[int]) -> RunLog:
        """The log of a set of processes."""
        key = tuple(sorted(set(processes)))
        log = self._logs.get(key)
        if log is None:
            log = self._logs.setdefault(key, RunLog(key))
        return log

    def posts(self) -> dict[str, Post]:
        """What is new since the last call, by name of the set (`spell`)."""
        found = {}
        for log in list(self._logs.values()):
            post = log.post()
            if post is not None:
                found[spell(log.processes)] = post
        return found

    def accounts(self) -> dict[str, Account]:
        """The last runs of every set."""
        return {spell(log.processes): log.account() for log in list(self._logs.values())}


def spell(processes: Sequence[int]) -> str:
    """Ascending numbers with ranges: ``0-3,8``. Inverse of `read`."""
    runs: list[list[int]] = []
    for process in processes:
        if runs and process == runs[-1][1] + 1:
            runs[-1][1] = process
        else:
            runs.append([process, process])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def read(text: str) -> tuple[int, ...]:
    """The numbers that `spell` wrote."""
    numbers: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        numbers.extend(range(int(low), int(high or low) + 1))
    return tuple(numbers)


def read_account(plain: Sequence) -> Account:
    """An `Account` from its JSON form."""
    runs, local, pending = plain
    return Account(
        tuple(LoggedRun(*r) for r in runs), tuple(Local(*e) for e in local), tuple(pending)
    )


def read_post(plain: Sequence) -> Post:
    """A `Post` from its JSON form."""
    number, first, history, hashes = plain
    return Post(number, first, history, tuple((n, h) for n, h in hashes))
