"""Where each element of what an op gives is from, op by op: see `moved`.

Ops that only move elements are those of `Places.moves`. Places are whole numbers, one for each element of a
value on each device: 0 for a positive zero, and any others for what is not one. Dimensions at the end that
nothing cuts (`kept_whole`) are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from stretto.collectives.ops import Collective, Kind, Reduction

from ..passes.bytes.device_values import DeviceValues
from ..passes.valid.known import FOLLOWED, is_reshape, starts_of
from ..values import Node, NodeKind, Value, operand_shape, result_shape
from .constants import zero_constant

_MOVING = frozenset({Kind.PERMUTE, Kind.ALL_GATHER, Kind.ALL_TO_ALL})
# Reductions of which zeros change nothing, of numbers without a minus zero.
_ADDS = frozenset({Reduction.SUM, Reduction.OR, Reduction.XOR})
# Opcodes that only write the same elements in another shape.
SHAPES = frozenset({"bitcast", "copy", "reshape", "transpose"})


class Places:
    """Places of what is moved in a program on ``count`` devices, of which these values are ``known``."""

    def __init__(self, known: DeviceValues, count: int) -> None:
        self.known, self.count = known, count

    def moves(self, node: Node) -> bool:
        """Whether its results are elements of its operands, and zeros, unless `after` finds that they are
        not."""
        if node.collective is not None:
            return moves_between(node) and not node.collective.valid_iterations
        if node.kind is not NodeKind.COMPUTE:
            return False
        match node.instruction.opcode:
            case "bitcast":
                given, made = node.operands[0].type, node.results[0].type
                return given is not None and made is not None and given.dtype == made.dtype
            case "dynamic-slice":
                return self._starts(node, 1) is not None
            case "dynamic-update-slice":
                return self._starts(node, 2) is not None
            case "pad":
                inside = node.instruction.proto.padding_config.dimensions
                return is_zero(node.operands[1]) and not any(d.interior_padding for d in inside)
            case "select":
                return self.known.of(node.operands[0]) is not None
        return node.instruction.opcode in _RULES

    def after(
        self, node: Node, given: Sequence[np.ndarray], whole: int
    ) -> Sequence[np.ndarray] | None:
        """The places of a node's results, where those of its `data` are ``given``, devices first, without the
        last ``whole`` dimensions; None if they are not only moved after all."""
        if node.collective is not None:
            return _between(node.collective, given)
        shape = result_shape(node)
        rule = _RULES[node.instruction.opcode]
        made = rule(self, node, given, (self.count, *shape[: len(shape) - whole]))
        return None if made is None else [made]

    def _starts(self, node: Node, first: int) -> np.ndarray | None:
        """Where a slice or an update begins, whose indices are operands from ``first`` on: a row for each
        device."""
        operands = [None if n < first else self.known.of(v) for n, v in enumerate(node.operands)]
        found = starts_of(node, operands, first)
        return None if found is None else np.broadcast_to(found, (self.count, found.shape[1]))

    # Rules, of compute: the places of the result, of the given shape.

    def _reshaped(
        self, node: Node, given: Sequence[np.ndarray], shape: tuple[int, ...]
    ) -> np.ndarray:
        return given[0].reshape(shape)

    def _bitcast(
        self, node: Node, given: Sequence[np.ndarray], shape: tuple[int, ...]
    ) -> np.ndarray:
        """In the order in which elements lie in memory."""
        (array,) = given
        if is_reshape(node):
            return array.reshape(shape)
        instruction = node.instruction
        into = [d + 1 for d in reversed(instruction.operands[0].shape.layout.minor_to_major)]
        out = [d + 1 for d in reversed(instruction.shape.layout.minor_to_major)]
        array = array.transpose(0, *into).reshape(shape[0], *(shape[d] for d in out))
        return array.transpose(0, *(out.index(d) + 1 for d in range(1, len(shape))))

    def _transposed(
        self, node: Node, given: Sequence[np.ndarray], shape: tuple[int, ...]
    ) -> np.ndarray:
        order = [d + 1 for d in node.instruction.proto.dimensions[: len(shape) - 1]]
        return given[0].transpose(0, *order)

    def _concatenated(
        self, node: Node, given: Sequence[np.ndarray], shape: tuple[int, ...]
    ) -> np.ndarray:
        return np.concatenate(given, node.instruction.proto.dimensions[0] + 1)

    def _padded(
        self, node: Node, given: Sequence[np.ndarray], shape: tuple[int, ...]
    ) -> np.ndarray:
        (array,) = given
        made = np.zeros(shape, np.int64)
        into, out = [slice(None)], [slice(None)]
        dimensions = node.instruction.proto.padding_config.dimensions
        for d, size, length in zip(dimensions, array.shape[1:], shape[1:]):  # noqa: B905
            low = d.edge_padding_low
            first, end = max(low, 0), min(low + size, length)
            into.append(slice(first, max(end, first)))
            out.append(slice(first - low, max(end, first) - low))
        made[tuple(into)] = array[tuple(out)]
        return made

    def _sliced(
        self, node: Node, given: Sequence[np.ndarray], shape: tuple[int, ...]
    ) -> np.ndarray:
        bounds = node.instruction.proto.slice_dimensions[: len(shape) - 1]
        return given[0][(slice(None), *(slice(d.start, d.limit, d.stride) for d in bounds))]

    def _cut_out(
        self, node: Node, given: Sequence[np.ndarray], shape: tuple[int, ...]
    ) -> np.ndarray:
        starts = self._starts(node, 1)
        assert starts is not None
        own = [array[_window(at, shape[1:])] for array, at in zip(given[0], starts, strict=True)]
        return np.stack(own)

    def _put_in(
        self, node: Node, given: Sequence[np.ndarray], shape: tuple[int, ...]
    ) -> np.ndarray:
        starts = self._starts(node, 2)
        assert starts is not None
        made = given[0].copy()
        for array, part, at in zip(made, given[1], starts, strict=True):
            array[_window(at, part.shape)] = part
        return made

    def _selected(
        self, node: Node, given: Sequence[np.ndarray], shape: tuple[int, ...]
    ) -> np.ndarray | None:
        """None where what it chooses by differs along the dimensions that are left out."""
        found = self.known.of(node.operands[0])
        assert found is not None
        if any(size > 1 for size in found.shape[len(shape) :]):
            return None
        found = found.reshape(found.shape[: len(shape)])
        return np.where(found.reshape(*found.shape, *[1] * (len(shape) - found.ndim)), *given)


_Rule = Callable[[Places, Node, Sequence[np.ndarray], tuple[int, ...]], np.ndarray | None]
_RULES: dict[str, _Rule] = {
    "bitcast": Places._bitcast,
    "concatenate": Places._concatenated,
    "copy": Places._reshaped,
    "dynamic-slice": Places._cut_out,
    "dynamic-update-slice": Places._put_in,
    "pad": Places._padded,
    "reshape": Places._reshaped,
    "select": Places._selected,
    "slice": Places._sliced,
    "transpose": Places._transposed,
}


def moves_between(node: Node) -> bool:
    """Whether it is a collective that only moves, or may: sums of whole numbers do where all devices but one
    have zeros."""
    collective = node.collective
    if collective is None:
        return False
    if collective.kind is Kind.ALL_REDUCE:
        return collective.reduction in _ADDS and all(
            o.dtype in FOLLOWED for o in collective.operands
        )
    return collective.kind in _MOVING


def data(node: Node) -> list[Value]:
    """The operands of which a node's results have elements."""
    match node.instruction.opcode:
        case "dynamic-slice" | "pad":
            return node.operands[:1]
        case "dynamic-update-slice":
            return node.operands[:2]
        case "select":
            return node.operands[1:]
    return node.operands


def is_zero(value: Value) -> bool:
    """Whether it is a constant of positive zeros."""
    node = value.root.node
    return node is not None and zero_constant(node.instruction)


def kept_whole(node: Node) -> int:
    """How many last dimensions are the same in all `data` and results of a node, and not cut."""
    proto = node.instruction.proto
    if node.collective is not None:
        rank = min(len(v.type.shape) for v in node.operands if v.type is not None)
        dimension = node.collective.dimension
        return rank if dimension < 0 else rank - 1 - dimension
    shape, given = result_shape(node), operand_shape(node)
    match node.instruction.opcode:
        case "bitcast" if not is_reshape(node):
            return 0
        case "concatenate":
            return len(shape) - 1 - int(proto.dimensions[0])
        case "pad":
            own = [
                (d.edge_padding_low, d.edge_padding_high) for d in proto.padding_config.dimensions
            ]
            return _alike(own, [(0, 0)] * len(own))
        case "transpose":
            return _alike(list(proto.dimensions), list(range(len(shape))))
        case "dynamic-update-slice":
            return _alike(shape, operand_shape(node, 1))
        case "select":
            return len(shape)
    return _alike(shape, given)


def _alike(a: Sequence[object], b: Sequence[object]) -> int:
    """How many of the last ones are the same."""
    same = 0
    while same < min(len(a), len(b)) and a[-1 - same] == b[-1 - same]:
        same += 1
    return same


def _window(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """``sizes`` may leave out dimensions at the end."""
    return tuple([slice(n, n + size) for n, size in zip(starts, sizes)])  # noqa: B905


def _between(collective: Collective, given: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """What devices get in a collective."""
    made = [np.zeros_like(array) for array in given]
    if collective.kind is Kind.PERMUTE:
        for array, result in zip(given, made, strict=True):
            for source, target in collective.pairs:
                result[target] = array[source]
        return made
    if len(collective.group_of) != len(given[0]):
        return None
    if collective.kind is Kind.ALL_REDUCE:
        for array, result in zip(given, made, strict=True):
            for members in map(list, collective.groups):
                if (np.count_nonzero(array[members], axis=0) > 1).any():
                    return None
                result[members] = array[members].sum(0)
        return made
    if collective.tuple_form:
        for group in collective.groups:
            for place, member in enumerate(group):
                for other, source in enumerate(group):
                    made[other][member] = given[place][source]
        return made
    return [
        np.stack([_gathered(collective, array, d) for d in range(len(array))]) for array in given
    ]


def _gathered(collective: Collective, array: np.ndarray, device: int) -> np.ndarray:
    """What a device gets in an all-gather or an all-to-all."""
    group = list(collective.group_of[device])
    axis = collective.dimension
    parts = list(array[group])
    if collective.kind is Kind.ALL_TO_ALL:
        place = group.index(device)
        parts = [np.split(part, len(group), axis)[place] for part in parts]
    return np.concatenate(parts, axis)
