"""Calls that may wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from stretto.runtime.execution.side_by_side import among, beside, side_by_side
from stretto.runtime.execution.stream import Completions


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


def test_calls_that_take_long_are_shared_among_threads() -> None:
    """Two threads take what there is: the first call of each waits until the other thread has one too."""
    barrier, callers = threading.Barrier(2), set[int]()

    def call(number: int) -> Callable[[], int]:
        def made() -> int:
            if threading.get_ident() not in callers:
                callers.add(threading.get_ident())
                barrier.wait(30)
            return number

        return made

    assert among(2, [call(n) for n in range(6)]) == list(range(6))
    assert len(callers) == 2 and threading.get_ident() in callers
    assert among(1, [call(7)]) == [7]
    assert among(3, []) == []


def test_an_error_ends_the_calls_that_have_not_begun() -> None:
    made: list[int] = []

    def fail() -> int:
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        among(1, [fail, lambda: made.append(1) or 1])
    assert made == []


def test_a_call_beside_the_caller_gives_its_result_or_raises() -> None:
    began, go = threading.Event(), threading.Event()
    event = beside(lambda: (began.set(), go.wait(30)))
    assert began.wait(30) and not event.done
    go.set()
    assert event.result() == (None, True)
    with pytest.raises(ZeroDivisionError):
        beside(lambda: 1 // 0).result()


def test_a_call_is_made_here_where_python_begins_no_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr("stretto.runtime.execution.side_by_side._helpers", Completions("test"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert beside(threading.get_ident).result() == threading.get_ident()
    assert among(2, [lambda: 1, lambda: 2]) == [1, 2]
