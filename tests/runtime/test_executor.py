"""The executor: what programs compute, in which order, and where their errors arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from support.handmade import (
    F32,
    PRED,
    S32,
    U32,
    Rig,
    all_reduce,
    block,
    compute,
    firsts,
    permute,
    program,
    segment,
)

from stretto.collectives.hierarchy import create_communicator
from stretto.collectives.ops import Collective, Kind
from stretto.collectives.types import TensorType
from stretto.runtime.errors import InvalidProgramError, RankFailed, StrettoError
from stretto.runtime.execution.dispatch import MAX_QUEUED
from stretto.runtime.execution.executor import Executor
from stretto.runtime.execution.stream import Stream
from stretto.runtime.execution.value import DeletedError
from stretto.runtime.program import (
    Branch,
    Copy,
    Free,
    LogicalId,
    Loop,
    Program,
    Run,
    Segment,
    Start,
    Wait,
)
from stretto.runtime.program.check import check
from stretto.testing import MemoryTransport, MemoryWorld, Recorder, run_processes

INCREMENT = program(
    [F32, F32], block((0,), [Run(0, (0,), (1,))], (1,)), segments=[segment("increment")]
)


def summing(devices: int, *groups: tuple[int, ...]) -> Program:
    """sum over the groups of (x + 1)."""
    body = block((0,), [Run(0, (0,), (1,)), Start(0, (1,), (2,), 0), Wait(0), Free((1,))], (2,))
    return program(
        [F32] * 3,
        body,
        devices=devices,
        segments=[segment("increment")],
        collectives=[all_reduce(*(groups or (tuple(range(devices)),)))],
    )


def test_one_segment_runs_where_it_is_called() -> None:
    rig = Rig()
    loaded = rig.load(INCREMENT)
    outputs, completion = loaded.execute_with_completion(rig.arguments(loaded, [1.0]))
    assert completion is None
    assert firsts([outputs[0][0].host_view()]) == [2.0]


def test_all_reduce_over_groups_of_local_devices() -> None:
    (sums,) = Rig(4).run(summing(4, (0, 2), (3, 1)), [1, 2, 3, 4])
    assert firsts(sums) == [6.0, 8.0, 6.0, 8.0]


def test_devices_are_those_that_the_program_is_given() -> None:
    rig = Rig(4)
    loaded = rig.load(summing(2), [3, 1])
    assert loaded.local == ((0, 3), (1, 1))
    rows = loaded.execute(rig.arguments(loaded, [10, 20]))
    assert [row[0].ordinal for row in rows] == [3, 1]
    assert firsts([row[0].host_view() for row in rows]) == [32.0, 32.0]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ((0,), "is for 2 devices .* but 1 are assigned"),
        ((0, 4), "asks for device 4, but there are 4"),
        ((1, 1), "is given a device twice"),
    ],
)
def test_devices_that_cannot_be_given(devices: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidProgramError, match=message):
        Rig(4).load(summing(2), devices)


def test_wrong_arguments_are_refused() -> None:
    rig = Rig(2)
    loaded = rig.load(summing(2))
    with pytest.raises(InvalidProgramError, match="takes 1 arguments for each of 2 local devices"):
        loaded.execute([[rig.value(1.0)]])
    with pytest.raises(
        InvalidProgramError, match=r"argument 0 of program test is s32\[\], not f32"
    ):
        loaded.execute([[rig.value(1, S32)], [rig.value(1, S32, 1)]])


def counted_loop(trip_count: int) -> Program:
    """``trip_count`` times: x = sum over both devices of x / 2 + (0 or 1 by device)."""
    body = block(
        (2, 3),
        [
            Run(0, (2,), (4,), (2,)),
            Run(1, (4, 3), (5,)),
            Free((4,)),
            Start(0, (5,), (6,), 0),
            Free(()),
            Wait(0),
            Free((5,)),
        ],
        (6, 3),
    )
    condition = block((), [], ())
    return program(
        [F32] * 10,
        block(
            (0, 1),
            [Copy(0, 7), Loop((7, 1), (8, 9), condition, body, trip_count, (7,))],
            (8,),
        ),
        devices=2,
        segments=[segment("halve", donated=(0,)), segment("add", (F32, F32))],
        collectives=[all_reduce((0, 1))],
    )


@pytest.mark.parametrize("trip_count", [0, 1, 7])
def test_counted_loop(trip_count: int) -> None:
    made = counted_loop(trip_count)
    check(made)
    (result,) = Rig(2).run(made, [8, 16], [0, 1])
    x, y = 8.0, 16.0
    for _ in range(trip_count):
        x = y = x / 2 + y / 2 + 1
    assert firsts(result) == [x, y]


def test_a_loop_needs_no_more_memory_the_longer_it_is() -> None:
    peaks = []
    for trip_count in (2, 50):
        rig = Rig(2)
        rig.run(counted_loop(trip_count), [8, 16], [0, 1])
        peaks.append(rig.engine.memory_stats(0)["peak_bytes_in_use"])
    assert peaks[0] == peaks[1] <= 5 * F32.nbytes


def diverging_loop() -> Program:
    """while x < limit: x = sum over the group of (x + 1); groups {0, 1} and {2, 3}."""
    condition = block((2, 3), [Run(0, (2, 3), (4,)), Free((2, 3))], (4,))
    body = block(
        (5, 6), [Run(1, (5,), (7,)), Start(0, (7,), (8,), 0), Wait(0), Free((5, 7))], (8, 6)
    )
    return program(
        [F32, F32, F32, F32, PRED, F32, F32, F32, F32, F32, F32],
        block((0, 1), [Loop((0, 1), (9, 10), condition, body, name="while.1")], (9,)),
        devices=4,
        segments=[segment("below", (F32, F32), (PRED,)), segment("increment")],
        collectives=[all_reduce((0, 1), (2, 3))],
    )


def test_groups_leave_a_loop_each_in_its_own_time() -> None:
    check(diverging_loop())
    (result,) = Rig(4).run(diverging_loop(), [0, 0, 1, 1], [10, 10, 100, 100])

    def converge(x: float, limit: float) -> float:
        while x < limit:
            x = 2 * (x + 1)
        return x

    assert firsts(result) == [converge(0, 10)] * 2 + [converge(1, 100)] * 2


def test_no_device_enters_a_loop() -> None:
    (result,) = Rig(4).run(diverging_loop(), [50, 50, 60, 60], [10, 10, 10, 10])
    assert firsts(result) == [50, 50, 60, 60]


def test_branches_are_walked_in_order_with_the_devices_that_chose_them() -> None:
    recorder = Recorder()
    branches = (
        block((2,), [Start(0, (2,), (3,), 0), Wait(0)], (3,)),
        block((4,), [Run(1, (4,), (5,))], (5,)),
        block((6,), [], (6,)),
    )
    made = program(
        [F32, S32, *[F32] * 5, F32],
        block((0,), [Run(0, (0,), (1,)), Branch(1, ((0,), (0,), (0,)), (7,), branches)], (7,)),
        devices=6,
        segments=[segment("parity", (F32,), (S32,)), segment("increment")],
        collectives=[permute((0, 3), (3, 0), (1, 4), (4, 1))],
    )
    check(made)
    # x % 3 is 0 for devices 0 and 3, 1 for 1 and 4, 2 for 2 and 5
    (result,) = Rig(6, instrument=recorder).run(made, [0, 10, 20, 30, 40, 50])
    assert firsts(result) == [30, 11, 20, 0, 41, 50]
    runs = [e for e in recorder.events if e[0] in ("segment", "start")]
    assert runs == [
        *(("segment", "parity", k) for k in range(6)),
        ("start", "shift", 0),
        ("segment", "increment", 1),
        ("segment", "increment", 4),
    ]


@pytest.mark.parametrize(("selector", "expected"), [(-1, 3.0), (0, 1.0), (2, 3.0), (9, 3.0)])
def test_branch_index_is_clamped_as_in_hlo(selector: int, expected: float) -> None:
    def rules(s: Segment, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return [np.array(int(s.name) + 1, np.uint32)]

    branches = tuple(
        block((), [LogicalId("replica", 2 + k), Run(k, (2 + k,), (5 + k,))], (5 + k,))
        for k in range(3)
    )
    made = program(
        [S32, U32, *[U32] * 6],
        block((0,), [Branch(0, ((), (), ()), (1,), branches)], (1,)),
        segments=[segment(str(k), (U32,), (U32,)) for k in range(3)],
    )
    check(made)
    (result,) = Rig(rules=rules).run(made, [selector])
    assert firsts(result) == [expected]


def test_pred_selects_the_first_branch_when_true() -> None:
    branches = (block((2,), [], (2,)), block((3,), [Run(1, (3,), (4,))], (4,)))
    made = program(
        [F32, PRED, F32, F32, F32, F32],
        block((0,), [Run(0, (0,), (1,)), Branch(1, ((0,), (0,)), (5,), branches)], (5,)),
        devices=2,
        segments=[segment("is_even", (F32,), (PRED,)), segment("increment")],
    )
    check(made)
    (result,) = Rig(2).run(made, [4, 7])
    assert firsts(result) == [4, 8]


def test_pairs_move_data_in_their_valid_iterations_only() -> None:
    shift = permute((0, 1), (1, 0), valid_iterations=((1, 2), (1, 0)))
    body = block(
        (2, 3),
        [Start(0, (2,), (4,), 0), Wait(0), Run(0, (3, 4), (5,)), Free((3, 4))],
        (2, 5),
    )
    made = program(
        [F32] * 8,
        block((0, 1), [Loop((0, 1), (6, 7), block((), [], ()), body, 5)], (7,)),
        devices=2,
        segments=[segment("add", (F32, F32))],
        collectives=[shift],
    )
    check(made)
    (total,) = Rig(2).run(made, [3, 5], [0, 0])
    assert firsts(total) == [0, 2 * 3]  # 0 -> 1 in iterations 1 and 2, 1 -> 0 never


def test_logical_ids_are_those_of_the_device() -> None:
    made = Program(
        "ids",
        2,
        3,
        (U32, U32),
        (),
        (),
        block((), [LogicalId("partition", 0), LogicalId("replica", 1)], (0, 1)),
    )
    check(made)
    partitions, replicas = Rig(6).run(made)
    assert firsts(partitions) == [0, 1, 2, 0, 1, 2]
    assert firsts(replicas) == [0, 0, 0, 1, 1, 1]


def with_id(results: tuple[int, ...]) -> Program:
    """What a segment makes of (id, argument), and whatever else is asked for."""
    body = block((0,), [LogicalId("partition", 1), Run(0, (1, 0), (2,)), Free((1,))], results)
    return Program("with_id", 1, 3, (F32, U32, F32), (segment("add", (U32, F32)),), (), body)


@pytest.mark.parametrize("watched", [False, True])
def test_ids_that_segments_alone_read_are_put_once(watched: bool) -> None:
    def rules(s: Segment, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return [10 * inputs[0].astype(np.float32) + inputs[1]]

    rig = Rig(3, rules=rules, instrument=Recorder() if watched else None)
    made = with_id((2,))
    check(made)
    loaded = rig.load(made)
    ids: list[list[int]] = [[] for _ in range(3)]
    put = rig.engine.put

    def counting(host: np.ndarray, type: TensorType, ordinal: int) -> object:
        if type == U32:
            ids[ordinal].append(int(host))
        return put(host, type, ordinal)

    rig.engine.put = counting  # type: ignore[method-assign]
    for first in range(3):
        rows = loaded.execute(rig.arguments(loaded, [first, 1, 2]))
        assert firsts([row[0].host_view() for row in rows]) == [first, 11.0, 22.0]
    assert ids == ([[0], [1], [2]] if watched else [[], [], []])  # when it was loaded


def test_inputs_in_another_order_need_no_walk() -> None:
    def rules(s: Segment, inputs: list[np.ndarray]) -> list[np.ndarray]:
        return [10 * inputs[0] + inputs[1]]

    body = block((0, 1, 2), [Free((1,)), Run(0, (2, 0), (3,))], (3,))
    made = Program("turned", 1, 2, (F32,) * 4, (segment("mix", (F32, F32)),), (), body)
    check(made)
    rig = Rig(2, rules=rules)
    loaded = rig.load(made)
    assert loaded.single is not None
    for last in range(3):
        rows = loaded.execute(rig.arguments(loaded, [5, 6], [0, 0], [last, 1]))
        assert firsts([row[0].host_view() for row in rows]) == [10.0 * last + 5, 16.0]


def test_ids_that_others_have_are_put_by_each_run() -> None:
    given = with_id((2,))
    for body in (
        block((0,), [LogicalId("partition", 1), Run(0, (1, 0), (2,))], (1, 2)),
        block((0,), [LogicalId("partition", 1), Run(0, (1, 0), (2,), (1,))], (2,)),
        block((0,), [LogicalId("partition", 1), Run(0, (1, 0), (2,)), Copy(1, 3)], (2, 3)),
    ):
        made = replace(given, body=body, slot_types=(F32, U32, F32, U32))
        assert not made.lasting_ids
        assert made.arranged_run is None
    assert list(given.lasting_ids) == [1]
    assert given.arranged_run == Run(0, (1, 0), (2,))


@pytest.mark.parametrize(
    ("between", "streams", "queued"),
    [((), (0, 0), 0), ((), (0, 1), 1), (("run",), (0, 0), 2)],
    ids=["at-once", "two-streams", "computes"],
)
def test_starts_with_nothing_to_hide_are_run_in_place(
    between: tuple[str, ...], streams: tuple[int, int], queued: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sums, awaited in the order in which they are not started: y = sum(x), z = sum(sum(x + 1))."""
    body = block(
        (0,),
        [
            Run(0, (0,), (1,)),
            Start(0, (0,), (2,), 0, streams[0]),
            Start(1, (1,), (3,), 1, streams[1]),
            *[Run(0, (0,), (4,)) for _ in between],
            Wait(1),
            Free((1,)),
            Wait(0),
        ],
        (2, 3),
    )
    made = program(
        [F32] * (5 if between else 4),
        body,
        devices=3,
        segments=[segment("increment")],
        collectives=[all_reduce((0, 1, 2), name="a"), all_reduce((0, 1, 2), name="b")],
        streams=2,
    )
    check(made)
    submitted: list[str] = []
    submit = Stream.submit

    def counting(self: Stream, task: Callable[[], object]) -> object:
        submitted.append(self.name)
        return submit(self, task)

    monkeypatch.setattr(Stream, "submit", counting)
    sums, more = Rig(3).run(made, [1, 2, 3])
    assert firsts(sums) == [6.0] * 3
    assert firsts(more) == [9.0] * 3
    assert sum(not name.startswith("stretto-dispatch") for name in submitted) == queued


def ring(devices: int) -> Program:
    """Every device sends to the next; the receive comes after the wait of the send."""
    pairs = tuple((k, (k + 1) % devices) for k in range(devices))
    send = Collective(Kind.SEND, (F32,), (), pairs=pairs, channel=1, name="send")
    recv = Collective(Kind.RECV, (), (F32,), pairs=pairs, channel=1, name="recv")
    return program(
        [F32, F32],
        block((0,), [Start(0, (0,), (), 0), Wait(0), Start(1, (), (1,), 1), Wait(1)], (1,)),
        devices=devices,
        collectives=[send, recv],
    )


def test_send_and_receive_on_a_ring_of_local_devices() -> None:
    check(ring(3))
    (received,) = Rig(3).run(ring(3), [1, 2, 3])
    assert firsts(received) == [3, 1, 2]


def test_send_and_receive_on_a_ring_of_processes() -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> list[float]:
        rig = Rig(world=world, transport=transport)
        return firsts(rig.run(ring(3), [1, 2, 3])[0])

    assert run_processes(3, main) == [[3], [1], [2]]


def test_sends_and_receives_are_told_of_and_counted_like_all_collectives() -> None:
    class Told(Recorder):
        def collective_finished(
            self, collective: Collective, stream: int, nbytes: int, seconds: float
        ) -> None:
            self.events.append(("done", collective.name, nbytes))

        def collective_ran(
            self,
            collective: Collective,
            stream: int,
            began: float,
            active: Sequence[int],
            skip: frozenset[int],
        ) -> None:
            self.events.append(("ran", collective.name, tuple(active), set(skip)))

    told, rig, made = Told(), Rig(3), ring(3)
    local = partial(create_communicator, None)  # which says what it moves
    rig.executor = Executor(rig.engine, rig.world, communicators=local, instrument=told)
    always, never = (0, 9), (1, 0)
    skipping = [
        replace(c, name=f"skipping {c.name}", valid_iterations=(always, never, always))
        for c in made.collectives
    ]
    for each in (made, replace(made, collectives=tuple(skipping))):
        rig.run(each, [1, 2, 3])
    rig.executor.close()
    of = {
        name: [event for event in told.events if event[1] == name]
        for name in ("send", "recv", "skipping send", "skipping recv")
    }
    everyone, size = (0, 1, 2), F32.nbytes
    for name, nbytes, skip in (
        ("send", 3 * size, set()),
        ("recv", 0, set()),
        ("skipping send", 2 * size, {1}),
        ("skipping recv", 0, {1}),
    ):
        expected = [("start", name, 0), ("done", name, nbytes), ("ran", name, everyone, skip)]
        assert of[name] == expected
    counters = rig.executor.counters()
    assert counters.collectives == 4
    assert (counters.messages, counters.skipped, counters.nbytes) == (5, 1, 5 * size)
    assert counters.seconds > 0


def test_collectives_over_processes() -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> list[float]:
        rig = Rig(world=world, transport=transport)
        (first,) = rig.run(summing(4, (0, 3), (1, 2)), [1, 2, 3, 4])
        (second,) = rig.run(diverging_loop(), [0, 0, 1, 1], [10, 10, 100, 100])
        return firsts(first) + firsts(second)

    assert run_processes(2, main, local_devices=2) == [[7, 7, 14, 14], [7, 7, 190, 190]]


def test_a_custom_reducer_runs_on_the_engine() -> None:
    reduce = Collective(Kind.ALL_REDUCE, (F32,), (F32,), groups=((0, 1),), reducer=0, name="fold")
    made = program(
        [F32, F32],
        block((0,), [Start(0, (0,), (1,), 0), Wait(0)], (1,)),
        devices=2,
        segments=[segment("combine", (F32, F32))],
        collectives=[reduce],
    )
    check(made)
    (result,) = Rig(2).run(made, [10, 1])
    assert firsts(result) == [21, 21]  # combine(x, y) = 2x + y


def test_compute_goes_on_between_a_start_and_its_wait() -> None:
    recorder = Recorder()
    gate = threading.Event()

    def rules(s: object, inputs: list[np.ndarray]) -> list[np.ndarray]:
        gate.set()
        return [inputs[0] + 1]

    body = block((0,), [Start(0, (0,), (1,), 0), Run(0, (0,), (2,)), Wait(0)], (1, 2))
    made = program([F32] * 3, body, segments=[segment("increment")], collectives=[all_reduce((0,))])
    rig = Rig(instrument=recorder, rules=rules)
    loaded = rig.load(made)
    lane = rig.executor._lanes[0]
    lane.stream.submit(lambda: gate.wait(30))  # the collective cannot begin before the segment
    rows = loaded.execute(rig.arguments(loaded, [5]))
    assert firsts([value.host_view() for value in rows[0]]) == [5, 6]
    assert recorder.events[:3] == [
        ("program", "test", 1),
        ("segment", "increment", 0),
        ("start", "sum", 0),
    ]


def test_programs_are_walked_in_the_order_of_the_calls() -> None:
    recorder = Recorder()
    rig = Rig(2, instrument=recorder)
    first, second = rig.load(summing(2)), rig.load(counted_loop(1))
    values = first.execute(rig.arguments(first, [1, 2]))
    rig.value(0)
    more = second.execute([[row[0], row[0]] for row in values])  # on what is still to come
    again = first.execute([[row[0]] for row in more])
    assert firsts([row[0].host_view() for row in again]) == [2 * (1 + 5 + 10)] * 2
    programs = [e[:3] for e in recorder.events if e[0] in ("program", "end")]
    assert programs == [(what, "test", run) for run in (1, 2, 3) for what in ("program", "end")]


def test_donated_arguments_are_deleted_and_others_are_not() -> None:
    made = program(
        [F32] * 3,
        block((0, 1), [Run(0, (0, 1), (2,), (0,))], (2,)),
        segments=[segment("add", (F32, F32), donated=(0,))],
        donated=(0,),
    )
    rig = Rig()
    loaded = rig.load(made)
    arguments = rig.arguments(loaded, [1], [2])
    (row,) = loaded.execute(arguments)
    assert [value.is_deleted for value in arguments[0]] == [True, False]
    assert firsts([row[0].host_view(), arguments[0][1].host_view()]) == [3, 2]
    with pytest.raises(DeletedError, match=r"array f32\[4\] on local device 0 has been deleted"):
        loaded.execute(arguments)


def test_deleting_an_argument_does_not_disturb_a_run_that_was_given_it() -> None:
    rig = Rig(2)
    loaded = rig.load(summing(2))
    gate = threading.Event()
    rig.executor.dispatcher.stream.submit(lambda: gate.wait(30))
    arguments = rig.arguments(loaded, [1, 2])
    first = loaded.execute(arguments)
    second = loaded.execute([[row[0]] for row in first])
    for row in [*arguments, *first]:
        row[0].delete()
    gate.set()
    assert firsts([row[0].host_view() for row in second]) == [12, 12]


def test_results_that_are_the_same_slot_are_arrays_of_their_own() -> None:
    made = program(
        [F32, F32], block((0,), [Run(0, (0,), (1,))], (1, 0, 1)), segments=[segment("increment")]
    )
    rig = Rig()
    loaded = rig.load(made)
    arguments = rig.arguments(loaded, [1])
    (row,) = loaded.execute(arguments)
    arrays = [arguments[0][0].array(), *(value.array() for value in row)]
    assert len({id(array) for array in arrays}) == 4
    assert len({rig.engine.pointer(array) for array in arrays}) == 4


def test_an_error_fails_what_depends_on_it_and_nothing_else() -> None:
    body = block(
        (0,),
        [
            Run(0, (0,), (1,)),
            Start(0, (1,), (2,), 0),
            Wait(0),
            Run(1, (2,), (3,)),
            Start(0, (3,), (4,), 1),
            Wait(1),
        ],
        (2, 4),
    )
    made = program(
        [F32] * 5,
        body,
        segments=[segment("increment"), segment("boom")],
        collectives=[all_reduce((0,), name="sum.7")],
    )
    rig = Rig()
    loaded = rig.load(made)
    ((good, bad),) = loaded.execute(rig.arguments(loaded, [1]))
    assert firsts([good.host_view()]) == [2]
    message = "all-reduce %sum.7: boom: boom"
    with pytest.raises(StrettoError, match=message):
        bad.host_view()
    # and whatever is computed from it
    single = rig.load(INCREMENT)
    ((after,),) = single.execute([[bad]])
    ((_, later),) = loaded.execute([[after]])
    for value in (after, later):
        with pytest.raises(StrettoError, match=message):
            value.array()
    assert [v.is_ready() for v in (bad, after, later)] == [True] * 3


def test_an_error_at_issue_names_the_segment() -> None:
    class Refusing:
        def run(self, ordinal: int, inputs: list) -> list:
            raise ValueError("out of paper")

    rig = Rig(2)
    rig.engine.compile = lambda segment, **more: Refusing()  # type: ignore[method-assign,assignment]
    loaded = rig.load(summing(2))
    rows = loaded.execute(rig.arguments(loaded, [1, 2]))
    for row in rows:
        with pytest.raises(
            StrettoError, match="segment increment of test: ValueError: out of paper"
        ):
            row[0].host_view()


def test_callbacks_get_the_error_or_none() -> None:
    rig = Rig(rules=compute)
    loaded = rig.load(summing(1))
    gate = threading.Event()
    rig.executor.dispatcher.stream.submit(lambda: gate.wait(30))
    ((good,),) = loaded.execute(rig.arguments(loaded, [1]))
    failing = program(
        [F32, F32],
        block((0,), [Start(0, (0,), (1,), 0), Wait(0)], (1,)),
        collectives=[all_reduce((0,))],
    )
    bad_argument = rig.value(1)
    array = bad_argument.array()
    array.error = StrettoError("bad luck")
    bad_loaded = rig.load(failing)
    ((bad,),) = bad_loaded.execute([[bad_argument]])
    got: list[object] = []
    called = [threading.Event(), threading.Event()]
    for value, event in zip((good, bad), called, strict=True):
        value.on_ready(lambda error, event=event: (got.append(error), event.set()))  # type: ignore[misc]
    assert got == []
    gate.set()
    assert all(event.wait(30) for event in called)
    assert got[0] is None
    assert "bad luck" in str(got[1])
    good.on_ready(got.append)
    assert got[2] is None


def test_a_rank_that_fails_fails_the_others_by_name() -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> str:
        def rules(s: object, inputs: list[np.ndarray]) -> list[np.ndarray]:
            if world.rank == 1:
                raise ValueError("no more")
            return [inputs[0] + 1]

        rig = Rig(world=world, transport=transport, rules=rules)
        loaded = rig.load(summing(2))
        rows = loaded.execute(rig.arguments(loaded, [1, 2]))
        with pytest.raises(StrettoError) as caught:
            rows[0][0].host_view()
        return f"{type(caught.value).__name__}: {caught.value}"

    first, second = run_processes(2, main)
    assert first.startswith(RankFailed.__name__) and "rank 1 failed" in first
    assert "no more" in first
    assert "no more" in second and "all-reduce %sum" in second


def test_runs_do_not_queue_up_without_bound() -> None:
    rig = Rig()
    loaded = rig.load(summing(1))
    gate = threading.Event()
    rig.executor.dispatcher.stream.submit(lambda: gate.wait(30))
    arguments = rig.arguments(loaded, [1])
    outputs = [loaded.execute(arguments)[0][0] for _ in range(MAX_QUEUED)]
    beyond: list[object] = []
    caller = threading.Thread(target=lambda: beyond.append(loaded.execute(arguments)[0][0]))
    caller.start()
    assert len(rig.executor.dispatcher._executions) == MAX_QUEUED
    assert not any(value.is_ready() for value in outputs) and not beyond
    gate.set()
    caller.join(30)
    assert len(beyond) == 1
    assert firsts([value.host_view() for value in outputs]) == [2.0] * MAX_QUEUED


def test_runs_leave_no_memory_behind() -> None:
    rig = Rig(2)
    loaded = rig.load(counted_loop(3))
    arguments = rig.arguments(loaded, [1, 2], [0, 0])
    before = rig.engine.memory_stats(0)["bytes_in_use"]
    for _ in range(20):
        rows = loaded.execute(arguments)
        rows[0][0].array()
        del rows
    rig.executor.dispatcher.stream.run(lambda: None)
    assert rig.engine.memory_stats(0)["bytes_in_use"] == before


def test_failed_runs_leave_no_memory_behind_either() -> None:
    made = program(
        [F32] * 3,
        block((0,), [Run(0, (0,), (1,)), Start(0, (1,), (2,), 0), Wait(0)], (2,)),
        segments=[segment("boom")],
        collectives=[all_reduce((0,))],
    )
    rig = Rig()
    loaded = rig.load(made)
    before = rig.engine.memory_stats(0)["bytes_in_use"]
    ((kept,),) = loaded.execute(rig.arguments(loaded, [1]))
    with pytest.raises(StrettoError, match="boom"):
        kept.array()
    rig.executor.dispatcher.stream.run(lambda: None)
    assert rig.engine.memory_stats(0)["bytes_in_use"] == before


def test_counters() -> None:
    rig = Rig(2)
    rig.run(counted_loop(5), [1, 2], [0, 0])
    counters = rig.executor.counters()
    assert counters.collectives == 5
    assert counters.seconds > 0


def test_progress_counts_the_collectives_of_a_stream() -> None:
    rig = Rig(2)
    rig.run(counted_loop(5), [1, 2], [0, 0])
    (progress,) = rig.world.streams
    snapshot = progress.snapshot()
    assert snapshot.current is None
    assert snapshot.last is not None
    assert (snapshot.last.name, snapshot.last.sequence) == ("all-reduce %sum", 5)


def test_a_closed_executor_refuses_runs() -> None:
    rig = Rig()
    loaded = rig.load(summing(1))
    ((value,),) = loaded.execute(rig.arguments(loaded, [1]))
    rig.executor.close()
    assert firsts([value.host_view()]) == [2]
    with pytest.raises(StrettoError, match="closed"):
        loaded.execute(rig.arguments(loaded, [1]))
