"""Every collective among the devices of one process, against its definition in plain numpy."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collective_cases import (
    DTYPES,
    Case,
    difference,
    every_case,
    make,
    operands_of,
    permute_case,
    ragged_case,
    random_array,
    reductions,
    same,
)

from stretto.collectives.hierarchy import create_communicator
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType

F32 = TensorType("f32", (4,))


def bind(collective, devices, reducer=None):
    return create_communicator(None, 0).bind(collective, dict.fromkeys(range(devices), 0), reducer)


def check(case: Case, devices: int) -> None:
    before = {i: [a.tobytes() for a in row] for i, row in case.inputs.items()}
    bound = bind(case.collective, devices)
    options = {"skip": case.skip} if case.skip else {}
    got = bound.run(case.inputs, **options)
    assert set(got) == set(case.inputs)
    assert not difference(case.collective, got, case.expected())
    assert before == {i: [a.tobytes() for a in row] for i, row in case.inputs.items()}
    for i, row in got.items():
        for array in row:
            assert array.flags.c_contiguous
            assert not any(np.shares_memory(array, operand) for operand in case.inputs[i])


@pytest.mark.quick("4")
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_every_kind_dtype_and_group_form(devices):
    for case in every_case(devices):
        check(case, devices)


@st.composite
def partitions(draw, devices):
    """Disjoint groups of one size, of some of the devices, in any order."""
    order = draw(st.permutations(range(devices)))
    size = draw(st.integers(1, devices))
    count = draw(st.integers(1, devices // size))
    return tuple(tuple(order[n * size : (n + 1) * size]) for n in range(count))


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_groups(data):
    devices = data.draw(st.integers(1, 6), "devices")
    groups = data.draw(partitions(devices), "groups")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    kind = data.draw(
        st.sampled_from(
            [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL, Kind.BROADCAST]
        ),
        "kind",
    )
    rank = data.draw(st.integers(1, 3), "rank")
    shard = tuple(data.draw(st.integers(0, 4)) for _ in range(rank))
    reduces = kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
    collective = make(
        kind,
        groups,
        dtype,
        shard,
        dimension=data.draw(st.integers(0, rank - 1), "dimension"),
        reduction=data.draw(st.sampled_from(reductions(dtype))) if reduces else None,
        variadic=data.draw(st.integers(1, 3), "variadic"),
        dynamic_root=kind is Kind.BROADCAST and data.draw(st.booleans()),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), "seed"))
    check(Case(collective, operands_of(rng, collective, devices)), devices)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_permutes(data):
    devices = data.draw(st.integers(1, 6))
    count = data.draw(st.integers(0, devices))
    sources = data.draw(st.permutations(range(devices)))[:count]
    targets = data.draw(st.permutations(range(devices)))[:count]
    skip = data.draw(st.frozensets(st.integers(0, max(0, count - 1))))
    types = (TensorType(data.draw(st.sampled_from(DTYPES)), (2, 2)),)
    pairs = tuple(zip(sources, targets, strict=True))
    check(permute_case(np.random.default_rng(0), pairs, devices, types, skip), devices)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_ragged_all_to_all(data):
    devices = data.draw(st.integers(1, 5))
    groups = data.draw(partitions(devices))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    updates = data.draw(st.integers(1, 3))
    tail = data.draw(st.sampled_from([(), (2,), (0,), (2, 3)]))
    check(ragged_case(rng, devices, groups, "bf16", updates=updates, tail=tail), devices)


def test_ragged_all_to_all_refuses_rows_that_are_not_there():
    """Device 3 is the second of its group, and its first row goes to device 2."""
    for index, value, message in (
        (
            2,
            99,
            r"device 3 sends rows that its input of \d rows does not have: \d from 99 on, to device 2$",
        ),
        (3, -1, r"device 3 sends rows that its .* have: -1 from \d on, to device 2$"),
        (
            4,
            99,
            r"device 2 receives rows outside its output of \d rows: \d from 99 on, of device 3$",
        ),
        (5, 7, r"device 3 is sent \[1\] rows by device 2 but expects \[7\]$"),
    ):
        case = ragged_case(np.random.default_rng(1), 4, ((0, 1), (2, 3)), "f32")
        case.inputs[3][3][:] = case.inputs[2][5][1] = case.inputs[3][5][1] = 1
        case.inputs[2][3][1] = case.inputs[3][5][0] = 1
        case.inputs[3][index][0] = value
        with pytest.raises(RuntimeError, match=message):
            bind(case.collective, 4).run(case.inputs)


@pytest.mark.parametrize("dynamic", [-1, 2])
def test_a_root_outside_the_group_is_refused(dynamic):
    collective = make(Kind.BROADCAST, ((0, 1),), "f32", (2,), dynamic_root=True)
    inputs = operands_of(np.random.default_rng(0), collective, 2)
    for row in inputs.values():
        row[-1] = np.array([dynamic], np.int32)
    with pytest.raises(RuntimeError, match="not in a group of 2"):
        bind(collective, 2).run(inputs)


def custom(kind, dimension=-1):
    """argmax-like: the larger of two values with its index, on two operands."""
    small = (TensorType("f32", (4,)), TensorType("s32", (4,)))
    result = small if kind is Kind.ALL_REDUCE else tuple(TensorType(t.dtype, (2,)) for t in small)
    return Collective(kind, small, result, ((0, 1), (2, 3)), reducer=0, dimension=dimension)


def larger(left, right):
    keep = left[0] >= right[0]
    return [np.where(keep, left[0], right[0]), np.where(keep, left[1], right[1])]


def test_custom_reducer():
    rng = np.random.default_rng(0)
    inputs = {i: [rng.permutation(4).astype(np.float32), np.full(4, i, np.int32)] for i in range(4)}
    reduced = bind(custom(Kind.ALL_REDUCE), 4, larger).run(inputs)
    scattered = bind(custom(Kind.REDUCE_SCATTER, 0), 4, larger).run(inputs)
    for first in (0, 2):
        values = np.maximum(inputs[first][0], inputs[first + 1][0])
        winners = np.where(inputs[first][0] >= inputs[first + 1][0], first, first + 1)
        for place, member in enumerate((first, first + 1)):
            np.testing.assert_array_equal(reduced[member][0], values)
            np.testing.assert_array_equal(reduced[member][1], winners)
            half = slice(2 * place, 2 * place + 2)
            np.testing.assert_array_equal(scattered[member][0], values[half])
            np.testing.assert_array_equal(scattered[member][1], winners[half])


def test_groups_that_nobody_entered_are_left_out():
    collective = make(Kind.ALL_REDUCE, ((0, 1), (2, 3)), "f32", (4,), reduction=Reduction.SUM)
    inputs = operands_of(np.random.default_rng(0), collective, 4)
    bound = bind(collective, 4)
    got = bound.run({2: inputs[2], 3: inputs[3]})
    assert set(got) == {2, 3}
    assert same(got[2][0], inputs[2][0] + inputs[3][0])
    with pytest.raises(
        RuntimeError, match=r"devices \[1\] of group \[0, 1\].*devices \[0\] do not"
    ):
        bound.run({1: inputs[1], 2: inputs[2], 3: inputs[3]})


def test_a_permute_with_one_end_absent_is_refused():
    collective = Collective(Kind.PERMUTE, (F32,), (F32,), pairs=((0, 1), (2, 3)))
    inputs = operands_of(np.random.default_rng(0), collective, 4)
    bound = bind(collective, 4)
    got = bound.run({2: inputs[2], 3: inputs[3]})
    assert same(got[3][0], inputs[2][0])
    assert same(got[2][0], np.zeros(4, np.float32))
    with pytest.raises(RuntimeError, match="0 -> 1"):
        bound.run({1: inputs[1]})


def message(kind, pairs, channel=1):
    sent, got = ((F32,), ()) if kind is Kind.SEND else ((), (F32,))
    return Collective(kind, sent, got, pairs=pairs, channel=channel)


def test_sends_and_receives_meet_in_order_and_by_channel():
    pairs = ((0, 1), (1, 2))
    communicator = create_communicator(None, 0)
    owner = dict.fromkeys(range(3), 0)
    send, other = (communicator.bind(message(Kind.SEND, pairs, c), owner) for c in (1, 2))
    recv, other_recv = (communicator.bind(message(Kind.RECV, pairs, c), owner) for c in (1, 2))
    data = [{i: [np.full(4, 10 * n + i, np.float32)] for i in range(3)} for n in range(3)]
    absent = {i: [] for i in range(3)}

    early = recv.start(absent)
    assert not early.test()
    other.start(data[2])
    assert not early.test()
    send.start(data[0])
    send.start(data[1])
    assert early.test()
    late = recv.start(absent).wait()
    first = early.wait()
    for got, sent in ((first, data[0]), (late, data[1]), (other_recv.run(absent), data[2])):
        assert same(got[0][0], np.zeros(4, np.float32))
        assert same(got[1][0], sent[0][0])
        assert same(got[2][0], sent[1][0])


def test_skipped_messages_are_zeros():
    pairs = ((0, 1), (1, 0))
    communicator = create_communicator(None, 0)
    owner = dict.fromkeys(range(2), 0)
    send = communicator.bind(message(Kind.SEND, pairs), owner)
    recv = communicator.bind(message(Kind.RECV, pairs), owner)
    data = {i: [np.full(4, i + 1, np.float32)] for i in range(2)}
    send.start(data, skip=frozenset({0})).wait()
    got = recv.start({0: [], 1: []}, skip=frozenset({0})).wait()
    assert same(got[1][0], np.zeros(4, np.float32))
    assert same(got[0][0], data[1][0])
    assert (send.messages, send.bytes) == (2, 32)
    assert send.payload(frozenset({0})) == (1, 16)


def test_abort_wakes_who_waits_and_stops_who_comes():
    communicator = create_communicator(None, 0)
    owner = dict.fromkeys(range(2), 0)
    recv = communicator.bind(message(Kind.RECV, ((0, 1),)), owner)
    request = recv.start({1: []})
    errors = []

    def wait():
        try:
            request.wait()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    communicator.abort("rank 3 is gone")
    thread.join(20)
    assert errors == ["rank 3 is gone"]
    with pytest.raises(RuntimeError, match="rank 3 is gone"):
        recv.start({1: []})
    reduce = make(Kind.ALL_REDUCE, ((0, 1),), "f32", (4,), reduction=Reduction.SUM)
    with pytest.raises(RuntimeError, match="rank 3 is gone"):
        communicator.bind(reduce, owner).run({0: [np.ones(4)], 1: [np.ones(4)]})


def test_collectives_that_contradict_themselves_are_refused():
    def all_reduce(dtype, reduction, groups=((0, 1),)):
        return make(Kind.ALL_REDUCE, groups, dtype, (4,), reduction=reduction)

    for dtype, reduction in (
        ("f32", Reduction.AND),
        ("c64", Reduction.MAX),
        ("bf16", Reduction.XOR),
    ):
        with pytest.raises(NotImplementedError, match=f"{reduction} is not defined on {dtype}"):
            bind(all_reduce(dtype, reduction), 2)
    with pytest.raises(ValueError, match="names device 5"):
        bind(all_reduce("f32", Reduction.SUM, ((0, 5),)), 2)
    with pytest.raises(ValueError, match="twice"):
        bind(all_reduce("f32", Reduction.SUM, ((0, 0),)), 2)
    with pytest.raises(ValueError, match="twice as target"):
        bind(Collective(Kind.PERMUTE, (F32,), (F32,), pairs=((0, 1), (1, 1))), 2)
    odd = Collective(Kind.ALL_TO_ALL, (F32,), (F32,), ((0, 1, 2),), dimension=0)
    with pytest.raises(ValueError, match="does not divide into 3"):
        bind(odd, 3)


@pytest.mark.parametrize(
    ("kind", "messages", "nbytes"),
    [
        # 2 groups of 3 devices; a shard is f32[4]: 16 bytes
        (Kind.ALL_REDUCE, 6, 6 * 16),
        (Kind.ALL_GATHER, 12, 12 * 16),
        (Kind.REDUCE_SCATTER, 12, 12 * 16),
        (Kind.ALL_TO_ALL, 12, 12 * 16),
        (Kind.BROADCAST, 4, 4 * 16),
    ],
)
def test_payload(kind, messages, nbytes):
    reduces = kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
    collective = make(
        kind,
        ((0, 1, 2), (3, 4, 5)),
        "f32",
        (4,),
        reduction=Reduction.SUM if reduces else None,
    )
    bound = bind(collective, 6)
    assert (bound.messages, bound.bytes) == (messages, nbytes)


def test_payload_of_pairs_leaves_out_copies_on_one_device():
    types = (F32, TensorType("s4", (3,)))  # 16 bytes, and 12 bits that take 2
    collective = Collective(Kind.PERMUTE, types, types, pairs=((0, 0), (1, 2), (2, 1)))
    bound = bind(collective, 3)
    assert (bound.messages, bound.bytes) == (2, 2 * 18)


def test_minimum_and_maximum_propagate_nan():
    for dtype in ("f32", "f64", "bf16", "f16", "f8e4m3fn"):
        type_ = TensorType(dtype, (64,))
        rng = np.random.default_rng(3)
        arrays = {i: [random_array(rng, type_)] for i in range(3)}
        for i in range(3):
            arrays[i][0][rng.integers(0, 64, 5)] = np.nan
        for reduction in (Reduction.MIN, Reduction.MAX):
            collective = Collective(
                Kind.ALL_REDUCE, (type_,), (type_,), ((0, 1, 2),), reduction=reduction
            )
            check(Case(collective, arrays), 3)


def test_narrow_floats_are_rounded_once():
    # 256 + 1 + 1 in bf16 (8 bits): rounded at every step it stays 256, rounded once it is 258.
    type_ = TensorType("bf16", (1,))
    values = [np.array([v]).astype(type_.numpy) for v in (256, 1, 1)]
    collective = Collective(
        Kind.ALL_REDUCE, (type_,), (type_,), ((0, 1, 2),), reduction=Reduction.SUM
    )
    got = bind(collective, 3).run({i: [v] for i, v in enumerate(values)})
    assert float(got[0][0][0]) == 258
