"""Native reductions of host arrays, for every element type.

`combiner` gives a function that reduces any number of arrays into another. Types that numpy reduces as HLO
means it (integers of whole bytes, f32, f64, complex, pred) are reduced as they are. Floats below 32 bits are
accumulated in f32 and rounded once, at the end; s2, u2, s4 and u4 are accumulated in s32 and wrap once.
On pred, sum, max and or are "any", product, min and and are "all". Minimum and maximum give NaN where any
operand is NaN, and of 0.0 and -0.0 the first one, as XLA's CPU backend does.

Arrays are worked through in blocks that stay in the cache, so no whole copy is ever made in a wider type.
The order of the arrays is the order of the operations: equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from .ops import Reduction
from .types import ELEMENT_TYPES, ElementType

# combine(arrays, out): arrays of one shape, any strides; ``out`` may be the first or second of them.
Combine = Callable[[Sequence[np.ndarray], np.ndarray], None]
# operation(first, second, out=out)
Operation = Callable[..., object]

_BLOCK = 1 << 14  # elements


def _minimum(first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
    # Of equal numbers NumPy gives the second one, as x86 does.
    np.minimum(second, first, out=out)


def _maximum(first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
    np.maximum(second, first, out=out)


_ARITHMETIC: dict[Reduction, Operation] = {
    Reduction.SUM: np.add,
    Reduction.PRODUCT: np.multiply,
    Reduction.MIN: _minimum,
    Reduction.MAX: _maximum,
}
_BITWISE: dict[Reduction, Operation] = {
    Reduction.AND: np.bitwise_and,
    Reduction.OR: np.bitwise_or,
    Reduction.XOR: np.bitwise_xor,
}
_LOGICAL: dict[Reduction, Operation] = {
    Reduction.SUM: np.logical_or,
    Reduction.PRODUCT: np.logical_and,
    Reduction.MIN: np.logical_and,
    Reduction.MAX: np.logical_or,
    Reduction.AND: np.logical_and,
    Reduction.OR: np.logical_or,
    Reduction.XOR: np.logical_xor,
}


def is_narrow_float(element: ElementType) -> bool:
    """A float that is accumulated in f32."""
    return element.name.startswith(("f4", "f8", "f16", "bf16"))


@cache
def combiner(dtype: str, reduction: Reduction) -> Combine:
    """The reduction of arrays of an element type (named as in HLO).

    For narrow floats the arrays, the output or both may also be f32: partial results of a longer sum.
    Raises ``NotImplementedError`` naming the type and the reduction where HLO defines none.
    """
    element = ELEMENT_TYPES[dtype]
    if dtype == "pred":
        return _direct(_LOGICAL[reduction])
    is_integer = dtype[0] in "su"
    is_complex = dtype[0] == "c"
    operation = (_ARITHMETIC | _BITWISE if is_integer else _ARITHMETIC).get(reduction)
    if operation is None or (is_complex and reduction in (Reduction.MIN, Reduction.MAX)):
        raise NotImplementedError(
            f"reduction {reduction} is not defined on {dtype}: reduce another type and convert"
        )
    if is_integer:
        return _direct(operation) if element.bits >= 8 else _widened(operation, np.dtype(np.int32))
    if is_narrow_float(element):
        return _quiet(_widened(operation, np.dtype(np.float32)))
    return _quiet(_direct(operation))


def _quiet(combine: Combine) -> Combine:
    """Overflow and NaN are results here, not something to warn of."""

    def quiet(arrays: Sequence[np.ndarray], out: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            combine(arrays, out)

    return quiet


def _direct(operation: Operation) -> Combine:
    def fold(arrays: Sequence[np.ndarray], out: np.ndarray) -> None:
        operation(arrays[0], arrays[1], out=out)
        for array in arrays[2:]:
            operation(out, array, out=out)

    def combine(arrays: Sequence[np.ndarray], out: np.ndarray) -> None:
        count = len(arrays)
        if count == 1:
            np.copyto(out, arrays[0])
        elif count == 2:
            fold(arrays, out)
        else:
            _in_blocks(fold, arrays, out)

    return combine


def _widened(operation: Operation, wide: np.dtype) -> Combine:
    def combine(arrays: Sequence[np.ndarray], out: np.ndarray) -> None:
        if len(arrays) == 1:
            np.copyto(out, arrays[0], casting="unsafe")
            return
        size = min(out.size, _BLOCK)
        total, operand = np.empty(size, wide), np.empty(size, wide)

        def block(parts: Sequence[np.ndarray], target: np.ndarray) -> None:
            shape = target.shape
            accumulated = total[: target.size].reshape(shape)
            widened = operand[: target.size].reshape(shape)
            np.copyto(accumulated, parts[0], casting="unsafe")
            for part in parts[1:]:
                np.copyto(widened, part, casting="unsafe")
                operation(accumulated, widened, out=accumulated)
            np.copyto(target, accumulated, casting="unsafe")

        _in_blocks(block, arrays, out)

    return combine


def _in_blocks(combine: Combine, arrays: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Apply ``combine`` to pieces of at most `_BLOCK` elements."""
    if out.size <= _BLOCK:
        combine(arrays, out)
        return
    if out.ndim > 1 and out.flags.c_contiguous and all(a.flags.c_contiguous for a in arrays):
        arrays, out = [a.reshape(-1) for a in arrays], out.reshape(-1)
    rows = max(1, _BLOCK // (out.size // len(out)))
    if rows == 1 and out.ndim > 1:
        for index in range(len(out)):
            _in_blocks(combine, [a[index] for a in arrays], out[index])
        return
    for start in range(0, len(out), rows):
        piece = slice(start, start + rows)
        combine([a[piece] for a in arrays], out[piece])
