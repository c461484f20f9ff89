"""Which elements of an op's operands are needed for its live results: a rule for each op that moves elements.

An element is live if its value may reach a result of the program. Masks of live elements are in reduced form
(see `tensors`). Arithmetic needs both operands, whatever their values are: 0 * x is NaN if x is. A select
with a known predicate needs only the elements that it takes. Ops without a rule need all their operands if
any element of their results is live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ...graph import leaf_count
from ...ops import op_of
from ...values import Node, operand_shape, result_shape
from . import tensors
from .dependence import Dependence
from .known import Known, is_reshape, padded, spread, starts_of, strides

Masks = Sequence[np.ndarray | None]
Needs = Iterator[tuple[int, np.ndarray]]  # position of an operand, mask of its live elements
Rule = Callable[[Node, Sequence[Known], np.ndarray], Needs]


def needs(node: Node, known: Sequence[Known], live: Masks, dependence: Dependence) -> Needs:
    """The elements of its operands that a compute node needs. ``live``: a mask for each of its results.

    ``known``: the known values of its operands. Yields nothing for operands that are not needed.
    """
    opcode = node.instruction.opcode
    if node.instruction.called and opcode in _CALLERS:
        yield from _CALLERS[opcode](node, known, live, dependence)
        return
    if len(node.results) == 1 and (mask := live[0]) is not None:
        rule = _RULES.get(opcode, _elementwise if op_of(opcode).elementwise else None)
        if rule is not None:
            yield from rule(node, known, mask)
            return
    yield from _everything(node, live)


def whole(mask: np.ndarray, rank: int) -> np.ndarray:
    """All elements of a tensor of this rank, on those devices on which any element of ``mask`` is live."""
    return tensors.any_along(mask, tuple(range(1, mask.ndim))).reshape((-1,) + (1,) * rank)


def rank_of(node: Node, operand: int) -> int:
    type = node.operands[operand].type
    return 0 if type is None else len(type.shape)


def _everything(node: Node, live: Masks) -> Needs:
    devices = _devices(live)
    if devices is not None:
        for i in range(len(node.operands)):
            yield i, whole(devices, rank_of(node, i))


def _devices(live: Masks) -> np.ndarray | None:
    """The devices on which any element is live, as the mask of a scalar."""
    found: np.ndarray | None = None
    for mask in live:
        if mask is not None:
            found = tensors.union(found, whole(mask, 0))
    return found


# Calls, loops and conditionals without collectives; map.


def _called(node: Node, known: Sequence[Known], live: Masks, dependence: Dependence) -> Needs:
    leaves = dependence.of_call(node.instruction)
    for mask, leaf in zip(live, leaves, strict=True):
        if mask is not None:
            for i in leaf:
                yield i, whole(mask, rank_of(node, i))


def _conditional(node: Node, known: Sequence[Known], live: Masks, dependence: Dependence) -> Needs:
    selector = known[0]
    if selector is None:
        yield from _called(node, known, live, dependence)
        return
    chosen = selected(selector, len(node.instruction.called))
    position = 1
    arguments = node.instruction.operands[1:]
    for branch, (argument, called) in enumerate(
        zip(arguments, node.instruction.called, strict=True)
    ):
        takes = chosen == branch
        if takes.any():
            for mask, leaf in zip(live, dependence.branch(called), strict=True):
                if mask is None:
                    continue
                devices = whole(mask, 0) & takes
                if devices.any():
                    for i in leaf:
                        yield position + i, whole(devices, rank_of(node, position + i))
        position += leaf_count(argument.shape)


def selected(selector: np.ndarray, branches: int) -> np.ndarray:
    """The branch that each device takes. True takes branch 0, an index out of range the last one."""
    if selector.dtype == bool:
        return np.where(selector, 0, 1)
    index = selector.astype(np.int64)
    return np.where((index < 0) | (index >= branches), branches - 1, index)


def _map(node: Node, known: Sequence[Known], live: Masks, dependence: Dependence) -> Needs:
    (leaf,) = dependence.branch(node.instruction.called[0])
    (mask,) = live
    if mask is not None:
        for i in leaf:
            yield i, mask


_CALLERS = {
    "call": _called,
    "while": _called,
    "conditional": _conditional,
    "map": _map,
}


# Ops that move elements.


def _elementwise(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    for i in range(len(node.operands)):
        yield i, mask if rank_of(node, i) == mask.ndim - 1 else whole(mask, rank_of(node, i))


def _select(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    pred = known[0]
    if pred is None:
        yield from _elementwise(node, known, mask)
        return
    pred = spread(pred, mask.ndim - 1)
    yield 1, tensors.fit(mask & pred)
    yield 2, tensors.fit(mask & ~pred)


def _broadcast(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    yield 0, tensors.unbroadcast(mask, list(node.instruction.proto.dimensions), operand_shape(node))


def _reshape(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    source, target = result_shape(node), operand_shape(node)
    moved = tensors.reshaped(mask, source, target)
    yield 0, whole(mask, len(target)) if moved is None else moved


def _bitcast(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    yield from _reshape(node, known, mask) if is_reshape(node) else _everything(node, [mask])


def _transpose(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    dimensions = list(node.instruction.proto.dimensions)
    yield 0, mask.transpose([0, *(1 + dimensions.index(d) for d in range(len(dimensions)))])


def _reverse(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    yield 0, np.flip(mask, tuple(d + 1 for d in node.instruction.proto.dimensions))


def _put(mask: np.ndarray, shape: Sequence[int], where: Sequence[slice]) -> np.ndarray:
    """A mask of a tensor of ``shape`` that is ``mask`` at these places and false elsewhere."""
    partial = [
        i
        for i, (n, s) in enumerate(zip(shape, where, strict=True))
        if (s.start, s.stop, s.step) != (0, n, 1)
    ]
    if not partial:
        return mask
    sizes = [shape[i] if i in partial else m for i, m in enumerate(mask.shape[1:])]
    if np.prod(sizes) > tensors.MOST_ELEMENTS:
        return whole(mask, len(shape))
    result = np.zeros((len(mask), *sizes), bool)
    at = [where[i] if i in partial else slice(None) for i in range(len(shape))]
    result[(slice(None), *at)] = mask
    return result


def _slice(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    yield 0, _put(mask, operand_shape(node), strides(node))


def _take(mask: np.ndarray, where: Sequence[slice]) -> np.ndarray:
    at = [slice(None) if m == 1 else s for m, s in zip(mask.shape[1:], where, strict=True)]
    return mask[(slice(None), *at)]


def _pad(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    where = padded(node)
    if where is None:
        yield from _everything(node, [mask])
        return
    yield 0, _take(mask, where)
    yield 1, whole(mask, 0)


def _concatenate(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    (dimension,) = node.instruction.proto.dimensions
    start = 0
    for i in range(len(node.operands)):
        stop = start + operand_shape(node, i)[dimension]
        where = [slice(None)] * (mask.ndim - 1)
        where[dimension] = slice(start, stop)
        yield i, _take(mask, where)
        start = stop


def _dynamic_slice(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    shape, sizes = operand_shape(node), result_shape(node)
    starts = starts_of(node, known, 1)
    cut = [i for i, n in enumerate(shape) if sizes[i] != n]
    if starts is None or np.prod([shape[i] for i in cut]) > tensors.MOST_ELEMENTS:
        for i in cut:
            mask = tensors.any_along(mask, i + 1, keep=True)
        yield 0, mask
    else:
        for i in cut:
            others = mask.size // len(mask) // mask.shape[i + 1]
            if others * shape[i] > tensors.MOST_ELEMENTS:
                mask = whole(mask, len(shape))
        yield 0, tensors.fit(tensors.placed(mask, shape, starts, sizes))
    yield from _indices(node, mask, 1)


def _dynamic_update_slice(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    shape, sizes = operand_shape(node), operand_shape(node, 1)
    starts = starts_of(node, known, 2)
    cut = [i for i, n in enumerate(shape) if sizes[i] != n]
    if starts is None or np.prod([shape[i] for i in cut]) > tensors.MOST_ELEMENTS:
        update = mask
        for i in cut:
            update = tensors.any_along(update, i + 1, keep=True)
        yield 0, mask
        yield 1, update
    else:
        inside = tensors.placed(tensors.full(len(shape)), shape, starts, sizes)
        yield 0, tensors.fit(mask & ~inside)
        yield 1, tensors.window(mask, shape, starts, sizes)
    yield from _indices(node, mask, 2)


def _indices(node: Node, mask: np.ndarray, first: int) -> Needs:
    for i in range(first, len(node.operands)):
        yield i, whole(mask, rank_of(node, i))


def _reduce(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    dimensions = sorted(node.instruction.proto.dimensions)
    taken = np.expand_dims(mask, tuple(d + 1 for d in dimensions))
    count = len(node.operands) // 2
    for i in range(count):
        yield i, taken
        yield count + i, whole(mask, 0)


def _dot(node: Node, known: Sequence[Known], mask: np.ndarray) -> Needs:
    """Rows and columns: result dimensions are batches, free ones of the left, of the right."""
    numbers = node.instruction.proto.dot_dimension_numbers
    batch = len(numbers.lhs_batch_dimensions)
    sides = (
        (0, numbers.lhs_batch_dimensions, numbers.lhs_contracting_dimensions),
        (1, numbers.rhs_batch_dimensions, numbers.rhs_contracting_dimensions),
    )
    at = batch
    for operand, batches, contracted in sides:
        rank = rank_of(node, operand)
        free = [d for d in range(rank) if d not in batches and d not in contracted]
        own = {d: i for i, d in enumerate(batches)} | {d: at + i for i, d in enumerate(free)}
        at += len(free)
        gone = tuple(1 + i for i in range(mask.ndim - 1) if i not in own.values())
        left = tensors.any_along(mask, gone)
        order = sorted(own.values())
        moved = left.transpose([0, *(1 + order.index(own[d]) for d in sorted(own))])
        shape = [len(moved)] + [1] * rank
        for i, d in enumerate(sorted(own)):
            shape[d + 1] = moved.shape[i + 1]
        yield operand, moved.reshape(shape)


_RULES: dict[str, Rule] = {
    "select": _select,
    "broadcast": _broadcast,
    "reshape": _reshape,
    "bitcast": _bitcast,
    "transpose": _transpose,
    "reverse": _reverse,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "reduce": _reduce,
    "dot": _dot,
}
