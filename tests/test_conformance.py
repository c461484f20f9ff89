"""Every program of ``programs`` on stretto, in one process and under mpiexec, against JAX's CPU backend.

All programs of a form run in one launch (see ``stretto.conformance.judge`` and ``support.ahead``). It starts
when the first test here asks for outcomes.
``STRETTO_TEST_FULL=1`` adds the rest of the cross products.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.ahead import Launches

from stretto.conformance import judge
from stretto.conformance.programs import PROGRAMS

FULL = bool(os.environ.get("STRETTO_TEST_FULL"))
QUICK = "8x1"  # the form that every change is tried in
_MARKS = {
    form: [pytest.mark.mpi] * (how.processes > 1) + [pytest.mark.thorough] * (form != QUICK)
    for form, how in judge.FORMS.items()
}


def cases() -> list[Any]:
    """(program, form) pairs, forms outermost so that a session works through one launch at a time."""
    return [
        pytest.param(form, name, marks=marks)
        for form, marks in _MARKS.items()
        for name, program in PROGRAMS.items()
        if form in program.forms and (FULL or not program.only_full)
    ]


Outcomes = Callable[[str], dict[str, judge.Outcome]]


@pytest.fixture(scope="session")
def outcomes(launches: Launches) -> Outcomes:
    """Outcomes by form, for the programs that this session collected, each form launched once."""
    return functools.cache(launches.get)


@pytest.fixture(scope="session")
def references(outcomes: Outcomes) -> Callable[[str], dict[str, np.ndarray]]:
    """A program's right answer: computed by numpy where the program says how, else by the CPU backend."""

    def get(name: str) -> dict[str, np.ndarray]:
        expected = PROGRAMS[name].expected
        if expected is not None:
            return dict(expected())
        outcome = outcomes(judge.REFERENCE.name)[name]
        if outcome.problem:
            pytest.fail(f"JAX's CPU backend does not run {name}: {outcome.problem}")
        return judge.assemble(outcome.load())

    return get


@pytest.mark.parametrize(("form", "name"), cases())
def test_program(
    form: str,
    name: str,
    outcomes: Outcomes,
    references: Callable[[str], dict[str, np.ndarray]],
) -> None:
    if judge.FORMS[form].processes > 1 and judge.find_mpiexec() is None:
        pytest.skip("no mpiexec: install the extra 'mpi', or an MPI")
    program = PROGRAMS[name]
    want = references(name)
    outcome = outcomes(form)[name]
    if outcome.problem:
        pytest.fail(outcome.problem, pytrace=False)
    problems = judge.differences(want, outcome.load(), program.exact, program.rtol)
    if problems:
        pytest.fail("\n".join(problems[:8]), pytrace=False)
