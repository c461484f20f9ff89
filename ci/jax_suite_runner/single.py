"""Runs one file in a process of its own, watched from outside.

A test that brings down the process, or that takes longer than the limit, costs that test alone: a new
process goes on with the tests behind it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from .environment import Environment, kill
from .results import COLLECTION, CRASHED, EXIT, FAILED, FileResult, Outcome
from .selection import DEVICES, Selection

# Importing a file and generating its cases may take this many seconds, and longer where a test may.
_COLLECTION_LIMIT = 300.0
# What pytest exits with after all tests passed, after some failed, and after there were none.
_ORDERLY = (0, 1, 5)

# Called while tests run, with the results so far and how many tests there are.
Watcher = Callable[[FileResult, int], None]


def run(
    environment: Environment,
    selection: Selection,
    platform: str,
    logs: Path,
    limit: float,
    watcher: Watcher,
) -> FileResult:
    """Run the selected tests; ``limit`` is in seconds for each of them."""
    logs.mkdir(parents=True, exist_ok=True)
    record = logs / f"{selection.name.replace('/', '.')}.{platform}.jsonl"
    record.unlink(missing_ok=True)
    variables = environment.variables(platform, DEVICES) | {
        "JAX_NUM_GENERATED_CASES": str(selection.cases),
        "JAX_SUITE_RECORD": str(record),
        "JAX_SUITE_MODULUS": str(selection.modulus),
        "JAX_SUITE_RESIDUE": str(selection.residue),
        "JAX_SUITE_LEFT_OUT": ",".join(selection.left_out),
    }
    if selection.only:
        names = record.with_suffix(".only")
        names.write_text("\n".join(sorted(selection.only)))
        variables["JAX_SUITE_ONLY"] = str(names)
    # Tests capture output themselves, from the file descriptor.
    command = [str(environment.python.parent / "pytest"), "-q", "-s", "--tb=short", "-rN"]
    command += ["-p", "jax_suite_recorder", "-p", "no:cacheprovider", selection.file]
    began = time.monotonic()
    watched = _Watched(record, limit, watcher)
    with record.with_suffix(".log").open("wb") as log:
        while True:
            known = len(watched.result.tests)
            with environment.started(command, variables, log) as process:
                watched.until_end_of(process)
            if len(watched.result.tests) in (watched.total, known):
                break
    result = watched.result
    result.seconds = time.monotonic() - began
    if not watched.collected:
        result.tests[COLLECTION] = Outcome(FAILED, detail=f"see {record.with_suffix('.log')}")
    elif process.returncode not in _ORDERLY and watched.last_crash is None:
        result.tests[EXIT] = Outcome(CRASHED, detail=_how_it_ended(process.returncode))
    return result


class _Watched:
    """The record of a file's run, read while it is written."""

    def __init__(self, record: Path, limit: float, watcher: Watcher) -> None:
        self.result = FileResult()
        self.collected = False
        self.total = 0
        self.last_crash: str | None = None
        self._record, self._limit, self._watcher = record, limit, watcher
        self._read = 0
        self._running: str | None = None
        self._since = 0.0

    def until_end_of(self, process: subprocess.Popen[bytes]) -> None:
        """Follow the record until the process has ended, by itself or for a test that takes too long."""
        self._running, self._since, self.last_crash = None, time.monotonic(), None
        too_long = False
        while True:
            ended = process.poll() is not None
            if self._follow():
                self._watcher(self.result, self.total)
            if ended:
                break
            limit = self._limit if self._running else max(_COLLECTION_LIMIT, self._limit)
            if time.monotonic() - self._since > limit:
                too_long = True
                _stop(process)
            time.sleep(0.2)
        if self._running is not None:
            self.last_crash = self._running
            how = f"took more than {limit:.0f} s" if too_long else _how_it_ended(process.returncode)
            spent = time.monotonic() - self._since
            self.result.tests[self._running] = Outcome(CRASHED, spent, how)
            self._watcher(self.result, self.total)

    def _follow(self) -> bool:
        """Take in what was written since; tells whether there was anything."""
        if not self._record.exists():
            return False
        with self._record.open() as file:
            file.seek(self._read)
            lines = file.read()
        lines = lines[: lines.rfind("\n") + 1]
        self._read += len(lines)
        for line in map(json.loads, lines.splitlines()):
            if "collected" in line:
                self.collected, self.total = True, len(line["collected"])
            elif "begin" in line:
                self._running, self._since = line["begin"], time.monotonic()
            else:
                self._running, self._since = None, time.monotonic()
                outcome = Outcome(line["outcome"], line["seconds"], line["detail"])
                self.result.tests[line["end"]] = outcome
        return bool(lines)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that hangs; pytest's fault handler writes the stacks of its threads to the log."""
    process.send_signal(signal.SIGABRT)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        kill(process)


def _how_it_ended(code: int) -> str:
    return (
        f"the process ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"
    )
