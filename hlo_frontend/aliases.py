"""Which inputs of a segment its outputs may overwrite, if the inputs are not used afterwards.

An output is paired with an input of which it is an update: the array into which a dynamic-update-slice or a
scatter writes, the initial value of a loop's carry, what each branch of a conditional updates or hands
through, or else an operand of an elementwise op that has the same type. For other pairs XLA would insert
copies.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from .carve import SegmentPlan
from .collectives import CollectiveReader
from .flatten import flatten
from .graph import Computation
from .ops import op_of
from .values import BlockGraph, Node, NodeKind, Value

# Smaller arrays are not worth the bookkeeping.
SMALLEST_BYTES = 1024
_MAX_STEPS = 64


def find_aliases(
    plan: SegmentPlan, dying: Iterable[Value], given: Container[Value] = ()
) -> dict[int, int]:
    """Input position -> output position, for inputs among ``dying`` that an output updates. Those that the
    caller has ``given`` away may be small."""
    position = {value: i for i, value in enumerate(plan.inputs)}
    free = {
        v for v in dying if v.type is not None and (v.type.nbytes >= SMALLEST_BYTES or v in given)
    }
    pairs: dict[int, int] = {}
    if not free:
        return pairs
    types = {v.type for v in free}
    search = _Search({value for node in plan.nodes for value in node.results})
    left = [(i, v) for i, v in enumerate(plan.outputs) if v in search.inside and v.type in types]
    for found in (search.updated, search.elementwise_source):
        for output, value in left[:]:
            source = found(value, free)
            if source is not None:
                free.discard(source)
                pairs[position[source]] = output
                left.remove((output, value))
    return pairs


@dataclass
class _Search:
    """The search in a segment or a branch. ``inside``: the values that its nodes give; ``branches``: the
    computations of conditionals that were looked at, which the searches in them share."""

    inside: set[Value]
    branches: dict[Computation, tuple[BlockGraph, _Search]] = field(default_factory=dict)

    def updated(self, value: Value, free: set[Value]) -> Value | None:
        """The one of ``free`` that ``value`` is an in-place update of."""
        at = value
        while at in self.inside:
            node = at.node
            assert node is not None
            operand = self._updated_operand(node, at.index)
            if operand is None:
                return None
            at = operand.root
        return at if at in free and at.type == value.type else None

    def elementwise_source(self, value: Value, free: set[Value]) -> Value | None:
        stack, seen = [value], {value}
        steps = 0
        while stack and steps < _MAX_STEPS:
            steps += 1
            at = stack.pop()
            node = at.node
            if node is None or at not in self.inside:
                continue
            updated = self._updated_operand(node, at.index)
            candidates = [updated] if updated is not None else []
            if op_of(node.instruction.opcode).elementwise:
                candidates = list(node.operands)
            for operand in reversed(candidates):
                root = operand.root
                if root in seen or root.type != value.type:
                    continue
                if root in free:
                    return root
                seen.add(root)
                if root.node is not None and root.node.kind is NodeKind.COMPUTE:
                    stack.append(root)
        return None

    def _updated_operand(self, node: Node, index: int) -> Value | None:
        opcode = node.instruction.opcode
        if opcode == "conditional":
            return self._updated_in_all(node, index)
        return node.operands[index] if opcode == "while" or op_of(opcode).in_place else None

    def _updated_in_all(self, node: Node, index: int) -> Value | None:
        """The operand that each branch of a conditional updates, or hands through, as result ``index``."""
        if any(v.type is None for v in (*node.operands, *node.results)):
            return None
        branches = [self._branch(called) for called in node.instruction.called]
        given: list[list[Value]] = []
        first = 1  # behind the predicate
        for block, _ in branches:
            given.append([v.root for v in node.operands[first : first + len(block.parameters)]])
            first += len(block.parameters)
        result_of = [block.results[index].root for block, _ in branches]
        chosen = None
        for (block, search), operands, result in zip(branches, given, result_of, strict=True):
            source = result if result in block.parameters else None
            source = source or search.updated(result, set(block.parameters))
            if source is not None:
                chosen = operands[block.parameters.index(source)]
                break
        if chosen is None:
            return None
        for (block, search), operands, result in zip(branches, given, result_of, strict=True):
            own = {p for p, v in zip(block.parameters, operands, strict=True) if v is chosen}
            if not (
                result in own
                or search.updated(result, own) is not None
                or search.elementwise_source(result, own) is not None
            ):
                return None
        return chosen

    def _branch(self, called: Computation) -> tuple[BlockGraph, _Search]:
        if called not in self.branches:
            block = flatten(called, CollectiveReader(1, 1))  # it has no collectives
            inside = {value for node in block.nodes for value in node.results}
            self.branches[called] = block, _Search(inside, self.branches)
        return self.branches[called]
