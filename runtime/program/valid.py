"""Valid iterations at run time: what is left out in which iteration, and what stands in its place.

Bounds are as in `Collective.valid_iterations`: first and last iteration of each stretch, in order, both
included; ``(1, 0)`` is never.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stretto.collectives.types import TensorType

from ..engines.engine import Engine

Bounds = tuple[int, ...]


def left_out(valid: Sequence[Bounds]) -> Callable[[int], frozenset[int]]:
    """``f(iteration)``: the positions in ``valid`` whose bounds do not hold the iteration."""
    runs = [list(zip(bounds[::2], bounds[1::2], strict=True)) for bounds in valid]
    edges = sorted({e for pairs in runs for lo, hi in pairs for e in (lo, hi + 1) if lo <= hi})
    sets = [
        frozenset(k for k, pairs in enumerate(runs) if not any(lo <= at <= hi for lo, hi in pairs))
        for at in [-1, *edges]  # between two edges nothing changes
    ]
    return lambda iteration: sets[bisect_right(edges, iteration)]


def are_bounds(bounds: Bounds) -> bool:
    """Whether these are stretches of iterations in order, or never."""
    return bounds == (1, 0) or (
        len(bounds) > 0
        and len(bounds) % 2 == 0
        and bounds[0] >= 0
        and list(bounds) == sorted(bounds)
    )


class Absent:
    """Arrays for what was not computed: ``content(type)``, made once for each type and device.

    They are shared by all who lack an array of the type: nobody may overwrite them.
    """

    def __init__(self, engine: Engine, content: Callable[[TensorType], np.ndarray]) -> None:
        self._engine = engine
        self._content = content
        self._made: dict[tuple[TensorType, int], Any] = {}

    def array(self, type: TensorType, ordinal: int) -> Any:
        """The engine's array on a local device."""
        key = (type, ordinal)
        if key not in self._made:
            self._made[key] = self._engine.put(self._content(type), type, ordinal)
        return self._made[key]


def zeros(type: TensorType) -> np.ndarray:
    """What stands for an array that nobody has made."""
    return np.zeros(type.shape, type.numpy)
