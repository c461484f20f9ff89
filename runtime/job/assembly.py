"""Processes that exchange a few bytes to agree on something."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Protocol

import numpy as np


class Assembly(Protocol):
    """Processes that exchange a few bytes. All of them make the same calls."""

    def all_equal(self, digest: bytes) -> bool:
        """Whether all processes gave the same 16 bytes."""
        ...

    def exchange(self, data: bytes) -> dict[int, bytes]:
        """What every process gave, by rank."""
        ...


class MpiAssembly:
    """Processes with a communicator of their own; made by all of them together."""

    def __init__(self, comm: Any, processes: tuple[int, ...]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._processes = processes
        world = comm.Get_group()
        group = world.Incl(processes)
        tag = int.from_bytes(sha256(repr(processes).encode()).digest()[:2], "big") >> 1
        self._comm = comm.Create_group(group, tag)
        group.Free()
        world.Free()

    def all_equal(self, digest: bytes) -> bool:
        own = np.frombuffer(digest, np.int64)
        # The maximum of x and of ~x are x and ~x on everybody only if all have the same x.
        sent = np.concatenate([own, ~own])
        highest = np.empty_like(sent)
        self._comm.Allreduce(sent, highest, self._mpi.MAX)
        return bool((highest == np.concatenate([highest[:2], ~highest[:2]])).all())

    def exchange(self, data: bytes) -> dict[int, bytes]:
        size = self._comm.Get_size()
        lengths = np.empty(size, np.int64)
        self._comm.Allgather(np.array([len(data)], np.int64), lengths)
        whole = bytearray(int(lengths.sum()))
        self._comm.Allgatherv(data, [whole, lengths.tolist(), self._mpi.BYTE])
        ends = np.cumsum(lengths)
        return {
            rank: bytes(whole[end - length : end])
            for rank, end, length in zip(self._processes, ends, lengths, strict=True)
        }
