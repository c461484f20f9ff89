"""How a process of a job ends: hooks for uncaught exceptions and for the end of the interpreter.

The hooks are chained: whatever was installed before still runs, first.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from time import monotonic
from types import TracebackType

from ..errors import StrettoError
from ..options import Options, OptionsError, in_force
from ._ends import status as status_asked_for
from .control import end_process, say

__all__ = [
    "at_exit",
    "await_at_exit",
    "describe",
    "end_process",
    "grace",
    "on_uncaught",
    "status",
]

TRACEBACK_LINES = 6
TICK = 0.2


def at_exit(leave: Callable[[], None]) -> None:
    """Call ``leave`` when this process ends, but not in children forked from it."""
    owner = os.getpid()

    def run() -> None:
        if os.getpid() == owner:
            leave()

    atexit.register(run)


_uncaught = False


def on_uncaught(fail: Callable[[BaseException], None], told: Callable[[], str]) -> None:
    """Call ``fail`` with an exception that nobody caught, in the main thread or another.

    Left out: what ends no process. That is an error at an interactive prompt and one in a daemon thread.
    ``told`` gives what has been said already of an error that this process gets and has no part in, or "": an
    exception that says it too is not printed.
    """
    previous, previous_thread = sys.excepthook, threading.excepthook
    prints, thread_prints = sys.__excepthook__, threading.__excepthook__

    def is_told(error: BaseException | None) -> bool:
        text = told()
        return bool(text) and text in str(error) and not hasattr(sys, "ps1")

    def main_hook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        global _uncaught
        if not (previous is prints and is_told(error)):
            previous(kind, error, trace)
        if not hasattr(sys, "ps1"):
            _uncaught = True
            fail(error)

    def thread_hook(arguments: threading.ExceptHookArgs) -> None:
        error, thread = arguments.exc_value, arguments.thread
        if not (previous_thread is thread_prints and is_told(error)):
            previous_thread(arguments)
        if error is not None and not isinstance(error, SystemExit) and thread and not thread.daemon:
            fail(error)

    sys.excepthook = main_hook
    threading.excepthook = thread_hook


def status() -> int:
    """With which exit status Python would end this process, as far as it can be known (`_ends.status`)."""
    return 1 if _uncaught else status_asked_for()


def await_at_exit(ended: Callable[[float], bool]) -> None:
    """Wait until what runs has ended: ``ended(seconds)`` waits so long at most, and says whether it has.

    Once a Ctrl-C that nobody caught has ended the program, nobody wants what still runs, which may be a loop
    without end: it gets the options' ``grace``. The same goes for a Ctrl-C while this waits. The process then
    ends as by that signal.
    """
    deadline = float("inf")
    while True:
        try:
            seconds = grace()
            if _interrupted() and deadline == float("inf"):
                deadline = monotonic() + seconds
            while not ended(TICK):
                if monotonic() > deadline:
                    say(
                        f"stretto: a program was still running {seconds:g} s (STRETTO_GRACE) after Ctrl-C\n"
                    )
                    _end_by_interrupt()
            return
        except KeyboardInterrupt:
            if deadline < float("inf"):
                _end_by_interrupt()
            deadline = monotonic() + grace()


def grace() -> float:
    """The options' ``grace``, in seconds."""
    try:
        return in_force().grace
    except OptionsError:
        return Options().grace


def _interrupted() -> bool:
    """Whether a Ctrl-C that nobody caught ends the program; Python notes what it prints of the last error."""
    kind = getattr(sys, "last_type", None)
    return (
        isinstance(kind, type) and issubclass(kind, KeyboardInterrupt) and not hasattr(sys, "ps1")
    )


def _end_by_interrupt() -> None:
    """As Python ends after a Ctrl-C, but at once: a thread may be in an engine for ever."""
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            file.flush()
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(130)


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
