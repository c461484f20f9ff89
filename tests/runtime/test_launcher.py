"""Launchers are told by the variables that they set."""

from __future__ import annotations

import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor

import pytest

from stretto.runtime.job.launcher import detect, is_cut_off, parent_rank
from stretto.runtime.job.lineage import ancestors


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, ("Hydra", 2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}, ("Open MPI", 1, 8)),
        # Open MPI's launcher is PMIx as well, and its own variables say more.
        (
            {"PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"},
            ("Open MPI", 1, 8),
        ),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "64"}, ("Slurm", 3, 64)),
        # srun with PMI: Slurm's variables count.
        (
            {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "PMI_RANK": "3", "PMI_SIZE": "4"},
            ("Slurm", 3, 4),
        ),
        ({"PMIX_RANK": "5"}, ("a PMIx", 5, 0)),
    ],
)
def test_launchers(environment: dict[str, str], expected: tuple[str, int, int]) -> None:
    found = detect(environment)
    assert found is not None
    assert found.name.startswith(expected[0])
    assert (found.rank, found.size) == expected[1:]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # Inside an allocation, outside srun: the batch script itself.
        {"SLURM_PROCID": "0", "SLURM_JOB_ID": "17", "SLURM_NTASKS": "64"},
        {"PMI_RANK": "none", "PMI_SIZE": "4"},
    ],
)
def test_no_launcher(environment: dict[str, str]) -> None:
    assert detect(environment) is None


def test_a_process_whose_ancestor_left_its_mark_is_no_rank() -> None:
    parent = next(ancestors())
    assert parent.pid == os.getppid()
    rank = {"PMI_RANK": "2", "PMI_SIZE": "4", "_STRETTO_RANK": parent.identity}
    assert parent_rank(rank) == parent.pid
    assert detect(rank) is None
    # The mark of an earlier process with that number, or of one on another host.
    other = {**rank, "_STRETTO_RANK": f"{parent.pid} 1"}
    assert parent_rank(other) is None
    assert detect(other) is not None


def test_the_launcher_is_out_of_reach_where_its_descriptor_is_no_socket() -> None:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    assert not is_cut_off({"PMI_FD": str(ours.fileno())})
    assert not is_cut_off({})
    assert is_cut_off({"PMI_FD": str(reading)})
    closed = ours.detach()
    os.close(closed)
    assert is_cut_off({"PMI_FD": str(closed)})
    assert is_cut_off({"PMI_FD": "9" * 40})
    theirs.close()
    os.close(reading)
    os.close(writing)


def test_a_worker_that_cannot_reach_the_launcher_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "4000"}.items():
        monkeypatch.setenv(name, value)
    assert detect() is not None
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as workers:
        assert workers.submit(detect).result(timeout=60) is None
