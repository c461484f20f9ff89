"""Which launcher started this process, read from the environment alone.

Launchers tell each rank its number and the number of ranks through variables. They are read only to
decide whether MPI is wanted: the world's own rank and size come from MPI, and `world.bootstrap` compares
the two, since a launcher and an MPI library that do not belong together give ranks that are all alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """A launcher, and the place in the job that it gave this process."""

    name: str
    rank: int
    size: int


# name, variable of the rank, variables of the number of ranks (the first that is set counts).
# Open MPI and Slurm come first: both may also set the PMI variables.
_LAUNCHERS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
    ("Slurm's srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS",)),
    ("MVAPICH's mpirun", "MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",)),
    ("Hydra (mpiexec of MPICH or Intel MPI)", "PMI_RANK", ("PMI_SIZE",)),
    ("PALS (Cray)", "PALS_RANKID", ("PALS_SIZE", "PMI_SIZE")),
    ("a PMIx launcher", "PMIX_RANK", ("PMIX_SIZE", "PRTE_NUM_PROCS")),
)


def detect(environment: Mapping[str, str] | None = None) -> Launcher | None:
    """The launcher that started this process, or None: it was started by hand.

    A process inside a Slurm allocation but outside ``srun`` has no rank. A PMIx launcher need not tell
    the number of ranks in the environment: its size is then 0, which stands for not known.
    """
    environment = os.environ if environment is None else environment
    for name, rank, sizes in _LAUNCHERS:
        if rank not in environment:
            continue
        size = next((environment[s] for s in sizes if s in environment), "")
        if not size and name.startswith("Slurm"):
            continue
        try:
            return Launcher(name, int(environment[rank]), int(size or 0))
        except ValueError:
            continue
    return None
