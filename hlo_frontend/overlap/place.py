"""The steps of a plan as an order of nodes, which `carve` cuts into segments.

The kernels between two starts or waits become one segment. Its nodes stand in an order that follows from
what they compute (`structure`), so that equal layers give equal segments although the schedule, and the
module, may list their kernels differently.

Nodes that only rename data (reshapes, slices, broadcasts) are no tasks of the plan. If a kernel reads
through one, every segment that needs it computes it anew, so that no copy is passed between segments. If a
collective, a loop or the block's result needs one, it must exist as an array: the last segment before makes
it, or a segment of its own if that one runs too early to have its source.

A bucket becomes one collective with the operands of all its members. Its name is theirs, joined by ``+``.

Invariant: every node of the block stands behind all nodes that it needs; the order follows from block and
plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..carve import Await
from ..values import BlockGraph, Node, NodeKind, Value, carried_results
from .model import Graph, Op, Task
from .replay import Phase, Step
from .structure import Structure


def place(
    block: BlockGraph, graph: Graph, steps: Sequence[Step], structure: Structure
) -> list[Node | Await]:
    """The block's nodes in the order of ``steps``, which are of ``graph``, a graph of the whole block.
    ``structure`` orders the nodes of all segments of its module."""
    placer = _Placer(block, graph, structure)
    for index, phase in steps:
        task = graph.tasks[index]
        if phase is Phase.WAIT:
            placer.wait(task)
        elif task.ops[0].node.is_runtime:
            placer.start(task)
        else:
            placer.kernel(task.ops)
    return placer.finish()


class _Placer:
    """Collects segments, and the collectives, loops, branches and waits between them, in order."""

    def __init__(self, block: BlockGraph, graph: Graph, structure: Structure) -> None:
        self.block = block
        self.structure = structure
        self.items: list[set[Node] | Node | Await] = []
        self.logical: list[Node] = []
        self.last: set[Node] | None = None  # the last segment, open or not
        self.number = 0  # of segments begun
        listed = {op.node for task in graph.tasks for op in task.ops}
        self.renaming = {
            node for node in block.nodes if node not in listed and node.kind is NodeKind.COMPUTE
        }
        runtime = [node for node in block.nodes if node.is_runtime]
        wanted = [v.root.node for node in runtime for v in node.operands if v.type is not None]
        wanted += [v.root.node for v in block.results]
        self.once = {node for node in wanted if node in self.renaming}
        self.started: dict[int, Node] = {}  # by task: a collective, or the one that a bucket became
        self.crossing: dict[Node, Node] = {}  # the same, by each collective that crosses
        for index in graph.crossings():
            node = _started(graph.tasks[index])
            self.crossing |= {op.node: node for op in graph.tasks[index].ops}
        self.placed: set[Node] = set()  # nodes that are made once and have their place
        # How many segments must have begun before one can read a node's results, or a parameter that arrives.
        self.since: dict[Node, int] = {}
        self.arrived: dict[Value, int] = {}

    # Steps.

    def kernel(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if op.node.kind is NodeKind.LOGICAL_ID:
                self.logical.append(op.node)
                continue
            segment = self._open()
            self._add(op.node, segment)

    def start(self, task: Task) -> None:
        if task.arrives:
            self.started[task.index] = self.crossing[task.ops[0].node]
            return
        for op in task.ops:
            self._make(op.node.operands)
        for op in task.ops:
            self.since[op.node] = self.number
        node = self.crossing.get(task.ops[0].node) or _started(task)
        self.started[task.index] = node
        self.items.append(node)

    def wait(self, task: Task) -> None:
        self.items.append(Await(self.started[task.index]))
        for op in task.ops:
            if task.arrives:
                for _, k in carried_results(op.node, self.block.results):
                    self.arrived[self.block.parameters[k]] = self.number
            else:
                self.since[op.node] = self.number

    def finish(self) -> list[Node | Await]:
        self._make(self.block.results)
        ordered: list[Node | Await] = list(self.logical)
        for item in self.items:
            if isinstance(item, set):
                ordered += self.structure.ordered(item)
            else:
                ordered.append(item)
        return ordered

    # Segments.

    def _open(self) -> set[Node]:
        """The segment that is open here."""
        if self.last is None or not self.items or self.items[-1] is not self.last:
            self.last = set()
            self.items.append(self.last)
            self.number += 1
        return self.last

    def _add(self, node: Node, segment: set[Node]) -> None:
        """Put a node, and the renaming ones that it reads through, into the last segment."""
        stack = [node]
        while stack:
            node = stack.pop()
            if node in segment:
                continue
            segment.add(node)
            if node in self.once or node not in self.renaming:
                self.placed.add(node)
                self.since[node] = self.number - 1
            for value in node.operands:
                source = value.root.node
                if source in self.renaming and source not in self.placed:
                    assert source is not None
                    stack.append(source)

    def _make(self, values: Iterable[Value]) -> None:
        """Place the renaming nodes that give any of these values, so that they exist as arrays."""
        for value in values:
            node = value.root.node
            if node in self.renaming and node not in self.placed:
                assert node is not None
                fits = self.last is not None and self._since(node) < self.number
                self._add(node, self.last if fits and self.last is not None else self._open())

    def _since(self, node: Node) -> int:
        """How many segments must have begun before one that can compute this renaming node."""
        since = 0
        for value in node.operands:
            source = value.root.node
            if source is None or source.kind is NodeKind.CHEAP:
                since = max(since, self.arrived.get(value.root, 0))
                continue
            if source in self.renaming and source not in self.placed:
                since = max(since, self._since(source))
            else:
                since = max(since, self.since.get(source, 0))
        return since


def _started(task: Task) -> Node:
    """The collective that is started: the task's own, or one that does what the members of a bucket do."""
    if len(task.ops) == 1:
        return task.ops[0].node
    members = [op.node for op in task.ops]
    first = members[0]
    assert task.collective is not None
    names = dict.fromkeys(m.collective.name for m in members if m.collective is not None)
    return Node(
        first.kind,
        first.instruction,
        first.position,
        operands=[v for m in members for v in m.operands if v.type is not None],
        results=[v for m in members for v in m.results],
        collective=replace(task.collective, name="+".join(names)),
    )
