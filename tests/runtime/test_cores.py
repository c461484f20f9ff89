"""How ranks share cores, by hand."""

from __future__ import annotations

import math

import pytest

from stretto.runtime.cores import Place, patience, share, usable


def place(*cores: int, host: str = "a") -> Place:
    return Place(host, frozenset(cores))


TWO, EIGHT = range(2), range(8)


@pytest.mark.parametrize(
    ("places", "cores"),
    [
        ([place(*TWO)], 2.0),
        ([place(*TWO)] * 4, 0.5),
        ([place(*EIGHT)] * 4, 2.0),
        ([place(0), place(1)], 1.0),  # bound by the launcher
        ([place(0, 1), place(2, 3)], 2.0),
        ([place(*TWO), place(*TWO, host="b")], 2.0),
        ([place(0, 1), place(1, 2)], 1.5),
    ],
)
def test_share(places: list[Place], cores: float) -> None:
    assert share(places, places[0]) == cores


@pytest.mark.parametrize(
    ("places", "seconds"),
    [
        ([place(*EIGHT)] * 4, math.inf),
        ([place(*EIGHT)] * 5, 1e-3),
        ([place(*TWO)] * 2, 1e-3),
        ([place(*TWO)] * 3, 50e-6),
        ([place(*EIGHT), place(*EIGHT, host="b")], 1e-3),
        # the worst place decides for all: they make the same calls
        ([place(*EIGHT), place(0, host="b"), place(0, host="b")], 50e-6),
    ],
)
def test_patience(places: list[Place], seconds: float) -> None:
    assert patience(places) == seconds


def test_this_process_has_a_core() -> None:
    assert usable()
