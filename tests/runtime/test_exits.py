"""What is told to other ranks of an exception."""

from __future__ import annotations

import sys

import pytest

from stretto.runtime.errors import CompileError
from stretto.runtime.job import exits
from stretto.runtime.job.exits import TRACEBACK_LINES, await_at_exit, describe
from stretto.runtime.options import Options


def _raise(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_error_of_the_program_comes_with_the_end_of_its_traceback() -> None:
    first, *tail = describe(_raise(ValueError("no digits\nat all"))).splitlines()
    assert first.startswith("ValueError: no digits (at ")
    assert first.endswith(f"{__file__}:{_raise.__code__.co_firstlineno + 2})")
    assert 0 < len(tail) <= TRACEBACK_LINES
    assert tail[-1] == "  | at all"


def test_an_error_of_ours_is_its_message() -> None:
    assert describe(_raise(CompileError("dot.1 (x.py:3): refused"))) == (
        "CompileError: dot.1 (x.py:3): refused"
    )


def test_an_error_that_was_never_raised() -> None:
    assert describe(KeyError("x")) == "KeyError: 'x'"


class Ended(BaseException):
    pass


@pytest.fixture
def pressed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The process would end where `Ended` is raised."""

    def end() -> None:
        raise Ended

    monkeypatch.setattr(exits, "_end_by_interrupt", end)
    monkeypatch.setattr(exits, "in_force", lambda: Options(grace=3.0))
    ticks = iter(range(100))
    monkeypatch.setattr(exits, "monotonic", lambda: float(next(ticks)))
    return monkeypatch


def test_what_ends_by_itself_is_awaited(pressed: pytest.MonkeyPatch) -> None:
    answers = iter([False] * 50 + [True])
    await_at_exit(lambda seconds: next(answers))
    assert not list(answers)


def test_an_uncaught_ctrl_c_gives_it_grace(
    pressed: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pressed.setattr(sys, "last_type", KeyboardInterrupt, raising=False)
    asked = []
    with pytest.raises(Ended):
        await_at_exit(lambda seconds: bool(asked.append(seconds)))
    assert len(asked) == 4
    assert capfd.readouterr().err == (
        "stretto: a program was still running 3 s (STRETTO_GRACE) after Ctrl-C\n"
    )
    pressed.setattr(sys, "ps1", ">>> ", raising=False)  # that was a while ago
    answers = iter([False] * 50 + [True])
    await_at_exit(lambda seconds: next(answers))


def test_ctrl_c_at_the_end_gives_it_grace_and_the_next_none(pressed: pytest.MonkeyPatch) -> None:
    asked = []

    def interrupt(seconds: float) -> bool:
        asked.append(seconds)
        if len(asked) in (2, 4):
            raise KeyboardInterrupt
        return False

    with pytest.raises(Ended):
        await_at_exit(interrupt)
    assert len(asked) == 4
