"""Sets of a loop's iterations, and the devices and iterations in which nobody reads a node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from stretto.runtime.program import ENDLESS

from .collectives import NEVER

Bounds = tuple[int, ...]  # first and last of each run of consecutive iterations, as in `Run.valid`
LAST = ENDLESS  # the last iteration of a loop whose trip count is not known


def intervals(iterations: Iterable[int]) -> Bounds:
    """First and last of each run of consecutive iterations."""
    bounds: list[int] = []
    for iteration in iterations:
        if bounds and bounds[-1] == iteration - 1:
            bounds[-1] = iteration
        else:
            bounds += [iteration, iteration]
    return tuple(bounds) or NEVER


@dataclass(frozen=True)
class Unread:
    """The places in which nobody reads a node: bit ``device * iterations + iteration`` of ``cells``.

    ``flops``: operations in these places together. ``everywhere``: whether iterations are not distinguished.
    """

    cells: int
    devices: int
    iterations: int
    flops: float
    everywhere: bool

    def bounds(self, cells: int) -> tuple[Bounds, ...]:
        """For each device the iterations that are not in these cells."""
        return tuple(
            self._bounds(cells >> device * self.iterations) for device in range(self.devices)
        )

    def _bounds(self, cells: int) -> Bounds:
        if self.everywhere:
            return (1, 0) if cells & 1 else (0, LAST)
        return intervals(i for i in range(self.iterations) if not cells >> i & 1)
