"""What the rewrites of a program share."""

from __future__ import annotations

from dataclasses import dataclass

from ...values import Node
from .device_values import DeviceValues


@dataclass(frozen=True, eq=False)
class Context:
    """``known``: values that devices have; ``num_devices``: of the program, replicas times partitions.

    ``has_slices``: whether the block has dynamic slices at all.
    """

    known: DeviceValues
    num_devices: int
    has_slices: bool = True


@dataclass(frozen=True, eq=False)
class Rewritten:
    """What became of a collective, in words that follow its name. ``same``: the one that stands for it."""

    said: str
    same: Node | None = None
