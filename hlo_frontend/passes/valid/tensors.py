"""Arrays of facts about the elements of tensors on every device, in a reduced form.

A *reduced* array for a tensor of shape ``(n0, n1, …)`` has the shape ``(d, m0, m1, …)``: d is the number of
devices, or 1 where all devices agree, and each ``mi`` is ``ni``, or 1 where all positions along that
dimension agree. So the array is small for a large tensor that is indexed along one dimension only.
Two kinds of facts have this form: the known values of integers and booleans, and masks of live elements.

A mask may always say that more elements are live than really are (`fit`). Values are exact, or not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

Shape = Sequence[int]

# The most elements that a reduced array may have for one device.
MOST_ELEMENTS = 1 << 14


def small(array: np.ndarray) -> bool:
    """Whether a reduced array is small enough to be kept."""
    return prod(array.shape[1:]) <= MOST_ELEMENTS


def any_along(mask: np.ndarray, axes: int | tuple[int, ...], *, keep: bool = False) -> np.ndarray:
    """Whether any element along these axes is true. Axis 0 is that of devices."""
    return np.asarray(mask.any(axes, keepdims=True) if keep else mask.any(axes))


def fit(mask: np.ndarray) -> np.ndarray:
    """The mask, reduced along its longest dimensions until it is small enough."""
    while not small(mask):
        mask = any_along(mask, 1 + int(np.argmax(mask.shape[1:])), keep=True)
    return mask


def full(rank: int, value: bool = True) -> np.ndarray:
    """The same fact for every element of every device."""
    return np.full((1,) * (rank + 1), value)


def union(left: np.ndarray | None, right: np.ndarray) -> np.ndarray:
    """The elements that are live in either mask."""
    return right if left is None else fit(left | right)


def reduced_or(mask: np.ndarray, dimensions: Sequence[int]) -> np.ndarray:
    """Whether any element along ``dimensions`` is true; the result does not have these dimensions."""
    return any_along(mask, tuple(d + 1 for d in dimensions))


def broadcast(array: np.ndarray, rank: int, dimensions: Sequence[int]) -> np.ndarray:
    """HLO's broadcast: dimension i of the operand becomes ``dimensions[i]``."""
    order = sorted(range(len(dimensions)), key=lambda i: dimensions[i])
    moved = array.transpose([0, *(i + 1 for i in order)])
    shape = [array.shape[0]] + [1] * rank
    for i in order:
        shape[dimensions[i] + 1] = array.shape[i + 1]
    return moved.reshape(shape)


def unbroadcast(mask: np.ndarray, dimensions: Sequence[int], operand: Shape) -> np.ndarray:
    """The elements of a broadcast's operand from which the live elements of its result come."""
    gone = [d for d in range(mask.ndim - 1) if d not in dimensions]
    kept = [d for d in range(mask.ndim - 1) if d in dimensions]
    left = reduced_or(mask, gone)
    left = left.transpose([0, *(1 + kept.index(d) for d in dimensions)])
    for i, n in enumerate(operand):
        if n == 1 and left.shape[i + 1] != 1:
            left = any_along(left, i + 1, keep=True)
    return left


def reshaped(array: np.ndarray, source: Shape, target: Shape) -> np.ndarray | None:
    """A row-major reshape; None if the result would be too large.

    It works on the smallest groups of dimensions that have the same number of elements on both sides.
    """
    if 0 in source:
        return None
    outer = array.shape[:1]
    expanded: list[int] = []
    result: list[int] = []
    moved = array
    shape = list(array.shape[1:])
    for before, after in _groups(source, target):
        if all(shape[i] == 1 for i in before):
            result += [1] * len(after)
            expanded += [1] * len(before)
        else:
            result += [target[i] for i in after]
            expanded += [source[i] for i in before]
    if max(prod(result), prod(expanded)) > MOST_ELEMENTS:
        return None
    moved = np.broadcast_to(moved, (*outer, *expanded))
    return moved.reshape((*outer, *result))


def _groups(source: Shape, target: Shape) -> Iterator[tuple[list[int], list[int]]]:
    i = j = 0
    while i < len(source) or j < len(target):
        before, after, left, right = [], [], 1, 1
        if i < len(source):
            before.append(i)
            left *= source[i]
            i += 1
        if j < len(target):
            after.append(j)
            right *= target[j]
            j += 1
        while left != right:
            if left < right:
                before.append(i)
                left *= source[i]
                i += 1
            else:
                after.append(j)
                right *= target[j]
                j += 1
        yield before, after


def window(array: np.ndarray, shape: Shape, starts: np.ndarray, sizes: Shape) -> np.ndarray:
    """The window of ``sizes`` that begins at ``starts`` (one row for each device, or one for all)."""
    cut = [i for i, n in enumerate(shape) if sizes[i] != n and array.shape[i + 1] != 1]
    if not cut:
        return array
    if _same_rows(starts):
        return array[(slice(None), *_slices(array, cut, starts[0][cut], sizes))]
    devices = max(len(starts), len(array))
    parts = []
    for d in range(devices):
        own = array[d if len(array) > 1 else 0]
        parts.append(own[_slices(array, cut, starts[d][cut], sizes)])
    return np.stack(parts)


def placed(mask: np.ndarray, shape: Shape, starts: np.ndarray, sizes: Shape) -> np.ndarray:
    """A mask of a whole tensor that is ``mask`` within the window, and false elsewhere."""
    cut = [i for i, n in enumerate(shape) if sizes[i] != n]
    if not cut:
        return mask
    same = _same_rows(starts)
    devices = len(mask) if same else max(len(starts), len(mask))
    result = np.zeros(
        (devices, *(shape[i] if i in cut else m for i, m in enumerate(mask.shape[1:]))), bool
    )
    if same:
        result[(slice(None), *_slices(result, cut, starts[0][cut], sizes))] = mask
        return result
    for d in range(devices):
        own = mask[d if len(mask) > 1 else 0]
        result[d][_slices(result, cut, starts[d][cut], sizes)] = own
    return result


def _same_rows(starts: np.ndarray) -> bool:
    return len(starts) == 1 or bool((starts == starts[0]).all())


def _slices(
    array: np.ndarray, cut: Sequence[int], starts: Sequence[int], sizes: Shape
) -> tuple[slice, ...]:
    slices = [slice(None)] * (array.ndim - 1)
    for i, start in zip(cut, starts, strict=True):
        slices[i] = slice(int(start), int(start) + sizes[i])
    return tuple(slices)


def clamped_starts(
    indices: Sequence[np.ndarray | None], shape: Shape, sizes: Shape
) -> np.ndarray | None:
    """The starts of a dynamic slice, clamped as HLO does it; None if one that is needed is not known."""
    columns: list[np.ndarray] = []
    for index, n, size in zip(indices, shape, sizes, strict=True):
        if n == size:
            columns.append(np.zeros(1, np.int64))
        elif index is None:
            return None
        elif index.dtype == np.uint64:
            columns.append(np.minimum(index.reshape(-1), np.uint64(n - size)).astype(np.int64))
        else:
            columns.append(np.clip(index.reshape(-1).astype(np.int64), 0, n - size))
    if not columns:
        return np.zeros((1, 0), np.int64)
    return np.stack(np.broadcast_arrays(*columns), axis=1)
