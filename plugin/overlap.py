"""By which costs programs are scheduled for overlap in this world, if they are.

A table that the user names counts as it is: groups without an entry are errors. One that was measured serves
all groups, each by the nearest entry. Where there is no table, a job whose ranks run on several hosts gets
that of an ordinary network. On one host without a table nothing is scheduled: the cores that compute move
the data too, so that there is next to nothing to hide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.costs import ORDINARY_NETWORK, CostTable
from stretto.runtime.errors import InvalidProgramError, WorldError
from stretto.runtime.job.cost_tables import CostText
from stretto.runtime.options import Options


def policy_of(options: Options, costs: CostText, hosts: Iterable[str]) -> OverlapPolicy | None:
    """The policy of all ranks; ``hosts`` are theirs. Raises `WorldError` where their table is not one."""
    if not options.overlap:
        return None
    if costs.text or costs.named:
        try:
            table = CostTable.parse(costs.text)
        except InvalidProgramError as error:
            raise WorldError(f"{costs.origin} is no table of costs: {error}") from None
        return OverlapPolicy(replace(table, estimates=not costs.named))
    if len(set(hosts)) > 1:
        return OverlapPolicy(ORDINARY_NETWORK)
    return None
