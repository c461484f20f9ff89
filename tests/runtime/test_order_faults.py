"""Two real ranks whose programs do not fit together: every fault is named on both, and none is waited out.

A fault that was not noticed would hang until the launch's own limit. The ranks' side, `order_ranks`, runs a
healthy program after every fault, so that also what comes after one is tested.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mpi import run_ranks

SCRIPT = Path(__file__).with_name("order_ranks.py")
pytestmark = pytest.mark.mpi
HERE = r"\S*order_ranks\.py:\d+"


def launch(behaviour: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_ranks(
        2,
        [str(SCRIPT), behaviour],
        env={"JAX_PLATFORMS": "stretto", "STRETTO_LOCAL_DEVICES": "2", **environment},
        timeout=100,
    )


@functools.cache
def cases(behaviour: str) -> dict[str, list[dict[str, Any]]]:
    """What both ranks found, by case."""
    done = launch(behaviour)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for line in sorted(done.stdout.splitlines()):
        case = json.loads(line[2:])
        found.setdefault(case["case"], []).append(case)
    assert all(len(ranks) == 2 for ranks in found.values())
    return found


# What each rank has there, as the message must say it, whatever else it says.
COMMUNICATE = r"the ranks do not communicate the same things:\n"
FAULTS = {
    "missing": rf"{COMMUNICATE}  rank 0: all-gather\(f32\[1,8\]\).* at {HERE}\n"
    r"  rank 1: nothing that matches it",
    "extra": rf"{COMMUNICATE}  rank 1: all-reduce\(f32\[8\]\) .* at {HERE}\n"
    r"  rank 0: nothing that matches it",
    "dtype": rf"{COMMUNICATE}  rank 0: all-reduce\(f32\[8\]\) .* at {HERE}\n"
    rf"  rank 1: all-reduce\(bf16\[8\]\) .* at {HERE}",
    "shape": rf"{COMMUNICATE}  rank 0: all-reduce\(f32\[5\]\) .* at {HERE}\n"
    rf"  rank 1: all-reduce\(f32\[8\]\) .* at {HERE}",
    "group": rf"{COMMUNICATE}  rank 0: all-reduce.* of devices \{{0,2\}},\{{1,3\}} .* at {HERE}\n"
    rf"  rank 1: .*in its place: all-reduce.* of devices \{{0,1\}},\{{2,3\}} .* at {HERE}",
    "kind": rf"{COMMUNICATE}  rank 0: all-reduce.* at {HERE}\n  rank 1: all-gather.* at {HERE}",
    "reducer": rf"{COMMUNICATE}  rank 0: all-reduce.*reducer=maximum.* at {HERE}\n"
    rf"  rank 1: all-reduce.*reducer=add.* at {HERE}",
    "swapped tokens": r"contradictory orders:\n"
    rf"(  rank \d: .*\n)*  rank 0: all-gather.* at {HERE} before reduce-scatter.* at {HERE}",
    "swapped tokens, the other way": r"contradictory orders:\n"
    rf"(  rank \d: .*\n)*  rank 0: reduce-scatter.* at {HERE} before all-gather.* at {HERE}",
    "trip count": rf"{COMMUNICATE}  rank 0: loop of 3 iterations .* at {HERE}\n"
    rf"  rank 1: loop of 4 iterations .* at {HERE}",
    "send without recv": r"send_alone cannot run: send\(f32\[4\]\).* has no receive that matches it "
    r"between devices 0 and 2",
    "send without recv, on one rank": rf"{COMMUNICATE}  rank 0: send.*\{{0,2\}}.*\n"
    r"  rank 1: recv.*\{1,3\}",
    "recv without send": r"recv_alone cannot run: recv.* has no send that matches it",
    "recv cycle": r"recv_cycle cannot run: sends and receives wait for each other in a cycle:\n"
    r"(  .*\n)*  .*recv.*\n(  .*\n)*.*send",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_on_both_ranks_and_the_job_goes_on(name: str) -> None:
    ranks = cases("faults")[name]
    assert ranks[0] == ranks[1], "every rank tells the same"
    assert re.search(FAULTS[name], ranks[0]["error"]), ranks[0]["error"]
    assert ranks[0]["healthy"] == [496.0, 496.0]  # the sum of 0..31


def test_every_fault_is_tested() -> None:
    assert cases("faults").keys() == FAULTS.keys()


def test_a_refused_program_is_refused_again_with_all_that_depends_on_it() -> None:
    found = cases("refused_again")
    assert list(found) == ["again", "once", "what depends on it"]
    for ranks in found.values():
        for rank in ranks:
            assert "FAILED_PRECONDITION: CollectiveMismatch: " in rank["error"]
            assert "reducer=maximum" in rank["error"]
            assert rank["healthy"] == [496.0, 496.0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["chained", "reconciled"])
def test_programs_that_differ_in_all_but_communication_run_a_thousand_times(name: str) -> None:
    x = np.arange(4.0) + 10 * np.arange(4.0)[:, None]
    for rank, found in enumerate(cases("orders")[name]):
        scattered = np.split(-(x[0] + x[2]), 2), np.split(-(x[1] + x[3]), 2)
        expected = [
            [*x[0], *x[2], *scattered[0][rank]],
            [*x[1], *x[3], *scattered[1][rank]],
        ]
        np.testing.assert_array_equal(found["result"], expected)


def test_programs_with_other_compute_need_no_reconciliation() -> None:
    x = np.arange(32.0).reshape(4, 8)
    doubled = 2 * np.array([x[0] + x[2], x[1] + x[3]]) + 1
    ranks = cases("orders")["other compute"]
    np.testing.assert_array_equal(ranks[0]["result"], doubled.sum(1))
    np.testing.assert_array_equal(ranks[1]["result"], [40.0, 40.0])


def test_the_ring_of_sends_and_receives_works() -> None:
    x = np.arange(32.0).reshape(4, 8).sum(1)
    ranks = cases("ring")
    assert [r["result"] for r in ranks["ring"]] == [[x[2], x[3]], [x[0], x[1]]]
    assert [r["result"] for r in ranks["chained ring"]] == [[x[0] + x[2], x[1] + x[3]]] * 2
    # Only the source of the way back is a target of the way there.
    assert [r["result"] for r in ranks["there and back"]] == [[x[0] + 8, x[1] + 8], [0.0, 0.0]]


def test_a_rank_may_load_a_program_anew_that_the_other_still_has() -> None:
    ranks = cases("loaded_anew")["loaded anew"]
    assert ranks[0]["result"][0][:8] == ranks[1]["result"][0][:8] == [0, 1, 2, 3, 20, 21, 22, 23]


def ends(behaviour: str, **environment: str) -> list[str]:
    """What rank 0 of a job that fails says to stderr; the other says the first line of it."""
    done = launch(behaviour, STRETTO_GRACE="1", **environment)
    assert done.returncode != 0
    # Open MPI's launcher says in the end which rank was the first, below a line of dashes.
    by_ranks, *_ = re.split(r"^-{40,}$", done.stderr, flags=re.MULTILINE)
    said = re.split(r"stretto: rank (\d) ends: ", by_ranks)[1:]
    told = dict(zip(said[::2], said[1::2], strict=True))
    assert len(said) == 4, done.stderr
    assert len(told["1"].splitlines()) == 1
    assert told["0"].startswith(told["1"].rstrip())
    return [told["0"]]


@pytest.mark.quick("other_program-gather")
@pytest.mark.parametrize(
    ("behaviour", "odd"), [("other_program", "gather"), ("other_compute", "doubled_and_psum")]
)
def test_programs_in_another_order_end_the_job_and_are_named(behaviour: str, odd: str) -> None:
    for text in ends(behaviour):
        assert re.match(
            r"the ranks run different programs, or in different orders: run 103 of processes 0-1 is\n"
            rf"  rank 0: jit_{odd} \(called at {HERE} in other_program\)\n"
            rf"  rank 1: jit_psum \(called at {HERE} in other_program\)\n",
            text,
        ), text


@pytest.mark.quick("silent")
@pytest.mark.parametrize("behaviour", ["silent", "silent_at_the_end"])
def test_a_program_without_collectives_where_the_other_has_some(behaviour: str) -> None:
    for text in ends(behaviour):
        assert re.match(
            rf"{COMMUNICATE}  rank 1: jit_step \(called at {HERE} in run\) has collectives .*\n"
            rf"  rank 0: jit_step \(called at {HERE} in run\) has none",
            text,
        ), text


def test_a_rank_that_never_calls_is_named_by_the_watchdog() -> None:
    for text in ends("never", STRETTO_TIMEOUT="2"):
        head, absent, present, *_ = text.splitlines()
        assert re.fullmatch(
            rf"the first run of jit_psum \(called at {HERE} in run\) timed out after 2 s "
            r"\(STRETTO_TIMEOUT\): rank 1 did not reach it",
            head,
        )
        last = (
            rf"last completed all-reduce \S+ \({HERE}\) of jit_healthy \(called at {HERE} in run\)"
        )
        assert re.fullmatch(
            rf"  rank 1 \(.*\): in no collective, {last} .* s ago, main thread at {HERE} in never",
            absent,
        ), absent
        assert re.fullmatch(
            rf"  rank 0 \(.*\): in the first run of jit_psum .* for .* s, {last} .* s ago, "
            rf"main thread at {HERE} in run",
            present,
        ), present


def test_an_uncaught_mismatch_ends_the_job() -> None:
    done = launch("uncaught")
    assert done.returncode != 0
    assert (
        done.stderr.count(
            "jax.errors.JaxRuntimeError: FAILED_PRECONDITION: CollectiveMismatch: the programs of"
        )
        >= 2
    )
