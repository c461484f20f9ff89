"""`Execution`: one run of a program, from its arguments to its outputs.

It is walked by the dispatch thread, or by a caller that has its turn. Invariant: its outputs are
delivered once, whatever comes first: the end of the walk, an error in it, or the end of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from stretto.collectives.types import TensorType

from ..engines.engine import Column, Joined
from .dispatch import Dispatcher, caller
from .frame import Frame, Hosted, drop_tracebacks
from .stream import Event, completions
from .value import Landed, Part, Promise
from .walk import Walker


class FirstRuns(Protocol):
    """The step before each run of a program: `negotiation.Negotiation` or `profiling.Measuring`."""

    @property
    def agreed(self) -> bool:
        """Whether `begin` never waits, so that any thread that has the turn may call it."""
        ...

    def begin(self) -> None:
        """A run begins. Raises `CollectiveMismatch` where the processes cannot agree on it."""
        ...


class Executable(Protocol):
    """What an execution needs to know of its program: `loaded.LoadedProgram`."""

    dispatcher: Dispatcher
    walker: Walker
    local: tuple[tuple[int, int], ...]
    input_types: tuple[TensorType, ...]
    output_types: tuple[TensorType, ...]
    has_host_callbacks: bool
    communicates: bool
    negotiation: FirstRuns | None

    @property
    def is_prompt(self) -> bool: ...


class Issued(NamedTuple):
    """What the caller has of an execution that goes on elsewhere.

    ``promises``: its results. ``event``: its end, None if that is over.
    """

    promises: list[Promise]
    event: Event | None


class Execution:
    """One run of a program, from its arguments to its outputs."""

    __slots__ = ("_columns", "_failed", "caller", "end", "event", "loaded", "promises", "run")

    def __init__(
        self,
        loaded: Executable,
        columns: list[Promise | list[Any]],
        failed: BaseException | None,
        run: int | None = None,
    ) -> None:
        self.loaded = loaded
        self.caller = caller.mark
        self.event = Event()  # all is issued
        self.end = Event() if loaded.has_host_callbacks else self.event  # and called back
        self.promises = [Promise(self.event, type) for type in loaded.output_types]
        self.run = loaded.dispatcher.next_run() if run is None else run
        self._columns = columns
        self._failed = failed

    @property
    def must_agree(self) -> bool:
        """Whether other processes run the program too."""
        return self.loaded.negotiation is not None

    @property
    def is_prompt(self) -> bool:
        """Whether it is over in a moment, as far as its program is known."""
        return self.loaded.is_prompt

    def walk(self) -> None:
        """Walk the program. Errors go to the outputs."""
        frame: Frame | None = None
        error: BaseException | None = self._failed
        try:
            if error is None:
                frame = self._begin()
                for operation in self.loaded.walker.operations:
                    operation(frame)
        except BaseException as raised:
            error = raised
        self.finish(frame, error)

    def resume(self, frame: Frame, rest: Callable[[], None], index: int) -> None:
        """Walk on: finish an operation with ``rest``, then go on at ``index``. Errors go to the outputs."""
        error: BaseException | None = None
        try:
            rest()
            for operation in self.loaded.walker.operations[index:]:
                operation(frame)
        except BaseException as raised:
            error = raised
        self.finish(frame, error)

    def _begin(self) -> Frame:
        """The frame with the arguments; the first run is agreed on with the other processes."""
        loaded = self.loaded
        arguments = [
            self._gather(column, type)
            for column, type in zip(self._columns, loaded.input_types, strict=True)
        ]
        self._columns = []
        if loaded.negotiation is not None:
            loaded.negotiation.begin()
        walker = loaded.walker  # the first run may have given it another order
        program = walker.program
        frame = walker.new_frame()
        for index, slot in enumerate(program.body.parameters):
            frame.registers[slot] = arguments[index]
        if walker.started is not None:
            walker.started(self.run)
        return frame

    def finish(self, frame: Frame | None, error: BaseException | None) -> None:
        """Deliver the outputs that were issued, and the error to others. ``frame``: None without a walk."""
        loaded = self.loaded
        walker, dispatcher = loaded.walker, loaded.dispatcher
        results: list[Any] = []
        if error is None and frame is not None:
            try:
                results = walker.results(frame)
            except BaseException as raised:
                error = raised
        if error is not None:
            if frame is not None:
                results = [frame.registers[slot] for slot in walker.program.body.results]
            drop_tracebacks(error)
        try:
            # Before anybody has the results, and may end what records this.
            if walker.finished is not None:
                walker.finished(self.run, error)
        finally:
            self.land(error, results, () if frame is None else frame.ends)
        for lane in walker.lanes:
            if lane.sends:
                drained = lane.stream.submit(lane.drain)
                drained.add_callback(partial(dispatcher.report_failure_of, drained))

    def _gather(self, column: Promise | list[Any], type_: TensorType) -> Column:
        """The register of one argument: engine arrays, or host arrays if all devices have those."""
        if isinstance(column, Promise):
            count = len(self.loaded.local)
            column.event.wait()
            content = column.content
            if isinstance(content, Joined) and len(content) == count:
                return content
            column = [column.result(position) for position in range(count)]
        elif Part in map(type, column):
            column = [entry.result() if type(entry) is Part else entry for entry in column]
        kinds = set(map(type, column))
        if kinds <= {Landed}:
            return Hosted(entry.host for entry in column)
        if Landed not in kinds:
            return column
        walker = self.loaded.walker
        return [
            walker.engine.put(entry.host, type_, ordinal) if type(entry) is Landed else entry
            for entry, ordinal in zip(column, walker.ordinals, strict=True)
        ]

    def land(
        self,
        error: BaseException | None,
        results: Sequence[Any] = (),
        ends: Sequence[Any] = (),
    ) -> None:
        """Deliver the outputs; those that are not issued get the error. Only the first call counts.

        ``ends`` are those of runs that call back into Python.
        """
        loaded = self.loaded
        dispatcher = loaded.dispatcher
        if not dispatcher.claim(self):
            return
        for index, promise in enumerate(self.promises):
            register = results[index] if results else None
            promise.error = error
            if type(register) is Hosted:
                register = [None if entry is None else Landed(entry) for entry in register]
            promise.content = register
        if loaded.communicates and not getattr(error, "agreed", False):
            dispatcher.report(error)
        self.event.set(error=error)
        if self.end is self.event:
            return
        if error is not None or not ends:
            self.end.set(error=error)
        elif self._is_over(ends, results):
            _wait_for(ends, self.end)
        else:
            completions.submit(partial(_wait_for, tuple(ends), self.end))

    def _is_over(self, ends: Sequence[Any], results: Sequence[Any]) -> bool:
        """Whether a program of one segment has run, as far as its results say. Such as the engine ran in the
        thread that called: another thread need not wait for them."""
        walker = self.loaded.walker
        if not getattr(walker.engine, "jax_arrays", False) or len(ends) != len(walker.ordinals):
            return False
        arrays = [a for register in results if type(register) is list for a in register]
        return bool(arrays) and all(array.is_ready() for array in arrays)


def _wait_for(ends: Sequence[Any], event: Event) -> None:
    """Set the event once all ends have come; its error is the first of theirs."""
    failure: BaseException | None = None
    for end in ends:
        try:
            end.block_until_ready()
        except Exception as error:
            drop_tracebacks(error)
            failure = failure or error
    event.set(error=failure)
