"""Traces values from stage to stage, back to the node that made them.

`Origins` goes backwards from a value of one device and iteration, through nodes that hand on an operand
unchanged: selects and conditionals with a known predicate, reshapes, permutes, carries, slices that are put
into an array and taken out of it. It also goes through additions of values that are known to be zero. The
node at which it ends made the value bit for bit, except for the sign of zeros if there were additions.
`Followed` goes on from a loop to the loop before it that made its initial values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import ml_dtypes

from stretto.collectives.ops import Kind

from ..collectives import CollectiveReader
from ..graph import Instruction, leaf_count
from ..passes.valid.known import is_reshape, spread, starts_of
from ..passes.valid.needs import selected
from ..passes.valid.trace import Forward, LoopTrace, Trace
from ..schema import TUPLE
from ..values import Node, Value

MOST_STEPS = 100_000


@dataclass(frozen=True, order=True)
class Execution:
    """One run of a stage: in which iteration of the loop, and on which device."""

    iteration: int
    device: int


@dataclass(frozen=True)
class Made:
    """The origin of a value: result ``leaf`` of ``node``, or, if that is None, initial value ``leaf`` of the
    loop.

    ``slot``: the number of a slice along its first dimension; None for the whole array. ``plus``: whether
    zeros were added to floats on the way, which makes negative zeros positive.
    """

    node: Node | None
    leaf: int
    at: Execution
    slot: int | None = None
    plus: bool = False


class Origins:
    """The origins of values in the body of a loop that was traced. ``node``: the loop."""

    def __init__(self, forward: Forward, node: Node, trace: LoopTrace) -> None:
        self.forward = forward
        self.block = node.blocks[1]
        self.iterations = trace.iterations
        self._index = {p: i for i, p in enumerate(self.block.parameters)}

    def executions(self) -> list[Execution]:
        """All runs of the body, on all devices."""
        devices = range(self.forward.num_devices)
        return [Execution(t, d) for t in range(len(self.iterations)) for d in devices]

    def of(self, value: Value, at: Execution, slot: int | None = None) -> Made:
        """The origin of a value on a device in an iteration, or of slice ``slot`` of it."""
        plus = False
        for _ in range(MOST_STEPS):
            root = value.root
            if root.node is None:
                if not at.iteration:
                    return Made(None, self._index[root], at, slot, plus)
                at = Execution(at.iteration - 1, at.device)
                value = self.block.results[self._index[root]]
                continue
            place = self.slot(root.node, at)
            if (
                place is not None
                and root.node.instruction.opcode == "dynamic-slice"
                and slot is None
            ):
                slot, value = place, root.node.operands[0]
                continue
            if place is not None and slot is not None:
                value = root.node.operands[1 if place == slot else 0]
                slot = None if place == slot else slot
                continue
            other = self._beside_zero(root, at)
            if other is not None:
                value, plus = other, plus or _has_sign(root)
                continue
            is_select = root.node.instruction.opcode == "select"
            before = self._before(root, at) if slot is None or is_select else None
            if before is None:
                return Made(root.node, root.index, at, slot, plus)
            value, at = before
        return Made(value.root.node, value.root.index, at, slot, plus)

    def is_zero(self, value: Value, at: Execution) -> bool:
        """Whether the value is known to be positive zeros on a device in an iteration."""
        return _zero_on(self.forward, self.iterations[at.iteration], value, at.device)

    def _beside_zero(self, value: Value, at: Execution) -> Value | None:
        """x, if the value is the sum of x and zeros, or is written as ``0 if x == 0 else x``."""
        node = value.node
        assert node is not None
        opcode = node.instruction.opcode
        if value.type is None or value.type.dtype[0] == "c" or opcode not in ("add", "select"):
            return None
        if opcode == "add":
            zero = [self.is_zero(o, at) for o in node.operands]
            return node.operands[zero.index(False)] if sum(zero) == 1 else None
        chosen, zeros, other = node.operands
        test = chosen.root.node
        if test is None or test.instruction.proto.comparison_direction != "EQ":
            return None
        compared = [o.root for o in test.operands]
        if len(compared) != 2 or compared[0] is not other.root:
            return None
        is_zero = self.is_zero(zeros, at) and self.is_zero(test.operands[1], at)
        return other if is_zero else None

    def slot(self, node: Node, at: Execution) -> int | None:
        """The number of the slice along the first dimension that a node reads or writes, if it is known."""
        opcode = node.instruction.opcode
        if opcode == "dynamic-slice":
            first, part = 1, node.results[0].type
        elif opcode == "dynamic-update-slice":
            first, part = 2, node.operands[1].type
        else:
            return None
        whole = node.operands[0].type
        assert whole is not None and part is not None
        if not whole.shape or part.shape != (1, *whole.shape[1:]):
            return None
        trace = self.iterations[at.iteration]
        starts = starts_of(node, [self.forward.known(trace, o) for o in node.operands], first)
        return None if starts is None else int(starts[at.device if len(starts) > 1 else 0][0])

    def handed(self, value: Value, at: Execution) -> tuple[Value, Execution, bool] | None:
        """The value of which this one is a copy in the same iteration, where that is, and whether zeros are
        added to it; None if a node computes it, or takes it out of an array, or if it is carried."""
        root = value.root
        if root.node is None:
            return None
        other = self._beside_zero(root, at)
        if other is not None:
            return other, at, _has_sign(root)
        before = self._before(root, at)
        return None if before is None else (*before, False)

    def row(self, value: Value, at: Execution) -> bool | None:
        """A known predicate that is the same for all elements; for an integer, whether it is not 0."""
        known = self.forward.known(self.iterations[at.iteration], value)
        if known is None:
            return None
        own = known[at.device if len(known) > 1 else 0]
        return bool(own.all()) if own.all() == own.any() else None

    def number(self, value: Value, at: Execution) -> int | None:
        """A known integer that is the same for all elements."""
        known = self.forward.known(self.iterations[at.iteration], value)
        if known is None:
            return None
        own = spread(known, 0)[at.device if len(known) > 1 else 0].reshape(-1)
        return int(own[0]) if own.size and (own == own[0]).all() else None

    def _before(self, value: Value, at: Execution) -> tuple[Value, Execution] | None:
        """The value that this one is a copy of, bit for bit; None if a node computes it."""
        node = value.node
        assert node is not None
        opcode = node.instruction.opcode
        if opcode == "select":
            taken = self.row(node.operands[0], at)
            return None if taken is None else (node.operands[1 if taken else 2], at)
        if (
            opcode == "reshape"
            or (opcode == "bitcast" and is_reshape(node))
            or _rounds_nothing(node)
        ):
            return node.operands[0], at
        if opcode == "conditional":
            return self._through_branch(node, value.index, at)
        collective = node.collective
        if collective is not None and collective.kind is Kind.PERMUTE:
            for source, target in collective.pairs:
                if target == at.device:
                    return node.operands[value.index], Execution(at.iteration, source)
        return None

    def _through_branch(
        self, node: Node, leaf: int, at: Execution
    ) -> tuple[Value, Execution] | None:
        known = self.forward.known(self.iterations[at.iteration], node.operands[0])
        if known is None:
            return None
        chosen = selected(known, len(node.instruction.called))
        branch = int(chosen[at.device if len(chosen) > 1 else 0])
        position = _handed_on(node.instruction.called[branch].root, leaf)
        if position is None:
            return None
        first = 1 + sum(leaf_count(a.shape) for a in node.instruction.operands[1 : 1 + branch])
        return node.operands[first + position], at


def _rounds_nothing(node: Node) -> bool:
    """Whether a node reduces a precision to what it is, as `jax.checkpoint` does where it keeps a value."""
    type, proto = node.results[0].type if node.results else None, node.instruction.proto
    if node.instruction.opcode != "reduce-precision" or type is None:
        return False
    bits = ml_dtypes.finfo(type.numpy)
    return (bits.nexp, bits.nmant) == (proto.exponent_bits, proto.mantissa_bits)


def _has_sign(value: Value) -> bool:
    return value.type is not None and value.type.dtype[0] not in "psu"


def _zero_on(forward: Forward, trace: Trace, value: Value, device: int) -> bool:
    rows = forward.zero(trace, value)
    return rows is not None and bool(rows[device if len(rows) > 1 else 0])


@dataclass(frozen=True)
class Source:
    """The origin of a value in any loop: ``made`` in ``loop``, or, if ``made.node`` is None, ``begin``, a
    value of the entry computation that is an initial value of ``loop``."""

    loop: Node
    made: Made
    begin: Value | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for equal origins, whatever loop a value of them is in."""
        if self.begin is None:
            return self.loop, self.made
        return self.begin, self.made.at.device, self.made.slot, self.made.plus


class Followed:
    """The loops of a program that were followed iteration by iteration."""

    def __init__(self, forward: Forward, entry: Trace, loops: Mapping[Node, LoopTrace]) -> None:
        self.forward = forward
        self.reader = CollectiveReader(*forward.shape)
        self.entry = entry
        self.origins = {node: Origins(forward, node, trace) for node, trace in loops.items()}

    def of(self, loop: Node, value: Value, at: Execution) -> Source:
        """The origin of a value on a device in an iteration of ``loop``."""
        slot, plus = None, False
        for _ in range(len(self.origins)):
            made = self.origins[loop].of(value, at, slot)
            slot, plus = made.slot, plus or made.plus
            if made.node is not None:
                break
            begin = loop.operands[made.leaf].root
            before = begin.node
            if before is None or before not in self.origins:
                return Source(loop, replace(made, plus=plus), begin)
            loop, value = before, before.blocks[1].results[begin.index]
            at = Execution(len(self.origins[loop].iterations) - 1, at.device)
        return Source(loop, replace(made, plus=plus))

    def begins_with_zeros(self, loop: Node, carry: int, devices: int) -> bool:
        """Whether the loop's carry is known to begin as positive zeros on all devices."""
        value = loop.operands[carry]
        return all(_zero_on(self.forward, self.entry, value, d) for d in range(devices))


def _handed_on(root: Instruction, leaf: int) -> int | None:
    """The leaf of a computation's only parameter that a leaf of its root returns unchanged, or None."""
    part = root
    if root.shape.element_type == TUPLE and root.opcode == "tuple":
        part = root.operands[leaf]
    while part.opcode in ("copy", "reshape", "bitcast"):
        part = part.operands[0]
    if part.opcode == "get-tuple-element" and part.operands[0].opcode == "parameter":
        whole = part.operands[0].shape
        flat = leaf_count(whole) == len(whole.tuple_shapes)
        return int(part.proto.tuple_index) if flat else None
    return 0 if part.opcode == "parameter" and part.shape.element_type != TUPLE else None


def chains(
    live: Sequence[Execution], before: dict[Execution, Execution]
) -> list[tuple[Execution, ...]]:
    """Chains of executions, in each of which the next one takes the result of the one before.

    If two executions take the result of one, it belongs to both chains.
    """
    taken = set(before.values())
    found = []
    for last in sorted(e for e in live if e not in taken):
        chain = [last]
        while chain[-1] in before:
            chain.append(before[chain[-1]])
        found.append(tuple(reversed(chain)))
    return sorted(found)
