"""The pool: alignment, reuse, bounds, and memory that comes back exactly when nothing views it."""

from __future__ import annotations

import gc
import threading

import ml_dtypes
import numpy as np
import pytest

from stretto.collectives.memory import ALIGNMENT, Pool, size_class

F32 = np.dtype(np.float32)
U8 = np.dtype(np.uint8)
BIG = 100_000


def address(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("shape", [(), (0,), (3,), (7, 5), (1000, 3), (200_000,), (3_000_000,)])
@pytest.mark.parametrize("dtype", [F32, U8, np.dtype(ml_dtypes.bfloat16), np.dtype(np.complex128)])
def test_arrays_are_aligned_contiguous_and_writable(shape, dtype):
    pool = Pool()
    array = pool.empty(shape, dtype)
    assert array.shape == shape
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert address(array) % ALIGNMENT == 0
    array[...] = 1
    zeros = pool.zeros(shape, dtype)
    assert zeros.tobytes() == bytes(zeros.nbytes)


@pytest.mark.parametrize("nbytes", [4, 200, 300, 5000, BIG])
def test_live_arrays_never_share_memory(nbytes):
    pool = Pool()
    arrays = [pool.empty((nbytes,), U8) for _ in range(400)]
    for n, array in enumerate(arrays):
        array[:] = n % 251
    assert all((array == n % 251).all() for n, array in enumerate(arrays))


def test_memory_is_used_again():
    pool = Pool()
    array = pool.empty((BIG,), U8)
    first = address(array)
    del array
    again = pool.empty((BIG // 4,), F32)
    assert address(again) == first


def test_views_of_every_kind_keep_the_memory():
    pool = Pool()
    array = pool.empty((BIG // 4,), F32)
    views = [
        array[10:20],
        array.view(U8).reshape(-1)[::2],
        array.reshape(10, -1).T,
        memoryview(array),
        np.frombuffer(array, np.int32)[5:],
        np.asarray(array.view(np.ndarray)),
    ]
    del array
    while views:
        assert pool.statistics().in_use == size_class(BIG)
        views.pop()
    assert pool.statistics().in_use == 0
    assert pool.statistics().kept == size_class(BIG)


def test_statistics_and_the_bound_of_what_is_kept():
    size = size_class(BIG)
    pool = Pool(keep=2 * size)
    arrays = [pool.empty((BIG,), U8) for _ in range(5)]
    assert pool.statistics().in_use == 5 * size
    del arrays
    statistics = pool.statistics()
    assert statistics.in_use == 0
    assert statistics.kept == 2 * size
    assert statistics.peak_in_use == 5 * size
    pool.trim()
    assert pool.statistics().kept == 0


def test_processes_of_a_host_share_what_may_be_kept():
    pool = Pool()
    pool.share(1 << 60)
    array = pool.empty((BIG,), U8)
    del array
    assert pool.statistics().kept == 0


def test_memory_in_cycles_comes_back_with_the_collector():
    pool = Pool()
    cycle = [pool.empty((BIG,), U8)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.statistics().in_use == 0


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 255, 256, 257, 1023, 4097, 1 << 20, 10**9])
def test_size_classes_fit_and_waste_little(nbytes):
    size = size_class(nbytes)
    assert size >= nbytes
    assert size % ALIGNMENT == 0
    assert size <= max(1.25 * nbytes, nbytes + ALIGNMENT)
    assert size_class(size) == size


def test_threads_share_a_pool():
    pool = Pool()
    wrong = []

    def work(mark):
        kept = []
        for n in range(600):
            array = pool.empty(((n * 37) % 3000 + 1,), U8)
            array[:] = mark
            kept.append(array)
            if len(kept) > 20:
                if not (kept[0] == mark).all():
                    wrong.append(mark)
                del kept[0]

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.statistics().in_use == 0
