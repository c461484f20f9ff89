"""Changes a program as it was decided: regions in parts first, then what is computed by shares.

Collectives of several operands are taken apart before anything is looked for, in programs in which
something is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from ...values import BlockGraph, all_blocks
from ..bytes.copies import Copies
from ..bytes.device_values import DeviceValues
from .apart import take_apart
from .emit import split
from .own import compute_own
from .places import Places
from .regions import Region, regions_of
from .shares import shares_of

Shardings = Sequence[bytes | None]


@dataclass(frozen=True)
class Decision:
    """That a region is split. ``block``: number of the block among all of the program, outer ones first;
    ``region``: number of the region in it; ``tiles``, ``pieces``: see `emit.split`."""

    block: int
    region: int
    tiles: int
    pieces: bool = False


@dataclass(frozen=True)
class Shared:
    """That a region of `shares.shares_of` is computed by shares: one of those that the program has with its
    regions split."""

    block: int
    region: int


Found = list[tuple[int, BlockGraph, list[Region]]]


def found(entry: BlockGraph, num_devices: int) -> Found:
    """The blocks of a program in which there are regions, with their numbers. Combined collectives are taken
    apart, in place."""
    blocks = _blocks(entry)
    return [(n, b, regions) for n, b in blocks if (regions := regions_of(b, num_devices))]


def found_shares(entry: BlockGraph, counts: tuple[int, int], shardings: Shardings) -> Found:
    """The same of what can be computed by shares. ``counts``: replicas and partitions. ``shardings``: of the
    parameters, as `shardings.shardings_of` gives them."""
    blocks, num_devices = _blocks(entry), counts[0] * counts[1]
    copies = Copies(entry, DeviceValues(entry, *counts), num_devices, shardings)
    return [(n, b, regions) for n, b in blocks if (regions := shares_of(b, num_devices, copies))]


def _blocks(entry: BlockGraph) -> list[tuple[int, BlockGraph]]:
    blocks = list(all_blocks(entry))
    for block in blocks:
        take_apart(block)
    return list(enumerate(blocks))


def apply(
    entry: BlockGraph,
    decisions: Sequence[Decision | Shared],
    num_replicas: int,
    num_partitions: int,
    shardings: Shardings = (),
) -> None:
    """Change a program as it was decided, in place. ``shardings``: of its parameters."""
    counts = num_replicas, num_partitions
    shared = [d for d in decisions if isinstance(d, Shared)]
    parted = [d for d in decisions if isinstance(d, Decision)]
    places: dict[int, Places] = {}
    if parted:
        for number, block, regions in found(entry, num_replicas * num_partitions):
            own = places.setdefault(number, Places(block, *counts))
            for one in parted:
                if one.block == number:
                    split(block, regions[one.region], one.tiles, own, one.pieces)
    if shared:
        for number, block, regions in found_shares(entry, counts, shardings):
            own = places.setdefault(number, Places(block, *counts))
            for share in shared:
                if share.block == number:
                    compute_own(block, regions[share.region], own)


def digest(decisions: Sequence[Decision | Shared]) -> bytes:
    """Equal only for equal decisions; empty if there are none."""
    return sha256(repr(tuple(decisions)).encode()).digest() if decisions else b""
