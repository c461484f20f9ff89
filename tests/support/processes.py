"""Running a command that has to end: one that does not is killed, and the test gets its Python stacks."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

import pytest


def finished(
    command: Sequence[str], env: Mapping[str, str], timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """Run a command without input; gives exit status and output, of which the caller judges.

    After ``timeout`` seconds the test fails, with the processes that are there, the output so far, and the
    stacks of all threads of each Python among the command's processes.
    """
    process = subprocess.Popen(
        command,
        env={**env, "PYTHONFAULTHANDLER": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        shown = subprocess.run(
            ["ps", "--ppid", "2", "-N", "-o", "pid,ppid,sid,stat,etimes,wchan:20,args", "--forest"],
            check=False,
            capture_output=True,
            text=True,
        ).stdout
        # While mpiexec is there, whose ranks have sessions of their own.
        own = _of_session(process.pid)
        for pid in filter(_is_python, own):
            _signal(pid, signal.SIGABRT)  # has Python's fault handler write the stacks
        try:
            out, err = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            for pid in own:
                _signal(pid, signal.SIGKILL)
            out, err = process.communicate()
        pytest.fail(f"{' '.join(command)} did not end in {timeout:g} s\n{shown}\n{out}\n{err}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _of_session(leader: int) -> list[int]:
    """The processes of a session, or of one that mpiexec began for a rank within it."""
    table = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,sid="], check=False, capture_output=True, text=True
    ).stdout
    found = {leader}
    rows = [tuple(map(int, line.split())) for line in table.splitlines()]
    for _ in rows:
        more = {pid for pid, parent, session in rows if parent in found or session in found}
        if more <= found:
            break
        found |= more
    return sorted(found)


def _is_python(pid: int) -> bool:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python")
    except OSError:  # it has ended
        return False


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
