"""How a process of a job ends: hooks for uncaught exceptions and for the end of the interpreter.

The hooks are chained: whatever was installed before still runs, first.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType

from .control import end_process
from .errors import StrettoError

__all__ = ["at_exit", "describe", "end_process", "on_uncaught"]

TRACEBACK_LINES = 6


def at_exit(leave: Callable[[], None]) -> None:
    """Call ``leave`` when this process ends, but not in children forked from it."""
    owner = os.getpid()

    def run() -> None:
        if os.getpid() == owner:
            leave()

    atexit.register(run)


def on_uncaught(fail: Callable[[BaseException], None]) -> None:
    """Call ``fail`` with an exception that nobody caught, in the main thread or another.

    Left out: what ends no process. That is an error at an interactive prompt and one in a daemon thread.
    """
    previous, previous_thread = sys.excepthook, threading.excepthook

    def main_hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        previous(kind, error, trace)
        if not hasattr(sys, "ps1"):
            fail(error)

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        previous_thread(arguments)
        error, thread = arguments.exc_value, arguments.thread
        if error is not None and not isinstance(error, SystemExit) and thread and not thread.daemon:
            fail(error)

    sys.excepthook = main_hook
    threading.excepthook = thread_hook


def describe(error: BaseException) -> str:
    """The error's type and message, and the last lines of its traceback.

    stretto's own errors name the instruction and the user's line: their traceback would add nothing.
    """
    if isinstance(error, StrettoError):
        return f"{type(error).__name__}: {error}"
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    own = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    at = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    tail = lines[-TRACEBACK_LINES:] if len(lines) > 1 else []
    return "\n".join([own.splitlines()[0] + at, *(f"  | {line}" for line in tail)])
