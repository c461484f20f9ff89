"""Work in a forked process, in which XLA may crash."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO


def forked(work: Callable[[BinaryIO], None]) -> tuple[bytes, int]:
    """Run ``work`` in a forked process. Gives what it has written to the pipe that it gets, and the status of
    the process as from `os.waitpid`.

    Call this before this process has other threads. If ``work`` raises, the exit code is 1.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # stack traces of a crash help nobody
            with os.fdopen(writing, "wb") as pipe:
                work(pipe)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        written = pipe.read()
    _, status = os.waitpid(child, 0)
    return written, status
