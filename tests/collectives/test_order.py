"""Certificates and the common order, on hand-made schedules of two to four ranks."""

import itertools
import random

import pytest

from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.order import (
    Entry,
    OrderConflict,
    Schedule,
    certificate,
    check_matched,
    entry_of,
    reconcile,
    self_check,
)
from stretto.collectives.types import TensorType

F32 = TensorType("f32", (8,))
OWNER = {0: 0, 1: 1}
WORLD = ((0, 1),)


def all_reduce(name, *after, dtype="f32", shape=(8,), reduction=Reduction.SUM, groups=WORLD):
    t = TensorType(dtype, shape)
    return entry_of(
        Collective(
            Kind.ALL_REDUCE,
            (t,),
            (t,),
            groups,
            reduction=reduction,
            name=name,
            source=f"{name}.py:1",
        ),
        after,
    )


def all_gather(name, *after, groups=WORLD):
    out = TensorType("f32", (16,))
    return entry_of(
        Collective(Kind.ALL_GATHER, (F32,), (out,), groups, dimension=0, name=name), after
    )


def reduce_scatter(name, *after, groups=WORLD):
    out = TensorType("f32", (4,))
    return entry_of(
        Collective(
            Kind.REDUCE_SCATTER,
            (F32,),
            (out,),
            groups,
            reduction=Reduction.SUM,
            dimension=0,
            name=name,
        ),
        after,
    )


def send(name, pair, *after):
    return entry_of(Collective(Kind.SEND, (F32,), (), pairs=(pair,), channel=1, name=name), after)


def recv(name, pair, *after):
    return entry_of(Collective(Kind.RECV, (), (F32,), pairs=(pair,), channel=1, name=name), after)


def loop(name, trip_count, *children, after=()):
    return Entry(
        "loop", "", (), after, (Schedule(tuple(children)),), trip_count, name, f"{name}.py:9"
    )


def names(schedule, order, path=()):
    for child, part in zip(path[::2], path[1::2], strict=True):
        schedule = schedule.entries[child].children[part]
    return [schedule.entries[i].name for i in order[path]]


def test_certificate_ignores_names_and_sees_everything_else():
    base = Schedule((all_reduce("a"),))
    assert certificate(base) == certificate(Schedule((all_reduce("b"),)))
    others = [
        Schedule(),
        Schedule((all_reduce("a", dtype="f64"),)),
        Schedule((all_reduce("a", shape=(9,)),)),
        Schedule((all_reduce("a", reduction=Reduction.MAX),)),
        Schedule((all_reduce("a", groups=((1, 0),)),)),
        Schedule((all_gather("a"),)),
        Schedule((all_reduce("a"), all_reduce("b"))),
        Schedule((loop("l", 3, all_reduce("a")),)),
        Schedule((loop("l", 4, all_reduce("a")),)),
    ]
    assert len({certificate(s) for s in [base, *others]}) == len(others) + 1


def test_serialization_round_trip():
    schedule = Schedule((all_reduce("a"), loop("l", None, send("s", (0, 1)), after=(0,))))
    assert Schedule.from_bytes(schedule.to_bytes()) == schedule


def test_independent_collectives_in_other_order_are_reconciled():
    a = Schedule((all_gather("ag0"), reduce_scatter("rs0")))
    b = Schedule((reduce_scatter("rs1"), all_gather("ag1")))
    orders = reconcile({0: a, 1: b}, OWNER)
    assert names(a, orders[0]) == ["ag0", "rs0"]
    assert names(b, orders[1]) == ["ag1", "rs1"]


def test_a_chain_on_one_rank_decides_for_the_others():
    free = Schedule((all_gather("ag0"), reduce_scatter("rs0")))
    chained = Schedule((reduce_scatter("rs1"), all_gather("ag1", 0)))
    orders = reconcile({0: free, 1: chained}, OWNER)
    assert names(free, orders[0]) == ["rs0", "ag0"]
    assert names(chained, orders[1]) == ["rs1", "ag1"]


def test_contradictory_chains_name_the_cycle():
    a = Schedule((all_gather("ag0"), reduce_scatter("rs0", 0)))
    b = Schedule((reduce_scatter("rs1"), all_gather("ag1", 0)))
    with pytest.raises(OrderConflict, match="contradictory") as error:
        reconcile({0: a, 1: b}, OWNER)
    assert "rank 0: " in str(error.value)
    assert "rank 1: " in str(error.value)


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        ([all_reduce("a")], [], "nothing that matches"),
        ([all_reduce("a")], [all_reduce("b"), all_reduce("c")], "%c"),
        ([all_reduce("a")], [all_reduce("b", dtype="bf16")], "bf16"),
        ([all_reduce("a")], [all_reduce("b", shape=(4,))], r"f32\[4\]"),
        ([all_reduce("a")], [all_reduce("b", reduction=Reduction.MAX)], "maximum"),
        ([all_gather("a")], [reduce_scatter("b")], "reduce-scatter"),
        ([send("s", (0, 1))], [], "send"),
        ([], [recv("r", (0, 1))], "recv"),
        ([loop("l", 3, all_reduce("a"))], [loop("m", 4, all_reduce("b"))], "4 iterations"),
    ],
)
def test_what_cannot_be_matched_is_named_on_both_ranks(mine, theirs, message):
    schedules = {0: Schedule(tuple(mine)), 1: Schedule(tuple(theirs))}
    with pytest.raises(OrderConflict, match=message) as error:
        reconcile(schedules, OWNER)
    assert "rank 0" in str(error.value)
    assert "rank 1" in str(error.value)


def test_only_ranks_of_a_group_need_the_collective():
    owner = {d: d for d in range(4)}
    left, right = ((0, 1),), ((2, 3),)
    schedules = {
        0: Schedule((all_reduce("a", groups=left),)),
        1: Schedule((all_reduce("b", groups=left),)),
        2: Schedule((all_gather("c", groups=right),)),
        3: Schedule((all_gather("d", groups=right),)),
    }
    reconcile(schedules, owner)


def test_receives_follow_their_sends():
    a = Schedule((recv("r0", (1, 0)), send("s0", (0, 1))))
    b = Schedule((recv("r1", (0, 1)), send("s1", (1, 0))))
    orders = reconcile({0: a, 1: b}, OWNER)
    waits_first = [
        names(schedule, orders[rank])[0].startswith("r") for rank, schedule in ((0, a), (1, b))
    ]
    assert not all(waits_first)


def test_receive_before_send_all_round_is_a_cycle():
    a = Schedule((recv("r0", (1, 0)), send("s0", (0, 1), 0)))
    b = Schedule((recv("r1", (0, 1)), send("s1", (1, 0), 0)))
    with pytest.raises(OrderConflict, match="contradictory"):
        reconcile({0: a, 1: b}, OWNER)


def test_self_check_sees_a_ring_that_waits_for_itself():
    ring = ((0, 1), (1, 0))
    r = entry_of(Collective(Kind.RECV, (), (F32,), pairs=ring, channel=1, name="r"))
    s = entry_of(Collective(Kind.SEND, (F32,), (), pairs=ring, channel=1, name="s"), (0,))
    with pytest.raises(OrderConflict, match="cycle"):
        self_check(Schedule((r, s)), OWNER)
    first = entry_of(Collective(Kind.SEND, (F32,), (), pairs=ring, channel=1, name="s"))
    then = entry_of(Collective(Kind.RECV, (), (F32,), pairs=ring, channel=1, name="r"), (0,))
    self_check(Schedule((first, then)), OWNER)


def test_a_receive_matches_its_send_whatever_else_is_said_of_both():
    ring, valid = ((0, 1), (1, 0)), ((0, 1), (1, 2))
    common = {"pairs": ring, "channel": 3, "valid_iterations": valid}
    s = entry_of(Collective(Kind.SEND, (F32, F32), (), name="s", **common))
    r = entry_of(Collective(Kind.RECV, (), (F32, F32), name="r", **common))
    check_matched(Schedule((s, r)))
    unbounded = entry_of(
        Collective(Kind.RECV, (), (F32, F32), pairs=ring, channel=3, name="unbounded")
    )
    with pytest.raises(OrderConflict, match=r"%s has no receive.* of the same channel_id"):
        check_matched(Schedule((s, unbounded)))


def test_loop_bodies_are_reconciled_too():
    a = Schedule((loop("l", 3, all_gather("ag0"), reduce_scatter("rs0")),))
    b = Schedule((loop("m", 3, reduce_scatter("rs1"), all_gather("ag1", 0)),))
    orders = reconcile({0: a, 1: b}, OWNER)
    assert names(a, orders[0], (0, 0)) == ["rs0", "ag0"]


def test_random_linear_extensions_of_one_partial_order_agree():
    rng = random.Random(7)
    for _ in range(200):
        n = rng.randint(2, 8)
        edges = [(i, j) for i, j in itertools.combinations(range(n), 2) if rng.random() < 0.3]
        schedules = {}
        for rank in range(2):
            order = _random_extension(n, edges, rng)
            place = {node: i for i, node in enumerate(order)}
            schedules[rank] = Schedule(
                tuple(
                    all_reduce(
                        f"n{node}",
                        *sorted(place[a] for a, b in edges if b == node),
                        shape=(node + 1,),
                    )
                    for node in order
                )
            )
        orders = reconcile(schedules, OWNER)
        first, second = (names(schedules[r], orders[r]) for r in range(2))
        assert first == second
        at = {name: i for i, name in enumerate(first)}
        assert all(at[f"n{a}"] < at[f"n{b}"] for a, b in edges)


def _random_extension(n, edges, rng):
    left, order = set(range(n)), []
    while left:
        free = sorted(i for i in left if not any(b == i and a in left for a, b in edges))
        node = rng.choice(free)
        order.append(node)
        left.remove(node)
    return order
