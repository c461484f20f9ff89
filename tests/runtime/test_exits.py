"""What is told of an exception, here and to other ranks, and with which status a process ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from stretto.runtime.errors import CompileError
from stretto.runtime.execution.called_back import without_our_frames
from stretto.runtime.job import exits
from stretto.runtime.job.control import in_a_line
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


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(3)", 3),
        ("leave(3)", 3),  # from sys import exit as leave
        ("raise SystemExit(3)", 3),
        ("exit(259)", 3),
        ("sys.exit(-1)", 255),
        ("sys.exit()", 0),
        ("sys.exit(None)", 0),
        ("sys.exit('no such file')", 1),
        ("raise SystemExit(2, 3)", 1),
        ("raise SystemExit", 0),
        ("pass", 0),
        ("raise ValueError", 1),
    ],
)
def test_the_status_is_known_before_python_ends(code: str, status: int) -> None:
    before = (
        "import atexit, sys; from sys import exit as leave; from stretto.runtime.job import _ends, exits; "
        "_ends.note_status(); exits.on_uncaught(lambda error: None, lambda: ''); "
        "atexit.register(lambda: print(exits.status()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{code}"], capture_output=True, text=True, check=False
    )
    assert (int(done.stdout), done.returncode) == (status, status)


def test_an_error_of_another_rank_that_has_been_told_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    failed = []
    for hook in ("excepthook", "__excepthook__"):
        monkeypatch.setattr(sys, hook, lambda kind, error, trace: print(error, file=sys.stderr))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(exits, "_uncaught", False)
    exits.on_uncaught(failed.append, lambda: "rank 1 failed: no")
    for text in ("ABORTED: rank 1 failed: no\n  | more", "mine"):
        sys.excepthook(RuntimeError, RuntimeError(text), None)
    assert capfd.readouterr().err == "mine\n"
    assert len(failed) == 2


def test_a_failure_in_a_line() -> None:
    assert in_a_line(ValueError("no\nsuch")) == "no"
    raised = "step: calling back: Traceback (most recent call last):\n  File\nValueError: no\n"
    assert in_a_line(ValueError(raised)) == "step: calling back: ValueError: no"


def test_a_traceback_has_no_frames_of_ours() -> None:
    ours = Path(exits.__file__).parents[2]
    text = "\n".join(
        [
            "segment a: Traceback (most recent call last):",
            f'  File "{threading.__file__}", line 1, in _bootstrap',
            f'  File "{ours / "runtime/execution/stream.py"}", line 2, in _work',
            "    self._run()",
            '  File "/home/me/train.py", line 3, in log',
            "    raise ValueError",
            f'  File "{threading.__file__}", line 4, in start',
            "ValueError: no",
        ]
    )
    assert without_our_frames(text).splitlines() == [
        "segment a: Traceback (most recent call last):",
        *text.splitlines()[4:],
    ]
