"""What tests of executors, schedules and engines need, without MPI, accelerators or sleeping.

- `NullEngine` and `VirtualClock`: compute that takes virtual time only.
- `run_processes`: several executors in one Python process, a thread for each rank of a job, joined by a
  `MemoryTransport` in place of MPI.
- `Recorder`: an instrument that writes down what happens, in order.
- `check_engine`: conformance of an engine.

    def main(world, transport):
        executor = Executor(NullEngine(1), world, communicators=transport.communicators(world.rank))
        ...

    results = run_processes(2, main)
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from stretto.collectives.communicator import Array, BoundCollective, Communicator, Reducer
from stretto.collectives.ops import Collective, Kind
from stretto.engine_check import check_engine
from stretto.runtime.engines.null import NullArray, NullEngine, VirtualClock
from stretto.runtime.errors import RankFailed, StrettoError
from stretto.runtime.job.progress import Progress
from stretto.runtime.job.run_log import RunLogs
from stretto.runtime.options import Options
from stretto.runtime.program import Program
from stretto.runtime.recording.instrument import Instrument

__all__ = [
    "MemoryTransport",
    "MemoryWorld",
    "NullArray",
    "NullEngine",
    "Recorder",
    "VirtualClock",
    "check_engine",
    "run_processes",
]

Result = TypeVar("Result")
PATIENCE = 60.0  # seconds after which a meeting that never takes place is an error


class Recorder(Instrument):
    """Writes down events as tuples, in the order in which they happen: ``recorder.events``."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def program_started(self, program: Program, run: int) -> None:
        self.events.append(("program", program.name, run))

    def program_finished(self, program: Program, run: int, error: BaseException | None) -> None:
        self.events.append(("end", program.name, run, None if error is None else str(error)))

    def segment_issued(self, program: Program, segment: int, ordinal: int) -> None:
        self.events.append(("segment", program.segments[segment].name or segment, ordinal))

    def segment_skipped(self, program: Program, segment: int, ordinal: int) -> None:
        self.events.append(("skipped", program.segments[segment].name or segment, ordinal))

    def collective_started(self, collective: Collective, stream: int) -> None:
        self.events.append(("start", collective.name, stream))

    def collective_finished(
        self, collective: Collective, stream: int, nbytes: int, seconds: float
    ) -> None:
        self.events.append(("done", collective.name, stream))


class MemoryWorld:
    """The world of one rank in memory; what an executor needs of `stretto.runtime.job.world.World`."""

    comm = None
    patience = patience_of_code = math.inf
    patience_of_callers = 1e-3
    engines = ""

    def __init__(self, transport: MemoryTransport, rank: int, options: Options) -> None:
        self.rank = rank
        self.size = transport.num_processes
        self.local_devices = options.local_devices
        self.options = options
        self.streams: list[Progress] = []
        self.runs = RunLogs()
        self._transport = transport

    @property
    def error(self) -> StrettoError | None:
        return self._transport.error

    def fail(self, error: BaseException) -> None:
        self._transport.fail(RankFailed(f"rank {self.rank} failed: {error}"))

    def on_failure(self, listener: Callable[[StrettoError], None]) -> None:
        self._transport.listeners.append(listener)

    def assembly(self, processes: tuple[int, ...]) -> MemoryAssembly:
        """These ranks, to agree on what they run."""
        return MemoryAssembly(self._transport, self.rank, processes)

    def progress(self, stream: int = 0) -> Progress:
        self.streams.append(Progress(stream))
        return self.streams[-1]


class MemoryAssembly:
    """Processes that exchange a few bytes."""

    def __init__(self, transport: MemoryTransport, rank: int, processes: tuple[int, ...]) -> None:
        self._transport = transport
        self._rank = rank
        self._processes = processes
        self._count = 0

    def all_equal(self, digest: bytes) -> bool:
        return len(set(self.exchange(digest).values())) == 1

    def exchange(self, data: bytes) -> dict[int, bytes]:
        self._count += 1
        given = self._transport.exchanges[self._processes, self._count]
        with self._transport.changed:
            given[self._rank] = data
            self._transport.changed.notify_all()
            self._transport.wait_for(
                lambda: len(given) == len(self._processes), f"processes {self._processes}"
            )
        return dict(sorted(given.items()))


@dataclass
class _Meeting:
    """One collective of one set of processes: the last to arrive computes for all."""

    operands: dict[int, Sequence[Array]] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    results: dict[int, list[Array]] | None = None
    error: Exception | None = None

    def is_over(self) -> bool:
        return self.results is not None or self.error is not None


class MemoryTransport:
    """Joins ``num_processes`` threads that play the ranks of a job."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        self.changed = threading.Condition()
        self.meetings: dict[Any, _Meeting] = defaultdict(_Meeting)
        self.exchanges: dict[Any, dict[int, bytes]] = defaultdict(dict)
        self.mail: dict[Any, deque[list[Array]]] = defaultdict(deque)
        self.error: StrettoError | None = None
        self.listeners: list[Callable[[StrettoError], None]] = []

    def communicators(self, process: int) -> Callable[[int], Communicator]:
        """Makes the communicator of each stream of one process."""
        return lambda stream: MemoryCommunicator(self, process, stream)

    def fail(self, error: StrettoError) -> None:
        """End the job: everybody who waits gets the error. Only the first one counts."""
        with self.changed:
            if self.error is not None:
                return
            self.error = error
            self.changed.notify_all()
        for listener in self.listeners:
            listener(error)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Wait (holding ``changed``). Raises the job's error; ``TimeoutError`` if it takes too long."""
        done = self.changed.wait_for(lambda: self.error is not None or bool(condition()), PATIENCE)
        if not condition():
            if self.error is not None:
                raise self.error
            assert not done
            raise TimeoutError(f"{what}: not everybody came in {PATIENCE:g} s")


class MemoryCommunicator:
    """A communicator whose processes are threads. Collectives are computed by the local communicator."""

    def __init__(self, transport: MemoryTransport, process: int, stream: int) -> None:
        from stretto.collectives.hierarchy import create_communicator

        self.transport = transport
        self.process = process
        self.stream = stream
        self.num_processes = transport.num_processes
        self._local = create_communicator(None, stream)
        self._bound = 0

    def bind(
        self,
        collective: Collective,
        owner: Mapping[int, int],
        reducer: Reducer | None = None,
    ) -> MemoryCollective:
        self._bound += 1
        together = self._local.bind(collective, dict.fromkeys(owner, 0), reducer)
        return MemoryCollective(self, (self.stream, self._bound), collective, owner, together)

    def abort(self, reason: str) -> None:
        self.transport.fail(StrettoError(reason))

    def close(self) -> None:
        pass


class MemoryCollective:
    """A collective bound by every process under the same ``key``."""

    def __init__(
        self,
        communicator: MemoryCommunicator,
        key: tuple[int, int],
        collective: Collective,
        owner: Mapping[int, int],
        together: BoundCollective,
    ) -> None:
        self.collective = collective
        self.transport = communicator.transport
        self.process = communicator.process
        self.key = key
        self.owner = owner
        self.together: Any = together
        self.parts = _parts([*collective.groups, *collective.pairs], owner)
        self.counts = [0] * len(self.parts)
        self.bytes = self.messages = 0

    def run(
        self, operands: Mapping[int, Sequence[Array]], skip: frozenset[int] | None = None
    ) -> dict[int, list[Array]]:
        name = self.collective.name or str(self.collective.kind)
        options = {} if skip is None else {"skip": skip}
        inside = frozenset().union(*self.parts)
        outside = {k: v for k, v in operands.items() if k not in inside}
        results = dict(self.together.run(outside, **options)) if outside else {}
        entered = []
        with self.transport.changed:
            for index, part in enumerate(self.parts):
                here = {k: v for k, v in operands.items() if k in part}
                if not here:
                    continue
                self.counts[index] += 1
                key = (self.key, index, self.counts[index])
                meeting = self.transport.meetings[key]
                meeting.operands.update(here)
                meeting.arrived.add(self.process)
                if meeting.arrived == {self.owner[member] for member in part}:
                    try:
                        meeting.results = self.together.run(meeting.operands, **options)
                    except Exception as error:
                        meeting.error = error
                    del self.transport.meetings[key]
                    self.transport.changed.notify_all()
                entered.append((meeting, here))
            for meeting, here in entered:
                self.transport.wait_for(meeting.is_over, name)
                if meeting.error is not None:
                    raise meeting.error
                assert meeting.results is not None
                results.update({member: meeting.results[member] for member in here})
        return results

    def start(
        self, operands: Mapping[int, Sequence[Array]], skip: frozenset[int] | None = None
    ) -> MemoryRequest:
        skipped = skip or frozenset()
        pairs = [p for k, p in enumerate(self.collective.pairs) if k not in skipped]
        if self.collective.kind is Kind.RECV:
            sources = {target: source for source, target in pairs if target in operands}
            return MemoryRequest(self, dict.fromkeys(operands), sources)
        with self.transport.changed:
            for source, target in pairs:
                if source in operands:
                    sent = [np.array(array) for array in operands[source]]
                    self.transport.mail[self.collective.channel, source, target].append(sent)
            self.transport.changed.notify_all()
        return MemoryRequest(self, {}, {})


class MemoryRequest:
    """A send, complete at once, or a receive: ``sources[target]`` for the targets here."""

    def __init__(
        self, bound: MemoryCollective, members: dict[int, None], sources: dict[int, int]
    ) -> None:
        self.bound = bound
        self.members = members
        self.sources = sources

    def test(self) -> bool:
        mail, channel = self.bound.transport.mail, self.bound.collective.channel
        return all(mail[channel, source, target] for target, source in self.sources.items())

    def wait(self) -> dict[int, list[Array]]:
        """What each local device received; zeros where nothing is sent to it."""
        transport, collective = self.bound.transport, self.bound.collective
        received = {
            member: [np.zeros(t.shape, t.numpy) for t in collective.results]
            for member in self.members
        }
        with transport.changed:
            for target, source in self.sources.items():
                box = transport.mail[collective.channel, source, target]
                transport.wait_for(box.__len__, f"{collective.kind} {collective.name}")
                received[target] = box.popleft()
        return received


def _parts(sets: Sequence[tuple[int, ...]], owner: Mapping[int, int]) -> list[frozenset[int]]:
    """Sets of logical ids that must meet: overlapping groups and pairs are one."""
    parts: list[frozenset[int]] = []
    for members in sets:
        joined = frozenset(members)
        apart = [part for part in parts if not part & joined]
        parts = [*apart, joined.union(*(part for part in parts if part & joined))]
    return sorted(parts, key=min)


def run_processes(
    num_processes: int,
    main: Callable[[MemoryWorld, MemoryTransport], Result],
    *,
    local_devices: int = 1,
) -> list[Result]:
    """Run ``main(world, transport)`` as every rank of a job; gives their results by rank.

    An exception of one rank fails the job for the others, and is raised once all have ended.
    """
    transport = MemoryTransport(num_processes)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        world = MemoryWorld(transport, rank, Options(local_devices=local_devices))
        try:
            results[rank] = main(world, transport)
        except BaseException as error:
            errors[rank] = error
            world.fail(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, error in sorted(
        errors.items(), key=lambda item: (isinstance(item[1], RankFailed), item[0])
    ):
        raise error
    return [results[rank] for rank in range(num_processes)]
