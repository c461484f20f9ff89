"""A program planned anew, once it is known what its segments take.

The plan that the program has is made again, which tells what each segment consists of; measured times take
the place of the table's rates (`overlap.attribute`); and the module is planned as if it were compiled now.
The new program is taken where it saves the policy's least gain under the measured times, and where it has no
plan while the one at hand loses by its own.

Invariant: all follows from the module, the policy, the program and the times, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.runtime.errors import InvalidProgramError
from stretto.runtime.program import Program

from .compile import PartitionedModule
from .overlap.apply import OverlapPolicy
from .overlap.attribute import attribute
from .overlap.evaluate import seconds_of
from .overlap.measured import Measured


@dataclass(frozen=True)
class Replanned:
    """``program`` takes the place of the one at hand, which stays where it is None.

    Predicted seconds of a run: ``modelled`` for the program at hand by the table of costs; ``before`` for the
    same, and ``after`` for the new plan, by what was measured.
    """

    program: Program | None
    modelled: float
    before: float
    after: float
    measured: Measured


def replan(
    source: PartitionedModule,
    policy: OverlapPolicy,
    program: Program,
    seconds: Sequence[float | None],
) -> Replanned:
    """Plan a module anew of which ``program`` was compiled with ``policy``.

    ``seconds[i]``: what its segment i takes on a device, its launch included; None where it never ran. Raises
    `InvalidProgramError` where the program is not what the module compiles to.
    """
    old = source.lowered(policy)
    if old.program != program:
        raise InvalidProgramError(
            f"{program.name} is not what its module compiles to: it cannot be planned anew"
        )
    modelled = seconds_of(old.entry, old.overlap, policy.costs, source.ordered)
    measured = attribute(old.entry, old.carved, old.homes, seconds, policy.costs)
    costs = replace(policy.costs, measured=measured)
    before = seconds_of(old.entry, old.overlap, costs, source.ordered)
    new = source.lowered(replace(policy, costs=costs, measured={}))
    after = seconds_of(new.entry, new.overlap, costs, source.ordered)
    had, has = (m.overlap is not None and m.overlap.changed for m in (old, new))
    better = after <= before * (1.0 - policy.least_gain) or (had and not has and after < before)
    taken = new.program if better and new.program != program else None
    return Replanned(taken, modelled, before, after, measured)
