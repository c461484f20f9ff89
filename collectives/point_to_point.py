"""Permutes, sends and receives: copies within a process, messages between processes.

Within a process a send copies its operands into a mailbox, where the receive finds them: the copy is the
received array, made once. Sends and receives meet by (source, target, channel), in the order in which they
are posted. Between processes receives are posted before sends, and a send is never waited for by the
operation that posts it.

``skip`` is a set of indices of `Collective.pairs` that move nothing this time: their targets get zeros, as
do devices that are no pair's target. Both ends must give the same set.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .memory import pool
from .ops import PROMPT, Collective, Kind
from .taking_part import check_pair
from .types import TensorType

if TYPE_CHECKING:
    from .mpi import MpiWorld
    from .posted import Posted

Array = np.ndarray
Operands = Mapping[int, Sequence[Array]]
Results = dict[int, list[Array]]

_NOTHING: frozenset[int] = frozenset()

# Buffers of transfers that were not awaited since the job has failed: MPI may still write to them.
_abandoned: list[Any] = []


def zeros(types: Sequence[TensorType]) -> list[Array]:
    return [pool.zeros(t.shape, t.numpy) for t in types]


class Payload:
    """One message within the process: empty until the send is posted."""

    __slots__ = ("arrays", "error", "posted")

    def __init__(self) -> None:
        self.posted = threading.Event()
        self.arrays: list[Array] = []
        self.error = ""


class Done:
    """Messages that have arrived: they did not leave the process."""

    __slots__ = ()

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Mailboxes:
    """Messages between devices of one process, matched by key in the order of posting. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[tuple[int, int, int], deque[Payload]] = defaultdict(deque)
        self._awaited: dict[tuple[int, int, int], deque[Payload]] = defaultdict(deque)
        self._error = ""

    def send(self, key: tuple[int, int, int], arrays: list[Array]) -> None:
        """Post a message."""
        with self._lock:
            payload = self._take(self._awaited, key)
            if payload is None:
                payload = Payload()
                self._sent[key].append(payload)
            payload.arrays = arrays
            payload.posted.set()

    def receive(self, key: tuple[int, int, int]) -> Payload:
        """The message that the send of the same rank gives, or will give."""
        with self._lock:
            payload = self._take(self._sent, key)
            if payload is None:
                payload = Payload()
                self._awaited[key].append(payload)
                if self._error:
                    payload.error = self._error
                    payload.posted.set()
            return payload

    def abort(self, reason: str) -> None:
        """Fail the receives that wait, and those to come that find no message."""
        with self._lock:
            self._error = reason
            for payloads in self._awaited.values():
                for payload in payloads:
                    payload.error = reason
                    payload.posted.set()

    @staticmethod
    def _take(payloads: dict[tuple[int, int, int], deque[Payload]], key: Any) -> Payload | None:
        waiting = payloads.get(key)
        if not waiting:
            return None
        payload = waiting.popleft()
        if not waiting:
            del payloads[key]
        return payload


class Transfer:
    """Sends or receives under way; the `Request` of `communicator.py`. To be used by one thread at a time."""

    __slots__ = ("_mpi", "_payloads", "_requests", "_results", "kept")

    def __init__(
        self,
        results: Results,
        payloads: list[tuple[int, Payload]],
        mpi: MpiWorld | None,
        requests: list[Any],
        kept: Any,
    ) -> None:
        self._results = results
        self._payloads = payloads
        self._mpi = mpi
        self._requests = requests
        self.kept = kept  # the memory that MPI reads or writes

    def test(self) -> bool:
        if not all(payload.posted.is_set() for _, payload in self._payloads):
            return False
        if self._requests:
            assert self._mpi is not None
            if not self._mpi.test(self._requests):
                return False
            self._complete()
        return True

    def wait(self) -> Results:
        if self._requests:
            assert self._mpi is not None
            self._mpi.wait(self._requests)
            self._complete()
        for target, payload in self._payloads:
            payload.posted.wait()
            if payload.error:
                raise RuntimeError(payload.error)
            self._results[target] = payload.arrays
        self._payloads = []
        return self._results

    def _complete(self) -> None:
        self._requests = []
        self.kept = None

    def __del__(self) -> None:
        if self._requests:
            _abandoned.append((self._requests, self.kept))


class _PointToPoint:
    """The common part of permutes, sends and receives: their local pairs, and the bytes they send."""

    def __init__(
        self, collective: Collective, owner: Mapping[int, int], process: int, mpi: MpiWorld | None
    ) -> None:
        self.collective = collective
        self.process, self.mpi = process, mpi
        types = collective.operands or collective.results
        self.types = types
        self.nbytes = sum(t.nbytes for t in types)
        self.pairs = [
            (k, source, target, owner[source], owner[target])
            for k, (source, target) in enumerate(collective.pairs)
            if process in (owner[source], owner[target])
        ]
        sends_here = collective.kind is not Kind.RECV
        self.moved = [k for k, s, t, at, _ in self.pairs if sends_here and at == process and s != t]
        self.messages, self.bytes = self.payload()

    def payload(self, skip: frozenset[int] | None = None) -> tuple[int, int]:
        """Messages and payload bytes that this process sends from one device to another."""
        count = sum(k not in skip for k in self.moved) if skip else len(self.moved)
        return count, count * self.nbytes


class BoundPermute(_PointToPoint):
    """collective-permute: every pair's target gets its source's operands, everyone else zeros."""

    def __init__(
        self, collective: Collective, owner: Mapping[int, int], process: int, mpi: MpiWorld | None
    ) -> None:
        super().__init__(collective, owner, process, mpi)
        self.prompt = self.nbytes <= PROMPT

    def run(self, operands: Operands, skip: frozenset[int] | None = None) -> Results:
        results, sends, receives = self._begin(operands, skip)
        if sends or receives:
            assert self.mpi is not None
            self.mpi.swap(sends, receives)
        return results

    def post(
        self, operands: Operands, skip: frozenset[int] | None = None
    ) -> tuple[Posted | Done, Results]:
        """The messages under way, and the results that they complete."""
        results, sends, receives = self._begin(operands, skip)
        if self.mpi is None or not (sends or receives):
            return Done(), results
        return self.mpi.post_swap(sends, receives), results

    def _begin(
        self, operands: Operands, skip: frozenset[int] | None
    ) -> tuple[Results, list[tuple[Array, int]], list[tuple[Array, int]]]:
        """Results, complete but for what is to be received; (array, process) to send and to receive."""
        skip = skip or _NOTHING
        process = self.process
        results: Results = {}
        sends: list[tuple[Array, int]] = []
        receives: list[tuple[Array, int]] = []
        for k, source, target, source_at, target_at in self.pairs:
            if source_at == target_at:
                check_pair(source, target, operands)
                if source in operands and k not in skip:
                    results[target] = [pool.copy(array) for array in operands[source]]
            elif k in skip:
                continue
            elif source_at == process:
                if source in operands:
                    sends += [(array, target_at) for array in operands[source]]
            elif target in operands:
                results[target] = arrays = [pool.empty(t.shape, t.numpy) for t in self.types]
                receives += [(array, source_at) for array in arrays]
        for target in operands:
            if target not in results:
                results[target] = zeros(self.types)
        return results, sends, receives

    def start(self, operands: Operands, skip: frozenset[int] | None = None) -> Transfer:
        raise TypeError("only sends and receives are started without being waited for")


class _Message(_PointToPoint):
    """A send or a receive."""

    def __init__(
        self,
        collective: Collective,
        owner: Mapping[int, int],
        process: int,
        mpi: MpiWorld | None,
        mailboxes: Mailboxes,
    ) -> None:
        super().__init__(collective, owner, process, mpi)
        self.mailboxes = mailboxes
        ordinals: dict[int, int] = {}
        counts: dict[int, int] = defaultdict(int)
        for logical in sorted(owner):
            ordinals[logical] = counts[owner[logical]]
            counts[owner[logical]] += 1
        devices = max(counts.values(), default=1)
        self.tags = {
            k: mpi.message_tag(collective.channel, ordinals[s], ordinals[t], devices)
            for k, s, t, *_ in self.pairs
            if mpi is not None
        }

    def run(self, operands: Operands, skip: frozenset[int] | None = None) -> Results:
        return self.start(operands, skip).wait()

    def start(self, operands: Operands, skip: frozenset[int] | None = None) -> Transfer:
        raise NotImplementedError


class BoundSend(_Message):
    """send: the operands of every source start on their way."""

    def start(self, operands: Operands, skip: frozenset[int] | None = None) -> Transfer:
        skip = skip or _NOTHING
        requests: list[Any] = []
        kept = []
        for k, source, target, source_at, target_at in self.pairs:
            if source_at != self.process or source not in operands or k in skip:
                continue
            arrays = operands[source]
            if target_at == self.process:
                key = (source, target, self.collective.channel)
                self.mailboxes.send(key, [pool.copy(array) for array in arrays])
                continue
            assert self.mpi is not None
            kept.append(arrays)
            requests += [self.mpi.post_send(a, target_at, self.tags[k]) for a in arrays]
        return Transfer({id_: [] for id_ in operands}, [], self.mpi, requests, kept)


class BoundReceive(_Message):
    """recv: every target gets what its source sent, everyone else zeros."""

    def __init__(self, collective: Collective, *others: Any) -> None:
        super().__init__(collective, *others)
        self.types = collective.results

    def start(self, operands: Operands, skip: frozenset[int] | None = None) -> Transfer:
        skip = skip or _NOTHING
        requests: list[Any] = []
        payloads = []
        results: Results = {}
        expected = set()
        for k, source, target, source_at, target_at in self.pairs:
            if target_at != self.process or target not in operands or k in skip:
                continue
            expected.add(target)
            if source_at == self.process:
                key = (source, target, self.collective.channel)
                payloads.append((target, self.mailboxes.receive(key)))
                continue
            assert self.mpi is not None
            arrays = results[target] = [pool.empty(t.shape, t.numpy) for t in self.types]
            requests += [self.mpi.post_receive(a, source_at, self.tags[k]) for a in arrays]
        for target in operands:
            if target not in expected:
                results[target] = zeros(self.types)
        return Transfer(results, payloads, self.mpi, requests, list(results.values()))
