"""Which of several ways to split a program is taken, where the planner's times are made up here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from stretto.hlo_frontend.passes.split.choose import _Candidate, _decide, _Form

# The forms of a region are decided by what it takes by itself; a program's by what the program takes.
ROTATED, FEW, PIECES = (
    _Form(4, False, 5.0, 0.0),
    _Form(2, False, 6.0, 0.0),
    _Form(4, True, 7.0, 0.0),
)


class Trial:
    """``seconds``: of the program, by how its regions are split: (tiles, pieces) of each, by block."""

    def __init__(
        self, seconds: dict[tuple[tuple[int, int, bool], ...], float], peak: int = 100
    ) -> None:
        self.seconds = seconds
        self.peak = peak
        self.policy = SimpleNamespace(memory_factor=1.1, least_gain=0.03)
        self.tried: list[tuple[tuple[int, int, bool], ...]] = []

    def planned(self, decisions) -> tuple[float, int, dict[str, float]]:
        key = tuple((d.block, d.tiles, d.pieces) for d in decisions)
        self.tried.append(key)
        return self.seconds.get(key, 10.0), self.peak, {}


def candidate(block: int, *forms: _Form, before: float = 8.0) -> _Candidate:
    return _Candidate(
        members=[(block, 0, SimpleNamespace(size=2))],  # type: ignore[list-item]
        before=before,
        forms=list(forms),
    )


def decide(trial: Trial, *candidates: _Candidate, size: int = 10) -> float:
    return _decide(candidates, trial, 10.0, 100, size)  # type: ignore[arg-type]


@pytest.mark.parametrize("best", [ROTATED, FEW, PIECES])
def test_the_form_with_which_the_program_is_fastest_is_taken(best: _Form) -> None:
    # By itself the region is fastest rotated into 4 tiles, whichever it is in the program.
    one = candidate(0, ROTATED, FEW, PIECES)
    times = {((0, f.tiles, f.pieces),): 9.0 for f in (ROTATED, FEW, PIECES)}
    trial = Trial(times | {((0, best.tiles, best.pieces),): 8.0})
    assert decide(trial, one) == 8.0
    assert one.form is best
    assert len(trial.tried) == len(set(trial.tried)) == 3


def test_a_program_stays_whole_where_it_gains_less_than_asked() -> None:
    one = candidate(0, ROTATED, PIECES)
    assert decide(Trial({((0, 4, False),): 9.8, ((0, 4, True),): 9.75}), one) == 10.0
    assert one.form is None and one.why == "the program would not take 3% less time"


def test_what_the_parts_take_beyond_the_plan_counts() -> None:
    dear = _Form(4, False, 5.0, overhead=1.5)
    one = candidate(0, dear, FEW)
    assert decide(Trial({((0, 4, False),): 8.0, ((0, 2, False),): 9.0}), one) == 9.0
    assert one.form is FEW


def test_a_program_that_needs_too_much_memory_stays_whole() -> None:
    one = candidate(0, ROTATED)
    assert decide(Trial({((0, 4, False),): 5.0}, peak=111), one) == 10.0
    assert one.form is None and one.why == "the program would need too much memory"


def test_regions_are_split_one_by_one_where_all_together_do_not_pay() -> None:
    least, most = candidate(0, ROTATED, before=6.0), candidate(1, ROTATED, before=9.0)
    both = ((0, 4, False), (1, 4, False))
    trial = Trial({both: 11.0, ((1, 4, False),): 9.0, ((0, 4, False),): 9.0})
    assert decide(trial, least, most) == 9.0
    assert (least.form, most.form) == (None, ROTATED)
    # The one that saves most by itself is looked at first, then the other beside it.
    assert trial.tried == [both, ((1, 4, False),), both]


def test_large_programs_are_tried_once() -> None:
    one, other = candidate(0, ROTATED, PIECES), candidate(1, ROTATED, PIECES)
    trial = Trial({((0, 4, True), (1, 4, True)): 5.0})
    assert decide(trial, one, other, size=4001) == 10.0
    assert trial.tried == [((0, 4, False), (1, 4, False))]
