"""Collectives between GPUs by MPI on their memory, over the fake driver. See gpu_mpi_ranks.py."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import cuda
from support.mpi import run_ranks

from stretto.collectives.gpu_mpi import library_takes

SCRIPT = Path(__file__).with_name("gpu_mpi_ranks.py")


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    if not shutil.which("cc"):
        pytest.skip("the fake CUDA driver is built with a C compiler (cc), and there is none")
    return cuda.environment(tmp_path_factory.mktemp("cuda")) | {
        "PYTHONPATH": str(SCRIPT.parents[1])
    }


@pytest.mark.quick("2,1")
@pytest.mark.mpi
@pytest.mark.parametrize("devices", ["1,1,1,1", "2,2", "2,1", "3,1,2"])
def test_collectives_on_device_memory(fake: dict[str, str], devices: str) -> None:
    ranks = devices.count(",") + 1
    done = run_ranks(
        ranks, [str(SCRIPT), devices], env=fake | {"FAKE_CUDA_DELAY_US": "200"}, timeout=120
    )
    assert done.returncode == 0, done.stderr + done.stdout
    match = re.search(r"^checked (\d+): (.*)$", done.stdout, re.MULTILINE)
    assert match, done.stdout + done.stderr
    assert int(match[1]) > 40
    assert match[2].split() == [
        "all-gather",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
    ]


@pytest.mark.mpi
def test_a_wait_that_is_left_out_shows(fake: dict[str, str]) -> None:
    """The delays of the fake's streams are such that the test above fails where MPI does not wait."""
    late = fake | {"FAKE_CUDA_DELAY_US": "2000"}
    done = run_ranks(2, [str(SCRIPT), "2,1", "hasty"], env=late, timeout=120)
    assert done.returncode != 0
    assert "wrong; the first:" in done.stderr


def queried(supported: int, failed: int = 0) -> Callable[[Any, Any], int]:
    """MPICH's question."""

    def query(kind: Any, answer: Any) -> int:
        assert kind.value == 0  # MPIX_GPU_SUPPORT_CUDA
        answer._obj.value = supported
        return failed

    return query


@pytest.mark.parametrize(
    ("functions", "answer"),
    [
        ({"MPIX_GPU_query_support": queried(1)}, (True, "by MPIX_GPU_query_support")),
        ({"MPIX_GPU_query_support": queried(0)}, (False, "by MPIX_GPU_query_support")),
        ({"MPIX_GPU_query_support": queried(1, 15)}, (False, "by MPIX_GPU_query_support")),
        ({"MPIX_Query_cuda_support": lambda: 1}, (True, "by MPIX_Query_cuda_support")),
        ({"MPIX_Query_cuda_support": lambda: 0}, (False, "by MPIX_Query_cuda_support")),
        ({}, (False, "its library does not say")),
    ],
)
def test_libraries_say_whether_they_take_device_pointers(
    functions: dict[str, Any], answer: tuple[bool, str]
) -> None:
    assert library_takes(SimpleNamespace(**functions)) == answer
