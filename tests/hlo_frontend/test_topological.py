"""Topological orders."""

from __future__ import annotations

from stretto.hlo_frontend.topological import topological


def test_of_those_that_may_come_next_the_least_key_is_first():
    before = {"a": ["c"], "b": [], "c": ["d"], "d": [], "e": ["b", "c"]}
    assert topological(before, key=str) == ["b", "d", "c", "a", "e"]
    assert topological(before, key=lambda item: -ord(item)) == ["d", "c", "b", "e", "a"]


def test_an_item_that_is_before_another_one_twice_is_waited_for_once():
    assert topological({1: [0, 0], 0: []}, key=int) == [0, 1]


def test_a_cycle_and_what_is_behind_it_are_missing():
    assert topological({0: [], 1: [0, 2], 2: [1], 3: [2]}, key=int) == [0]
