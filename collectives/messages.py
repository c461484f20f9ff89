"""Messages between processes that their receiver has not asked for.

A message is its head, a few bytes that describe it, and any number of contents, each an array. Messages of
one process to another arrive in the order in which they were sent, and so do contents. One thread of each
process calls everything here; no call blocks.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from mpi4py import MPI

from .memory import as_bytes
from .mpi import TRANSFER_TAGS, tag_bound


class Delivery(Protocol):
    """A message under way."""

    def Test(self) -> bool:
        """Whether it is through: then its memory is the caller's again. Not to be called after that."""
        ...


class Messages(Protocol):
    """Sends and receives the messages of one process."""

    def post(self, process: int, head: bytes) -> Delivery:
        """Send a message."""
        ...

    def post_content(self, process: int, content: np.ndarray) -> Delivery:
        """Send a content of the message before; the array must not be written to until it is through."""
        ...

    def take(self) -> tuple[int, bytes] | None:
        """The next message that has arrived: who sent it, and its head."""
        ...

    def take_content(self, process: int, into: np.ndarray) -> Delivery:
        """Receive the next content from a process into an array of its size."""
        ...


class MpiMessages:
    """`Messages` over MPI. ``comm`` belongs to stretto; two of its tags are used."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._head_tag, self._content_tag = (tag_bound(comm) - tag for tag in TRANSFER_TAGS)

    def post(self, process: int, head: bytes) -> MPI.Request:
        return self._comm.Isend([head, MPI.BYTE], process, self._head_tag)

    def post_content(self, process: int, content: np.ndarray) -> MPI.Request:
        return self._comm.Isend([as_bytes(content), MPI.BYTE], process, self._content_tag)

    def take(self) -> tuple[int, bytes] | None:
        status = MPI.Status()
        # A matched probe: nothing else can receive what it has found.
        message = self._comm.Improbe(MPI.ANY_SOURCE, self._head_tag, status)
        if message is None:
            return None
        head = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([head, MPI.BYTE])
        return status.Get_source(), bytes(head)

    def take_content(self, process: int, into: np.ndarray) -> MPI.Request:
        return self._comm.Irecv([as_bytes(into), MPI.BYTE], process, self._content_tag)
