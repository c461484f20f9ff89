"""The schedules of a step of training: which microbatch each stage runs in each iteration of the one loop.

An iteration of a stage is one run: of the forward pass, of the backward pass, or none. What is sent in an
iteration is there in the next one. Stages wait for each other only where one takes what the other sent, so an
iteration without a run takes no time of its own, and runs need not take equally long.

1F1B: stage s of P runs microbatch m forwards in iteration ``2 m + s`` and backwards in ``2 m + 2 P - 1 -
s``. So its runs alternate, the last stage turns a microbatch round at once, ``P - s`` microbatches are
alive on stage s, and the loop has 2 (M + P - 1) iterations: as many as the two loops of GPipe have together
(Narayanan et al., arXiv 1806.03377 and 2104.04473, where the first microbatches are run as soon as they can
be and then wait).

Microbatches are numbered here in the order in which they go through the backward pass as it is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NONE = -1


@dataclass(frozen=True, eq=False)
class Slots:
    """By stage and iteration, s32[P, iterations]: ``forward`` and ``backward``, the microbatch that is run,
    or `NONE`; ``puts`` and ``takes``, the rows in which a forward run puts what its layers keep, and from
    which a backward run takes it. ``rows``: how many there are.
    """

    forward: np.ndarray
    backward: np.ndarray
    puts: np.ndarray
    takes: np.ndarray
    rows: int

    @property
    def stages(self) -> int:
        return int(self.forward.shape[0])

    @property
    def iterations(self) -> int:
        return int(self.forward.shape[1])

    @property
    def alive(self) -> tuple[int, ...]:
        """For each stage: the most microbatches that wait there for their backward run at a time."""
        begun = np.cumsum(self.forward != NONE, axis=1)
        ended = np.cumsum(self.backward != NONE, axis=1)
        ended = np.concatenate([np.zeros_like(ended[:, :1]), ended[:, :-1]], axis=1)
        return tuple(int(n) for n in np.max(begun - ended, axis=1))


def one_forward_one_backward(stages: int, microbatches: int) -> Slots:
    """1F1B, see the docstring of this file."""
    shape = stages, 2 * (microbatches + stages - 1)
    forward, backward = np.full(shape, NONE, np.int32), np.full(shape, NONE, np.int32)
    for stage in range(stages):
        for m in range(microbatches):
            forward[stage, 2 * m + stage] = m
            backward[stage, 2 * m + 2 * stages - 1 - stage] = m
    return _with_rows(forward, backward)


def _with_rows(forward: np.ndarray, backward: np.ndarray) -> Slots:
    """Give each microbatch a row on each stage, from its forward run until its backward run."""
    puts, takes = np.zeros_like(forward), np.zeros_like(forward)
    count = 0
    for stage in range(len(forward)):
        free: list[int] = []
        taken: dict[int, int] = {}
        used = 0
        for t in range(forward.shape[1]):
            if forward[stage, t] != NONE:
                if not free:
                    free, used = [used], used + 1
                taken[int(forward[stage, t])] = puts[stage, t] = min(free)
                free.remove(min(free))
            if backward[stage, t] != NONE:
                takes[stage, t] = taken.pop(int(backward[stage, t]))
                free.append(int(takes[stage, t]))
        count = max(count, used)
    return Slots(forward, backward, puts, takes, count)


SCHEDULES = {"1f1b": one_forward_one_backward}
