"""Compiled code that calls collectives between processes: results, counts and faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.mpi import run_ranks

HERE = Path(__file__).parent
pytestmark = pytest.mark.mpi
# The sum in the loop of `native_faults`, as messages name it.
SUM = (
    r"all-reduce %psum\S* \(\S*native_faults\.py:40\) of jit_f "
    r"\(called at \S*native_faults\.py:\d+ in looped\)"
)


@pytest.mark.thorough
@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.parametrize(("ranks", "local"), [(2, 2), (4, 1)])
def test_the_cases_of_one_process(ranks: int, local: int, shared: str) -> None:
    """One device in each process waits where it is; several are run on by the thread that polls. Messages go
    through shared memory, or over MPI as between hosts."""
    done = run_ranks(
        ranks,
        HERE / "native_ranks.py",
        env={
            "JAX_PLATFORMS": "stretto",
            "STRETTO_LOCAL_DEVICES": str(local),
            "STRETTO_SHARED_MEMORY": shared,
        },
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.parametrize("local", ["1", "2"])
def test_messages_that_run_ahead_and_memory_that_is_used_again(local: str, shared: str) -> None:
    env = {
        "JAX_PLATFORMS": "stretto",
        "STRETTO_LOCAL_DEVICES": local,
        "STRETTO_SHARED_MEMORY": shared,
        "STRETTO_TIMEOUT": "20",
    }
    done = run_ranks(2, HERE / "shared_ranks.py", env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def faulty(case: str, local: int) -> str:
    """What the ranks say in the end."""
    done = run_ranks(
        2,
        [str(HERE / "native_faults.py"), case],
        env={
            "JAX_PLATFORMS": "stretto",
            "STRETTO_LOCAL_DEVICES": str(local),
            "STRETTO_TIMEOUT": "2",
            "STRETTO_GRACE": "2",
        },
        timeout=60,
    )
    assert done.returncode != 0
    assert "no end of the job" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("local", [1, 2])
class TestFaults:
    """Each ends the job, where compiled code would otherwise poll for ever."""

    @pytest.mark.quick("2")
    def test_a_rank_that_dies(self, local: int) -> None:
        said = faulty("dies", local)
        assert re.search(r"stretto: rank 0 ends: rank 1 \(pid \d+ on \S+\) died", said)

    @pytest.mark.quick("1")
    def test_a_rank_that_raises(self, local: int) -> None:
        said = faulty("raises", local)
        assert re.search(
            r"rank 0 ends: rank 1 .* failed: ValueError: something else went wrong", said
        )

    @pytest.mark.quick("1")
    def test_a_rank_that_leaves_the_loop(self, local: int) -> None:
        said = faulty("diverges", local)
        assert re.search(
            rf"{SUM} timed out after 2 s \(STRETTO_TIMEOUT\): rank 0 did not reach it", said
        )
        assert re.search(rf"rank 1 .*: in {SUM} for \d", said)
        assert re.search(rf"rank 0 .*: in no collective, last completed {SUM}", said)

    def test_a_rank_that_dies_before_a_single_sum(self, local: int) -> None:
        """Which the caller's thread has begun, where it has one device."""
        said = faulty("dies before one", local)
        assert re.search(r"stretto: rank 0 ends: rank 1 \(pid \d+ on \S+\) died", said)

    @pytest.mark.quick("1")
    def test_a_rank_that_dies_before_what_it_sent_is_read(self, local: int) -> None:
        """What other ranks have not mapped of its memory is gone with it."""
        said = faulty("dies unread", local)
        assert re.search(r"stretto: rank 0 ends: rank 1 \(pid \d+ on \S+\) died", said)
        assert "cannot be mapped" not in said

    @pytest.mark.thorough
    def test_a_rank_that_never_comes_to_a_single_sum(self, local: int) -> None:
        said = faulty("never comes to one", local)
        assert re.search(
            r"all-reduce \S+ \(\S*native_faults\.py:\d+\) of jit_single .* timed out after 2 s .*"
            r"rank 1 did not reach it",
            said,
        )

    @pytest.mark.quick("1")
    def test_a_rank_that_never_comes(self, local: int) -> None:
        said = faulty("never comes", local)
        assert re.search(
            r"the first run of jit_f .* timed out after 2 s .*rank 1 did not reach it", said
        )
