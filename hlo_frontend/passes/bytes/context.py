"""Data that all rewrites of a program use."""

from __future__ import annotations

from dataclasses import dataclass

from ...values import Node
from .device_values import DeviceValues


@dataclass(frozen=True, eq=False)
class Context:
    """``known``: known values on every device. ``num_devices``: replicas times partitions of the program.

    ``has_slices``: whether the block has dynamic slices at all.
    """

    known: DeviceValues
    num_devices: int
    has_slices: bool = True


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A rewrite. ``said``: a description that follows the collective's name in a sentence. ``same``: the
    collective that replaces it. ``made``: new ones in its place, which other rewrites may change again."""

    said: str
    same: Node | None = None
    made: tuple[Node, ...] = ()
