"""Messages of host memory under way between processes, and what is to be done once they have arrived.

They are raw-buffer calls of mpi4py (no pickling) on the calling thread, which MPI must allow from several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from .waiting import Requests, Waiting


def swap(
    comm: MPI.Intracomm,
    sends: Sequence[tuple[np.ndarray, int]],
    receives: Sequence[tuple[np.ndarray, int]],
    tag: int,
    waiting: Waiting,
) -> None:
    """Send and receive (bytes, rank) messages, all at once; returns when they are through."""
    if waiting.polls and len(sends) == len(receives) == 1:
        (send, target), (receive, source) = sends[0], receives[0]
        comm.Sendrecv([send, MPI.BYTE], target, tag, [receive, MPI.BYTE], source, tag)
        return
    post_swap(comm, sends, receives, tag, waiting).wait()


def post_swap(
    comm: MPI.Intracomm,
    sends: Sequence[tuple[np.ndarray, int]],
    receives: Sequence[tuple[np.ndarray, int]],
    tag: int,
    waiting: Waiting,
    finish: Callable[[], None] | None = None,
) -> Posted:
    """The same, under way; ``finish`` is called once they are through."""
    requests = [comm.Irecv([content, MPI.BYTE], source, tag) for content, source in receives]
    requests += [comm.Isend([content, MPI.BYTE], target, tag) for content, target in sends]
    coming, going = (sum(content.nbytes for content, _ in side) for side in (receives, sends))
    return Posted(requests, waiting, finish, max(coming, going))


class Posted:
    """Messages under way, and what is to be done once they have arrived (before anyone reads them)."""

    __slots__ = ("_finish", "_nbytes", "_requests", "_waiting")

    def __init__(
        self,
        requests: Requests,
        waiting: Waiting,
        finish: Callable[[], None] | None = None,
        nbytes: int = 0,
    ) -> None:
        self._requests = requests
        self._waiting = waiting
        self._finish = finish
        self._nbytes = nbytes

    def test(self) -> bool:
        """Whether all is done."""
        requests = self._requests
        done = requests[0].Test() if len(requests) == 1 else MPI.Request.Testall(requests)
        if done:
            self.finish()
        return done

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until all is done. Not to be called once `test` has said so.

        ``meanwhile`` is called now and then, where the wait sleeps.
        """
        self._waiting.all(self._requests, self._nbytes, meanwhile)
        self.finish()

    def finish(self) -> None:
        """Do the rest, once all messages have arrived."""
        if self._finish is not None:
            self._finish()

    def then(self, more: Callable[[], None]) -> Posted:
        """The same messages; ``more()`` is called once they have arrived and all else is done."""

        def finish() -> None:
            self.finish()
            more()

        return Posted(self._requests, self._waiting, finish, self._nbytes)


class PostedParts:
    """Exchanges under way that end one after the other, each with what is to be done then.

    Another process may begin one of them only when those before it are over: none waits for a later one.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Posted]) -> None:
        self._parts = list(parts)

    def test(self) -> bool:
        """Whether all is done."""
        while self._parts and self._parts[0].test():
            self._parts.pop(0)
        return not self._parts

    def wait(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until all is done. Not to be called once `test` has said so."""
        for part in self._parts:
            part.wait(meanwhile)


class Postable:
    """A planned exchange that can be posted: ``post(given, out)``, arguments as of a call.

    ``prompt``: it is small, and all of it is under way once it is posted.
    """

    def __init__(self, post: Callable[[Any, np.ndarray], Posted], prompt: bool = False) -> None:
        self.post = post
        self.prompt = prompt

    def __call__(self, given: Any, out: np.ndarray) -> None:
        self.post(given, out).wait()
