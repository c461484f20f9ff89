"""Python callables of a program (``pure_callback``, ``io_callback``, ``debug.print``), on their way down.

JAX gives jaxlib a list of callables beside each module; jaxlib does not hand it to plugins. So the list is
kept here while JAX compiles, on the compiling thread, and taken by the plugin's Compile. A custom call
in the module names its callable by the index into the list.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class _Local(threading.local):
    callables: tuple[Callable[..., Any], ...] = ()


_local = _Local()


@contextmanager
def hand_over(callables: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Have `current` give these callables on this thread."""
    before, _local.callables = _local.callables, tuple(callables)
    try:
        yield
    finally:
        _local.callables = before


def current() -> tuple[Callable[..., Any], ...]:
    """The callables of the module that this thread compiles."""
    return _local.callables
