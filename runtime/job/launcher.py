"""Which launcher started this process, read from the environment alone.

Launchers tell each rank its number and the number of ranks through variables. They are read only to
decide whether MPI is wanted: the world's own rank and size come from MPI, and `world.bootstrap` compares
the two, since a launcher and an MPI library that do not belong together give ranks that are all alone.

Processes that a rank starts inherit these variables and are no ranks: a worker that loads data, say. A
rank leaves a mark in its environment when it joins, and a process that finds the mark of one of its
ancestors has no launcher, unless another one was started in between.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from . import lineage


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

# The rank that has joined: `lineage.Process.identity`. Not an option of anybody's.
_MARK = "_STRETTO_RANK"
# What starts ranks, as processes are called.
_STARTERS = (
    "hydra_pmi_proxy",
    "mpiexec",
    "mpiexec.hydra",
    "mpiexec.gforker",
    "mpirun",
    "mpirun_rsh",
    "mpispawn",
    "orterun",
    "orted",
    "prterun",
    "prte",
    "prted",
    "srun",
    "slurmstepd",
    "palsd",
)


def mark() -> None:
    """This process has joined the job: processes that it starts are not ranks in its place."""
    own = lineage.this()
    if own is not None:
        os.environ[_MARK] = own.identity


def parent_rank(environment: Mapping[str, str] | None = None) -> int | None:
    """Process id of the rank that started this process, directly or not; None if none did."""
    marked = (os.environ if environment is None else environment).get(_MARK)
    if not marked:
        return None
    for process in lineage.ancestors():
        if process.identity == marked:
            return process.pid
        if any(map(process.is_called, _STARTERS)):
            return None
    return None


def is_cut_off(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the launcher left a connection to the process that started this one, which did not pass it on.

    Such a process cannot join: MPI would end it. It is not known whether it should.
    """
    descriptor = (os.environ if environment is None else environment).get("PMI_FD", "")
    if not descriptor.isdecimal():
        return False
    try:
        return not stat.S_ISSOCK(os.fstat(int(descriptor)).st_mode)
    except (OSError, OverflowError):
        return True


def _is_worker() -> bool:
    """Whether Python's multiprocessing started this process."""
    multiprocessing = sys.modules.get("multiprocessing")
    return multiprocessing is not None and multiprocessing.parent_process() is not None


def detect(environment: Mapping[str, str] | None = None) -> Launcher | None:
    """The launcher that started this process, or None: it was started by hand.

    A process inside a Slurm allocation but outside ``srun`` has no rank. A PMIx launcher need not tell
    the number of ranks in the environment: its size is then 0, which stands for not known. A process that
    a rank started has none either; nor a worker of multiprocessing that cannot reach it.
    """
    environment = os.environ if environment is None else environment
    if parent_rank(environment) is not None or (_is_worker() and is_cut_off(environment)):
        return None
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
