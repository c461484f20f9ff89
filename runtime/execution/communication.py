"""The operations of a program that communicate: collectives, sends and receives.

A collective whose wait follows directly runs on the dispatch thread if its lane is idle; one with work in
between is a task of the lane's thread.
Sends and receives are posted by the lane and never block it: a send-done must not wait for its receiver,
since on a ring every rank would then wait in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from time import perf_counter
from typing import Any, cast

from stretto.collectives.bound_on_gpus import BoundOnGpus, bind
from stretto.collectives.communicator import (
    BoundCollective,
    CallableCommunicator,
    PromptCollective,
    Reducer,
)
from stretto.collectives.gpu_mpi import BoundOnDevices, OnDevices
from stretto.collectives.gpus import Joined
from stretto.collectives.native import ALONE, Peers, as_site
from stretto.collectives.ops import Collective, Kind
from stretto.collectives.pieces import Piece, pieces
from stretto.collectives.waiting import give_way

from ..engines.engine import StreamedEngine
from ..errors import StrettoError
from ..program import Branch, Copy, Loop, Run, Start, Wait, blocks, instructions
from .ahead import AheadOfTurn
from .by_mpi import ByMpi
from .call import Call, describe
from .context import Context
from .frame import Attempt, Frame, Hosted, Operation, named
from .on_gpus import OnGpus
from .regions import Region
from .regions_on_gpus import RegionOnGpu
from .staged import Staged, can_be_staged
from .stream import Task
from .under_way import Enqueued, Moving

_log = logging.getLogger("stretto")


@cache
def _warn_once(problem: str, by_mpi: bool) -> None:
    what, rest = ("reductions", ", and MPI moves the rest") if by_mpi else ("collectives", "")
    _log.warning("%s go through the host's memory%s, not over NCCL: %s", what, rest, problem)


class Communication:
    """The communicating operations of one program.

    Binds every collective, in program order: the same on all ranks. ``bound``: another one for the same
    program, whose collectives are used as they are bound.
    """

    def __init__(self, context: Context, bound: Communication | None = None) -> None:
        self.context = context
        self.program = program = context.program
        self.lanes = context.lanes
        self._starts = {i.event: i for i in instructions(program.body) if isinstance(i, Start)}
        # By event that a loop carries: outputs of its start, and the parameters they become.
        self._carried = {
            c.event: [(output, i.body.parameters[k]) for output, k in c.carries]
            for i in instructions(program.body)
            if isinstance(i, Loop)
            for c in i.carried
        }
        # Those that stay on GPUs are in `_on_gpus` too.
        self._on_gpus: dict[tuple[int, int], BoundOnGpus] = {} if bound is None else bound._on_gpus
        # Those that MPI does on GPUs' memory are in `_by_mpi` too.
        self._by_mpi: dict[tuple[int, int], BoundOnDevices] = {} if bound is None else bound._by_mpi
        # Those of GPUs' arrays that go through the host's memory, in pieces, are in `_pieces` too.
        self._pieces: dict[tuple[int, int], list[tuple[Piece, BoundCollective]]] = (
            {} if bound is None else bound._pieces
        )
        self._bound: dict[tuple[int, int], BoundCollective] = (
            self._bind() if bound is None else bound._bound
        )
        # How segments with sites reach the other processes.
        self.peers: Peers = self._peers() if bound is None else bound.peers

    def is_prompt(self, start: Start) -> bool:
        """Whether `attempt` can be used for it."""
        bound = self._bound[start.collective, start.stream]
        return not self._is_on_streams(start) and getattr(bound, "prompt", False)

    def ways(self) -> dict[str, str]:
        """How collectives of GPUs' arrays move their data, by name; none where arrays are in the host's
        memory."""
        if not isinstance(self.context.engine, StreamedEngine):
            return {}
        ways: dict[str, str] = {}
        for key in self._bound:
            if key in self._on_gpus:
                way = "over NCCL"
            elif key in self._by_mpi:
                way = "by MPI on the GPUs' memory"
            elif key in self._pieces:
                way = "through the host's memory"
            else:
                way = "through the host's memory, with a wait"
            ways[self.program.collectives[key[0]].name] = way
        return ways

    def is_split(self, start: Start) -> bool:
        """Whether the operation is posted at its start and awaited at its wait: send and receive."""
        return self.program.collectives[start.collective].kind in (Kind.SEND, Kind.RECV)

    def _bind(self) -> dict[tuple[int, int], BoundCollective]:
        bound: dict[tuple[int, int], BoundCollective] = {}
        joined: dict[int, Joined | None] = {}
        by_mpi: dict[int, OnDevices | None] = {}
        for key in self._keys():
            if key in bound:
                continue
            collective = self.program.collectives[key[0]]
            reducer = None if collective.reducer is None else self._reducer(collective)
            try:
                bound[key] = self.lanes[key[1]].communicator.bind(
                    collective, self.context.owner, reducer
                )
                if key[1] not in joined:
                    joined[key[1]], by_mpi[key[1]] = self._join(key[1])
                self._bind_on_gpus(key, joined[key[1]], bound[key])
                self._bind_by_mpi(key, by_mpi[key[1]], bound[key])
                self._bind_pieces(key, bound[key])
            except Exception as error:
                raise named(error, describe(collective)) from error
        return bound

    def _join(self, stream: int) -> tuple[Joined | None, OnDevices | None]:
        """The program's processes, as far as its collectives can stay on GPUs, over NCCL or by MPI; waits for
        all of them."""
        lane, context, problem = self.lanes[stream], self.context, ""
        if lane.gpus is not None:
            loans = cast("StreamedEngine", context.engine).loans
            devices = {i: loans.device(n) for i, n in context.local}
            joined = lane.gpus.join(context.owner, devices)
            if isinstance(joined, Joined):
                return joined, None
            problem = joined
        by_mpi = lane.on_devices
        if by_mpi is not None and (
            len(set(context.owner.values())) == 1 or by_mpi.problem(context.owner)
        ):
            by_mpi = None
        if problem:
            _warn_once(problem, by_mpi is not None)
        return None, by_mpi

    def _bind_on_gpus(
        self, key: tuple[int, int], joined: Joined | None, host: BoundCollective
    ) -> None:
        collective = self.program.collectives[key[0]]
        if key in self._sites and isinstance(self.context.engine, StreamedEngine):
            made = None if joined is None else bind(joined, as_site(collective), host)
            if made is None:
                raise StrettoError(
                    "compiled code was to call it over NCCL, which does not serve these processes: "
                    "STRETTO_NATIVE=0 has the executor make it"
                )
            self._on_gpus[key] = made
        elif joined is not None and self._can_be_lent(collective):
            made = bind(joined, collective, host)
            if made is not None:
                self._on_gpus[key] = made

    def _bind_by_mpi(
        self, key: tuple[int, int], by_mpi: OnDevices | None, host: BoundCollective
    ) -> None:
        collective, context = self.program.collectives[key[0]], self.context
        if by_mpi is not None and self._can_be_lent(collective):
            loans = cast("StreamedEngine", context.engine).loans
            devices = {i: loans.device(n) for i, n in context.local}
            made = by_mpi.bind(collective, context.owner, devices, host)
            if made is not None:
                self._by_mpi[key] = made

    def _bind_pieces(self, key: tuple[int, int], host: BoundCollective) -> None:
        lane, collective = self.lanes[key[1]], self.program.collectives[key[0]]
        if (
            lane.staging is None
            or key in self._on_gpus
            or key in self._by_mpi
            or not can_be_staged(collective)
            or not self._can_be_lent(collective)
        ):
            return
        bind, owner = lane.communicator.bind, self.context.owner
        bound = {collective: host}
        for piece in pieces(collective):
            if piece.collective not in bound:
                bound[piece.collective] = bind(piece.collective, owner)
            self._pieces.setdefault(key, []).append((piece, bound[piece.collective]))

    def _can_be_lent(self, collective: Collective) -> bool:
        lendable = cast("StreamedEngine", self.context.engine).loans.lendable
        return all(lendable(type) for type in (*collective.operands, *collective.results))

    def _enqueues(self, start: Start) -> Callable[[Frame], Enqueued | Moving] | None:
        """What puts a collective onto the GPUs' streams, if it stays there or is copied on them."""
        key, context = (start.collective, start.stream), self.context
        if not self._is_on_streams(start):
            return None
        call, deferred = self._call(start), self._is_deferred(start)
        if key in self._on_gpus:
            return OnGpus(context, start, call, self._on_gpus[key], deferred).enqueue
        staging = self.lanes[start.stream].staging
        assert staging is not None
        if key in self._by_mpi:
            return ByMpi(context, start, call, self._by_mpi[key], staging, deferred).enqueue
        return Staged(context, start, call, self._pieces[key], staging, deferred).enqueue

    def _is_on_streams(self, start: Start) -> bool:
        """Whether a collective is put onto the GPUs' streams, in whichever way."""
        key = start.collective, start.stream
        return key in self._on_gpus or key in self._by_mpi or key in self._pieces

    def _is_deferred(self, start: Start) -> bool:
        """Whether only runs and collectives on the GPUs' streams read its outputs."""
        return start.event not in self._carried and self._elsewhere.isdisjoint(start.outputs)

    @cached_property
    def _elsewhere(self) -> frozenset[int]:
        """Slots that others than runs and collectives on the GPUs' streams read or write."""
        found: set[int] = set()
        for block in blocks(self.program.body):
            found.update(block.parameters, block.results)
            for i in block.instructions:
                match i:
                    case Start():
                        if not self._is_on_streams(i):
                            found.update(i.inputs, i.outputs)
                    case Loop():
                        found.update(i.inputs, i.outputs)
                    case Branch():
                        found.update((i.selector,), i.outputs, *i.inputs)
                    case Copy():
                        found.update((i.input, i.output))
        return frozenset(found)

    def _peers(self) -> Peers:
        owner = self.context.owner
        alone = len(set(owner.values())) == 1
        if alone or not any(segment.sites for segment in self.program.segments):
            return ALONE
        return cast("CallableCommunicator", self.lanes[0].communicator).peers(owner)

    @cached_property
    def _sites(self) -> frozenset[tuple[int, int]]:
        """Those of `_keys` that segments call."""
        return frozenset((site, 0) for s in self.program.segments for site in s.sites)

    def _keys(self) -> Iterator[tuple[int, int]]:
        """Collective and stream of every start; collectives that segments call are the first stream's."""
        for instruction in instructions(self.program.body):
            if isinstance(instruction, Start):
                yield instruction.collective, instruction.stream
            elif isinstance(instruction, Run):
                for site in self.program.segments[instruction.segment].sites:
                    yield site, 0

    def region(self, run: Run) -> Region:
        """A run of a segment that calls its collectives."""
        keys = [(site, 0) for site in self.program.segments[run.segment].sites]
        if isinstance(self.context.engine, StreamedEngine):
            return RegionOnGpu(self.context, run, [self._on_gpus[k] for k in keys], self.peers)
        return Region(self.context, run, [self._bound[k] for k in keys], self.peers)

    def _call(self, start: Start) -> Call:
        return Call(self.context, start, self._bound[start.collective, start.stream])

    def _reducer(self, collective: Collective) -> Reducer:
        """A reducer that is a program of its own, run on the first local device."""
        assert collective.reducer is not None
        context, types = self.context, collective.operands
        segment = context.segments[collective.reducer]
        engine, ordinal = context.engine, context.ordinals[0]

        def reduce(left: list[Any], right: list[Any]) -> list[Any]:
            arrays = [
                engine.put(host, type, ordinal)
                for host, type in zip([*left, *right], [*types, *types], strict=True)
            ]
            return [engine.host_view(array) for array in segment.run(ordinal, arrays)]

        return reduce

    def _columns(self, start: Start) -> Callable[[Frame], Callable[[], dict[int, list[Any]]]]:
        """``capture(frame)`` keeps the operands of a collective. It gives a function that waits for them, and
        returns host arrays by logical id.
        """
        context = self.context
        inputs, logical, host_view = start.inputs, context.logical, context.engine.host_view

        def capture(frame: Frame) -> Callable[[], dict[int, list[Any]]]:
            columns = [frame.registers[slot] for slot in inputs]
            active = frame.active

            def views() -> dict[int, list[Any]]:
                return {
                    logical[position]: [
                        column[position] if type(column) is Hosted else host_view(column[position])
                        for column in columns
                    ]
                    for position in active
                }

            return views

        return capture

    def _perform(self, start: Start) -> Callable[[Any, tuple[int, ...], int], list[Hosted]]:
        """``perform(views, active, iteration)``: run a collective, give its outputs' registers."""
        call = self._call(start)
        run: Any = call.bound.run
        what, progress = call.what, call.lane.progress

        def perform(views: Any, active: tuple[int, ...], iteration: int) -> list[Hosted]:
            sequence = call.number()
            try:
                operands = views()
                options, began = call.enter(sequence, iteration)
                try:
                    results = run(operands, **options)
                finally:
                    progress.end()
            except BaseException as error:
                raise named(error, what) from error
            call.account(options, began, active)
            return call.registers(results, active)

        return perform

    def attempt(self, start: Start) -> Attempt:
        """The same as `start_and_wait` for a thread that must not block: ``attempt(frame, until)``.

        It gives None if that was done by the time ``until`` (of ``perf_counter``), otherwise what is left to
        do, which blocks and may be called by another thread. Only for collectives that are `prompt`.
        """
        call, whole = self._call(start), self.start_and_wait(start)
        inputs, outputs, logical = start.inputs, start.outputs, self.context.logical
        post = cast("PromptCollective", call.bound).post
        stream, progress, what = call.lane.stream, call.lane.progress, call.what
        engine = self.context.engine
        host_view, is_ready = engine.host_view, engine.is_ready

        def attempt(frame: Frame, until: float) -> Callable[[], None] | None:
            registers, active = frame.registers, frame.active
            columns = [registers[slot] for slot in inputs]
            for column in columns:
                if type(column) is not Hosted:
                    for array in column:
                        while not is_ready(array):
                            if perf_counter() > until:
                                return lambda: whole(frame)
            if not stream.try_turn():
                return lambda: whole(frame)
            sequence = call.number()
            pending: Any = None
            try:
                operands = {
                    logical[position]: [
                        column[position] if type(column) is Hosted else host_view(column[position])
                        for column in columns
                    ]
                    for position in active
                }
                options, began = call.enter(sequence, frame.iteration)
                pending = post(operands, **options)
                done = pending.test()
                while not done and perf_counter() < until:
                    give_way()  # another rank may need this core
                    done = pending.test()
            except BaseException as error:
                progress.end()
                stream.end_turn()
                raise named(error, what) from error

            def finish() -> None:
                progress.end()
                stream.end_turn()
                call.account(options, began, active)
                for slot, register in zip(
                    outputs, call.registers(pending.results, active), strict=True
                ):
                    registers[slot] = register

            def rest() -> None:
                try:
                    pending.wait()
                except BaseException as error:
                    progress.end()
                    stream.end_turn()
                    raise named(error, what) from error
                finish()

            if not done:
                return rest
            finish()
            return None

        return attempt

    def start_and_wait(self, start: Start) -> Operation:
        enqueue = self._enqueues(start)
        if enqueue is not None:
            stream = self.lanes[start.stream].stream

            def enqueued(frame: Frame) -> None:
                event: Any = enqueue(frame)
                if not event.done:
                    stream.wait(event)
                for slot, register in zip(start.outputs, event.result(), strict=True):
                    frame.registers[slot] = register

            return enqueued
        capture, perform = self._columns(start), self._perform(start)
        outputs, stream = start.outputs, self.lanes[start.stream].stream

        def start_and_wait(frame: Frame) -> None:
            views = capture(frame)
            active, iteration = frame.active, frame.iteration
            results = stream.run(lambda: perform(views, active, iteration))
            for slot, register in zip(outputs, results, strict=True):
                frame.registers[slot] = register

        return start_and_wait

    def start(self, start: Start) -> Operation:
        capture, task = self._columns(start), self._task(start)
        stream, event = self.lanes[start.stream].stream, start.event
        collective, watched = (
            self.program.collectives[start.collective],
            self.context.instrument is not None,
        )
        told_of = self.context.told("collective_queued", collective, start.stream)
        enqueue = self._enqueues(start)

        def begin(frame: Frame) -> None:
            queued: Any = (
                stream.submit(task(frame, capture(frame))) if enqueue is None else enqueue(frame)
            )
            frame.events[event] = queued
            if watched:
                queued.since = perf_counter()
            if told_of is not None:
                told_of()

        return begin

    def _task(self, start: Start) -> Callable[[Frame, Callable[[], Any]], Task]:
        """``task(frame, views)``: the stream's task for a collective."""
        run = self._post(start) if self.is_split(start) else self._perform(start)

        def in_turn(frame: Frame, views: Callable[[], Any]) -> Task:
            active, iteration = frame.active, frame.iteration
            return lambda: run(views, active, iteration)

        call, inputs = self._call(start), start.inputs
        if not getattr(call.bound, "ahead", False):
            return in_turn
        engine, everyone = self.context.engine, len(self.context.local)

        def ahead(frame: Frame, views: Callable[[], Any]) -> Task:
            if len(frame.active) != everyone:
                return in_turn(frame, views)
            columns = [frame.registers[slot] for slot in inputs]
            return AheadOfTurn(call, engine, columns, views, frame.active, frame.iteration)

        return ahead

    def _post(self, start: Start) -> Callable[[Any, tuple[int, ...], int], Any]:
        """``post(views, active, iteration)``: post sends or receives without waiting for a peer.

        A receive gives what its wait needs to know: the request, what `Call.begin` and `Call.count` gave,
        and who takes part.
        """
        call = self._call(start)
        lane, what, begin = call.lane, call.what, cast("Any", call.bound).start
        is_send = self.program.collectives[start.collective].kind is Kind.SEND

        def post(views: Any, active: tuple[int, ...], iteration: int) -> Any:
            call.number()
            try:
                operands = views()
                options, began = call.begin(iteration)
                request = begin(operands, **options)
            except BaseException as error:
                raise named(error, what) from error
            nbytes = call.count(options)
            if is_send:
                call.end(options, nbytes, began, active)
                lane.sends = [sent for sent in lane.sends if not sent.test()]
                lane.sends.append(request)
            return request, options, nbytes, active

        return post

    def wait(self, wait: Wait) -> Operation:
        if wait.event in self._carried:
            return self._arrive(wait.event)
        start = self._starts[wait.event]
        collective = self.program.collectives[start.collective]
        outputs, take = start.outputs, self._taker(wait.event)

        def finish(frame: Frame) -> None:
            for slot, register in zip(outputs, take(frame), strict=True):
                frame.registers[slot] = register

        # A send-done must not wait for the receiver: on a ring, every rank would wait in it. The
        # operands are kept by the request until they are sent; `Lane.drain` waits at the end of a run.
        return {Kind.SEND: take, Kind.RECV: self._receive(start, take)}.get(collective.kind, finish)

    def _taker(self, number: int) -> Callable[[Frame], Any]:
        """``take(frame)``: wait for the event with this number, which must be there; its value."""
        start = self._starts[number]
        collective = self.program.collectives[start.collective]
        stream = self.lanes[start.stream].stream
        awaiting = self.context.told("collective_awaiting", collective, start.stream)
        awaited = self.context.told("collective_awaited", collective, start.stream)

        def taken(frame: Frame) -> Any:
            event = frame.events.pop(number)
            if not event.done:
                stream.wait(event)
            return event.result()

        def watched(frame: Frame) -> Any:
            event, began = frame.events.pop(number), perf_counter()
            if not event.done:
                if awaiting is not None:
                    awaiting()
                stream.wait(event)
            result = event.result()
            if awaited is not None:
                awaited(event.since, began)
            return result

        return taken if awaiting is None and awaited is None else watched

    def _arrive(self, event: int) -> Operation:
        """Await the start of the previous iteration, if there was one, into the body's parameters."""
        take, targets = self._taker(event), self._carried[event]

        def arrive(frame: Frame) -> None:
            if event in frame.events:
                results = take(frame)
                for output, slot in targets:
                    frame.registers[slot] = results[output]

        return arrive

    def settle(self, loop: Loop) -> Callable[[Frame, list[Any]], None]:
        """``settle(frame, values)``: await the starts of a loop's last iteration into its carries."""
        takers = [(c.event, self._taker(c.event), c.carries) for c in loop.carried]

        def settle(frame: Frame, values: list[Any]) -> None:
            for event, take, carries in takers:
                if event in frame.events:
                    results = take(frame)
                    for output, carry in carries:
                        values[carry] = results[output]

        return settle

    def _receive(self, start: Start, take: Callable[[Frame], Any]) -> Operation:
        call, outputs = self._call(start), start.outputs

        def receive(frame: Frame) -> None:
            request, options, nbytes, active = take(frame)
            began = perf_counter()
            try:
                received = call.wait(request)
            except BaseException as error:
                raise named(error, call.what) from error
            call.end(options, nbytes, began, active)
            for slot, register in zip(outputs, call.registers(received, active), strict=True):
                frame.registers[slot] = register

        return receive
