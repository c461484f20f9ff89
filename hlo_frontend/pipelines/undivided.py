"""What stages compute between two loops for their own microbatches, computed for all microbatches instead.

Where the outputs of a pipeline are divided over the stages, each stage computes the head and the loss of its
own part of them, and the gradient that the backward pass begins with. XLA writes that as a program for a
device, on arrays with as many rows as a stage has microbatches. `Undivided` adds the same computation with
the rows of all microbatches, which each device can make of what all have put away: it goes backwards from the
value, as `rows` does, and makes each op longer in the dimension of microbatches. What does not depend on
the loops, as labels, is gathered. Where a stage gathers the outputs of all of them, computes with these, and
takes its own part of what comes of it, that is done without gathering.

No row depends on how many there are: that is what the rules of `rows` say. An engine may round a product of
another size otherwise. A permutation of a stage's rows, as outputs need that lie in another order than
inputs, moves nothing: `Whole.order` says which row is which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from stretto.collectives.ops import Reduction

from ..builder import resized
from ..collectives import native_reduction
from ..graph import COLLECTIVES, Instruction
from ..passes.valid.known import is_row_major, keeps_order
from ..values import Node
from . import indexed
from .blocks import Block, blocks_of
from .chains import Followed
from .emit import Builder, needed_by
from .members import summed
from .refusal import Refusal
from .rewrite import shaped, without_sign_of_zero
from .rows import of_length
from .sameness import Class, Sameness
from .weights import from_first

_TOGETHER = frozenset({"all-gather", "all-reduce", "reduce-scatter"})
_COUNTS = frozenset(
    {"bitcast", "broadcast", "concatenate", "convert", "copy", "reshape", "transpose"}
)


@dataclass(frozen=True)
class Whole:
    """An array with ``unit`` elements along dimension ``axis`` for each microbatch of all stages. ``order``:
    for each microbatch, by stage and number there, the row that it has; None if all rows are alike, or count
    themselves."""

    array: Any
    axis: int
    unit: int
    order: tuple[int, ...] | None


class Undivided:
    """Adds such computations to the entry computation.

    ``groups``: the stages of each pipeline; ``count``: how many microbatches each of them has. ``depends``:
    what depends on loops; ``collected``: what all stages' parts of results of loops are. ``computes``:
    whether what depends on loops is computed for all microbatches, and not gathered. ``owners``: the places
    of stages that have all of ``collected``.
    """

    def __init__(
        self,
        b: Builder,
        followed: Followed,
        sameness: Sameness,
        groups: Sequence[Sequence[int]],
        count: int,
        collected: Mapping[Instruction, Whole],
        *,
        computes: bool,
    ) -> None:
        self.b, self.followed, self.sameness = b, followed, sameness
        self.groups, self.count, self.collected = groups, count, collected
        self.computes = computes
        self.depends: set[Instruction] = set()
        self._nodes: dict[Instruction, Node] = {
            n.instruction: n for n in followed.entry.block.nodes
        }
        self._made: dict[tuple[Instruction, Block, bool], Whole] = {}
        self._all: dict[Instruction, Any] = {}
        self._own: dict[Instruction, Instruction] = {}
        self.owners: set[int] = set()

    @property
    def _stages(self) -> int:
        return len(self.groups[0])

    @property
    def _total(self) -> int:
        return self._stages * self.count

    @property
    def _in_order(self) -> tuple[int, ...]:
        return tuple(range(self._total))

    def whole(self, value: Instruction, axis: int) -> Whole:
        """A value of the entry computation with one element along ``axis`` for each of a stage's
        microbatches. Raises `Refusal`."""
        if value not in self.depends or not self.computes:
            return self._gathered(value, Block(axis, 1))
        return self._ordered(value, Block(axis, 1))

    def _ordered(self, value: Instruction, block: Block) -> Whole:
        found = self._of(value, block)
        return found if found.order is not None else replace(found, order=self._in_order)

    def _gathered(self, value: Instruction, block: Block) -> Whole:
        sizes = list(value.shape.dimensions)
        own = value.proto
        if not is_row_major(value.shape):
            own = self.b.add("copy", resized(value.shape, sizes), [own])
        sizes[block.axis] *= self._stages
        made = self.b.add(
            "all-gather", resized(value.shape, sizes), [own], channel_id=1,
            use_global_device_ids=True, dimensions=[block.axis],
        )  # fmt: skip
        for group in self.groups:
            made.replica_groups.add(replica_ids=group)
        return Whole(made, block.axis, block.unit, self._in_order)

    def _of(self, value: Instruction, block: Block, counts: bool = False) -> Whole:
        """All rows of a value, of which a stage has blocks. ``counts``: whether a number of a row is that
        among the rows, as of indices of a gather."""
        key = value, block, counts
        if key not in self._made:
            self._made[key] = self._find(value, block, counts)
        return self._made[key]

    def _find(self, value: Instruction, block: Block, counts: bool) -> Whole:
        if value in self.collected:
            return self._along(self.collected[value], value, block)
        if value not in self.depends:
            return self._held(value, block, counts)
        found = (
            self._own_part(value, block)
            or self._own_sum(value, block)
            or self._reordered(value, block)
            or self._put(value, block)
        )
        return found or self._longer(value, block, counts)

    def _along(self, whole: Whole, value: Instruction, block: Block) -> Whole:
        """The same rows as blocks that a value, of which they are, has. All of a single row is a block of any
        dimension."""
        if (whole.axis, whole.unit) == (block.axis, block.unit):
            return whole
        sizes = list(value.shape.dimensions)
        if (
            self.count > 1
            or whole.axis > block.axis
            or sizes[block.axis] != block.unit
            or any(n > 1 for n in sizes[whole.axis : block.axis])
        ):
            raise _mixed(value)
        sizes[block.axis] *= self._stages
        made = self.b.reshape(whole.array, sizes)
        return Whole(made, block.axis, block.unit, whole.order)

    def _longer(self, value: Instruction, block: Block, counts: bool) -> Whole:
        """The same op on all rows."""
        parts = blocks_of(value, block)
        if value.opcode in ("gather", "scatter"):
            counts = self._counts(value, block)
        found: list[Whole | None] = []
        for n, (operand, own) in enumerate(parts):
            if own is None:
                found.append(None)
            elif own.shift:
                raise _mixed(value)
            else:
                indexes = value.opcode not in ("gather", "scatter") or n == 1
                found.append(self._of(operand, own, counts and indexes))
        order = self._aligned(found, [operand in self.depends for operand, _ in parts])
        operands = [
            self._same(operand) if own is None else own.array
            for (operand, _), own in zip(parts, order[1], strict=True)
        ]
        length = Block(block.axis, block.unit * self._total)
        made = of_length(self.b, value, length, operands)
        return Whole(made, block.axis, block.unit, order[0])

    def _same(self, value: Instruction) -> Any:
        """A value of which each row needs all."""
        if value in self.depends:
            raise _mixed(value)
        if self.sameness.of(value) is not Class.SAME:
            raise _not_same(value)
        return value.proto

    def _aligned(
        self, found: Sequence[Whole | None], depends: Sequence[bool]
    ) -> tuple[tuple[int, ...] | None, list[Whole | None]]:
        """These with their rows in one order, and that order."""
        orders = [w.order for w, d in zip(found, depends, strict=True) if w is not None and d]
        orders += [w.order for w in found if w is not None]
        order = next((o for o in orders if o is not None), None)
        return order, [None if w is None else self._arranged(w, order) for w in found]

    def _arranged(self, whole: Whole, order: tuple[int, ...] | None) -> Whole:
        """The same rows in another order."""
        if order is None or whole.order in (None, order):
            return whole
        assert whole.order is not None
        source = dict(zip(order, whole.order, strict=True))  # by row there, the row here
        shape = list(whole.array.shape.dimensions)
        parts = []
        for row in range(self._total):
            low = source[row] * whole.unit
            sizes = [whole.unit if d == whole.axis else n for d, n in enumerate(shape)]
            part = self.b.add("slice", resized(whole.array.shape, sizes), [whole.array])
            for d, n in enumerate(shape):
                begin = low if d == whole.axis else 0
                end = low + whole.unit if d == whole.axis else n
                part.slice_dimensions.add(start=begin, limit=end, stride=1)
            parts.append(part)
        made = self.b.add(
            "concatenate", resized(whole.array.shape, shape), parts, dimensions=[whole.axis]
        )
        return replace(whole, array=made, order=order)

    # What does not depend on the loops.

    def _held(self, value: Instruction, block: Block, counts: bool) -> Whole:
        """Of a value that does not depend on the loops: what it is computed from is gathered where it can be,
        as labels are smaller than what a loss makes of them."""
        if value.opcode == "iota":
            if not counts and value.proto.dimensions[0] == block.axis:
                return self._gathered(value, block)
            made = of_length(self.b, value, Block(block.axis, block.unit * self._total), ())
            return Whole(made, block.axis, block.unit, None)
        try:
            own = self._own_part(value, block)
            return own or self._longer(value, block, counts and value.opcode in _COUNTS)
        except Refusal:
            return self._gathered(value, block)

    def _counts(self, value: Instruction, block: Block) -> bool:
        """Whether indices of a gather or scatter have the number of their own row, and no other number that
        counts rows."""
        if value.opcode == "gather":
            _, found = indexed.gathered(value, block.axis, block.unit)
            vector = value.proto.gather_dimension_numbers.index_vector_dim
        else:
            found = indexed.scattered(value, block.axis, block.unit)
            vector = value.proto.scatter_dimension_numbers.index_vector_dim
        if found is None or found.component is None:
            return False
        if not indexed.counts_alone(value.operands[1], vector, found):
            raise _mixed(value)
        return True

    # Parts and permutations of rows.

    def _numbers(self, user: Instruction, operand: int) -> np.ndarray | None:
        """An operand of an instruction that is a known array of integers, by device."""
        node = self._nodes.get(user)
        if node is None or len(node.operands) != len(user.operands):
            return None
        known = self.followed.forward.known(self.followed.entry, node.operands[operand])
        if known is None or known.dtype.kind not in "iu":
            return None
        devices = self.followed.forward.num_devices
        return np.broadcast_to(known, (devices, *known.shape[1:]))

    def _own_part(self, value: Instruction, block: Block) -> Whole | None:
        """Of what a stage cuts out of an array of all microbatches, which it computes of all outputs."""
        if value.opcode != "dynamic-slice":
            return None
        array = value.operands[0]
        whole, own = list(array.shape.dimensions), list(value.shape.dimensions)
        axes = [d for d, (n, m) in enumerate(zip(whole, own, strict=True)) if n != m]
        if len(axes) != 1 or own[axes[0]] % self.count:
            return None
        (axis,) = axes
        size, numbers = own[axis], self._numbers(value, 1 + axis)
        if whole[axis] != size * self._stages or numbers is None:
            return None
        begins = numbers.reshape(-1)
        if any(begins[d] != p * size for group in self.groups for p, d in enumerate(group)):
            return None
        found = Whole(self._all_of(array), axis, size // self.count, self._in_order)
        if array in self._own:
            raise _not_same(self._own[array])
        return self._along(found, value, block)

    def _own_sum(self, value: Instruction, block: Block) -> Whole | None:
        """Of a stage's part of a sum that is scattered over the stages: of what each computes of all
        outputs."""
        if value.opcode != "reduce-scatter" or len(value.operands) != 1:
            return None
        (axis,), (operand,) = value.proto.dimensions, value.operands
        if not self._is_over_stages(value) or value.shape.dimensions[axis] % self.count:
            return None
        whole = self._all_of(operand)
        made = self.b.copy(value, [whole])
        made.opcode = "all-reduce"
        made.ClearField("dimensions")
        made.shape.CopyFrom(whole.shape)
        size = value.shape.dimensions[axis]
        return self._along(Whole(made, axis, size // self.count, self._in_order), value, block)

    def _all_of(self, value: Instruction) -> Any:
        """What each stage computes of the outputs of all. ``_own`` gets what need not be the same on all
        stages, with what makes it so."""
        if value not in self._all:
            self._all[value] = self._find_all(value)
        return self._all[value]

    def _find_all(self, value: Instruction) -> Any:
        if value not in self.depends:
            if self.sameness.of(value) is not Class.SAME:
                self._own[value] = value
            return value.proto
        if value.opcode == "get-tuple-element" and value.operands[0].opcode == "while":
            raise _mixed(value)
        made = self._find_together(value)
        if made is not None:
            return made
        made, source = self._find_alone(value), value
        while _reshapes(source):
            source = source.operands[0]
        sources = needed_by(value) if source is value else [source]
        own = [self._own[o] for o in sources if o in self._own]
        if own:
            self._own[value] = own[0]
        return made

    def _find_together(self, value: Instruction) -> Any:
        """What a collective of the stages gives, of what each of them computes of all outputs."""
        reduced, n = summed(value) or (value, 0)
        if _is_gathered(value):
            try:
                return shaped(self.b, self._of_all(value), value.shape)
            except Refusal:
                pass
        if reduced.opcode not in _TOGETHER or not self._is_over_stages(reduced):
            return None
        operand = self._all_of(reduced.operands[n])
        made = self.b.copy(reduced, [operand])
        made.shape.CopyFrom(resized(operand.shape, value.shape.dimensions))
        if value.opcode == "reduce-scatter":
            self._own[value] = value
        return made

    def _find_alone(self, value: Instruction) -> Any:
        if _reshapes(value):
            return shaped(self.b, self._flat(value), value.shape)
        if (
            value.opcode in COLLECTIVES
            or any(c.needs_runtime for c in value.called)
            or (value.has_side_effect)
        ):
            raise _mixed(value)
        sources = needed_by(value)
        made = [self._all_of(o) for o in sources]
        return self.b.copy(value, made) if sources == value.operands else made[0]

    def _flat(self, value: Instruction) -> Any:
        """The elements of what each stage computes of all outputs, in whatever shape has them in this order:
        an array whose first dimension is that of stages has no rows that are those of microbatches."""
        if value in self.depends and _is_gathered(value):
            return self._of_all(value)
        return self._flat(value.operands[0]) if _reshapes(value) else self._all_of(value)

    def _of_all(self, value: Instruction) -> Any:
        """The elements of what an all-gather gives, of parts of which each stage has one."""
        if not self._is_over_stages(value):
            raise _mixed(value)
        (part,), (axis,) = value.operands, value.proto.dimensions
        sizes = list(part.shape.dimensions)
        along = axis
        while sizes[along] == 1 and self.count > 1 and along + 1 < len(sizes):
            along += 1
        if sizes[along] % self.count:
            raise _mixed(value)
        found = self._ordered(part, Block(along, sizes[along] // self.count))
        array = self._arranged(found, self._in_order).array
        if len(self.owners) != 1:
            return array
        (owner,) = self.owners
        groups = [[g[owner], *(d for d in g if d != g[owner])] for g in self.groups]
        return from_first(self.b, array, groups)

    def _is_over_stages(self, value: Instruction) -> bool:
        """Whether the groups of a collective are the stages of pipelines."""
        node = self._nodes.get(value)
        groups = [] if node is None or node.collective is None else node.collective.groups
        return sorted(map(list, groups)) == sorted(map(list, self.groups))

    def _permutation(self, user: Instruction) -> list[int] | None:
        """A permutation of a stage's microbatches that the indices of a gather or scatter are."""
        numbers = self._numbers(user, 1)
        if numbers is None or (numbers != numbers[0]).any():
            return None
        own = [int(n) for n in numbers[0].reshape(-1)]
        return own if sorted(own) == list(range(self.count)) else None

    def _reordered(self, value: Instruction, block: Block) -> Whole | None:
        """Of a gather that takes each row of its operand once."""
        if value.opcode != "gather" or block.unit != 1:
            return None
        numbers, operand = value.proto.gather_dimension_numbers, value.operands[0]
        sizes = list(operand.shape.dimensions)
        batch = [d for d in range(len(value.shape.dimensions)) if d not in numbers.offset_dims]
        own = list(numbers.start_index_map)
        taken = self._permutation(value)
        if batch != [block.axis] or len(own) != 1 or taken is None or numbers.operand_batching_dims:
            return None
        if [1 if d == own[0] else n for d, n in enumerate(sizes)] != list(
            value.proto.gather_slice_sizes
        ):
            return None
        if any(d != own[0] for d in numbers.collapsed_slice_dims):
            return None
        found = self._ordered(operand, Block(own[0], 1))
        made = self._moved(found, block.axis, list(value.shape.dimensions))
        assert found.order is not None
        order = [found.order[s + taken[i]] for s in self._begins() for i in range(self.count)]
        return Whole(made, block.axis, 1, tuple(order))

    def _put(self, value: Instruction, block: Block) -> Whole | None:
        """Of a scatter that adds each row to zeros."""
        if value.opcode != "scatter" or block.unit != 1 or len(value.operands) != 3:
            return None
        updates = value.operands[2]
        numbers = value.proto.scatter_dimension_numbers
        rank = len(updates.shape.dimensions)
        batch = [d for d in range(rank) if d not in numbers.update_window_dims]
        taken = self._permutation(value)
        if list(numbers.scatter_dims_to_operand_dims) != [block.axis] or taken is None:
            return None
        if len(batch) != 1 or numbers.input_batching_dims or not self._begins_with_zeros(value):
            return None
        if native_reduction(value.called[0]) is not Reduction.SUM:
            return None
        if prod(updates.shape.dimensions) != prod(value.shape.dimensions):
            return None
        found = self._ordered(updates, Block(batch[0], 1))
        made = self._moved(found, block.axis, list(value.shape.dimensions))
        assert found.order is not None
        order = [0] * self._total
        for begin in self._begins():
            for i, slot in enumerate(taken):
                order[begin + slot] = found.order[begin + i]
        return Whole(without_sign_of_zero(self.b, made), block.axis, 1, tuple(order))

    def _begins(self) -> range:
        return range(0, self._total, self.count)

    def _moved(self, whole: Whole, axis: int, like: list[int]) -> Any:
        """The rows along another dimension, of an array that is ``like`` that of a stage."""
        rank = len(whole.array.shape.dimensions)
        array = whole.array
        if whole.axis:
            array = self.b.transpose(
                array, [whole.axis, *(d for d in range(rank) if d != whole.axis)]
            )
        others = [n for d, n in enumerate(like) if d != axis]
        array = self.b.reshape(array, [self._total, *others])
        if axis:
            array = self.b.transpose(array, [*range(1, axis + 1), 0, *range(axis + 1, len(like))])
        return array

    def _begins_with_zeros(self, scatter: Instruction) -> bool:
        node = self._nodes.get(scatter)
        if node is None:
            return False
        rows = self.followed.forward.zero(self.followed.entry, node.operands[0])
        return rows is not None and bool(np.all(rows))


def _is_gathered(value: Instruction) -> bool:
    return value.opcode == "all-gather" and len(value.operands) == 1


def _reshapes(value: Instruction) -> bool:
    """Whether it has the elements of its operand in the same order."""
    return value.opcode == "reshape" or (value.opcode == "bitcast" and keeps_order(value))


def _not_same(value: Instruction) -> Refusal:
    return Refusal(
        f"{value.describe()}, with which each stage computes what the backward pass begins with for "
        "its own microbatches, is not known to be the same on all stages"
    )


def _mixed(value: Instruction) -> Refusal:
    return Refusal(
        "what the backward pass begins with is computed by each stage for its own microbatches, and is not "
        f"known to be computed row by row, at {value.describe()}"
    )
