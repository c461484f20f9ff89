"""The judge of the conformance programs sees every kind of difference and names every kind of failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.ahead import Launches

from stretto.conformance import judge

WHOLE = np.arange(8, dtype=np.float32).reshape(4, 2)


def rank(*shards: tuple[slice, np.ndarray], **changes: Any) -> dict[str, dict[str, Any]]:
    """One rank's result "out" of shape (4, 2), holding the given rows."""
    spans = [(((s.start, s.stop), (0, 2)), data) for s, data in shards]
    return {"out": {"shape": (4, 2), "dtype": "float32", "shards": spans} | changes}


def both(data: np.ndarray) -> list[dict[str, dict[str, Any]]]:
    return [rank((slice(0, 2), data[:2])), rank((slice(2, 4), data[2:]))]


def test_equal_results_pass() -> None:
    assert judge.differences({"out": WHOLE}, both(WHOLE), True, None) == []
    assert judge.assemble(both(WHOLE))["out"].tolist() == WHOLE.tolist()


def test_one_wrong_element_is_found_with_its_rank() -> None:
    changed = WHOLE.copy()
    changed[3, 1] += 1
    (problem,) = judge.differences({"out": WHOLE}, both(changed), False, None)
    assert "rank 1" in problem and "1 of 4 differ, first at (1, 1)" in problem


def test_swapped_shards_are_found() -> None:
    swapped = [rank((slice(0, 2), WHOLE[2:])), rank((slice(2, 4), WHOLE[:2]))]
    assert len(judge.differences({"out": WHOLE}, swapped, True, None)) == 2


def test_uncovered_elements_are_found() -> None:
    (problem,) = judge.differences({"out": WHOLE}, both(WHOLE)[:1], True, None)
    assert "4 elements on no rank" in problem


@pytest.mark.parametrize(
    "changes", [{"dtype": "float16"}, {"shape": (4, 2, 1)}], ids=["dtype", "shape"]
)
def test_other_type_is_found(changes: dict[str, Any]) -> None:
    wrong = [rank((slice(0, 4), WHOLE), **changes)]
    assert any(
        "expected float32[4, 2]" in p for p in judge.differences({"out": WHOLE}, wrong, True, None)
    )


def test_missing_and_unexpected_results_are_found() -> None:
    assert judge.differences({"out": WHOLE, "more": WHOLE}, both(WHOLE), True, None)
    assert judge.differences({}, both(WHOLE), True, None)


def test_tolerance_is_for_rounding_only() -> None:
    near, far = WHOLE * (1 + 1e-6), WHOLE * (1 + 1e-3)
    assert judge.mismatch(WHOLE, near, False, None) is None
    assert judge.mismatch(WHOLE, near, True, None)
    assert judge.mismatch(WHOLE, far, False, None)
    assert judge.mismatch(WHOLE, far, False, 1e-2) is None


def test_integers_are_exact_whatever_the_tolerance() -> None:
    a = np.array([1000], np.int32)
    assert judge.mismatch(a, a + 1, False, 1.0)
    assert judge.mismatch(a.astype(bool), a == 0, False, 1.0)
    narrow = np.array([3], ml_dtypes.int4)
    assert judge.mismatch(narrow, -narrow, False, 1.0)


def test_nan_and_infinity() -> None:
    a = np.array([np.nan, np.inf, 1], np.float32)
    assert judge.mismatch(a, a.copy(), True, None) is None
    for i, other in enumerate((0, -np.inf, np.nan)):
        b = a.copy()
        b[i] = other
        assert judge.mismatch(a, b, False, 1.0)
    bf16 = np.array([1, 2], ml_dtypes.bfloat16)
    assert judge.mismatch(bf16, bf16 * 2, False, None)


@pytest.mark.thorough
def test_failures_are_named_and_the_rest_runs(tmp_path: Path) -> None:
    """A crash, a hang or an exit costs its program only; the launch is started again after it."""
    names = ["raises", "crashes", "right", "hangs", "exits", "wrong", "right_again"]
    path = str(Path(__file__).parent)
    form = judge.Form("cpu", 1, 1, "cpu", settings=(("PYTHONPATH", path),))
    outcomes = judge.run_programs(form, names, tmp_path, 6.0, "support.misbehaving")
    assert list(outcomes) == names
    assert "the program's own message" in (outcomes["raises"].problem or "")
    for name in ("crashes", "hangs", "exits"):
        assert f"in the middle of {name}" in (outcomes[name].problem or "")
    assert "in hangs" in (outcomes["hangs"].problem or "")
    want = {"out": np.arange(3, dtype=np.float32)}
    for name in ("right", "right_again"):
        assert judge.differences(want, outcomes[name].load(), True, None) == []
    assert judge.differences(want, outcomes["wrong"].load(), True, None)


def test_launches_that_are_stopped_say_so(tmp_path: Path) -> None:
    """As at the end of a session that was broken off: nothing goes on, and nothing is taken for a result."""
    launches = Launches(tmp_path, {"1x8": ["psum/float32"]})
    launches.start()
    launches.stop()
    with pytest.raises(RuntimeError, match="the judge of 1x8 ended without outcomes"):
        launches.get("1x8")
