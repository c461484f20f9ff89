"""The operations of a program that compute: segments run on the local devices that take part.

In iterations in which no device reads the outputs that a segment has on one device, that device leaves the
segment out (`Run.valid`): its outputs are then `Absent` arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from queue import SimpleQueue
from time import perf_counter, sleep, thread_time
from typing import Any

from ..engines.engine import Column, Joined, LoadedTogether, counted
from ..program import Run, Slot, calls_back
from ..program.valid import left_out
from ..recording.instrument import SegmentRun
from .context import Context
from .frame import Attempt, Frame, Hosted, Operation, named
from .segment_times import SegmentTimes
from .side_by_side import Heard, among, or_error, side_by_side, unless_heard

# Seconds of a run in the thread that calls from which on devices run side by side: threads have to wake up.
LONG = 50e-6
# Seconds between two looks of a caller at a run that it waits for for a moment, and what part of the time
# waited so far they are at least: each look takes the core from the run.
LOOK = 20e-6
LOOKS = 1 / 16

Land = Callable[[list[Any], Slot], list[Any]]


def ended(segment: LoadedTogether, columns: Sequence[Column]) -> Sequence[Column]:
    """Results of a run on all devices that is over: so its error is known, whose ever it is."""
    results, end = segment.run_together_with_end(columns)
    end.block_until_ready()
    return results


def over_in_time(
    results: Sequence[Column],
    is_ready: Callable[[Any], bool],
    until: float,
    gives_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait until all results are there on all devices, until a time of ``perf_counter`` at most, or until
    ``gives_up()``. Whether they are. ``is_ready`` is the engine's."""

    def is_there(column: Column) -> bool:
        return column.is_ready() if isinstance(column, Joined) else all(map(is_ready, column))

    began = perf_counter()
    while not all(map(is_there, results)):
        now = perf_counter()
        if now > until or gives_up():
            return False
        sleep(max(LOOK, (now - began) * LOOKS))
    return True


def within(context: AbstractContextManager[Any], call: Callable[[], None]) -> None:
    """Make a call in a context."""
    with context:
        call()


class Compute:
    """Makes operations of `Run` instructions. ``land`` turns a register's host arrays into engine arrays."""

    def __init__(self, context: Context, land: Land) -> None:
        self.context = context
        self.program = context.program
        self.segments = context.segments
        self.ordinals = context.ordinals
        self.land = land

    def operation(self, instruction: Run) -> Operation:
        """An operation that issues the segment, in the order of the local devices."""
        loaded = self.segments[instruction.segment]
        calls = self.context.called_back is not None
        run_with_end = getattr(loaded, "run_with_end", None) if calls else None
        partly = self._leaves_out(instruction)
        if self.context.times is not None:
            return self._timed(instruction, self.context.times, partly)
        if run_with_end is None:
            if partly is not None:
                some = self._some(instruction, partly)
                return lambda frame: some(frame, loaded.run)
            return self._one(instruction) if len(self.ordinals) == 1 else self._all(instruction)
        some = self._some(instruction, partly or (lambda iteration: frozenset()))

        def issue_noting_ends(frame: Frame) -> None:
            def run(ordinal: int, arrays: list[Any]) -> list[Any]:
                outputs, end = run_with_end(ordinal, arrays)
                frame.ends.append(end)
                return outputs

            some(frame, run)

        return issue_noting_ends

    def attempt(self, instruction: Run) -> Attempt | None:
        """`operation` for a thread that must not wait, of all devices of a program that calls back: see
        `communication.Communication.attempt`. None where the engine may run a device in the thread that
        calls, or somebody observes the run.
        """
        context, loaded = self.context, self.segments[instruction.segment]
        called, is_observed = context.called_back, context.instrument or context.times
        if called is None or is_observed or instruction.valid or not instruction.outputs:
            return None
        if not calls_back(self.program.segments[instruction.segment].module):
            return None
        if not isinstance(loaded, LoadedTogether) or not getattr(loaded, "hands_over", False):
            return None
        inputs, outputs, donated = instruction.inputs, instruction.outputs, instruction.donated
        what, land, is_ready = self._what(instruction), self.land, context.engine.is_ready

        def attempt(frame: Frame, until: float) -> Callable[[], None] | None:
            registers = frame.registers
            columns = []
            for slot in inputs:
                register = registers[slot]
                columns.append(land(registers, slot) if type(register) is Hosted else register)
            heard: Heard = SimpleQueue()
            with ExitStack() as listening:
                listening.enter_context(called.listened(heard.put))
                try:
                    results, end = loaded.run_together_with_end(columns)
                    for slot in donated:
                        registers[slot] = None
                    in_time = over_in_time(results, is_ready, until, lambda: not heard.empty())
                except BaseException as error:
                    raise named(error, what) from error
                if not in_time:
                    late = partial(unless_heard, end.block_until_ready, heard)
                    return partial(
                        within, listening.pop_all(), partial(finish, frame, results, late)
                    )
                finish(frame, results, end.block_until_ready)
            return None

        def finish(frame: Frame, results: Sequence[Column], block: Callable[[], None]) -> None:
            try:
                block()
            except BaseException as error:
                raise named(error, what) from error
            # Nobody is given what others, whose functions wait for one that raised, may never compute.
            for slot, result in zip(outputs, results, strict=True):
                frame.registers[slot] = result

        return attempt

    def _leaves_out(self, instruction: Run) -> Callable[[int], frozenset[int]] | None:
        """``f(iteration)``: positions of local devices that leave the run out; None if none ever does."""
        if not instruction.valid:
            return None
        return left_out([instruction.valid[logical] for logical in self.context.logical])

    def _what(self, instruction: Run) -> str:
        segment = self.program.segments[instruction.segment]
        return f"segment {segment.name or instruction.segment} of {self.program.name}"

    def _timed(
        self,
        instruction: Run,
        times: SegmentTimes,
        partly: Callable[[int], frozenset[int]] | None,
    ) -> Operation:
        """An operation that waits for the operands, runs the segment alone, and notes its time."""
        some = self._some(instruction, partly or (lambda iteration: frozenset()))
        run, land = self.segments[instruction.segment].run, self.land
        inputs, outputs = instruction.inputs, instruction.outputs

        def issue(frame: Frame) -> None:
            registers = frame.registers
            for slot in inputs:
                if type(registers[slot]) is Hosted:
                    land(registers, slot)
            began = times.begin([registers[slot] for slot in inputs])
            some(frame, run)
            left = 0 if partly is None else len(partly(frame.iteration).intersection(frame.active))
            if left < len(frame.active):
                times.end(instruction.segment, began, [registers[slot] for slot in outputs])

        return issue

    def _all(self, instruction: Run) -> Operation:
        some = self._some(instruction, lambda iteration: frozenset())
        loaded = self.segments[instruction.segment]
        if self.context.instrument is None and isinstance(loaded, LoadedTogether):
            return self._as_one(instruction, loaded, some)
        return lambda frame: some(frame, loaded.run)

    def _as_one(
        self, instruction: Run, loaded: LoadedTogether, some: Callable[..., None]
    ) -> Operation:
        """An operation for all devices that leaves their results together."""
        inputs, outputs, donated = instruction.inputs, instruction.outputs, instruction.donated
        everyone, what, land = tuple(range(len(self.ordinals))), self._what(instruction), self.land

        def issue(frame: Frame) -> None:
            if frame.active != everyone:
                some(frame, self.segments[instruction.segment].run)
                return
            registers = frame.registers
            columns = []
            for slot in inputs:
                register = registers[slot]
                columns.append(land(registers, slot) if type(register) is Hosted else register)
            try:
                results = loaded.run_together(columns)
            except BaseException as error:
                raise named(error, what) from error
            for slot in donated:
                registers[slot] = None
            for slot, result in zip(outputs, results, strict=True):
                registers[slot] = result

        return issue

    def _one(self, instruction: Run) -> Operation:
        """An operation for the only local device."""
        inputs, outputs, donated = instruction.inputs, instruction.outputs, instruction.donated
        land, ordinal = self.land, self.ordinals[0]
        run: SegmentRun = self.segments[instruction.segment].run
        instrument = self.context.instrument
        if instrument is not None:
            run = instrument.around_run(run, self.program, instruction.segment)
        what, due = self._what(instruction), len(outputs)

        def issue(frame: Frame) -> None:
            registers = frame.registers
            arguments = []
            for slot in inputs:
                register = registers[slot]
                if type(register) is Hosted:
                    register = land(registers, slot)
                arguments.append(register[0])
            try:
                arrays = counted(run(ordinal, arguments), due)
            except BaseException as error:
                raise named(error, what) from error
            for slot in donated:
                registers[slot] = None
            for slot, array in zip(outputs, arrays, strict=True):
                registers[slot] = [array]

        return issue

    def _some(
        self, instruction: Run, leaves_out: Callable[[int], frozenset[int]]
    ) -> Callable[[Frame, Callable[..., list[Any]]], None]:
        """``issue(frame, run)``: on the active devices, less those that leave this iteration out."""
        segment, land = self.program.segments[instruction.segment], self.land
        what = self._what(instruction)
        inputs, outputs, donated = instruction.inputs, instruction.outputs, instruction.donated
        ordinals, count, due = self.ordinals, len(self.ordinals), len(outputs)
        context, known = self.context, (self.program, instruction.segment)
        issued = context.told("segment_issued", *known)
        left = context.told("segment_skipped", *known)
        handed = context.told("segment_handed", *known)
        types = [self.program.slot_types[slot] for slot in outputs]
        absent, counters, flops = context.absent, context.counters, max(segment.flops, 0.0)
        # The functions that devices call back may wait for each other.
        together = count > 1 and calls_back(segment.module)
        loaded = self.segments[instruction.segment]
        for_all = loaded if count > 1 and isinstance(loaded, LoadedTogether) else None
        called, everyone = context.called_back, tuple(range(count))
        callers = getattr(context.engine, "callers", 1) if count > 1 else 1
        is_ready = context.engine.is_ready
        seconds = 0.0  # of a run, smoothed

        def timed(
            run: Callable[..., list[Any]], position: int, columns: Sequence[list[Any]]
        ) -> tuple[float, list[Any]]:
            """When the run of one device began, and its results."""
            nonlocal seconds
            began, before = perf_counter(), thread_time()
            arrays = run(ordinals[position], [column[position] for column in columns])
            took = (
                thread_time() - before
            )  # the engine's threads, once woken up, may take the core meanwhile
            if arrays and not is_ready(arrays[0]):
                took = 0.0  # they compute it
            seconds += 0.25 * (took - seconds)  # an estimate: threads may write at once
            return began, arrays

        def leave_out(position: int, results: list[list[Any]]) -> None:
            for result, type_ in zip(results, types, strict=True):
                result[position] = absent.array(type_, ordinals[position])
            counters.skipped_runs += 1
            counters.skipped_flops += flops
            if left is not None:
                left(ordinals[position])

        def run_all(
            run: Callable[..., list[Any]], going: Sequence[int], columns: Sequence[list[Any]]
        ) -> list[list[Any]]:
            try:
                if for_all is not None and going == everyone:
                    if together and called is not None:
                        results: Sequence[Column] = or_error(
                            partial(ended, for_all, columns), called
                        )
                    else:
                        results = for_all.run_together(columns)
                    return [[result[p] for result in results] for p in going]
                return side_by_side(
                    [partial(run, ordinals[p], [column[p] for column in columns]) for p in going]
                )
            except BaseException as error:
                raise named(error, what) from error

        def run_some(
            run: Callable[..., list[Any]], going: Sequence[int], columns: Sequence[list[Any]]
        ) -> Iterator[tuple[float, list[Any]]]:
            calls = [partial(timed, run, p, columns) for p in going]
            if seconds > LONG and len(calls) > 1:
                yield from among(callers, calls)
            else:
                yield from (call() for call in calls)

        def issue(frame: Frame, run: Callable[..., list[Any]]) -> None:
            registers, skipped = frame.registers, leaves_out(frame.iteration)
            going = frame.active
            results: list[list[Any]] = [[None] * count for _ in outputs]
            if skipped:
                for position in going:
                    if position in skipped:
                        leave_out(position, results)
                going = tuple(p for p in going if p not in skipped)
            columns = []
            for slot in inputs if going else ():
                register = registers[slot]
                columns.append(land(registers, slot) if type(register) is Hosted else register)
            began = perf_counter() if handed is not None else 0.0
            at_once = (together and len(going) > 1) or (for_all is not None and going == everyone)
            ran = iter(run_all(run, going, columns) if at_once else [])
            times = run_some(run, going, columns) if callers > 1 else iter(())
            for position in going:
                ordinal = ordinals[position]
                try:
                    if at_once:
                        arrays = next(ran)
                    elif callers > 1:
                        began, arrays = next(times)
                    else:
                        began = perf_counter() if handed is not None else 0.0
                        arrays = run(ordinal, [column[position] for column in columns])
                    counted(arrays, due)
                except BaseException as error:
                    raise named(error, what) from error
                for result, array in zip(results, arrays, strict=True):
                    result[position] = array
                if issued is not None:
                    issued(ordinal)
                if handed is not None:
                    handed(ordinal, began, arrays)
            for slot in donated:
                registers[slot] = None
            for slot, result in zip(outputs, results, strict=True):
                registers[slot] = result

        return issue
