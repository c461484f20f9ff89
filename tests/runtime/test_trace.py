"""What a rank writes with STRETTO_TRACE, how it is read back, and what becomes of files that are damaged."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from support.handmade import F32, Rig, all_reduce, block, permute, program, segment
from support.rows import Rows

from stretto.runtime.errors import StrettoError, WorldError
from stretto.runtime.job import clock
from stretto.runtime.program import Program, Run, Start, Wait
from stretto.runtime.recording.rows import EVERY, EXACT
from stretto.runtime.recording.trace import Trace
from stretto.runtime.recording.trace_events import measure
from stretto.runtime.recording.trace_file import (
    VERSION,
    Header,
    Kind,
    RankTrace,
    TraceError,
    beginning,
    chunk,
    file_name,
    read,
)
from stretto.testing import NullEngine

NAN = float("nan")
TESTS = str(Path(__file__).parents[1])
HEADER = Header(0, 1, "here", 1, 2, "null", 0.0, 0.0)
# Device 0's message is never sent.
SHIFT = permute((0, 1), (1, 0), valid_iterations=((1, 0), (0, 9)))


def shifting() -> Program:
    """Start, a segment beside it, wait, another segment."""
    body = block(
        (0,),
        [
            Start(0, (0,), (1,), 0, 0),
            Run(0, (0,), (2,)),
            Wait(0),
            Run(1, (1, 2), (3,)),
        ],
        (3,),
    )
    segments = [segment("increment"), segment("add", (F32, F32))]
    return program(
        [F32] * 4, body, devices=2, segments=segments, collectives=[SHIFT], name="shifting"
    )


def traced(folder: Path) -> tuple[Path, RankTrace]:
    """The trace of one run of `shifting` on two local devices."""
    trace = Trace(folder, HEADER, NullEngine(2), Rows)
    rig = Rig(2, instrument=trace)
    rig.run(shifting(), [0.0, 1.0])
    rig.executor.close()
    trace.close()
    path = folder / file_name(0)
    return path, read(path)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    _, found = traced(tmp_path / "new" / "folder")
    assert (found.header, found.warning) == (HEADER, "")
    (loaded,) = found.programs
    assert (loaded.name, loaded.collectives) == ("shifting", (SHIFT,))
    assert [s.name for s in loaded.segments] == ["increment", "add"]
    assert found.local == [((0, 0), (1, 1))]
    events = found.events[np.argsort(found.events[:, 4], kind="stable")]
    by_kind = {kind: events[events[:, 0] == kind] for kind in Kind}
    assert [(int(n), int(o)) for n, o in by_kind[Kind.SEGMENT][:, 2:4]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert [len(by_kind[k]) for k in (Kind.AWAITED, Kind.PROGRAM)] == [1, 1]
    (ran,) = by_kind[Kind.COLLECTIVE]
    assert ran[2] == 0 and ran[6] // (1 << 24) == 1 and found.sets == [frozenset({0})]
    assert (events[:, 5] >= events[:, 4]).all()
    (walk,) = by_kind[Kind.PROGRAM]
    assert walk[4] <= events[:, 4].min() and walk[6] == 0.0


def test_programs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Also where the one that was loaded first is translated anew behind the other."""
    valid = ((0, 7), (1, 0))
    runs = [Run(0, (0,), (1,), (), valid), Run(1, (1,), (2,), (), valid)]
    segments = [segment("increment"), segment("double")]
    longer = program([F32] * 3, block((0,), runs, (2,)), devices=2, segments=segments, name="step")
    shorter = program(
        [F32] * 2, block((0,), runs[:1], (1,)), devices=2, segments=segments[:1], name="step"
    )
    trace = Trace(tmp_path, HEADER, NullEngine(2), Rows)
    rig = Rig(2, instrument=trace)
    first, _ = (rig.executor.load(made, (0, 1)) for made in (longer, shorter))
    first.walker = first.walker.watched_by(trace)
    first.execute(rig.arguments(first, [1.0, 2.0]))
    rig.executor.close()
    trace.close()
    found = read(tmp_path / file_name(0))
    assert [len(p.segments) for p in found.programs] == [2, 1]
    told = {(int(row[0]), int(row[1]), int(row[2])) for row in found.events}
    of_segments = {(kind, 0, number) for kind in (Kind.SEGMENT, Kind.LEFT_OUT) for number in (0, 1)}
    assert told == {*of_segments, (Kind.PROGRAM, 0, 1)}


def test_a_failed_walk_is_marked(tmp_path: Path) -> None:
    trace = Trace(tmp_path, HEADER, NullEngine(1), Rows)
    rig = Rig(1, instrument=trace)
    body = block((0,), [Run(0, (0,), (1,)), Start(0, (1,), (2,), 0, 0), Wait(0)], (2,))
    failing = program([F32] * 3, body, segments=[segment("boom")], collectives=[all_reduce((0,))])
    with pytest.raises(StrettoError, match="boom"):
        rig.run(failing, [0.0])
    rig.executor.close()
    trace.close()
    (walk,) = (e for e in read(tmp_path / file_name(0)).events if e[0] == Kind.PROGRAM)
    assert walk[6] == 1.0


def test_what_was_written_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {TESTS!r})
from stretto.runtime.recording.trace import Trace
from stretto.runtime.recording.trace_file import Header
from stretto.testing import NullEngine
from support.rows import Rows
trace = Trace(Path({str(tmp_path)!r}), Header(0, 1, "here", 1, 1, "null", 0.0, 0.0), NullEngine(1), Rows)
trace.rows.put(*range(7))
trace.write()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode == -9
    assert len(read(tmp_path / file_name(0)).events) == 1


def test_a_child_does_not_write_to_its_parents_file(tmp_path: Path) -> None:
    trace = Trace(tmp_path, HEADER, NullEngine(1), Rows)
    trace.rows.put(*range(7))
    child = os.fork()
    if child == 0:
        trace.write()
        trace.close()
        os._exit(0)
    os.waitpid(child, 0)
    trace.close()
    assert len(read(tmp_path / file_name(0)).events) == 1


@pytest.mark.parametrize("lost", [1, 20, 60])
def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path, lost: int) -> None:
    path, whole = traced(tmp_path)
    path.write_bytes(path.read_bytes()[:-lost])
    found = read(path)
    assert "ends in the middle" in found.warning
    assert found.programs == whole.programs and len(found.events) == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data.replace(b"trace %d" % VERSION, b"trace 99", 1), "of version 99"),
        (lambda data: data.replace(b"trace %d" % VERSION, b"trace 2", 1), "of version 2"),
        (lambda data: b"GIF89a" + data, "is not a trace"),
        (lambda data: data.replace(b'"rank"', b'"knar"', 1), "its header cannot be read"),
        (lambda data: b"", "is not a trace"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    path, _ = traced(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceError, match=message):
        read(path)


def test_calls_are_read_as_rows(tmp_path: Path) -> None:
    path = tmp_path / file_name(0)
    calls = struct.pack("<IHHddIHHdd", 1, 2, 3, 5.0, 7.0, 2**32 - 1, 0, 65535, 6.0, 8.0)
    header = replace(HEADER, offset=10.0)
    path.write_bytes(beginning(header) + chunk(b"E", np.arange(7.0).tobytes()) + chunk(b"C", calls))
    assert read(path).events.tolist() == [
        [0, 1, 2, 3, 14, 15, 6],
        [Kind.CALLED, 1, 2, 3, 15, 17, 0],
        [Kind.CALLED, 2**32 - 1, 0, 65535, 16, 18, 0],
    ]


def test_a_chunk_of_calls_that_is_no_such(tmp_path: Path) -> None:
    path = tmp_path / file_name(0)
    path.write_bytes(beginning(HEADER) + chunk(b"C", bytes(25)))
    with pytest.raises(TraceError, match="cannot be read"):
        read(path)


def test_a_system_that_writes_little_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "writev", lambda file, parts: write(file, b"".join(parts)[:100]))
    trace = Trace(tmp_path, HEADER, NullEngine(1), Rows)
    for number in range(50):
        trace.rows.put(*[number] * 7)
        trace.rows.put_call(0, 0, 0, number, number)
    trace.close()
    found = read(tmp_path / file_name(0))
    assert not found.warning
    assert found.events[:, 4].tolist() == [*range(50), *range(50)]


def test_what_a_traced_process_starts_leaves_its_file_alone(tmp_path: Path) -> None:
    script = f"""
import subprocess, sys
sys.path.insert(0, {TESTS!r})
from stretto.runtime.recording import trace
from stretto.runtime.job import world
from stretto.runtime.options import Options
from stretto.testing import NullEngine
from support.rows import Rows
begun = trace.begin(world.bootstrap(Options(trace={str(tmp_path)!r})), NullEngine(1), Rows)
if begun is None: sys.exit("alone")
begun.rows.put(*range(7))
begun.write()
if len(sys.argv) == 1:
    child = subprocess.run([sys.executable, *sys.orig_argv[1:], "child"], capture_output=True, text=True)
    print(child.stderr)
begun.rows.put(*range(7))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith("no trace of process ") and "give each job a folder of its own" in first
    assert second == "alone"
    found = read(tmp_path / file_name(0))
    assert len(found.events) == 2 and not found.warning
    # The next job may have the folder.
    trace = Trace(tmp_path, HEADER, NullEngine(1), Rows)
    trace.close()
    assert len(read(tmp_path / file_name(0)).events) == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorldError, match="STRETTO_TRACE"):
        Trace(tmp_path / "file", HEADER, NullEngine(1), Rows)


def test_times_are_told_on_rank_0s_clock(tmp_path: Path) -> None:
    header = Header(1, 2, "there", 1, 1, "null", 1000.0, 0.0)
    trace = Trace(tmp_path, header, NullEngine(1), partial(Rows, clock=lambda: 5.0))
    trace.program_finished(shifting(), 1, None)
    trace.close()
    assert read(tmp_path / file_name(1)).events[0, 5] == 1005.0


class Told:
    """A queue that nobody reads."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def put(self, running: Any) -> None:
        if running is not None:
            self.told.append(running)

    def get(self) -> None:
        return None


class Slow:
    """An engine whose arrays, numbers, are ready once they are in ``ready``."""

    def __init__(self) -> None:
        self.ready: set[int] = set()

    def is_ready(self, array: int) -> bool:
        return array in self.ready

    def block(self, array: int) -> None:
        self.ready.update(range(array + 1))


def test_ends_of_segments_are_seen_at_what_comes_next(tmp_path: Path) -> None:
    engine, loaded = Slow(), shifting()
    trace = Trace(tmp_path, HEADER, engine, Rows)  # type: ignore[arg-type]
    trace.program_loaded(loaded, ((0, 0), (1, 1)))
    for number in range(3):
        trace.segment_handed(loaded, number % 2, 0, float(number), [number])
    engine.ready = {0, 1}
    trace.collective_started(SHIFT, 0)  # two have ended: the first at some time before the second
    trace.segment_handed(loaded, 0, 1, 3.0, [])  # another device, at once
    trace.segment_handed(loaded, 0, 0, 4.0, [4])  # behind one that runs still
    trace.collective_awaiting(SHIFT, 0)
    trace.close()
    events = read(tmp_path / file_name(0)).events
    ends = {row[4]: row[5] for row in events if row[0] == Kind.SEGMENT}
    assert [begin for begin, end in ends.items() if np.isnan(end)] == [0.0, 2.0]
    assert sorted(ends) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert ends[1.0] <= ends[3.0] <= ends[4.0]


def test_a_thread_waits_for_segments_at_few_of_the_times_that_the_walk_stands(
    tmp_path: Path,
) -> None:
    engine, loaded = Slow(), shifting()
    trace = Trace(tmp_path, HEADER, engine, Rows)  # type: ignore[arg-type]
    trace.program_loaded(loaded, ((0, 0), (1, 1)))
    waited = trace._pending = Told()  # type: ignore[assignment]
    for time in range(EXACT + 2 * EVERY):
        trace.collective_started(SHIFT, 0)
        trace.segment_handed(loaded, 0, 0, float(time), [time])
        trace.collective_awaiting(SHIFT, 0)
        trace.collective_ran(SHIFT, 0, 0.0, (0, 1), frozenset())
        trace.collective_awaited(SHIFT, 0, 0.0, 0.0)
        engine.ready.add(time)
        trace.collective_started(SHIFT, 0)  # looks
    assert [number for _, number, _ in waited.told] == [*range(EXACT), EVERY, 2 * EVERY]
    # As a file's reader asks for it again: the count goes on.
    trace.program_loaded(loaded, ((0, 0), (1, 1)))
    assert len(trace.programs) == 1
    trace._watcher = None
    trace.close()


def test_a_row_tells_when_its_segment_was_last_seen_to_run(
    tmp_path: Path,
) -> None:
    engine, loaded = Slow(), shifting()
    whatever_comes = partial(Rows, least=0.0)  # is looked at
    trace = Trace(tmp_path, HEADER, engine, whatever_comes)  # type: ignore[arg-type]
    trace.program_loaded(loaded, ((0, 0), (1, 1)))
    trace._pending = Told()  # type: ignore[assignment]
    began = perf_counter()
    trace.segment_handed(loaded, 0, 0, began, [0])
    before = perf_counter()
    trace.collective_awaited(SHIFT, 0, 0.0, began)  # it runs
    after = perf_counter()
    engine.ready.add(0)
    trace.segment_handed(loaded, 1, 0, perf_counter(), [1])  # it does not run
    engine.ready.add(1)
    trace.collective_started(SHIFT, 0)  # which has waited for it
    trace._watcher = None
    trace.close()
    first, second = (row for row in read(tmp_path / file_name(0)).events if row[0] == Kind.SEGMENT)
    assert before <= first[5] - first[6] <= after
    assert second[6] == 0.0


def test_stretches_whose_end_was_not_seen_are_as_long_as_others(tmp_path: Path) -> None:
    work, other = 0, 1
    rows = [  # segment, handed over, end, how long before that it was last seen to run
        (work, 0.0, 2.0, 0.0),
        (work, 10.0, 13.0, 0.0),
        (work, 20.0, 24.0, 0.0),
        (work, 30.0, 38.0, 7.0),  # as long as the median
        (work, 40.0, 48.0, 4.0),  # seen to run for longer than that
        (work, 50.0, 51.0, 0.5),  # over before that
        (other, 60.0, 64.0, 3.0),  # no other tells
        (work, 70.0, NAN, 0.0),  # two in a row are another stretch
        (other, 71.0, 75.0, 0.0),
        (work, 80.0, NAN, 0.0),
        (other, 80.5, 89.0, 8.0),
        (work, 81.0, 89.0, 0.0),  # when it began is not known: it tells nothing of its length
    ]
    found = RankTrace(HEADER, [shifting()], [((0, 0), (1, 1))])
    found.events = np.array([(Kind.SEGMENT, 0, s, 0, b, e, x) for s, b, e, x in rows])
    ran = [(begin, end) for *_, begin, end in measure(found).segments]
    assert ran[:7] == [(0, 2), (10, 13), (20, 24), (30, 33), (40, 44), (50, 51), (60, 64)]
    assert ran[7:] == [(70, 75), (75, 75), (80, 85), (85, 85), (85, 89)]


def test_no_thread_waits_for_segments_that_a_collective_waits_for(tmp_path: Path) -> None:
    engine, loaded = Slow(), shifting()
    trace = Trace(tmp_path, HEADER, engine, Rows)  # type: ignore[arg-type]
    trace.program_loaded(loaded, ((0, 0), (1, 1)))
    trace.segment_handed(loaded, 0, 0, 0.0, [0])
    trace.collective_awaiting(SHIFT, 0)
    assert trace._watcher is None
    engine.ready = {0}
    trace.collective_started(SHIFT, 0)  # which tells when they were computed
    assert trace._watcher is None and trace.rows.last(0) is None
    trace.collective_ran(SHIFT, 0, 0.0, (0, 1), frozenset())
    trace.collective_awaited(SHIFT, 0, 0.0, 0.0)
    trace.collective_started(SHIFT, 0)
    trace.segment_handed(loaded, 1, 0, 1.0, [1])
    trace.collective_awaiting(SHIFT, 0)  # beside a collective that is under way
    assert trace._watcher is not None
    trace.close()
    events = read(tmp_path / file_name(0)).events
    assert [row[2] for row in events if row[0] == Kind.SEGMENT] == [0.0, 1.0]


def test_a_program_of_one_segment_is_called_without_a_walk_and_told_as_one(tmp_path: Path) -> None:
    trace = Trace(tmp_path, HEADER, NullEngine(1), Rows)
    rig = Rig(1, instrument=trace)
    alone = program(
        [F32] * 2, block((0,), [Run(0, (0,), (1,))], (1,)), segments=[segment("increment")]
    )
    loaded = rig.executor.load(alone, (0,))
    assert loaded.single is not None
    ((value,),) = loaded.execute(rig.arguments(loaded, [1.0]))
    assert value.host_view()[0] == 2.0
    rig.executor.close()
    trace.close()
    found = read(tmp_path / file_name(0))
    assert [int(row[0]) for row in found.events] == [Kind.CALLED]
    measured = measure(found)
    ((program_, segment_, ordinal, *ran),) = measured.segments
    assert (program_, segment_.name, ordinal) == (alone.name, "increment", 0)
    ((name, _, _, *walk),) = measured.marks
    assert name == alone.name and walk == ran and ran[0] < ran[1]


def test_a_program_of_one_segment_that_is_not_over_when_it_was_called(tmp_path: Path) -> None:
    engine = Slow()
    trace = Trace(tmp_path, HEADER, engine, Rows)  # type: ignore[arg-type]
    alone = program(
        [F32] * 2, block((0,), [Run(0, (0,), (1,))], (1,)), segments=[segment("increment")]
    )
    trace.program_loaded(alone, ((0, 0),))
    trace.program_called(alone, 0, 1, 0, 5.0, [7])
    trace.close()
    rows = {int(row[0]): row for row in read(tmp_path / file_name(0)).events}
    assert sorted(rows) == [Kind.SEGMENT, Kind.PROGRAM]
    assert rows[Kind.SEGMENT][4] == rows[Kind.PROGRAM][4] == 5.0
    assert engine.ready == set(range(8))  # the end of the walk had it watched


class Far:
    """Rank 1's view of rank 0, whose clock is 500 s ahead and whose answers take their time."""

    def __init__(self, delays: Iterable[tuple[float, float]]) -> None:
        self.now, self.asked = 100.0, 0
        self.delays = iter(delays)

    def Get_rank(self) -> int:
        return 1

    def Get_size(self) -> int:
        return 2

    def send(self, again: bool, dest: int, tag: int) -> None:
        if again:
            self.there, self.back = next(self.delays)
            self.now += self.there
            self.asked += 1
        else:
            self.asked = -self.asked

    def recv(self, source: int, tag: int) -> float:
        said = self.now + 500.0
        self.now += self.back
        return said


@pytest.mark.parametrize(
    ("delays", "asked"),
    [
        ([(3e-5, 1e-5), (1e-5, 1e-5), *[(9e-5, 4e-5)] * 100], 16),
        ([*[(3e-1, 1e-1)] * 30, (5e-5, 5e-5), (1e-5, 9e-5)], 31),  # until one was short
        ([(3.0, 1.0), (0.5, 0.5), *[(2.0, 4.0)] * 600], 512),  # none is
    ],
)
def test_the_shortest_round_trip_tells_the_clock(
    delays: list[tuple[float, float]], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    comm = Far(delays)
    monkeypatch.setattr(clock, "perf_counter", lambda: comm.now)
    assert clock.offset_to_first(comm) == pytest.approx(500.0, abs=1e-9)
    assert comm.asked == -asked  # and rank 0 was told that there are no more
