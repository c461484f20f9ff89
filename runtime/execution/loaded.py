"""`LoadedProgram`: a program on its devices, ready to be executed.

Programs that only compute, and whose arguments are there, are handed to the engine in the caller's thread.
All others become an `Execution`, which the dispatch thread walks. Where a program's collectives are all
small, or compiled code calls them on several devices of this process, the caller's thread begins the walk,
which saves two thread switches if all is there in a moment, and leaves the rest to the dispatch thread where
it would have to wait for long. A program that is one small region (`regions`) needs no walk for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any, cast

from stretto.collectives.types import TensorType, interned

from ..engines.engine import Joined, Joins, LoadedTogether, counted
from ..errors import InvalidProgramError, UnsupportedError
from ..program import CALLS
from . import called_back
from .backoff import Backoff
from .compiled_segments import CompiledSegments
from .dispatch import Dispatcher
from .execution import Execution, FirstRuns, Issued
from .frame import Frame, Hosted, named
from .regions import Rest
from .side_by_side import among
from .stream import Event
from .value import DeletedError, Landed, Part, Promise, Value
from .walk import Walker

# Seconds that a caller waits for compiled code on several devices, instead of `patience_of_callers`:
# their threads take turns on the cores, and beside other work what takes half a millisecond often takes more
# than one.
MOMENT = 2e-3
# The same where what an earlier run gave was waited for: this caller would wait in any case, and each thread
# that stands between it and the engine takes its turn on the cores as well.
AWAITED = 20e-3
# What is given for one parameter on all local devices of a program: a value on each, or a promise of it.
Given = Promise | Sequence[Value]
# Bytes that a process in which allocating them fails would not live without.
LITTLE = 2**20


class LoadedProgram:
    """A program on its devices. ``local``: (logical id, ordinal) of those in this process, in order."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        walker: Walker,
        local: tuple[tuple[int, int], ...],
        has_host_callbacks: bool = False,
        must_agree: bool = False,
        executor: object = None,
    ) -> None:
        """``must_agree``: with other processes, even if the program as it is communicates nothing.

        ``executor``: who loaded it. Its threads and counters are needed as long as one of its programs is.
        """
        self._executor = executor
        self.dispatcher = dispatcher
        self.program = program = walker.program
        self.local = local
        self.walker = walker
        self.has_host_callbacks = has_host_callbacks
        self.communicates = must_agree or program.communicates
        self.input_types = tuple(map(interned, program.inputs))
        self.output_types = tuple(map(interned, program.outputs))
        self.donates = bool(program.donated)
        self._num_inputs = len(program.inputs)
        self._engine = walker.engine
        self._single: Callable[[int, list[Any]], list[Any]] | None = None
        # The same for one device, where the segment calls back into Python; gives the run's end too.
        self._calling: Callable[[int, list[Any]], tuple[list[Any], Any]] | None = None
        self._must_agree = must_agree
        # Engines run what they take for cheap in the thread that calls, and a loop may have no end, or a far
        # one. On several devices another thread calls, so that Ctrl-C ends the wait, as on JAX's CPU backend.
        self._may_never_end = len(local) > 1 and not all(
            segment.ends_soon for segment in program.segments
        )
        self._backoff = Backoff()
        # Whether it may run beside what other threads run, see `_run_calling`: nobody waits for it, and no
        # run that has an argument of it, but has not begun, loses that.
        self._may_overtake = (
            has_host_callbacks and len(local) == 1 and not self.communicates and not self.donates
        )
        # How it is agreed on with the other processes that run it; None if there are none. While it is
        # measured, what does that stands here too.
        self.negotiation: FirstRuns | None = None
        # Whether compiled code needs all devices at once. Functions that are called back keep some of their
        # threads, and may come together: programs that they run are walked, as ``compile_walked`` has them.
        self._together = len(local) > 1 and any(segment.sites for segment in program.segments)
        # Whether a caller that begins it has the engine run all devices at once, and only waits for them.
        self._at_once = self._together or (has_host_callbacks and len(local) > 1)
        self.compile_walked: Callable[[], LoadedProgram] | None = None
        self._walked: LoadedProgram | None = None
        self._walking = Lock()  # `_walked` is made once
        self._choose_single()

    def _choose_single(self) -> None:
        """Whether the engine may be called without a walk. Not where an instrument observes several devices:
        it would see a walk for each."""
        program, walker = self.program, self.walker
        self._single = self._calling = None
        single = program.single_run
        self._may_be_region = (
            single is not None
            and bool(program.segments[single.segment].sites)
            and len(self.local) == 1
            and not self.has_host_callbacks
            and self.dispatcher.instrument is None
        )
        run = single or program.arranged_run
        if run is None or program.segments[run.segment].sites:
            return
        if not self.local or self._may_never_end or self._must_agree:
            return
        loaded = walker.context.segments[run.segment]
        if isinstance(loaded, LoadedTogether):
            return  # its devices run it at once
        instrument = self.dispatcher.instrument
        if single is None:
            if instrument is None and not self.has_host_callbacks:
                self._single = walker.arranged(run, loaded.run)
        elif self.has_host_callbacks:
            if instrument is None and len(self.local) == 1:
                self._calling = getattr(loaded, "run_with_end", None)
        elif instrument is None:
            self._single = loaded.run
        elif len(self.local) == 1 and walker.prepared:
            self._single = instrument.around_call(
                loaded.run, program, run.segment, self.dispatcher.next_run
            )

    def watch(self) -> None:
        """Report to the dispatcher's instrument, which has been exchanged, from now on."""
        if self.walker.prepared:
            self.walker = self.walker.watched_by(self.dispatcher.instrument)
        self._choose_single()

    def prepare(self) -> None:
        """Bind the collectives; waits for the other processes of the program, where there are any."""
        walker = self.walker
        walker.prepare()
        with self.dispatcher.observing:
            instrument = self.dispatcher.instrument
            if (
                walker.prepared and walker.context.instrument is not instrument
            ):  # another since it was made
                if instrument is not None:
                    instrument.program_loaded(walker.program, self.local)
                self.walker = walker.watched_by(instrument)
            self._choose_single()

    @property
    def compiled(self) -> CompiledSegments:
        """The segments as the engine compiled them, of the program in the order that it runs in."""
        walker = self.walker
        return CompiledSegments(
            walker.program, self._engine, walker.context.segments, self.has_host_callbacks
        )

    @property
    def single(self) -> Callable[[int, list[Any]], Any] | None:
        """The engine's ``run`` of the only segment, where the program is nothing else.

        For callers that have the engine's arrays, and donate none where it `consumes` them; None where
        `execute` must be used. It gives the results; None where `execute` must be used this time; `Issued`,
        where other processes are late.
        """
        if self._single is not None:
            return self._single
        if self._calling is not None:
            return self._run_calling
        return self._run_region if self._may_be_region else None

    @property
    def consumes(self) -> bool:
        """Whether `single` may take what is donated. A region of one device that is made anew does not."""
        return not self._may_be_region or any(segment.donated for segment in self.program.segments)

    @property
    def is_prompt(self) -> bool:
        """Whether a caller may begin it, and wait for a moment until it is over."""
        return self.walker.prompt is not None and not self._backoff.holds

    def run_apart(
        self, single: Callable[[int, list[Any]], Any], rows: Sequence[list[Any]]
    ) -> list[list[Any]]:
        """What `single` gives for each device, given its arrays; several threads call."""
        calls = [partial(single, i, row) for (_, i), row in zip(self.local, rows, strict=True)]
        return among(getattr(self._engine, "callers", 1), calls)

    @property
    def cannot_fail(self) -> bool:
        """Whether `single` is the engine's ``run`` of code that calls nothing and allocates little, on an
        engine whose runs fail only where they do so, or where an argument has an error."""
        program = self.program
        segment = program.single_segment
        if not self.local or segment is None or self.has_host_callbacks or CALLS in segment.module:
            return False
        if not getattr(self._engine, "jax_arrays", False):
            return False
        loaded = self.walker.context.segments[program.body.instructions[0].segment]  # type: ignore[union-attr]
        scratch = getattr(loaded, "scratch_bytes", LITTLE)
        return scratch + sum(type.nbytes for type in self.output_types) < LITTLE

    @property
    def join(self) -> Callable[[TensorType, list[Any]], Promise] | None:
        """What makes of a parameter's arrays, one for each local device, what runs would make of them each
        time; None where they make nothing of them."""
        if len(self.local) < 2 or self.has_host_callbacks:
            return None
        for segment in self.walker.context.segments:
            if isinstance(segment, Joins):
                join = segment.join
                return lambda type, arrays: Promise.of(type, join(type, arrays))
        return None

    @property
    def ends_as_one(self) -> bool:
        """Whether what a run gives a device is there at one time, being of one run of the engine: the
        program is one segment, and no other process could want it walked."""
        return self.negotiation is None and self.program.single_run is not None

    def execute(self, arguments: Sequence[Sequence[Value]]) -> list[list[Value]]:
        """Run it: ``arguments[k][i]`` is parameter i for ``local[k]``; gives outputs in the same form.

        Returns at once. Donated arguments are deleted. Raises what the engine refuses at once and
        `DeletedError`; later errors arrive at the outputs. What a function raised that a program of one
        device has called in this thread is raised here, as on JAX's CPU backend: libraries' tests rely on it.
        """
        return self.execute_with_completion(arguments)[0]

    def execute_with_completion(
        self, arguments: Sequence[Sequence[Value]]
    ) -> tuple[list[list[Value]], Event | None]:
        """The same, with the event of `begin`."""
        if len(arguments) != len(self.local) or any(
            len(row) != self._num_inputs for row in arguments
        ):
            raise InvalidProgramError(
                f"program {self.program.name} takes {self._num_inputs} arguments for each of "
                f"{len(self.local)} local devices, not {[len(row) for row in arguments]}"
            )
        columns = [self._given(column) for column in zip(*arguments, strict=True)]
        promises, event = self.begin(columns)
        for index in self.program.donated:
            for row in arguments:
                row[index].delete()
        engine = self._engine
        rows = [
            [
                Value(type_, ordinal, engine, None, promise, position)
                for type_, promise in zip(self.output_types, promises)  # noqa: B905
            ]
            for position, (_, ordinal) in enumerate(self.local)
        ]
        return rows, event

    def _given(self, values: Sequence[Value]) -> Given:
        """What is given for one parameter: where it was promised for all devices, in their order, that."""
        promise = values[0]._other
        if type(promise) is not Promise or promise.type is None or self.has_host_callbacks:
            return values
        for position, value in enumerate(values):
            if (
                value._other is not promise
                or value._array is not None
                or value.position != position
            ):
                return values
        return promise

    def begin(
        self, arguments: Sequence[Given], awaited: bool = False
    ) -> tuple[list[Promise], Event | None]:
        """Run it: ``arguments[i]`` is parameter i on all of ``local``. Otherwise as `execute`. ``awaited``:
        whether what an earlier run gave was waited for.

        Donated values are deleted; who has handles of what a promise stands for deletes those, once this has
        returned. Where a program calls back into Python, and may raise after it has taken what it is donated,
        values are to be given.

        The event is set once all is issued (its ``error`` says whether the run failed); None if that is so
        already. Where the program calls back into Python, it is set once everything has been called.
        """
        if not self.local:
            return [], None
        if self._together and called_back.inside():
            return self._walk_within(arguments)
        if self._single is not None and (not self.donates or self.dispatcher.idle):
            promises = self._run_single(arguments)
            if promises is not None:
                return promises, None
        if (
            self.is_prompt
            and (self.negotiation is None or self.negotiation.agreed)
            and self.dispatcher.catch_up()
        ):
            begun = self._run_promptly(arguments, awaited)
            if begun is not None:
                return begun
        self._backoff.count()
        return self._launch(arguments)

    def _walk_within(self, arguments: Sequence[Given]) -> tuple[list[Promise], Event | None]:
        """Run it in a function that another run has called back. Waits for what it gives."""
        with self._walking:
            if self._walked is None:
                if self.compile_walked is None:
                    raise UnsupportedError(
                        f"program {self.program.name}, whose collectives compiled code calls, cannot be run "
                        "by a function that another program calls back: set STRETTO_NATIVE=0"
                    )
                self._walked = self.compile_walked()
        promises, event = self._walked.begin(arguments)
        for promise in promises:
            for position in range(len(self.local)):
                with suppress(Exception):  # whoever reads it is told
                    promise.block(self._engine, position)
        return promises, event

    def _run_single(self, arguments: Sequence[Given]) -> list[Promise] | None:
        """Hand the one segment to the engine; None if that cannot be done here and now."""
        run = self._single
        if run is None:
            return None
        rows: list[list[Any]] = [[] for _ in self.local]
        for given in arguments:
            if isinstance(given, Promise):
                if not given.event.done:
                    return None
                for position, (row, (_, ordinal)) in enumerate(zip(rows, self.local, strict=True)):
                    array = given.array(self._engine, position, ordinal)
                    if array is None:
                        return None
                    row.append(array)
                continue
            for row, value in zip(rows, given, strict=True):
                array = value._array
                if array is None:
                    if type(value._other) is not Landed:
                        return None
                    array = value.array()
                row.append(array)
        types = self.output_types
        outputs = [
            counted(run(ordinal, row), len(types))
            for (_, ordinal), row in zip(self.local, rows, strict=True)
        ]
        if self.donates:
            self._delete_donated(arguments)
        return [Promise.of(type_, content) for type_, content in zip(types, zip(*outputs))]  # noqa: B905

    def _run_calling(self, ordinal: int, arrays: list[Any]) -> Any:
        """Run a program of one segment that calls back into Python here; see `single`.

        As a walk in the caller's thread does, it waits for the functions where the results are there: then
        the engine has called them in this thread. A function may wait for programs that other threads run,
        so it does not keep the turn, and what another thread runs is not waited for: that may be a program
        whose functions wait for this one. Raises what such a function raised, see `execute`.
        """
        dispatcher, run = self.dispatcher, self._calling
        if run is None:
            return None
        if dispatcher.take_turn():
            dispatcher.end_turn()
        elif not dispatcher.may_overtake():
            return None
        try:
            results, end = run(ordinal, arrays)
            counted(results, len(self.output_types))
        except BaseException as raised:
            segment = self.program.single_segment
            what = segment.name if segment is not None and segment.name else 0
            raise named(raised, f"segment {what} of {self.program.name}") from raised
        if results and all(map(self._engine.is_ready, results)):
            try:
                end.block_until_ready()
            except Exception:
                pass  # the end is in the frame: `Execution.finish` tells its error
            else:
                return results
        frame = self.walker.new_frame()
        frame.ends.append(end)
        for slot, array in zip(self.program.body.results, results, strict=True):
            frame.registers[slot] = [array]
        execution = Execution(self, [], None, dispatcher.next_run())
        dispatcher.admit(execution)
        execution.finish(frame, None)
        event = execution.end
        ended = event.done and event.error is None
        return Issued(execution.promises, None if ended else event)

    def _run_region(self, ordinal: int, arrays: list[Any]) -> Any:
        """Run a program that is one `prompt` region here; see `single`."""
        dispatcher, walker, negotiation = self.dispatcher, self.walker, self.negotiation
        region = walker.region
        if (
            region is None
            or (negotiation is not None and not negotiation.agreed)
            or not dispatcher.take_turn()
        ):
            return None
        rest: Rest | None = None
        error: BaseException | None = None
        try:
            if negotiation is not None:
                negotiation.begin()
            results = region.run_here(arrays, perf_counter() + dispatcher.world.patience_of_callers)
            if type(results) is list:
                dispatcher.end_turn()
                return results
            rest = cast("Rest", results)
        except BaseException as raised:
            error = raised
        execution = Execution(self, [], None, dispatcher.next_run())
        frame = walker.new_frame()
        for slot, array in zip(walker.program.body.parameters, arrays, strict=True):
            frame.registers[slot] = [array]
        if rest is None:
            dispatcher.end_turn(execution)
            execution.finish(frame, error)
        else:
            dispatcher.end_turn(
                execution, partial(execution.resume, frame, partial(rest, frame), 1)
            )
        return Issued(execution.promises, execution.event)

    def _run_promptly(
        self, arguments: Sequence[Given], awaited: bool
    ) -> tuple[list[Promise], Event | None] | None:
        """Begin the walk of a `prompt` program here; None if that cannot be done here and now."""
        dispatcher, walker = self.dispatcher, self.walker
        prompt, frame = walker.prompt, self._frame_of(arguments)
        if frame is None or not dispatcher.take_turn():
            return None
        rest: Callable[[], None] | None = None
        error: BaseException | None = None
        run, done = dispatcher.next_run(), 0
        patience = dispatcher.world.patience_of_callers
        if self._at_once:
            patience = AWAITED if awaited else MOMENT
        until = perf_counter() + patience
        assert prompt is not None
        try:
            if self.negotiation is not None:
                self.negotiation.begin()
            if walker.started is not None:
                walker.started(run)
            for attempt in prompt:
                done += 1
                rest = attempt(frame, until)
                if rest is not None:
                    break
            else:
                results = walker.results(frame)
        except BaseException as raised:
            error = raised
        if self._at_once:  # one device waits for other processes alone, which says nothing of it
            self._backoff.ran(in_time=rest is None and perf_counter() < until)
        if error is None and rest is None:
            dispatcher.end_turn()
            if walker.finished is not None:
                walker.finished(run, None)
            promises = list(map(_there, self.output_types, results))
            event = None
        else:
            execution = Execution(self, [], None, run)
            promises, event = execution.promises, execution.event
            if rest is not None:
                dispatcher.end_turn(execution, partial(execution.resume, frame, rest, done))
            else:
                dispatcher.end_turn(execution)
                execution.finish(frame, error)
        if self.donates:
            self._delete_donated(arguments)
        return promises, event

    def _frame_of(self, arguments: Sequence[Given]) -> Frame | None:
        """The frame of a walk with these arguments, if they are all there."""
        program = self.walker.program
        frame = self.walker.new_frame()
        registers, count = frame.registers, len(self.local)
        for type_, given, slot in zip(
            self.input_types, arguments, program.body.parameters, strict=True
        ):
            register: list[Any] = []
            landed = 0
            if isinstance(given, Promise):
                content = given.content
                if not given.event.done or content is None:
                    return None
                if given.type is not type_ and given.type != type_:
                    return None
                if isinstance(content, Joined):
                    if len(content) == count:
                        registers[slot] = content
                        continue
                    content = [content[position] for position in range(count)]
                register = list(content[:count])
                if any(array is None for array in register):
                    return None
                landed = sum(type(array) is Landed for array in register)
                if landed == count:
                    register = [array.host for array in register]
            else:
                for value in given:
                    array = value._array
                    if array is None:
                        other = value._other
                        if type(other) is Promise and other.gave(value.position):
                            array = value.array()
                        elif type(other) is Landed:
                            array, landed = other.host, landed + 1
                        else:
                            return None
                    if value.type is not type_ and value.type != type_:
                        return None
                    register.append(array)
            if landed:
                if landed < count:
                    return None
                register = Hosted(register)
            registers[slot] = register
        return frame

    def _delete_donated(self, arguments: Sequence[Given]) -> None:
        for index in self.program.donated:
            given = arguments[index]
            if not isinstance(given, Promise):
                for value in given:
                    value.delete()

    def _launch(self, arguments: Sequence[Given]) -> tuple[list[Promise], Event | None]:
        idle, count = self.dispatcher.idle, len(self.local)
        columns: list[Promise | list[Any]] = []
        issued = True
        failed: BaseException | None = None  # of an argument
        for index, (type_, given) in enumerate(zip(self.input_types, arguments, strict=True)):
            if isinstance(given, Promise):
                self._check(index, given.type)
                if not given.event.done:
                    issued = False
                elif given.content is None:
                    failed = failed or given.error
                elif not isinstance(given.content, Joined):
                    column = list(given.content[:count])
                    if given.error is not None and any(array is None for array in column):
                        failed = failed or given.error
                    columns.append(column)
                    continue
                columns.append(given)
                continue
            column = []
            for value in given:
                if value.type is not type_:
                    self._check(index, value.type)
                try:
                    content = value.capture()
                except DeletedError:
                    raise
                except Exception as error:
                    failed = failed or error
                    content = None
                if type(content) is Part and not content.promise.event.done:
                    issued = False
                column.append(content)
            columns.append(column)
        execution = Execution(self, columns, failed)
        here = idle and issued and not self.communicates and not self._may_never_end
        if here:
            self.dispatcher.walk_here(execution)
        elif issued and self._may_overtake and self.dispatcher.may_overtake():
            here = True
            self.dispatcher.walk_beside(execution)
        else:
            self.dispatcher.enqueue(execution)
        if self.donates:
            self._delete_donated(arguments)
        if here and failed is None and self.has_host_callbacks and count == 1:
            raised = execution.event.error
            if raised is not None:
                raise raised
        event = execution.end if self.has_host_callbacks else execution.event
        return execution.promises, None if event.done and event.error is None else event

    def _check(self, index: int, found: TensorType | None) -> None:
        wanted = self.input_types[index]
        if found is not wanted and found != wanted:
            raise InvalidProgramError(
                f"argument {index} of program {self.program.name} is {found}, not {wanted}"
            )


def _there(type: TensorType, register: Any) -> Promise:
    """An output that is there, of all devices."""
    return Promise.of(
        type, list(map(Landed, register)) if isinstance(register, Hosted) else register
    )
