"""What a program's segments were measured to take, as times of its module's instructions.

Invariant: all follows from the module, the policy, the program and the times.
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
class ProfiledModule:
    """``times``: by which the module is planned when it is compiled next. Seconds of a run of the program at
    hand: ``predicted`` by the table of costs, ``seconds`` by the times."""

    times: Measured
    predicted: float
    seconds: float


def measure(
    source: PartitionedModule,
    policy: OverlapPolicy,
    program: Program,
    seconds: Sequence[float | None],
) -> ProfiledModule:
    """Share out what was measured of a program that ``source`` was compiled to with ``policy``.

    ``seconds[i]``: what its segment i takes on a device, its launch included; None where it never ran. Raises
    `InvalidProgramError` where the program is not what the module compiles to.
    """
    made = source.lowered(policy)
    if made.program != program:
        raise InvalidProgramError(f"{program.name} is not what its module compiles to")
    predicted = seconds_of(made.entry, made.overlap, policy.costs, source.ordered)
    times = attribute(made.entry, made.carved, made.homes, seconds, policy.costs)
    costs = replace(policy.costs, measured=times)
    taken = seconds_of(made.entry, made.overlap, costs, source.ordered)
    return ProfiledModule(times, predicted, taken)
