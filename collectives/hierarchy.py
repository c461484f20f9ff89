"""The communicator of the world: memory within a process, MPI between processes.

`create_communicator` makes the communicator of one stream. Its `bind` sorts a collective's groups by the
processes they span: groups within this process are plain copies and reductions (`local.py`), groups that
span the same processes are served together (`spanning.py`), groups elsewhere are left out. With one process
nothing of MPI is imported. All work is done by the thread that calls.

Payload. ``messages`` and ``bytes`` of what is bound count what this process's devices send to other devices
when all of them take part, in memory as well as over MPI, independent of the algorithm: a permute's or
send's operands once for each pair of two devices; a shard of an all-gather and a part of a reduce-scatter
or all-to-all once for each other member; the operands of an all-reduce once for each member of a group of
several; a broadcast's operands once for each member but the root. A ragged all-to-all counts as if all rows
of its input were sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .communicator import BoundCollective, Communicator, Reducer
from .local import local_collective
from .native import ALONE, Peers
from .ops import PROMPT, Collective, Kind
from .point_to_point import BoundPermute, BoundReceive, BoundSend, Done, Mailboxes, Transfer, zeros
from .taking_part import takes_part

if TYPE_CHECKING:
    from mpi4py import MPI

    from .mpi import MpiWorld
    from .posted import Posted, PostedParts

Array = np.ndarray
Operands = Mapping[int, Sequence[Array]]
Results = dict[int, list[Array]]
Step = Callable[[Operands, Results], None]


def create_communicator(
    comm: MPI.Intracomm | None,
    stream: int,
    patience: float = math.inf,
    patience_of_code: float = math.inf,
    memory: str = "",
) -> Communicator:
    """The communicator of stream number ``stream``. ``comm``: MPI's communicator of all processes, or
    None if there is one process. ``patience``: seconds after which waits sleep between polls (`waiting`),
    ``patience_of_code`` those of compiled code, the same on all processes. ``memory``: see `MpiWorld`. Makes
    no MPI call that another process must answer.
    """
    return Hierarchy(comm, stream, patience, patience_of_code, memory)


class Hierarchy:
    """Implements `Communicator`."""

    def __init__(
        self,
        comm: MPI.Intracomm | None,
        stream: int,
        patience: float = math.inf,
        patience_of_code: float = math.inf,
        memory: str = "",
    ) -> None:
        self.mpi: MpiWorld | None = None
        if comm is not None and comm.Get_size() > 1:
            from .mpi import MpiWorld
            from .waiting import Waiting

            self.mpi = MpiWorld(comm, stream, Waiting(patience), patience_of_code, memory)
        self.process = self.mpi.rank if self.mpi else 0
        self.num_processes = self.mpi.size if self.mpi else 1
        self.mailboxes = Mailboxes()
        self.aborted = ""

    def bind(
        self, collective: Collective, owner: Mapping[int, int], reducer: Reducer | None = None
    ) -> BoundCollective:
        """See `Communicator.bind`. Raises ``ValueError`` where the collective contradicts itself."""
        members = [i for ids in (*collective.groups, *collective.pairs) for i in ids]
        unknown = sorted(set(members) - set(owner))
        if unknown:
            raise ValueError(
                f"{collective.kind} names device {unknown[0]}, which the program lacks"
            )
        kind = collective.kind
        if kind is Kind.PERMUTE:
            _check_unique(collective)
            return _Abortable(self, BoundPermute(collective, owner, self.process, self.mpi))
        if kind in (Kind.SEND, Kind.RECV):
            _check_unique(collective)
            bound = BoundSend if kind is Kind.SEND else BoundReceive
            return _Abortable(
                self, bound(collective, owner, self.process, self.mpi, self.mailboxes)
            )
        if len(set(members)) != len(members):
            raise ValueError(f"{kind} has a device twice in its groups {collective.groups}")
        return BoundGroups(self, collective, owner, reducer)

    def peers(self, owner: Mapping[int, int]) -> Peers:
        """See `CallableCommunicator`."""
        return ALONE if self.mpi is None else self.mpi.peers(owner)

    def abort(self, reason: str) -> None:
        """Later calls raise ``RuntimeError(reason)``, receives within the process that wait do so now.

        A thread that waits inside MPI stays there: MPI cannot be interrupted.
        """
        self.aborted = reason
        self.mailboxes.abort(reason)

    def check(self) -> None:
        """Raises ``RuntimeError`` once `abort` was called."""
        if self.aborted:
            raise RuntimeError(self.aborted)

    def close(self) -> None:
        if self.mpi is not None:
            self.mpi.close()


def _check_unique(collective: Collective) -> None:
    for side, name in ((0, "source"), (1, "target")):
        ids = [pair[side] for pair in collective.pairs]
        if len(set(ids)) != len(ids):
            raise ValueError(f"{collective.kind} has a device twice as {name}: {collective.pairs}")


class PendingResults:
    """Implements `Pending`: messages under way, and where their content goes."""

    __slots__ = ("results", "test", "wait")

    def __init__(self, posted: Posted | PostedParts | Done, results: Results) -> None:
        self.results = results
        self.test, self.wait = posted.test, posted.wait


class _Abortable:
    """A point-to-point collective that raises after `Hierarchy.abort`."""

    def __init__(
        self, communicator: Hierarchy, bound: BoundPermute | BoundSend | BoundReceive
    ) -> None:
        self.collective = bound.collective
        self.messages, self.bytes = bound.messages, bound.bytes
        self.payload = bound.payload
        self._communicator = communicator
        self._bound = bound
        self.prompt = isinstance(bound, BoundPermute) and bound.prompt

    def post(self, operands: Operands, skip: frozenset[int] | None = None) -> PendingResults:
        self._communicator.check()
        assert isinstance(self._bound, BoundPermute)
        return PendingResults(*self._bound.post(operands, skip))

    def run(self, operands: Operands, skip: frozenset[int] | None = None) -> Results:
        self._communicator.check()
        return self._bound.run(operands, skip)

    def start(self, operands: Operands, skip: frozenset[int] | None = None) -> Transfer:
        self._communicator.check()
        return self._bound.start(operands, skip)


class BoundGroups:
    """A collective over groups, for the local devices of this process."""

    def __init__(
        self,
        communicator: Hierarchy,
        collective: Collective,
        owner: Mapping[int, int],
        reducer: Reducer | None,
    ) -> None:
        self.collective = collective
        self._communicator = communicator
        self._owner = owner
        self._reducer = reducer
        self._count = len(collective.results)
        process = communicator.process
        self._local = {i for i, at in owner.items() if at == process}
        self._groups = [g for g in collective.groups if self._local.intersection(g)]
        self._plans: dict[frozenset[int], list[Step]] = {}
        self._full = self._plan(self._groups)
        only = self._full[0] if len(self._full) == 1 else None
        self._post = getattr(only, "post", None)
        mpi = communicator.mpi
        self.ahead = self._post is not None and mpi is not None and not mpi.waiting.blocks
        self.prompt = getattr(only, "prompt", False)
        within = all(len({owner[i] for i in group}) == 1 for group in self._groups)
        if within and sum(t.nbytes for t in collective.operands) <= PROMPT:
            self._post, self.prompt = self._run_locally, True
        members = {i for group in self._groups for i in group}
        self._idle = self._local - members
        self.messages, self.bytes = self._payload()

    def run(self, operands: Operands, skip: frozenset[int] | None = None) -> Results:
        assert skip is None  # there are no pairs to skip
        self._communicator.check()
        everyone = len(operands) == len(self._local)
        plan = self._full if everyone else self._plan_for(frozenset(operands))
        count = self._count
        results: Results = {i: [None] * count for i in operands}  # type: ignore[list-item]
        for step in plan:
            step(operands, results)
        for i in self._idle:
            if i in results:
                results[i] = zeros(self.collective.results)
        return results

    def post(self, operands: Operands, skip: frozenset[int] | None = None) -> PendingResults:
        self._communicator.check()
        assert self._post is not None
        count = self._count
        results: Results = {i: [None] * count for i in operands}  # type: ignore[list-item]
        posted = self._post(operands, results)
        for i in self._idle:
            results[i] = zeros(self.collective.results)
        return PendingResults(posted, results)

    def _run_locally(self, operands: Operands, results: Results) -> Done:
        for step in self._full:
            step(operands, results)
        return Done()

    def start(self, operands: Operands, skip: frozenset[int] | None = None) -> Transfer:
        raise TypeError("only sends and receives are started without being waited for")

    def _plan_for(self, present: frozenset[int]) -> list[Step]:
        """The plan for those groups that are there."""
        if present not in self._plans:
            kind, local = self.collective.kind, self._local
            groups = [g for g in self._groups if takes_part(kind, g, local, present)]
            self._plans[present] = self._plan(groups)
        return self._plans[present]

    def _plan(self, groups: Sequence[tuple[int, ...]]) -> list[Step]:
        owner, mpi = self._owner, self._communicator.mpi
        steps: list[Step] = []
        spanning: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for group in groups:
            processes = tuple(sorted({owner[i] for i in group}))
            if len(processes) == 1:
                steps.append(self._local_step(group))
            else:
                spanning.setdefault(processes, []).append(group)
        # Teams in one order on all processes, so that nobody makes them, or calls them, crosswise.
        for processes in sorted(spanning):
            from .spanning import spanning_collective

            if mpi is None:
                raise ValueError(
                    f"{self.collective.kind} spans processes {processes}, there is one"
                )
            steps.append(
                spanning_collective(
                    self.collective,
                    spanning[processes],
                    owner,
                    mpi.team(processes),
                    self._reducer,
                )
            )
        return steps

    def _local_step(self, group: tuple[int, ...]) -> Step:
        run = local_collective(self.collective, group, self._reducer)

        def step(operands: Operands, results: Results) -> None:
            outputs = run([operands[i] for i in group])
            for i, arrays in zip(group, outputs, strict=True):
                results[i] = arrays

        return step

    def _payload(self) -> tuple[int, int]:
        collective = self.collective
        nbytes = sum(t.nbytes for t in collective.operands)
        messages = total = 0
        for group in self._groups:
            others = len(group) - 1
            members = len(self._local.intersection(group))
            if not others:
                continue
            if collective.kind is Kind.BROADCAST:
                members = others * (group[0] in self._local)
                sent, size = members, sum(t.nbytes for t in collective.results)
            elif collective.kind is Kind.ALL_REDUCE:
                sent, size = members, nbytes
            elif collective.kind is Kind.ALL_GATHER:
                sent, size = members * others, nbytes
            else:
                whole = collective.operands[0].nbytes
                data = whole if collective.kind is Kind.RAGGED_ALL_TO_ALL else nbytes
                sent, size = members * others, data // len(group)
            messages += sent
            total += sent * size
        return messages, total
