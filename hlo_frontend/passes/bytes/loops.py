"""Loops that work batch by batch: `batches` of ``while``, and the loop for a part.

What JAX makes of pivots (``jax.numpy.linalg`` of matrices: inv, solve, det) is a loop over columns, each
iteration of which works on all matrices. A loop is independent along a dimension of its carries if its body
is, instruction by instruction, with the same dimension of each carry before and behind it, and its condition
reads nothing that is cut. Carries of which the body makes parts become parts, until nothing changes.

Whole values may be read beside parts where a smaller one can be made: constants that are spread, and iotas
along other dimensions. An iota along the dimension itself may only be a column of indices into an array that
is cut alike (``x[arange(n), i]``): the part's own rows are 0, 1, … then. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from math import prod

from stretto.collectives.types import TensorType

from ...graph import Computation, Instruction, all_instructions, leaf_types
from ...schema import TUPLE, HloComputationProto, HloInstructionProto
from ...values import Node, Value
from ..valid.known import keeps_order
from .batches import Batch, batches, windows_of
from .cut import cut_node, cut_proto, cut_shape

_LARGEST = 400  # instructions of a body that are looked at


class _Refused(Exception):
    """The loop is not independent, as far as it can be told."""


class _Wanted(Exception):
    """Carries must be cut as well. ``carries``: their dimensions by their positions."""

    def __init__(self, carries: dict[int, int]) -> None:
        super().__init__()
        self.carries = carries


@dataclass(frozen=True)
class _Cut:
    """A part of an array along a dimension. ``rows``: of indices of which one number is that of the row
    itself, counted from the part's first: the dimension of those numbers, which of them, and how many rows
    the whole has."""

    dimension: int
    rows: tuple[int, int, int] | None = None


# Of an array: its part, or None if it is whole. Of a tuple: those of its elements.
State = _Cut | None | tuple["_Cut | None", ...]
# One way to cut an array: carries with their dimensions, and arrays to be cut along dimensions.
_Way = tuple[dict[int, int], list[tuple[Instruction, int]]]


@dataclass
class _Plan:
    """How a computation works on parts. ``wanted``: operands of which a smaller one is made, by instruction
    and position: along which dimension. ``called``: the computations of loops in it, for parts."""

    states: dict[Instruction, State] = field(default_factory=dict)
    batch: dict[Instruction, Batch] = field(default_factory=dict)
    wanted: dict[tuple[Instruction, int], int] = field(default_factory=dict)
    called: dict[Instruction, tuple[Computation, ...]] = field(default_factory=dict)


def loop_batches(instruction: Instruction, parts: int) -> Iterator[Batch]:
    """The batches of a loop: those of its carries."""
    if instruction.opcode != "while" or not _is_flat(instruction):
        return
    found: list[Batch] = []
    for k, shape in enumerate(instruction.shape.tuple_shapes):
        for d in range(len(shape.dimensions)):
            batch = _batch_of(instruction, k, d, parts)
            if batch is not None and batch not in found:
                found.append(batch)
                yield batch


def loop_batch(instruction: Instruction, carry: int, dimension: int, parts: int) -> Batch | None:
    """The batch of a loop of which this carry is cut along this dimension; None if it has none."""
    return _batch_of(instruction, carry, dimension, parts) if _is_flat(instruction) else None


def _batch_of(instruction: Instruction, carry: int, dimension: int, parts: int) -> Batch | None:
    shapes = instruction.shape.tuple_shapes
    size = shapes[carry].dimensions[dimension]
    if size % parts or not size:
        return None
    given: list[_Cut | None] = [None] * len(shapes)
    given[carry] = _Cut(dimension)
    try:
        carries, _ = _Parts(parts).loop(instruction, given)
    except (_Refused, _Wanted):
        return None
    dims = tuple([None if c is None else c.dimension for c in carries])
    return Batch(dims, dims)


def cut_loop(node: Node, batch: Batch, operands: Sequence[Value], parts: int) -> Node:
    """The loop for one part of its carries. ``operands``: parts, and whole arrays."""
    made = cut_node(node, batch, operands, parts)
    carries = [None if d is None else _Cut(d) for d in batch.operands]
    _, made.instruction.called = _Parts(parts).loop(node.instruction, carries)
    return made


def _is_flat(instruction: Instruction) -> bool:
    shapes = instruction.shape.tuple_shapes
    if any(shape.element_type == TUPLE for shape in shapes) or instruction.has_side_effect:
        return False
    inside = [i for c in instruction.called for i in all_instructions(c)]
    return len(inside) <= _LARGEST and not any(c.needs_runtime for c in instruction.called)


class _Parts:
    """Follows parts through computations."""

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._known: dict[tuple[Instruction, int], dict[int, int] | None] = {}

    def loop(
        self, instruction: Instruction, given: Sequence[_Cut | None]
    ) -> tuple[list[_Cut | None], tuple[Computation, ...]]:
        """The parts that a loop carries if it begins with these, and its computations for them."""
        body, condition = instruction.called
        carries = list(given)
        while True:
            try:
                plan = self._kept(body, carries)
            except _Wanted as wanted:
                more = [
                    own or (_Cut(wanted.carries[k]) if k in wanted.carries else None)
                    for k, own in enumerate(carries)
                ]
                if more == carries:
                    raise _Refused from None
            else:
                left = plan.states[body.root]
                assert isinstance(left, tuple)
                more = [own or new for own, new in zip(carries, left, strict=True)]
            if more == carries:
                break
            carries = more
        plan.states[body.root] = tuple(carries)
        until = self.followed(condition, (tuple(carries),))
        if until.states[condition.root] is not None:
            raise _Refused
        return carries, (self._made(body, plan), self._made(condition, until))

    def _kept(self, body: Computation, carries: Sequence[_Cut | None]) -> _Plan:
        """A body that has the same parts of carries before and behind it, or more."""
        plan = self.followed(body, (tuple(carries),))
        left = plan.states[body.root]
        if not isinstance(left, tuple):
            raise _Refused
        for k, (own, new) in enumerate(zip(carries, left, strict=True)):
            if new is not None and new.rows is not None:
                raise _Refused
            if own is None or new == own:
                continue
            if new is not None or body.root.opcode != "tuple":
                raise _Refused
            self._want(plan, body.root, k, own.dimension)
        return plan

    def followed(self, computation: Computation, given: Sequence[State]) -> _Plan:
        plan = _Plan()
        for instruction in computation.instructions:
            plan.states[instruction] = self._state(plan, instruction, given)
        return plan

    def _state(self, plan: _Plan, instruction: Instruction, given: Sequence[State]) -> State:
        states = [plan.states[o] for o in instruction.operands]
        match instruction.opcode:
            case "parameter":
                return given[instruction.proto.parameter_number]
            case "get-tuple-element":
                (whole,) = states
                return whole[instruction.proto.tuple_index] if isinstance(whole, tuple) else None
            case "tuple":
                if any(isinstance(s, tuple) for s in states):
                    raise _Refused
                return tuple([s for s in states if not isinstance(s, tuple)])
            case "while":
                return self._nested(plan, instruction, states[0])
        if not any(_is_cut(s) for s in states):
            return None
        arrays = [s for s in states if not isinstance(s, tuple)]
        if len(arrays) < len(states):
            raise _Refused
        return self._batched(plan, instruction, arrays)

    def _nested(self, plan: _Plan, instruction: Instruction, given: State) -> State:
        if not _is_cut(given):
            return None
        assert isinstance(given, tuple)
        if not _is_flat(instruction):
            raise _Refused
        carries, plan.called[instruction] = self.loop(instruction, given)
        (entering,) = instruction.operands
        for k, (own, new) in enumerate(zip(given, carries, strict=True)):
            if own == new or new is None:
                continue
            readers = (i for i in entering.computation.instructions if entering in i.operands)
            if entering.opcode != "tuple" or any(i is not instruction for i in readers):
                raise _Refused
            self._want(plan, entering, k, new.dimension)
        plan.states[entering] = tuple(carries)
        return tuple(carries)

    def _batched(
        self, plan: _Plan, instruction: Instruction, states: Sequence[_Cut | None]
    ) -> State:
        operands = [_type(o) for o in instruction.operands]
        results = leaf_types(instruction.shape, instruction)
        if any(t is None for t in results):
            raise _Refused
        types = [t for t in results if t is not None]
        numbered = any(s is not None and s.rows is not None for s in states)
        if numbered and instruction.opcode in ("gather", "scatter"):
            batch = self._by_number(instruction, states)
            return self._chosen(plan, instruction, states, batch)
        wanted: dict[int, int] | None = None
        for batch in batches(instruction, operands, types, self._parts):
            rows = None
            if numbered:
                rows = self._moved(instruction, states, batch)
            elif instruction.opcode == "concatenate":
                rows = self._numbered(instruction, states, batch)
            if numbered and rows is None:
                continue
            more = self._fit(instruction, states, batch, numbers=rows is not None)
            if more is not None and not more:
                return self._chosen(plan, instruction, states, batch, rows)
            wanted = wanted or more
        raise _Wanted(wanted) if wanted else _Refused

    def _fit(
        self,
        instruction: Instruction,
        states: Sequence[_Cut | None],
        batch: Batch,
        *,
        numbers: bool,
    ) -> dict[int, int] | None:
        """The carries that must be cut as well for a batch; None if it does not fit."""
        wanted: dict[int, int] = {}
        for operand, state, d in zip(instruction.operands, states, batch.operands, strict=True):
            if state is not None:
                if state.dimension != d:
                    return None
            elif d is not None and not (
                _is_spread(operand, d) or (numbers and _is_rows(operand, d))
            ):
                more = self._carries(operand, d)
                if not more or any(wanted.get(k, of) != of for k, of in more.items()):
                    return None
                wanted |= more
        return wanted

    def _carries(self, instruction: Instruction, d: int) -> dict[int, int] | None:
        """The carries of which an array is made that is to be cut along a dimension, as they must be cut for
        it; None if it is made of others. What follows from them is looked at when they are."""
        left = [(instruction, d)]
        ways: dict[tuple[Instruction, int], list[_Way]] = {}
        while left:  # bodies may be longer than Python's stack
            key = left[-1]
            if key in self._known:
                left.pop()
                continue
            if key not in ways:
                ways[key] = self._ways(*key)
            unknown = [k for _, cuts in ways[key] for k in cuts if k not in self._known]
            if unknown:
                left += unknown
            else:
                self._known[left.pop()] = self._first_of(ways[key])
        return self._known[instruction, d]

    def _ways(self, instruction: Instruction, d: int) -> list[_Way]:
        """The ways to cut an array along a dimension."""
        carry = self._carry(instruction, d)
        if carry is not None:
            return [({carry: d}, [])]
        if _is_spread(instruction, d):
            return [({}, [])]
        arrays = (instruction, *instruction.operands)
        if any(i.shape.element_type == TUPLE for i in arrays) or not instruction.operands:
            return []
        operands = [_type(o) for o in instruction.operands]
        found = batches(instruction, operands, [_type(instruction)], self._parts)
        cuts = [b.operands for b in found if b.results == (d,)]
        return [
            ({}, [(o, c) for o, c in zip(instruction.operands, own, strict=True) if c is not None])
            for own in cuts
        ]

    def _first_of(self, ways: Sequence[_Way]) -> dict[int, int] | None:
        """The carries of the first way in which all arrays are made of carries that agree."""
        for own, cuts in ways:
            found = dict(own)
            for key in cuts:
                more = self._known[key]
                if more is None or any(found.get(k, of) != of for k, of in more.items()):
                    break
                found |= more
            else:
                return found
        return None

    def _carry(self, instruction: Instruction, d: int) -> int | None:
        """The position of a carry that divides along a dimension."""
        if instruction.opcode != "get-tuple-element":
            return None
        (whole,) = instruction.operands
        size = instruction.shape.dimensions[d]
        if whole.opcode != "parameter" or not size or size % self._parts:
            return None
        return int(instruction.proto.tuple_index)

    def _chosen(
        self,
        plan: _Plan,
        instruction: Instruction,
        states: Sequence[_Cut | None],
        batch: Batch,
        rows: tuple[int, int, int] | None = None,
    ) -> State:
        plan.batch[instruction] = batch
        for k, (state, d) in enumerate(zip(states, batch.operands, strict=True)):
            if state is None and d is not None:
                plan.wanted[instruction, k] = d
        found = tuple([None if d is None else _Cut(d, rows) for d in batch.results])
        return found if instruction.shape.element_type == TUPLE else found[0]

    def _want(self, plan: _Plan, instruction: Instruction, k: int, dimension: int) -> None:
        operand = instruction.operands[k]
        if not _is_spread(operand, dimension):
            carries = self._carries(operand, dimension)
            raise _Wanted(carries) if carries else _Refused
        plan.wanted[instruction, k] = dimension

    # Rows by their numbers.

    def _numbered(
        self, instruction: Instruction, states: Sequence[_Cut | None], batch: Batch
    ) -> tuple[int, int, int] | None:
        """The numbers of rows among the columns that make indices."""
        (along,) = instruction.proto.dimensions
        column = 0
        found: list[tuple[int, int, int]] = []
        for operand, state, d in zip(instruction.operands, states, batch.operands, strict=True):
            shape = operand.shape.dimensions
            if state is None and d is not None and _is_rows(operand, d):
                if shape[along] != 1:
                    return None
                found.append((along, column, shape[d]))
            column += shape[along]
        return found[0] if len(found) == 1 else None

    def _moved(
        self, instruction: Instruction, states: Sequence[_Cut | None], batch: Batch
    ) -> tuple[int, int, int] | None:
        """The numbers of rows in another shape of indices."""
        (state,) = states if len(states) == 1 else (None,)
        if state is None or state.rows is None:
            return None
        opcode = instruction.opcode
        if not (opcode == "reshape" or (opcode == "bitcast" and keeps_order(instruction))):
            return None
        vector, column, size = state.rows
        source = instruction.operands[0].shape.dimensions
        target = instruction.shape.dimensions
        for d in range(len(target)):
            alike = target[d] == source[vector] and prod(target[:d]) == prod(source[:vector])
            if alike and d != batch.results[0]:
                return d, column, size
        return None

    def _by_number(self, instruction: Instruction, states: Sequence[_Cut | None]) -> Batch:
        """The batch of a gather or scatter of own rows."""
        proto = instruction.proto
        array, indices, *updates = states
        if indices is None or indices.rows is None:
            raise _Refused
        vector, column, size = indices.rows
        if array is None:
            numbers = (
                proto.gather_dimension_numbers
                if len(states) == 2
                else proto.scatter_dimension_numbers
            )
            numbered = (
                numbers.start_index_map
                if len(states) == 2
                else numbers.scatter_dims_to_operand_dims
            )
            carry = self._carry(instruction.operands[0], numbered[column])
            raise _Refused if carry is None else _Wanted({carry: numbered[column]})
        if array.rows is not None:
            raise _Refused
        d, shape = array.dimension, instruction.operands[0].shape.dimensions
        of_indices = [
            i for i in range(len(instruction.operands[1].shape.dimensions)) if i != vector
        ]
        place = of_indices.index(indices.dimension)
        if instruction.opcode == "gather":
            numbers = proto.gather_dimension_numbers
            rank = len(instruction.shape.dimensions)
            batch_dims = [i for i in range(rank) if i not in numbers.offset_dims]
            alike = (
                numbers.start_index_map[column] == d
                and proto.gather_slice_sizes[d] == 1
                and d not in numbers.operand_batching_dims
            )
            if alike and numbers.index_vector_dim == vector and shape[d] == size:
                return Batch((d, indices.dimension), (batch_dims[place],))
            raise _Refused
        numbers = proto.scatter_dimension_numbers
        rank = len(instruction.operands[-1].shape.dimensions)
        batch_dims = [i for i in range(rank) if i not in numbers.update_window_dims]
        alike = (
            len(instruction.operands) == 3
            and not numbers.input_batching_dims
            and numbers.scatter_dims_to_operand_dims[column] == d
            and windows_of(proto, len(shape), instruction.operands[-1].shape.dimensions)[d] == 1
        )
        if not alike or numbers.index_vector_dim != vector or shape[d] != size:
            raise _Refused
        batch = Batch((d, indices.dimension, batch_dims[place]), (d,))
        if updates[0] is not None and updates[0].rows is not None:
            raise _Refused
        if self._fit(instruction, states, batch, numbers=False) != {}:
            raise _Refused
        return batch

    # The computation for a part.

    def _made(self, computation: Computation, plan: _Plan) -> Computation:
        proto = HloComputationProto()
        proto.CopyFrom(computation.proto)
        del proto.instructions[:]
        free = 1 + max(i.proto.id for i in computation.instructions)
        called = {c.proto.id: c for i in computation.instructions for c in i.called}
        for instruction, was in zip(
            computation.instructions, computation.proto.instructions, strict=True
        ):
            now = HloInstructionProto()
            batch = plan.batch.get(instruction)
            if batch is not None:
                now.CopyFrom(cut_proto(instruction, batch, self._parts))
            else:
                now.CopyFrom(was)
                cut_shape(now.shape, _dims(plan.states[instruction]), self._parts)
            for k, operand in enumerate(instruction.operands):
                d = plan.wanted.get((instruction, k))
                if d is None:
                    continue
                smaller = proto.instructions.add()
                smaller.CopyFrom(operand.proto)
                smaller.id, smaller.name = free, f"{operand.name}.part.{free}"
                del smaller.control_predecessor_ids[:]
                cut_shape(smaller.shape, iter([d]), self._parts)
                now.operand_ids[k] = free
                free += 1
            if instruction in plan.called:
                called |= {c.proto.id: c for c in plan.called[instruction]}
            proto.instructions.add().CopyFrom(now)
        for parameter, shape in zip(
            computation.parameters, proto.program_shape.parameters, strict=True
        ):
            cut_shape(shape, _dims(plan.states[parameter]), self._parts)
        cut_shape(proto.program_shape.result, _dims(plan.states[computation.root]), self._parts)
        return computation.module.linked(proto, called)


def _is_cut(state: State) -> bool:
    return any(s is not None for s in state) if isinstance(state, tuple) else state is not None


def _dims(state: State) -> Iterator[int | None]:
    every = state if isinstance(state, tuple) else (state,)
    return chain([None if s is None else s.dimension for s in every], repeat(None))


def _is_spread(instruction: Instruction, d: int) -> bool:
    """Whether all of an array's parts along a dimension are alike, and a smaller one is made as it is."""
    dimensions = list(instruction.proto.dimensions)
    if instruction.opcode == "iota":
        return dimensions[0] != d
    return instruction.opcode == "broadcast" and d not in dimensions


def _is_rows(instruction: Instruction, d: int) -> bool:
    """Whether it is the number of each row along a dimension."""
    return instruction.opcode == "iota" and instruction.proto.dimensions[0] == d


def _type(instruction: Instruction) -> TensorType:
    (type,) = leaf_types(instruction.shape, instruction)
    if type is None:
        raise _Refused
    return type
