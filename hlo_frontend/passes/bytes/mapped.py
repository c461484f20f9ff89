"""Loops over rows of which each device keeps those of its own part: it runs them alone.

XLA's partitioner gathers the array over whose rows ``lax.map`` (or a scan without a carry) goes, runs every
iteration on every device, and has each device write only the rows of its part:

    ys = dynamic-update-slice(ys, select(low <= i < high, y, dynamic-slice(ys, j)), j)

Other iterations leave everything as it was but the counter. Here the counter goes from ``low`` to ``high``,
and rows are taken from the device's own part: nothing is sent, and the work is a part of it. What an
iteration computes is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.collectives.ops import Kind
from stretto.collectives.types import TensorType

from ...builder import array_shape, fill, shape_of, tuple_shape
from ...edit import Editor
from ...graph import Computation, Instruction
from ...schema import TUPLE, HloComputationProto, HloInstructionProto, LiteralProto
from ...values import Node, NodeKind, Value
from .context import Context, Rewritten
from .cut import cut_type
from .own_parts import places


def map_own(editor: Editor, nodes: Sequence[Node], context: Context) -> dict[Node, Rewritten]:
    """Rewrite loops of the block, and leave out those of ``nodes``, its collectives, that only serve them."""
    found: dict[Node, Rewritten] = {}
    for loop in editor.block.nodes:
        if loop.kind is not NodeKind.COMPUTE or loop.has_side_effect:
            continue
        if _while(loop.instruction) is None:
            continue
        gathers = _gathers(editor, loop, context)
        mapped = _mapped(editor, loop, gathers, context) if gathers else None
        if mapped is not None:
            _apply(editor, mapped)
            said = (
                f"goes: every device runs the iterations of its own part ({loop.instruction.name})"
            )
            found |= dict.fromkeys(gathers.values(), Rewritten(said))
    return found


def _while(instruction: Instruction) -> Instruction | None:
    """A loop, or that in a call of nothing else: XLA:CPU makes calls of small loops."""
    if instruction.opcode == "while":
        return instruction
    if instruction.opcode != "call" or len(instruction.operands) != 1:
        return None
    (called,) = instruction.called
    root = called.root
    if root.opcode != "while" or root.operands != tuple(called.parameters):
        return None
    return root


@dataclass(frozen=True)
class _Mapped:
    """A loop. ``gathers``: by their positions among the carries. ``counter``, ``low``, ``high``: carries."""

    loop: Node
    gathers: dict[int, Node]
    counter: int
    low: int
    high: int
    parts: int


def _gathers(editor: Editor, loop: Node, context: Context) -> dict[int, Node]:
    """The all-gathers that nobody reads but a loop, by the positions of its operands."""
    found: dict[int, Node] = {}
    for k, value in enumerate(loop.operands):
        node = value.node
        if node is None or node.collective is None or value.barrier is not None:
            continue
        if node.collective.kind is not Kind.ALL_GATHER or len(node.results) != 1:
            continue
        where = places(node.collective)
        if where is None or len(where.place) != context.num_devices or node in editor.ordered:
            continue
        if len(editor.uses(node.results[0])) == 1 and not editor.uses(loop.results[k]):
            found[k] = node
    return found


def _mapped(
    editor: Editor, loop: Node, gathers: dict[int, Node], context: Context
) -> _Mapped | None:
    instruction = _while(loop.instruction)
    assert instruction is not None
    body, condition = (_Body(c) for c in instruction.called)
    flat = instruction.shape
    if any(part.element_type == TUPLE for part in flat.tuple_shapes) or loop in editor.ordered:
        return None
    if body.computation.root.opcode != "tuple":
        return None
    counted = _counted(condition)
    if counted is None:
        return None
    counter, trips = counted
    guards = {body.guard(k, counter) for k in range(len(loop.operands)) if body.changes(k)}
    guards -= {(counter, -1)} if body.counts(counter) else set()
    if len(guards) != 1 or not body.counts(counter) or editor.uses(loop.results[counter]):
        return None
    ((low, high),) = guards
    if low < 0 or body.changes(low) or body.changes(high):
        return None
    first = next(iter(gathers.values())).collective
    assert first is not None
    where = places(first)
    assert where is not None
    for k, gather in gathers.items():
        collective = gather.collective
        assert collective is not None
        d = collective.dimension
        if places(collective) != where or collective.results[0].shape[d] != trips:
            return None
        if body.changes(k) or not all(_is_row(i, k, d, counter) for i in body.readers(k)):
            return None
    own = trips // where.parts
    known = [context.known.of(loop.operands[k]) for k in (counter, low, high)]
    if any(array is None for array in known):
        return None
    begins, lows, highs = (
        np.broadcast_to(np.asarray(a).reshape(-1), context.num_devices) for a in known
    )
    for device, place in where.place.items():
        mine = (int(begins[device]), int(lows[device]), int(highs[device]))
        if mine != (0, place * own, (place + 1) * own):
            return None
    return _Mapped(loop, gathers, counter, low, high, where.parts)


class _Body:
    """What a computation of one tuple does with its elements."""

    def __init__(self, computation: Computation) -> None:
        self.computation = computation
        self._parameter = computation.parameters[0]

    def carry(self, instruction: Instruction) -> int:
        """The element that an instruction is; -1 if it is none."""
        if instruction.opcode == "get-tuple-element" and instruction.operands[0] is self._parameter:
            return int(instruction.proto.tuple_index)
        return -1

    def changes(self, k: int) -> bool:
        return self.carry(self.computation.root.operands[k]) != k

    def readers(self, k: int) -> Iterator[Instruction]:
        """The instructions that read element k, but for the root, which hands it on."""
        for instruction in self.computation.instructions:
            if instruction is self.computation.root:
                continue
            if any(self.carry(operand) == k for operand in instruction.operands):
                yield instruction

    def counts(self, k: int) -> bool:
        """Whether element k grows by one."""
        new = self.computation.root.operands[k]
        if new.opcode != "add":
            return False
        left, right = new.operands
        return (self.carry(left) == k and _constant(right) == 1) or (
            self.carry(right) == k and _constant(left) == 1
        )

    def guard(self, k: int, counter: int) -> tuple[int, int]:
        """The elements between which the counter must be for element k to change. (-1, -1) if there are none;
        (counter, -1) for the counter."""
        if k == counter:
            return (counter, -1)
        none = (-1, -1)
        update = self.computation.root.operands[k]
        if update.opcode != "dynamic-update-slice" or self.carry(update.operands[0]) != k:
            return none
        chosen = update.operands[1]
        if chosen.opcode != "select":
            return none
        guard, _, old = chosen.operands
        if old.opcode != "dynamic-slice" or self.carry(old.operands[0]) != k:
            return none
        if old.operands[1:] != update.operands[2:]:
            return none
        while guard.opcode in ("broadcast", "reshape", "bitcast"):
            (guard,) = guard.operands
        if guard.opcode != "and" or guard.shape.dimensions:
            return none
        low, high = (self._bound(o, counter) for o in guard.operands)
        if low[0] == "LT":
            low, high = high, low
        return (low[1], high[1]) if (low[0], high[0]) == ("GE", "LT") else none

    def _bound(self, instruction: Instruction, counter: int) -> tuple[str, int]:
        if instruction.opcode != "compare" or self.carry(instruction.operands[0]) != counter:
            return "", -1
        bound = self.carry(instruction.operands[1])
        return (str(instruction.proto.comparison_direction), bound) if bound >= 0 else ("", -1)


def _counted(condition: _Body) -> tuple[int, int] | None:
    """The counter of a loop, and below what it stays."""
    root = condition.computation.root
    if root.opcode != "compare" or root.proto.comparison_direction != "LT":
        return None
    counter, bound = condition.carry(root.operands[0]), _constant(root.operands[1])
    return None if counter < 0 or bound is None else (counter, bound)


def _constant(instruction: Instruction) -> int | None:
    """The value of a scalar constant of s32."""
    if instruction.opcode != "constant" or instruction.shape.dimensions:
        return None
    values = LiteralProto.FromString(instruction.proto.literal).s32s
    return int(values[0]) if values else None


def _is_row(instruction: Instruction, k: int, dimension: int, counter: int) -> bool:
    """Whether it takes a row of element k, that of the counter."""
    if instruction.opcode != "dynamic-slice":
        return False
    body = _Body(instruction.computation)
    if body.carry(instruction.operands[0]) != k or any(
        body.carry(o) == k for o in instruction.operands[1:]
    ):
        return False
    row = instruction.proto.dynamic_slice_sizes[dimension] == 1
    return row and body.carry(instruction.operands[1 + dimension]) == counter


def _apply(editor: Editor, mapped: _Mapped) -> None:
    loop = mapped.loop
    types = [v.type for v in loop.results]
    operands = list(loop.operands)
    operands[mapped.counter] = loop.operands[mapped.low]
    dimensions: dict[int, int] = {}
    for k, gather in mapped.gathers.items():
        collective = gather.collective
        assert collective is not None
        dimensions[k] = collective.dimension
        types[k] = cut_type(collective.results[0], collective.dimension, mapped.parts)
        operands[k] = gather.operands[0].view((*gather.order, *loop.operands[k].order))
        editor.remove(gather)
    made = Node(NodeKind.COMPUTE, _loop(mapped, dimensions, types), -1, operands, loop.order)
    made.results = [Value(t, made, i) for i, t in enumerate(types)]
    editor.put_behind(loop, [made])
    for old, new in zip(loop.results, made.results, strict=True):
        if old.type == new.type:
            editor.replace(old, new)
    editor.remove(loop)


def _loop(
    mapped: _Mapped, dimensions: dict[int, int], types: Sequence[TensorType | None]
) -> Instruction:
    like = _while(mapped.loop.instruction)
    assert like is not None
    shape = tuple_shape(shape_of(t) for t in types)
    proto = HloInstructionProto()
    proto.CopyFrom(like.proto)
    proto.shape.CopyFrom(shape)
    (some, *_) = mapped.gathers.values()
    assert some.collective is not None
    trips = some.collective.operands[0].shape[some.collective.dimension]
    proto.backend_config = b'{"known_trip_count":{"n":"%d"}}' % trips
    made = Instruction(proto, like.computation)
    source = fill(HloInstructionProto(name=like.name), "parameter", shape)
    made.operands = (Instruction(source, like.computation),)
    body, condition = like.called
    made.called = (
        _own_rows(body, mapped, dimensions, shape),
        _until(condition, mapped, shape),
    )
    return made


def _own_rows(
    body: Computation, mapped: _Mapped, dimensions: dict[int, int], shape: Any
) -> Computation:
    """The body, on parts: rows are those of the counter less its first value."""
    proto = HloComputationProto()
    proto.CopyFrom(body.proto)
    old = list(proto.instructions)
    del proto.instructions[:]
    look = _Body(body)
    parameter = body.parameters[0].proto.id
    free = 1 + max(i.id for i in old)
    rows = {
        row.proto.id: d for k, d in dimensions.items() for row in look.readers(k)
    }  # the slices that take rows
    for instruction, was in zip(body.instructions, old, strict=True):
        if was.id in rows:
            scalar = array_shape("s32")
            first = proto.instructions.add(id=free, name=f"{was.name}.first")
            fill(first, "get-tuple-element", scalar, tuple_index=mapped.low)
            first.operand_ids.append(parameter)
            row = proto.instructions.add(id=free + 1, name=f"{was.name}.row")
            fill(row, "subtract", scalar)
            row.operand_ids.extend([was.operand_ids[1 + rows[was.id]], first.id])
            free += 2
        now = proto.instructions.add()
        now.CopyFrom(was)
        if was.id in rows:
            now.operand_ids[1 + rows[was.id]] = row.id
        if instruction is body.parameters[0] or instruction is body.root:
            now.shape.CopyFrom(shape)
        elif look.carry(instruction) in dimensions:
            now.shape.CopyFrom(shape.tuple_shapes[look.carry(instruction)])
    del proto.program_shape.parameters[:]
    proto.program_shape.parameters.add().CopyFrom(shape)
    proto.program_shape.result.CopyFrom(shape)
    called = {c.proto.id: c for i in body.instructions for c in i.called}
    return body.module.linked(proto, called)


def _until(condition: Computation, mapped: _Mapped, shape: Any) -> Computation:
    """The condition: the counter is below the end of the part."""
    proto = HloComputationProto(name=condition.name, id=condition.proto.id, root_id=4)
    scalar, pred = array_shape("s32"), array_shape("pred")
    fill(proto.instructions.add(id=1, name="carries"), "parameter", shape, parameter_number=0)
    for number, (name, k) in enumerate((("counter", mapped.counter), ("high", mapped.high)), 2):
        one = proto.instructions.add(id=number, name=name)
        fill(one, "get-tuple-element", scalar, tuple_index=k)
        one.operand_ids.append(1)
    root = proto.instructions.add(id=4, name="below")
    fill(root, "compare", pred, comparison_direction="LT")
    root.operand_ids.extend([2, 3])
    proto.program_shape.parameters.add().CopyFrom(shape)
    proto.program_shape.result.CopyFrom(pred)
    return condition.module.linked(proto, {})
