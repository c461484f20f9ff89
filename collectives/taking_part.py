"""Which devices take part in a call: of a group's members in this process all or none, so of a pair.

A device is absent where its branch of a program does not come to the collective.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence

from .ops import Kind


def takes_part(
    kind: Kind, group: Sequence[int], local: Container[int], present: Collection[int]
) -> bool:
    """Whether the members of a group that are ``local`` are all ``present``. Raises ``RuntimeError`` where
    only some are. True where there are none."""
    here = [i for i in group if i in local]
    missing = sorted(i for i in here if i not in present)
    if missing and len(missing) < len(here):
        there = sorted(i for i in here if i in present)
        raise RuntimeError(
            f"devices {there} of group {list(group)} take part in this {kind}, but devices {missing} do not"
        )
    return not missing


def check_pair(source: int, target: int, present: Container[int]) -> None:
    """Raises ``RuntimeError`` where of two devices of this process only one is there."""
    if (source in present) != (target in present):
        raise RuntimeError(f"of {source} -> {target}, only one device takes part in this permute")
