"""The MPI library that mpi4py brings: whether it can be had, beginning it and ending it.

A process that a launcher of MPI started, or that others wait for, gets a `WorldError` here that says what is
wrong with its MPI and how to mend it.
"""

from __future__ import annotations

from typing import Any

from ..errors import WorldError
from . import joining
from . import launcher as launchers
from .launcher import Launcher


def check_reach(launcher: Launcher | None) -> None:
    """Raise `WorldError` in a process that inherited a rank's variables, and that MPI would end."""
    parent = launchers.parent_rank()
    if parent is not None:
        raise WorldError(
            f"STRETTO_LAUNCHER=mpi asks for MPI, but rank process {parent} started this process, not a "
            "launcher: set STRETTO_LAUNCHER=none for it, or start its ranks with mpiexec"
        )
    if launcher is not None and launchers.is_cut_off():
        raise WorldError(
            f"{launcher.name} started rank {launcher.rank} of {launcher.size}, and that started this process "
            "without the connection to the launcher (PMI_FD is not open here). If this process is to be "
            "the rank, let what starts it pass its descriptors on (subprocess: close_fds=False); if it is "
            "to be alone, set STRETTO_LAUNCHER=none for it"
        )


def _import(launcher: Launcher | None) -> Any:
    """``mpi4py.MPI``, not initialized. Raises `WorldError` if there is none."""
    asked = (
        f"{launcher.name} started this process as rank {launcher.rank}"
        + (f" of {launcher.size}" if launcher.size else "")
        if launcher
        else "STRETTO_LAUNCHER=mpi asks for MPI"
    )
    try:
        import mpi4py

        # MPI is begun by `joining` and ended by `World.leave`, so that a rank never waits unwatched.
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        mpi4py.rc.thread_level = "multiple"
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise WorldError(
            f"{asked}, but MPI cannot be used from Python: {error}. Install mpi4py for the MPI that "
            "starts the ranks (pip install --no-binary mpi4py mpi4py), or a complete MPI of its own "
            "(pip install 'stretto[mpi]', and use its mpiexec). To run every process alone, set "
            "STRETTO_LAUNCHER=none"
        ) from error
    return MPI


def begin(launcher: Launcher | None, answered_here: bool = False) -> Any:
    """``mpi4py.MPI``, initialized for calls from several threads."""
    mpi = _import(launcher)
    if not mpi.Is_initialized():
        joining.initialize(mpi, answered_here)
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise WorldError(
            f"{library(mpi)} runs without MPI_THREAD_MULTIPLE, which stretto needs to overlap "
            "communication with compute. Initialize MPI with it (mpi4py.rc.thread_level = "
            "'multiple', its default) or use an MPI built with it"
        )
    return mpi


def no_wireup(launcher: Launcher) -> WorldError | None:
    """Why MPI cannot be brought up here without a launcher of its own, if so."""
    try:
        mpi = _import(launcher)
    except WorldError as error:
        return error
    if mpi.Is_initialized():
        return WorldError(
            f"{launcher.name} started the processes, and this one has initialized MPI before JAX made its "
            "devices, so that MPI knows no other process. Import mpi4py.MPI later, or set "
            "mpi4py.rc.initialize = False before"
        )
    if mpi.get_vendor()[0] == "Open MPI":
        return WorldError(
            f"{launcher.name} started the processes, and {library(mpi)} finds its ranks only if its own "
            "launcher starts them. Start the program with mpirun, or install an MPI that can be "
            "told (pip install 'stretto[mpi]' brings MPICH)"
        )
    return None


def check_launcher(mpi: Any, launcher: Launcher | None) -> None:
    """A launcher of one MPI with the library of another gives ranks that are all alone."""
    size = mpi.COMM_WORLD.Get_size()
    if launcher and launcher.size > 1 and size == 1:
        raise WorldError(
            f"{launcher.name} started {launcher.size} ranks, but {library(mpi)}, which mpi4py uses, "
            "sees only one: launcher and library do not belong together. Start the ranks with the "
            "mpiexec of that library (`stretto doctor` tells which one is found), or install mpi4py "
            "for the launcher's MPI"
        )


def library(mpi: Any) -> str:
    """Name and version of the MPI library, such as ``MPICH 5.0.2``."""
    name, numbers = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, numbers))}"


def finalize() -> None:
    """End MPI, if it has begun and nobody has ended it."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return
    if MPI.Is_initialized() and not MPI.Is_finalized():
        joining.finalize(MPI)
