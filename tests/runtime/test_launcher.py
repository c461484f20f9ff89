"""Launchers are told by the variables that they set."""

from __future__ import annotations

import pytest

from stretto.runtime.launcher import detect


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
