"""Processor cores: how the ranks of a job share those of their hosts, and what follows for them."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from threadpoolctl import ThreadpoolController

# By one of these a user says on how many threads linear algebra computes.
_SAID = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")
_blas_lock = threading.Lock()


@dataclass(frozen=True)
class Place:
    """Where a rank runs: its host, and the cores that it may use there."""

    host: str
    cores: frozenset[int]


def usable() -> frozenset[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def share(places: Sequence[Place], place: Place) -> float:
    """Cores for each of the ranks that share cores with those at ``place`` (themselves among them)."""
    sharers = [p for p in places if p.host == place.host and p.cores & place.cores]
    together: frozenset[int] = frozenset().union(*(p.cores for p in sharers))
    return len(together) / len(sharers)


def of_rank(places: Sequence[Place], rank: int) -> int:
    """How many cores a rank should compute on, so that all that share cores with it can."""
    return max(1, int(share(places, places[rank])))


@contextmanager
def announced(count: int) -> Iterator[None]:
    """Within it, ``NPROC`` in the environment says on how many cores to compute, unless it is set already.

    XLA's CPU client makes so many threads when it is created; it does not promise to read this, and
    tests/runtime/test_cores.py sees that it does.
    """
    if "NPROC" in os.environ:
        yield
        return
    os.environ["NPROC"] = str(count)
    try:
        yield
    finally:
        del os.environ["NPROC"]


def to_compute_on() -> int:
    """How many cores an engine that is being created computes on: as `announced`, or all that are usable."""
    said = os.environ.get("NPROC", "")
    return int(said) if said.isdecimal() and int(said) else len(usable())


def share_blas(devices: int, cores: int) -> None:
    """Have the library that jaxlib's linear algebra calls, SciPy's, compute on the share of each device.

    Every device calls it on a thread of its own, and each such call would share its work among threads for
    all ``cores``: OpenBLAS gives them to one call at a time while the others spin, which takes 20 times as
    long as the work for 8 devices on 2 cores. The setting is the process's; it is lowered only, and not
    where the environment says how many threads there are.
    """
    if any(name in os.environ for name in _SAID):
        return
    threads = max(1, cores // devices)
    with _blas_lock:
        for library in ThreadpoolController().lib_controllers:
            numpys = "numpy.libs" in library.filepath
            if library.user_api == "blas" and not numpys and (library.num_threads or 0) > threads:
                library.set_num_threads(threads)


def patience(places: Sequence[Place], nodes: int) -> float:
    """Seconds for which a thread that waits for another rank may keep a core busy: one figure for all ranks.

    ``nodes``: sets of ranks that share memory, as MPI tells them. A rank that has two cores to itself can
    compute on one and wait on the other: for as long as it likes, or, where messages cross a network, for
    as long as a short one may take. With fewer cores, what waits longer than a message between two
    processes of a node takes leaves its core to those that compute; over a network, or with less than a
    core, nearly at once.
    """
    least = min(share(places, place) for place in set(places))
    if least >= 2:
        return math.inf if nodes == 1 else 1e-3
    return 300e-6 if least >= 1 and nodes == 1 else 50e-6


def patience_of_code(patience: float, nodes: int) -> float:
    """Seconds after which waits in compiled code sleep between polls; others do after ``patience``.

    On one host they are short, and a rank that sleeps is late for the next collective: with less than a
    core for each all ranks take turns at being late. docs/design.md, Waits, has figures.
    """
    return max(patience, 150e-6) if nodes == 1 else patience


def patience_of_callers(places: Sequence[Place]) -> float:
    """Seconds that a caller waits for other ranks before it leaves a small program to the dispatch thread.

    Leaving it costs two thread switches, and makes the other ranks wait for as long: with less patience, one
    late rank makes all of them take turns at being late. A rank is late by the slices of time that others of
    its core get: a `psum` of 8 B took 0.67 and 1.15 ms (medians) beside a busy process with 0.3 ms of
    patience, 0.32 and 0.56 with 1, and no less with more; between eight ranks on two cores 4.5 to 6 ms with
    1 ms, and 0.8 to 1.0 with 4.
    """
    return 1e-3 * max(1.0, 1 / min(share(places, place) for place in set(places)))
