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

from stretto.collectives.in_place import in_place
from stretto.collectives.native import connected
from stretto.collectives.ops import Collective, Kind, Reduction
from stretto.collectives.types import TensorType
from stretto.collectives.wires import (
    ARRIVED,
    BY_AFTER,
    BY_THEN,
    COPIED,
    COPY,
    FEW,
    FOLD,
    RESULT,
    Action,
    Leaf,
    Place,
    Wire,
    plan,
)

DTYPE = np.int32


class Process:
    """The memory of one process: a stage, and its members' operands and results."""

    def __init__(
        self, number: int, wire: Wire, operands: list[np.ndarray], results: list[np.ndarray]
    ) -> None:
        self.number, self.wire = number, wire
        self.places = [np.zeros(wire.stage, np.uint8)], operands, results
        self.rounds = deque(wire.rounds)
        self.posted: list[Letter] | None = None
        self.arrived: dict[int, Letter] = {}
        self.act(wire.before)

    def memory(self, place: Place) -> np.ndarray:
        if place.where == ARRIVED:
            return self.arrived[place.number].place
        return self.places[place.where][place.number].view(np.uint8).reshape(-1)

    def act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            to, given = self.memory(action.to), self.memory(action.given)
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

    def step(self, mail: Mail, in_place: bool) -> bool:
        """Do what can be done; whether there was anything."""
        if not self.rounds:
            return False
        round_, stage = self.rounds[0], self.places[0][0]
        moved = self.posted is None
        if self.posted is None:
            self.posted, self.arrived = [], {}
            for message in round_.sends:
                letter = Letter(stage[message.offset : message.offset + message.nbytes], in_place)
                mail.setdefault((self.number, message.process), deque()).append(letter)
                self.posted.append(letter)
        for k, message in enumerate(round_.receives):
            if k not in self.arrived and mail.get((message.process, self.number)):
                moved = True
                letter = self.arrived[k] = mail[message.process, self.number].popleft()
                assert len(letter.place) == message.nbytes
                if message.read == COPIED:
                    stage[message.offset : message.offset + message.nbytes] = letter.take()
        if len(self.arrived) < len(round_.receives):
            return moved
        if round_.acknowledged and not all(letter.taken for letter in self.posted):
            return moved
        self.act(round_.then)
        self.rounds.popleft()
        self.posted = None
        if not self.rounds:
            self.act(self.wire.after)
        for k, message in enumerate(round_.receives):
            if message.read != COPIED:
                self.arrived[k].take()
        return True


class Letter:
    """What one process gives to another: a place in its stage, which has the same bytes until it is read."""

    def __init__(self, place: np.ndarray, in_place: bool) -> None:
        self.place, self.sent = place if in_place else place.copy(), place.copy()
        self.taken = not in_place

    def take(self) -> np.ndarray:
        np.testing.assert_array_equal(self.place, self.sent, "changed before it was read")
        self.taken = True
        return self.place


Mail = dict[tuple[int, int], deque[Letter]]


def follow(
    wires: dict[int, Wire],
    memory: dict[int, tuple[list[np.ndarray], list[np.ndarray]]],
    order: np.random.Generator | None = None,
) -> None:
    """Follow the wires of all processes until all are through. ``order``: messages are read in place, and
    processes go on in this order."""
    processes = [Process(p, wire, *memory[p]) for p, wire in wires.items()]
    mail: Mail = {}
    moved = True
    while moved:
        if order is not None:
            order.shuffle(processes)  # type: ignore[arg-type]
        moved = any(process.step(mail, order is not None) for process in processes)
    assert not any(process.rounds for process in processes), "somebody waits for ever"
    assert not any(mail.values()), "a message that nobody takes"


def outcome(
    collective: Collective, owner: Sequence[int], operands: list[list[np.ndarray]]
) -> list[list[np.ndarray]]:
    """Results by device, the same whether messages are copied or read in place, by all processes or by some.
    Devices have the numbers 0, 1, …, ``owner`` their processes."""
    found = followed(collective, owner, operands)
    for seed in range(4):
        order = np.random.default_rng(seed)
        again = followed(collective, owner, operands, order, mixed=seed > 1)
        for some, others in zip(found, again, strict=True):
            for one, other in zip(some, others, strict=True):
                np.testing.assert_array_equal(one, other)
    return found


def followed(
    collective: Collective,
    owner: Sequence[int],
    operands: list[list[np.ndarray]],
    order: np.random.Generator | None = None,
    *,
    mixed: bool = False,
) -> list[list[np.ndarray]]:
    """``mixed``: some processes copy what comes, and what they send must have been read in each round."""
    results = [[np.full(t.shape, -7, DTYPE) for t in collective.results] for _ in owner]
    groups = connected(collective.pairs) if collective.pairs else collective.groups
    size = len(groups[0])
    leaves = leaves_of(collective, size)
    for group in groups:
        here = {p: [i for i in group if owner[i] == p] for p in {owner[i] for i in group}}
        if len(here) < 2:
            continue
        wires, memory = {}, {}
        for process, members in here.items():
            wire = plan(collective, group, leaves, dict(enumerate(owner)), process)
            copies = order is None or (mixed and order.random() < 0.5)
            wires[process] = wire if copies else in_place(wire)
            memory[process] = (
                [a for i in members for a in operands[i]],
                [a for i in members for a in results[i]],
            )
        follow(wires, memory, order)
    return results


def leaves_of(collective: Collective, size: int) -> list[Leaf]:
    """Its operands, in groups of so many members."""
    leaves = []
    for operand, result in zip(collective.operands, collective.results, strict=True):
        outer, inner = 1, operand.nbytes
        if collective.dimension >= 0:
            whole = result if collective.kind is Kind.ALL_GATHER else operand
            outer = int(np.prod(whole.shape[: collective.dimension]))
            inner = whole.nbytes // outer // size
        leaves.append(Leaf(outer, inner, operand.nbytes, result.nbytes))
    return leaves


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
    held = contents(wires, process, len(wires[process].rounds), known)
    result = ""
    for action in wires[process].after:
        assert action.to.where == RESULT
        given = held[action.given.offset]
        result = f"({result}+{given})" if action.what == FOLD else given
    return result


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
    receives, then = wire.rounds[rounds - 1][1:3]
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


@pytest.mark.parametrize("kind", [Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.PERMUTE])
@pytest.mark.parametrize("processes", [2, 4, FEW])
def test_few_processes_that_share_memory_copy_nothing_that_comes(
    kind: Kind, processes: int
) -> None:
    """And wait for nobody to have read what they send."""
    for round_ in in_place(wire_of(kind, processes)).rounds:
        assert all(message.read != COPIED for message in round_.receives)
        assert not round_.acknowledged


def test_parts_of_large_arrays_are_not_copied_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.collectives.wires.PARTED", 1)
    first, second = in_place(wire_of(Kind.ALL_REDUCE, 4)).rounds
    assert {m.read for m in first.receives} == {BY_THEN}
    assert {m.read for m in second.receives} == {BY_AFTER}
    assert not first.acknowledged
    assert not second.acknowledged


def test_what_is_sent_on_is_copied_and_what_is_changed_must_have_been_read() -> None:
    many = FEW + 2
    assert {
        m.read for r in in_place(wire_of(Kind.ALL_GATHER, many)).rounds[:-1] for m in r.receives
    } == {COPIED}
    assert any(r.acknowledged for r in in_place(wire_of(Kind.ALL_REDUCE, many)).rounds)


def wire_of(kind: Kind, processes: int) -> Wire:
    """The wire of the last process, for a device in each."""
    n = processes
    if kind is Kind.ALL_REDUCE:
        made = sum_over(n, [(4 * n,)])
    elif kind is Kind.PERMUTE:
        made = collective(kind, [(4,)], [(4,)], pairs=tuple((i, (i + 1) % n) for i in range(n)))
    else:
        given, result = ((4,), (4 * n,)) if kind is Kind.ALL_GATHER else ((4 * n,), (4 * n,))
        made = collective(kind, [given], [result], groups=(tuple(range(n)),), dimension=0)
    return plan(made, tuple(range(n)), leaves_of(made, n), {i: i for i in range(n)}, n - 1)
