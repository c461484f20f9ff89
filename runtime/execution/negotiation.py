"""The first run of a program that several processes run together: they agree on the order of its collectives.

`Negotiation.begin` is called by the dispatch thread whenever such a program is about to run. The first time,
the processes compare digests of what they are about to communicate with one small all-reduce, and bind their
collectives. Nothing more is ever exchanged about the program if the digests are equal. If not, they
exchange schedules, find an order that all of them can follow (`stretto.collectives.order`), lower the program
in that order, and compare once more what came of it. If there is none, every process raises the same
`CollectiveMismatch` and has none of the program's collectives bound: the job can go on with others.

Collectives may have been rewritten to send less, for reasons that lie in a rank's own compute. What was done
is part of the digest; where digests differ, all ranks first go back to their programs as they were written.
Whether compiled code calls them is part of it too; the programs that ranks get in another order are walked.

What is compared includes the history of runs (`run_log`), so that it is always the same run of the same
processes that is agreed on.

A process that only compiles a program exchanges nothing. All waiting in here is known to the watchdog.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol

import numpy as np

from stretto.collectives.ops import Kind
from stretto.collectives.order import (
    CommonOrder,
    OrderConflict,
    Schedule,
    certificate,
    check_matched,
    reconcile,
    self_check,
)

from ..errors import CollectiveMismatch
from ..job import audit
from ..job.assembly import Assembly
from ..job.run_log import LoggedRun, Record, RunLog, called
from ..program import Program
from ..program.communicated import starts, strict, walked
from .lane import Lane


class AsWritten(Protocol):
    """What a module compiles to if its collectives are left as they are; see `Executor.load`."""

    @property
    def program(self) -> Program: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def with_order(self) -> Callable[[CommonOrder], Program]: ...


@dataclass(frozen=True)
class Proposal:
    """A program as one process proposes to run it.

    ``line``: of the call that it was loaded for, if known. ``device_ids[i]``: global id of logical id i.
    ``rewritten``: digest of what was done to its collectives, empty if nothing.
    """

    program: Program
    schedule: Schedule
    device_ids: tuple[int, ...]
    line: str = ""
    rewritten: bytes = b""

    @property
    def what(self) -> str:
        return called(self.program.name, self.line)

    def fingerprint(self) -> bytes:
        """32 bytes, equal only for the same program on the same devices."""
        whole = sha256(self.program.name.encode() + self.digest())
        for segment in self.program.segments:
            whole.update(sha256(segment.module).digest())
        return whole.digest()

    def digest(self) -> bytes:
        """32 bytes, equal for programs that communicate the same, in the same way, on the same devices."""
        devices = np.array(self.device_ids, np.int64).tobytes()
        what = certificate(self.schedule) + walked(self.program) + devices
        return sha256(what + self.rewritten).digest()


# The processes that have agreed, and the fingerprint of the program.
Key = tuple[tuple[int, ...], bytes]


class Agreements:
    """The agreements of an executor with other processes.

    A program that is loaded anew, the same as before, needs no new agreement: a process may do so when it
    likes, while the others still have it.
    """

    def __init__(self, assemble: Callable[[tuple[int, ...]], Assembly]) -> None:
        self._assemble = assemble
        self._assemblies: dict[tuple[int, ...], Assembly] = {}
        self.known: dict[Key, Agreement] = {}

    def assembly(self, processes: tuple[int, ...]) -> Assembly:
        """The assembly of these processes, made by all of them at their first agreement."""
        if processes not in self._assemblies:
            self._assemblies[processes] = self._assemble(processes)
        return self._assemblies[processes]


@dataclass(frozen=True)
class Agreement:
    """``identity``: a number that all processes compute alike. ``equal``: all digests were equal."""

    identity: int
    equal: bool


class Negotiation:
    """How several processes agree on a loaded program that they run together, at its first run.

    ``reorder(order)`` gives the program another order, in which it will run. ``bind()`` makes it ready to
    run, and may wait for the other processes. ``as_written()`` gives the program as it was
    before its collectives were rewritten, to which ``reorder`` then refers. ``lane`` is the stream whose
    progress tells the watchdog that this process waits; nothing else runs on it meanwhile.
    """

    def __init__(
        self,
        proposal: Proposal,
        rank: int,
        owner: Mapping[int, int],
        log: RunLog,
        agreements: Agreements,
        reorder: Callable[[CommonOrder], Program],
        bind: Callable[[], None],
        lane: Lane,
        as_written: Callable[[], Proposal] | None = None,
    ) -> None:
        self._proposal = proposal
        self._rank = rank
        self._owner = owner
        self._log = log
        self._agreements = agreements
        self._reorder = reorder
        self._bind = bind
        self._lane = lane
        self._as_written = as_written
        self._refused: str | None = None
        self._record: Record | None = None
        # Of the agreement; None where digests differed.
        self.key: Key | None = None

    @property
    def agreed(self) -> bool:
        """Whether it has run before: then `begin` never waits."""
        return self._record is not None

    def begin(self) -> None:
        """Write down that it runs; the first time, agree on it. Raises `CollectiveMismatch` on all ranks."""
        record = self._record
        if record is not None:
            self._log.ran(record)
        elif self._refused is not None:
            raise mismatch(self._refused)
        else:
            self._begin_first()
            self._forget()

    def _begin_first(self) -> None:
        proposal, log = self._proposal, self._log
        digest = proposal.digest()
        key = (log.processes, proposal.fingerprint())
        agreement = self._agreements.known.get(key)
        if agreement is not None:
            log.ended_waiting(proposal.program.name)
            self._bind()
            self.key = key
            self._record = Record(proposal.program.name, proposal.line, agreement.identity)
            log.ran(self._record)
            return
        log.begin(proposal.program.name, proposal.line)
        lane = self._lane
        lane.sequence += 1
        lane.progress.begin(f"the first run of {proposal.what}", "", lane.sequence, log.processes)
        try:
            try:
                agreement = self._agree(digest)
            except _NoAgreementError as refused:
                self._refused = str(refused)
                record = Record(proposal.program.name, proposal.line, refused.identity)
                log.settle(record, refused.number, refused.history)
                self._forget()
                raise mismatch(self._refused) from None
            self._bind()
        finally:
            lane.progress.end()
        if agreement.equal:
            self._agreements.known[key] = agreement
            self.key = key
        self._record = Record(proposal.program.name, proposal.line, agreement.identity)
        log.settle(self._record, log.number, log.history)

    def _forget(self) -> None:
        """Drop what only the first run needs: it refers to the loaded program, which refers to this."""
        del self._proposal, self._reorder, self._bind, self._as_written

    def _agree(self, digest: bytes) -> Agreement:
        log = self._log
        assembly = self._agreements.assembly(log.processes)
        number, history = log.number, log.history
        moment = b"".join(n.to_bytes(8, "big") for n in (number, history))
        if assembly.all_equal(sha256(digest + moment).digest()[:16]):
            identity = _identity([digest], number)
            try:
                check_rings(
                    self._proposal.program, self._proposal.schedule, self._owner, alone=True
                )
            except CollectiveMismatch as conflict:
                raise _NoAgreementError(str(conflict), identity, number, history) from None
            return Agreement(identity, equal=True)
        offers = _offers(assembly, self._offer(digest))
        anew = bool(self._proposal.rewritten)
        if any(offer.rewritten for offer in offers.values()):
            offers = _offers(assembly, self._unrewritten())
        number = max(offer.number for offer in offers.values())
        identity = _identity([offers[rank].digest for rank in sorted(offers)], number)
        histories = [offers[rank].history.to_bytes(8, "big") for rank in sorted(offers)]
        history = _identity(histories, number)
        try:
            order = common_order(offers, self._owner)[self._rank]
        except OrderConflict as conflict:
            raise _NoAgreementError(str(conflict), identity, number, history) from None
        report = self._follow(order, anew)
        reports = {rank: json.loads(data) for rank, data in assembly.exchange(report).items()}
        problem = differences_in_streams(reports)
        if problem:
            raise _NoAgreementError(f"{_head(offers)}{problem}", identity, number, history)
        return Agreement(identity, equal=False)

    def _unrewritten(self) -> bytes:
        """Take the program as it was written; gives what to offer."""
        problem = ""
        if self._proposal.rewritten:
            assert self._as_written is not None
            try:
                self._proposal = self._as_written()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        return self._offer(self._proposal.digest(), problem)

    def _offer(self, digest: bytes, problem: str = "") -> bytes:
        proposal, log = self._proposal, self._log
        return Offer(
            proposal.program.name,
            proposal.line,
            proposal.schedule,
            proposal.device_ids,
            digest,
            log.number,
            log.history,
            log.account().runs,
            bool(proposal.rewritten),
            problem,
        ).to_bytes()

    def _follow(self, order: CommonOrder, anew: bool) -> bytes:
        """Take the common order; gives what to tell the others about it.

        ``anew``: the program is not the one that was loaded.
        """
        program = self._proposal.program
        kept = all(p == tuple(range(len(p))) for p in order.values())
        as_listed = certificate(strict(program)) == certificate(self._proposal.schedule)
        calls = any(segment.sites for segment in program.segments)
        if anew or calls or not (kept and as_listed and program.num_streams == 1):
            try:
                program = self._reorder(order)
            except Exception as error:
                return json.dumps({"problem": f"{type(error).__name__}: {error}"}).encode()
        streams = streams_of(program, self._rank, self._owner)
        return json.dumps({"problem": "", "streams": streams}).encode()


class _NoAgreementError(Exception):
    """There is no common order. The attributes are the entry that all processes make of it in their logs."""

    def __init__(self, text: str, identity: int, number: int, history: int) -> None:
        super().__init__(text)
        self.identity, self.number, self.history = identity, number, history


def check_rings(
    program: Program, schedule: Schedule, owner: Mapping[int, int], *, alone: bool
) -> None:
    """Raise `CollectiveMismatch` where sends and receives of a program wait for each other, or for nothing.

    ``alone``: all devices are known to run this very program.
    """
    if not any(c.kind in (Kind.SEND, Kind.RECV) for c in program.collectives):
        return
    try:
        self_check(schedule, owner)
        if alone:
            check_matched(schedule)
            self_check(strict(program), owner)
    except OrderConflict as conflict:
        raise CollectiveMismatch(f"{program.name} cannot run: {conflict}") from None


def mismatch(text: str) -> CollectiveMismatch:
    """The error that every process of the program raises: as all raise it, the job need not end."""
    error = CollectiveMismatch(text)
    error.agreed = True
    return error


def _offers(assembly: Assembly, own: bytes) -> dict[int, Offer]:
    return {rank: Offer.read(data) for rank, data in assembly.exchange(own).items()}


def _identity(parts: Sequence[bytes], number: int) -> int:
    """A number for an agreement. The run's number is part of it: two programs may communicate the same."""
    data = b"".join([*parts, number.to_bytes(8, "big")])
    return int.from_bytes(sha256(data).digest()[:8], "big")


@dataclass(frozen=True)
class Offer:
    """What a process tells the others where digests differ."""

    program: str
    line: str
    schedule: Schedule
    device_ids: tuple[int, ...]
    digest: bytes
    number: int
    history: int
    runs: tuple[LoggedRun, ...]
    rewritten: bool = False
    problem: str = ""

    @property
    def what(self) -> str:
        return called(self.program, self.line)

    def to_bytes(self) -> bytes:
        """Inverse of `read`."""
        plain = {
            "program": self.program,
            "line": self.line,
            "schedule": self.schedule.to_bytes().decode(),
            "device_ids": self.device_ids,
            "digest": self.digest.hex(),
            "number": self.number,
            "history": self.history,
            "runs": self.runs,
            "rewritten": self.rewritten,
            "problem": self.problem,
        }
        return json.dumps(plain).encode()

    @classmethod
    def read(cls, data: bytes) -> Offer:
        """From `to_bytes`."""
        plain = json.loads(data)
        return cls(
            plain["program"],
            plain["line"],
            Schedule.from_bytes(plain["schedule"].encode()),
            tuple(plain["device_ids"]),
            bytes.fromhex(plain["digest"]),
            plain["number"],
            plain["history"],
            tuple(LoggedRun(*ran) for ran in plain["runs"]),
            plain["rewritten"],
            plain["problem"],
        )


def _own_identity(offer: Offer) -> int:
    return _identity([offer.digest], offer.number)


def _head(offers: Mapping[int, Offer]) -> str:
    whats = {offer.what for offer in offers.values()}
    if len(whats) == 1:
        return f"{whats.pop()} cannot run: "
    listed = "; ".join(f"rank {rank} runs {offers[rank].what}" for rank in sorted(offers))
    return f"the programs of the ranks ({listed}) cannot run together: "


def common_order(offers: Mapping[int, Offer], owner: Mapping[int, int]) -> dict[int, CommonOrder]:
    """The common order, by rank. Raises `OrderConflict` that says what cannot be agreed on."""
    if len({(offer.number, offer.history) for offer in offers.values()}) > 1:
        runs = {
            rank: [*offer.runs[:-1], offer.runs[-1]._replace(identity=_own_identity(offer))]
            for rank, offer in offers.items()
        }
        text = audit.difference(runs, ", ".join(map(str, sorted(offers))))
        raise OrderConflict(text or "the ranks have run different programs before this one")
    head = _head(offers)
    first = min(offers)
    for rank, offer in sorted(offers.items()):
        if offer.problem:
            raise OrderConflict(
                f"{head}rank {rank} cannot compile it as it is written: {offer.problem}"
            )
        if offer.device_ids != offers[first].device_ids:
            raise OrderConflict(
                f"{head}they are for different devices: {list(offers[first].device_ids)} on rank "
                f"{first}, {list(offer.device_ids)} on rank {rank}"
            )
    try:
        return reconcile({rank: offer.schedule for rank, offer in offers.items()}, owner)
    except OrderConflict as conflict:
        raise OrderConflict(f"{head}{conflict}") from None


def streams_of(program: Program, rank: int, owner: Mapping[int, int]) -> dict[str, list[int]]:
    """The streams on which this rank starts what it has with others: by collective and group, in order."""
    found: dict[str, list[int]] = {}
    for entry, stream in starts(program):
        if entry.kind in (Kind.SEND, Kind.RECV):
            continue  # matched by tags, whatever stream they are posted on
        for group in entry.groups:
            if rank in {owner[member] for member in group}:
                found.setdefault(f"{entry.key} of {list(group)}", []).append(stream)
    return found


def differences_in_streams(reports: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Why the ranks, as they would now run, do not fit together; None if they do."""
    known: dict[str, tuple[int, list[int]]] = {}
    for rank, report in sorted(reports.items()):
        if report["problem"]:
            return f"rank {rank} cannot follow the common order: {report['problem']}"
        for label, streams in report["streams"].items():
            other, expected = known.setdefault(label, (rank, streams))
            if streams != expected:
                return f"{label} runs on streams {expected} of rank {other} but on {streams} of rank {rank}"
    return None
