"""No collections of cyclic garbage while programs are compiled.

The graphs of a program are many objects that all live until it is compiled. Python runs its cyclic collector
each time some hundreds were made: it goes over them and over all that JAX has traced, and finds nothing. That
took a quarter of the time of the passes. Cycles that compiling leaves are collected afterwards.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_compiling = 0  # how many threads compile
_collects = False  # whether the program has collections when nobody compiles


@contextmanager
def kept() -> Iterator[None]:
    """A stretch without collections, in all threads.

    Several threads may be in one at once, and stretches may be nested. A program that has turned collections
    off itself gets none behind it.
    """
    global _compiling, _collects
    with _lock:
        if _compiling == 0:
            _collects = gc.isenabled()
            gc.disable()
        _compiling += 1
    try:
        yield
    finally:
        with _lock:
            _compiling -= 1
            if _compiling == 0 and _collects:
                gc.enable()
