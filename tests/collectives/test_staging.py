"""Page-locked memory that is used again, with blocks of plain memory in its place."""

from __future__ import annotations

import pytest

from stretto.collectives import staging
from stretto.collectives.memory import size_class

SIZE = size_class(1000)


class Block:
    def __init__(self, size: int, device: int) -> None:
        self.size = size


class Use:
    """Who uses a block; asked how often whether that is over."""

    def __init__(self) -> None:
        self.over = False
        self.asked = 0

    def passed(self) -> bool:
        self.asked += 1
        return self.over


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> staging.Pinned:
    monkeypatch.setattr(staging, "Block", Block)
    return staging.Pinned(most=3 * SIZE)


def never() -> None:
    raise AssertionError("waits")


def test_a_block_is_used_again_once_its_use_is_over(pinned: staging.Pinned) -> None:
    use, block = Use(), pinned.take(1000, 0, never)
    pinned.give_back(block, [use])
    assert pinned.take(1000, 0, never) is not block
    use.over = True
    assert pinned.take(1000, 0, never) is block
    assert pinned.in_use == 2 * SIZE


def test_a_stream_that_is_held_up_does_not_keep_what_others_gave_back(
    pinned: staging.Pinned,
) -> None:
    """Once as much is in use as may be, whoever needs more gets what is free, wherever it stands."""
    uses = [Use() for _ in range(3)]
    blocks = [pinned.take(1000, 0, never) for _ in uses]
    for block, use in zip(blocks, uses, strict=True):
        pinned.give_back(block, [use])
    uses[2].over = True
    looks: list[int] = []
    assert pinned.take(1000, 0, lambda: looks.append(pinned.in_use)) is blocks[2]
    assert set(looks) <= {3 * SIZE}


def test_few_are_asked_for_each_one_that_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "Block", Block)
    pinned, uses = staging.Pinned(), [Use() for _ in range(100)]
    for use in uses:
        pinned.give_back(pinned.take(1000, 0, never), [use])
    assert sum(use.asked for use in uses) < 100


def test_waiting_ends_when_it_is_in_vain(pinned: staging.Pinned) -> None:
    for _ in range(3):
        pinned.take(1000, 0, never)

    def check() -> None:
        raise RuntimeError("the job has failed")

    with pytest.raises(RuntimeError, match="the job has failed"):
        pinned.take(1000, 0, check)
