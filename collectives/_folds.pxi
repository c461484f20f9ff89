# Reductions: out[i] = out[i] op in[i]. Integers wrap, so they are added and multiplied without a sign.

ctypedef fused unsigned_t:
    uint8_t
    uint16_t
    uint32_t
    uint64_t

ctypedef fused real_t:
    int8_t
    int16_t
    int32_t
    int64_t
    uint8_t
    uint16_t
    uint32_t
    uint64_t
    float
    double

ctypedef fused float_t:
    float
    double


cdef void fold_wrapping_add(unsigned_t* out, const unsigned_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = <unsigned_t>(out[i] + given[i])


cdef void fold_wrapping_multiply(unsigned_t* out, const unsigned_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = <unsigned_t>(<uint64_t>out[i] * <uint64_t>given[i])


cdef void fold_and(unsigned_t* out, const unsigned_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = out[i] & given[i]


cdef void fold_or(unsigned_t* out, const unsigned_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = out[i] | given[i]


cdef void fold_xor(unsigned_t* out, const unsigned_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = out[i] ^ given[i]


cdef void fold_add(float_t* out, const float_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = out[i] + given[i]


cdef void fold_multiply(float_t* out, const float_t* given, int64_t n) noexcept nogil:
    cdef int64_t i
    for i in range(n):
        out[i] = out[i] * given[i]


cdef void fold_complex_multiply(float_t* out, const float_t* given, int64_t n) noexcept nogil:
    """``n`` pairs of real and imaginary part."""
    cdef int64_t i
    cdef float_t real, imaginary
    for i in range(n):
        real = out[2 * i] * given[2 * i] - out[2 * i + 1] * given[2 * i + 1]
        imaginary = out[2 * i] * given[2 * i + 1] + out[2 * i + 1] * given[2 * i]
        out[2 * i], out[2 * i + 1] = real, imaginary


cdef void fold_complex_add(float_t* out, const float_t* given, int64_t n) noexcept nogil:
    fold_add(out, given, 2 * n)


cdef void fold_minimum(real_t* out, const real_t* given, int64_t n) noexcept nogil:
    """NaN where either is NaN."""
    cdef int64_t i
    for i in range(n):
        if real_t is float or real_t is double:
            if out[i] == out[i] and not (out[i] <= given[i]):
                out[i] = given[i]
        else:
            if given[i] < out[i]:
                out[i] = given[i]


cdef void fold_maximum(real_t* out, const real_t* given, int64_t n) noexcept nogil:
    """NaN where either is NaN."""
    cdef int64_t i
    for i in range(n):
        if real_t is float or real_t is double:
            if out[i] == out[i] and not (out[i] >= given[i]):
                out[i] = given[i]
        else:
            if given[i] > out[i]:
                out[i] = given[i]


cdef dict _FOLDS = {}


cdef void _offer(str reduction, str dtypes, fold_t fold):
    for dtype in dtypes.split():
        _FOLDS[reduction, dtype] = <uintptr_t>fold


_offer("add", "s8 u8", <fold_t>fold_wrapping_add[uint8_t])
_offer("add", "s16 u16", <fold_t>fold_wrapping_add[uint16_t])
_offer("add", "s32 u32", <fold_t>fold_wrapping_add[uint32_t])
_offer("add", "s64 u64", <fold_t>fold_wrapping_add[uint64_t])
_offer("add", "f32", <fold_t>fold_add[float])
_offer("add", "f64", <fold_t>fold_add[double])
_offer("add", "c64", <fold_t>fold_complex_add[float])
_offer("add", "c128", <fold_t>fold_complex_add[double])
_offer("multiply", "s8 u8", <fold_t>fold_wrapping_multiply[uint8_t])
_offer("multiply", "s16 u16", <fold_t>fold_wrapping_multiply[uint16_t])
_offer("multiply", "s32 u32", <fold_t>fold_wrapping_multiply[uint32_t])
_offer("multiply", "s64 u64", <fold_t>fold_wrapping_multiply[uint64_t])
_offer("multiply", "f32", <fold_t>fold_multiply[float])
_offer("multiply", "f64", <fold_t>fold_multiply[double])
_offer("multiply", "c64", <fold_t>fold_complex_multiply[float])
_offer("multiply", "c128", <fold_t>fold_complex_multiply[double])
_offer("minimum", "s8", <fold_t>fold_minimum[int8_t])
_offer("minimum", "s16", <fold_t>fold_minimum[int16_t])
_offer("minimum", "s32", <fold_t>fold_minimum[int32_t])
_offer("minimum", "s64", <fold_t>fold_minimum[int64_t])
_offer("minimum", "u8", <fold_t>fold_minimum[uint8_t])
_offer("minimum", "u16", <fold_t>fold_minimum[uint16_t])
_offer("minimum", "u32", <fold_t>fold_minimum[uint32_t])
_offer("minimum", "u64", <fold_t>fold_minimum[uint64_t])
_offer("minimum", "f32", <fold_t>fold_minimum[float])
_offer("minimum", "f64", <fold_t>fold_minimum[double])
_offer("maximum", "s8", <fold_t>fold_maximum[int8_t])
_offer("maximum", "s16", <fold_t>fold_maximum[int16_t])
_offer("maximum", "s32", <fold_t>fold_maximum[int32_t])
_offer("maximum", "s64", <fold_t>fold_maximum[int64_t])
_offer("maximum", "u8", <fold_t>fold_maximum[uint8_t])
_offer("maximum", "u16", <fold_t>fold_maximum[uint16_t])
_offer("maximum", "u32", <fold_t>fold_maximum[uint32_t])
_offer("maximum", "u64", <fold_t>fold_maximum[uint64_t])
_offer("maximum", "f32", <fold_t>fold_maximum[float])
_offer("maximum", "f64", <fold_t>fold_maximum[double])
for _dtypes, _bits in (("s8 u8", 8), ("s16 u16", 16), ("s32 u32", 32), ("s64 u64", 64)):
    if _bits == 8:
        _offer("and", _dtypes, <fold_t>fold_and[uint8_t])
        _offer("or", _dtypes, <fold_t>fold_or[uint8_t])
        _offer("xor", _dtypes, <fold_t>fold_xor[uint8_t])
    elif _bits == 16:
        _offer("and", _dtypes, <fold_t>fold_and[uint16_t])
        _offer("or", _dtypes, <fold_t>fold_or[uint16_t])
        _offer("xor", _dtypes, <fold_t>fold_xor[uint16_t])
    elif _bits == 32:
        _offer("and", _dtypes, <fold_t>fold_and[uint32_t])
        _offer("or", _dtypes, <fold_t>fold_or[uint32_t])
        _offer("xor", _dtypes, <fold_t>fold_xor[uint32_t])
    else:
        _offer("and", _dtypes, <fold_t>fold_and[uint64_t])
        _offer("or", _dtypes, <fold_t>fold_or[uint64_t])
        _offer("xor", _dtypes, <fold_t>fold_xor[uint64_t])
# On pred, whose bytes are 0 and 1, sum and maximum are "any", product and minimum are "all".
for _reduction in ("add", "maximum", "or"):
    _offer(_reduction, "pred", <fold_t>fold_or[uint8_t])
for _reduction in ("multiply", "minimum", "and"):
    _offer(_reduction, "pred", <fold_t>fold_and[uint8_t])
_offer("xor", "pred", <fold_t>fold_xor[uint8_t])


def can_reduce(reduction: str, dtype: str) -> bool:
    """Whether there is a compiled reduction for arrays of this element type (HLO's names)."""
    return (reduction, dtype) in _FOLDS
