"""What compiled code does in a collective that several processes take part in, planned beforehand.

`plan` gives the `Wire` of one group in one process: the local members' operands are packed into a stage, a
piece of memory that collectives take turns with; messages between stages, in rounds; the results are
unpacked. The compiled handler (`_native`) follows it. All processes of the group make their plans of the same
collective, group and ``owner``, so that their messages match: there is at most one between two processes in a
round.

Operands are reduced in one order on all processes: first those of each process, in the group's order, then
those of the processes, in ascending order; with more than `FEW` processes pairwise, neighbours first.

Where processes have memory in common, `in_place` makes of a wire one that moves less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from .ops import Collective, Kind

# Up to so many processes send directly to each other; more of them gather and reduce in rounds.
FEW = 8
# Bytes from which on three and more of these reduce a part each, which takes a round more and moves less:
# four that share two cores took as long with 128 KiB, and 0.9 to 0.75 of the time with 256 to 512 KiB.
PARTED = 3 << 16

COPY, FOLD, ZERO = 0, 1, 2
STAGE, OPERAND, RESULT, ARRIVED = 0, 1, 2, 3
# How what a message brings is read: from the stage, where it has been copied; or where its sender put it, by
# what follows its round, or by what follows the last one.
COPIED, BY_THEN, BY_AFTER = 0, 1, 2

# Bytes to which what is reduced is aligned in a stage.
_ALIGNED = 16


class Place(NamedTuple):
    """Bytes from ``offset`` on, of the stage, of operand or result ``number`` of the local members (those of
    the first member come first), or of what the round's message ``number`` has brought (ARRIVED)."""

    where: int
    number: int
    offset: int


class Action(NamedTuple):
    """Copy ``rows`` rows of ``nbytes``, reduce them into what is there (FOLD), or fill them with zeros.

    ``to_step`` and ``from_step`` are the bytes from one row to the next.
    """

    what: int
    to: Place
    given: Place
    nbytes: int
    rows: int = 1
    to_step: int = 0
    from_step: int = 0
    leaf: int = 0


class Message(NamedTuple):
    """Bytes of the stage that go to a process, or come from it."""

    process: int
    offset: int
    nbytes: int
    read: int = COPIED


class Round(NamedTuple):
    """Messages under way at the same time, and what is done once all have arrived.

    ``acknowledged``: what is sent must have been read by then, since something is written there.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    then: tuple[Action, ...] = ()
    acknowledged: bool = True


class Wire(NamedTuple):
    """One group's collective in one process. See the module's text."""

    stage: int
    before: tuple[Action, ...]
    rounds: tuple[Round, ...]
    after: tuple[Action, ...]


class Leaf(NamedTuple):
    """An operand, seen as [outer][parts, where it is split][inner bytes], and its result."""

    outer: int
    inner: int
    operand_bytes: int
    result_bytes: int


class _Group:
    """A group with one process's view of it. Positions are those in the group."""

    def __init__(
        self,
        collective: Collective,
        members: Sequence[int],
        leaves: Sequence[Leaf],
        owner: Mapping[int, int],
        process: int,
    ) -> None:
        self.collective = collective
        self.members = members
        self.size = len(members)
        self.leaves = leaves
        self.owner = owner
        self.processes = sorted({owner[i] for i in members})
        self.at = {p: [k for k, i in enumerate(members) if owner[i] == p] for p in self.processes}
        self.process = process
        self.me = self.processes.index(process)
        self.here = self.at[process]
        self.number = {position: n for n, position in enumerate(self.here)}

    def operand(self, position: int, leaf: int, offset: int = 0) -> Place:
        count = len(self.collective.operands)
        return Place(OPERAND, self.number[position] * count + leaf, offset)

    def result(self, position: int, index: int, offset: int = 0) -> Place:
        count = len(self.collective.results)
        return Place(RESULT, self.number[position] * count + index, offset)

    def others(self) -> list[int]:
        return [p for p in self.processes if p != self.process]


def plan(
    collective: Collective,
    members: Sequence[int],
    leaves: Sequence[Leaf],
    owner: Mapping[int, int],
    process: int,
) -> Wire:
    """The wire of a group of devices in a process that has some of them.

    ``members``: logical ids in the group's order; of a permute, devices that pairs join. ``leaves``: one for
    each operand. ``owner`` maps logical ids to processes. Messages name processes.
    """
    group = _Group(collective, members, leaves, owner, process)
    kind = collective.kind
    if kind is Kind.ALL_REDUCE:
        return _all_reduce(group)
    if kind is Kind.ALL_GATHER:
        return _all_gather(group)
    if kind is Kind.REDUCE_SCATTER:
        return _reduce_scatter(group)
    if kind is Kind.BROADCAST:
        return _broadcast(group)
    if kind is Kind.PERMUTE:
        return _moves(group, _permuted(group))
    assert kind is Kind.ALL_TO_ALL, kind
    return _moves(group, _exchanged(group))


def _layout(sizes: Sequence[int]) -> list[int]:
    """Offsets of pieces of these sizes, aligned, and the whole."""
    return list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))


def _all_reduce(group: _Group) -> Wire:
    *offsets, whole = _layout([leaf.operand_bytes for leaf in group.leaves])
    few = len(group.processes) <= FEW
    parted = few and len(group.processes) > 2 and whole >= PARTED
    mine = group.me * whole if few and not parted else 0
    before = []
    for k, leaf in enumerate(group.leaves):
        for n, position in enumerate(group.here):
            place = Place(STAGE, 0, mine + offsets[k])
            what = FOLD if n else COPY
            before.append(
                Action(what, place, group.operand(position, k), leaf.operand_bytes, leaf=k)
            )

    def fold(to: int, given: int) -> tuple[Action, ...]:
        return tuple(
            Action(
                FOLD,
                Place(STAGE, 0, to + offsets[k]),
                Place(STAGE, 0, given + offsets[k]),
                leaf.operand_bytes,
                leaf=k,
            )
            for k, leaf in enumerate(group.leaves)
        )

    after = []
    first, *further = group.here
    if parted:
        rounds, stage, pieces = _parted(group, offsets, whole)
        for k, leaf in enumerate(group.leaves):
            for begin, end, lies in pieces:
                low, high = max(offsets[k], begin), min(offsets[k] + leaf.operand_bytes, end)
                if low < high:
                    to = group.result(first, k, low - offsets[k])
                    given = Place(STAGE, 0, lies + low - begin)
                    after.append(Action(COPY, to, given, high - low, leaf=k))
    elif few:
        slots = {p: n * whole for n, p in enumerate(group.processes)}
        others = group.others()
        rounds = [
            Round(
                tuple(Message(p, mine, whole) for p in others),
                tuple(Message(p, slots[p], whole) for p in others),
            )
        ]
        stage = len(slots) * whole
        for n, slot in enumerate(slots.values()):
            for k, leaf in enumerate(group.leaves):
                to, given = group.result(first, k), Place(STAGE, 0, slot + offsets[k])
                after.append(Action(FOLD if n else COPY, to, given, leaf.operand_bytes, leaf=k))
    else:
        rounds, done = _doubling(group, whole, fold)
        stage = 2 * whole
        for k, leaf in enumerate(group.leaves):
            given = Place(STAGE, 0, done + offsets[k])
            after.append(Action(COPY, group.result(first, k), given, leaf.operand_bytes))
    after += [
        Action(COPY, group.result(position, k), group.result(first, k), leaf.operand_bytes)
        for position in further
        for k, leaf in enumerate(group.leaves)
    ]
    return Wire(stage, tuple(before), tuple(rounds), tuple(after))


def _parted(
    group: _Group, offsets: Sequence[int], whole: int
) -> tuple[list[Round], int, list[tuple[int, int, int]]]:
    """Rounds of a reduction of what lies at 0, the bytes of the stage, and where the parts of the result lie
    there in the end (begin, end, place): each process reduces a part, in the order in which all of it would
    be reduced, and gives it to the others: a reduce-scatter and an all-gather (R. Thakur, R. Rabenseifner,
    W. Gropp, as below), each in one round.

    ``offsets``: where the leaves begin.
    """
    processes, others, me = group.processes, group.others(), group.me
    share = -(-whole // (len(processes) * _ALIGNED)) * _ALIGNED
    begins = [min(n * share, whole) for n in range(len(processes) + 1)]
    begin, own = begins[me], begins[me + 1] - begins[me]
    given = {p: whole + n * share for n, p in enumerate(others)} | {group.process: begin}
    parts = {p: (begins[n], begins[n + 1] - begins[n]) for n, p in enumerate(processes)}
    total = whole + len(others) * share
    then = []
    for n, process in enumerate(processes):
        for k, (leaf, offset) in enumerate(zip(group.leaves, offsets, strict=True)):
            low = max(offset, begin) - begin
            high = min(offset + leaf.operand_bytes, begin + own) - begin
            if low < high:
                to, added = (Place(STAGE, 0, p + low) for p in (total, given[process]))
                then.append(Action(FOLD if n else COPY, to, added, high - low, leaf=k))
    rounds = [
        Round(
            tuple(Message(p, *parts[p]) for p in others),
            tuple(Message(p, given[p], own) for p in others),
            tuple(then),
        ),
        Round(
            tuple(Message(p, total, own) for p in others),
            tuple(Message(p, *parts[p]) for p in others),
        ),
    ]
    pieces = [
        (start, start + size, total if process == group.process else start)
        for process, (start, size) in parts.items()
    ]
    return rounds, total + share, pieces


def _doubling(
    group: _Group, whole: int, fold: Callable[[int, int], tuple[Action, ...]]
) -> tuple[list[Round], int]:
    """Rounds of a reduction by recursive doubling of what lies at 0, and where the result lies.

    ``fold(to, given)`` reduces what lies at ``given`` into what lies at ``to``.

    What exceeds a power of two of processes hands its part to its neighbour first, and is given the result
    in the end (R. Thakur, R. Rabenseifner, W. Gropp: Optimization of Collective Communication Operations
    in MPICH, 2005). Both of a pair reduce the lower one's part with the upper one's, for equal bits.
    """
    processes, me = group.processes, group.me
    power = 1 << (len(processes).bit_length() - 1)
    extra = len(processes) - power
    here, free = 0, whole
    rounds: list[Round] = []
    if me < 2 * extra and me % 2 == 0:
        partner = processes[me + 1]
        rounds.append(Round((Message(partner, 0, whole),), ()))
        rounds.append(Round((), (Message(partner, 0, whole),)))
        return rounds, 0
    if me < 2 * extra:
        lower = processes[me - 1]
        rounds.append(Round((), (Message(lower, free, whole),), fold(free, here)))
        here, free = free, here
    number = me // 2 if me < 2 * extra else me - extra
    distance = 1
    while distance < power:
        other = number ^ distance
        partner = processes[2 * other + 1 if other < extra else other + extra]
        then = fold(here, free) if other > number else fold(free, here)
        rounds.append(
            Round((Message(partner, here, whole),), (Message(partner, free, whole),), then)
        )
        if other < number:
            here, free = free, here
        distance *= 2
    if me < 2 * extra:
        rounds.append(Round((Message(processes[me - 1], here, whole),), ()))
    return rounds, here


def _all_gather(group: _Group) -> Wire:
    """The stage has a slot for each process, this one's first and then in a ring."""
    processes, count = group.processes, len(group.processes)
    ring = [processes[(group.me + n) % count] for n in range(count)]
    share = sum(leaf.operand_bytes for leaf in group.leaves)
    *slots, whole = accumulate((len(group.at[p]) * share for p in ring), initial=0)
    slot = dict(zip(ring, slots, strict=True))
    within = list(accumulate((leaf.operand_bytes for leaf in group.leaves), initial=0))

    def place(process: int, n: int, k: int) -> Place:
        return Place(STAGE, 0, slot[process] + n * share + within[k])

    before = [
        Action(COPY, place(group.process, n, k), group.operand(position, k), leaf.operand_bytes)
        for n, position in enumerate(group.here)
        for k, leaf in enumerate(group.leaves)
    ]
    rounds = []
    if count <= FEW:
        own = len(group.here) * share
        rounds.append(
            Round(
                tuple(Message(p, 0, own) for p in ring[1:]),
                tuple(Message(p, slot[p], len(group.at[p]) * share) for p in ring[1:]),
            )
        )
    else:
        # J. Bruck et al., Efficient algorithms for all-to-all communications in multiport
        # message-passing systems, 1997: in each round as many slots as are there, or as are missing.
        ends, distance = [*slots, whole], 1
        while distance < count:
            taken = min(distance, count - distance)
            rounds.append(
                Round(
                    (Message(ring[-distance], 0, ends[taken]),),
                    (
                        Message(
                            ring[distance],
                            ends[distance],
                            ends[distance + taken] - ends[distance],
                        ),
                    ),
                )
            )
            distance *= 2
    after = []
    for k, leaf in enumerate(group.leaves):
        first = group.here[0]
        for process in processes:
            for n, position in enumerate(group.at[process]):
                to = group.result(first, k, position * leaf.inner)
                step = group.size * leaf.inner
                after.append(
                    Action(COPY, to, place(process, n, k), leaf.inner, leaf.outer, step, leaf.inner)
                )
        after += [
            Action(COPY, group.result(position, k), group.result(first, k), leaf.result_bytes)
            for position in group.here[1:]
        ]
    return Wire(whole, tuple(before), tuple(rounds), tuple(after))


def _reduce_scatter(group: _Group) -> Wire:
    """The stage has what each process gives to this one, in ascending order, then what goes to the others."""
    pieces = [leaf.outer * leaf.inner for leaf in group.leaves]
    *within, share = _layout(pieces)
    own = len(group.here) * share
    incoming = {p: n * own for n, p in enumerate(group.processes)}
    sizes = [len(group.at[p]) * share for p in group.others()]
    *starts, whole = accumulate(sizes, initial=len(group.processes) * own)
    outgoing = dict(zip(group.others(), starts, strict=True))
    before = []
    for process in group.processes:
        slot = incoming[process] if process == group.process else outgoing[process]
        for n, target in enumerate(group.at[process]):
            for k, leaf in enumerate(group.leaves):
                to = Place(STAGE, 0, slot + n * share + within[k])
                for index, position in enumerate(group.here):
                    given = group.operand(position, k, target * leaf.inner)
                    step = group.size * leaf.inner
                    what = FOLD if index else COPY
                    before.append(
                        Action(what, to, given, leaf.inner, leaf.outer, leaf.inner, step, k)
                    )
    round_ = Round(
        tuple(Message(p, outgoing[p], len(group.at[p]) * share) for p in group.others()),
        tuple(Message(p, incoming[p], own) for p in group.others()),
    )
    after = [
        Action(
            FOLD if index else COPY,
            group.result(position, k),
            Place(STAGE, 0, incoming[process] + n * share + within[k]),
            pieces[k],
            leaf=k,
        )
        for index, process in enumerate(group.processes)
        for n, position in enumerate(group.here)
        for k in range(len(group.leaves))
    ]
    return Wire(whole, tuple(before), (round_,), tuple(after))


def _broadcast(group: _Group) -> Wire:
    offsets = list(accumulate((leaf.operand_bytes for leaf in group.leaves), initial=0))
    whole, root = offsets[-1], group.owner[group.members[0]]
    before: list[Action] = []
    if root == group.process:
        before = [
            Action(COPY, Place(STAGE, 0, offsets[k]), group.operand(0, k), leaf.operand_bytes)
            for k, leaf in enumerate(group.leaves)
        ]
        round_ = Round(tuple(Message(p, 0, whole) for p in group.others()), ())
    else:
        round_ = Round((), (Message(root, 0, whole),))
    after = [
        Action(COPY, group.result(position, k), Place(STAGE, 0, offsets[k]), leaf.operand_bytes)
        for position in group.here
        for k, leaf in enumerate(group.leaves)
    ]
    return Wire(whole, tuple(before), (round_,), tuple(after))


class _Move(NamedTuple):
    """Rows of one member's operand that become rows of another one's result. Members by position."""

    source: int
    target: int
    operand: int
    result: int
    nbytes: int
    rows: int = 1
    from_offset: int = 0
    to_offset: int = 0
    step: int = 0


def _exchanged(group: _Group) -> list[_Move]:
    moves = []
    for source in range(group.size):
        for target in range(group.size):
            if group.collective.tuple_form:
                nbytes = group.leaves[target].operand_bytes
                moves.append(_Move(source, target, target, source, nbytes))
                continue
            for k, leaf in enumerate(group.leaves):
                ends = target * leaf.inner, source * leaf.inner
                step = group.size * leaf.inner
                moves.append(_Move(source, target, k, k, leaf.inner, leaf.outer, *ends, step))
    return moves


def _permuted(group: _Group) -> list[_Move]:
    position = {member: k for k, member in enumerate(group.members)}
    pairs = [(position[s], position[t]) for s, t in group.collective.pairs if s in position]
    return [
        _Move(source, target, k, k, leaf.operand_bytes)
        for source, target in pairs
        for k, leaf in enumerate(group.leaves)
    ]


def _moves(group: _Group, moves: Sequence[_Move]) -> Wire:
    """Messages with all that one process gives to another, in the order of the moves."""
    process_of = [group.owner[member] for member in group.members]
    before: list[Action] = []
    after: list[Action] = []
    sends: list[Message] = []
    receives: list[Message] = []
    offset = 0
    for other in group.others():
        for outgoing in (True, False):
            ends = (group.process, other) if outgoing else (other, group.process)
            begin = offset
            for move in moves:
                if (process_of[move.source], process_of[move.target]) != ends:
                    continue
                place = Place(STAGE, 0, offset)
                if outgoing:
                    given = group.operand(move.source, move.operand, move.from_offset)
                    steps = move.nbytes, move.step
                    before.append(Action(COPY, place, given, move.nbytes, move.rows, *steps))
                else:
                    to = group.result(move.target, move.result, move.to_offset)
                    steps = move.step, move.nbytes
                    after.append(Action(COPY, to, place, move.nbytes, move.rows, *steps))
                offset += move.nbytes * move.rows
            if offset > begin:
                (sends if outgoing else receives).append(Message(other, begin, offset - begin))
    for move in moves:
        if process_of[move.source] == process_of[move.target] == group.process:
            to = group.result(move.target, move.result, move.to_offset)
            given = group.operand(move.source, move.operand, move.from_offset)
            after.append(Action(COPY, to, given, move.nbytes, move.rows, move.step, move.step))
    reached = {move.target for move in moves}
    for position in group.here:
        if position not in reached:
            for k, leaf in enumerate(group.leaves):
                to = group.result(position, k)
                after.append(Action(ZERO, to, to, leaf.result_bytes))
    return Wire(offset, tuple(before), (Round(tuple(sends), tuple(receives)),), tuple(after))
