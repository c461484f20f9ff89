"""The editor of block graphs: replaces values, removes and inserts nodes, and keeps all order.

Edits are collected and take effect together in `Editor.commit`, which gives every node its new operands.
Invariants: a node that came after a removed node, through data or order, comes after the stand-ins of that
node. The list of nodes stays topological, and positions follow it. Values of other blocks are not touched.
`commit` also removes nodes that nobody reads, unless they have a side effect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from stretto.collectives.ops import Collective

from .values import Barrier, BlockGraph, Node, NodeKind, Value, number


class Use(NamedTuple):
    """One place where a block reads an array: operand ``position`` of ``node``, or a result of the block if
    ``node`` is None. ``value``: the view that is read there.
    """

    node: Node | None
    position: int
    value: Value


def restricted(collective: Collective, chosen: Sequence[int]) -> Collective:
    """The collective on some of its operands."""
    return replace(
        collective,
        operands=tuple(collective.operands[k] for k in chosen),
        results=tuple(collective.results[k] for k in chosen),
    )


@dataclass(eq=False)
class Editor:
    """Edits of one block."""

    block: BlockGraph
    _uses: dict[Value, list[Use]] | None = None
    _replaced: dict[Value, Value] = field(default_factory=dict)
    _removed: dict[Node, tuple[Node, ...]] = field(default_factory=dict)
    _ahead: dict[Node, list[Node]] = field(default_factory=dict)
    _behind: dict[Node, list[Node]] = field(default_factory=dict)
    _changed: dict[Node, tuple[list[Value], list[Value], Collective | None]] = field(
        default_factory=dict
    )

    @cached_property
    def ordered(self) -> set[Node]:
        """Nodes that others come after by order alone, in the block before its first edit."""
        found: set[Node] = set()
        for node in self.block.nodes:
            found.update(node.order)
            for value in node.operands:
                if value.order or value.barrier is not None:
                    found.update(value.comes_after())
                if value.type is None and value.node is not None:
                    found.add(value.node)
        for result in self.block.results:
            found.update(result.comes_after())
        return found

    @property
    def has_edits(self) -> bool:
        return bool(self._replaced or self._removed or self._changed)

    def uses(self, value: Value) -> Sequence[Use]:
        """The uses of an array, in the block as it was after the last commit."""
        if self._uses is None:
            found: dict[Value, list[Use]] = defaultdict(list)
            for node in self.block.nodes:
                for i, operand in enumerate(node.operands):
                    if operand.type is not None:
                        found[operand.root].append(Use(node, i, operand))
            for i, result in enumerate(self.block.results):
                found[result.root].append(Use(None, i, result))
            self._uses = found
        return self._uses.get(value.root, ())

    def replace(self, old: Value, new: Value) -> None:
        """Make all readers of ``old`` read ``new``. They still come after everything they came after."""
        known = self._replaced.get(new.root)
        if known is not None:  # chains of replacements may have thousands of links
            new = known.view(new.order, new.barrier)
        self._replaced[old.root] = new

    def remove(self, node: Node, instead: Iterable[Node] = ()) -> None:
        """Remove a node. What came after it comes after ``instead``, and after everything it came after."""
        before = [*instead, *node.order, *(n for v in node.operands for n in v.producers)]
        self._removed[node] = tuple(dict.fromkeys(before))

    def change(
        self,
        node: Node,
        operands: list[Value],
        results: list[Value],
        collective: Collective | None = None,
    ) -> None:
        """Give a node other operands and results; it keeps its place in every order."""
        self._changed[node] = (operands, results, collective)

    def restrict(self, node: Node, chosen: Sequence[int]) -> None:
        """Keep only some operands of a collective, and the results that belong to them."""
        assert node.collective is not None
        operands, results = (
            [values[k] for k in chosen] for values in (node.operands, node.results)
        )
        self.change(node, operands, results, restricted(node.collective, chosen))

    def put_ahead(self, of: Node, nodes: Iterable[Node]) -> None:
        """Put new nodes right before one, behind those put there already."""
        self._ahead.setdefault(of, []).extend(nodes)

    def put_behind(self, of: Node, nodes: Iterable[Node]) -> None:
        """Put new nodes right behind one, behind those put there already."""
        self._behind.setdefault(of, []).extend(nodes)

    def commit(self) -> None:
        """Apply the edits."""
        for node, (operands, results, collective) in self._changed.items():
            node.operands, node.results, node.collective = operands, results, collective
            for index, result in enumerate(results):
                result.index = index
        nodes: list[Node] = []
        for node in self.block.nodes:
            nodes += self._ahead.get(node, ())
            nodes.append(node)
            nodes += self._behind.get(node, ())
        resolver = _Resolver(self._replaced, self._removed)
        kept = [node for node in nodes if node not in self._removed]
        for node in kept:
            _resolve(node, resolver)
        self.block.results[:] = [resolver.value(v) for v in self.block.results]
        _drop_unread(self.block, kept)
        self._uses = None
        self._replaced.clear()
        self._removed.clear()
        self._ahead.clear()
        self._behind.clear()
        self._changed.clear()


def _resolve(node: Node, resolver: _Resolver) -> None:
    for value in node.operands:
        if resolver.may_change(value):
            node.operands = [resolver.value(v) for v in node.operands]
            break
    if node.order:
        node.order = resolver.order(node.order)
    if node.selector is not None:
        node.selector = resolver.value(node.selector)


class _Resolver:
    """Gives the values and nodes that stand in for others after the edits."""

    def __init__(self, replaced: dict[Value, Value], removed: dict[Node, tuple[Node, ...]]) -> None:
        self._replaced, self._removed = replaced, removed
        self._stand_ins: dict[Node, tuple[Node, ...]] = {}
        self._values: dict[Value, Value] = {}
        self._barriers: set[Barrier] = set()

    def may_change(self, value: Value) -> bool:
        """Whether another value may stand in for it: most stay, and need no closer look."""
        return (
            value.root in self._replaced
            or bool(value.order)
            or value.barrier is not None
            or value.type is None
        )

    def value(self, value: Value) -> Value:
        if not self.may_change(value):
            return value
        if value not in self._values:
            self._values[value] = self._resolved(value)
        return self._values[value]

    def _resolved(self, value: Value) -> Value:
        barrier = value.barrier
        if barrier is not None:
            self._settle(barrier)
        order = self.order(value.order)
        new = self._replaced.get(value.root)
        if new is not None:
            return self.value(new).view(order, barrier)
        if value.type is None and value.node in self._removed:
            assert value.node is not None
            return Value(None, order=tuple(dict.fromkeys((*self.order((value.node,)), *order))))
        if order == value.order:
            return value
        return Value(
            value.type, value.node, value.index, order=order, view_of=value, barrier=barrier
        )

    def _settle(self, barrier: Barrier) -> None:
        """Resolve the values that enter a barrier, after those that enter barriers before it."""
        todo = [barrier]
        while todo:
            current = todo[-1]
            seen = [(v, self._replaced.get(v.root)) for v in current.operands]
            before = [v.barrier for pair in seen for v in pair if v is not None]
            waiting = [b for b in before if b is not None and b not in self._barriers]
            if current not in self._barriers and waiting:
                todo += waiting
                continue
            todo.pop()
            if current not in self._barriers:
                self._barriers.add(current)
                current.operands = tuple([self._entering(v) for v in current.operands])

    def _entering(self, value: Value) -> Value:
        """What enters a barrier. Of an array that nobody reads any more it is what came before it."""
        if value.root in self._replaced or value.node not in self._removed:
            return self.value(value)
        return Value(None, order=self.order(value.producers), barrier=value.barrier)

    def order(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """The nodes, with stand-ins for those that are removed."""
        if not any(node in self._removed for node in nodes):
            return tuple(nodes)
        return tuple(dict.fromkeys(n for node in nodes for n in self._kept(node)))

    def _kept(self, node: Node) -> tuple[Node, ...]:
        """The node, or its stand-ins. Removed nodes are followed upwards, without recursion."""
        if node not in self._removed:
            return (node,)
        todo = [node]
        while todo:
            current = todo[-1]
            above = self._removed[current]
            waiting = [n for n in above if n in self._removed and n not in self._stand_ins]
            if waiting:
                todo += waiting
                continue
            todo.pop()
            found = (m for n in above for m in (self._stand_ins[n] if n in self._removed else (n,)))
            self._stand_ins[current] = tuple(dict.fromkeys(found))
        return self._stand_ins[node]


def _drop_unread(block: BlockGraph, nodes: list[Node]) -> None:
    """Make ``nodes`` the nodes of the block, without those that nobody reads and that have no side effect."""
    read = {v.root for v in block.results}
    dropped: dict[Node, tuple[Node, ...]] = {}
    kept: list[Node] = []
    for node in reversed(nodes):
        droppable = node.kind is NodeKind.LOGICAL_ID or (
            node.kind is NodeKind.COMPUTE and not node.has_side_effect
        )
        if droppable and not any(v in read for v in node.results):
            before = [*node.order, *(n for v in node.operands for n in v.producers)]
            dropped[node] = tuple(dict.fromkeys(before))
            continue
        read.update(v.root for v in node.operands)
        kept.append(node)
    kept.reverse()
    if dropped:
        resolver = _Resolver({}, dropped)
        for node in kept:
            _resolve(node, resolver)
        block.results[:] = [resolver.value(v) for v in block.results]
    number(kept)
    block.nodes = kept
