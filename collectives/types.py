"""The types every layer speaks: element types and tensor types.

One table, `ELEMENT_TYPES`, says for each element type its HLO name, its numpy dtype and its width.
Codes of other formats (XLA's ``PrimitiveType``, ``PJRT_Buffer_Type``, MPI datatypes) are kept beside
the code that speaks that format and are keyed by the name used here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class ElementType:
    """An HLO element type.

    ``numpy`` is the dtype of its host arrays; sub-byte types take one byte an element there.
    ``bits`` is the width of one element as HLO counts it.
    """

    name: str
    numpy: np.dtype
    bits: int


def _element(name: str, dtype: object, bits: int | None = None) -> ElementType:
    numpy_dtype = np.dtype(dtype)  # type: ignore[call-overload]
    return ElementType(name, numpy_dtype, bits or 8 * numpy_dtype.itemsize)


ELEMENT_TYPES: dict[str, ElementType] = {
    e.name: e
    for e in (
        _element("pred", np.bool_),
        _element("s2", ml_dtypes.int2, 2),
        _element("s4", ml_dtypes.int4, 4),
        _element("s8", np.int8),
        _element("s16", np.int16),
        _element("s32", np.int32),
        _element("s64", np.int64),
        _element("u2", ml_dtypes.uint2, 2),
        _element("u4", ml_dtypes.uint4, 4),
        _element("u8", np.uint8),
        _element("u16", np.uint16),
        _element("u32", np.uint32),
        _element("u64", np.uint64),
        _element("f4e2m1fn", ml_dtypes.float4_e2m1fn, 4),
        _element("f8e3m4", ml_dtypes.float8_e3m4),
        _element("f8e4m3", ml_dtypes.float8_e4m3),
        _element("f8e4m3fn", ml_dtypes.float8_e4m3fn),
        _element("f8e4m3b11fnuz", ml_dtypes.float8_e4m3b11fnuz),
        _element("f8e4m3fnuz", ml_dtypes.float8_e4m3fnuz),
        _element("f8e5m2", ml_dtypes.float8_e5m2),
        _element("f8e5m2fnuz", ml_dtypes.float8_e5m2fnuz),
        _element("f8e8m0fnu", ml_dtypes.float8_e8m0fnu),
        _element("bf16", ml_dtypes.bfloat16),
        _element("f16", np.float16),
        _element("f32", np.float32),
        _element("f64", np.float64),
        _element("c64", np.complex64),
        _element("c128", np.complex128),
    )
}

BY_NUMPY: dict[np.dtype, ElementType] = {e.numpy: e for e in ELEMENT_TYPES.values()}


@dataclass(frozen=True)
class TensorType:
    """A dense array type, printed as in HLO: ``f32[8,4]``. Dense row-major is implied."""

    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def element(self) -> ElementType:
        return ELEMENT_TYPES[self.dtype]

    @cached_property
    def numpy(self) -> np.dtype:
        return self.element.numpy

    @cached_property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Payload bytes: elements times their width, rounded up to whole bytes."""
        return (self.size * self.element.bits + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @classmethod
    def parse(cls, text: str) -> TensorType:
        """Inverse of ``str``. Raises ``ValueError`` on anything else."""
        name, bracket, rest = text.partition("[")
        if not bracket or not rest.endswith("]") or name not in ELEMENT_TYPES:
            raise ValueError(f"not a tensor type: {text!r}")
        return cls(name, tuple(int(d) for d in rest[:-1].split(",") if d))


_types: dict[TensorType, TensorType] = {}


def interned(type: TensorType) -> TensorType:
    """The one object of all types that are equal to it: of arrays and of what programs take and give, which
    are told to be the same without comparing them."""
    return _types.setdefault(type, type)
