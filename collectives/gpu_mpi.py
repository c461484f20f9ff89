"""Collectives between GPUs by MPI: it is given device memory, where its library takes that (CUDA-aware MPI).

`library_takes` asks the library, `OnDevices` is one stream's. What only moves data is given to MPI: permutes,
all-gathers, all-to-alls and broadcasts, as messages. Reductions are not: MPI libraries copy what they reduce
to the host's memory (coll/cuda of Open MPI, ``MPIR_Coll_host_buffer_alloc`` of MPICH), as stretto's own way
through it does, in pieces that overlap. MPI's collectives are not used, since Open MPI's nonblocking ones
take the host's memory only.

A part of an array that is not contiguous is copied to or from scratch memory, on the device. Devices of one
process copy from each other's memory, what has come for several of them too: it is sent to a process once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Any

from .bound_on_gpus import Buffers
from .cuda import cuda
from .ops import Collective, Kind
from .taking_part import check_pair, takes_part

if TYPE_CHECKING:
    from .communicator import BoundCollective
    from .mpi import MpiWorld

MOVES = frozenset({Kind.PERMUTE, Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST})
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA
_ALIGNED = 256
_NOTHING: frozenset[int] = frozenset()


def library_takes(library: Any) -> tuple[bool, str]:
    """Whether an MPI library takes pointers to GPUs' memory, and how that is known.

    ``library``: MPI's functions as attributes, as of `ctypes.CDLL`. To be called once MPI is initialized.
    MPICH from 4.0 on and those made of it have ``MPIX_GPU_query_support``, Open MPI
    ``MPIX_Query_cuda_support``. A library that has neither does not say, and is taken not to.
    """
    query = getattr(library, "MPIX_GPU_query_support", None)
    if query is not None:
        supported = ctypes.c_int(0)
        failed = query(ctypes.c_int(_CUDA), ctypes.byref(supported))
        return bool(supported.value) and not failed, "by MPIX_GPU_query_support"
    query = getattr(library, "MPIX_Query_cuda_support", None)
    if query is not None:
        return bool(query()), "by MPIX_Query_cuda_support"
    return False, "its library does not say"


class _Memory(IntEnum):
    """Of what an address is."""

    OPERAND = 0
    RESULT = 1
    SCRATCH = 2


@dataclass(frozen=True)
class _Place:
    """Rows of bytes in a device's memory, ``pitch`` bytes from one to the next. ``n``: of which array."""

    memory: _Memory
    n: int
    offset: int
    pitch: int

    def address(self, buffers: Buffers) -> int:
        if self.memory is _Memory.SCRATCH:
            return buffers.scratch + self.offset
        arrays = buffers.operands if self.memory is _Memory.OPERAND else buffers.results
        return arrays[self.n] + self.offset


@dataclass(frozen=True)
class _Move:
    """What device ``source`` has for device ``target``: ``rows`` rows of ``width`` bytes."""

    source: int
    target: int
    given: _Place
    made: _Place
    rows: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.width

    def is_contiguous(self, place: _Place) -> bool:
        return self.rows == 1 or place.pitch == self.width


@dataclass(frozen=True)
class _Copy:
    """A copy that is enqueued on the stream of ``target``."""

    move: _Move

    def enqueue(self, buffers: Mapping[int, Buffers], stream: int) -> None:
        move, driver = self.move, cuda()
        to = move.made.address(buffers[move.target])
        given = move.given.address(buffers[move.source])
        if move.is_contiguous(move.given) and move.is_contiguous(move.made):
            driver.copy(to, given, move.nbytes, stream)
        else:
            pitches = move.made.pitch, move.given.pitch
            driver.copy_rows(to, pitches[0], given, pitches[1], move.width, move.rows, stream)


@dataclass(frozen=True)
class _Message:
    """Contiguous bytes of a local device that go to or come from a process."""

    device: int
    place: _Place
    nbytes: int
    process: int


class Plan:
    """What the local devices do in a call.

    ``awaited``: by device, those whose streams its own waits for before ``before``; ``before``: copies ahead
    of the messages; ``cleared``: results that get zeros; ``sends``, ``receives``: in the order in which they
    are posted; ``after``: copies behind them; ``readers``: by device, those that read its memory in these.
    """

    def __init__(self) -> None:
        self.awaited: dict[int, set[int]] = {}
        self.before: dict[int, list[_Copy]] = {}
        self.cleared: dict[int, list[tuple[int, int]]] = {}
        self.sends: list[_Message] = []
        self.receives: list[_Message] = []
        self.after: dict[int, list[_Copy]] = {}
        self.readers: dict[int, set[int]] = {}


class OnDevices:
    """What one stream of the executor has of MPI on GPUs' memory. ``mpi``: its processes."""

    def __init__(self, mpi: MpiWorld, chosen: str) -> None:
        """``chosen``: ``auto`` goes by what the library says, ``1`` says yes, ``0`` no."""
        self.mpi = mpi
        self._chosen = chosen
        self._agreed: dict[tuple[int, ...], str] = {}

    def problem(self, owner: Mapping[int, int]) -> str:
        """Why the processes of a program do not give MPI their GPUs' memory; empty if they do. To be called
        by all of them, who get the same answer."""
        processes = tuple(sorted(set(owner.values())))
        if processes not in self._agreed:
            from .mpi import loaded_library

            takes, how = library_takes(loaded_library())
            if self._chosen != "auto":
                takes, how = self._chosen == "1", "by STRETTO_CUDA_MPI"
            mine = "" if takes else f"process {self.mpi.rank}: MPI takes no pointers to GPUs, {how}"
            everyone = self.mpi.team(processes).comm.allgather(mine)
            self._agreed[processes] = next(filter(None, everyone), "")
        return self._agreed[processes]

    def bind(
        self,
        collective: Collective,
        owner: Mapping[int, int],
        devices: Mapping[int, int],
        host: BoundCollective,
    ) -> BoundOnDevices | None:
        """Prepare a collective; None where this is no way for it. ``devices``: CUDA's numbers of the local
        ones by logical id. ``host``: what the way through the host's memory made of it."""
        if not is_supported(collective):
            return None
        return BoundOnDevices(self.mpi, collective, owner, devices, host)


def is_supported(collective: Collective) -> bool:
    """Whether it only moves whole bytes to places that are known."""
    types = (*collective.operands, *collective.results)
    return (
        collective.kind in MOVES
        and not collective.dynamic_root
        and all(t.element.bits >= 8 and t.size for t in types)
    )


class BoundOnDevices:
    """A collective bound to MPI on device memory, for the local devices.

    ``scratch``: bytes of scratch memory that each device needs in a call. A call is a `plan`, what its copies
    need enqueued (`before`), the messages (`exchange`), copies again (`after`).
    """

    prompt = False

    def __init__(
        self,
        mpi: MpiWorld,
        collective: Collective,
        owner: Mapping[int, int],
        devices: Mapping[int, int],
        host: BoundCollective,
    ) -> None:
        self.collective = collective
        self.messages, self.bytes = host.messages, host.bytes
        if hasattr(host, "payload"):
            self.payload = host.payload
        self._mpi, self._owner, self._devices = mpi, owner, devices
        self._plans: dict[tuple[frozenset[int], frozenset[int]], Plan] = {}
        self.scratch = 0
        self.plan(devices)

    def plan(self, present: Mapping[int, Any], skip: frozenset[int] | None = None) -> Plan:
        """What the local ids ``present`` do; ``skip`` as in `BoundCollective.run`. Raises ``RuntimeError``
        where only some local members of a group are present."""
        key = frozenset(present), skip or _NOTHING
        if key not in self._plans:
            self._plans[key] = self._planned(*key)
        return self._plans[key]

    def _planned(self, present: frozenset[int], skip: frozenset[int]) -> Plan:
        plan, filled = Plan(), dict.fromkeys(present, 0)
        received: set[int] = set()
        sent: set[tuple[int, _Place, int]] = set()
        came: dict[tuple[int, _Place], tuple[int, _Place]] = {}

        def scratch(device: int, move: _Move) -> _Place:
            at = filled[device]
            filled[device] = -(-(at + move.nbytes) // _ALIGNED) * _ALIGNED
            return _Place(_Memory.SCRATCH, 0, at, move.width)

        def copy(
            to: dict[int, list[_Copy]], move: _Move, device: int, given: _Place, made: _Place
        ) -> None:
            target = move.target if made is move.made else device
            copied = _Move(device, target, given, made, move.rows, move.width)
            to.setdefault(target, []).append(_Copy(copied))

        for move in self._moves(present, skip):
            source, target = move.source, move.target
            if target in present:
                received.add(target)
            if source in present and target in present:
                copy(plan.before, move, source, move.given, move.made)
                if source != target:
                    plan.awaited.setdefault(target, set()).add(source)
            elif source in present:
                process = self._owner[target]
                if (source, move.given, process) in sent:
                    continue
                sent.add((source, move.given, process))
                place = move.given
                if not move.is_contiguous(place):
                    place = scratch(source, move)
                    copy(plan.before, move, source, move.given, place)
                plan.sends.append(_Message(source, place, move.nbytes, process))
            elif (source, move.given) in came:
                device, place = came[source, move.given]
                copy(plan.after, move, device, place, move.made)
                plan.readers.setdefault(device, set()).add(target)
            else:
                place = move.made
                if not move.is_contiguous(place):
                    place = scratch(target, move)
                    copy(plan.after, move, target, place, move.made)
                came[source, move.given] = target, place
                plan.receives.append(_Message(target, place, move.nbytes, self._owner[source]))
        for device in present - received:
            plan.cleared[device] = [(n, t.nbytes) for n, t in enumerate(self.collective.results)]
        self.scratch = max(self.scratch, *filled.values(), 0)
        return plan

    def _moves(self, present: frozenset[int], skip: frozenset[int]) -> Iterator[_Move]:
        """Those with a local device, by source, then by target: messages between two processes have one order
        on both sides."""
        collective = self.collective
        if collective.kind is Kind.PERMUTE:
            for k, (source, target) in enumerate(collective.pairs):
                if source in self._devices and target in self._devices:
                    check_pair(source, target, present)
                if k in skip or not {source, target} & present:
                    continue
                for n, type in enumerate(collective.operands):
                    whole = _Place(_Memory.OPERAND, n, 0, type.nbytes)
                    there = _Place(_Memory.RESULT, n, 0, type.nbytes)
                    yield _Move(source, target, whole, there, 1, type.nbytes)
            return
        for group in collective.groups:
            here = self._devices.keys() & group
            if not here or not takes_part(collective.kind, group, here, present):
                continue
            senders = group[:1] if collective.kind is Kind.BROADCAST else group
            for j, source in enumerate(senders):
                for k, target in enumerate(group):
                    if source in here or target in here:
                        yield from self._parts(source, target, j, k, len(group))

    def _parts(self, source: int, target: int, j: int, k: int, size: int) -> Iterator[_Move]:
        """What member ``j`` of a group has for member ``k``."""
        collective, kind = self.collective, self.collective.kind
        if kind is Kind.ALL_TO_ALL and collective.tuple_form:
            nbytes = collective.operands[k].nbytes
            given, made = (
                _Place(_Memory.OPERAND, k, 0, nbytes),
                _Place(_Memory.RESULT, j, 0, nbytes),
            )
            yield _Move(source, target, given, made, 1, nbytes)
            return
        # A broadcast with a root that is data has one operand more; it is not for this.
        for n, type in enumerate(collective.operands[: len(collective.results)]):
            if kind is Kind.BROADCAST:
                rows, parts, taken, put = 1, 1, 0, 0
            else:
                rows = prod(type.shape[: collective.dimension])
                parts = size
                taken, put = (0, j) if kind is Kind.ALL_GATHER else (k, j)
            row = type.nbytes // rows
            width = row // parts if kind is Kind.ALL_TO_ALL else row
            pitch = width * parts
            given = _Place(
                _Memory.OPERAND, n, taken * width, pitch if kind is Kind.ALL_TO_ALL else width
            )
            made = _Place(_Memory.RESULT, n, put * width, pitch)
            yield _Move(source, target, given, made, rows, width)

    def before(self, plan: Plan, device: int, buffers: Mapping[int, Buffers], stream: int) -> None:
        """Enqueue what a local device copies and clears ahead of the messages."""
        driver = cuda()
        driver.use(self._devices[device])
        for n, nbytes in plan.cleared.get(device, ()):
            driver.clear(buffers[device].results[n], nbytes, stream)
        for copy in plan.before.get(device, ()):
            copy.enqueue(buffers, stream)

    def exchange(
        self, plan: Plan, buffers: Mapping[int, Buffers], check: Callable[[], None]
    ) -> None:
        """Send and receive: blocks. All that is copied before must be there, and memory that is written be
        free. ``check`` raises if nothing is to be sent any more."""
        check()
        if not (plan.sends or plan.receives):
            return
        self._mpi.exchange_memory(self._at(plan.sends, buffers), self._at(plan.receives, buffers))

    def _at(
        self, messages: Sequence[_Message], buffers: Mapping[int, Buffers]
    ) -> Iterator[tuple[int, int, int]]:
        """(address, bytes, process) of messages in their order; MPI is called with their device current, as
        some libraries want it."""
        use, devices = cuda().use, self._devices
        for message in messages:
            use(devices[message.device])
            yield message.place.address(buffers[message.device]), message.nbytes, message.process

    def after(self, plan: Plan, device: int, buffers: Mapping[int, Buffers], stream: int) -> None:
        """Enqueue what it copies behind the messages."""
        copies = plan.after.get(device, ())
        if copies:
            cuda().use(self._devices[device])
        for copy in copies:
            copy.enqueue(buffers, stream)
