"""Exceptions as PJRT errors: a status code and a message.

A message says what failed and what to do; the code is what JAX puts in front of it.
"""

from __future__ import annotations

import re
import traceback

from stretto.runtime.errors import CollectiveMismatch, StrettoError

from .abi import ERROR_CODES

_STATUS = re.compile(r"^([A-Z_]{2,}): (.*)$", re.ASCII | re.DOTALL)

# The first class that fits decides.
_BY_TYPE: tuple[tuple[type[BaseException], str], ...] = (
    (NotImplementedError, "UNIMPLEMENTED"),
    (KeyboardInterrupt, "CANCELLED"),
    (MemoryError, "RESOURCE_EXHAUSTED"),
    (TimeoutError, "DEADLINE_EXCEEDED"),
    (LookupError, "NOT_FOUND"),
    (ValueError, "INVALID_ARGUMENT"),
    (TypeError, "INVALID_ARGUMENT"),
)


class StatusError(StrettoError):
    """An error that jaxlib handed in with its code. To be caught as JAX's run-time error is."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        names = {number: name for name, number in ERROR_CODES.items()}
        self.code = names.get(code, "UNKNOWN")


def describe(error: BaseException) -> tuple[int, bytes]:
    """Status code and message of an exception."""
    text = str(error)
    if isinstance(error, CollectiveMismatch):
        text = f"{CollectiveMismatch.__name__}: {text}"  # by which programs tell it from others of its code
    if isinstance(error, StrettoError):
        return ERROR_CODES.get(error.code, ERROR_CODES["INTERNAL"]), text.encode()
    status = _STATUS.match(text)
    if status and status[1] in ERROR_CODES:  # an error of jaxlib, which carries its own code
        return ERROR_CODES[status[1]], status[2].encode()
    for kind, code in _BY_TYPE:
        if type(error) is kind:
            return ERROR_CODES[code], (text or code.lower()).encode()
    # Not raised on purpose: say where it comes from.
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return ERROR_CODES["INTERNAL"], f"{type(error).__name__}: {text}{where}".encode()
