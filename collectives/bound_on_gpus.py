"""Collectives over NCCL: `bind` makes of one what enqueues it on CUDA's streams (`BoundOnGpus`).

NCCL has no way for reductions that it lacks (`nccl.reduction_codes`), reducers that are programs, sends and
receives that are apart, ragged and empty data, roots that are data, types below a byte. Those take the way
through the host.

Permutes and all-to-alls are grouped sends and receives. NCCL moves contiguous memory: where a dimension that
is not the first grows, shrinks or is split, rows are copied to or from scratch memory before or after.

Whatever is enqueued must be enqueued in the same order by all processes of a group, as with MPI.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Protocol

from . import nccl as nccl_codes
from ._launches import ALL_GATHER, ALL_REDUCE, BROADCAST, RECEIVE, REDUCE_SCATTER, SEND
from .cuda import cuda
from .gpus import Joined
from .nccl import BYTE, IN_PROGRESS, is_supported, nccl
from .ops import Collective, Kind
from .taking_part import check_pair, takes_part
from .types import TensorType

if TYPE_CHECKING:
    from .communicator import BoundCollective

_NOTHING: frozenset[int] = frozenset()


class Copying(Protocol):
    """What copies on streams: `Cuda`, or who notes what it would."""

    def clear(self, target: int, nbytes: int, stream: int) -> None: ...

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None: ...

    def copy_rows(
        self, target: int, to: int, source: int, by: int, width: int, rows: int, stream: int, /
    ) -> None: ...


@dataclass(frozen=True)
class Buffers:
    """Addresses in the memory of one device: of its operands, of its results, of scratch memory."""

    operands: Sequence[int]
    results: Sequence[int]
    scratch: int = 0


# Enqueue something of one device: with this driver, its buffers, its stream.
Step = Callable[["Copying", Buffers, int], None]
# A call of NCCL for them, as `_launches` takes it.
Launch = Callable[[Buffers, int], tuple[int, ...]]


@dataclass
class _Member:
    """A local member of a group, and what it enqueues: copies, then calls of NCCL, then copies.

    ``size``: of the group; ``comm``: its communicator; ``scratch``: bytes of scratch memory.
    """

    size: int = 1
    comm: int = 0
    scratch: int = 0
    before: list[Step] = field(default_factory=list)
    during: list[Launch] = field(default_factory=list)
    after: list[Step] = field(default_factory=list)

    def place(self, nbytes: int) -> int:
        """A place in scratch memory."""
        start = self.scratch
        self.scratch = -(-(start + nbytes) // 256) * 256
        return start


def bind(joined: Joined, collective: Collective, host: BoundCollective) -> BoundOnGpus | None:
    """Prepare a collective; to be called by all processes. None where NCCL has no way for it.

    ``host`` is what the way through the host made of it, which counts what it sends. Raises `CudaError`.
    """
    if not is_supported(collective):
        return None
    groups = [g for g in collective.groups if len(g) > 1]
    if collective.kind is Kind.PERMUTE:
        groups = [tuple(sorted(joined.owner))] if len(joined.owner) > 1 else []
    return BoundOnGpus(joined, collective, host, joined.communicators(groups))


class BoundOnGpus:
    """A collective bound to NCCL, for the local devices.

    ``scratch``: bytes of scratch memory that each device needs in a call.
    """

    prompt = False

    def __init__(
        self,
        joined: Joined,
        collective: Collective,
        host: BoundCollective,
        communicators: Mapping[tuple[int, ...], Mapping[int, int]],
    ) -> None:
        self.collective = collective
        self.messages, self.bytes = host.messages, host.bytes
        if hasattr(host, "payload"):
            self.payload = host.payload
        self.gpus, self._joined = joined.gpus, joined
        self._driver = cuda()
        self._communicators = [c for made in communicators.values() for c in made.values()]
        self._all = communicators
        owner, process = joined.owner, joined.gpus.process
        self._local = {i for i, at in owner.items() if at == process}
        self._groups = [
            (group, [i for i in group if i in self._local])
            for group in collective.groups
            if self._local.intersection(group)
        ]
        self._members = {
            i: self._member(group, group.index(i)) for group, here in self._groups for i in here
        }
        self.scratch = max((m.scratch for m in self._members.values()), default=0)
        self._what = str(collective.kind)
        self._cleared = self._local - self._members.keys()  # results of those in no group
        self._pairs = [
            (k, s, t)
            for k, (s, t) in enumerate(collective.pairs)
            if self._local.intersection((s, t))
        ]

    def stream(self, i: int) -> int:
        """The stream of CUDA's on which a local logical id's part is enqueued."""
        return self.gpus.stream(self._joined.devices[i])

    def failure(self) -> str:
        """What its communicators have met since they were made; empty if nothing. Raises `CudaError` once
        they are aborted."""
        for communicator in self._communicators:
            state = self.gpus.state(communicator)
            if state not in (0, IN_PROGRESS):
                return nccl().describe(state, communicator)
        return ""

    def enqueue(self, buffers: Mapping[int, Buffers], skip: frozenset[int] | None = None) -> None:
        """Put a call for the local ids in ``buffers`` onto their streams.

        Ids that are absent, and ``skip``, as in `BoundCollective.run`. Raises `CudaError`.
        """
        self.begin(buffers, skip)()

    def begin(
        self, buffers: Mapping[int, Buffers], skip: frozenset[int] | None = None
    ) -> Callable[[], None]:
        """The beginning of `enqueue`. Gives the rest, which waits until NCCL, called by another thread, has
        put its part onto the streams. It is to be called before the communicators are used again."""
        launches = self.gpus.launches()
        use, devices = self._driver.use, self._joined.devices
        streams = {i: self.stream(i) for i in buffers}
        if self.collective.kind is Kind.PERMUTE:
            members = self._permuted(buffers, skip or _NOTHING)
            cleared: Collection[int] = ()
        elif len(buffers) == len(self._local):
            members, cleared = self._members, self._cleared
        else:
            kind, local = self.collective.kind, self._local
            members = {
                i: self._members[i]
                for group, here in self._groups
                if takes_part(kind, group, local, buffers)
                for i in here
            }
            cleared = buffers.keys() - members.keys()
        for i, member in members.items():
            if member.before:
                use(devices[i])
            for step in member.before:
                step(self._driver, buffers[i], streams[i])
        context = self._driver.context
        launches.put(
            [
                (context(devices[i]), [call(buffers[i], streams[i]) for call in member.during])
                for i, member in members.items()
            ]
        )

        def rest() -> None:
            self.gpus.launched(self._what)
            for i, member in members.items():
                if member.after:
                    use(devices[i])
                for step in member.after:
                    step(self._driver, buffers[i], streams[i])
            for i in cleared:
                use(devices[i])
                for result, type in zip(buffers[i].results, self.collective.results, strict=True):
                    self._driver.clear(result, type.nbytes, streams[i])

        return rest

    def on_one(
        self, i: int, buffers: Buffers, before: Copying, behind: Copying
    ) -> list[tuple[int, ...]]:
        """What one call enqueues for a local id, with these addresses. Gives NCCL's calls, as `_launches`
        takes them, for stream 0; ``before`` and ``behind`` are asked for the copies around them."""
        member = self._alone(i, buffers)
        for step in member.before:
            step(before, buffers, 0)
        for step in member.after:
            step(behind, buffers, 0)
        return [call(buffers, 0) for call in member.during]

    def _alone(self, i: int, buffers: Buffers) -> _Member:
        if self.collective.kind is Kind.PERMUTE:
            return self._permuted({i: buffers}, _NOTHING)[i]
        if i in self._members:
            return self._members[i]
        cleared = [self._clears(n, t.nbytes) for n, t in enumerate(self.collective.results)]
        return _Member(before=cleared)

    def _permuted(self, buffers: Mapping[int, Buffers], skip: frozenset[int]) -> dict[int, _Member]:
        """What the local devices do in a permute, those excepted that receive nothing and send nothing."""
        types, members = self.collective.operands, {i: _Member() for i in buffers}
        everyone = tuple(sorted(self._joined.owner))
        made = self._all.get(everyone, {})
        received = set()
        for k, source, target in self._pairs:
            if source in self._local and target in self._local:
                check_pair(source, target, buffers)
            if k in skip:
                continue
            for n, type in enumerate(types):
                if source == target and source in buffers:
                    members[source].before.append(self._copies(n, n, type.nbytes))
                    continue
                if source in buffers:
                    to = everyone.index(target)
                    members[source].during.append(
                        self._sends(made[source], to, type.nbytes, operand=n)
                    )
                if target in buffers:
                    at = everyone.index(source)
                    members[target].during.append(
                        self._receives(made[target], at, type.nbytes, result=n)
                    )
            received.add(target)
        for i in buffers.keys() - received:
            for n, type in enumerate(types):
                members[i].before.append(self._clears(n, type.nbytes))
        return members

    def _clears(self, n: int, nbytes: int) -> Step:
        return lambda driver, b, stream: driver.clear(b.results[n], nbytes, stream)

    def _copies(self, operand: int, result: int, nbytes: int) -> Step:
        return lambda driver, b, stream: driver.copy(
            b.results[result], b.operands[operand], nbytes, stream
        )

    def _sends(
        self, comm: int, peer: int, nbytes: int, *, operand: int = -1, offset: int = 0
    ) -> Launch:
        """Send bytes of an operand, or where none is named of scratch memory."""

        def sends(b: Buffers, stream: int) -> tuple[int, ...]:
            source = b.scratch if operand < 0 else b.operands[operand]
            return SEND, source + offset, 0, nbytes, BYTE, peer, comm, stream

        return sends

    def _receives(
        self, comm: int, peer: int, nbytes: int, *, result: int = -1, offset: int = 0
    ) -> Launch:
        def receives(b: Buffers, stream: int) -> tuple[int, ...]:
            target = b.scratch if result < 0 else b.results[result]
            return RECEIVE, 0, target + offset, nbytes, BYTE, peer, comm, stream

        return receives

    def _member(self, group: tuple[int, ...], rank: int) -> _Member:
        """What one member of a group enqueues."""
        collective, size = self.collective, len(group)
        if size == 1:
            return _Member(
                before=[self._copies(n, n, t.nbytes) for n, t in enumerate(collective.operands)]
            )
        member = _Member(size, self._all[group][group[rank]])
        types = list(zip(collective.operands, collective.results, strict=False))
        for n, (type, result) in enumerate(types):
            match collective.kind:
                case Kind.ALL_REDUCE:
                    member.during.append(self._reduces(n, type, member.comm))
                case Kind.BROADCAST:
                    member.during.append(self._broadcasts(n, type.nbytes, member.comm))
                case Kind.ALL_GATHER:
                    self._gather(n, type, member)
                case Kind.REDUCE_SCATTER:
                    self._scatter(n, type, result, member)
                case Kind.ALL_TO_ALL if collective.tuple_form:  # part n goes to member n
                    member.during.append(self._sends(member.comm, n, type.nbytes, operand=n))
                    member.during.append(self._receives(member.comm, n, result.nbytes, result=n))
                case Kind.ALL_TO_ALL:
                    self._exchange(n, type, member)
                case _:
                    raise NotImplementedError(f"{collective.kind} over NCCL")
        return member

    def _reduces(self, n: int, type: TensorType, comm: int) -> Launch:
        rest = (type.size, *self._codes(type), comm)
        return lambda b, stream: (ALL_REDUCE, b.operands[n], b.results[n], *rest, stream)

    def _codes(self, type: TensorType) -> tuple[int, int]:
        assert self.collective.reduction is not None
        codes = nccl_codes.reduction_codes(type.dtype, self.collective.reduction)
        assert codes is not None  # `is_supported`
        return codes

    def _broadcasts(self, n: int, nbytes: int, comm: int) -> Launch:
        rest = (nbytes, BYTE, 0, comm)
        return lambda b, stream: (BROADCAST, b.operands[n], b.results[n], *rest, stream)

    def _rows(self, type: TensorType, parts: int) -> tuple[int, int]:
        """Number and bytes of an operand's rows, of which each has ``parts`` parts along the dimension."""
        rows = prod(type.shape[: self.collective.dimension])
        return rows, type.nbytes // rows // parts

    def _gather(self, n: int, type: TensorType, member: _Member) -> None:
        nbytes, size = type.nbytes, member.size
        rest = (nbytes, BYTE, 0, member.comm)
        rows, width = self._rows(type, 1)
        if rows == 1:
            member.during.append(
                lambda b, stream: (ALL_GATHER, b.operands[n], b.results[n], *rest, stream)
            )
            return
        at = member.place(size * nbytes)
        member.during.append(
            lambda b, stream: (ALL_GATHER, b.operands[n], b.scratch + at, *rest, stream)
        )

        def interleave(driver: Copying, b: Buffers, stream: int) -> None:
            for j in range(size):
                to, source = b.results[n] + j * width, b.scratch + at + j * nbytes
                driver.copy_rows(to, size * width, source, width, width, rows, stream)

        member.after.append(interleave)

    def _scatter(self, n: int, type: TensorType, result: TensorType, member: _Member) -> None:
        rest = (result.size, *self._codes(type), member.comm)
        rows, width = self._rows(type, member.size)
        if rows == 1:
            member.during.append(
                lambda b, stream: (REDUCE_SCATTER, b.operands[n], b.results[n], *rest, stream)
            )
            return
        at = self._apart(n, rows, width, member)
        member.during.append(
            lambda b, stream: (REDUCE_SCATTER, b.scratch + at, b.results[n], *rest, stream)
        )

    def _apart(self, n: int, rows: int, width: int, member: _Member) -> int:
        """Copy an operand's parts along the dimension into scratch memory, one behind the other."""
        size, nbytes = member.size, rows * width
        at = member.place(size * nbytes)

        def separate(driver: Copying, b: Buffers, stream: int) -> None:
            for j in range(size):
                to, source = b.scratch + at + j * nbytes, b.operands[n] + j * width
                driver.copy_rows(to, width, source, size * width, width, rows, stream)

        member.before.append(separate)
        return at

    def _exchange(self, n: int, type: TensorType, member: _Member) -> None:
        """An all-to-all in array form: part j goes to member j, and what comes from it takes its place."""
        size, comm, during = member.size, member.comm, member.during
        rows, width = self._rows(type, size)
        nbytes = rows * width
        if rows == 1:
            for j in range(size):
                during.append(self._sends(comm, j, nbytes, operand=n, offset=j * nbytes))
                during.append(self._receives(comm, j, nbytes, result=n, offset=j * nbytes))
            return
        out = self._apart(n, rows, width, member)
        back = member.place(size * nbytes)
        for j in range(size):
            during.append(self._sends(comm, j, nbytes, offset=out + j * nbytes))
            during.append(self._receives(comm, j, nbytes, offset=back + j * nbytes))

        def together(driver: Copying, b: Buffers, stream: int) -> None:
            for j in range(size):
                to, source = b.results[n] + j * width, b.scratch + back + j * nbytes
                driver.copy_rows(to, size * width, source, width, width, rows, stream)

        member.after.append(together)
