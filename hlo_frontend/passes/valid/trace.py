"""Which values of a program are known, and which are zeros, on every device.

`Forward` walks the blocks of a program as the executor would. A loop with transfers is followed iteration by
iteration if the number of its iterations follows from the program. Every other loop gets one `Trace` that
holds for all its iterations (its *summary*). The result is a tree of traces, which `liveness` walks
backwards.

Invariant: a trace holds in every run of the program, whatever its arguments are and whichever transfers are
skipped, since it is derived from constants and device ids alone. Zeros are positive zeros, bit for bit; those
that a device has because it receives nothing count as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stretto.collectives.ops import Kind, Reduction

from ...collectives import native_reduction
from ...graph import Computation, leaf_count
from ...ops import op_of
from ...schema import TUPLE
from ...trips import trip_count
from ...values import BlockGraph, Node, NodeKind, Value, all_nodes
from ..pseudo_tokens import is_zero_literal
from . import needs, tensors
from .known import Known, evaluate, spread

TRANSFERS = (Kind.PERMUTE, Kind.SEND, Kind.RECV)

# The analysis gives up after visiting this many nodes, forwards and backwards: about a second.
MOST_VISITS = 120_000


class GaveUpError(Exception):
    """The program is too large for the analysis. The callers of the analysis catch it."""


@dataclass(eq=False)
class Trace:
    """One walk of a block. ``iteration``: that of the innermost followed loop, None if there is none.
    ``known``: known values. ``zero[value]``: for each device (or one row for all) whether all elements are
    zeros. ``inner``: the traces of loops and branches.
    """

    block: BlockGraph
    iteration: int | None
    known: dict[Value, np.ndarray] = field(default_factory=dict)
    zero: dict[Value, np.ndarray] = field(default_factory=dict)
    inner: dict[Node, LoopTrace | BranchTrace] = field(default_factory=dict)


@dataclass(eq=False)
class LoopTrace:
    """The traces of a loop: one for each iteration, or one for all (``summary``) and one of the condition."""

    iterations: list[Trace] = field(default_factory=list)
    summary: Trace | None = None
    condition: Trace | None = None


@dataclass(eq=False)
class BranchTrace:
    """The traces of a branch: one for each block, None if no device takes it.

    ``chosen``: the index of the block that each device takes, None if that is not known.
    """

    blocks: list[Trace | None]
    chosen: np.ndarray | None


@dataclass(eq=False)
class Transfer:
    """The result of the analysis for a permute, send or receive.

    ``followed``: whether its loop was followed, in every walk. ``trips``: the largest number of iterations of
    its loop in walks that followed it. ``last``: the last iteration in other walks, None if not known.
    ``live[k]``: the iterations in which the data of pair k are read. ``always[k]``: whether they are read in
    a walk that does not distinguish iterations.
    """

    node: Node
    trips: int = 0
    followed: bool = True
    last: int | None = -1
    live: list[set[int]] = field(default_factory=list)
    always: list[bool] = field(default_factory=list)


def is_transfer(node: Node) -> bool:
    return node.collective is not None and node.collective.kind in TRANSFERS


class Forward:
    """Walks a program forwards. ``transfers``: all permutes, sends and receives that were visited."""

    def __init__(self, num_replicas: int, num_partitions: int, *, follow_zeros: bool) -> None:
        self.shape = (num_replicas, num_partitions)
        self.num_devices = num_replicas * num_partitions
        self.num_partitions = num_partitions
        self.follow_zeros = follow_zeros
        self.transfers: dict[Node, Transfer] = {}
        self.visits = 0
        self.not_followed: dict[Node, str] = {}  # loops, and why
        self._cheap_known: dict[Value, Known] = {}
        self._cheap_zero: dict[Value, bool] = {}
        self._moving: dict[BlockGraph, bool] = {}
        self._interesting: dict[BlockGraph, list[Node]] = {}
        self._sizes: dict[BlockGraph, int] = {}

    def program(self, entry: BlockGraph) -> Trace:
        """The trace of a whole program. Raises `GaveUpError`."""
        trace = Trace(entry, None)
        self._walk(trace, 0)
        return trace

    def once(self, block: BlockGraph, known: Sequence[Known]) -> Trace:
        """The trace of one run of a block. ``known``: values of its parameters. Raises `GaveUpError`."""
        trace = self._enter(block, 0, known, [None] * len(known))
        self._walk(trace, 1)
        return trace

    def visit(self, count: int) -> None:
        self.visits += count
        if self.visits > MOST_VISITS:
            raise GaveUpError(f"more than {MOST_VISITS} steps")

    # What is known of a value.

    def known(self, trace: Trace, value: Value) -> Known:
        root = value.root
        if root.node is not None and root.node.kind is NodeKind.CHEAP:
            if root not in self._cheap_known:
                operands = [self.known(trace, o) for o in root.node.operands]
                single = len(root.node.results) == 1
                self._cheap_known[root] = evaluate(root.node, operands) if single else None
            return self._cheap_known[root]
        return trace.known.get(root)

    def zero(self, trace: Trace, value: Value) -> np.ndarray | None:
        if not self.follow_zeros:
            return None
        root = value.root
        if root.node is not None and root.node.kind is NodeKind.CHEAP:
            if root not in self._cheap_zero:
                node = root.node
                while node.instruction.opcode == "broadcast" and node.operands[0].root.node:
                    node = node.operands[0].root.node
                literal = node.instruction.opcode == "constant"
                self._cheap_zero[root] = literal and is_zero_literal(node.instruction.proto.literal)
            return np.ones(1, bool) if self._cheap_zero[root] else None
        return trace.zero.get(root)

    # Walking.

    def moves(self, block: BlockGraph) -> bool:
        """Whether a transfer is in the block or nested in it."""
        if block not in self._moving:
            self._moving[block] = any(map(is_transfer, all_nodes(block)))
        return self._moving[block]

    def _size(self, block: BlockGraph) -> int:
        """How many nodes one walk of the block visits."""
        if block not in self._sizes:
            size = 0
            for node in block.nodes:
                times = trip_count(node) if node.kind is NodeKind.LOOP else 1
                inner = sum(self._size(b) for b in node.blocks)
                follows = any(self.moves(b) for b in node.blocks)
                size += 1 + inner * ((times or 1) if follows else 1)
            self._sizes[block] = size
        return self._sizes[block]

    def _followed(self, block: BlockGraph) -> list[Node]:
        """The nodes whose results may be known or zero."""
        if block not in self._interesting:
            self._interesting[block] = [
                node
                for node in block.nodes
                if node.kind is not NodeKind.COMPUTE
                or node.instruction.opcode == "conditional"
                or (
                    len(node.results) == 1
                    and (
                        (node.results[0].type is not None)
                        and (node.results[0].type.dtype[0] in "psu" or _may_give_zeros(node))
                    )
                )
            ]
        return self._interesting[block]

    def _walk(self, trace: Trace, trips: int) -> None:
        """Walk a block. ``trips``: the number of iterations of the innermost loop, -1 if not known."""
        nodes = self._followed(trace.block)
        self.visit(len(nodes))
        for node in nodes:
            _WALK[node.kind](self, trace, node, trips)

    def _compute(self, trace: Trace, node: Node, trips: int) -> None:
        if node.instruction.opcode == "conditional":
            self._conditional(trace, node)
            return
        (result,) = node.results
        assert result.type is not None
        if result.type.dtype[0] in "psu":
            operands = [self.known(trace, o) for o in node.operands]
            value = evaluate(node, operands)
            if value is not None:
                trace.known[result] = value
        if self.follow_zeros and _may_give_zeros(node):
            zeros = [self.zero(trace, o) for o in node.operands]
            found = _zero_rows(node, zeros, self.known(trace, node.operands[0]))
            if found is not None and found.any():
                trace.zero[result] = found

    def _conditional(self, trace: Trace, node: Node) -> None:
        """A conditional inside a segment: its results are zeros if the branch taken gives constant zeros."""
        selector = self.known(trace, node.operands[0])
        if selector is None:
            return
        called = node.instruction.called
        chosen = needs.selected(selector, len(called))
        for i, result in enumerate(node.results):
            rows = np.zeros(1, bool)
            for index, computation in enumerate(called):
                if _gives_zeros(computation, i):
                    rows = rows | (chosen == index)
            if rows.any():
                trace.zero[result] = rows

    def _logical_id(self, trace: Trace, node: Node, trips: int) -> None:
        ids = np.arange(self.num_devices, dtype=np.uint32)
        is_partition = node.instruction.opcode == "partition-id"
        count = np.uint32(self.num_partitions)
        trace.known[node.results[0]] = ids % count if is_partition else ids // count

    def _collective(self, trace: Trace, node: Node, trips: int) -> None:
        assert node.collective is not None
        if node.collective.kind is Kind.REDUCE_SCATTER and self.follow_zeros:
            rows = self._scattered_zeros(trace, node)
            if rows.any():
                trace.zero[node.results[0]] = rows
        if not is_transfer(node):
            return
        pairs = node.collective.pairs
        if node not in self.transfers:
            found = Transfer(node)
            found.live = [set() for _ in pairs]
            found.always = [False] * len(pairs)
            self.transfers[node] = found
        transfer = self.transfers[node]
        if trace.iteration is not None:
            transfer.trips = max(transfer.trips, trips)
        else:
            transfer.followed = False
            unknown = trips < 0 or transfer.last is None
            transfer.last = None if unknown else max(transfer.last or 0, trips - 1)
        if node.collective.kind is not Kind.PERMUTE or not self.follow_zeros:
            return
        for operand, result in zip(node.operands, node.results, strict=True):
            rows = np.ones(self.num_devices, bool)
            sent = self.zero(trace, operand)
            for source, target in pairs:
                rows[target] = sent is not None and bool(sent[source if len(sent) > 1 else 0])
            if rows.any():
                trace.zero[result] = rows

    def _scattered_zeros(self, trace: Trace, node: Node) -> np.ndarray:
        """The devices that a reduce-scatter gives sums of padding with zeros, as the gradient of one part of
        an all-gather does."""
        rows = np.zeros(self.num_devices, bool)
        padded = node.operands[0].root.node
        collective = node.collective
        if (
            len(node.operands) > 1
            or padded is None
            or padded.instruction.opcode != "pad"
            or collective is None
            or collective.reduction is not Reduction.SUM
        ):
            return rows
        zero = self.zero(trace, padded.operands[1])
        if zero is None or not zero.all():
            return rows
        (axis,) = node.instruction.proto.dimensions
        size = node.instruction.shape.dimensions[axis]
        padding = padded.instruction.proto.padding_config.dimensions[axis]
        low, high = padding.edge_padding_low, padding.edge_padding_high
        whole = padded.instruction.shape.dimensions[axis]
        for group in collective.groups:
            for position, device in enumerate(group):
                begin = position * size
                rows[device] = begin + size <= low or begin >= whole - high
        return rows

    def _loop(self, trace: Trace, node: Node, trips: int) -> None:
        condition, body = node.blocks
        known = [self.known(trace, o) for o in node.operands]
        zero = [self.zero(trace, o) for o in node.operands]
        found: LoopTrace | None = None
        if self.moves(body) or self.moves(condition):
            found = self._follow(node, known, zero)
        if found is None:
            found = self._sum_up(node, known)
            last = found.summary
            assert last is not None
            values = body.parameters
        elif found.iterations:
            last, values = found.iterations[-1], body.results
        else:
            last, values = None, []
        trace.inner[node] = found
        for i, result in enumerate(node.results):
            exact = known[i] if last is None else self.known(last, values[i])
            if exact is not None:
                trace.known[result] = exact
            nothing = zero[i] if last is None else self.zero(last, values[i])
            if nothing is not None and (last is None or found.summary is None):
                trace.zero[result] = nothing

    def _follow(
        self, node: Node, known: list[Known], zero: list[np.ndarray | None]
    ) -> LoopTrace | None:
        """Follow the loop iteration by iteration; None if that is not possible or takes too long."""
        condition, body = node.blocks
        count = trip_count(node)
        size = max(self._size(body), 1)
        room = (MOST_VISITS - self.visits) // (3 * size)
        if count is None and self.moves(condition):
            self.not_followed[node] = "its condition communicates"
            return None
        if count is not None and count > room:
            self.not_followed[node] = f"{count} iterations of {size} operations are too many"
            return None
        if count is None:
            count = self._counted(node, known, room)
            if count is None:
                return None
        found = LoopTrace()
        for iteration in range(count):
            inner = self._enter(body, iteration, known, zero)
            self._walk(inner, count)
            known = [self.known(inner, r) for r in body.results]
            zero = [self.zero(inner, r) for r in body.results]
            found.iterations.append(inner)
        return found

    def _counted(self, node: Node, known: list[Known], room: int) -> int | None:
        """The number of iterations, found by evaluating the condition; None if that is not possible."""
        condition, body = node.blocks
        for iteration in range(room + 1):
            test = self._enter(condition, iteration, known, [None] * len(known))
            self._quietly(test)
            predicate = self.known(test, condition.results[0])
            if predicate is None or predicate.all() != predicate.any():
                self.not_followed[node] = "the number of its iterations is not known"
                return None
            if not predicate.any():
                return iteration
            inner = self._enter(body, iteration, known, [None] * len(known))
            self._quietly(inner)
            known = [self.known(inner, r) for r in body.results]
        self.not_followed[node] = f"more than {room} iterations are too many"
        return None

    def _quietly(self, trace: Trace) -> None:
        """Walk only the arithmetic of a block, to find the values that the loop's condition needs."""
        nodes = [n for n in self._followed(trace.block) if not n.is_runtime]
        self.visit(len(nodes))
        for node in nodes:
            _WALK[node.kind](self, trace, node, 0)

    def _enter(
        self,
        block: BlockGraph,
        iteration: int | None,
        known: Sequence[Known],
        zero: Sequence[np.ndarray | None],
    ) -> Trace:
        trace = Trace(block, iteration)
        for parameter, value, nothing in zip(block.parameters, known, zero, strict=True):
            if value is not None:
                trace.known[parameter] = value
            if nothing is not None:
                trace.zero[parameter] = nothing
        return trace

    def _sum_up(self, node: Node, known: list[Known]) -> LoopTrace:
        """One trace for all iterations, in which only carries are known that no iteration changes."""
        condition, body = node.blocks
        unchanged = [r.root is p for p, r in zip(body.parameters, body.results, strict=True)]
        kept = [k if same else None for k, same in zip(known, unchanged, strict=True)]
        nothing: list[np.ndarray | None] = [None] * len(kept)
        found = LoopTrace(summary=self._enter(body, None, kept, nothing))
        assert found.summary is not None
        count = trip_count(node)
        self._walk(found.summary, -1 if count is None else count)
        if count is None:
            found.condition = self._enter(condition, None, kept, nothing)
            self._walk(found.condition, -1)
        return found

    def _branch(self, trace: Trace, node: Node, trips: int) -> None:
        assert node.selector is not None
        selector = self.known(trace, node.selector)
        chosen = None if selector is None else needs.selected(selector, len(node.blocks))
        found = BranchTrace([], chosen)
        position = 1
        for index, block in enumerate(node.blocks):
            arguments = node.operands[position : position + len(block.parameters)]
            position += len(block.parameters)
            if chosen is not None and not (chosen == index).any():
                found.blocks.append(None)
                continue
            known = [self.known(trace, a) for a in arguments]
            zero = [self.zero(trace, a) for a in arguments]
            inner = self._enter(block, trace.iteration, known, zero)
            self._walk(inner, trips)
            found.blocks.append(inner)
        trace.inner[node] = found
        if chosen is not None:
            for i, result in enumerate(node.results):
                value = self._merged(found, i, chosen)
                if value is not None:
                    trace.known[result] = value
                nothing = self._merged_zero(found, i, chosen)
                if nothing.any():
                    trace.zero[result] = nothing

    def _merged(self, found: BranchTrace, i: int, chosen: np.ndarray) -> Known:
        merged: Known = None
        for index, inner in enumerate(found.blocks):
            if inner is None:
                continue
            value = self.known(inner, inner.block.results[i])
            if value is None:
                return None
            if merged is None:
                merged = value
            else:
                takes = spread(chosen == index, value.ndim - 1)
                merged = np.where(takes, value, merged)
        return merged if merged is not None and tensors.small(merged) else None

    def _merged_zero(self, found: BranchTrace, i: int, chosen: np.ndarray) -> np.ndarray:
        rows = np.zeros(self.num_devices, bool)
        for index, inner in enumerate(found.blocks):
            if inner is None:
                continue
            nothing = self.zero(inner, inner.block.results[i])
            if nothing is not None:
                rows |= (chosen == index) & nothing
        return rows


_WALK = {
    NodeKind.COMPUTE: Forward._compute,
    NodeKind.LOGICAL_ID: Forward._logical_id,
    NodeKind.COLLECTIVE: Forward._collective,
    NodeKind.LOOP: Forward._loop,
    NodeKind.BRANCH: Forward._branch,
}

Zeros = Sequence[np.ndarray | None]


def _may_give_zeros(node: Node) -> bool:
    opcode = node.instruction.opcode
    return opcode == "map" or op_of(opcode).zero_if is not None


def _zero_rows(node: Node, zeros: Zeros, known: Known) -> np.ndarray | None:
    """The devices on which a node gives zeros. ``known``: the value of its first operand."""
    opcode = node.instruction.opcode
    if opcode == "select" and known is not None:
        on_true, on_false = (np.zeros(1, bool) if rows is None else rows for rows in zeros[1:])
        axes = tuple(range(1, known.ndim))
        return (on_true | ~known.any(axes)) & (on_false | known.all(axes))
    if opcode == "map":
        return _all(_mapped(node.instruction.called[0], zeros))
    needed = op_of(opcode).zero_if
    return None if needed is None else _all(zeros[needed])


def _all(zeros: Zeros) -> np.ndarray | None:
    found = np.ones(1, bool)
    for rows in zeros:
        if rows is None:
            return None
        found = found & rows
    return found


def _mapped(computation: Computation, zeros: Zeros) -> Zeros:
    """The operands of a map all of which must be zeros for its result to be zeros."""
    root = computation.root
    if root.opcode == "parameter":
        return [zeros[root.proto.parameter_number]]
    return zeros if native_reduction(computation) is Reduction.SUM else [None]


def _gives_zeros(computation: Computation, leaf: int) -> bool:
    """Whether a leaf of a computation's result is a constant zero. False for nested tuples."""
    part = computation.root
    if part.shape.element_type == TUPLE:
        if part.opcode != "tuple" or leaf_count(part.shape) != len(part.operands):
            return False
        part = part.operands[leaf]
    while op_of(part.opcode).moves and op_of(part.opcode).zero_if:
        part = part.operands[0]
    return part.opcode == "constant" and is_zero_literal(part.proto.literal)
