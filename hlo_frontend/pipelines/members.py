"""What other stages compute between the two loops of a step, as the last stage can compute it for them.

Under ``check_vma=False`` JAX makes a sum over devices of the gradient of `psum`: where all stages compute the
head of outputs that they all have, what the backward pass begins with is the sum of what they all give. It
does not depend on which stage computes a stage's part, if that is computed from values that are the same on
all stages (`Sameness`) and from numbers of which it is known what they are there, as ``axis_index("stage") ==
last`` is. `Members.terms` proves that, and says which stages give the same.

Gradients that a mask on the loss made zero are seldom zeros: ``0 * x`` is NaN where x is. So they are
computed, once for all stages of which all numbers are the same, and added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from stretto.collectives.ops import Kind, Reduction

from ..collectives import native_reduction
from ..graph import Instruction
from ..schema import PRIMITIVE_CODES
from ..values import Node
from .chains import Followed
from .emit import needed_by
from .parts import Part
from .refusal import Refusal
from .sameness import Class, Sameness

# Sums of so many times the same number are exact in any order, or are rounded once: a test tries all numbers.
EXACT = 4

# Opcodes that give zeros or NaN if all, if any, or if the first of their operands is that.
_OF_ALL = frozenset({"add", "concatenate", "subtract"})
_OF_ANY = frozenset({"dot", "multiply"})
_OF_FIRST = frozenset(
    {
        "bitcast",
        "broadcast",
        "convert",
        "copy",
        "divide",
        "get-tuple-element",
        "negate",
        "reshape",
        "reverse",
        "slice",
        "transpose",
    }
)
FLOATS = frozenset(code for name, code in PRIMITIVE_CODES.items() if name[0] in "bcf")


class Members:
    """The stages of a forward pass whose loop was followed. ``sameness``: for its groups of devices.

    A stage is named by ``who``: 0 is the device's own one, n stage n - 1.
    """

    def __init__(self, followed: Followed, part: Part, sameness: Sameness) -> None:
        self.followed, self.part, self.sameness = followed, part, sameness
        self.nodes = {node.instruction: node for node in followed.entry.block.nodes}
        self._zeros: dict[tuple[Instruction, int], bool] = {}

    def same(self, value: Instruction) -> bool:
        """Whether a value of the entry computation is the same on all stages."""
        return self.sameness.of(value) is Class.SAME

    def alone(self, summed: Instruction, operand: int) -> bool:
        """Whether an all-reduce adds zeros to what the last stages give it."""
        node = self._sum(summed)
        if node is None:
            return False
        value = node.operands[operand]
        if value.type is None or value.type.dtype[0] == "c":
            return False
        assert node.collective is not None
        rows = self.followed.forward.zero(self.followed.entry, value)
        last = {group[-1] for group in self.part.groups}
        found = [group for group in node.collective.groups if last & set(group)]
        return (
            rows is not None
            and all(
                d in last or bool(rows[d if len(rows) > 1 else 0]) for group in found for d in group
            )
            and all(len(last & set(group)) == 1 for group in found)
            and last <= {d for group in found for d in group}
        )

    def _sum(self, summed: Instruction) -> Node | None:
        node = self.nodes.get(summed)
        collective = None if node is None else node.collective
        return node if collective is not None and collective.reduction is Reduction.SUM else None

    def gathered(self, value: Instruction) -> Instruction | None:
        """What the last stage gave to all, be it by an all-gather of which ``value`` is that part."""
        if value.opcode == "collective-broadcast" and self._is_from_last(value):
            return value.operands[0]
        if value.opcode != "slice" or value.operands[0].opcode != "all-gather":
            return None
        whole = value.operands[0]
        node = self.nodes.get(whole)
        if node is None or node.collective is None or len(whole.operands) != 1:
            return None
        (given,), (axis,) = whole.operands, whole.proto.dimensions
        size = given.shape.dimensions[axis]
        bounds = value.proto.slice_dimensions[axis]
        if list(value.shape.dimensions) != list(given.shape.dimensions) or bounds.start % size:
            return None
        return given if self._is_last(node, bounds.start // size) else None

    def _is_from_last(self, value: Instruction) -> bool:
        node = self.nodes.get(value)
        if node is None or node.collective is None:
            return False
        roots = {frozenset(group): group[0] for group in node.collective.groups}
        return roots == {frozenset(group): group[-1] for group in self.part.groups}

    def shared(self, value: Instruction, axis: int) -> Instruction | None:
        """The operand of a collective of which all stages of each pipeline, and no others, get ``value``, if
        it keeps what lies along dimension ``axis`` apart."""
        reduced, operand = summed(value) or (value, 0)
        node = self.nodes.get(reduced)
        collective = None if node is None else node.collective
        if collective is None or len(reduced.operands) <= operand:
            return None
        own = {frozenset(group) for group in self.part.groups}
        if {frozenset(group) for group in collective.groups} != own:
            return None
        if collective.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
            apart = len(reduced.operands) == 1 and axis not in reduced.proto.dimensions
        else:
            apart = collective.kind is Kind.ALL_REDUCE
        return reduced.operands[operand] if apart else None

    @staticmethod
    def scattered(value: Instruction) -> Instruction | None:
        """What each stage gives to one of them, if that is what a reduce-scatter sums up for it."""
        if value.opcode != "reduce-scatter" or value.operands[0].opcode != "pad":
            return None
        padded, (axis,) = value.operands[0], value.proto.dimensions
        given = padded.operands[0]
        own = list(padded.proto.padding_config.dimensions)
        others = own[:axis] + own[axis + 1 :]
        if list(given.shape.dimensions) != list(value.shape.dimensions) or any(
            d.edge_padding_low or d.edge_padding_high for d in others
        ):
            return None
        return given

    def _is_last(self, node: Node, position: int) -> bool:
        """Whether the last stages have this position in the groups of a collective over stages."""
        assert node.collective is not None
        groups = {frozenset(group): group for group in node.collective.groups}
        found = [groups.get(frozenset(own), ()) for own in self.part.groups]
        return all(
            bool(group) and group[position] == own[-1]
            for own, group in zip(self.part.groups, found, strict=True)
        )

    def terms(self, summed: Instruction, value: Instruction) -> tuple[int, ...] | None:
        """For each member of the group of an all-reduce or reduce-scatter, in its order, the stage that gives
        the same ``value`` to it.

        None if it is not a sum over the stages of each pipeline. Raises `Refusal` if the last stage cannot
        compute what another one gives.
        """
        node = self._sum(summed)
        if node is None or node.collective is None:
            return None
        if summed.opcode == "reduce-scatter":
            (axis,) = summed.proto.dimensions
            low = summed.operands[0].proto.padding_config.dimensions[axis].edge_padding_low
            size = summed.shape.dimensions[axis]
            if low % size or not self._is_last(node, low // size):
                return None
        own = {frozenset(group): group for group in self.part.groups}
        if not set(own) <= {frozenset(group) for group in node.collective.groups}:
            return None
        stages = self.part.groups[0]
        try:
            _, tables = self._cut(value)
        except Refusal as refusal:
            raise Refusal(
                "what the backward pass begins with is summed up over all stages by "
                f"{summed.describe()}, and is not known to be computed from what all stages have: "
                f"{refusal} is of the stage's own. Give the outputs of the last stage to all by psum before "
                "the head, or mask what a stage gives to the sum by where"
            ) from None
        found: dict[tuple[int, ...], int] = {}
        whos = []
        for stage in reversed(range(len(stages))):
            key = tuple(int(t[g[stage]]) for t in tables.values() for g in self.part.groups)
            whos.append(found.setdefault(key, 0 if stage == len(stages) - 1 else stage + 1))
        whos.reverse()
        members = next(g for g in node.collective.groups if frozenset(g) == frozenset(stages))
        return tuple(whos[stages.index(d)] for d in members)

    def _cut(self, value: Instruction) -> tuple[list[Instruction], dict[Instruction, np.ndarray]]:
        """What a value is computed from: what is the same on all stages, and numbers, [devices] each.

        Raises `Refusal` with what else it needs.
        """
        same: list[Instruction] = []
        tables: dict[Instruction, np.ndarray] = {}
        stack, seen = [value], {value}
        while stack:
            top = stack.pop()
            if self.same(top):
                same.append(top)
                continue
            table = self.known(top)
            if table is not None:
                tables[top] = table
                continue
            operands = needed_by(top)
            if (
                not operands
                or operands[0] is self.part.loop.instruction
                or any(c.needs_runtime for c in top.called)
                or top.has_side_effect
                or (top in self.nodes and self.nodes[top].collective is not None)
            ):
                raise Refusal(top.describe())
            fresh = [o for o in operands if o not in seen]
            seen |= set(fresh)
            stack += fresh
        return same, tables

    def cut(
        self, value: Instruction, who: int
    ) -> tuple[list[Instruction], dict[Instruction, np.ndarray]]:
        """What a value of stage ``who``, which `terms` has gone through, is computed from: what is the same
        on all stages, and numbers, as `number` gives them."""
        same, tables = self._cut(value)
        return same, {i: self._theirs(table, who) for i, table in tables.items()}

    def known(self, value: Instruction) -> np.ndarray | None:
        """A known integer or predicate, [devices], of s32."""
        node = self.nodes.get(value)
        if node is None or value.shape.dimensions or len(node.results) != 1:
            return None
        known = self.followed.forward.known(self.followed.entry, node.results[0])
        if known is None or known.dtype.kind not in "biu":
            return None
        numbers = np.broadcast_to(known.reshape(-1), (self.followed.forward.num_devices,))
        if numbers.min() < -(2**31) or numbers.max() >= 2**31:
            return None
        return numbers.astype(np.int32)

    def number(self, value: Instruction, who: int) -> np.ndarray | None:
        """For each device that is a last stage, the number that stage ``who`` of its pipeline has; None if
        that is not known."""
        table = self.known(value)
        return None if table is None else self._theirs(table, who)

    def _theirs(self, table: np.ndarray, who: int) -> np.ndarray:
        found = np.zeros_like(table)
        for group in self.part.groups:
            found[group[-1]] = table[group[who - 1]]
        return found

    def is_exact(self, value: Instruction, terms: Sequence[int]) -> bool:
        """Whether the sum of what these stages give has the same bits in any order."""
        if value.shape.element_type not in FLOATS or len(terms) == 2:
            return True
        if len(terms) <= EXACT and not any(terms):
            return True
        return terms.count(0) == 1 and all(
            self.gives_nothing(value, who) for who in set(terms) - {0}
        )

    def gives_nothing(self, value: Instruction, who: int) -> bool:
        """Whether what a stage gives is zeros of any sign, or NaN."""
        key = value, who
        if key not in self._zeros:
            self._zeros[key] = self._gives_nothing(value, who)
        return self._zeros[key]

    def _gives_nothing(self, value: Instruction, who: int) -> bool:
        node = self.nodes.get(value)
        if node is not None and len(node.results) == 1:
            rows = self.followed.forward.zero(self.followed.entry, node.results[0])
            devices = [group[who - 1] for group in self.part.groups]
            if rows is not None and all(rows[d if len(rows) > 1 else 0] for d in devices):
                return True

        def each(values: Iterable[Instruction]) -> list[bool]:
            return [self.gives_nothing(v, who) for v in values]

        operands, opcode = needed_by(value), value.opcode
        if opcode in _OF_ANY:
            return any(each(operands))
        if opcode in _OF_ALL or opcode == "pad":
            return all(each(operands))
        if opcode == "reduce" and native_reduction(value.called[0]) is Reduction.SUM:
            return all(each(operands))
        if opcode == "select":
            number = self.known(_scalar(operands[0]))
            if number is not None:
                taken = {bool(number[group[who - 1]]) for group in self.part.groups}
                return all(each(operands[1 if t else 2] for t in taken))
            return all(each(operands[1:]))
        if opcode in _OF_FIRST and value.shape.element_type in FLOATS:
            return self.gives_nothing(operands[0], who)
        return False


def summed(value: Instruction) -> tuple[Instruction, int] | None:
    """The all-reduce that gives a value, and the position of its operand there."""
    if value.opcode == "all-reduce" and len(value.operands) == 1:
        return value, 0
    if value.opcode == "get-tuple-element" and value.operands[0].opcode == "all-reduce":
        return value.operands[0], value.proto.tuple_index
    return None


def _scalar(value: Instruction) -> Instruction:
    while value.opcode in ("broadcast", "reshape", "bitcast"):
        value = value.operands[0]
    return value
