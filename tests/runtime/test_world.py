"""The world under real mpiexec: joining, normal ends, and every way in which a rank can fail.

Each test that expects a failure would run into its timeout if the failure were not noticed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.mpi import is_hydra, need_hydra, patient, run_ranks

from stretto.collectives import memory
from stretto.runtime.cores import Place
from stretto.runtime.errors import WorldError
from stretto.runtime.job import world
from stretto.runtime.options import Options

SCRIPT = Path(__file__).with_name("world_ranks.py")

mpi = pytest.mark.mpi


def ranks(behaviour: str, n: int = 3, **arguments: object) -> subprocess.CompletedProcess[str]:
    return run_ranks(n, [str(SCRIPT), behaviour], timeout=90, **arguments)  # type: ignore[arg-type]


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    # What another rank is writing may stand before it: the launcher passes on what has come so far.
    return re.findall(r"stretto: rank \d+ ends: .*", done.stderr)


def test_without_a_launcher_a_process_is_a_world_and_mpi_is_not_imported() -> None:
    code = (
        "import sys; from stretto.runtime.job import world; w = world.bootstrap(); "
        "w.check(); w.fail(ValueError('x')); w.check(); "
        "print(w.rank, w.size, w.num_devices, w.comm, 'mpi4py' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"STRETTO_LOCAL_DEVICES": "3"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ["0", "1", "3", "None", "False"]
    assert done.stderr == ""


def test_ranks_of_one_host_share_the_memory_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[int] = []
    monkeypatch.setattr(memory.pool, "share", shares.append)
    here, there = (Place(host, frozenset({0})) for host in ("here", "there"))
    world.World(Options(), places=[here, there, here, here])
    world.World(Options())
    assert shares == [3, 1]


@mpi
def test_ranks_join_and_end_at_different_times_in_peace() -> None:
    done = ranks("describe", env={"STRETTO_LOCAL_DEVICES": "2"})
    assert sorted(done.stdout.split("\n"))[1:] == [f"rank {r} of 3, 6 devices" for r in range(3)]
    assert done.returncode == 0
    assert lines_of(done) == []


@mpi
def test_a_variable_that_is_no_option_is_named_once() -> None:
    done = ranks("describe", env={"STRETTO_TIMOUT": "3"})
    assert done.returncode == 0
    named = (
        "STRETTO_TIMOUT is not an option of stretto, and is ignored. Did you mean STRETTO_TIMEOUT?"
    )
    assert done.stderr.count(named) == done.stderr.count("STRETTO_TIMOUT") == 1


@mpi
def test_what_a_rank_starts_is_a_world_of_its_own() -> None:
    done = ranks("start others", n=2)
    assert done.returncode == 0, done.stderr
    alone = [f"rank {rank} started 0 of 1" for rank in (0, 0, 1, 1)]
    assert sorted(done.stdout.splitlines()) == [*alone, "rank 1 started 0 of 2, 1 of 2"]


@mpi
def test_ranks_started_before_this_one_joined_are_told_what_to_do() -> None:
    """A process between launcher and rank that keeps the launcher's descriptor to itself."""
    need_hydra("the launcher gives its ranks no descriptor")
    code = (
        "import subprocess, sys; raise SystemExit(subprocess.call([sys.executable, '-c', "
        "'from stretto.runtime.job import world; world.bootstrap()']))"
    )
    done = run_ranks(1, ["-c", code], env={"STRETTO_LAUNCHER": "mpi"}, timeout=60)
    assert done.returncode == 1
    assert (
        "WorldError: Hydra (mpiexec of MPICH or Intel MPI) started rank 0 of 1, and" in done.stderr
    )
    assert "set STRETTO_LAUNCHER=none for it" in done.stderr


@mpi
def test_a_rank_that_raises_ends_all_and_says_why() -> None:
    done = ranks("raise")
    assert done.returncode != 0
    # The rank that failed by its traceback, the others in one line.
    said = sorted(lines_of(done))
    assert [line.split(" ends: rank 1 (pid ")[0] for line in said] == [
        "stretto: rank 0",
        "stretto: rank 2",
    ]
    assert all("failed: ValueError: no such file: digits.npz (at " in line for line in said)
    assert done.stderr.count("Traceback") == done.stderr.count("raise ValueError") == 1


@pytest.mark.quick("sys.exit", "caught")
@mpi
@pytest.mark.parametrize("how", ["sys.exit", "SystemExit", "exit", "caught", "all exit"])
def test_the_exit_code_of_a_rank_is_that_of_mpiexec(how: str) -> None:
    done = ranks(how)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert len(lines_of(done)) == (0 if how == "all exit" else 3)


@mpi
def test_sigterm_is_told_where_no_handler_of_python_runs() -> None:
    # As a batch system sends it, to each. Not by mpiexec, and where it cannot reach them: Hydra sends SIGKILL
    # about 1 ms after SIGTERM, and when a rank has ended, to ranks that may not have had a core.
    done = ranks("terminate")
    assert done.returncode != 0
    said = dict(
        re.findall(r"stretto: rank (\d) ends: (SIGTERM: mpiexec|rank \d .* died)", done.stderr)
    )
    # A rank may see another's connection end while its own signal is still on the way.
    assert sorted(said) == ["0", "1", "2"]
    assert "SIGTERM: mpiexec" in said.values()


@mpi
def test_a_thread_that_raises_ends_all() -> None:
    # Else the first rank that ends may make Hydra kill the others, and give their 9 as the code.
    done = ranks("raise in thread", env={"STRETTO_GRACE": "1"}, mpiexec_arguments=patient())
    assert done.returncode == 1
    assert all(
        "rank 1 (pid" in line and "ValueError: invalid literal" in line for line in lines_of(done)
    )
    assert len(lines_of(done)) == 2
    assert done.stderr.count("Traceback") == 1


@mpi
def test_a_reported_failure_is_raised_on_every_rank() -> None:
    # Else the first rank that ends makes Hydra kill the others before they have caught anything.
    done = ranks("fail", mpiexec_arguments=patient())
    assert done.returncode != 0
    caught = sorted(line for line in done.stdout.splitlines() if "caught" in line)
    assert len(caught) == 3
    for rank, line in enumerate(caught):
        assert line.startswith(f"rank {rank} caught RankFailed: rank 1 (pid ")
        assert "RuntimeError: the engine is out of memory" in line


@mpi
def test_a_failed_job_leaves_no_shared_memory_behind() -> None:
    done = ranks("fail")
    mapped = re.findall(r"mapped (/dev/shm/\w+)", done.stdout)
    if not mapped:
        pytest.skip("MPI names no shared memory, or not as MPICH does")
    assert [path for path in mapped if Path(path).exists()] == []


@mpi
def test_a_killed_rank_ends_all_and_is_named() -> None:
    done = ranks("kill", env={"STRETTO_GRACE": "1"})
    assert done.returncode != 0
    said = sorted(lines_of(done))
    assert [line.split(" ends: rank 1 (pid ")[0] for line in said] == [
        "stretto: rank 0",
        "stretto: rank 2",
    ]
    assert all("died: its connection ended without a goodbye" in line for line in said)


@mpi
def test_a_process_whose_thread_keeps_the_lock_of_python_ends_too() -> None:
    done = ranks("lock", env={"STRETTO_GRACE": "1"})
    assert done.returncode != 0
    assert len(lines_of(done)) == 2
    # What the interpreter's own watchdog says, with the line at which each thread is.
    assert "Timeout (0:00:04)!" in done.stderr
    assert re.search(r"File \S*world_ranks\.py\S*, line \d+ in <lambda>", done.stderr)


@mpi
def test_a_rank_that_leaves_while_others_wait_for_it() -> None:
    done = ranks("leave", env={"STRETTO_GRACE": "1"})
    assert done.returncode != 0
    assert len(lines_of(done)) == 3
    for line in lines_of(done):
        assert "rank 1 (pid " in line
        assert "left the job too early: it ended while rank" in line
        assert "waits for it in all-reduce.3 (train.py:12)" in line


@mpi
def test_a_collective_that_a_rank_never_reaches_times_out_on_all() -> None:
    done = ranks("idle", env={"STRETTO_TIMEOUT": "2", "STRETTO_GRACE": "1"})
    assert done.returncode != 0
    said = lines_of(done)
    assert len(said) == 3
    for line in said:
        assert line.endswith(
            "all-reduce.3 (train.py:12) timed out after 2 s (STRETTO_TIMEOUT): rank 1 did not reach it"
        )
    assert done.stderr.count("last completed all-reduce.3") == 3  # a line for each rank, by rank 0
    assert "in no collective, last completed all-reduce.3 (train.py:12)" in done.stderr
    assert "world_ranks.py" in done.stderr


@mpi
def test_a_rank_that_ends_before_it_joined_ends_the_others() -> None:
    code = (
        "import os\n"
        "if os.environ['PART'] == 'deserter': raise SystemExit(3)\n"
        "from stretto.runtime.job import world; world.bootstrap()"
    )
    parts = {0: {"PART": "member"}, 1: {"PART": "deserter"}}
    # Launchers other than Hydra end the job by themselves.
    done = run_ranks(2, ["-c", code], rank_env=parts, timeout=60)
    assert done.returncode != 0
    if is_hydra():
        (line,) = lines_of(done)
        assert "ended before all ranks had joined the job" in line


@mpi
@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (
            {"STRETTO_LOCAL_DEVICES": "2"},
            "the ranks differ in the number of local devices (STRETTO_LOCAL_DEVICES): "
            "1 on rank 0; 2 on rank 1. It must be the same on all",
        ),
        ({"STRETTO_TIMEOUT": "soon"}, "rank 1 cannot join: STRETTO_TIMEOUT is 'soon'"),
    ],
)
def test_what_is_wrong_with_one_rank_is_raised_on_all(own: dict[str, str], expected: str) -> None:
    done = run_ranks(2, [str(SCRIPT), "describe"], rank_env={1: own}, timeout=60)
    assert done.returncode != 0
    assert done.stderr.count(f"WorldError: {expected}") == 2


def test_ranks_without_mpi4py_are_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setattr(world, "_world", None)
    with pytest.raises(WorldError) as caught:
        world.bootstrap(Options())
    text = str(caught.value)
    assert "started this process as rank 1 of 4" in text
    assert "pip install 'stretto[mpi]'" in text
    assert "STRETTO_LAUNCHER=none" in text


def test_a_launcher_of_another_mpi_is_noticed() -> None:
    pytest.importorskip("mpi4py")
    code = "from stretto.runtime.job import world; world.bootstrap()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Slurm's srun started 4 ranks, but" in done.stderr
    assert "sees only one: launcher and library do not belong together" in done.stderr


def test_launcher_none_makes_every_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setattr(world, "_world", None)
    made = world.bootstrap(Options(launcher="none", local_devices=2))
    assert (made.rank, made.size, made.num_devices, made.comm) == (0, 1, 2, None)
