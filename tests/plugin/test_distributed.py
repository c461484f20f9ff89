"""Processes started by hand that join `jax.distributed`: stretto's ranks find each other through it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.mpi import find_mpiexec, need_hydra, run_ranks

pytestmark = pytest.mark.mpi

# Why these are not tried with Open MPI.
NEEDS_LAUNCHER = "this MPI finds its ranks only if its own launcher starts them"
SCRIPT = str(Path(__file__).with_name("distributed_rank.py"))


def _address() -> str:
    with socket.create_server(("localhost", 0)) as server:
        return f"localhost:{server.getsockname()[1]}"


def _run(what: Sequence[str], **variables: str) -> list[CompletedProcess[str]]:
    """A process for each item of ``what``. Those that wait are killed when the others have ended."""
    if find_mpiexec() is None:
        pytest.skip("no MPI: pip install 'stretto[mpi]'")
    address = _address()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "STRETTO_"))}
    environment |= {"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": "2", **variables}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, address, str(len(what)), str(rank), action],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, action in enumerate(what)
    ]
    try:
        outputs = [
            process.communicate(timeout=100)
            for process, action in zip(processes, what, strict=True)
            if action != "wait"
        ]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    ended = [p for p, action in zip(processes, what, strict=True) if action != "wait"]
    return [
        CompletedProcess(p.args, p.returncode, *output)
        for p, output in zip(ended, outputs, strict=True)
    ]


def test_they_make_one_world() -> None:
    need_hydra(NEEDS_LAUNCHER)
    size = 3
    for rank, process in enumerate(_run(["compute"] * size)):
        assert process.returncode == 0, process.stderr
        assert "write_line" not in process.stderr  # MPI's goodbye was answered
        assert json.loads(process.stdout) == [rank, size, 2 * size, 2, sum(range(2 * size))]


@pytest.mark.quick("inf")
@pytest.mark.parametrize("timeout", ["inf", "1e9"])
def test_any_timeout_can_be_waited_for(timeout: str) -> None:
    need_hydra(NEEDS_LAUNCHER)
    for process in _run(["compute"] * 2, STRETTO_TIMEOUT=timeout):
        assert process.returncode == 0, process.stderr


@pytest.mark.thorough
def test_each_alone_if_told_so() -> None:
    for process in _run(["compute"] * 2, STRETTO_LAUNCHER="none"):
        assert process.returncode == 0, process.stderr
        assert json.loads(process.stdout)[1:4] == [1, 2, 2]


def test_a_process_that_uses_no_device_is_named() -> None:
    (told,) = _run(["wait", "fail"], STRETTO_TIMEOUT="1")
    assert told.returncode == 3, told.stderr
    expected = (
        "process 0 of the 2 that jax.distributed joined did not make JAX's devices within 1 s "
        "(STRETTO_TIMEOUT) of process 1"
    )
    assert expected in told.stdout


def test_under_mpiexec_the_numbers_must_be_mpis() -> None:
    address = _address()
    crossed = {rank: {"NUMBER": str(1 - rank)} for rank in range(2)}
    code = (
        "import os, jax\n"
        f"jax.distributed.initialize({address!r}, num_processes=2, process_id=int(os.environ['NUMBER']))\n"
        "try: jax.devices()\n"
        "except RuntimeError as error: print(error, flush=True)\n"
        "jax.distributed.shutdown()\n"
    )
    done = run_ranks(2, ["-c", code], env={"JAX_PLATFORMS": "stretto"}, rank_env=crossed)
    assert done.stdout.count("rank 0 of 2, jax.distributed calls it 1 of 2. Give ") == 2


def test_under_mpiexec_it_needs_no_arguments() -> None:
    code = (
        "import jax\n"
        "jax.distributed.initialize()\n"
        "from jax.experimental import multihost_utils\n"
        "ranks = multihost_utils.process_allgather(jax.process_index())\n"
        "print(jax.process_count(), jax.device_count(), *map(int, ranks), flush=True)\n"
    )
    env = {"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": "2"}
    done = run_ranks(3, ["-c", code], env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["3 6 0 1 2"] * 3
    assert done.stderr == ""  # nor at the end


def test_jaxs_table_of_launchers_is_left_alone_in_other_programs() -> None:
    code = "import sys; print(any('stretto' in type(f).__module__ for f in sys.meta_path))"
    for platforms, expected in (("cpu", "False"), ("stretto,cpu", "True")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "JAX_PLATFORMS": platforms},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == expected


def test_no_option_of_jax_changes_under_a_program_that_makes_devices() -> None:
    code = (
        "import jax\n"
        "before = dict(jax.config.values)\n"
        "print(*{d.platform: d for d in jax.devices() + jax.devices('cpu')})\n"
        "print({k: (v, before[k]) for k, v in jax.config.values.items() if v != before[k]})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "stretto"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["stretto cpu", "{}"], done.stdout
