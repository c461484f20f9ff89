"""One order of collectives on all ranks: certificates, and what is done where they differ.

A `Schedule` is what one rank's program will communicate, in the order it means to, with the partial order
that its data and tokens really require. Loops and branches that hold collectives are entries with schedules
of their own. Schedules are compared by `certificate`: a hash of everything that must agree (kinds, groups,
types, reducers, nesting, trip counts), and of nothing else (names, source lines, compute).

Where certificates differ, `reconcile` gets the schedules of all ranks and either finds one order that every
rank can follow, the same on all of them, or raises `OrderConflict`, which says what contradicts what. It is
pure: every rank computes it from the same input and comes to the same answer.

The method. An entry is matched across ranks by what it is (`Entry.key` restricted to one group), the k-th of
its key with the k-th of its key. Matched entries are the nodes of one graph; each rank adds the edges of its
partial order, and a receive comes after its send. A topological order of that graph, ties broken by the
lowest rank's own order, is the common order; a cycle is a contradiction.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .ops import Collective, Kind


@dataclass(frozen=True)
class Entry:
    """A collective, a loop or a branch in a schedule.

    ``after`` are positions (in the same schedule) of entries that data or tokens put before this one; what
    follows from the others' ``after`` need not be listed.
    ``key`` is what must agree between ranks, apart from ``members``: one tuple of process ids for each group
    (or pair, for point-to-point), with the logical ids it stands for.
    """

    kind: str
    key: str
    groups: tuple[tuple[int, ...], ...] = ()
    after: tuple[int, ...] = ()
    children: tuple[Schedule, ...] = ()
    trip_count: int | None = None
    name: str = ""
    source: str = ""

    def describe(self) -> str:
        """The entry in one line, for errors."""
        where = f" at {self.source}" if self.source else ""
        what = self.key or self.kind
        if self.kind == "loop":
            count = "an unknown number of" if self.trip_count is None else str(self.trip_count)
            what = f"loop of {count} iterations"
        if self.groups:
            what += f" of devices {_braces(self.groups)}"
        return f"{what} %{self.name}{where}" if self.name else f"{what}{where}"


def _braces(groups: Sequence[tuple[int, ...]], limit: int = 64) -> str:
    """``{0,1},{2,3}``, cut short."""
    text = ",".join("{" + ",".join(map(str, group)) + "}" for group in groups[:limit])
    return text if len(text) <= limit else text[:limit] + "…"


@dataclass(frozen=True)
class Schedule:
    """Entries in the order in which one rank means to start them."""

    entries: tuple[Entry, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.entries)

    def walk(self) -> Iterator[Entry]:
        """Every entry, outer before inner."""
        for entry in self.entries:
            yield entry
            for child in entry.children:
                yield from child.walk()

    def to_bytes(self) -> bytes:
        """For the exchange between ranks; inverse of `from_bytes`."""
        return json.dumps([asdict(e) for e in self.entries], separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Schedule:
        return _schedule_from_json(json.loads(data))


def _schedule_from_json(entries: Sequence[Mapping[str, Any]]) -> Schedule:
    return Schedule(
        tuple(
            Entry(
                kind=e["kind"],
                key=e["key"],
                groups=tuple(map(tuple, e["groups"])),
                after=tuple(e["after"]),
                children=tuple(_schedule_from_json(c["entries"]) for c in e["children"]),
                trip_count=e["trip_count"],
                name=e["name"],
                source=e["source"],
            )
            for e in entries
        )
    )


def entry_of(collective: Collective, after: tuple[int, ...] = (), reducer: str = "") -> Entry:
    """The schedule entry of a collective. ``reducer`` identifies a reducer that is not a native one."""
    c = collective
    operands = ", ".join(map(str, c.operands))
    parts = [f"{c.kind}({operands})"]
    if c.results and c.kind not in (Kind.ALL_REDUCE, Kind.PERMUTE, Kind.BROADCAST):
        parts.append("-> " + ", ".join(map(str, c.results)))
    if c.reduction is not None or reducer:
        parts.append(f"reducer={c.reduction or reducer}")
    if c.dimension >= 0:
        parts.append(f"dimension={c.dimension}")
    if c.kind in (Kind.SEND, Kind.RECV):
        parts.append(f"channel={c.channel}")
    if c.tuple_form:
        parts.append("tuple")
    if c.dynamic_root:
        parts.append("dynamic_root")
    if c.valid_iterations:
        parts.append(
            "valid=" + ",".join(":".join(map(str, bounds)) for bounds in c.valid_iterations)
        )
    return Entry(
        kind=str(c.kind),
        key=" ".join(parts),
        groups=c.pairs if c.is_point_to_point else c.groups,
        after=after,
        name=c.name,
        source=c.source,
    )


def certificate(schedule: Schedule) -> bytes:
    """32 bytes that are equal where two schedules communicate the same things in the same order."""
    digest = hashlib.sha256()

    def add(part: Schedule) -> None:
        digest.update(b"(")
        for e in part.entries:
            digest.update(json.dumps([e.kind, e.key, e.groups, e.trip_count]).encode())
            for child in e.children:
                add(child)
        digest.update(b")")

    add(schedule)
    return digest.digest()


class OrderConflict(Exception):
    """The schedules of the ranks cannot be followed together. ``str`` says why, entry by entry."""


# The common order as each rank needs it: for every schedule of the tree, by path, the permutation of its
# entries. A path alternates entry position and child position: () is the outermost schedule.
CommonOrder = dict[tuple[int, ...], tuple[int, ...]]


def reconcile(
    schedules: Mapping[int, Schedule], owner: Mapping[int, int]
) -> dict[int, CommonOrder]:
    """One order for all ranks. ``schedules`` by rank; ``owner`` maps logical ids to ranks.

    Returns for each rank the permutation of its entries. Raises `OrderConflict`.
    """
    orders: dict[int, CommonOrder] = {rank: {} for rank in schedules}
    _reconcile_level({r: (s, ()) for r, s in schedules.items()}, owner, orders)
    return orders


def self_check(schedule: Schedule, owner: Mapping[int, int]) -> None:
    """Raise `OrderConflict` where the program, run by every device alike, must wait for itself.

    That is a cycle through sends and receives: a device sends only after it received, all the way round.
    """
    _check_rings(schedule)
    for entry in schedule.entries:
        for child in entry.children:
            self_check(child, owner)


def check_matched(schedule: Schedule) -> None:
    """Raise `OrderConflict` where the program, run by every device alike, has a send without a receive.

    Or a receive without a send, or one in a loop or branch and the other outside of it.
    """
    counts: dict[tuple, int] = defaultdict(int)
    last: dict[tuple, Entry] = {}
    for entry in schedule.entries:
        if entry.kind in (Kind.SEND, Kind.RECV):
            is_send = entry.kind == Kind.SEND
            key = entry.key if is_send else _send_key(entry.key)
            for pair in entry.groups:
                counts[key, pair] += 1 if is_send else -1
                last[key, pair, is_send] = entry
        for child in entry.children:
            check_matched(child)
    for (key, pair), surplus in counts.items():
        if surplus:
            entry = last[key, pair, surplus > 0]
            lacking = "receive" if surplus > 0 else "send"
            raise OrderConflict(
                f"{entry.describe()} has no {lacking} that matches it between devices "
                f"{pair[0]} and {pair[1]}: one of the same channel_id, type, pairs and valid iterations, "
                "in the same loop or branch"
            )


@dataclass
class _Node:
    """Entries of several ranks that are one operation. ``at`` is its position in each rank's schedule."""

    label: tuple
    at: dict[int, int] = field(default_factory=dict)


def _participants(entry: Entry, owner: Mapping[int, int]) -> set[int]:
    """Ranks that take part in an entry. A send is its source's, a receive its target's."""
    if entry.children:
        return set().union(
            *(_participants(e, owner) for child in entry.children for e in child.entries)
        )
    if entry.kind == Kind.SEND:
        return {owner[source] for source, _ in entry.groups}
    if entry.kind == Kind.RECV:
        return {owner[target] for _, target in entry.groups}
    return {owner[member] for group in entry.groups for member in group}


def _labels(entry: Entry, rank: int, owner: Mapping[int, int]) -> list[tuple]:
    """What this entry is to this rank: one label for each of its groups that the rank is in."""
    if entry.children:
        inside = sorted(
            str(label)
            for child in entry.children
            for e in child.entries
            for label in _labels(e, rank, owner)
        )
        return [(entry.kind, entry.trip_count, tuple(inside))] if inside else []
    labels = []
    for group in entry.groups:
        if entry.kind == Kind.SEND:
            ranks = {owner[group[0]]}
        elif entry.kind == Kind.RECV:
            ranks = {owner[group[1]]}
        else:
            ranks = {owner[member] for member in group}
        if rank in ranks:
            labels.append((entry.kind, entry.key, group))
    return labels


def _reconcile_level(
    level: Mapping[int, tuple[Schedule, tuple[int, ...]]],
    owner: Mapping[int, int],
    orders: dict[int, CommonOrder],
) -> None:
    nodes: dict[tuple, _Node] = {}
    node_of: dict[tuple[int, int], list[tuple]] = {}
    for rank, (schedule, _) in level.items():
        seen: dict[tuple, int] = defaultdict(int)
        for position, entry in enumerate(schedule.entries):
            ids = []
            for label in _labels(entry, rank, owner):
                ident = (label, seen[label])
                seen[label] += 1
                nodes.setdefault(ident, _Node(label)).at[rank] = position
                ids.append(ident)
            node_of[rank, position] = ids
    _check_complete(level, nodes, owner)

    # All groups of one operation start together: merge the nodes that any rank has in one entry.
    leader = {ident: ident for ident in nodes}

    def find(ident: tuple) -> tuple:
        while leader[ident] != ident:
            leader[ident] = leader[leader[ident]]
            ident = leader[ident]
        return ident

    for ids in node_of.values():
        for other in ids[1:]:
            leader[find(other)] = find(ids[0])

    before: dict[tuple, set[tuple]] = {find(i): set() for i in nodes}
    why: dict[tuple[tuple, tuple], int] = {}
    for rank, (schedule, _) in level.items():
        # Requirements reach through entries of which this rank is no part.
        nearest: list[set[int]] = []
        for position, entry in enumerate(schedule.entries):
            direct: set[int] = set()
            for earlier in entry.after:
                direct |= {earlier} if node_of[rank, earlier] else nearest[earlier]
            nearest.append(direct)
            for ident in node_of[rank, position][:1]:
                for earlier in sorted(direct):
                    a, b = find(node_of[rank, earlier][0]), find(ident)
                    if a != b:
                        before[b].add(a)
                        why.setdefault((a, b), rank)
    for ident, node in nodes.items():
        kind, key, *_ = node.label
        if kind == Kind.RECV:
            send = ((str(Kind.SEND), _send_key(key), node.label[2]), ident[1])
            if send in nodes:
                before[find(ident)].add(find(send))
                why.setdefault((find(send), find(ident)), min(nodes[send].at))

    # Ties go to the lowest rank's own order, then to the others': positions as rank 0 lists them.
    priority: dict[tuple, tuple[int, int]] = {}
    for ident, node in nodes.items():
        rank = min(node.at)
        best = (node.at[rank], rank)
        priority[find(ident)] = min(priority.get(find(ident), best), best)
    order = _topological(before, priority)
    if len(order) < len(before):
        raise OrderConflict(_describe_cycle(before, set(order), nodes, find, why, level))

    place = {ident: index for index, ident in enumerate(order)}
    for rank, (schedule, path) in level.items():
        # Entries of which this rank is no part keep to what they come after.
        last = -1
        keys: list[tuple[int, int]] = []
        for position in range(len(schedule.entries)):
            ids = node_of[rank, position]
            last = place[find(ids[0])] if ids else last
            keys.append((last, position))
        orders[rank][path] = tuple(sorted(range(len(keys)), key=keys.__getitem__))

    for node in nodes.values():
        rank0 = min(node.at)
        entry = level[rank0][0].entries[node.at[rank0]]
        for child in range(len(entry.children)):
            _reconcile_level(
                {
                    rank: (
                        level[rank][0].entries[position].children[child],
                        (*level[rank][1], position, child),
                    )
                    for rank, position in node.at.items()
                },
                owner,
                orders,
            )


def _send_key(recv_key: str) -> str:
    """The key of the send that feeds a receive: it names the data as operand instead of result."""
    _, _, rest = recv_key.partition("-> ")
    types, _, further = rest.partition(" channel=")
    return f"{Kind.SEND}({types}) channel={further}"


def _check_complete(
    level: Mapping[int, tuple[Schedule, tuple[int, ...]]],
    nodes: Mapping[tuple, _Node],
    owner: Mapping[int, int],
) -> None:
    """Every rank that takes part in an operation must have it."""
    lacking: dict[tuple, set[int]] = {}
    for ident, node in nodes.items():
        rank, position = next(iter(sorted(node.at.items())))
        entry = level[rank][0].entries[position]
        if entry.children:
            needed = _participants(entry, owner)
        elif entry.kind == Kind.SEND:
            needed = {rank}
            source, target = node.label[2]
            if owner[target] in level and not _has_receive(nodes, node.label, ident[1]):
                lacking[ident] = {owner[target]}
        elif entry.kind == Kind.RECV:
            needed = {rank}
            source, target = node.label[2]
            send = ((str(Kind.SEND), _send_key(node.label[1]), node.label[2]), ident[1])
            if owner[source] in level and send not in nodes:
                lacking[ident] = {owner[source]}
        else:
            needed = {owner[member] for member in node.label[2]}
        missing = {r for r in needed if r in level and r not in node.at}
        if missing:
            lacking[ident] = missing
    if not lacking:
        return
    # The first difference: the unmatched entry that its rank would start first, lowest rank first.
    first = min(lacking, key=lambda i: min((p, r) for r, p in nodes[i].at.items()))
    rank, position = min(nodes[first].at.items())
    lines = [f"rank {rank}: {level[rank][0].entries[position].describe()}"]
    for other in sorted(lacking[first]):
        unmatched = [nodes[i].at[other] for i in lacking if other in nodes[i].at and i != first]
        if unmatched:
            counterpart = level[other][0].entries[min(unmatched)]
            lines.append(f"rank {other}: {counterpart.describe()}")
        else:
            place = level[other][0].entries[position : position + 1]
            instead = "".join(f"; in its place: {entry.describe()}" for entry in place)
            lines.append(f"rank {other}: nothing that matches it{instead}")
    raise OrderConflict("the ranks do not communicate the same things:\n  " + "\n  ".join(lines))


def _has_receive(nodes: Mapping[tuple, _Node], label: tuple, count: int) -> bool:
    return any(
        other[1] == count
        and other[0][0] == Kind.RECV
        and other[0][2] == label[2]
        and _send_key(other[0][1]) == label[1]
        for other in nodes
        if other[0][0] == Kind.RECV
    )


def _topological(
    before: Mapping[tuple, set[tuple]], priority: Mapping[tuple, tuple[int, int]]
) -> list[tuple]:
    """Topological order by priority; shorter than ``before`` where there is a cycle."""
    after: dict[tuple, list[tuple]] = defaultdict(list)
    waiting = {ident: len(preds) for ident, preds in before.items()}
    for ident, preds in before.items():
        for pred in preds:
            after[pred].append(ident)
    numbered = {ident: n for n, ident in enumerate(before)}
    ready = [(priority[i], numbered[i], i) for i, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        *_, ident = heapq.heappop(ready)
        order.append(ident)
        for follower in after[ident]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (priority[follower], numbered[follower], follower))
    return order


def _describe_cycle(before, done, nodes, find, why, level) -> str:  # type: ignore[no-untyped-def]
    """The contradiction, as a list of 'a before b, on rank r'."""
    ident = next(i for i in before if i not in done)
    path: list[tuple] = []
    while ident not in path:
        path.append(ident)
        ident = next(p for p in before[ident] if p not in done)
    cycle = path[path.index(ident) :][::-1]

    def text(i: tuple, rank: int) -> str:
        members = [n for n in nodes if find(n) == i]
        for member in members:
            if rank in nodes[member].at:
                return level[rank][0].entries[nodes[member].at[rank]].describe()
        node = nodes[members[0]]
        other = min(node.at)
        return f"{level[other][0].entries[node.at[other]].describe()} (of rank {other})"

    lines = []
    for a, b in zip(cycle, cycle[1:] + cycle[:1], strict=True):
        rank = why[a, b]
        lines.append(f"rank {rank}: {text(a, rank)} before {text(b, rank)}")
    return "the ranks require contradictory orders:\n  " + "\n  ".join(lines)


def _check_rings(schedule: Schedule) -> None:
    """Cycles of sends and receives when every device runs this schedule."""
    entries = schedule.entries
    if not any(e.kind == Kind.RECV for e in entries):
        return
    devices = sorted(
        {d for e in entries if e.kind in (Kind.SEND, Kind.RECV) for g in e.groups for d in g}
    )
    before: dict[tuple, set[tuple]] = {}
    counts: dict[tuple, int] = defaultdict(int)
    sends: dict[tuple, tuple] = {}
    receives: list[tuple[tuple, tuple]] = []
    for position, entry in enumerate(entries):
        for device in devices:
            before[device, position] = {(device, p) for p in entry.after}
        if entry.kind in (Kind.SEND, Kind.RECV):
            key = entry.key if entry.kind == Kind.SEND else _send_key(entry.key)
            for source, target in entry.groups:
                label = (entry.kind, key, source, target)
                counts[label] += 1
                if entry.kind == Kind.SEND:
                    sends[key, source, target, counts[label]] = (source, position)
                else:
                    receives.append(((key, source, target, counts[label]), (target, position)))
    for label, node in receives:
        if label in sends:
            before[node].add(sends[label])
    order = _topological(before, {i: (i[1], i[0]) for i in before})
    if len(order) == len(before):
        return
    done = set(order)
    ident = next(i for i in before if i not in done)
    path: list[tuple] = []
    while ident not in path:
        path.append(ident)
        ident = next(p for p in before[ident] if p not in done)
    cycle = path[path.index(ident) :][::-1]
    lines = [f"device {device}: {entries[position].describe()}" for device, position in cycle]
    raise OrderConflict(
        "sends and receives wait for each other in a cycle:\n  " + "\n  then ".join(lines)
    )
