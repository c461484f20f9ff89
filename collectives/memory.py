"""A pool of host memory, since fresh pages cost as much as the reduction that fills them.

A `Pool` gives C-contiguous numpy arrays aligned to `ALIGNMENT` bytes. Their memory comes back to the pool
when the array and everything that views it are gone, whichever thread drops the last of them.

Arrays of a few bytes are slots of shared slabs: a lease would take longer than the message they are for.
Slabs are not counted and go back to the heap with the last of their arrays.

Invariants: memory is in one place only, with an array or in a free list; the pool keeps at most
``keep`` unused bytes. A returned block never takes a lock that its thread may hold: it goes
to a queue first, since garbage collection may return one in the middle of `Pool.empty`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from math import prod
from typing import Any

import numpy as np

ALIGNMENT = 64  # what XLA's CPU client needs to take host memory as it is
_SMALL = 1 << 16  # blocks below this are carved from the C heap, others are mapped pages
_HUGE_PAGE = 1 << 21
_TINY = 4 * ALIGNMENT  # arrays up to this size are slots of a slab
_SLAB = 1 << 15


@dataclass(frozen=True)
class PoolStatistics:
    """Bytes in blocks, by what became of them: with arrays, kept for later, at most ever with arrays."""

    in_use: int
    kept: int
    peak_in_use: int


class Pool:
    """Aligned host memory with free lists. Thread-safe.

    ``keep`` bounds the unused bytes that are kept; by default an eighth of the machine's memory, for all
    processes together that `share` it.
    """

    def __init__(self, keep: int | None = None) -> None:
        self._keep = _machine_memory() // 8 if keep is None else keep
        self._free: dict[int, list[Any]] = {}
        self._returned: deque[tuple[int, Any]] = deque()
        self._lock = threading.Lock()
        self._in_use = 0
        self._kept = 0
        self._peak = 0
        self._slots: Iterator[tuple[memoryview, int]] = iter(())

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array with whatever content its memory had."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes > _TINY:
            return np.ndarray(shape, dtype, self._lease(nbytes))
        slot = next(self._slots, None)
        if slot is None:
            slot = self._new_slab()
        return np.ndarray(shape, dtype, *slot)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array all of whose bits are zero."""
        array = self.empty(shape, dtype)
        as_bytes(array)[:] = 0
        return array

    def copy(self, array: np.ndarray) -> np.ndarray:
        """A C-contiguous copy."""
        result = self.empty(array.shape, array.dtype)
        np.copyto(result, array)
        return result

    def share(self, processes: int) -> None:
        """Keep no more than one of so many processes on a host may."""
        with self._lock:
            self._keep = _machine_memory() // 8 // processes

    def statistics(self) -> PoolStatistics:
        """Where the bytes are now."""
        with self._lock:
            self._take_back()
            return PoolStatistics(self._in_use, self._kept, self._peak)

    def trim(self) -> None:
        """Give unused memory back to the system."""
        with self._lock:
            self._take_back()
            self._free.clear()
            self._kept = 0

    def _lease(self, nbytes: int) -> _Lease:
        size = size_class(nbytes)
        with self._lock:
            if self._returned:
                self._take_back()
            blocks = self._free.get(size)
            if blocks:
                block = blocks.pop()
                self._kept -= size
            else:
                block = None
            self._in_use += size
            self._peak = max(self._peak, self._in_use)
        if block is None:
            try:
                block = _new_block(size)
            except (MemoryError, OSError):
                self.trim()
                block = _new_block(size)
        # Not an ndarray: numpy would make the lease's own base the base of the arrays made from it.
        lease = _Lease(size, np.uint8, block)
        lease.pool = self
        return lease

    def _new_slab(self) -> tuple[memoryview, int]:
        """The first slot of a new slab. Each slot is taken once: an iterator in C is atomic."""
        slots = zip(repeat(_heap_block(_SLAB)), range(0, _SLAB, _TINY), strict=False)
        first = next(slots)
        self._slots = slots
        return first

    def give_back(self, size: int, block: Any) -> None:
        """Take a block back from an array that is gone."""
        self._returned.append((size, block))
        if self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()

    def _take_back(self) -> None:
        """Sort what was returned into the free lists. The caller holds the lock."""
        while self._returned:
            size, block = self._returned.popleft()
            self._in_use -= size
            if self._kept + size <= self._keep:
                self._free.setdefault(size, []).append(block)
                self._kept += size


class _Lease(np.ndarray):
    """The bytes of one block while arrays use it: their base, and so gone when they all are."""

    pool: Pool | None = None

    def __del__(self) -> None:
        # Views of a lease are leases too, but have no pool.
        if self.pool is not None:
            self.pool.give_back(self.size, self.base)


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The content of a contiguous array as flat u8; mpi4py does not know the dtypes of ml_dtypes."""
    return array.reshape(-1).view(np.uint8)


def size_class(nbytes: int) -> int:
    """Bytes of the block that serves ``nbytes``: four classes to each power of two."""
    if nbytes <= 256:
        return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


def _new_block(size: int) -> Any:
    if size >= _SMALL:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        return block
    return _heap_block(size)


def _heap_block(size: int) -> memoryview:
    raw = bytearray(size + ALIGNMENT)
    address = ctypes.addressof(ctypes.c_char.from_buffer(raw))
    offset = -address % ALIGNMENT
    return memoryview(raw)[offset : offset + size]


def _machine_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


pool = Pool()
