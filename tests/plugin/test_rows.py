"""The compiled rows of a trace against their definition in Python: equal bytes for equal events."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from support.handmade import F32, Rig, all_reduce, block, permute, program, segment
from support.rows import Rows

from stretto.plugin import _capi
from stretto.runtime.program import Program, Run, Start, Wait
from stretto.runtime.recording.instrument import Instruments
from stretto.runtime.recording.rows import EVERY, EXACT
from stretto.runtime.recording.trace import Trace
from stretto.runtime.recording.trace_file import CALL, WIDTH, Header, Kind, file_name, read, rows_of
from stretto.testing import NullEngine, Recorder

MAKERS = (Rows, _capi.Rows)


class Case:
    """Rows with a clock that counts, an engine of numbers, and what they ask for."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.ready: set[int] = set()
        self.asked: list[Any] = []
        self.rows = make(
            self.is_ready, 2, self.watch, self.number_of, 2.0, map(float, count()).__next__
        )

    def is_ready(self, array: int) -> bool:
        self.asked.append(array)
        if array % 7 == 6:
            raise ValueError("donated")
        return array in self.ready

    def watch(self) -> None:
        self.asked.append([self.rows.last(ordinal) for ordinal in range(2)])

    def number_of(self, skip: frozenset[int]) -> int:
        self.asked.append(skip)
        return len(skip)


Taken = tuple[bytes, bytes]


def joined(taken: list[Taken]) -> Taken:
    """Events and calls that were taken in turns."""
    return b"".join(events for events, _ in taken), b"".join(calls for _, calls in taken)


def events(case: Case, seed: int, length: int) -> Taken:
    """The rows of events drawn at random."""
    draw, made = random.Random(seed), case.rows
    programs = [made.program(number) for number in (0, 1, -1)]
    segments = [made.segment(p, index, index) for p in programs for index in range(2)]
    collectives = [made.collective(draw.randrange(3), index, index % 2, 2) for index in range(3)]
    runs, handed = count(1), 0
    taken: list[Taken] = []
    begun: list[tuple[Any, int]] = []

    def failing(ordinal: int, arrays: list[Any]) -> list[Any]:
        raise RuntimeError("no")

    for _ in range(length):
        of, at = draw.choice(segments), draw.choice(collectives)
        ordinal, outputs = draw.randrange(2), draw.choice([[], [handed, handed + 1]])
        match draw.randrange(14):
            case 0:
                begun.append((draw.choice(programs), next(runs)))
                begun[-1][0].started(begun[-1][1])
            case 1 if begun:
                walked, run = begun.pop(draw.randrange(len(begun)))
                walked.finished(run, draw.choice([None, ValueError()]))
            case 2 | 3:
                of.handed(ordinal, float(draw.randrange(50)), outputs)
                handed += 2
            case 4:
                of.left_out(ordinal)
                of.ran(ordinal, float(draw.randrange(50)), 50.0)
            case 5:
                of.called(next(runs), ordinal, 0.5, outputs)
                handed += 2
            case 6:
                assert of.around_run(lambda o, a: [*a, o])(ordinal, [handed]) == [handed, ordinal]
                handed += 2
            case 7:
                call = of.around_call(draw.choice([failing, lambda o, a: a]), runs.__next__)
                with suppress(RuntimeError):
                    assert call(ordinal, outputs) is outputs
                handed += 2
            case 8 | 9:
                at.started()
            case 10:
                skip = draw.choice([frozenset(), frozenset({1}), frozenset({0, 2})])
                at.ran(draw.random(), draw.choice([(0, 1), (1,), ()]), skip)
            case 11:
                at.awaiting()
            case 12:
                at.awaited(draw.random(), float(draw.randrange(100)))
            case 13:
                case.ready.update(range(draw.randrange(handed + 1)))
                last = made.last(ordinal)
                if last is not None and draw.random() < 0.5:
                    made.block_on(ordinal, last[0])
                made.settle(ordinal, draw.choice([-1, last[0] if last else -1]))
        if draw.random() < 0.02:
            made.drain(lambda *parts: taken.append((b"".join(parts[0]), b"".join(parts[1]))))
    return joined([*taken, made.take()])


@pytest.mark.parametrize("seed", range(20))
def test_equal_events_give_equal_rows(seed: int) -> None:
    python, compiled = (Case(make) for make in MAKERS)
    expected, found = events(python, seed, 400), events(compiled, seed, 400)
    assert found == expected
    assert compiled.asked == python.asked
    assert set(rows_of(*found)[:, 0]) == set(map(float, Kind))


@pytest.mark.parametrize("make", MAKERS)
def test_ends_are_watched_at_few_of_the_stops(make: Callable[..., Any]) -> None:
    case = Case(make)
    place, index = case.rows.collective(0, 5, 0, 1), 5
    case.rows.segment(case.rows.program(0), 0, 0).handed(0, 0.0, [0])  # runs on
    place.started()
    watched = []
    for stop in range(2 * EVERY):
        case.asked.clear()
        place.awaiting()
        if any(isinstance(asked, list) for asked in case.asked):
            watched.append(stop)
        place.awaited(0.0, 1e9)
    expected = [EVERY - index, 2 * EVERY - index]
    assert watched == [*range(EXACT), *expected]


def test_rows_of_many_chunks_come_in_order() -> None:
    made = Case(_capi.Rows).rows
    at = made.collective(0, 0, 0, 1)
    of, parts = made.segment(made.program(0), 0, 0), list[list[bytes]]()
    # A chunk has room for 504 rows or 1176 calls, the next one for 4680 or 10920.
    for total in (1, 503, 504, 505, 5183, 5184, 5185, 13000, 0, 5, 60000, 5):
        for number in range(total):
            at.ran(float(number), (0,), frozenset())
            of.called(0, 0, float(number), [])
        parts.clear()
        made.drain(lambda *views: parts.extend([bytes(view) for view in each] for each in views))
        events, calls = map(b"".join, parts or [[], []])
        begins = np.frombuffer(events, "<f8").reshape(-1, WIDTH)[:, 4]
        assert begins.tolist() == list(range(total))
        assert [begin for *_, begin, _ in CALL.iter_unpack(calls)] == list(range(total))


def test_the_clock_is_that_of_the_program() -> None:
    made = _capi.Rows(lambda array: True, 1, lambda: None, len)
    of = made.segment(made.program(0), 0, 0)
    began, asked = perf_counter(), []
    while perf_counter() < began + 0.1:  # longer than it takes to find out how fast a counter goes
        before = perf_counter()
        of.left_out(0)
        asked.append((before, perf_counter()))
    rows = rows_of(*made.take())
    apart = 250e-9  # `DISTURBED`
    assert len(rows) == len(asked)
    for (before, after), row in zip(asked, rows, strict=True):
        assert before - apart <= row[4] == row[5] <= after + apart
    assert (np.diff(rows[:, 4]) >= 0).all()


def test_arrays_are_let_go() -> None:
    class Array:
        alive = 0

        def __init__(self) -> None:
            Array.alive += 1

        def __del__(self) -> None:
            Array.alive -= 1

    ready: list[bool] = []
    made = _capi.Rows(lambda array: bool(ready), 1, lambda: None, len)
    of = made.segment(made.program(0), 0, 0)
    for _ in range(100):  # more than there is room for at first
        of.handed(0, 0.0, [Array()])
    assert Array.alive == 100
    ready.append(True)
    made.settle(0)
    assert Array.alive == 0
    of.handed(0, 0.0, [Array()])
    del made, of
    assert Array.alive == 0


def test_a_device_that_is_not_there() -> None:
    made = _capi.Rows(lambda array: True, 1, lambda: None, len)
    with pytest.raises(IndexError, match="device 1 of 1"):
        made.segment(made.program(0), 0, 0).handed(1, 0.0, [])
    with pytest.raises(IndexError, match="device 7 of 1"):
        made.last(7)


def test_threads_lose_no_row() -> None:
    made = _capi.Rows(lambda array: True, 4, lambda: None, len, 0.0)
    of, at = made.segment(made.program(0), 0, 0), made.collective(0, 0, 0, 1)
    together, runs, taken = threading.Barrier(5), 2000, []

    def work(ordinal: int) -> None:
        together.wait()
        for _ in range(runs):
            of.handed(ordinal, perf_counter(), [object()])
            at.started()

    threads = [threading.Thread(target=work, args=(ordinal,)) for ordinal in range(4)]
    for thread in threads:
        thread.start()
    together.wait()
    while any(thread.is_alive() for thread in threads):
        taken.append(made.take())
    for thread in threads:
        thread.join()
    for ordinal in range(4):
        made.settle(ordinal)
    found = rows_of(*joined([*taken, made.take()]))
    assert np.unique(found[:, 3], return_counts=True)[1].tolist() == [runs] * 4


def walked() -> Program:
    """A segment beside a message that is never sent from device 0, and another segment."""
    shift = permute((0, 1), (1, 0), valid_iterations=((1, 0), (0, 9)))
    body = block(
        (0,), [Start(0, (0,), (1,), 0, 0), Run(0, (0,), (2,)), Wait(0), Run(1, (1, 2), (3,))], (3,)
    )
    segments = [segment("increment"), segment("add", (F32, F32))]
    return program([F32] * 4, body, devices=2, segments=segments, collectives=[shift], name="p")


def test_a_program_is_traced_alike(tmp_path: Path) -> None:
    header = Header(0, 1, "here", 1, 2, "null", 0.0, 0.0)
    files = []
    for make in MAKERS:
        folder = tmp_path / make.__module__
        trace = Trace(folder, header, NullEngine(2), make)
        rig = Rig(2, instrument=trace)
        for _ in range(3):
            rig.run(walked(), [0.0, 1.0])
        rig.executor.close()
        trace.close()
        files.append(places_of(folder / file_name(0)))
    assert files[0] == files[1]
    assert {row[0] for row in files[0]} == set(map(float, Kind)) - {Kind.LEFT_OUT, Kind.CALLED}


def places_of(path: Path) -> list[tuple[float, ...]]:
    """What stands in a file, but for times."""
    return sorted(tuple(row[[0, 1, 2, 3]]) for row in read(path).events)


def test_others_are_told_beside_compiled_rows(tmp_path: Path) -> None:
    header = Header(0, 1, "here", 1, 1, "null", 0.0, 0.0)
    trace, beside = Trace(tmp_path, header, NullEngine(1), _capi.Rows), Recorder()
    rig = Rig(1, instrument=Instruments(beside, trace))
    body = block((0,), [Run(0, (0,), (1,)), Start(0, (1,), (2,), 0, 0), Wait(0)], (2,))
    reduced = program(
        [F32] * 3, body, segments=[segment("increment")], collectives=[all_reduce((0,))], name="p"
    )
    rig.run(reduced, [0.0])
    rig.executor.close()
    trace.close()
    told = [event[0] for event in beside.events]
    assert told == ["program", "segment", "start", "done", "end"]
    kinds = {row[0] for row in places_of(tmp_path / file_name(0))}
    assert kinds == {Kind.SEGMENT, Kind.COLLECTIVE, Kind.PROGRAM}
