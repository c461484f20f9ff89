"""`Backoff`: whether a caller still begins runs of a program whose runs were seen to take long."""

from __future__ import annotations

# Runs that a caller leaves to the dispatch thread at most, before it tries again.
MOST = 64


class Backoff:
    """Holds callers back from a program for one run after one that took longer than a moment; for twice as
    many after the next, up to `MOST`, and for one less after each that ended in time: where both come,
    callers seldom wait. Threads may use it at once: it is an estimate.
    """

    __slots__ = ("_left", "_next")

    def __init__(self) -> None:
        self._left = 0
        self._next = 1

    @property
    def holds(self) -> bool:
        """Whether the next run is to be left to the dispatch thread."""
        return self._left > 0

    def count(self) -> None:
        """A run was left to it."""
        if self._left > 0:
            self._left -= 1

    def ran(self, in_time: bool) -> None:
        """A caller has begun a run, and waited for a moment: whether it was over then."""
        if in_time:
            self._next = max(self._next - 1, 1)
        else:
            self._left, self._next = self._next, min(2 * self._next, MOST)
