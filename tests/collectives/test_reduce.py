"""Native reductions, every dtype and reduction, against exact arithmetic."""

from __future__ import annotations

import tracemalloc
import warnings

import ml_dtypes
import numpy as np
import pytest
from support.collective_cases import (
    BITWISE,
    DTYPES,
    is_float,
    random_array,
    reduce,
    reductions,
    same,
)

from stretto.collectives.ops import Reduction
from stretto.collectives.reduce import combiner
from stretto.collectives.types import ELEMENT_TYPES, TensorType

SHAPES = [(), (0,), (1,), (5, 3), (40_000,), (3, 20_000), (2, 3, 7000)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_reduction(dtype):
    rng = np.random.default_rng(0)
    for reduction in reductions(dtype):
        combine = combiner(dtype, reduction)
        for shape in SHAPES:
            type_ = TensorType(dtype, shape)
            for count in (1, 2, 5):
                arrays = [random_array(rng, type_, reduction) for _ in range(count)]
                out = np.empty(shape, type_.numpy)
                combine(arrays, out)
                assert same(out, reduce(reduction, arrays)), (reduction, shape, count)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "s4", "u8", "pred"])
def test_strided_arrays_and_outputs(dtype):
    rng = np.random.default_rng(1)
    for shape, index in (
        ((6, 5000), np.s_[:, 100:4000]),
        ((300, 100, 4), np.s_[:, ::2, 1:3]),
        ((4, 3, 30000), np.s_[:, 1, :]),
    ):
        arrays = [random_array(rng, TensorType(dtype, shape))[index] for _ in range(3)]
        out = np.zeros(shape, arrays[0].dtype)[index]
        combiner(dtype, Reduction.MAX)(arrays, out)
        assert same(np.ascontiguousarray(out), reduce(Reduction.MAX, arrays))


@pytest.mark.parametrize("dtype", ["f32", "bf16", "s2"])
@pytest.mark.parametrize("place", [0, 1])
def test_the_output_may_be_one_of_the_first_two(dtype, place):
    rng = np.random.default_rng(2)
    arrays = [random_array(rng, TensorType(dtype, (50_000,))) for _ in range(4)]
    want = reduce(Reduction.SUM, arrays)
    combiner(dtype, Reduction.SUM)(arrays, arrays[place])
    assert same(arrays[place], want)


@pytest.mark.parametrize(
    ("dtype", "values", "rounded_once"),
    [
        ("bf16", (256, 1, 1), 258),
        ("f16", (2048, 1, 1), 2050),
        ("f8e4m3fn", (16, 1, 1), 18),
        ("f8e5m2", (8, 1, 1), 10),
        ("f4e2m1fn", (4, 0.5, 0.5, 1), 6),
    ],
)
def test_narrow_floats_are_rounded_once(dtype, values, rounded_once):
    element = ELEMENT_TYPES[dtype].numpy
    out = np.empty((1,), element)
    combiner(dtype, Reduction.SUM)([np.array([v]).astype(element) for v in values], out)
    assert float(out[0]) == rounded_once


def test_partial_results_of_narrow_floats_may_be_wide():
    bf16 = np.dtype(ml_dtypes.bfloat16)
    combine = combiner("bf16", Reduction.SUM)
    partial = np.empty((1,), np.float32)
    combine([np.array([v]).astype(bf16) for v in (256, 1)], partial)
    assert partial[0] == 257
    out = np.empty((1,), bf16)
    combine([partial, np.ones(1, np.float32)], out)
    assert float(out[0]) == 258


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "f8e5m2"])
@pytest.mark.parametrize("reduction", [Reduction.MIN, Reduction.MAX])
@pytest.mark.parametrize("size", [1, 7, 50_000])
def test_of_zeros_the_first_is_the_minimum_and_the_maximum(dtype, reduction, size):
    """As XLA's CPU backend has it."""
    element = TensorType(dtype, ()).numpy
    zero, minus = np.zeros(size).astype(element), (-np.zeros(size)).astype(element)
    for arrays in ((zero, minus), (minus, zero), (zero, minus, minus), (minus, zero, zero)):
        out = np.empty(size, element)
        combiner(dtype, reduction)(arrays, out)
        assert out.tobytes() == arrays[0].tobytes()
        first, *rest = [array.copy() for array in arrays]
        combiner(dtype, reduction)([first, *rest], first)
        assert first.tobytes() == arrays[0].tobytes()


@pytest.mark.parametrize("dtype", [d for d in DTYPES if is_float(d) and d != "f4e2m1fn"])
@pytest.mark.parametrize("reduction", [Reduction.MIN, Reduction.MAX])
def test_minimum_and_maximum_propagate_nan(dtype, reduction):
    element = ELEMENT_TYPES[dtype].numpy
    nan, one = np.array([np.nan] * 3).astype(element), np.ones(3).astype(element)
    for arrays in ((nan, one), (one, nan), (one, one, nan)):
        out = np.empty(3, element)
        combiner(dtype, reduction)(arrays, out)
        assert np.isnan(out.astype(np.float32)).all()


def test_integers_wrap():
    for dtype, a, b, want in (
        ("s8", 127, 1, -128),
        ("u8", 255, 2, 1),
        ("s4", 7, 1, -8),
        ("u4", 15, 1, 0),
        ("s2", 1, 1, -2),
        ("s64", 2**63 - 1, 1, -(2**63)),
    ):
        element = ELEMENT_TYPES[dtype].numpy
        out = np.empty(1, element)
        wide = np.uint64 if dtype[0] == "u" else np.int64
        arrays = [np.array([v], wide).astype(element) for v in (a, b)]
        combiner(dtype, Reduction.SUM)(arrays, out)
        assert int(out[0]) == want


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_hlo_does_not_define_is_refused_by_name(dtype):
    for reduction in set(Reduction) - set(reductions(dtype)):
        with pytest.raises(NotImplementedError, match=f"{reduction} is not defined on {dtype}"):
            combiner(dtype, reduction)
    if is_float(dtype):
        assert not set(reductions(dtype)) & set(BITWISE)


def test_overflow_and_nan_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in ("f32", "f64", "f16", "bf16", "f8e5m2", "c64"):
            element = ELEMENT_TYPES[dtype].numpy
            big = np.full(4, np.inf).astype(element)
            out = np.empty(4, element)
            combiner(dtype, Reduction.SUM)([big, -big, np.array([np.nan] * 4).astype(element)], out)


@pytest.mark.parametrize("dtype", ["bf16", "f8e4m3fn", "s4"])
def test_wide_copies_are_never_made(dtype):
    element = ELEMENT_TYPES[dtype].numpy
    arrays = [np.ones(4_000_000, element) for _ in range(3)]
    out = np.empty_like(arrays[0])
    combine = combiner(dtype, Reduction.SUM)
    tracemalloc.start()
    try:
        combine(arrays, out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
