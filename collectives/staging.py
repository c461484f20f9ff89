"""GPU memory by way of the host's: page-locked memory, streams to copy on, how the host sees what has come.

Copies to and from page-locked memory are made by the GPU's copy engines, and whoever enqueues them does
not wait. Behind a copy to the host the stream writes a number into such memory (``cuStreamWriteValue32``).
Looking there asks the driver for nothing: its locks may be held by a thread that loads code, gives it up or
takes memory, and waits for all streams.

`pinned` is the process's memory; a `Staging` belongs to one stream of the executor.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ._driver import WRITE_NUMBER
from .cuda import CudaError, Queued, cuda
from .memory import size_class

# Page-locked bytes of a process that may be in use before whoever needs more waits for some to come back.
MOST = 1 << 30
_LINE = 256


class Passes(Protocol):
    """A place on a stream."""

    def passed(self) -> bool:
        """Whether the stream has come there."""
        ...


class Block:
    """``size`` bytes of page-locked memory, which a device of the process asks for and all may use."""

    __slots__ = ("address", "bytes", "size")

    def __init__(self, size: int, device: int) -> None:
        self.size = size
        cuda().use(device)
        self.address = cuda().allocate_pinned(size)
        self.bytes = memoryview((ctypes.c_char * size).from_address(self.address))

    def view(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The memory from ``offset`` on as an array."""
        return np.ndarray(shape, dtype, self.bytes, offset)


class Pinned:
    """Page-locked memory that is used again and never given up: locking pages takes longer than a copy."""

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.in_use = 0
        self._free: dict[int, list[Block]] = {}
        self._lent: deque[tuple[Block, Sequence[Passes]]] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: int, check: Callable[[], None]) -> Block:
        """Memory for so many bytes, of which a device makes use. Waits while too much is in use; ``check``
        raises if that is in vain."""
        size = size_class(max(nbytes, _LINE))
        while True:
            with self._lock:
                free = self._free.get(size)
                if not free or self.in_use + size > self.most:
                    self._take_back()
                    free = self._free.get(size)
                if not self.in_use or self.in_use + size <= self.most:
                    self.in_use += size
                    return free.pop() if free else Block(size, device)
            check()
            time.sleep(1e-4)

    def give_back(self, block: Block, marks: Sequence[Passes]) -> None:
        """Once all of these have passed, nobody uses it any more."""
        with self._lock:
            self._lent.append((block, marks))

    def _take_back(self) -> None:
        """Blocks that nobody uses any more, from the one on that was given back first. One that is in use
        ends the search, since a walk that is far ahead would ask for all of them each time; and it goes
        behind the others, since a stream that is held up must not keep the blocks of others."""
        for _ in range(len(self._lent)):
            block, marks = self._lent.popleft()
            if not all(mark.passed() for mark in marks):
                self._lent.append((block, marks))
                return
            self.in_use -= block.size
            self._free.setdefault(block.size, []).append(block)


pinned = Pinned()


class Staging:
    """One stream's copies: for each device a stream from it, one to it, and how many copies have come.

    ``lock`` is held by whoever enqueues on the streams from devices: numbers rise in the order in which they
    are written.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.aborted = ""
        self._streams: dict[int, tuple[int, int]] = {}
        self._come: dict[int, np.ndarray] = {}
        self._mapped: dict[int, int] = {}  # where the device sees its number
        self._last: dict[int, int] = {}

    def streams(self, device: int) -> tuple[int, int]:
        """From the device and to it."""
        if device not in self._streams:
            driver = cuda()
            block = Block(_LINE, device)
            self._come[device] = come = block.view(0, (1,), np.dtype(np.uint32))
            come[0] = 0
            self._mapped[device] = driver.mapped(block.address)
            self._last[device] = 0
            self._streams[device] = driver.stream(), driver.stream()
        return self._streams[device]

    def tell_in(self, queue: list[Queued], device: int) -> int:
        """Have the stream from the device write the number that this gives, for `has_come`, once it comes to
        this place in the queue."""
        self._last[device] = number = (self._last[device] + 1) % (1 << 32)
        queue.append((WRITE_NUMBER, self._streams[device][0], self._mapped[device], number))
        return number

    def has_come(self, device: int, number: int) -> bool:
        """Whether the stream from the device has written a number of `tell_in`."""
        ahead = (int(self._come[device][0]) - number) % (1 << 32)
        return ahead < 1 << 31

    def check(self) -> None:
        """Raises `CudaError` once `abort` was called."""
        if self.aborted:
            raise CudaError(self.aborted)

    def abort(self, reason: str) -> None:
        """Nobody is to wait any more."""
        self.aborted = self.aborted or reason


def await_all(passed: Sequence[Callable[[], bool]], check: Callable[[], None]) -> None:
    """Wait, asleep between looks, until all have passed; ``check`` raises if that is in vain."""
    pause = 20e-6
    while not all(have() for have in passed):
        check()
        time.sleep(pause)
        pause = min(1.5 * pause, 5e-4)
