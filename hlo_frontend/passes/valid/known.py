"""Exact values of integers and booleans that follow from constants, iotas and device ids alone.

`evaluate` gives the result of a node on every device, in reduced form (see `tensors`), or None if it is not
known. A value that depends on an argument of the program or on received data is not known. So known values
hold in every run, whatever is sent or skipped. Arithmetic is numpy's in the tensor's own type, which wraps
around as HLO's does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stretto.collectives.ops import Reduction

from ...collectives import native_reduction
from ...graph import Instruction
from ...schema import LiteralProto
from ...values import Node, operand_shape, result_shape
from . import tensors

Known = np.ndarray | None
Rule = Callable[[Node, Sequence[Known]], Known]

# Types whose values are followed.
FOLLOWED = frozenset({"pred", "s8", "s16", "s32", "s64", "u8", "u16", "u32", "u64"})


def evaluate(node: Node, operands: Sequence[Known]) -> Known:
    """The only result of ``node``, or None if it is not known."""
    rule = _RULES.get(node.instruction.opcode)
    (result,) = node.results
    type = result.type
    if rule is None or type is None or type.dtype not in FOLLOWED or not type.size:
        return None
    with np.errstate(all="ignore"):
        value = rule(node, operands)
    if value is None or not tensors.small(value):
        return None
    return value if value.dtype == type.numpy else value.astype(type.numpy)


def _all_known(rule: Callable[..., Known]) -> Rule:
    def strict(node: Node, operands: Sequence[Known]) -> Known:
        if any(o is None for o in operands):
            return None
        return rule(node, *operands)

    return strict


def _constant(node: Node) -> Known:
    type = node.results[0].type
    assert type is not None
    if type.size > tensors.MOST_ELEMENTS:
        return None
    literal = LiteralProto.FromString(node.instruction.proto.literal)
    field = getattr(literal, {"pred": "preds"}.get(type.dtype, f"{type.dtype}s"))
    if isinstance(field, bytes):
        flat = np.frombuffer(field, type.numpy.newbyteorder("<")).astype(type.numpy)
    else:
        flat = np.array(field, type.numpy)
    if flat.size != type.size:
        return None
    order = list(literal.shape.layout.minor_to_major)[::-1] or list(range(len(type.shape)))
    stored = flat.reshape([type.shape[d] for d in order])
    array = stored.transpose([order.index(d) for d in range(len(order))])
    for axis in range(array.ndim):
        first = array.take([0], axis)
        if (array == first).all():
            array = first
    return array[None]


def _iota(node: Node) -> Known:
    shape = result_shape(node)
    dimension = node.instruction.proto.dimensions[0]
    type = node.results[0].type
    assert type is not None
    if shape[dimension] > tensors.MOST_ELEMENTS:
        return None
    reduced = [1] * (len(shape) + 1)
    reduced[dimension + 1] = shape[dimension]
    return np.arange(shape[dimension]).astype(type.numpy).reshape(reduced)


def _divide(node: Node, x: np.ndarray, y: np.ndarray) -> Known:
    """Rounds towards zero; -1 if the divisor is 0, as XLA defines it for signed and unsigned types."""
    if x.dtype == bool:
        return None
    if x.dtype.kind == "u":
        return np.where(y == 0, np.array(-1).astype(x.dtype), x // np.where(y == 0, 1, y))
    by_zero = y == 0
    overflow = (y == -1) & (x == np.iinfo(x.dtype).min)
    safe = np.where(by_zero | overflow, 1, y).astype(x.dtype)
    floor = x // safe
    towards_zero = floor + ((x % safe != 0) & ((x < 0) != (safe < 0)))
    result = np.where(overflow, x, towards_zero)
    return np.where(by_zero, -1, result).astype(x.dtype)


def _remainder(node: Node, x: np.ndarray, y: np.ndarray) -> Known:
    """With the sign of the dividend; the dividend itself if the divisor is 0."""
    if x.dtype == bool:
        return None
    safe = np.where((y == 0) | (y == np.array(-1).astype(y.dtype)), 1, y).astype(x.dtype)
    if x.dtype.kind == "u":
        safe = np.where(y == 0, 1, y).astype(x.dtype)
        return np.where(y == 0, x, x % safe)
    result = np.fmod(x, safe)
    return np.where(y == 0, x, result).astype(x.dtype)


def _shift(node: Node, x: np.ndarray, y: np.ndarray) -> Known:
    """A shift by at least the width of the type (or by a negative number) gives 0, or the sign."""
    opcode, bits = node.instruction.opcode, 8 * x.dtype.itemsize
    if x.dtype == bool:
        return None
    amount = y.astype(y.dtype.str.replace("i", "u"))
    beyond = amount >= bits
    by = np.where(beyond, 0, amount).astype(x.dtype)
    if opcode == "shift-left":
        return np.where(beyond, 0, x << by).astype(x.dtype)
    if opcode == "shift-right-logical":
        unsigned = x.dtype.str.replace("i", "u")
        shifted = x.astype(unsigned) >> by.astype(unsigned)
        return np.where(beyond, 0, shifted).astype(x.dtype)
    signed = x.astype(x.dtype.str.replace("u", "i"))
    return np.where(beyond, -(signed < 0).astype(signed.dtype), signed >> by).astype(x.dtype)


def _combine(opcode: str, x: np.ndarray, y: np.ndarray) -> Known:
    is_pred = x.dtype == bool
    function = (_PRED if is_pred else _NUMBERS).get(opcode)
    return None if function is None else function(x, y)


_NUMBERS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_PRED: dict[str, Callable[..., np.ndarray]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "maximum": np.logical_or,
    "minimum": np.logical_and,
}


def _logic(node: Node, operands: Sequence[Known]) -> Known:
    """``and`` and ``or``: one known operand may decide the result."""
    x, y = operands
    opcode = node.instruction.opcode
    if x is not None and y is not None:
        return _combine(opcode, x, y)
    decisive = opcode == "or"
    for one in (x, y):
        if one is not None and one.dtype == bool and (one == decisive).all():
            return one
    return None


_COMPARE: dict[str, Callable[..., np.ndarray]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


def _compare(node: Node, x: np.ndarray, y: np.ndarray) -> Known:
    return _COMPARE[node.instruction.proto.comparison_direction](x, y)


def spread(pred: np.ndarray, rank: int) -> np.ndarray:
    """A select's predicate for every element: it may be one scalar for all."""
    if pred.ndim == 1 and rank:
        return pred.reshape(pred.shape + (1,) * rank)
    return pred


def _select(node: Node, operands: Sequence[Known]) -> Known:
    pred, on_true, on_false = operands
    if pred is None:
        return None
    pred = spread(pred, len(result_shape(node)))
    if pred.all():
        return on_true
    if not pred.any():
        return on_false
    if on_true is None or on_false is None:
        return None
    return np.where(pred, on_true, on_false)


def _clamp(node: Node, low: np.ndarray, x: np.ndarray, high: np.ndarray) -> Known:
    rank = len(result_shape(node))
    return np.minimum(np.maximum(x, spread(low, rank)), spread(high, rank))


def _broadcast(node: Node, x: np.ndarray) -> Known:
    dimensions = list(node.instruction.proto.dimensions)
    shape = result_shape(node)
    for i, d in enumerate(dimensions):
        if operand_shape(node)[i] != shape[d]:
            return None
    return tensors.broadcast(x, len(shape), dimensions)


def _reshape(node: Node, x: np.ndarray) -> Known:
    return tensors.reshaped(x, operand_shape(node), result_shape(node))


def is_reshape(node: Node) -> bool:
    """Whether a bitcast keeps the type and the order of elements."""
    return keeps_order(node.instruction)


def keeps_order(bitcast: Instruction) -> bool:
    """`is_reshape`, of the instruction."""
    shapes = (bitcast.operands[0].shape, bitcast.shape)
    return shapes[0].element_type == shapes[1].element_type and all(map(is_row_major, shapes))


def is_row_major(shape: Any) -> bool:
    """Whether elements lie in row-major order; dimensions of one element may stand anywhere."""
    order = [d for d in shape.layout.minor_to_major if shape.dimensions[d] != 1]
    return order == sorted(order, reverse=True)


def _transpose(node: Node, x: np.ndarray) -> Known:
    return x.transpose([0, *(d + 1 for d in node.instruction.proto.dimensions)])


def strides(node: Node) -> tuple[slice, ...]:
    """A static slice of a whole tensor, dimension by dimension."""
    bounds = node.instruction.proto.slice_dimensions
    return tuple(slice(b.start, b.limit, b.stride or 1) for b in bounds)


def _slice(node: Node, x: np.ndarray) -> Known:
    cut = [slice(None)] + [
        slice(None) if m == 1 else s for m, s in zip(x.shape[1:], strides(node), strict=True)
    ]
    return x[tuple(cut)]


def starts_of(node: Node, operands: Sequence[Known], first: int) -> np.ndarray | None:
    """Clamped starts of a dynamic slice or update whose indices begin at operand ``first``."""
    shape = operand_shape(node)
    sizes = result_shape(node) if first == 1 else operand_shape(node, 1)
    return tensors.clamped_starts(_indices(node, operands, first), shape, sizes)


def _indices(node: Node, operands: Sequence[Known], first: int) -> list[Known]:
    """Scalars, one for each dimension; an old form has them in one vector."""
    given = operands[first:]
    rank = len(operand_shape(node))
    if len(given) == 1 and len(operand_shape(node, first)) == 1:
        vector = given[0]
        if vector is None:
            return [None] * rank
        return [vector[:, i if vector.shape[1] != 1 else 0] for i in range(rank)]
    return list(given)


def _dynamic_slice(node: Node, operands: Sequence[Known]) -> Known:
    x, starts = operands[0], starts_of(node, operands, 1)
    if x is None:
        return None
    if starts is None:
        sizes = result_shape(node)
        cut = [i for i, n in enumerate(operand_shape(node)) if sizes[i] != n]
        return x if all(x.shape[i + 1] == 1 for i in cut) else None
    return tensors.window(x, operand_shape(node), starts, result_shape(node))


def _dynamic_update_slice(node: Node, operands: Sequence[Known]) -> Known:
    x, update = operands[:2]
    starts = starts_of(node, operands, 2)
    if x is None or update is None or starts is None:
        return None
    shape, sizes = operand_shape(node), operand_shape(node, 1)
    inside = tensors.placed(tensors.full(len(shape)), shape, starts, sizes)
    if inside.all():
        return update
    whole = [n if m > 1 or x.shape[i + 1] > 1 or update.shape[i + 1] > 1 else 1
             for i, (n, m) in enumerate(zip(shape, inside.shape[1:], strict=True))]  # fmt: skip
    if np.prod(whole) > tensors.MOST_ELEMENTS:
        return None
    devices = max(len(x), len(update), len(inside))
    result = np.broadcast_to(x, (devices, *whole)).copy()
    where = np.broadcast_to(inside, (devices, *whole))
    within = [min(size, m) for size, m in zip(sizes, whole, strict=True)]
    values = np.broadcast_to(update, (devices, *within))
    for d in range(devices):
        result[d][where[d]] = values[d].reshape(-1)
    return result


def _concatenate(node: Node, operands: Sequence[Known]) -> Known:
    if any(o is None for o in operands):
        return None
    (dimension,) = node.instruction.proto.dimensions
    sizes = [operand_shape(node, i)[dimension] for i in range(len(operands))]
    if sum(sizes) > tensors.MOST_ELEMENTS:
        return None
    known = [o for o in operands if o is not None]
    shape = [max(o.shape[i] for o in known) for i in range(known[0].ndim)]
    parts = []
    for part, size in zip(known, sizes, strict=True):
        shape[dimension + 1] = size
        parts.append(np.broadcast_to(part, shape))
    return np.concatenate(parts, dimension + 1)


def _pad(node: Node, x: np.ndarray, padding: np.ndarray) -> Known:
    shape, source = result_shape(node), operand_shape(node)
    if np.prod(shape) > tensors.MOST_ELEMENTS:
        return None
    devices = max(len(x), len(padding))
    result = np.broadcast_to(spread(padding, len(shape)), (devices, *shape)).copy()
    cut = padded(node)
    if cut is None:
        return None
    result[(slice(None), *cut)] = np.broadcast_to(x, (devices, *source))
    return result


def padded(node: Node) -> tuple[slice, ...] | None:
    """The place of its operand in the result of a pad; None if the pad cuts elements off."""
    slices = []
    for n, d in zip(
        operand_shape(node), node.instruction.proto.padding_config.dimensions, strict=True
    ):
        if d.edge_padding_low < 0 or d.edge_padding_high < 0:
            return None
        step = d.interior_padding + 1
        slices.append(slice(d.edge_padding_low, d.edge_padding_low + (n - 1) * step + 1, step))
    return tuple(slices)


def _reverse(node: Node, x: np.ndarray) -> Known:
    return np.flip(x, tuple(d + 1 for d in node.instruction.proto.dimensions))


_REDUCERS: dict[Reduction, Callable[..., np.ndarray]] = {
    Reduction.SUM: np.sum,
    Reduction.PRODUCT: np.prod,
    Reduction.MAX: np.max,
    Reduction.MIN: np.min,
    Reduction.AND: np.bitwise_and.reduce,
    Reduction.OR: np.bitwise_or.reduce,
}


def _reduce(node: Node, operands: Sequence[Known]) -> Known:
    if len(operands) != 2 or any(o is None for o in operands):
        return None
    x, start = operands
    assert x is not None and start is not None
    reduction = native_reduction(node.instruction.called[0])
    dimensions = list(node.instruction.proto.dimensions)
    shape = operand_shape(node)
    if reduction not in _REDUCERS or 0 in shape:
        return None
    axes = tuple(d + 1 for d in dimensions)
    if reduction in (Reduction.SUM, Reduction.PRODUCT):
        if x.dtype == bool:
            return None
        whole = [shape[i] if i in dimensions else m for i, m in enumerate(x.shape[1:])]
        if np.prod(whole) > tensors.MOST_ELEMENTS:
            return None
        reduced = _REDUCERS[reduction](
            np.broadcast_to(x, (len(x), *whole)), axis=axes, dtype=x.dtype
        )
    else:
        reduced = _REDUCERS[reduction](x, axis=axes) if axes else x
    return _combine(str(reduction), reduced, spread(start, reduced.ndim - 1))


def _elementwise(opcode: str) -> Rule:
    return _all_known(lambda node, x, y: _combine(opcode, x, y))


_RULES: dict[str, Rule] = {
    "constant": lambda node, operands: _constant(node),
    "iota": lambda node, operands: _iota(node),
    **{name: _elementwise(name) for name in ("add", "subtract", "multiply", "maximum", "minimum")},
    "xor": _elementwise("xor"),
    "and": _logic,
    "or": _logic,
    "divide": _all_known(_divide),
    "remainder": _all_known(_remainder),
    **dict.fromkeys(
        ("shift-left", "shift-right-logical", "shift-right-arithmetic"), _all_known(_shift)
    ),
    "not": _all_known(lambda node, x: ~x),
    "negate": _all_known(lambda node, x: None if x.dtype == bool else np.negative(x)),
    "abs": _all_known(lambda node, x: np.abs(x)),
    "sign": _all_known(lambda node, x: np.sign(x)),
    "convert": _all_known(
        lambda node, x: x.astype(node.results[0].type.numpy)  # type: ignore[union-attr]
    ),
    "compare": _all_known(_compare),
    "select": _select,
    "clamp": _all_known(_clamp),
    "broadcast": _all_known(_broadcast),
    "reshape": _all_known(_reshape),
    "bitcast": _all_known(lambda node, x: _reshape(node, x) if is_reshape(node) else None),
    "transpose": _all_known(_transpose),
    "slice": _all_known(_slice),
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "concatenate": _concatenate,
    "pad": _all_known(_pad),
    "reverse": _all_known(_reverse),
    "reduce": _reduce,
}
