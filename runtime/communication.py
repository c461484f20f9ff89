"""The operations of a program that communicate: collectives, sends and receives.

A `Lane` is a stream of the executor with all that goes with it. A collective whose wait follows directly
runs on the dispatch thread if its lane is idle; one with work in between is a task of the lane's thread.
Sends and receives are posted by the lane and never block it: a send-done must not wait for its receiver,
since on a ring every rank would then wait in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from stretto.collectives.communicator import BoundCollective, Communicator, Reducer, Request
from stretto.collectives.ops import Collective, Kind

from .engine import Engine, LoadedSegment
from .frame import Frame, Hosted, Operation, named
from .instrument import Counters, Instrument
from .program import Program, Start, Wait, instructions
from .progress import Progress
from .stream import Stream


class Lane:
    """A stream of the executor with what goes with it: progress, counters, sends under way."""

    __slots__ = ("communicator", "counters", "number", "progress", "sends", "sequence", "stream")

    def __init__(
        self, number: int, stream: Stream, communicator: Communicator, progress: Progress
    ) -> None:
        self.number = number
        self.stream = stream
        self.communicator = communicator
        self.progress = progress
        self.counters = Counters()
        self.sequence = 0
        self.sends: list[Request] = []

    def drain(self) -> None:
        """Wait until every send has been received. A task of this stream."""
        sends, self.sends = self.sends, []
        for request in sends:
            request.wait()


class Communication:
    """The communicating operations of one program for its local devices.

    ``local``: (logical id, ordinal) pairs. ``lanes[i]`` serves the program's stream i. ``owner`` maps each
    logical id to its process. Binds every collective, in program order: the same on all ranks.
    """

    def __init__(
        self,
        program: Program,
        engine: Engine,
        segments: Sequence[LoadedSegment],
        local: Sequence[tuple[int, int]],
        owner: Mapping[int, int],
        lanes: Sequence[Lane],
        instrument: Instrument | None = None,
        called: str = "",
    ) -> None:
        self.program = program
        self.engine = engine
        self.segments = segments
        self.logical = tuple(logical for logical, _ in local)
        self.ordinals = tuple(ordinal for _, ordinal in local)
        self.owner = owner
        self.lanes = lanes
        self.instrument = instrument
        self.called = called
        self._starts = {i.event: i for i in instructions(program.body) if isinstance(i, Start)}
        self._bound = self._bind()

    def is_split(self, start: Start) -> bool:
        """Whether the operation is posted at its start and awaited at its wait: send and receive."""
        return self.program.collectives[start.collective].kind in (Kind.SEND, Kind.RECV)

    def _bind(self) -> dict[tuple[int, int], BoundCollective]:
        bound: dict[tuple[int, int], BoundCollective] = {}
        for instruction in instructions(self.program.body):
            if not isinstance(instruction, Start):
                continue
            key = (instruction.collective, instruction.stream)
            if key in bound:
                continue
            collective = self.program.collectives[instruction.collective]
            reducer = None if collective.reducer is None else self._reducer(collective)
            try:
                bound[key] = self.lanes[instruction.stream].communicator.bind(
                    collective, self.owner, reducer
                )
            except Exception as error:
                raise named(error, describe(collective)) from error
        return bound

    def _reducer(self, collective: Collective) -> Reducer:
        """A reducer that is a program of its own, run on the first local device."""
        assert collective.reducer is not None
        segment = self.segments[collective.reducer]
        engine, types, ordinal = self.engine, collective.operands, self.ordinals[0]

        def reduce(left: list[Any], right: list[Any]) -> list[Any]:
            arrays = [
                engine.put(host, type, ordinal)
                for host, type in zip([*left, *right], [*types, *types], strict=True)
            ]
            return [engine.host_view(array) for array in segment.run(ordinal, arrays)]

        return reduce

    def _columns(self, start: Start) -> Callable[[Frame], Callable[[], dict[int, list[Any]]]]:
        """``capture(frame)`` keeps the operands of a collective; what it gives waits for them and makes
        host arrays by logical id.
        """
        inputs, logical, host_view = start.inputs, self.logical, self.engine.host_view

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
        collective = self.program.collectives[start.collective]
        bound = self._bound[start.collective, start.stream]
        lane = self.lanes[start.stream]
        what, count, logical = describe(collective), len(self.logical), self.logical
        name, source = f"{collective.kind} %{collective.name}", collective.source
        ranks, called = self._ranks(collective), self.called
        skips = skipped_pairs(collective)
        progress, counters, instrument = lane.progress, lane.counters, self.instrument
        run: Any = bound.run
        single = count == 1
        outputs = range(len(start.outputs))
        payload, all_messages = _payload(bound), getattr(bound, "messages", 0)

        def perform(views: Any, active: tuple[int, ...], iteration: int) -> list[Hosted]:
            lane.sequence = sequence = lane.sequence + 1
            try:
                operands = views()
                if instrument is not None:
                    instrument.collective_started(collective, start.stream)
                progress.begin(name, source, sequence, ranks, called)
                options = skips(iteration)
                began = perf_counter()
                try:
                    results = run(operands, **options)
                finally:
                    progress.end()
            except BaseException as error:
                raise named(error, what) from error
            seconds = perf_counter() - began
            counters.seconds += seconds
            messages, nbytes = payload(options)
            counters.collectives += 1
            counters.messages += messages
            counters.skipped += all_messages - messages
            counters.nbytes += nbytes
            if instrument is not None:
                instrument.collective_finished(collective, start.stream, nbytes, seconds)
            if single:
                return [Hosted((array,)) for array in results[logical[0]]]
            registers = [Hosted([None] * count) for _ in outputs]
            for position in active:
                for register, array in zip(registers, results[logical[position]], strict=True):
                    register[position] = array
            return registers

        return perform

    def _ranks(self, collective: Collective) -> tuple[int, ...]:
        """Processes that take part in the groups and pairs that have a local member."""
        here = set(self.logical)
        sets = [g for g in (*collective.groups, *collective.pairs) if here.intersection(g)]
        return tuple(sorted({self.owner[member] for members in sets for member in members}))

    def start_and_wait(self, start: Start) -> Operation:
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
        capture = self._columns(start)
        post = self._post(start) if self.is_split(start) else self._perform(start)
        stream, event = self.lanes[start.stream].stream, start.event

        def begin(frame: Frame) -> None:
            views = capture(frame)
            active, iteration = frame.active, frame.iteration
            frame.events[event] = stream.submit(lambda: post(views, active, iteration))

        return begin

    def _post(self, start: Start) -> Callable[[Any, tuple[int, ...], int], Any]:
        """``post(views, active, iteration)``: post sends or receives without waiting for a peer."""
        collective = self.program.collectives[start.collective]
        bound: Any = self._bound[start.collective, start.stream]
        lane, what = self.lanes[start.stream], describe(collective)
        skips, is_send = skipped_pairs(collective), collective.kind is Kind.SEND
        counters, instrument = lane.counters, self.instrument
        payload, all_messages = _payload(bound), getattr(bound, "messages", 0)

        def post(views: Any, active: tuple[int, ...], iteration: int) -> Any:
            lane.sequence += 1
            try:
                operands = views()
                if instrument is not None:
                    instrument.collective_started(collective, start.stream)
                options = skips(iteration)
                request = bound.start(operands, **options)
            except BaseException as error:
                raise named(error, what) from error
            counters.collectives += 1
            if is_send:
                messages, nbytes = payload(options)
                counters.messages += messages
                counters.skipped += all_messages - messages
                counters.nbytes += nbytes
                lane.sends = [sent for sent in lane.sends if not sent.test()]
                lane.sends.append(request)
            return request, active

        return post

    def wait(self, wait: Wait) -> Operation:
        start = self._starts[wait.event]
        collective = self.program.collectives[start.collective]
        lane, outputs = self.lanes[start.stream], start.outputs
        stream = lane.stream

        def take(frame: Frame) -> Any:
            event = frame.events.pop(wait.event)
            stream.wait(event)
            return event.result()

        def finish(frame: Frame) -> None:
            for slot, register in zip(outputs, take(frame), strict=True):
                frame.registers[slot] = register

        # A send-done must not wait for the receiver: on a ring, every rank would wait in it. The
        # operands are kept by the request until they are sent; `Lane.drain` waits at the end of a run.
        return {Kind.SEND: take, Kind.RECV: self._receive(start, collective, lane, take)}.get(
            collective.kind, finish
        )

    def _receive(
        self, start: Start, collective: Collective, lane: Lane, take: Callable[[Frame], Any]
    ) -> Operation:
        outputs, count, logical = start.outputs, len(self.logical), self.logical
        what, name = describe(collective), f"{collective.kind} %{collective.name}"
        ranks, instrument, called = self._ranks(collective), self.instrument, self.called
        progress, counters = lane.progress, lane.counters

        def receive(frame: Frame) -> None:
            request, active = take(frame)
            began = perf_counter()

            def await_message() -> Any:
                progress.begin(name, collective.source, lane.sequence, ranks, called)
                try:
                    return request.wait()
                finally:
                    progress.end()

            try:
                received = await_message() if not request.test() else request.wait()
            except BaseException as error:
                raise named(error, what) from error
            seconds = perf_counter() - began
            counters.seconds += seconds
            if instrument is not None:
                instrument.collective_finished(collective, start.stream, 0, seconds)
            registers = [Hosted([None] * count) for _ in outputs]
            for position in active:
                for register, array in zip(registers, received[logical[position]], strict=True):
                    register[position] = array
            for slot, register in zip(outputs, registers, strict=True):
                frame.registers[slot] = register

        return receive


def describe(collective: Collective) -> str:
    """``all-reduce %psum.3 at train.py:12``, for errors."""
    name = f" %{collective.name}" if collective.name else ""
    return f"{collective.kind}{name}{f' at {collective.source}' if collective.source else ''}"


def _payload(bound: Any) -> Callable[[dict[str, frozenset[int]]], tuple[int, int]]:
    """Messages and bytes that this process gives in a call with these keyword arguments."""
    all_of_it = getattr(bound, "messages", 0), getattr(bound, "bytes", 0)
    count = getattr(bound, "payload", None)
    if count is None:
        return lambda options: all_of_it
    return lambda options: count(options["skip"]) if options else all_of_it


def skipped_pairs(collective: Collective) -> Callable[[int], dict[str, frozenset[int]]]:
    """Keyword arguments of a call in an iteration: ``skip``, the pairs that move nothing in it."""
    valid = collective.valid_iterations
    if not valid:
        nothing: dict[str, frozenset[int]] = {}
        return lambda iteration: nothing
    runs = [list(zip(bounds[::2], bounds[1::2], strict=True)) for bounds in valid]
    edges = sorted({e for pairs in runs for lo, hi in pairs for e in (lo, hi + 1) if lo <= hi})
    calls = [
        {
            "skip": frozenset(
                k for k, pairs in enumerate(runs) if not any(lo <= at <= hi for lo, hi in pairs)
            )
        }
        for at in [-1, *edges]  # between two edges nothing changes
    ]
    return lambda iteration: calls[bisect_right(edges, iteration)]
