"""The processes of the job over MPI, for one stream: their teams, and messages between two of them.

Messages use the world's communicator, with tags that tell streams and channels apart, so no communicator is
made for them.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property

import numpy as np
from mpi4py import MPI

from ._native import use_mpi
from .memory import as_bytes
from .native import Peers
from .nearby import Nearby, meet
from .posted import Posted, swap
from .team import FIRST_FREE_TAG, Team
from .waiting import Requests, Waiting

# Tags at the upper end, counted from there: of permutes, one for each stream, and of `messages`.
_PERMUTE_TAGS = 1024
TRANSFER_TAGS = (_PERMUTE_TAGS, _PERMUTE_TAGS + 1)
_RESERVED_TAGS = _PERMUTE_TAGS + len(TRANSFER_TAGS)


@cache
def loaded_library() -> ctypes.CDLL:
    """The functions of the library that mpi4py has loaded."""
    return ctypes.CDLL(MPI.__file__)


@cache
def _offer_functions() -> None:
    """Make MPI's functions known to compiled code."""
    library = loaded_library()
    names = ("MPI_Isend", "MPI_Irecv", "MPI_Testall", "MPI_Iprobe")
    addresses = (ctypes.cast(getattr(library, n), ctypes.c_void_p).value for n in names)
    use_mpi(*addresses, MPI._handleof(MPI.BYTE), MPI._sizeof(MPI.Request), MPI._sizeof(MPI.Status))


def tag_bound(comm: MPI.Intracomm) -> int:
    """The largest tag that may be used."""
    return comm.Get_attr(MPI.TAG_UB) or 32767


class MpiWorld:
    """The processes of the job, for one stream. ``comm`` belongs to stretto alone.

    ``waiting`` is how its threads wait, and ``patience_of_code`` the seconds after which waits in compiled
    code sleep between polls, the same on all processes. ``memory``: a name that is the same for processes
    which can share memory, through which compiled code then sends (`nearby`); empty: this one does not.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        stream: int,
        waiting: Waiting,
        patience_of_code: float,
        memory: str = "",
    ) -> None:
        self.comm = comm
        self._memory = memory
        self.patience_of_code = patience_of_code
        self.waiting = waiting
        self.stream = stream
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._teams: dict[tuple[int, ...], Team] = {}
        self._nearby: dict[tuple[int, ...], Nearby | None] = {}

    def team(self, processes: Sequence[int]) -> Team:
        """The team of these processes. Making it waits for all of them, and for no other."""
        key = tuple(sorted(set(processes)))
        if key not in self._teams:
            self._teams[key] = Team(self._joined(key), key, self.waiting.apart())
        return self._teams[key]

    def _joined(self, processes: tuple[int, ...]) -> MPI.Intracomm:
        """A communicator of these processes. Waits for all of them, and for no other."""
        world = self.comm.Get_group()
        group = world.Incl(processes)
        tag = zlib.crc32(repr((self.stream, processes)).encode()) % (1 << 15)
        made = self.comm.Create_group(group, tag)
        group.Free()
        world.Free()
        return made

    def _met(self, team: Team) -> Nearby | None:
        """The processes of this host in a team. Waits for all of it, the first time, on a communicator that
        nobody has yet: others may be in the midst of a collective of the team."""
        if team.processes not in self._nearby:
            comm = self._joined(team.processes)
            self._nearby[team.processes] = meet(comm, self._memory)
            comm.Free()
        return self._nearby[team.processes]

    @cached_property
    def _tag_bound(self) -> int:
        return tag_bound(self.comm)

    @cached_property
    def permute_tag(self) -> int:
        """The tag of this stream's permutes: they are posted in the same order on both sides."""
        return self._tag_bound - self.stream % _PERMUTE_TAGS

    def peers(self, owner: Mapping[int, int]) -> Peers:
        """How compiled code reaches the processes of ``owner``. Waits for all of them, the first time."""
        team = self.team(tuple(owner.values()))
        _offer_functions()
        met = self._met(team)
        near = {} if met is None else met.numbers
        return Peers(
            self.rank,
            owner,
            {process: rank for rank, process in enumerate(team.processes)},
            MPI._handleof(team.comm),
            FIRST_FREE_TAG,
            tag_bound(team.comm),
            self.patience_of_code,
            None if met is None else met.shared,
            {team.processes[rank]: number for rank, number in near.items()},
        )

    def message_tag(self, channel: int, source: int, target: int, devices: int) -> int:
        """The tag of a send from ``source`` to ``target``, which number the devices of their processes."""
        number = (channel * devices + source) * devices + target
        return number % (self._tag_bound + 1 - _RESERVED_TAGS)

    def swap(
        self, sends: Sequence[tuple[np.ndarray, int]], receives: Sequence[tuple[np.ndarray, int]]
    ) -> None:
        """Send and receive (array, process) messages of a permute; returns when they are through."""
        swap(
            self.comm,
            [(as_bytes(array), q) for array, q in sends],
            [(as_bytes(array), q) for array, q in receives],
            self.permute_tag,
            self.waiting,
        )

    def post_swap(
        self, sends: Sequence[tuple[np.ndarray, int]], receives: Sequence[tuple[np.ndarray, int]]
    ) -> Posted:
        """The same, under way."""
        comm, tag = self.comm, self.permute_tag
        requests = [comm.Irecv([as_bytes(a), MPI.BYTE], q, tag) for a, q in receives]
        requests += [comm.Isend([as_bytes(a), MPI.BYTE], q, tag) for a, q in sends]
        return Posted(requests, self.waiting)

    def exchange_memory(
        self, sends: Iterable[tuple[int, int, int]], receives: Iterable[tuple[int, int, int]]
    ) -> None:
        """The same for memory that only MPI can read: (address, bytes, process)."""
        comm, tag, byte, most = self.comm, self.permute_tag, MPI.BYTE, 0
        requests = []
        for call, messages in ((comm.Irecv, receives), (comm.Isend, sends)):
            total = 0
            for address, nbytes, process in messages:
                memory = MPI.buffer.fromaddress(address, nbytes)
                requests.append(call([memory, byte], process, tag))
                total += nbytes
            most = max(most, total)
        self.waiting.all(requests, most)

    def post_receive(self, array: np.ndarray, process: int, tag: int) -> MPI.Request:
        return self.comm.Irecv([as_bytes(array), MPI.BYTE], process, tag)

    def post_send(self, array: np.ndarray, process: int, tag: int) -> MPI.Request:
        return self.comm.Isend([as_bytes(array), MPI.BYTE], process, tag)

    def wait(self, requests: Requests) -> None:
        """Wait for all of them."""
        self.waiting.all(requests)

    def test(self, requests: Requests) -> bool:
        """Whether all of them are complete."""
        return MPI.Request.Testall(requests)

    def close(self) -> None:
        """Free the communicators. All processes of each team must do so."""
        if MPI.Is_finalized():
            return
        for team in self._teams.values():
            team.comm.Free()
        self._teams.clear()
        self._nearby.clear()
