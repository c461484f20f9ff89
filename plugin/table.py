"""The table of handlers: which Python function answers which entry of the PJRT C API.

`entry` registers a handler by the entry's name. The handler gets the caller's struct and fills in what
the entry gives; an exception becomes the error that the caller sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import abi
from .structs import STRUCTS

Handler = Callable[[Any], None]
_handlers: dict[str, Callable[[int], None]] = {}


def entry(name: str, struct: str = "") -> Callable[[Handler], Handler]:
    """Register a handler. ``struct`` names the arguments where it is not ``<name>_Args``."""
    if name not in abi.ALL_FUNCTIONS:
        raise ValueError(f"{name} is not in the table of the PJRT C API")
    from_address = STRUCTS[struct or f"{name}_Args"].from_address

    def register(handler: Handler) -> Handler:
        if name in _handlers:
            raise ValueError(f"{name} has two handlers")
        _handlers[name] = lambda address: handler(from_address(address))
        return handler

    return register


def handlers() -> list[Callable[[int], None] | None]:
    """The handlers in the order of the table, None where there is none."""
    return [_handlers.get(name) for name in abi.ALL_FUNCTIONS]
