"""Which parts of some larger pieces of memory are taken: the first one that is free and large enough."""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Callable

# Bytes to which parts are rounded up: what two cores write next to each other, they share.
_GRAIN = 128


class Arena:
    """Parts of chunks. A part is (chunk, offset, size). To be used by one thread at a time."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int, int]] = []  # sorted; no two of them touch

    def take(self, size: int, add: Callable[[int], tuple[int, int]]) -> tuple[int, int, int]:
        """A part of at least ``size`` bytes. Where none is free, ``add(size)`` makes a chunk of at least so
        many, and gives its number and size; what it raises is raised."""
        size = max(-(-size // _GRAIN), 1) * _GRAIN
        found = next((part for part in self._free if part[2] >= size), None)
        if found is None:
            number, whole = add(size)
            found = number, 0, whole
        else:
            self._free.remove(found)
        chunk, offset, whole = found
        if whole > size:
            insort(self._free, (chunk, offset + size, whole - size))
        return chunk, offset, size

    def give(self, part: tuple[int, int, int]) -> None:
        """A part that was taken is free again."""
        at = bisect(self._free, part)
        self._free.insert(at, part)
        for first in (at, at - 1):
            if not 0 <= first < len(self._free) - 1:
                continue
            one, other = self._free[first : first + 2]
            if one[0] == other[0] and one[1] + one[2] == other[1]:
                self._free[first : first + 2] = [(one[0], one[1], one[2] + other[2])]
