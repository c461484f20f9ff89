"""How programs are planned anew once their segments have been measured, and where the times are kept.

What is kept is read by rank 0 when the ranks join, and is everybody's (`World.measured`): who compiles asks
nobody.
A program whose module is among it is planned by it from the start, and not measured again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from stretto.hlo_frontend.compile import CompiledModule
from stretto.hlo_frontend.overlap import measured
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.measured import Measured
from stretto.hlo_frontend.replan import replan
from stretto.runtime import cost_tables
from stretto.runtime.cost_tables import CostText
from stretto.runtime.profiling import NewPlan
from stretto.runtime.program import Program
from stretto.runtime.world import World

_log = logging.getLogger("stretto")


def known(times: CostText, rank: int) -> dict[str, Measured]:
    """By key of a module, what earlier jobs have measured. What cannot be read counts as nothing."""
    if not times.text:
        return {}
    try:
        return measured.read(times.text)
    except ValueError as error:
        if rank == 0:
            _log.warning(
                "measured times are left out, and measured anew: %s: %s", times.origin, error
            )
        return {}


@dataclass
class Planner:
    """Plans one program anew, see `runtime.profiling.Planner`."""

    compiled: CompiledModule
    policy: OverlapPolicy
    world: World
    wanted: bool
    _found: Measured | None = None

    def plan(self, program: Program, seconds: Sequence[float | None]) -> NewPlan:
        source = self.compiled.source
        assert source is not None
        found = replan(source, self.policy, program, seconds)
        self._found = found.measured
        return NewPlan(found.program, found.before, found.after)

    def keep(self) -> None:
        """Rank 0 adds the times to those of its machine set."""
        source = self.compiled.source
        if self.world.rank or self._found is None or source is None:
            return
        path, modules = self.world.measured_path, {}
        try:
            modules = measured.read(path.read_text())
        except (OSError, ValueError):
            modules = {}  # what is damaged was told of when the job began
        key = source.key()
        modules.pop(key, None)
        try:
            cost_tables.keep(path, measured.write({**modules, key: self._found}))
        except OSError as error:
            _log.warning("measured times are not kept: %s", error)


def planner_of(
    world: World,
    policy: OverlapPolicy | None,
    compiled: CompiledModule,
    *,
    has_host_callbacks: bool,
) -> Planner | None:
    """How a program is planned anew; None where nothing is measured (`STRETTO_PROFILE`).

    A program that calls back into Python is not measured: a callback may wait for a program that this process
    runs later. Nor is one that communicates too little to be planned, or whose times are known.
    """
    if policy is None or not world.options.profile:
        return None
    found, source = compiled.overlap, compiled.source
    wanted = (
        not has_host_callbacks
        and source is not None
        and bool(compiled.program.collectives)
        and (found is None or found.considered)
        and not (policy.measured and source.key() in policy.measured)
    )
    return Planner(compiled, policy, world, wanted)
