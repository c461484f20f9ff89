"""A program replayed on all of its devices: who waits for whom, and how long, worked out by hand."""

from __future__ import annotations

import pytest

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType
from stretto.runtime.program import Block, Branch, Carried, Loop, Program, Run, Segment, Start, Wait
from stretto.testing_ranks import replay_ranks
from stretto.testing_replay import ReplayError

F32 = TensorType("f32", ())
SEGMENT = Segment((F32,), (F32,), b"")
RUN = Run(0, (0,), (1,))


def permute(*pairs: tuple[int, int], valid: tuple[tuple[int, ...], ...] = ()) -> Collective:
    return Collective(Kind.PERMUTE, (F32,), (F32,), pairs=pairs, valid_iterations=valid)


def program(
    collectives: list[Collective], *body: object, devices: int = 3, streams: int = 1
) -> Program:
    block = Block((0,), body, (1,))  # type: ignore[arg-type]
    return Program(
        "p", 1, devices, (F32,) * 4, (SEGMENT,), tuple(collectives), block, num_streams=streams
    )


def pipeline(valid: tuple[tuple[int, ...], ...], *, crossing: bool = False) -> Program:
    """Four iterations of a run and a message to the next device, awaited at once or in the next one."""
    start, wait = Start(0, (1,), (2,), 0), Wait(0)
    body = (wait, RUN, start) if crossing else (RUN, start, wait)
    carried = (Carried(0, ((0, 0),)),) if crossing else ()
    loop = Loop((0,), (1,), Block((), (), ()), Block((0,), body, (2,)), 4, carried=carried)
    return program([permute((0, 1), (1, 2), valid=valid)], loop)


def test_who_sends_and_who_receives_begin_together() -> None:
    # Device 0 runs for 5 s, 1 for 1 s, 2 for 2 s; 1 -> 2 alone need not wait for 0, but 1's part is both.
    both = program([permute((0, 1), (1, 2))], RUN, Start(0, (1,), (2,), 0), Wait(0))
    found = replay_ranks(both, lambda run, device, i: (5.0, 1.0, 2.0)[device], lambda c: 0.5)
    assert found.ends == (5.5, 5.5, 2.5)
    assert found.waited == (0.5, 4.5, 0.5)


def test_messages_that_are_left_out_are_not_waited_for() -> None:
    # Only 0 -> 1 in iteration 0, and 1 -> 2 in iteration 1.
    found = replay_ranks(
        pipeline(((0, 0), (1, 1))), lambda run, device, i: 1.0 + (device == 0), lambda c: 0.25
    )
    # 0: 2, 2.25, then 6 more. 1: meets 0 at 2, goes on at 2.25, sends at 3.25, and 2 is there since 2.
    assert found.ends == (2.25 + 6.0, 3.5 + 2.0, 3.5 + 2.0)


def test_what_crosses_is_awaited_in_the_next_iteration() -> None:
    times = {0: 1.0, 1: 3.0, 2: 1.0}
    found = replay_ranks(
        pipeline(((0, 3), (1, 0)), crossing=True),
        lambda run, device, i: times[device],
        lambda c: 0.5,
    )
    # Device 0 starts at 1; 1 at 3, and both go on at 3.5; then every 3.5 s. At the end the loop waits.
    assert found.ends == (14.0, 14.0, 4.0)


def test_a_stream_takes_one_at_a_time_and_streams_do_not_wait_for_each_other() -> None:
    there, back = permute((0, 1)), permute((1, 0))
    starts = Start(0, (1,), (2,), 0), Start(1, (1,), (3,), 1)
    waits = Wait(1), Wait(0)
    one = program([there, back], *starts, *waits, devices=2)
    assert replay_ranks(one, lambda *_: 0.0, lambda c: 1.0).ends == (2.0, 2.0)
    other = Start(1, (1,), (3,), 1, 1)
    two = program([there, back], starts[0], other, *waits, devices=2, streams=2)
    assert replay_ranks(two, lambda *_: 0.0, lambda c: 1.0).ends == (1.0, 1.0)


def test_runs_that_are_left_out_take_no_time_and_groups_wait_for_all() -> None:
    total = Collective(Kind.ALL_REDUCE, (F32,), (F32,), ((0, 2),), reduction=Reduction.SUM)
    run = Run(0, (0,), (1,), valid=((0, 0), (1, 0), (1, 0)))
    found = replay_ranks(
        program([total], run, Start(0, (1,), (2,), 0), Wait(0)), lambda *_: 2.0, lambda c: 0.5
    )
    assert found.ends == (2.5, 0.0, 2.5)


def test_a_branch_is_chosen_by_whoever_asks() -> None:
    blocks = Block((), (RUN,), (1,)), Block((), (), (0,))
    chosen = program([], Branch(0, ((), ()), (1,), blocks), devices=2)
    found = replay_ranks(chosen, lambda *_: 1.0, lambda c: 0.0, lambda branch, device, i: device)
    assert found.ends == (1.0, 0.0)
    with pytest.raises(NotImplementedError, match="does not follow"):
        replay_ranks(chosen, lambda *_: 1.0, lambda c: 0.0)


def test_devices_that_wait_for_each_other_for_ever() -> None:
    """Device 1 leaves out the branch in which 0 sends to it."""
    sends = Block((), (Start(0, (0,), (2,), 0), Wait(0)), (2,))
    stuck = program(
        [permute((0, 1))], Branch(0, ((), ()), (1,), (sends, Block((), (), (0,)))), devices=2
    )
    with pytest.raises(ReplayError, match=r"devices \[0\] wait for each other"):
        replay_ranks(stuck, lambda *_: 0.0, lambda c: 0.0, lambda branch, device, i: device)
