"""Windows along a dimension of which a device reads those of its own part, as of cumulative sums.

XLA's partitioner gathers the array, fills it up, cuts out what the windows of the device's part cover (its
part and what the last windows reach beyond it), and reduces that. That is the device's part of the windows of
the whole array.
"""

from __future__ import annotations

from stretto.collectives.types import TensorType

from ...graph import Instruction
from ...schema import HloInstructionProto
from ...values import Node, NodeKind, Value
from ..valid.known import starts_of
from .batches import is_trivial
from .cut import placeholder
from .device_values import DeviceValues
from .own_parts import OwnPart, Places


def own_windows(
    slice_: Node, reader: Node, known: DeviceValues, places: Places
) -> tuple[OwnPart, TensorType] | None:
    """The own part that a ``reduce-window`` of a dynamic slice is of all windows of the array, and the type
    of those; None if it is something else."""
    whole, part, result = slice_.operands[0].type, slice_.results[0].type, reader.results[0].type
    assert whole is not None and part is not None and result is not None
    cut = [d for d, (n, size) in enumerate(zip(whole.shape, part.shape, strict=True)) if n != size]
    if len(cut) != 1:
        return None
    (d,) = cut
    windows = reader.instruction.proto.window.dimensions
    if not _is_plain(windows[d]) or not all(
        is_trivial(w) or _is_plain(w) for i, w in enumerate(windows) if i != d
    ):
        return None
    size = result.shape[d]
    starts = starts_of(slice_, [None, *(known.of(v) for v in slice_.operands[1:])], 1)
    if starts is None or whole.shape[d] != places.parts * size + windows[d].size - 1:
        return None
    for device, place in places.place.items():
        if starts[device if len(starts) > 1 else 0][d] != place * size:
            return None
    order = (*slice_.order, *reader.order)
    order += tuple(n for v in (*slice_.operands, *reader.operands) for n in v.order)
    all_of = (*result.shape[:d], places.parts * size, *result.shape[d + 1 :])
    found = OwnPart(reader, (), d, order, cuts_more=False)
    return found, TensorType(result.dtype, all_of)


def _is_plain(window: object) -> bool:
    """A window at each element, without filling."""
    w: object = window
    return all(
        getattr(w, name) in (0, 1) for name in ("stride", "base_dilation", "window_dilation")
    ) and not (w.padding_low or w.padding_high)  # type: ignore[attr-defined]


def all_windows(reader: Node, value: Value, type: TensorType) -> Node:
    """A node that reduces all windows of the array ``value`` as ``reader`` reduces those of a part."""
    like = reader.instruction
    proto = HloInstructionProto()
    proto.CopyFrom(like.proto)
    del proto.shape.dimensions[:]
    proto.shape.dimensions.extend(type.shape)
    instruction = Instruction(proto, like.computation)
    instruction.called = like.called
    instruction.operands = (placeholder(value, like), like.operands[1])
    node = Node(NodeKind.COMPUTE, instruction, reader.position, [value, reader.operands[1]])
    node.results = [Value(type, node)]
    return node
