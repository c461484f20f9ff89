"""Whether a thread is inside a function that a program has called back.

A program that such a function runs is part of the run that called the function, and that run waits for it: it
must not wait for its turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

_here = threading.local()


def inside() -> bool:
    """Whether the calling thread is in one of the functions that `marked` gave."""
    return getattr(_here, "inside", False)


def marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, wrapped so that `inside` is true in its thread while it runs."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        before, _here.inside = inside(), True
        try:
            return function(*arguments)
        finally:
            _here.inside = before

    return call
