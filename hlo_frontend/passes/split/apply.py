"""Splits the regions of a program as it was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from ...values import BlockGraph, all_blocks
from .emit import split
from .places import Places
from .regions import Region, regions_of


@dataclass(frozen=True)
class Decision:
    """That a region is split. ``block``: number of the block among all of the program, outer ones first;
    ``region``: number of the region in it; ``tiles``, ``pieces``: see `emit.split`."""

    block: int
    region: int
    tiles: int
    pieces: bool = False


def found(entry: BlockGraph, num_devices: int) -> list[tuple[int, BlockGraph, list[Region]]]:
    """The blocks of a program in which there are regions, with their numbers."""
    blocks = list(enumerate(all_blocks(entry)))
    with_regions = ((n, b, regions_of(b, num_devices)) for n, b in blocks)
    return [(n, b, regions) for n, b, regions in with_regions if regions]


def apply(
    entry: BlockGraph, decisions: Sequence[Decision], num_replicas: int, num_partitions: int
) -> None:
    """Split the regions of a program, in place."""
    if not decisions:
        return
    by_block: dict[int, list[Decision]] = {}
    for decision in decisions:
        by_block.setdefault(decision.block, []).append(decision)
    for number, block, regions in found(entry, num_replicas * num_partitions):
        places = Places(block, num_replicas, num_partitions)
        for decision in by_block.get(number, ()):
            split(block, regions[decision.region], decision.tiles, places, decision.pieces)


def digest(decisions: Sequence[Decision]) -> bytes:
    """Equal only for equal decisions; empty if there are none."""
    return sha256(repr(tuple(decisions)).encode()).digest() if decisions else b""
