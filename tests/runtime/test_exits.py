"""What is told to other ranks of an exception."""

from __future__ import annotations

from stretto.runtime.errors import CompileError
from stretto.runtime.exits import TRACEBACK_LINES, describe


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
