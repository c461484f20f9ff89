"""Values, nodes and block graphs: a computation without tuples, tokens and calls.

Invariants: a `Value` is one array (or one token, whose type is None) of one block. Several views may stand
for the same array; its `root` identifies it. A `Node` is an instruction in one place: each inlining of a call
makes new nodes. ``position`` numbers the nodes of a block in topological order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from stretto.collectives.ops import Collective
from stretto.collectives.types import TensorType

from .graph import Computation, Instruction
from .iterations import Unread


class Value:
    """One leaf of an instruction's shape: an array or a token.

    ``node``: the node that produces it, as result ``index``; None for parameters of the block, and for tokens
    that no node produces. A view has the node and index of its root, so a pass that replaces the node does so
    for all views. ``order``: nodes that must run before any node that reads this view. ``barrier``: the last
    optimization barrier through which this view was taken, if any.
    """

    __slots__ = ("_index", "_node", "barrier", "order", "root", "type")

    def __init__(
        self,
        type: TensorType | None,
        node: Node | None = None,
        index: int = 0,
        *,
        order: tuple[Node, ...] = (),
        view_of: Value | None = None,
        barrier: Barrier | None = None,
    ) -> None:
        self.type = type
        self._node = node
        self._index = index
        self.order = order
        self.root: Value = view_of.root if view_of is not None else self
        self.barrier = barrier

    @property
    def node(self) -> Node | None:
        return self.root._node

    @node.setter
    def node(self, node: Node | None) -> None:
        self.root._node = node

    @property
    def index(self) -> int:
        return self.root._index

    @index.setter
    def index(self, index: int) -> None:
        self.root._index = index

    def view(self, order: tuple[Node, ...], barrier: Barrier | None = None) -> Value:
        """A view of this value for readers that must also run after ``order``."""
        merged = tuple(dict.fromkeys(self.order + order))
        return Value(
            self.type,
            self.node,
            self.index,
            order=merged,
            view_of=self,
            barrier=barrier or self.barrier,
        )

    @property
    def producers(self) -> tuple[Node, ...]:
        """All nodes that must run before a reader of this value."""
        node = self.root._node
        if node is None or node.kind is NodeKind.CHEAP:
            return self.order
        return (node, *self.order)

    @property
    def before_barrier(self) -> Value | None:
        """The view of this value that enters ``barrier``; None if a pass has replaced it there."""
        entering = self.barrier.operands if self.barrier is not None else ()
        return next((v for v in entering if v.root is self.root), None)

    @property
    def fence(self) -> Barrier | None:
        """The last barrier through which this view was taken that is a fence."""
        value: Value | None = self
        while value is not None and value.barrier is not None and not value.barrier.is_fence:
            value = value.before_barrier
        return None if value is None else value.barrier

    def comes_after(self) -> Iterator[Node]:
        """``order``, and the nodes before barriers that are no fences: the default order respects both."""
        yield from self.order
        todo = [] if self.barrier is None else [self.barrier]
        seen = set(todo)
        while todo:
            for value in todo.pop().operands:
                yield from value.producers
                if value.barrier is not None and value.barrier not in seen:
                    seen.add(value.barrier)
                    todo.append(value.barrier)


@dataclass(eq=False)
class Barrier:
    """An optimization barrier. ``operands``: the values that enter it.

    A barrier keeps a compiler from combining computations on its two sides. If it is a fence, readers of a
    value that leaves it also run after everything that enters it (`Value.order` says so), in every order. If
    it is not, the default order does the same, but a plan (`overlap`) may reorder nodes across it.
    """

    operands: tuple[Value, ...]
    is_fence: bool = True


class NodeKind(Enum):
    COMPUTE = "compute"
    CHEAP = "cheap"  # constants, iotas and their broadcasts, copied into every segment
    LOGICAL_ID = "logical id"
    COLLECTIVE = "collective"
    LOOP = "loop"
    BRANCH = "branch"


@dataclass(eq=False, slots=True)
class Node:
    """An instruction in one place of a block.

    ``kind``: how the node is run. ``position``: its number in the block, in topological order.
    ``operands``: the values that it reads, one for each array or token in the instruction's tuples;
    ``results``: the values that it gives, likewise. ``order``: nodes that must run before it although it
    reads no value of theirs. ``collective``: the collective that it runs; ``is_started``: whether the program
    has a start and a done for it; ``reducer``: the computation that
    reduces there, where no `Reduction` does the same. ``blocks``: a loop's condition and body, or the choices
    of a branch; ``selector``: the value that chooses among the latter.
    """

    kind: NodeKind
    instruction: Instruction
    position: int
    operands: list[Value] = field(default_factory=list)
    order: tuple[Node, ...] = ()
    results: list[Value] = field(default_factory=list)
    collective: Collective | None = None
    reducer: Computation | None = None
    blocks: tuple[BlockGraph, ...] = ()
    selector: Value | None = None
    is_started: bool = False

    def before(self) -> list[tuple[Node, Value | None]]:
        """The nodes that must run right before it, each with the operand that it produces, or with None if it
        only comes before."""
        found: list[tuple[Node, Value | None]] = []
        for value in self.operands:
            node = value.root._node
            if node is not None and node.kind is not NodeKind.CHEAP:
                found.append((node, value))
            if value.order or value.barrier is not None:
                found += [(other, None) for other in value.comes_after()]
        found += [(other, None) for other in self.order]
        return found

    @property
    def is_runtime(self) -> bool:
        """Whether the executor runs it (a collective, loop or branch). Compute around it is in segments."""
        return self.kind in _RUNTIME

    @property
    def has_side_effect(self) -> bool:
        """Whether it must run even if nobody reads its results."""
        return self.kind in _RUNTIME or self.instruction.has_side_effect


_RUNTIME = (NodeKind.COLLECTIVE, NodeKind.LOOP, NodeKind.BRANCH)


@dataclass(eq=False)
class BlockGraph:
    """Parameters (arrays only), nodes by position, and results (arrays only) of a block.

    Three tables hold what passes found about nodes of the block; they may list nodes that were removed later.
    ``unread``: the iterations and devices in which nobody reads a node's results (`passes.unread`).
    ``phases``: the phase of each node, if the block is the body of a pipelined loop (`passes.rotate`).
    ``crossing``: collectives that one iteration of a loop starts and the next one awaits.
    """

    parameters: list[Value]
    nodes: list[Node]
    results: list[Value]
    unread: dict[Node, Unread] = field(default_factory=dict, repr=False)
    phases: dict[Node, int] = field(default_factory=dict, repr=False)
    crossing: set[Node] = field(default_factory=set, repr=False)

    def __str__(self) -> str:
        """The block for reading, one line for each node (see `graph_text`)."""
        from .graph_text import to_text

        return to_text(self)

    def check(self) -> None:
        """Raise `GraphError` where the graph contradicts itself (see `graph_check`)."""
        from .graph_check import check

        check(self)


def number(nodes: Sequence[Node]) -> None:
    """Set the positions of a block's nodes, in their order."""
    for position, node in enumerate(nodes):
        node.position = position


def all_blocks(block: BlockGraph) -> Iterator[BlockGraph]:
    """A block and the blocks nested in it, outer ones first. Callers may rewrite each block they get."""
    inner = [nested for node in block.nodes for nested in node.blocks]
    yield block
    for nested in inner:
        yield from all_blocks(nested)


def all_nodes(block: BlockGraph) -> Iterator[Node]:
    """The nodes of a block, each followed by the nodes of its own blocks."""
    for node in block.nodes:
        yield node
        for nested in node.blocks:
            yield from all_nodes(nested)


def carried_results(node: Node, results: Sequence[Value]) -> tuple[tuple[int, int], ...]:
    """(result, carry) pairs: which of ``results``, those of a loop's body, are results of this node."""
    return tuple(
        (i, k)
        for i, result in enumerate(node.results)
        for k, carry in enumerate(results)
        if carry.root is result
    )


def operand_shape(node: Node, operand: int = 0) -> tuple[int, ...]:
    """The shape of an operand that is an array."""
    type = node.operands[operand].type
    assert type is not None
    return type.shape


def result_shape(node: Node) -> tuple[int, ...]:
    """The shape of the first result, an array."""
    type = node.results[0].type
    assert type is not None
    return type.shape
