"""The functions that a program calls back, and whether a thread is inside of one.

A program that such a function runs is part of the run that called the function, and that run waits for it: it
must not wait for its turn.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from stretto.collectives.native import step_aside, step_back

from ..errors import StrettoError

_here = threading.local()

_OURS = f'  File "{Path(__file__).parents[2]}{os.sep}'
_THREADING = f'  File "{threading.__file__}"'


def inside() -> bool:
    """Whether the calling thread is in a function of `CalledBack`."""
    return getattr(_here, "inside", False)


def without_our_frames(text: str) -> str:
    """A message with a traceback in it, such as XLA's of a function that raised: the user's frames and JAX's.

    Gone are stretto's own, and those with which a thread of stretto's begins.
    """
    kept, drops, is_head = [], False, False
    for line in text.split("\n"):
        if line.startswith('  File "'):
            drops = line.startswith(_OURS) or (is_head and line.startswith(_THREADING))
            is_head = is_head and drops
        elif not line.startswith("    "):
            drops, is_head = False, line.endswith("Traceback (most recent call last):")
        if not drops:
            kept.append(line)
    return "\n".join(kept)


def _traceback() -> str:
    return without_our_frames(traceback.format_exc().rstrip())


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
            aside = step_aside()
            try:
                return function(*arguments)
            except BaseException:
                error = StrettoError(f"error calling callback: {_traceback()}")
                for listener in list(self._listeners):
                    listener(error)
                raise
            finally:
                _here.inside = before
                if aside:
                    step_back()

        return call
