"""Parts of larger pieces of memory: see `stretto.collectives.arena`."""

from __future__ import annotations

import random

import pytest

from stretto.collectives.arena import Arena


class Chunks:
    """What an arena adds: chunks of 4,096 bytes, or of what is asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def add(self, size: int) -> tuple[int, int]:
        self.sizes.append(max(size, 4096))
        return len(self.sizes) - 1, self.sizes[-1]


def test_what_is_free_is_taken_before_more_is_added() -> None:
    chunks = Chunks()
    arena = Arena()
    first = arena.take(1000, chunks.add)
    second = arena.take(3000, chunks.add)
    assert chunks.sizes == [4096]
    arena.give(first)
    assert arena.take(900, chunks.add) == first
    assert arena.take(200, chunks.add) == (1, 0, 256)
    assert chunks.sizes == [4096, 4096]
    assert second[2] >= 3000


def test_neighbours_that_are_free_are_one_part() -> None:
    chunks = Chunks()
    arena = Arena()
    parts = [arena.take(1024, chunks.add) for _ in range(4)]
    for part in (parts[0], parts[2], parts[3], parts[1]):
        arena.give(part)
    assert arena.take(4096, chunks.add) == (0, 0, 4096)
    assert chunks.sizes == [4096]


def test_parts_of_no_bytes_differ() -> None:
    arena, chunks = Arena(), Chunks()
    assert arena.take(0, chunks.add) != arena.take(0, chunks.add)


def test_what_adding_raises_is_raised_and_nothing_is_lost() -> None:
    def add(size: int) -> tuple[int, int]:
        raise OSError("no more")

    arena, chunks = Arena(), Chunks()
    left = arena.take(3072, chunks.add)
    with pytest.raises(OSError, match="no more"):
        arena.take(2048, add)
    assert arena.take(1000, chunks.add) == (0, left[2], 1024)


def test_parts_never_overlap() -> None:
    chunks = Chunks()
    arena = Arena()
    draw = random.Random(0)
    taken: list[tuple[int, int, int]] = []
    for _ in range(3000):
        if taken and draw.random() < 0.5:
            arena.give(taken.pop(draw.randrange(len(taken))))
            continue
        size = draw.choice((1, 128, 129, 700, 5000))
        part = arena.take(size, chunks.add)
        assert part[2] >= size
        assert part[1] + part[2] <= chunks.sizes[part[0]]
        for other in taken:
            apart = part[1] + part[2] <= other[1] or other[1] + other[2] <= part[1]
            assert part[0] != other[0] or apart
        taken.append(part)
    for part in taken:
        arena.give(part)
    for size in chunks.sizes:  # all of them are whole again
        assert arena.take(size, chunks.add)[2] == size
    assert len(chunks.sizes) < 120
