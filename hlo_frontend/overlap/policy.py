"""Chooses the table of costs by which the programs of a job are scheduled for overlap.

If the user names a table, it is used as it is: groups without an entry are errors. A measured table serves
all groups, each by the nearest entry. Without a table, a job on several hosts gets that of an ordinary
network, and a job on one host is not scheduled: its cores both compute and move the data, so there is little
to hide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stretto.runtime.errors import InvalidProgramError, WorldError

from .apply import OverlapPolicy
from .costs import GPUS_OF_A_HOST, GPUS_OF_HOSTS, ORDINARY_NETWORK, CostTable


def policy_of(
    text: str,
    hosts: Iterable[str],
    *,
    origin: str = "",
    named: bool = False,
    enabled: bool = True,
    lowered_as: str = "cpu",
) -> OverlapPolicy | None:
    """The policy of all ranks. ``text``: a table of costs as JSON. ``hosts``: the hosts of the ranks.
    ``lowered_as``: as of `Engine`, by which costs are assumed where there is no table.

    ``origin``: where the text comes from; ``named``: whether the user named it; ``enabled``: whether programs
    are scheduled at all. Raises `WorldError` if the text is not a table.
    """
    if not enabled:
        return None
    if text or named:
        try:
            table = CostTable.parse(text)
        except InvalidProgramError as error:
            raise WorldError(f"{origin} is no table of costs: {error}") from None
        return OverlapPolicy(replace(table, estimates=not named))
    several = len(set(hosts)) > 1
    if lowered_as == "cuda":
        return OverlapPolicy(GPUS_OF_HOSTS if several else GPUS_OF_A_HOST)
    return OverlapPolicy(ORDINARY_NETWORK) if several else None
