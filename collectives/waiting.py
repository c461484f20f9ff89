"""How a thread waits for MPI: by polling it, and after a while asleep between the polls.

MPI has no wait that leaves the core to others: its waits poll, and yield between the polls at best. Where
processes have a core each for that, nothing is faster. Where they have not, whoever waits takes time from
those it waits for. So a wait polls for ``patience`` seconds; from then on it sleeps between polls, longer the
longer it has lasted, so that it ends late by a small part of its length.

With short patience a wait for bulk also sleeps as long as its bytes are expected to take: over a slow link
most of what moving them costs this process is asking whether they have come. What a byte takes is learned
from the waits before. The network goes on meanwhile, with what it holds of both ends; `_LONGEST` bounds how
much that must be.

Collectives that block inside MPI cannot sleep. With a finite patience their processes meet before each of
them, asleep if need be, and poll only while data moves. Where patience is short, even that is too long: MPI
gives its core away after each poll, and Linux (since 6.18) takes that for a whole slice of time, milliseconds
for a few KiB. So collectives are then only started, and waited for like all else (`Waiting.run`).
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from os import sched_yield
from typing import TYPE_CHECKING, Any, TypeAlias

from . import _native

if TYPE_CHECKING:
    from mpi4py import MPI

Requests: TypeAlias = "list[MPI.Request]"

# Polls between two sleeps: one poll moves little of what has come over a network.
_POLLS = 8
# A sleep is this part of the time waited so far, within these bounds (seconds).
_PART = 0.1
_SHORTEST = 10e-6
_LONGEST = 500e-6
# With less patience than this, in seconds, nothing blocks inside MPI.
_SHORT = 100e-6
# Messages of so many bytes tell what a byte takes. The estimate rises by one factor with a wait that took
# longer and falls by the other with one that did not, so that three of ten take less: those that did not
# have to wait for their peer, rather than the few that found everything there.
_BULK = 1 << 16
_RISE, _FALL = 1.1, 0.8

# A yield of so many seconds gave the core to another process. From then on the thread has short slices.
_CONTENDED = 50e-6
# One of so many gave it for a whole slice of time. Waits sleep instead, for so many times as long, and each
# time for so many seconds: who polls more often uses up its share of the core, and is late when it counts.
_TAKEN = 500e-6
_AS_LONG = 8.0
_MEANWHILE = 40e-6

_threads = threading.local()
_taken_until = 0.0


def give_way() -> None:
    """Let others have the core between two polls.

    Whoever gives it away by ``sched_yield`` to a process that computes gets it back after a whole slice of
    time, some milliseconds; whoever sleeps is woken. Where only waiting processes want it, yields are
    quicker. Which it is, the last yields tell.
    """
    global _taken_until
    began = time.perf_counter()
    if began < _taken_until:
        _sleep_precisely(_MEANWHILE)
        return
    sched_yield()
    took = time.perf_counter() - began
    if took > _CONTENDED:
        short_slices()
    if took > _TAKEN:
        _taken_until = began + _AS_LONG * took


def short_slices() -> None:
    """Have the scheduler give the calling thread short slices of its core's time, 0.1 ms.

    Linux (from 6.12 on, sched_setattr(2)) then lets the thread go before those with longer ones when it wakes
    up, and gives it the core back sooner after a yield. Its share of the time is the same. Nothing happens
    elsewhere, or where that is not permitted.
    """
    _native.short_slices()


class Waiting:
    """Waits of one world. ``patience`` is in seconds, the same on all processes: they make the same calls.
    ``blocks``: collectives block inside MPI.

    ``clock`` and ``sleep`` are those of `time`.
    """

    def __init__(
        self,
        patience: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.polls = patience == math.inf
        self.blocks = patience >= _SHORT
        self.patience = patience
        self._clock = clock
        self._sleep = sleep or _sleep_precisely
        self._pace: float | None = None  # seconds for a byte

    def apart(self) -> Waiting:
        """Waits of the same kind for other peers: what a byte takes with these says nothing of those."""
        return Waiting(self.patience, self._clock, self._sleep)

    def all(
        self,
        requests: Requests,
        nbytes: int = 0,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Wait until all requests are complete. ``nbytes`` come or go with them, 0: not known.

        ``meanwhile`` is called before each sleep.
        """
        if not requests:
            return
        first, single = requests[0], len(requests) == 1
        if self.polls:
            if single:
                first.Wait()
            else:
                first.Waitall(requests)
            return
        done = first.Test if single else partial(first.Testall, requests)
        learns = nbytes >= _BULK and not self.blocks
        expected = nbytes * self._pace if learns and self._pace is not None else 0.0
        began = self._clock()
        while not any(done() for _ in range(_POLLS)):
            if meanwhile is not None:
                meanwhile()
            waited = self._clock() - began
            if waited < expected:
                pause = expected - waited
            elif waited < self.patience:
                give_way()
                continue
            else:
                pause = _PART * waited
            self._sleep(min(max(pause, _SHORTEST), _LONGEST))
        if learns:
            took = (self._clock() - began) / nbytes
            if self._pace is None:
                self._pace = took
            else:
                self._pace *= _RISE if took > self._pace else _FALL

    def run(
        self,
        comm: MPI.Intracomm,
        call: Callable[..., None],
        start: Callable[..., MPI.Request],
        *arguments: Any,
    ) -> None:
        """Do a collective of all processes of ``comm``. ``call`` blocks in MPI, ``start`` gives a request."""
        if not self.blocks:
            self.all([start(*arguments)])
            return
        if not self.polls:
            self.all([comm.Ibarrier()])
        call(*arguments)


def _sleep_precisely(seconds: float) -> None:
    """``time.sleep``, to some microseconds: Linux adds 50 of them unless a thread asks it not to."""
    if not hasattr(_threads, "precise"):
        _threads.precise = True
        if sys.platform == "linux":
            # prctl(2): PR_SET_TIMERSLACK, in nanoseconds, of the calling thread. Failure costs precision.
            ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
    time.sleep(seconds)
