"""By which costs the programs of a job are scheduled for overlap, if they are.

A table that the user names counts as it is: groups without an entry are errors. One that was measured serves
all groups, each by the nearest entry. Where there is no table, a job whose ranks run on several hosts gets
that of an ordinary network. On one host without a table nothing is scheduled: the cores that compute move
the data too, so that there is next to nothing to hide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stretto.runtime.errors import InvalidProgramError, WorldError

from .apply import OverlapPolicy
from .costs import ORDINARY_NETWORK, CostTable


def policy_of(
    text: str,
    hosts: Iterable[str],
    *,
    origin: str = "",
    named: bool = False,
    enabled: bool = True,
) -> OverlapPolicy | None:
    """The policy of all ranks, by a table of costs as JSON text. ``hosts`` are theirs.

    ``origin``: where the text comes from; ``named``: whether the user named that; ``enabled``: whether
    anything is to be scheduled at all. Raises `WorldError` where the text is no table.
    """
    if not enabled:
        return None
    if text or named:
        try:
            table = CostTable.parse(text)
        except InvalidProgramError as error:
            raise WorldError(f"{origin} is no table of costs: {error}") from None
        return OverlapPolicy(replace(table, estimates=not named))
    if len(set(hosts)) > 1:
        return OverlapPolicy(ORDINARY_NETWORK)
    return None
