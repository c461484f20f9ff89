"""Calls that may wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from stretto.runtime.execution.side_by_side import side_by_side


def test_calls_that_meet_in_a_barrier_give_their_results_in_order() -> None:
    barrier = threading.Barrier(9)

    def meet(number: int) -> Callable[[], int]:
        def call() -> int:
            barrier.wait(30)
            return number

        return call

    assert side_by_side([meet(n) for n in range(9)]) == list(range(9))


def test_the_first_error_is_raised_while_others_wait() -> None:
    never, let_go = threading.Event(), threading.Event()

    def wait() -> bool:
        let_go.wait(30)
        return never.is_set()

    def fail() -> bool:
        raise KeyError("its own")

    try:
        with pytest.raises(KeyError, match="its own"):
            side_by_side([wait, fail, wait])
    finally:
        let_go.set()


def test_calls_within_calls() -> None:
    """A function that is called back may call a program that calls back."""

    def inner() -> int:
        return sum(side_by_side([lambda: 1, lambda: 2]))

    assert side_by_side([inner, inner]) == [3, 3]
    assert side_by_side([]) == []
