"""Processes that share memory: who they are among some, and the memory for messages between them.

Compiled code sends between processes of one host through memory (`_shared.pxi`). Whether it can be had is
found out once for each team, by all of its processes together: each maps the mailboxes of all others of its
host. Where one of a host cannot, in containers that do not see each other's processes, say, none of that
host's does, and messages go over MPI.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ._native import Shared

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("stretto")


class Nearby(NamedTuple):
    """The processes of this host among those of a communicator.

    ``numbers``: of their ranks, as ``shared`` numbers them.
    """

    shared: Shared
    numbers: Mapping[int, int]


def meet(comm: MPI.Intracomm, memory: str) -> Nearby | None:
    """Memory in common with the others of this host. Called by all processes of ``comm``, which wait for each
    other; None where there is none. ``memory``: a name that is the same for those who can share memory;
    empty: this process does not."""
    me = comm.Get_rank()
    hosts = comm.allgather(memory if hasattr(os, "memfd_create") else "")
    here = [rank for rank, host in enumerate(hosts) if host and host == hosts[me]]
    shared = _shared(len(here), here.index(me)) if len(here) > 1 else None
    told = comm.allgather(None if shared is None else shared.told)
    joined = shared is not None and all(
        told[rank] is not None and shared.join(number, told[rank])
        for number, rank in enumerate(here)
    )
    all_joined = comm.allgather(joined)
    if shared is None or not all(all_joined[rank] for rank in here):
        return None
    return Nearby(shared, {rank: number for number, rank in enumerate(here)})


def _shared(count: int, me: int) -> Shared | None:
    try:
        return Shared(count, me)
    except OSError as error:
        _log.warning(
            "no memory for messages between processes of this host, which go over MPI: %s", error
        )
        return None
