"""Python callables of a program (``pure_callback``, ``io_callback``, ``debug.print``), on their way down.

JAX gives jaxlib a list of callables beside each module; jaxlib does not hand it to plugins, and compiles
on threads of its own. So the list is registered here while JAX compiles, and the module carries the
registration's number in an attribute, which Compile finds. A custom call in the module names its
callable by the index into the list. An
executable from JAX's compilation cache is loaded by the thread that asks for it, which has the functions of
its own process.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stretto.runtime.errors import InvalidProgramError
from stretto.runtime.program import calls_back

Callables = tuple[Callable[..., Any], ...]

ATTRIBUTE = "jax.stretto_callbacks"

# MLIR's bytecode keeps strings as they are, so that the mark can be found without parsing.
_MARK = re.compile(rb"stretto callbacks (\d+);")

MISSING = (
    "the program calls back into Python and came without the functions to call: it was serialized, or "
    "compiled by other means than jax.jit"
)

_numbers = itertools.count(1)
_registered: dict[int, Callables] = {}
_here = threading.local()


@contextmanager
def registered(callables: Sequence[Callable[..., Any]]) -> Iterator[str]:
    """Register callables for as long as their module compiles; gives the text of the module's mark."""
    number = next(_numbers)
    _registered[number] = tuple(callables)
    try:
        yield f"stretto callbacks {number};"
    finally:
        del _registered[number]


def of_module(module: bytes) -> Callables:
    """The callables of a serialized module.

    Raises `InvalidProgramError` for a module that calls back and came without callables.
    """
    mark = _MARK.search(module)
    if mark:
        found = _registered.get(int(mark[1]))
        if found is not None:
            return found
    if calls_back(module):
        raise InvalidProgramError(MISSING)
    return ()


@contextmanager
def handed_over(callables: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Give these to the serialized executable that this thread loads meanwhile."""
    _here.callables = tuple(callables)
    try:
        yield
    finally:
        del _here.callables


def of_this_thread() -> Callables:
    """What `handed_over` gives."""
    return getattr(_here, "callables", ())
