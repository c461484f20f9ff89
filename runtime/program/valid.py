"""Valid iterations: which messages and runs are left out in which iteration.

Bounds are as in `Collective.valid_iterations`: first and last iteration of each stretch, in order, both
included; ``(1, 0)`` is never.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

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
