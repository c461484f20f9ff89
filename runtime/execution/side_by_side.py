"""Calls that may wait for each other: each on a thread of its own.

Functions that a program calls back may meet those of other devices: in a barrier, through a queue, as the
kernels do that JAX's Pallas interprets on several devices. One device after the other would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from time import monotonic
from typing import TypeVar

from ..job.exits import await_at_exit, grace
from .stream import Completions

Result = TypeVar("Result")

# No limit that a process comes to: a call that had to wait for a thread might be what the others wait for.
_threads = Completions("stretto-callback", limit=1 << 16)


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


def await_left() -> None:
    """`await_idle` for the threads of `side_by_side`: after an error some may still wait for the call that
    failed."""
    await_idle(_threads)


def await_idle(threads: Completions) -> None:
    """Wait at the end of the process until these threads have nothing to do, for the options' ``grace`` at
    most: Python cannot end a thread that is inside of XLA, and aborts."""
    deadline = monotonic() + grace()
    await_at_exit(lambda seconds: threads.idle(seconds) or monotonic() > deadline)
