"""Rewrites HLO text with groups along mesh axes of one device, which older parsers refuse.

Text says ``replica_groups=mesh['x'=1,'y'=8] {'x'}`` for the groups along axis x. jaxlib 0.10.2 reads that
form only where each axis in the braces has more than one device. Here axes of one are left out of the braces;
where none is left, each device is a group. Other text comes back as it is.
"""

from __future__ import annotations

import re
from math import prod

from .groups import MOST_DEVICES

_AXIS = r"(?:'[^']*'|\"[^\"]*\")"
_GROUPS = re.compile(
    rf"replica_groups=mesh\[(?P<mesh>{_AXIS}=\d+(?:, ?{_AXIS}=\d+)*)\] ?"
    rf"\{{(?P<along>{_AXIS}(?:, ?{_AXIS})*)\}}"
)
_SIZE = re.compile(rf"({_AXIS})=(\d+)")


def spell_out_groups(text: str) -> str:
    """``text`` with no axis of one device among those that groups are along."""
    return _GROUPS.sub(_spelled_out, text)


def _spelled_out(found: re.Match[str]) -> str:
    sizes = {name: int(size) for name, size in _SIZE.findall(found["mesh"])}
    along = re.findall(_AXIS, found["along"])
    left = [name for name in along if sizes.get(name) != 1]
    devices = prod(sizes.values())
    if left == along or devices > MOST_DEVICES:
        return found[0]
    if left:
        return f"replica_groups=mesh[{found['mesh']}] {{{','.join(left)}}}"
    return "replica_groups={" + ",".join(f"{{{device}}}" for device in range(devices)) + "}"
