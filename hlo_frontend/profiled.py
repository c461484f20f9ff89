"""Measured times of a program's segments, as times of its module's instructions.

Invariant: the result follows from the module, the policy, the program and the times.
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
    """``times``: used for the plan when the module is compiled again. ``predicted`` and ``seconds``: the time
    of a run of the present program by the table of costs, and by ``times``."""

    times: Measured
    predicted: float
    seconds: float


def measure(
    source: PartitionedModule,
    policy: OverlapPolicy,
    program: Program,
    seconds: Sequence[float | None],
) -> ProfiledModule:
    """Divide the measured times of a program's segments among the instructions of ``source``, from which it
    was compiled with ``policy``.

    ``seconds[i]``: the time of segment i on a device, with its launch; None if it never ran. Raises
    `InvalidProgramError` if the program is not what the module compiles to.
    """
    made = source.lowered(policy)
    if made.program != program:
        raise InvalidProgramError(f"{program.name} is not what its module compiles to")
    predicted = seconds_of(made.entry, made.overlap, policy.costs, source.ordered)
    times = attribute(made.entry, made.carved, made.homes, seconds, policy.costs)
    costs = replace(policy.costs, measured=times)
    taken = seconds_of(made.entry, made.overlap, costs, source.ordered)
    return ProfiledModule(times, predicted, taken)
