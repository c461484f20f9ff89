"""Separates the rows of what stands between two loops: a head and a loss, for all microbatches at once.

The input of a backward pass is an array with one row for each microbatch, computed from an array that the
forward pass filled row by row. `separated` proves that a row of the one needs nothing of the other but the
row of the same microbatch, and says how it is computed alone. For this it goes backwards from the result.
Of each value it needs one `Block`: a stretch of one dimension, whole in the others. For each op there is a
rule that says which blocks of the operands a block of the result needs (`blocks`); an op without one, or
whose result needs more than a block, is refused by its name. What does not depend on the forward pass is
there before both loops: a block of it is cut out, or all of it taken. Of that, what a compiler would make
one kernel of with the rest is computed again, block by block: a product that is rounded before it is added
to another gives other bits.

Between the loops there may be sums over the stages: of the outputs, to which all stages but the last one give
zeros, and of gradients of a head that all stages compute. The last stage computes what the others give too,
where it can (see `members`). Where it cannot, as what they compute for other classes with their own parts of
a head, all stages compute each row together: an all-reduce over them is made of a row at a time then.

A dot whose rows are computed alone has the same terms in each of its sums. Whether an engine adds them up in
the same order is the engine's: see `docs/pipelines.md`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from ..builder import array_shape, resized, tuple_shape
from ..graph import Instruction
from ..ops import op_of
from ..schema import ShapeProto
from . import indexed
from .blocks import ROW_BY_ROW, Block, Part, blocks_of, has_rule, mixed
from .emit import Builder, fenced, needed_by
from .members import Members, summed
from .refusal import Refusal
from .rewrite import without_sign_of_zero
from .rounding import rounds
from .weights import from_first

_LAST = -1  # what others than the last stage have of it is not read

Key = tuple[Instruction, Block | None, int]  # the same, as stage ``who`` has it (`Members`)
Held = tuple[Instruction, int]  # all of a value, as stage ``who`` has it
Cut = tuple[list[Instruction], dict[Instruction, np.ndarray]]


@dataclass(frozen=True)
class Rows:
    """How one row of a value is computed: ``steps`` in topological order, each with the blocks it reads.

    ``held``: values of the entry computation, which do not depend on the first loop. ``leaves``: results of
    that loop, by position, each with the shift of its row that is read: row ``s + shift`` for row s.
    ``numbers``: those that other stages have, by device. ``theirs``: values that do not depend on the first
    loop, of other stages, each with what it is computed from, as `Members.cut` gives it. ``sums``: the steps
    that are sums over stages, and whether an engine that adds up in any order gives the same. ``together``:
    the steps that are collectives of all stages, which then compute all of it, of what the last one gives to
    all in the steps ``given``; ``groups``: the stages of each pipeline, the last one first.
    """

    result: Key
    steps: dict[Key, tuple[Key, ...]]
    held: tuple[Instruction, ...]
    leaves: tuple[tuple[int, int], ...]
    numbers: Mapping[Key, np.ndarray] = field(default_factory=dict)
    theirs: Mapping[Held, Cut] = field(default_factory=dict)
    sums: Mapping[Key, bool] = field(default_factory=dict)
    together: frozenset[Key] = frozenset()
    given: frozenset[Key] = frozenset()
    groups: Sequence[Sequence[int]] = ()

    @property
    def reads(self) -> list[Held]:
        """What `emit` is to be given as ``held``."""
        return [*((v, 0) for v in self.held), *self.theirs]

    @property
    def rounds(self) -> bool:
        """Whether an engine may round a row that is computed alone otherwise than as a part of the whole: a
        dot of another size is another kernel, and so may be a sum of products."""
        if self.together or not all(self.sums.values()):
            return True
        return rounds(value for value, block, _ in self.steps if block is not None)

    def check(self, slots: Sequence[int]) -> None:
        """Raise `Refusal` if a block is beyond its value for one of these rows."""
        for value, block, _ in self.steps:
            if block is None:
                continue
            length = _dimensions(value)[block.axis]
            for slot in slots:
                if not 0 <= (slot + block.shift) * block.unit <= length - block.unit:
                    raise Refusal(
                        f"row {slot} of what the backward pass begins with is padding, at {value.describe()}"
                    )

    def emit(
        self, b: Builder, row: Any, device: Any, held: Mapping[Held, Any],
        leaves: Mapping[int, Any],
    ) -> Any:  # fmt: skip
        """Add the computation of row ``row``, a scalar of s32. ``leaves``: by position, the row that is read,
        [1, …]. Gives the block of the result.

        What is summed up over stages is computed apart, as it is where something is sent in between.
        """
        made: dict[Key, Any] = {}
        for key in self.sums:
            terms = list(dict.fromkeys(self.steps[key]))
            values = [row, device, *held.values(), *leaves.values(), *made.values()]
            inner = b.editor.computation("schedule.terms")
            own = inner.elements(inner.parameter(tuple_shape([v.shape for v in values])))
            its_held = dict(zip(held, own[2:], strict=False))
            its_leaves = dict(zip(leaves, own[2 + len(held) :], strict=False))
            its_made = dict(zip(made, own[2 + len(held) + len(leaves) :], strict=True))
            self._emit(inner, own[0], own[1], its_held, its_leaves, terms, its_made)
            inner.finish(inner.tuple([its_made[t] for t in terms]))
            shapes = [its_made[t].shape for t in terms]
            given = dict(zip(terms, fenced(b, inner, row, values, shapes), strict=True))
            made[key] = reduce(
                lambda one, other: b.add("add", one.shape, [one, other]),
                [given[t] for t in self.steps[key]],
            )
        self._emit(b, row, device, held, leaves, [self.result], made)
        return made[self.result]

    def _emit(
        self, b: Builder, row: Any, device: Any, held: Mapping[Held, Any],
        leaves: Mapping[int, Any], wanted: Sequence[Key], made: dict[Key, Any],
    ) -> None:  # fmt: skip
        """Add to ``made`` what ``wanted`` need."""
        needed: set[Key] = set()
        stack = list(wanted)
        while stack:
            key = stack.pop()
            if key not in made and key not in needed:
                needed.add(key)
                stack += self.steps[key]
        for key, operands in self.steps.items():
            value, block, who = key
            if key not in needed:
                continue
            if key in self.numbers:
                number = b.lookup(self.numbers[key], [b.convert(device, array_shape("s32"))])
                made[key] = b.convert(number, value.shape)
            elif block is None and not operands:
                constant = value.opcode == "constant"
                made[key] = b.copy(value, ()) if constant else held[value, who]
            elif block is None:
                made[key] = b.copy(value, [made[o] for o in operands])
            elif operands and operands[0][0] is value:
                made[key] = _cut(b, made[operands[0]], block, row)
            elif not operands:
                made[key] = leaves[value.proto.tuple_index]
            elif key in self.together:
                made[key] = _collective(b, value, block, made[operands[0]])
            elif key in self.given:
                own = from_first(b, made[operands[0]], self.groups)
                made[key] = own if summed(value) is None else without_sign_of_zero(b, own)
            elif summed(value) is not None:
                made[key] = without_sign_of_zero(b, made[operands[0]])
            elif value.opcode == "collective-broadcast" or (
                value.opcode != "get-tuple-element" and operands[0][0] not in value.operands
            ):
                made[key] = made[operands[0]]
            else:
                given = _counted(b, value, block, row, [made[o] for o in operands])
                made[key] = of_length(b, value, block, given)


def _collective(b: Builder, value: Instruction, block: Block, operand: Any) -> Any:
    """A collective that gives a block of ``value``, of its operand alone."""
    reduced, _ = summed(value) or (value, 0)
    made = b.copy(reduced, [operand])
    made.shape.CopyFrom(value.shape)
    return _resized(made, block)


def _cut(b: Builder, whole: Any, block: Block, row: Any) -> Any:
    sizes = list(whole.shape.dimensions)
    sizes[block.axis] = block.unit
    at = row
    if block.shift:
        at = b.add("add", at.shape, [at, b.constant(block.shift)])
    if block.unit > 1:
        at = b.add("multiply", at.shape, [at, b.constant(block.unit)])
    zero = b.constant(0)
    starts = [at if d == block.axis else zero for d in range(len(sizes))]
    return b.dynamic_slice(whole, starts, sizes)


def _counted(
    b: Builder, value: Instruction, block: Block, row: Any, operands: list[Any]
) -> list[Any]:
    """The operands of a block of ``value``, with indices that are counted from where their blocks begin."""
    found, shift = None, block.shift
    if value.opcode == "gather":
        _, found = indexed.gathered(value, block.axis, block.unit)
        shift += found.shift if found is not None else 0
    elif value.opcode == "scatter":
        found = indexed.scattered(value, block.axis, block.unit)
    if found is None:
        return operands
    begin = b.add("add", row.shape, [row, b.constant(shift)])
    begin = b.add("multiply", begin.shape, [begin, b.constant(found.unit)])
    return [operands[0], indexed.from_block(b, value, found, begin, operands[1]), *operands[2:]]


def _dimensions(value: Instruction) -> Sequence[int]:
    """Those of an array, or of the first one of a tuple; all results of a reduce have the same."""
    shapes = value.shape.tuple_shapes
    return list((shapes[0] if shapes else value.shape).dimensions)


def _resized(proto: Any, block: Block) -> Any:
    def part(shape: Any) -> Any:
        sizes = list(shape.dimensions)
        sizes[block.axis] = block.unit
        return resized(shape, sizes)

    parts = proto.shape.tuple_shapes
    proto.shape.CopyFrom(tuple_shape(map(part, parts)) if parts else part(proto.shape))
    if proto.HasField("padding_config"):
        own = proto.padding_config.dimensions[block.axis]
        own.edge_padding_low = own.edge_padding_high = 0
    for dimension, bounds in enumerate(proto.slice_dimensions):
        if dimension == block.axis:
            bounds.start, bounds.limit = 0, block.unit
    return proto


def separated(
    value: Instruction, loop: Instruction, depends: Collection[Instruction], members: Members
) -> Rows:
    """One row of ``value``, in the entry computation, along its first dimension: as the last stage alone can
    compute it, or else as all stages can together.

    ``loop``: the loop before it. ``depends``: the instructions of the entry computation that depend on that
    loop's results. ``members``: what its stages have. Raises `Refusal`.
    """
    try:
        return _Search(loop, depends, members).rows(value)
    except Refusal as refusal:
        alone = refusal
    try:
        return _SearchTogether(loop, depends, members).rows(value)
    except Refusal:
        raise alone from None


class _Search:
    """Goes backwards from a value, see `separated`: as the last stage computes a row alone."""

    def __init__(
        self, loop: Instruction, depends: Collection[Instruction], members: Members
    ) -> None:
        self.loop, self.depends, self.members = loop, depends, members
        self.numbers: dict[Key, np.ndarray] = {}
        self.theirs: dict[Held, Cut] = {}
        self.sums: dict[Key, bool] = {}
        self.together: set[Key] = set()
        self.given: set[Key] = set()

    def rows(self, value: Instruction) -> Rows:
        begin: Key = (value, Block(0, 1), 0)
        steps: dict[Key, tuple[Key, ...]] = {}
        left = [begin]
        while left:
            key = left.pop()
            if key not in steps:
                steps[key] = self.found(key)
                left += steps[key]
        place = {i: n for n, i in enumerate(value.computation.instructions)}
        # All of a value is there before a block of it is cut out.
        ordered = sorted(steps, key=lambda k: (place[k[0]], k[1] is not None))
        held = [v for v, block, who in ordered if not steps[v, block, who]
                and v.opcode != "constant" and block is None and not who]  # fmt: skip
        leaves = {(v.proto.tuple_index, block.shift) for v, block, _ in ordered
                  if block is not None and _is_leaf(v, self.loop) and v in self.depends}  # fmt: skip
        in_order = {k: self.sums[k] for k in ordered if k in self.sums}
        return Rows(
            begin, {k: steps[k] for k in ordered}, tuple(held), tuple(sorted(leaves)), self.numbers,
            self.theirs, in_order, frozenset(self.together), frozenset(self.given),
            [(g[-1], *g[:-1]) for g in self.members.part.groups],
        )  # fmt: skip

    def found(self, key: Key) -> tuple[Key, ...]:
        """What a step reads. Raises `Refusal`."""
        value, block, who = key
        members = self.members
        if who:
            number = members.number(value, who) if block is None else None
            if number is not None:
                self.numbers[key] = number
                return ()
            parts = _others(value, block, self.depends)
            if parts is None:
                self.theirs[value, who] = members.cut(value, who)
            return self.of(parts or (), who)
        if value in self.depends and block is not None:
            reduced, operand = summed(value), members.scattered(value)
            if reduced is not None:
                operand = reduced[0].operands[reduced[1]]
                if members.alone(*reduced):
                    return ((operand, block, 0),)
            terms = None
            if operand is not None:
                terms = members.terms(value if reduced is None else reduced[0], operand)
            if operand is not None and terms is not None:
                self.sums[key] = members.is_exact(operand, terms)
                return tuple(self.of([(operand, block)], who)[0] for who in terms)
            operand = members.gathered(value)
            if operand is not None:
                return ((operand, block, 0),)
        return self.of(_operands(value, block, self.loop, self.depends), 0)

    def of(self, parts: Iterable[Part], who: int) -> tuple[Key, ...]:
        """These as stage ``who`` has them."""
        return tuple((v, block, 0 if who and self.members.same(v) else who) for v, block in parts)


class _SearchTogether(_Search):
    """The same, as all stages compute a row together: each of what it has itself, and of what the last one
    gives to all. What comes of it on the last one is the row."""

    def found(self, key: Key) -> tuple[Key, ...]:
        value, block, who = key
        if value not in self.depends or block is None:
            return self.of(_operands(value, block, self.loop, self.depends), 0)
        if not who:
            given, reduced = self.members.gathered(value), summed(value)
            if given is None and reduced is not None and self.members.alone(*reduced):
                given = reduced[0].operands[reduced[1]]
            if given is not None:
                self.given.add(key)
                return ((given, block, _LAST),)
            shared = self.members.shared(value, block.axis)
            if shared is not None:
                self.together.add(key)
                return ((shared, block, 0),)
            if _is_leaf(value, self.loop):
                raise Refusal(f"each stage has its own {value.describe()}")
        return self.of(_operands(value, block, self.loop, self.depends), who)

    def of(self, parts: Iterable[Part], who: int) -> tuple[Key, ...]:
        return tuple((v, block, who if v in self.depends else 0) for v, block in parts)


def of_length(b: Builder, value: Instruction, block: Block, operands: Sequence[Any]) -> Any:
    """The same op, on blocks of its operands, which gives ``block``; see `blocks_of`."""
    source = needed_by(value)[0] if value.operands else None
    if value.opcode == "get-tuple-element":
        is_made = source is value.operands[0]
        return b.element(operands[0], value.proto.tuple_index) if is_made else operands[0]
    if value.opcode == "bitcast":
        target = ShapeProto.FromString(value.shape.SerializeToString())
        target.dimensions[block.axis] = block.unit
        return b.reinterpret(operands[0], value.operands[0].shape, target)
    return _resized(b.copy(value, operands), block)


def _is_leaf(value: Instruction, loop: Instruction) -> bool:
    return value.opcode == "get-tuple-element" and value.operands[0] is loop


def _operands(
    value: Instruction, block: Block | None, loop: Instruction, depends: Collection[Instruction]
) -> tuple[Part, ...]:
    """The blocks that a block needs; none for what is there before the loop."""
    if block is None:
        if value in depends:
            raise Refusal(
                "between the forward pass and the backward pass, the rows of microbatches are not separate: "
                f"all of {value.describe()} is read for each of them. {ROW_BY_ROW}"
            )
        return tuple((o, None) for o in value.operands) if _is_scalar_op(value) else ()
    if value in depends and _is_leaf(value, loop):
        if block.axis or block.unit != 1:
            raise mixed(value)
        return ()
    if value not in depends:
        if not _is_fused(value):
            return ((value, None),)
        try:
            return blocks_of(value, block)
        except Refusal:
            return ((value, None),)
    return blocks_of(value, block)


def _others(
    value: Instruction, block: Block | None, depends: Collection[Instruction]
) -> tuple[Part, ...] | None:
    """The blocks that a block needs of a value that another stage has otherwise; None for a value that is
    there before the loop."""
    if block is None:
        if _is_scalar_op(value):
            return tuple((o, None) for o in value.operands)
        if value in depends:
            raise mixed(value)
        return None
    if value not in depends and not (has_rule(value) and _is_fused(value)):
        return ((value, None),)
    return blocks_of(value, block)


def _is_scalar_op(value: Instruction) -> bool:
    return not value.shape.dimensions and op_of(value.opcode).elementwise


def _is_fused(value: Instruction) -> bool:
    """Whether a block of a value that is there before the loop is computed again instead of being cut out."""
    op = op_of(value.opcode)
    if value.opcode == "gather":  # no arithmetic
        return False
    return op.fuses or op.renames or value.opcode in ("copy", "broadcast")
