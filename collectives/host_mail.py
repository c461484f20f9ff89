"""Messages between processes of one host through memory that they share, for the wires of compiled code.

Each message of a `wires.Wire` has a mailbox of its own: the sender copies it in, the receiver copies it out,
and the next one waits until that has been done. Two counters say which: messages put in, and taken out. All
state is in the mailbox, so that another table for the same program goes on where one left off. At the
beginning of the memory each process has a bell, at which it sleeps when it has polled for long enough, and
which whoever does something for it rings (`_native`).

`Layout` places the mailboxes. It follows from the program alone: each process plans the wires of all others
too, so nothing is exchanged. `share` makes the memory; where a process cannot map it, since it is on another
host or in a container of its own, all use MPI.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .wires import Wire

if TYPE_CHECKING:
    from mpi4py import MPI

# Bytes of a cache line. A bell is one, and so are the two counters of a mailbox.
LINE = 64
HEADER = 2 * LINE
# Larger messages are MPI's, and so are all of a segment where the whole would be larger. Both in bytes.
LARGEST = 1 << 16
WHOLE = 1 << 24
# With more processes than this, planning the wires of all of them in each takes longer than it saves.
MOST = 16

_FOLDER = "/dev/shm"
# Of what is free there, this part at most: MPI and what ranks compile for each other live there too, and a
# container may have 64 MiB.
_SHARE = 0.25


class Box(NamedTuple):
    """A mailbox: of a round of a wire, from one process to another."""

    round: int
    source: int
    target: int


# By a group's number: where the mailboxes of its wire are. Groups that use MPI have none.
Boxes = Mapping[int, Mapping[Box, int]]


class Layout:
    """Places for mailboxes, one behind the other. ``end``: bytes so far."""

    def __init__(self, processes: int) -> None:
        self.end = processes * LINE

    def place(self, wires: Mapping[int, Wire]) -> Mapping[Box, int] | None:
        """The mailboxes of a group whose processes have these wires; None if a message is too large."""
        found: dict[Box, int] = {}
        end = self.end
        for process, wire in sorted(wires.items()):
            for number, round_ in enumerate(wire.rounds):
                for message in round_.sends:
                    if message.nbytes > LARGEST:
                        return None
                    found[Box(number, process, message.process)] = end
                    end += HEADER + -(-message.nbytes // LINE) * LINE
        if end > WHOLE:
            return None
        self.end = end
        return found


class HostMemory:
    """Memory that processes of a host share. It lasts as long as one of them has it."""

    def __init__(self, mapped: mmap.mmap) -> None:
        import numpy as np

        self._mapped = mapped
        self.address: int = np.frombuffer(mapped, np.uint8).ctypes.data
        self.nbytes = len(mapped)


def share(comm: MPI.Intracomm, nbytes: int) -> HostMemory | None:
    """Memory of so many bytes, all zero, for the processes of a communicator; None if they cannot share it.

    Called by all of them. Nothing is left of it when they have ended, however they do.
    """
    name, token, made = "", b"", None
    if comm.Get_rank() == 0 and sys.platform == "linux":
        token = secrets.token_bytes(LINE)
        name = f"{_FOLDER}/stretto-mail-{os.getuid()}-{secrets.token_hex(12)}"
        try:
            made = _create(name, nbytes, token)
        except OSError:
            name = ""
    name, token = comm.bcast((name, token))
    if name and made is None:
        try:
            made = _open(name, nbytes, token)
        except OSError:
            made = None
    everybody = all(comm.allgather(made is not None))
    if comm.Get_rank() == 0 and name:
        os.unlink(name)
        if everybody and made is not None:
            made[nbytes:] = bytes(LINE)
    return HostMemory(made) if everybody and made is not None else None


def _create(name: str, nbytes: int, token: bytes) -> mmap.mmap:
    folder = os.statvfs(_FOLDER)
    if nbytes > _SHARE * folder.f_bavail * folder.f_frsize:
        raise OSError(errno.ENOSPC, "would leave little for others", _FOLDER)
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes + LINE)  # or a write might find no memory there
        mapped = mmap.mmap(descriptor, nbytes + LINE)
    except OSError:
        os.unlink(name)
        raise
    finally:
        os.close(descriptor)
    mapped[nbytes:] = token
    return mapped


def _open(name: str, nbytes: int, token: bytes) -> mmap.mmap | None:
    descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW)
    try:
        mapped = mmap.mmap(descriptor, nbytes + LINE)
    except ValueError:  # another file of this name
        return None
    finally:
        os.close(descriptor)
    return mapped if mapped[nbytes:] == token else None


def addresses(
    wire: Wire, process: int, boxes: Mapping[Box, int], memory: HostMemory
) -> Sequence[Sequence[Any]]:
    """For each round of a process's wire the addresses of its mailboxes: receives, then sends."""
    return [
        [
            *(memory.address + boxes[Box(n, m.process, process)] for m in r.receives),
            *(memory.address + boxes[Box(n, process, m.process)] for m in r.sends),
        ]
        for n, r in enumerate(wire.rounds)
    ]
