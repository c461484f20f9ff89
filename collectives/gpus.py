"""GPUs and NCCL's communicators: what one stream of the executor has of them, and how processes meet.

`Gpus` belongs to a stream. A program's processes `join`; then collectives can be bound to NCCL
(`bound_on_gpus.bind`). Groups have a communicator of NCCL each. The host waits for nothing but communicators
that are made.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ._launches import Launches
from .cuda import CudaError, cuda
from .nccl import IN_PROGRESS, nccl

if TYPE_CHECKING:
    from .mpi import MpiWorld

# A rank that is not there cannot be told from one that is late.
PATIENCE = 300.0
_SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"  # by which NCCL from 2.30 on allows ranks to share a GPU
# Seconds of a wait for calls of NCCL in which no handler of a signal runs.
_AT_ONCE = 0.1


def problem_here(devices: Sequence[int]) -> str:
    """Why this process cannot use NCCL, or an empty string."""
    try:
        driver, _ = cuda(), nccl()
        if max(devices, default=0) >= driver.device_count():
            return f"CUDA shows {driver.device_count()} GPUs"
    except (OSError, AttributeError, CudaError) as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Offer:
    """What a process has for collectives over NCCL: why it has nothing; its host; its GPUs, told apart in all
    processes alike; how many it uses; and whether it shares them with others."""

    problem: str
    host: str
    gpus: tuple[bytes, ...] = ()
    devices: int = 1
    shares: bool = False


def offer(devices: int) -> Offer:
    """What this process has, which uses so many GPUs."""
    host = socket.gethostname()
    problem = problem_here([0])
    if problem:
        return Offer(problem, host)
    driver = cuda()
    gpus = tuple(driver.device_uuid(n) for n in range(driver.device_count()))
    return Offer("", host, gpus, devices, os.environ.get(_SHARED_GPU) == "1")


def serve_all(offers: Sequence[Offer]) -> bool:
    """Whether NCCL serves all processes, with one GPU each."""
    if any(o.problem or o.devices != 1 for o in offers):
        return False
    used = set()
    for rank, mine in enumerate(offers):
        before = sum(o.host == mine.host for o in offers[:rank])
        ranks = sum(o.host == mine.host for o in offers)
        (number,) = chosen(1, len(mine.gpus), (before, ranks))
        used.add((mine.host, mine.gpus[number]))
    return len(used) == len(offers) or all(o.shares for o in offers)


def chosen(num_devices: int, found: int, place: tuple[int, int] = (0, 1)) -> list[int]:
    """CUDA's numbers of the GPUs that a rank uses, of those ``found`` on its host: ranks take turns where
    there are enough for all of them, and each uses the first ones where there are not."""
    index, ranks = place
    first = index * num_devices if found >= ranks * num_devices else 0
    return list(range(first, first + num_devices))


class Gpus:
    """What one stream of the executor has of CUDA and NCCL in this process."""

    def __init__(self, mpi: MpiWorld | None, patience: float = PATIENCE) -> None:
        """``mpi``: how processes meet; None if there is one. ``patience``: seconds that a communicator may
        take to come about."""
        self.mpi = mpi
        self.process = mpi.rank if mpi else 0
        self.patience = patience
        self.aborted = ""
        # Held by whoever enqueues; what is left to do of the collective that was begun last.
        self.lock = threading.RLock()
        self._rest: Callable[[], None] | None = None
        self._aborting = threading.Lock()
        self._launches: Launches | None = None
        self._streams: dict[int, int] = {}
        self._communicators: dict[tuple[Any, ...], dict[int, int]] = {}

    def stream(self, device: int) -> int:
        """This stream's stream on a device."""
        if device not in self._streams:
            cuda().use(device)
            self._streams[device] = cuda().stream()
        return self._streams[device]

    def join(self, owner: Mapping[int, int], devices: Mapping[int, int]) -> Joined | str:
        """To be called by all processes of a program; gives the same kind of answer in all of them.

        ``owner``: the process of each logical id; ``devices``: CUDA's number of each local one. A string says
        why NCCL cannot be used.
        """
        problem = problem_here(list(devices.values()))
        host = socket.gethostname()
        here = {
            i: (host, b"" if problem else cuda().device_uuid(device), device)
            for i, device in devices.items()
        }
        shares = os.environ.get(_SHARED_GPU) == "1"
        everyone = self._all_gather(owner, (problem, shares, here))
        problems = [f"process {p}: {text}" for p, (text, *_) in everyone.items() if text]
        if problems:
            return problems[0]
        places = {i: place for *_, found in everyone.values() for i, place in found.items()}
        distinct = {place[:2] for place in places.values()}
        if len(distinct) < len(places) and not all(shares for _, shares, _ in everyone.values()):
            return f"several devices are on one GPU, and {_SHARED_GPU} is not 1"
        return Joined(self, owner, devices, places)

    def _all_gather(self, owner: Mapping[int, int], mine: Any) -> dict[int, Any]:
        processes = tuple(sorted(set(owner.values())))
        if self.mpi is None or len(processes) == 1:
            return {self.process: mine}
        found = self.mpi.team(processes).comm.allgather(mine)
        return dict(zip(processes, found, strict=True))

    def communicators(
        self,
        owner: Mapping[int, int],
        places: Mapping[int, Any],
        groups: Sequence[tuple[int, ...]],
        devices: Mapping[int, int],
    ) -> dict[tuple[int, ...], dict[int, int]]:
        """For each group with local members, NCCL's communicator of each of these.

        Waits for all processes of ``owner``, unless all of it is there. Raises `CudaError`.
        """
        processes = tuple(sorted(set(owner.values())))
        keys = {g: (processes, *((owner[i], places[i]) for i in g)) for g in groups}
        missing = [g for g in groups if keys[g] not in self._communicators]
        if missing:
            ids = [nccl().unique_id() if owner[g[0]] == self.process else b"" for g in missing]
            everyone = self._all_gather(owner, ids)
            for n, group in enumerate(missing):
                made = self._make(group, everyone[owner[group[0]]][n], owner, devices)
                self._communicators[keys[group]] = made
        # Another program may have the same devices in the same order by other logical ids.
        return {
            g: {g[rank]: made for rank, made in self._communicators[keys[g]].items()}
            for g in groups
        }

    def _make(
        self,
        group: tuple[int, ...],
        unique_id: bytes,
        owner: Mapping[int, int],
        devices: Mapping[int, int],
    ) -> dict[int, int]:
        """A communicator of a group, by rank for its local members."""
        library = nccl()
        made: dict[int, int] = {}
        library.group_start()
        try:
            for rank, i in enumerate(group):
                if owner[i] == self.process:
                    cuda().use(devices[i])
                    made[rank] = library.init_rank(len(group), unique_id, rank)
        finally:
            library.group_end()
        try:
            self._settle(list(made.values()), f"joining devices {list(group)}")
        except CudaError:
            for communicator in made.values():
                library.abort(communicator)
            raise
        return made

    def leave(self, rest: Callable[[], None]) -> None:
        """Leave the rest of a collective to `finish`. The caller holds the lock."""
        self._rest = rest

    def finish(self) -> None:
        """Do what was left of a collective, before anyone waits for it and before the next begins. Raises
        what that raises."""
        with self.lock:
            rest, self._rest = self._rest, None
            if rest is not None:
                rest()

    def _settle(self, communicators: Sequence[int], what: str) -> None:
        """Wait until communicators are made. Raises `CudaError`."""
        began = time.monotonic()
        for communicator in communicators:
            while (state := self.state(communicator)) == IN_PROGRESS:
                if time.monotonic() > began + self.patience:
                    raise CudaError(f"{what}: not all ranks came within {self.patience:g} s")
                time.sleep(1e-3)
            if state:
                raise CudaError(f"{what}: {nccl().describe(state, communicator)}")

    def launches(self) -> Launches:
        """Who calls NCCL. Raises `CudaError` once `abort` was called."""
        with self._aborting:
            if self.aborted:
                raise CudaError(self.aborted)
            if self._launches is None:
                self._launches = nccl().launches()
            return self._launches

    def launched(self, what: str) -> None:
        """Wait until what was put last (`Launches.put`) is on its streams. Raises `CudaError`.

        That takes microseconds but where NCCL connects ranks, as it does at the first call of a kind.
        """
        launches = self._launches
        assert launches is not None
        if not launches.wait(_AT_ONCE):
            began = time.monotonic()
            while not launches.wait(_AT_ONCE):
                if self.aborted:
                    raise CudaError(self.aborted)
                if time.monotonic() > began + PATIENCE:
                    raise CudaError(f"{what}: not all ranks came within {PATIENCE:g} s")
        if self.aborted:
            raise CudaError(self.aborted)
        failure = launches.failure()
        if failure is not None:
            name, error, communicator = failure
            whose = f"{name} failed" if name else what
            raise CudaError(f"{whose}: {nccl().describe(error, communicator)}")

    def abort(self, reason: str) -> None:
        """Give up all that is under way, in threads of their own: NCCL may block in it."""
        with self._aborting:
            if self.aborted:
                return
            self.aborted = reason
        if self._launches is not None:
            self._launches.stop()
        for by_rank in list(self._communicators.values()):
            for communicator in by_rank.values():
                abort = partial(nccl().abort, communicator)
                # From 3.12 on Python begins no thread once it ends: with it all ends that is under way.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=abort, name="stretto-nccl-abort", daemon=True).start()

    def state(self, communicator: int) -> int:
        """0, `IN_PROGRESS`, or the error that a communicator has met since it was made. Raises `CudaError`
        once `abort` was called."""
        state = self.launches().state(communicator)
        if state is None:
            raise CudaError(self.aborted)
        return int(state)

    def close(self) -> None:
        """Give the communicators up. Nothing may be under way."""
        if self.aborted:
            return
        for by_rank in self._communicators.values():
            for communicator in by_rank.values():
                nccl().destroy(communicator)
        self._communicators.clear()


class Joined:
    """The processes of one program that have joined, for the collectives of one stream."""

    def __init__(
        self,
        gpus: Gpus,
        owner: Mapping[int, int],
        devices: Mapping[int, int],
        places: Mapping[int, Any],
    ) -> None:
        self.gpus = gpus
        self.owner = owner
        self.devices = devices
        self._places = places

    def communicators(
        self, groups: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], dict[int, int]]:
        """As of `Gpus.communicators`."""
        return self.gpus.communicators(self.owner, self._places, groups, self.devices)
