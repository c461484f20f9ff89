"""Nearest-neighbour graphs in files, written once and read in windows by those who need a part.

A folder holds a graph: ``utilities.npy`` f32[points], ``offsets.npy`` s64[points + 1], and for point v the
entries ``offsets[v] … offsets[v + 1]`` of ``neighbours.npy`` s32 and ``similarities.npy`` f32. An edge stands
in the rows of both its points. The files are mapped into memory, a window at a time: what was read does not
stay there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

WINDOW = 1 << 13  # rows that are read at once


def make(folder: Path, points: int, neighbours: int = 10, seed: int = 0) -> None:
    """Write the graph of random points: each is joined to its nearest ones, whoever is nearest to whom.

    The points are a mixture of Gaussians in three dimensions, so some crowd; utilities are uniform in (0, 1),
    a similarity is ``exp(-(distance / scale)**2)`` with the mean distance of the last neighbour as scale.
    """
    from scipy.spatial import cKDTree

    rng = np.random.default_rng(seed)
    centers = rng.uniform(-1, 1, (max(points // 500, 1), 3))
    where = centers[rng.integers(0, len(centers), points)] + 0.08 * rng.standard_normal((points, 3))
    distance, near = cKDTree(where).query(where, neighbours + 1)
    distance, near = distance[:, 1:], near[:, 1:]  # the first one is the point itself
    similarity = np.exp(-((distance / distance[:, -1].mean()) ** 2)).astype(np.float32)
    one = np.repeat(np.arange(points), neighbours)
    other = near.reshape(-1)
    pairs = np.concatenate([one * points + other, other * points + one])
    pairs, first = np.unique(pairs, return_index=True)
    rows = pairs // points
    folder.mkdir(parents=True, exist_ok=True)
    counts = np.bincount(rows, minlength=points)
    np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))
    np.save(folder / "neighbours.npy", (pairs % points).astype(np.int32))
    np.save(folder / "similarities.npy", np.tile(similarity.reshape(-1), 2)[first])
    np.save(folder / "utilities.npy", rng.random(points, np.float32))


class Graph:
    """A graph in a folder; ``points`` is how many it has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.points = len(np.load(folder / "utilities.npy", mmap_mode="r"))

    def part(self, name: str, start: int, stop: int) -> np.ndarray:
        """A copy of entries of a file, of which nothing stays mapped."""
        return np.array(np.load(self.folder / f"{name}.npy", mmap_mode="r")[start:stop])

    def edges_between(self, first: int, last: int) -> int:
        """Entries of the rows ``first … last - 1``."""
        ends = np.load(self.folder / "offsets.npy", mmap_mode="r")
        return int(ends[last] - ends[first])

    def windows(self, first: int, last: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Edges of these rows, a window at a time: row, neighbour, similarity."""
        for row in range(first, last, WINDOW):
            ends = self.part("offsets", row, min(row + WINDOW, last) + 1)
            rows = np.repeat(np.arange(row, row + len(ends) - 1), np.diff(ends))
            span = int(ends[0]), int(ends[-1])
            yield rows, self.part("neighbours", *span), self.part("similarities", *span)
