"""A few of the random programs of `random_schedules`, always the same ones."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from random_schedules import Verdict, judge

# Chosen so that everything that the pass can do is done in one of them.
NAMES = ("7/6", "7/11", "7/21", "7/27", "7/38", "7/47", "7/56")


@cache
def verdict(name: str) -> Verdict:
    return judge(name)


@pytest.mark.quick("7/6")
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_changes_no_bit_and_can_be_run(name: str) -> None:
    verdict(name)


def test_the_programs_have_what_there_is_to_schedule() -> None:
    total = sum((verdict(name).features for name in NAMES), Counter[str]())
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    assert all(total[kind] for kind in kinds)
    assert all(total[what] for what in ("bucket", "early", "late", "planned block"))
