"""Finds readers of a collective's result that read only the device's own part.

A device's *own part* of an array is, along some dimension, part p of n, where n is the size of its group in
a collective and p its place there. It is read by a dynamic slice whose start is known on every device
(`DeviceValues`), directly or behind transposes, reshapes, conversions and Fourier transforms of other
dimensions: XLA's partitioner gathers a whole array to transform it row by row. A read through an optimization
barrier counts as a read of the whole array.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stretto.collectives.ops import Collective

from ...builder import fill, shape_of
from ...edit import Editor
from ...graph import Instruction
from ...schema import HloInstructionProto
from ...values import Node, NodeKind, Value
from ..valid.known import starts_of
from .device_values import DeviceValues
from .steps import Step, backward, batched_of, emit, of_part

# The most steps between a collective and a slice.
_LONGEST = 16


@dataclass(frozen=True, eq=False)
class OwnPart:
    """A slice ``node`` that reads own parts along ``dimension`` of the collective's result, after ``steps``.

    ``order``: nodes that it must come after. ``cuts_more``: whether it cuts other dimensions as well.
    """

    node: Node
    steps: tuple[Step, ...]
    dimension: int
    order: tuple[Node, ...]
    cuts_more: bool


@dataclass(frozen=True)
class Places:
    """Groups of equal size ``parts``. ``place[d]``: the position of device d in its group."""

    parts: int
    place: Mapping[int, int]


def places(collective: Collective) -> Places | None:
    """The places of a collective's groups; None if groups differ in size, or have one member."""
    sizes = {len(group) for group in collective.groups}
    if len(sizes) != 1 or sizes == {1}:
        return None
    place = {d: p for group in collective.groups for p, d in enumerate(group)}
    return Places(sizes.pop(), place)


def own_parts(
    editor: Editor, known: DeviceValues, result: Value, places: Places
) -> tuple[list[OwnPart], bool]:
    """The slices that read own parts of ``result``, and whether anything else reads it."""
    found: list[OwnPart] = []
    others = False
    todo: list[tuple[Value, tuple[Step, ...], tuple[Node, ...]]] = [(result, (), ())]
    while todo:
        value, steps, before = todo.pop()
        for use in editor.uses(value):
            node = use.node
            if node is None or use.value.barrier is not None or node.kind is not NodeKind.COMPUTE:
                others = True
                continue
            order = (*before, *node.order, *(n for v in node.operands for n in v.order))
            if node.instruction.opcode == "dynamic-slice" and use.position == 0:
                part = _own_part(node, steps, order, known, places)
                if part is None:
                    others = True
                else:
                    found.append(part)
                continue
            more = batched_of(node)
            if more is None or len(steps) + len(more) > _LONGEST:
                others = True
            else:
                todo.append((node.results[0], steps + more, order))
    found.sort(key=lambda part: part.node.position)
    return found, others


def _own_part(
    node: Node,
    steps: Sequence[Step],
    order: tuple[Node, ...],
    known: DeviceValues,
    places: Places,
) -> OwnPart | None:
    whole, part = node.operands[0].type, node.results[0].type
    assert whole is not None and part is not None
    cut = [d for d, (n, size) in enumerate(zip(whole.shape, part.shape, strict=True)) if n != size]
    starts = starts_of(node, [None, *(known.of(v) for v in node.operands[1:])], 1)
    if starts is None:
        return None
    for first in cut:
        size = part.shape[first]
        if whole.shape[first] != places.parts * size or any(
            starts[device if len(starts) > 1 else 0][first] != place * size
            for device, place in places.place.items()
        ):
            continue
        dimension: int | None = first
        for step in reversed(steps):
            assert dimension is not None
            dimension = backward(step, dimension, places.parts)
            if dimension is None:
                break
        else:
            assert dimension is not None
            return OwnPart(node, tuple(steps), dimension, order, len(cut) > 1)
    return None


def own_part(node: Node, known: DeviceValues, places: Places) -> OwnPart | None:
    """The own part of its operand that a dynamic slice reads; None if it reads something else."""
    order = (*node.order, *(n for v in node.operands for n in v.order))
    return _own_part(node, (), order, known, places)


def give_parts(
    editor: Editor, collective: Node, part: Value, taken: Sequence[OwnPart], parts: int
) -> None:
    """Replace slices that read own parts by ``part``, which has them."""
    made: dict[tuple[object, ...], Value] = {}
    for own in taken:
        cut = of_part(own.steps, own.dimension, parts)
        key = tuple(step.key for step in cut)
        if key not in made:
            nodes, made[key] = emit(cut, part)
            editor.put_behind(collective, nodes)
        if own.cuts_more:
            editor.replace(own.node.results[0], cut_more(editor, own, made[key]))
        else:
            view = made[key].view(own.order)
            assert view.type == own.node.results[0].type
            editor.replace(own.node.results[0], view)
        editor.remove(own.node)


def cut_more(editor: Editor, own: OwnPart, part: Value) -> Value:
    """What a slice cuts out of a part: along the part's own dimension all, whatever the start is."""
    slice_ = own.node.instruction
    made = Instruction(slice_.proto, slice_.computation)
    source = fill(HloInstructionProto(name=slice_.name), "parameter", shape_of(part.type))
    made.operands = (Instruction(source, slice_.computation), *slice_.operands[1:])
    operands = [part.view(own.order), *own.node.operands[1:]]
    node = Node(NodeKind.COMPUTE, made, -1, operands, own.node.order)
    node.results = [Value(own.node.results[0].type, node)]
    editor.put_ahead(own.node, [node])
    return node.results[0]
