"""Which parts of a loop's body run an iteration early, and which an iteration late.

A collective is *early* if its operands depend, through any number of iterations, neither on collectives
other than early ones nor on its own result. An example is the gather of the next layer's weights, which only
a counter selects. It moves to stage 0, with all nodes of its iteration that it needs. A collective is *late*
if neither collectives other than late ones nor it itself depend on its result, through any number of
iterations. An example is the reduction of a weight's gradient that is written into a stack. The collective
stays in stage 1 with the rest of the body; the nodes that depend on its result move to stage 2.

Invariants: along data and order of one iteration the stage never decreases, and from one iteration to the
next it decreases by at most one, which is what `skew` needs. Sends, receives and nodes with other side
effects stay in stage 1. A body in which tokens or control dependencies order any nodes is not staged. Stages
follow from the text of the module and the table of costs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from math import fsum

from stretto.collectives.ops import Kind

from ..flops import flops
from ..values import BlockGraph, Node, NodeKind, Value
from .costs import CostTable

EARLY, MAIN, LATE = 0, 1, 2


@dataclass
class Stages:
    """``of``: the stage of each node that is not in `MAIN`. ``moved``: the early and the late collectives."""

    of: dict[Node, int] = field(default_factory=dict)
    moved: tuple[Node, ...] = ()

    def __getitem__(self, node: Node) -> int:
        return self.of.get(node, MAIN)

    @property
    def first(self) -> int:
        return EARLY if EARLY in self.of.values() else MAIN

    @property
    def last(self) -> int:
        return LATE if LATE in self.of.values() else MAIN


class LoopBody:
    """Dependences in a loop's body, within an iteration and from one iteration to the next.

    ``before`` and ``after``: the nodes right above and below a node. ``reads``: the carries that it reads;
    ``readers``: the nodes that read a carry. ``carries``: the carries that a node's results become.
    """

    def __init__(self, body: BlockGraph) -> None:
        self.body = body
        self.number = {parameter: k for k, parameter in enumerate(body.parameters)}
        self.nodes = [node for node in body.nodes if node.kind is not NodeKind.LOGICAL_ID]
        self.before = {node: tuple(dict.fromkeys(self._before(node))) for node in self.nodes}
        self.reads = {
            node: tuple(dict.fromkeys(k for v in _seen(node) if (k := self._carry(v)) is not None))
            for node in self.nodes
        }
        self.after: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        self.readers: dict[int, list[Node]] = {}
        for node in self.nodes:
            for earlier in self.before[node]:
                self.after[earlier].append(node)
            for k in self.reads[node]:
                self.readers.setdefault(k, []).append(node)
        # By carry: the node, or the other carry, that gives its value for the next iteration.
        self.source: dict[int, Node | int | None] = {}
        self.carries: dict[Node, list[int]] = {node: [] for node in self.nodes}
        self.handed: dict[int, list[int]] = {}  # by carry: the carries that get its value
        for k, result in enumerate(body.results):
            source: Node | int | None = self._carry(result)
            if isinstance(source, int):
                self.handed.setdefault(source, []).append(k)
            else:
                source = _producer(result)
                if source is not None:
                    self.carries[source].append(k)
            self.source[k] = source

    def invariant(self, k: int) -> bool:
        """Whether a carry is the same in all iterations."""
        return self.body.results[k].root is self.body.parameters[k]

    def _carry(self, value: Value) -> int | None:
        k = self.number.get(value.root)
        return None if k is None or self.invariant(k) else k

    def _before(self, node: Node) -> Iterator[Node]:
        for value in _seen(node):
            producer = _producer(value)
            if producer is not None:
                yield producer
            yield from value.order
        yield from node.order

    def above(self, node: Node) -> set[Node]:
        """What a node depends on, in its iteration and those before; itself if it does on itself."""
        return _closure(self.before[node], self.reads[node], self._up)

    def below(self, node: Node) -> set[Node]:
        """What depends on a node, in its iteration and those after."""
        return _closure(self.after[node], self.carries[node], self._down)

    def _up(self, at: Node | int) -> Iterator[Node | int]:
        if isinstance(at, int):
            source = self.source[at]
            if source is not None:
                yield source
        else:
            yield from self.before[at]
            yield from self.reads[at]

    def _down(self, at: Node | int) -> Iterator[Node | int]:
        if isinstance(at, int):
            yield from self.readers.get(at, ())
            yield from self.handed.get(at, ())
        else:
            yield from self.after[at]
            yield from self.carries[at]


def _closure(
    nodes: Iterable[Node],
    carries: Iterable[int],
    step: Callable[[Node | int], Iterator[Node | int]],
) -> set[Node]:
    stack: list[Node | int] = [*nodes, *carries]
    seen: set[Node | int] = set()
    while stack:
        at = stack.pop()
        if at not in seen:
            seen.add(at)
            stack += step(at)
    return {at for at in seen if not isinstance(at, int)}


def _seen(node: Node) -> Iterator[Value]:
    """The values that a node reads, and those that enter the fences through which it reads them."""
    for value in node.operands:
        yield value
        fence = value.fence
        if fence is not None:
            yield from fence.operands
    if node.selector is not None:
        yield node.selector


def _producer(value: Value) -> Node | None:
    node = value.root.node
    if node is None or node.kind in (NodeKind.CHEAP, NodeKind.LOGICAL_ID):
        return None
    return node


def is_plain(body: BlockGraph) -> bool:
    """Whether every iteration of a body does the same, on all devices."""
    return not any(
        node in body.unread or (node.collective is not None and node.collective.valid_iterations)
        for node in body.nodes
    )


def is_ordered(body: BlockGraph) -> bool:
    """Whether tokens or control dependencies put anything in a body in an order."""
    return any(
        node.order or any(v.order and v.fence is None for v in node.operands) for node in body.nodes
    )


@dataclass(frozen=True)
class Movable:
    """The collectives of a body that can leave their iteration. ``early``: those with the earliest readers
    first. ``above``: what each early one depends on."""

    early: tuple[Node, ...] = ()
    late: frozenset[Node] = frozenset()
    above: Mapping[Node, set[Node]] = field(default_factory=dict)


def movable(loop_body: LoopBody, costs: CostTable) -> Movable:
    """What can move in a body: nothing if tokens or control dependencies order it."""
    if is_ordered(loop_body.body):
        return Movable()
    free = [
        node
        for node in loop_body.nodes
        if node.collective is not None and node.collective.kind not in (Kind.SEND, Kind.RECV)
    ]
    above = {node: loop_body.above(node) for node in free}
    below = {node: loop_body.below(node) for node in free}
    early, late = _settled(free, above), _settled(free, below)

    def seconds(nodes: Collection[Node]) -> float:
        # Exact, since sets have an order of their own in each process.
        return fsum(_seconds(node, costs) for node in nodes if node.kind is NodeKind.COMPUTE)

    both = early & late
    rather_late = {node for node in both if seconds(above[node]) > seconds(below[node])}
    early = _settled([n for n in free if n in early - rather_late], above)
    late = _settled([n for n in free if n in late - early], below)

    def first_reader(node: Node) -> int:
        return min((a.position for a in loop_body.after[node]), default=node.position)

    # Of those with the same first reader the first: nothing may follow from the order of a set.
    moving = sorted(early, key=lambda node: (first_reader(node), node.position))
    return Movable(tuple(moving), frozenset(late), {node: above[node] for node in moving})


def stages_of(loop_body: LoopBody, found: Movable, most: float) -> Stages:
    """The stages of a body. ``found``: what can move in it. ``most``: the share of the early collectives that
    moves, those with the earliest readers first."""
    early = _settled(found.early[: round(len(found.early) * most)], found.above)
    stages = _staged(loop_body, early, found.late)
    if stages is None:
        stages = _staged(loop_body, early, frozenset())
    assert stages is not None
    return stages


def _settled(nodes: Iterable[Node], related: Mapping[Node, set[Node]]) -> set[Node]:
    """The largest set of these collectives that are related to none but each other, not to themselves, and to
    no other node with a side effect."""
    found = {node for node in nodes if node not in related[node]}
    effects = {node: {r for r in related[node] if r.has_side_effect} for node in found}
    while True:
        kept = {node for node in found if effects[node] <= found}
        if kept == found:
            return found
        found = kept


def _staged(loop_body: LoopBody, early: Set[Node], late: Set[Node]) -> Stages | None:
    """The stages with these collectives moved; None where they would fall by more than one."""
    of: dict[Node, int] = {}
    for node in reversed(loop_body.nodes):
        if node in early or any(of.get(a) == EARLY for a in loop_body.after[node]):
            of[node] = EARLY
    for node in loop_body.nodes:
        if any(b in late or of.get(b) == LATE for b in loop_body.before[node]):
            if node in of:
                return None
            of[node] = LATE
    for k, source in loop_body.source.items():
        if isinstance(source, Node) and of.get(source) == LATE:
            # A carry whose value becomes another carry is read in stage 1 at the latest.
            if loop_body.handed.get(k):
                return None
            if any(of.get(reader) == EARLY for reader in loop_body.readers.get(k, ())):
                return None
    moved = tuple(node for node in loop_body.nodes if node in early or node in late)
    return Stages(of, moved)


def _seconds(node: Node, costs: CostTable) -> float:
    written = sum(v.type.nbytes for v in node.results if v.type is not None)
    modelled = costs.compute.seconds(flops(node.instruction), 2.0 * written)
    return costs.taken(node.instruction, modelled)
