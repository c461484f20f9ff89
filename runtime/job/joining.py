"""Joining MPI without waiting for ever.

MPI's initialization returns when every rank has come to it. A rank that ends before (a script that fails
on one host, say) would leave the others waiting inside MPI: Hydra notices such an end only of processes
that have joined. So a thread watches while this process waits: it looks whether the processes that Hydra
started beside this one are all alive, and it has the last word after the options' timeout, or after
`PATIENCE` where that is longer: ranks start as far apart as importing takes on a busy machine.

The thread needs the GIL, which mpi4py keeps during initialization: hence MPI is initialized through
ctypes, which gives it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from ..errors import WorldError
from . import lineage
from .control import end_process, say

TICK = 0.5
# Seconds.
PATIENCE = 60.0
ANSWER_WITHIN = 1.0
PROXY = "hydra_pmi_proxy"


def initialize(mpi: Any, answered_here: bool = False) -> None:
    """Initialize MPI for calls from several threads. ``mpi`` is the module ``mpi4py.MPI``.

    ``answered_here``: a thread of this process answers MPI, and needs the GIL for it.
    """
    try:
        init = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError) as error:
        if answered_here:
            raise WorldError(
                f"MPI cannot be initialized without Python's lock: {error}. Start the ranks with the "
                "mpiexec of the MPI that mpi4py uses"
            ) from error
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        return
    provided = ctypes.c_int()
    code = init(None, None, mpi.THREAD_MULTIPLE, ctypes.byref(provided))
    if code != mpi.SUCCESS:
        raise RuntimeError(f"MPI_Init_thread failed with code {code}")
    # As mpi4py does when it initializes: errors become exceptions, instead of the end of the process.
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
        comm.Set_errhandler(mpi.ERRORS_RETURN)


def finalize(mpi: Any) -> None:
    """End MPI, without the GIL: a thread of this process may have to answer it (`wireup`)."""
    try:
        end = ctypes.CDLL(mpi.__file__).MPI_Finalize
    except (OSError, AttributeError):
        mpi.Finalize()
        return
    end()


def take_leave() -> None:
    """Tell Hydra that this process ends, which MPI has not been told: that is no reason to kill the others.

    PMI-1, the protocol of MPICH's ``src/pmi``: a line over the descriptor that the launcher names, an answer.
    """
    with contextlib.suppress(KeyError, ValueError, OSError):
        descriptor = int(os.environ["PMI_FD"])
        os.write(descriptor, b"cmd=finalize\n")
        if select.select([descriptor], [], [], ANSWER_WITHIN)[0]:
            os.read(descriptor, 4096)


@contextlib.contextmanager
def watched(rank: int, timeout: float) -> Iterator[None]:
    """End this process with a message if the ranks do not join while inside, for one that will not."""
    done = threading.Event()

    def watch() -> None:
        patience = max(timeout, PATIENCE)
        deadline = monotonic() + patience
        expected = int(os.environ.get("MPI_LOCALNRANKS", "0"))
        proxy = _proxy() if expected else None
        while not done.wait(TICK):
            reason = ""
            alive = _living_children(proxy) if proxy else None
            if alive is not None and alive < expected:
                reason = (
                    f"{expected - alive} of the {expected} processes that mpiexec started on this host "
                    "ended before all ranks had joined the job; their own output says why"
                )
            elif monotonic() > deadline:
                reason = (
                    f"some rank has not joined the job within {patience:g} s (STRETTO_TIMEOUT, "
                    f"at least {PATIENCE:g}): it has ended, or has not yet come to its first use of a JAX "
                    "device"
                )
            if reason and not done.is_set():
                say(f"stretto: rank {rank} ends: {reason}\n")
                end_process()

    threading.Thread(target=watch, name="stretto-joining", daemon=True).start()
    try:
        yield
    finally:
        done.set()


def _proxy() -> int | None:
    """Process id of the Hydra proxy that this process descends from, where /proc can tell."""
    return next((p.pid for p in lineage.ancestors() if p.is_called(PROXY)), None)


def _living_children(process: int) -> int | None:
    """How many children of a process are alive, zombies left out; None where it cannot be known."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return None
    alive = 0
    for child in children:
        with contextlib.suppress(OSError, IndexError):
            alive += lineage.stat(int(child))[0] != "Z"
    return alive
