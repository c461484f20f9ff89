"""Ending programs after Ctrl-C, or a notebook's interrupt: what nobody waits for must not keep the devices.

Ctrl-C ends a wait at once. What was under way then goes on for the grace that is given to programs that end
(``STRETTO_GRACE``): whoever saves the state of a training step needs what the step gives. A walk that takes
longer is ended: it looks in every iteration of its loops, a segment with sites at its next collective. What
is inside of an engine goes on to its end.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from time import monotonic

from ..errors import StrettoError


def _none() -> int:
    return 0


class Interrupts:
    """The interrupts of one executor, which ``signals`` counts. A frame keeps the count of its beginning.

    ``grace``: seconds that a walk still has after one. A signal whose handler is the program's own is none.
    """

    def __init__(self, signals: Callable[[], int] = _none, grace: float = 0.0) -> None:
        self.signals = signals
        self._grace = grace
        self._noticed: tuple[int, float] = (0, 0.0)  # the latest count, and when it was seen first

    def check(self, count: int) -> None:
        """Raise `StrettoError` if there was one since there were ``count``, and the grace is over."""
        now = self.signals()
        if now == count or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        if self._noticed[0] != now:
            self._noticed = now, monotonic()
        if monotonic() - self._noticed[1] >= self._grace:
            error = StrettoError(
                "ended, since Ctrl-C interrupted the program and this took longer than the "
                f"{self._grace:g} s of STRETTO_GRACE"
            )
            error.code = "CANCELLED"
            raise error
