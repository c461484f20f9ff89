"""The state of one walk of a program, and what becomes of errors on the way.

``frame.registers[slot]`` is a list with one entry for each local device of the program, by position;
entries of devices that are not active are None or stale. The list is `Hosted` if its entries are host
arrays (what a collective gave), else they are engine arrays. Lists are never changed once they are in a
register.

``frame.active`` holds the positions of the devices that take part: loops and branches whose predicates
differ run their blocks with fewer of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import StrettoError
from .called_back import without_our_frames
from .stream import Event

Operation = Callable[["Frame"], None]
# An operation as far as a thread that must not block can run it: see `communication.Communication.attempt`.
Attempt = Callable[["Frame", float], Callable[[], None] | None]


class Hosted(list):
    """A register whose entries are host arrays."""

    __slots__ = ()


class Frame:
    """One walk of a program: its registers and what changes on the way."""

    __slots__ = ("active", "ends", "events", "interrupts", "iteration", "registers")

    def __init__(self, num_slots: int, active: tuple[int, ...], interrupts: int = 0) -> None:
        self.registers: list[Any] = [None] * num_slots
        self.active = active
        self.iteration = 0  # of the innermost loop
        self.events: dict[int, Event] = {}
        self.ends: list[Any] = []  # of runs that call back into Python, to be waited for
        self.interrupts = interrupts  # how many there were when the walk began


def named(error: BaseException, what: str) -> BaseException:
    """The error with the instruction it came from in its message; its class is kept if it is ours.

    A traceback in the message, of a function that was called back, is left without stretto's frames.
    """
    if getattr(error, "instruction", None) is not None:
        return error
    text = without_our_frames(str(error))
    if isinstance(error, StrettoError):
        try:
            renamed: StrettoError = type(error)(f"{what}: {text}")
        except TypeError:
            renamed = StrettoError(f"{what}: {text}")
        renamed.code = error.code
    elif isinstance(error, NotImplementedError):
        renamed = StrettoError(f"{what}: {text}")
        renamed.code = "UNIMPLEMENTED"
    elif isinstance(error, Exception):
        renamed = StrettoError(f"{what}: {type(error).__name__}: {text}")
    else:
        return error  # KeyboardInterrupt and the like
    renamed.instruction = what  # type: ignore[attr-defined]
    renamed.__cause__ = error
    return renamed


def drop_tracebacks(error: BaseException) -> None:
    """Take the tracebacks off an error that outputs will keep: they hold arrays of the failed run."""
    chain: BaseException | None = error
    while chain is not None and chain.__traceback__ is not None:
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__
