"""Wires: followed by hand here, for groups of any processes, and compared with NumPy.

A small machine does what a wire says, process by process, with mailboxes for messages. It refuses messages
that nobody sends, that nobody receives, or whose sizes differ.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from stretto.collectives.native import connected
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType
from stretto.collectives.wires import COPY, FEW, FOLD, Action, Leaf, Wire, plan

DTYPE = np.int32


class Process:
    """The memory of one process: a stage, and its members' operands and results."""

    def __init__(self, wire: Wire, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        self.wire = wire
        self.places = [np.zeros(wire.stage, np.uint8)], operands, results
        self.round = 0
        self.posted = False

    def act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            to, given = (
                self.places[p.where][p.number].view(np.uint8).reshape(-1)
                for p in (action.to, action.given)
            )
            for row in range(action.rows):
                begin = action.to.offset + row * action.to_step
                target = to[begin : begin + action.nbytes]
                begin = action.given.offset + row * action.from_step
                source = given[begin : begin + action.nbytes]
                assert len(target) == len(source) == action.nbytes
                if action.what == COPY:
                    target[:] = source
                elif action.what == FOLD:
                    target.view(DTYPE)[:] += source.view(DTYPE)
                else:
                    target[:] = 0


def follow(
    wires: dict[int, Wire], memory: dict[int, tuple[list[np.ndarray], list[np.ndarray]]]
) -> None:
    """Follow the wires of all processes until all are through."""
    processes = {p: Process(wire, *memory[p]) for p, wire in wires.items()}
    mail: dict[tuple[int, int], deque[np.ndarray]] = {}
    for process in processes.values():
        process.act(process.wire.before)
    moved = True
    while moved:
        moved = False
        for number, process in processes.items():
            if process.round == len(process.wire.rounds):
                continue
            stage = process.places[0][0]
            sends, receives, then = process.wire.rounds[process.round]
            if not process.posted:
                for message in sends:
                    content = stage[message.offset : message.offset + message.nbytes].copy()
                    mail.setdefault((number, message.process), deque()).append(content)
                process.posted = moved = True
            if all(mail.get((message.process, number)) for message in receives):
                for message in receives:
                    content = mail[message.process, number].popleft()
                    assert len(content) == message.nbytes
                    stage[message.offset : message.offset + message.nbytes] = content
                process.act(then)
                process.round, process.posted, moved = process.round + 1, False, True
    assert all(p.round == len(p.wire.rounds) for p in processes.values()), "somebody waits for ever"
    assert not any(mail.values()), "a message that nobody takes"
    for process in processes.values():
        process.act(process.wire.after)


def outcome(
    collective: Collective, owner: Sequence[int], operands: list[list[np.ndarray]]
) -> list[list[np.ndarray]]:
    """Results by device. Devices have the numbers 0, 1, …, ``owner`` their processes."""
    results = [[np.full(t.shape, -7, DTYPE) for t in collective.results] for _ in owner]
    groups = connected(collective.pairs) if collective.pairs else collective.groups
    size = len(groups[0])
    leaves = []
    for operand, result in zip(collective.operands, collective.results, strict=True):
        outer, inner = 1, operand.nbytes
        if collective.dimension >= 0:
            whole = result if collective.kind is Kind.ALL_GATHER else operand
            outer = int(np.prod(whole.shape[: collective.dimension]))
            inner = whole.nbytes // outer // size
        leaves.append(Leaf(outer, inner, operand.nbytes, result.nbytes))
    for group in groups:
        here = {p: [i for i in group if owner[i] == p] for p in {owner[i] for i in group}}
        if len(here) < 2:
            continue
        wires, memory = {}, {}
        for process, members in here.items():
            wires[process] = plan(collective, group, leaves, dict(enumerate(owner)), process)
            memory[process] = (
                [a for i in members for a in operands[i]],
                [a for i in members for a in results[i]],
            )
        follow(wires, memory)
    return results


def layouts() -> list[list[int]]:
    """Owners of devices: one, two, or several each, uneven, and scattered, up to 19 processes."""
    return [
        [0, 1],
        [0, 0, 1],
        [0, 1, 0, 1],
        [2, 0, 1, 0, 2, 2, 1],
        *([p for p in range(n)] for n in (3, 5, 8, FEW + 1, 12, 16, 19)),
        [p for p in range(11) for _ in range(1 + p % 3)],
    ]


def arrays(types: Sequence[TensorType], count: int, seed: int = 0) -> list[list[np.ndarray]]:
    random = np.random.default_rng(seed)
    return [[random.integers(-99, 99, t.shape, DTYPE) for t in types] for _ in range(count)]


def collective(
    kind: Kind, operands: list[tuple[int, ...]], results: list[tuple[int, ...]], **more: object
) -> Collective:
    made = Collective(
        kind,
        tuple(TensorType("s32", shape) for shape in operands),
        tuple(TensorType("s32", shape) for shape in results),
    )
    return replace(made, **more)


def sum_over(devices: int, shapes: list[tuple[int, ...]]) -> Collective:
    """An all-reduce of arrays of these shapes over all devices."""
    groups = (tuple(range(devices)),)
    return collective(Kind.ALL_REDUCE, shapes, shapes, groups=groups, reduction=Reduction.SUM)


@pytest.mark.parametrize("owner", layouts(), ids=lambda o: "".join(map(str, o)))
class TestGroups:
    def test_all_reduce(self, owner: list[int]) -> None:
        made = sum_over(len(owner), [(3,), (2, 5)])
        given = arrays(made.operands, len(owner))
        for found in outcome(made, owner, given):
            for k in range(2):
                np.testing.assert_array_equal(found[k], sum(g[k] for g in given))

    @pytest.mark.parametrize("dimension", [0, 1])
    def test_all_gather(self, owner: list[int], dimension: int) -> None:
        n = len(owner)
        wide = (2 * n, 3) if dimension == 0 else (2, 3 * n)
        made = collective(
            Kind.ALL_GATHER, [(2, 3)], [wide], groups=(tuple(range(n))[::-1],), dimension=dimension
        )
        given = arrays(made.operands, n)
        expected = np.concatenate([g[0] for g in given[::-1]], dimension)
        for (found,) in outcome(made, owner, given):
            np.testing.assert_array_equal(found, expected)

    @pytest.mark.parametrize("dimension", [0, 1])
    def test_reduce_scatter(self, owner: list[int], dimension: int) -> None:
        n = len(owner)
        wide = (2 * n, 3) if dimension == 0 else (2, 3 * n)
        made = collective(
            Kind.REDUCE_SCATTER,
            [wide, wide],
            [(2, 3)] * 2,
            groups=(tuple(range(n))[::-1],),
            dimension=dimension,
            reduction=Reduction.SUM,
        )
        given = arrays(made.operands, n)
        for k in range(2):
            parts = np.split(sum(g[k] for g in given), n, dimension)
            for device, found in enumerate(outcome(made, owner, given)):
                np.testing.assert_array_equal(found[k], parts[n - 1 - device])

    @pytest.mark.parametrize("dimension", [0, 1])
    def test_all_to_all(self, owner: list[int], dimension: int) -> None:
        n = len(owner)
        shape = (2 * n, 3) if dimension == 0 else (2, 3 * n)
        made = collective(
            Kind.ALL_TO_ALL, [shape], [shape], groups=(tuple(range(n)),), dimension=dimension
        )
        given = arrays(made.operands, n)
        parts = [np.split(g[0], n, dimension) for g in given]
        for device, (found,) in enumerate(outcome(made, owner, given)):
            expected = np.concatenate([p[device] for p in parts], dimension)
            np.testing.assert_array_equal(found, expected)

    def test_all_to_all_of_tuples(self, owner: list[int]) -> None:
        n = len(owner)
        made = collective(
            Kind.ALL_TO_ALL, [(2,)] * n, [(2,)] * n, groups=(tuple(range(n)),), tuple_form=True
        )
        given = arrays(made.operands, n)
        for device, found in enumerate(outcome(made, owner, given)):
            for source in range(n):
                np.testing.assert_array_equal(found[source], given[source][device])

    def test_broadcast(self, owner: list[int]) -> None:
        n = len(owner)
        made = collective(
            Kind.BROADCAST, [(3,), (4,)], [(3,), (4,)], groups=(tuple(range(n))[::-1],)
        )
        given = arrays(made.operands, n)
        for found in outcome(made, owner, given):
            for k in range(2):
                np.testing.assert_array_equal(found[k], given[n - 1][k])

    def test_permute(self, owner: list[int]) -> None:
        n = len(owner)
        order = np.random.default_rng(n).permutation(n).tolist()
        pairs = tuple(zip(order, [*order[1:], order[0]], strict=True))[
            :-1
        ]  # the first receives nothing
        made = collective(Kind.PERMUTE, [(3,), (5,)], [(3,), (5,)], pairs=pairs)
        given = arrays(made.operands, n)
        found = outcome(made, owner, given)
        source = {t: s for s, t in pairs}
        for device in range(n):
            for k, shape in enumerate([(3,), (5,)]):
                expected = given[source[device]][k] if device in source else np.zeros(shape, DTYPE)
                np.testing.assert_array_equal(found[device][k], expected)


@pytest.mark.parametrize("owner", [o for o in layouts() if 2 < len(set(o)) <= FEW], ids=str)
@pytest.mark.parametrize("shapes", [[(8001,), (70, 9), (1,)], [(3,), (2, 5)], [(1,)]], ids=str)
def test_each_process_reduces_a_part_of_large_arrays(
    shapes: list[tuple[int, ...]], owner: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which all of it would be reduced: first those of a process, then the processes. Parts
    may be empty, and go over from one array into the next."""
    monkeypatch.setattr(sys.modules[__name__], "DTYPE", np.float32)
    monkeypatch.setattr("stretto.collectives.wires.PARTED", 1)
    made = sum_over(len(owner), shapes)
    random = np.random.default_rng(0)
    given = [[random.standard_normal(s, np.float32) for s in shapes] for _ in owner]
    found = outcome(made, owner, given)
    for k in range(len(shapes)):
        sums = []
        for process in sorted(set(owner)):
            first, *others = (g[k] for g, p in zip(given, owner, strict=True) if p == process)
            sums.append(sum(others, first))
        expected = sum(sums[1:], sums[0])
        for results in found:
            np.testing.assert_array_equal(results[k], expected)


def test_all_processes_reduce_in_one_order() -> None:
    """What is folded where is the same for all: so are the bits of sums of floats."""
    for processes in (*range(2, 20), 33):
        made = sum_over(processes, [(4,)])
        leaves = [Leaf(1, 16, 16, 16)]
        owner = {i: i for i in range(processes)}
        wires = {p: plan(made, made.groups[0], leaves, owner, p) for p in owner}
        orders = {p: expression(wires, p, {}) for p in owner}
        assert len(set(orders.values())) == 1, processes


def expression(
    wires: dict[int, Wire], process: int, known: dict[tuple[int, int], dict[int, str]]
) -> str:
    """What lies in a process's results, as an expression of the operands."""
    return contents(wires, process, len(wires[process].rounds), known)[
        wires[process].after[0].given.offset
    ]


def contents(
    wires: dict[int, Wire], process: int, rounds: int, known: dict[tuple[int, int], dict[int, str]]
) -> dict[int, str]:
    """What lies where in a process's stage once it is through with so many rounds."""
    if (process, rounds) in known:
        return known[process, rounds]
    wire = wires[process]
    if rounds == 0:
        return {wire.before[0].to.offset: f"x{process}"}
    held = dict(contents(wires, process, rounds - 1, known))
    _, receives, then = wire.rounds[rounds - 1]
    for message in receives:
        # The n-th message of the one to the other, in whichever round it is sent.
        before = sum(
            m.process == message.process for r in wire.rounds[: rounds - 1] for m in r.receives
        )
        other = wires[message.process]
        found = [
            (number, m)
            for number, r in enumerate(other.rounds)
            for m in r.sends
            if m.process == process
        ]
        number, sent = found[before]
        held[message.offset] = contents(wires, message.process, number, known)[sent.offset]
    for action in then:
        assert action.what == FOLD
        held[action.to.offset] = f"({held[action.to.offset]}+{held[action.given.offset]})"
    known[process, rounds] = held
    return held
