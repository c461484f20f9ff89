"""Data that all rewrites of a program use."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...values import Node
from .copies import Copies
from .device_values import DeviceValues


@dataclass(frozen=True, eq=False)
class Context:
    """``known``: known values on every device. ``num_devices``: replicas times partitions of the program.

    ``copies``: which devices have the same. ``has_slices``: whether the block has dynamic slices at all.
    ``tried``: nodes of the block that `copied` has looked at; ``crossed``: collectives whose operands it
    reads instead of their results.
    """

    known: DeviceValues
    num_devices: int
    copies: Copies
    has_slices: bool = True
    tried: set[Node] = field(default_factory=set)
    crossed: set[Node] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A rewrite. ``said``: a description that follows the collective's name in a sentence. ``same``: the
    collective that replaces it. ``made``: new ones in its place, which other rewrites may change again."""

    said: str
    same: Node | None = None
    made: tuple[Node, ...] = ()
