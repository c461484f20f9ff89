"""Where the times are kept that ``STRETTO_PROFILE=1`` measures.

What is kept is read by rank 0 when the ranks join, and is everybody's (`World.measured`): who compiles asks
nobody. If the ranks have several engines, the slower one's times count. A program whose module is among it is
planned by it, and not measured again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.hlo_frontend.compile import CompiledModule
from stretto.hlo_frontend.overlap import measured
from stretto.hlo_frontend.overlap.apply import OverlapPolicy
from stretto.hlo_frontend.overlap.measured import Measured
from stretto.hlo_frontend.profiled import measure
from stretto.runtime.job import cost_tables
from stretto.runtime.job.cost_tables import CostText
from stretto.runtime.job.world import World
from stretto.runtime.program import Program

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


@dataclass(frozen=True)
class Keeper:
    """Keeps what was measured of one program, a `runtime.execution.profiling.Keep`."""

    compiled: CompiledModule
    policy: OverlapPolicy
    world: World

    def __call__(self, program: Program, seconds: Sequence[float | None]) -> tuple[float, float]:
        source = self.compiled.source
        assert source is not None
        found = measure(source, self.policy, program, seconds)
        path, key = self.world.measured_path, source.key()
        try:
            with cost_tables.alone(path):
                modules = _read(path)
                times, before = found.times, modules.pop(key, None)
                if before is not None and len(self.world.samples) > 1:
                    times = measured.slower(times, before)  # of another engine of this job
                cost_tables.keep(path, measured.write({**modules, key: times}))
        except OSError as error:
            _log.warning("measured times are not kept: %s", error)
        return found.predicted, found.seconds


def _read(path: Path) -> dict[str, Measured]:
    """What is kept, without what is damaged: that was told of when the job began."""
    try:
        return measured.read(path.read_text())
    except (OSError, ValueError):
        return {}


def keeper_of(
    world: World,
    policy: OverlapPolicy | None,
    compiled: CompiledModule,
    *,
    has_host_callbacks: bool,
) -> Keeper | None:
    """Who keeps what is measured of a program; None where it is not measured (`STRETTO_PROFILE`).

    One rank measures for all, of several engines one each (`World.samples`). A program that calls back into
    Python is not measured: a callback may wait for a program that this process runs later. Nor is one that
    communicates too little to be planned, or whose times are known.
    """
    found, source = compiled.overlap, compiled.source
    if (
        policy is None
        or source is None
        or not world.options.profile
        or world.rank not in world.samples
    ):
        return None
    wanted = (
        not has_host_callbacks
        and bool(compiled.program.collectives)
        and (found is None or found.considered)
        and not (policy.measured and source.key() in policy.measured)
    )
    return Keeper(compiled, policy, world) if wanted else None
