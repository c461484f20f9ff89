"""Room for machine code: a process may have only so many mappings of memory.

XLA maps each piece of machine code three times, for code, constants and data, and a program on 8 devices has
it 8 times. Linux allows 65,530 mappings (``vm.max_map_count``), behind which XLA ends the process. So once
half of them are taken, copies for devices other than the first are dropped, and loaded again where they are
asked for, which takes a tenth of a compilation.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

# The mappings that a copy takes at the most: XLA makes up to 32 pieces of a large segment.
_MOST = 96
# Copies between two counts, at the least: counting 30,000 mappings takes 20 ms.
_OFTEN = 64


class Droppable(Protocol):
    """Code with copies that can be loaded again."""

    def drop_copies(self) -> None:
        """Drop those that nobody is loading right now. Runs that use them are not disturbed."""


class CodeRoom:
    """Counts copies, and drops all of them where there are too many mappings."""

    def __init__(self) -> None:
        self._copied: WeakSet[Droppable] = WeakSet()
        self._lock = threading.Lock()
        self._left = _OFTEN

    def copied(self, code: Droppable) -> None:
        """Note that ``code`` has a copy more."""
        with self._lock:
            self._copied.add(code)
            self._left -= 1
            if self._left > 0:
                return
            taken, most = mappings(), most_mappings() // 2
            everything = list(self._copied) if taken > most else []
            if everything:
                self._copied.clear()
            self._left = max(_OFTEN, (most - taken) // _MOST)
        for one in everything:
            one.drop_copies()


def mappings() -> int:
    """How many mappings this process has; 0 where the system does not say."""
    try:
        return Path("/proc/self/maps").read_bytes().count(b"\n")
    except OSError:
        return 0


def most_mappings() -> int:
    """How many a process may have."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except OSError:
        return 1 << 62
