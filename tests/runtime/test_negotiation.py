"""The first run of a program on several processes: threads that are joined in memory."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import pytest
from support.handmade import F32, Rig, all_reduce, block, firsts, permute, program

from stretto.collectives.ops import Collective, Kind
from stretto.collectives.order import CommonOrder, Schedule, entry_of
from stretto.runtime.errors import CollectiveMismatch, StrettoError, UnsupportedError
from stretto.runtime.execution.loaded import LoadedProgram
from stretto.runtime.program import Copy, Program, Start, Wait
from stretto.runtime.program.communicated import starts, strict, walked
from stretto.testing import MemoryTransport, MemoryWorld, Recorder, run_processes

SUM = all_reduce((0, 1), name="sum")
SHIFT = permute((0, 1), (1, 0), name="shift")


def in_order(*order: int, streams: tuple[int, ...] = (0, 0)) -> Program:
    """Sum and shift of the argument, in an order."""
    instructions = []
    for number in order:
        instructions += [
            Start(number, (0,), (1 + number,), number, streams[number]),
            Wait(number),
        ]
    return program(
        [F32] * 3,
        block((0,), instructions, (1, 2)),
        devices=2,
        collectives=[SUM, SHIFT],
        streams=max(streams) + 1,
        name=f"order_{''.join(map(str, order))}",
    )


def free(made: Program) -> Schedule:
    """The schedule of a program whose collectives do not depend on each other."""
    return Schedule(tuple(dataclasses.replace(e, after=()) for e, _ in starts(made)))


def load(rig: Rig, made: Program, independent: bool = True) -> LoadedProgram:
    def with_order(order: CommonOrder) -> Program:
        listed = [i.collective for i in made.body.instructions if isinstance(i, Start)]
        return in_order(*(listed[position] for position in order[()]))

    return rig.executor.load(
        made,
        range(2),
        schedule=free(made) if independent else strict(made),
        with_order=with_order,
    )


def mismatch(rig: Rig, loaded: LoadedProgram) -> str:
    """What the first result of a run says, that the ranks do not agree on."""
    ((bad, _),) = loaded.execute(rig.arguments(loaded, [1, 2]))
    with pytest.raises(CollectiveMismatch) as caught:
        bad.host_view()
    return str(caught.value)


def said_by_both(main: Callable[[MemoryWorld, MemoryTransport], str]) -> str:
    """What ``main`` gives on two ranks, which is the same."""
    left, right = run_processes(2, main)
    assert left == right
    return left


def test_certificates_hold_order_and_streams_and_no_names() -> None:
    assert walked(in_order(0, 1)) != walked(in_order(1, 0))
    assert walked(in_order(0, 1)) != walked(in_order(0, 1, streams=(0, 1)))
    renamed = dataclasses.replace(
        in_order(0, 1), name="other", collectives=(dataclasses.replace(SUM, name="x"), SHIFT)
    )
    assert walked(in_order(0, 1)) == walked(renamed)


def test_independent_collectives_in_another_order_are_reconciled() -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> list:
        recorder = Recorder()
        rig = Rig(world=world, transport=transport, instrument=recorder)
        loaded = load(rig, in_order(0, 1) if world.rank == 0 else in_order(1, 0))
        for _ in range(20):
            rows = loaded.execute(rig.arguments(loaded, [1, 2]))
        values = firsts([v.host_view() for v in rows[0]])
        return [values, [e[1] for e in recorder.events if e[0] == "start"]]

    results = run_processes(2, main)
    assert [values for values, _ in results] == [[3, 2], [3, 1]]
    assert [started for _, started in results] == [["sum", "shift"] * 20] * 2


@dataclasses.dataclass
class Written:
    """A program as its module has it."""

    program: Program
    schedule: Schedule

    def with_order(self, order: CommonOrder) -> Program:
        assert all(p == tuple(range(len(p))) for p in order.values())
        return self.program


def silent() -> Program:
    """Sum and shift, without any of the two."""
    return program(
        [F32] * 3,
        block((0,), [Copy(0, 1), Copy(0, 2)], (1, 2)),
        devices=2,
        collectives=[],
        name="order_01",
    )


def load_rewritten(rig: Rig, made: Program, digest: bytes, fails: bool = False) -> LoadedProgram:
    def as_written() -> Written:
        if fails:
            raise UnsupportedError("no memory of it")
        return Written(in_order(0, 1), strict(in_order(0, 1)))

    return rig.executor.load(
        made, range(2), schedule=strict(made), rewritten=digest, as_written=as_written
    )


@pytest.mark.parametrize(
    ("made", "digests", "expected"),
    [
        ((in_order(1, 0), in_order(1, 0)), (b"merged 1 and 2", b"merged 2 and 3"), "written"),
        ((silent(), in_order(0, 1)), (b"left out", b""), "written"),
        ((silent(), silent()), (b"left out", b"left out"), "rewritten"),
    ],
)
def test_programs_rewritten_in_different_ways_run_as_they_are_written(
    made: tuple[Program, Program], digests: tuple[bytes, bytes], expected: str
) -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> list:
        recorder = Recorder()
        rig = Rig(world=world, transport=transport, instrument=recorder)
        own, digest = made[world.rank], digests[world.rank]
        loaded = load_rewritten(rig, own, digest) if digest else load(rig, own, False)
        for _ in range(2):
            rows = loaded.execute(rig.arguments(loaded, [1, 2]))
        values = firsts([v.host_view() for v in rows[0]])
        return [values, [e[1] for e in recorder.events if e[0] == "start"]]

    results = run_processes(2, main)
    if expected == "written":
        assert [values for values, _ in results] == [[3, 2], [3, 1]]
        assert [started for _, started in results] == [["sum", "shift"] * 2] * 2
    else:
        assert [started for _, started in results] == [[], []]


def test_a_program_that_cannot_be_had_as_it_is_written_is_refused_everywhere() -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> str:
        rig = Rig(world=world, transport=transport)
        if world.rank:
            loaded = load(rig, in_order(0, 1))
        else:
            loaded = load_rewritten(rig, in_order(0, 1), b"merged", fails=True)
        return mismatch(rig, loaded)

    assert (
        "rank 0 cannot compile it as it is written: UnsupportedError: no memory of it"
        in said_by_both(main)
    )


def test_contradictory_orders_are_refused_and_the_job_goes_on() -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> list:
        rig = Rig(world=world, transport=transport)
        refused = load(rig, in_order(0, 1) if world.rank == 0 else in_order(1, 0), False)
        texts = []
        for _ in range(2):
            texts.append(mismatch(rig, refused))
        good = load(rig, in_order(0, 1))
        ((total, _), *_) = good.execute(rig.arguments(good, [1, 2]))
        assert world.error is None
        return [texts, firsts([total.host_view()])]

    (left, right) = run_processes(2, main)
    assert left == right
    assert left[1] == [3]
    (once, again) = left[0]
    assert once == again
    assert "(rank 0 runs order_01; rank 1 runs order_10)" in once.replace(_called(once), "")
    assert "rank 0: all-reduce" in once
    assert "rank 1: collective-permute" in once


def _called(text: str) -> str:
    """`` (called at …)``, the same on both ranks."""
    start = text.index(" (called at ")
    return text[start : text.index(")", start) + 1]


def test_streams_that_do_not_fit_are_refused() -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> str:
        rig = Rig(world=world, transport=transport)
        made = in_order(0, 1, streams=(0, world.rank))
        loaded = rig.executor.load(
            made, range(2), schedule=strict(made), with_order=lambda order: made
        )
        return mismatch(rig, loaded)

    assert "runs on streams [0] of rank 0 but on [1] of rank 1" in said_by_both(main)


def test_a_rank_that_cannot_follow_the_order_is_named() -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> str:
        rig = Rig(world=world, transport=transport)
        made = in_order(0, 1) if world.rank == 0 else in_order(1, 0)
        loaded = rig.executor.load(made, range(2), schedule=free(made))
        return mismatch(rig, loaded)

    assert "rank 1 cannot follow the common order: UnsupportedError" in said_by_both(main)


def test_other_devices_are_named() -> None:
    def main(world: MemoryWorld, transport: MemoryTransport) -> str:
        rig = Rig(world=world, transport=transport)
        loaded = rig.load(in_order(0, 1), [0, 1] if world.rank == 0 else [1, 0])
        return mismatch(rig, loaded)

    assert "for different devices: [0, 1] on rank 0, [1, 0] on rank 1" in said_by_both(main)


def test_other_runs_before_are_named_at_the_next_agreement() -> None:
    """Both ranks run something at the same time that does not wait for the other: nobody notices yet."""

    def main(world: MemoryWorld, transport: MemoryTransport) -> str:
        rig = Rig(world=world, transport=transport)
        alone = program(
            [F32] * 2,
            block((0,), [Start(0, (0,), (1,), 0), Wait(0)], (1,)),
            devices=2,
            collectives=[all_reduce((0,), (1,), name="alone")],
            name="alone",
        )
        both = load(rig, in_order(0, 1))
        lonely = rig.load(alone)
        for loaded in (both, lonely):
            for row in loaded.execute(rig.arguments(loaded, [1, 2])):
                row[0].host_view()
        if world.rank == 0:
            lonely.execute(rig.arguments(lonely, [1, 2]))
        new = load(rig, in_order(1, 0))
        ((bad, _),) = new.execute(rig.arguments(new, [1, 2]))
        with pytest.raises(CollectiveMismatch) as caught:
            bad.host_view()
        # From here on the two have the same history.
        assert firsts([v.host_view() for v in both.execute(rig.arguments(both, [1, 2]))[0]])[0] == 3
        last = load(rig, in_order(0, 1, streams=(1, 0)))
        last.execute(rig.arguments(last, [1, 2]))[0][0].host_view()
        return str(caught.value)

    said = said_by_both(main)
    assert "run 3 of processes 0, 1 is\n  rank 0: alone" in said
    assert "\n  rank 1: order_10" in said


def test_loading_waits_for_nobody() -> None:
    loaded_alone = threading.Event()

    def main(world: MemoryWorld, transport: MemoryTransport) -> list[float]:
        rig = Rig(world=world, transport=transport)
        if world.rank == 0:
            loaded = load(rig, in_order(0, 1))
            loaded_alone.set()
        else:
            assert loaded_alone.wait(30)
            loaded = load(rig, in_order(0, 1))
        return firsts([v.host_view() for v in loaded.execute(rig.arguments(loaded, [1, 2]))[0]])

    assert run_processes(2, main) == [[3, 2], [3, 1]]


def received_first(pairs: tuple[tuple[int, int], ...]) -> Program:
    """Waits for what it receives before it sends."""
    send = Collective(Kind.SEND, (F32,), (), pairs=pairs, channel=1, name="send")
    recv = Collective(Kind.RECV, (), (F32,), pairs=pairs, channel=1, name="recv")
    return program(
        [F32, F32],
        block((0,), [Start(1, (), (1,), 1), Wait(1), Start(0, (0,), (), 0), Wait(0)], (1,)),
        devices=2,
        collectives=[send, recv],
    )


def test_local_devices_that_wait_for_each_other_are_refused_at_load() -> None:
    with pytest.raises(CollectiveMismatch, match="wait for each other in a cycle") as caught:
        Rig(2).load(received_first(((0, 1), (1, 0))))
    assert "recv" in str(caught.value)
    assert "%send" in str(caught.value)


def test_a_send_without_a_receive_is_refused() -> None:
    send = Collective(Kind.SEND, (F32,), (), pairs=((0, 1),), channel=1, name="send")
    made = program(
        [F32],
        block((0,), [Start(0, (0,), (), 0), Wait(0)], (0,)),
        devices=2,
        collectives=[send],
    )
    with pytest.raises(CollectiveMismatch, match="%send has no receive that matches it"):
        Rig(2).load(made)

    def main(world: MemoryWorld, transport: MemoryTransport) -> str:
        rig = Rig(world=world, transport=transport)
        loaded = rig.load(made)
        ((bad,),) = loaded.execute(rig.arguments(loaded, [1, 2]))
        with pytest.raises(StrettoError) as caught:
            bad.host_view()
        return str(caught.value)

    assert "between devices 0 and 1" in said_by_both(main)


def test_a_schedule_has_an_entry_for_each_collective() -> None:
    made = in_order(1, 0)
    assert [e.name for e in strict(made).entries] == ["shift", "sum"]
    assert [e.after for e in strict(made).entries] == [(), (0,)]
    assert strict(made).entries[1] == entry_of(SUM, (0,))
