"""The functions that a program calls back, and whether a thread is inside of one.

A program that such a function runs is part of the run that called the function, and that run waits for it: it
must not wait for its turn.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from ..errors import StrettoError

_here = threading.local()


def inside() -> bool:
    """Whether the calling thread is in a function of `CalledBack`."""
    return getattr(_here, "inside", False)


class CalledBack:
    """The functions that one program calls back. ``functions`` are to be called in their place.

    If one of them raises while those of other devices wait for it, the engine's run has no end: `listened`
    tells.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self.functions = [self._marked(function) for function in functions]
        self._listeners: list[Callable[[StrettoError], None]] = []

    @contextmanager
    def listened(self, listener: Callable[[StrettoError], None]) -> Iterator[None]:
        """Call ``listener`` for each function that raises meanwhile, in its thread."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    def _marked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any) -> Any:
            before, _here.inside = inside(), True
            try:
                return function(*arguments)
            except BaseException:
                error = StrettoError(f"error calling callback: {traceback.format_exc().rstrip()}")
                for listener in list(self._listeners):
                    listener(error)
                raise
            finally:
                _here.inside = before

        return call
