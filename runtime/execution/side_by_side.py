"""Calls on several threads: each on one of its own where they may wait for each other, or shared among a few.

Functions that a program calls back may meet those of other devices: in a barrier, through a queue, as the
kernels do that JAX's Pallas interprets on several devices. One device after the other would wait for ever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from ..errors import StrettoError
from ..job.exits import await_at_exit, grace
from .called_back import CalledBack
from .stream import Completions, Event

Result = TypeVar("Result")
# Errors of functions that were called back, and what gives the result of a call once it has ended.
Heard = SimpleQueue[Callable[[], Any] | StrettoError]

# Seconds that a run gets to end once a function has raised, so that the engine says what failed.
_MOMENT = 0.5
# No limit that a process comes to: a call that had to wait for a thread might be what the others wait for.
_threads = Completions("stretto-callback", limit=1 << 16)
_helpers = Completions("stretto-compute")


def side_by_side(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Results of ``calls``, in order. Raises the first error at once: the others might wait for ever."""
    ended: SimpleQueue[tuple[int, Result | None, BaseException | None]] = SimpleQueue()

    def run(index: int, call: Callable[[], Result]) -> None:
        try:
            ended.put((index, call(), None))
        except BaseException as error:
            ended.put((index, None, error))

    for index, call in enumerate(calls):
        _threads.submit(partial(run, index, call))
    results: dict[int, Result] = {}
    while len(results) < len(calls):
        index, result, error = ended.get()
        if error is not None:
            raise error
        results[index] = result  # type: ignore[assignment]
    return [results[index] for index in range(len(calls))]


def among(threads: int, calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Results of ``calls``, in order, none of which waits for another. The caller and ``threads - 1`` others
    make them: each takes the next when it has made one. Raises the first error once none is being made.
    """
    left = iter(enumerate(calls))  # under Python's lock each item goes to one thread
    ended: SimpleQueue[tuple[int, Result | None, BaseException | None]] = SimpleQueue()

    def work() -> None:
        for index, call in left:
            try:
                ended.put((index, call(), None))
            except BaseException as error:
                ended.put((index, None, error))
                for other, _ in left:  # these are not begun
                    ended.put((other, None, None))

    for _ in range(min(threads, len(calls)) - 1):
        _helpers.submit(work)
    work()
    results: dict[int, Result] = {}
    failure: BaseException | None = None
    for _ in calls:
        index, result, error = ended.get()
        failure = failure or error
        results[index] = result  # type: ignore[assignment]
    if failure is not None:
        raise failure
    return [results[index] for index in range(len(calls))]


def beside(call: Callable[[], Result]) -> Event:
    """Have another thread make the call, whose result is the event's. Where Python is ending and begins no
    threads it is made here."""
    event = Event()
    _helpers.submit(partial(event.set_to, call))
    return event


def or_error(call: Callable[[], Result], called: CalledBack) -> Result:
    """The result of ``call``, which runs several devices. Raises its error; or that of a function which the
    program calls back and which raised, if ``call`` does not end: the functions of others may wait for it.
    """
    heard: Heard = SimpleQueue()
    with called.listened(heard.put):
        return unless_heard(call, heard)


def unless_heard(call: Callable[[], Result], heard: Heard) -> Result:
    """`or_error` where somebody listens already, and puts what functions raised into ``heard``."""

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            heard.put(partial(_raise, error))
        else:
            heard.put(lambda: result)

    _threads.submit(run)
    failure, until = None, math.inf
    while True:
        try:
            first = heard.get(timeout=None if failure is None else max(until - monotonic(), 0))
        except Empty:
            assert failure is not None
            raise failure from None
        if not isinstance(first, StrettoError):
            return first()
        if failure is None:
            failure, until = first, monotonic() + _MOMENT


def _raise(error: BaseException) -> Any:
    raise error


def await_left() -> None:
    """`await_idle` for the threads of `side_by_side`: after an error some may still wait for the call that
    failed. And for those of `among`."""
    await_idle(_threads)
    await_idle(_helpers)


def await_idle(threads: Completions) -> None:
    """Wait at the end of the process until these threads have nothing to do, for the options' ``grace`` at
    most: Python cannot end a thread that is inside of XLA, and aborts."""
    deadline = monotonic() + grace()
    await_at_exit(lambda seconds: threads.idle(seconds) or monotonic() > deadline)
