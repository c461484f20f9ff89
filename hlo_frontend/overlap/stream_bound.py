"""A lower bound of the time of a graph that counts compute and one stream together.

Take a collective X of the stream, and another one, j, that neither comes before X nor waits for it. Either j
goes first, and then all compute that leads to j is over when X begins; or X does, and then j takes its time
on the stream after X. So each such j adds at least the smaller of the two times to that of the compute that
leads to X. Compute that leads to several of them counts for one, and compute that may begin before a
threshold h does not count, as in `floor`. The stream's collectives that wait for X follow, and at last the
shortest tail.
"""

from __future__ import annotations

import numpy as np

# How many collectives of a stream are tried for X: those that begin last.
LAST = 8


def stream_bound(
    lane: int,
    seconds: np.ndarray,
    stream: np.ndarray,
    heads: np.ndarray,
    tails: np.ndarray,
    above: np.ndarray,
) -> float:
    """The bound in seconds for stream ``lane``; 0 if it has no collective.

    All arrays are by task: float seconds, stream (-1 for compute), heads and tails as in `floor`, and
    ``above`` of shape ``[tasks, bytes]``, uint8, bits of ancestors, the least first. For the reversed graph
    (all arrays reversed, heads and tails exchanged) the same bound holds from the other end.
    """
    collectives = np.flatnonzero(stream == lane)
    kernels = np.zeros(above.shape[1], dtype=np.uint8)
    packed = np.packbits(stream < 0, bitorder="little")
    kernels[: len(packed)] = packed
    best = 0.0
    for x in collectives[np.argsort(-heads[collectives], kind="stable")][:LAST]:
        waits = (above[collectives, x >> 3] >> (x & 7)) & 1
        leads = (above[x, collectives >> 3] >> (collectives & 7)) & 1
        others = collectives[(waits == 0) & (leads == 0) & (collectives != x)]
        leading = above[x] & kernels
        # By kernel: the position in `others` of the collective it counts for, or -1 for X.
        owner = np.full(len(seconds), -2)
        owner[_positions(leading)] = -1
        for position, other in enumerate(others):
            own = above[other] & kernels & ~leading
            leading |= own
            owner[_positions(own)] = position
        behind = collectives[waits == 1]
        after = float(seconds[behind].sum() + tails[[x, *others, *behind]].min())
        counted = np.flatnonzero(owner > -2)
        order = counted[np.argsort(-heads[counted], kind="stable")]
        best = max(best, _least(order, owner, seconds, heads, seconds[others]) + seconds[x] + after)
    return float(best)


def _positions(bits: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


def _least(
    order: np.ndarray, owner: np.ndarray, seconds: np.ndarray, heads: np.ndarray, limits: np.ndarray
) -> float:
    """The largest, over thresholds, of a threshold and what kernels from there on cost at least.

    ``order``: kernels, the last head first. Those of one owner cost no more than its limit. Up to a
    threshold that no kernel of X itself is behind, all might wait for X to go first.
    """
    left = limits.tolist()
    rows = zip(owner[order].tolist(), seconds[order].tolist(), heads[order].tolist(), strict=True)
    total = best = 0.0
    led = False
    for own, work, head in rows:
        cost = work
        if own >= 0:
            cost = min(work, left[own])
            left[own] -= cost
        total += cost
        led = led or own < 0
        if led:
            best = max(best, head + total)
    return best
