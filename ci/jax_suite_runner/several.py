"""Runs a file for several processes: by JAX's own launcher, or with ranks started by mpiexec.

Either way the processes join `jax.distributed`, which the tests use for barriers. Under JAX's launcher it
is all that stretto's ranks have to find each other; mpiexec brings them an MPI world. A test passed if it
passed in all processes; what absl prints while tests run is what tells, so that a crash costs one test.
"""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import time
from pathlib import Path

from .environment import INSIDE, Environment
from .results import CRASHED, EXIT, FAILED, PASSED, SKIPPED, FileResult, Outcome
from .selection import DEVICES_PER_PROCESS, NUM_PROCESSES, Selection

LAUNCHER, MPIEXEC = "jax.distributed", "mpiexec"

# What absl prints for each test: "[ RUN      ] Class.test", then one of the others.
_LINE = re.compile(r"^\[ +(RUN|OK|FAILED|SKIPPED) +\] (\w+)\.(\S+)", re.M)
_OUTCOMES = {"OK": PASSED, "FAILED": FAILED, "SKIPPED": SKIPPED, "RUN": CRASHED}
_SEVERITY = (SKIPPED, PASSED, FAILED, CRASHED)


def run(
    environment: Environment,
    selection: Selection,
    platform: str,
    logs: Path,
    limit: float,
    how: str,
) -> FileResult:
    """Run all tests of the file; ``limit`` is in seconds for the whole of it."""
    folder = logs / f"{selection.name.replace('/', '.')}.{platform}.{how}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    variables = environment.variables(platform, DEVICES_PER_PROCESS)
    variables["TEST_UNDECLARED_OUTPUTS_DIR"] = str(folder)
    # The launcher starts its workers with the interpreter that the environment was made from, which does
    # not find the environment's MPI.
    variables["LD_LIBRARY_PATH"] = str(environment.python.parents[1] / "lib")
    if how == MPIEXEC:
        command = [str(environment.python.parent / "mpiexec"), "-n", str(NUM_PROCESSES)]
        command += [str(environment.python), str(INSIDE / "jax_suite_rank.py")]
        command += [str(folder), f"localhost:{_free_port()}"]
    else:
        command = [str(environment.python)]
    command += [selection.file, f"--num_processes={NUM_PROCESSES}", "--jax_test_dut=cpu"]
    if how != MPIEXEC:
        # The launcher hands its workers only what it does not take for options of its own.
        command += ["--", "--jax_test_dut=cpu"]
    began = time.monotonic()
    with (
        (folder / "launcher.log").open("wb") as log,
        environment.started(command, variables, log) as process,
    ):
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    result = FileResult(_outcomes(folder), time.monotonic() - began)
    if code is None:
        result.tests[EXIT] = Outcome(CRASHED, detail=f"took more than {limit:.0f} s; see {folder}")
    elif code and not result.count(FAILED) + result.count(CRASHED):
        result.tests[EXIT] = Outcome(CRASHED, detail=f"exit code {code}; see {folder}")
    return result


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a launcher, which stops its workers."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)


def _outcomes(folder: Path) -> dict[str, Outcome]:
    """The worst of what each test did in any process; in one that did not get to it, it crashed."""
    ranks: list[dict[str, str]] = []
    for rank in range(NUM_PROCESSES):
        log = folder / f"jax_{rank}_stderr.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        ranks.append({f"{c}::{t}": _OUTCOMES[o] for o, c, t in _LINE.findall(text)})
    names = {name for rank in ranks for name in rank}
    merged = {}
    for name in sorted(names):
        worst = max((rank.get(name, CRASHED) for rank in ranks), key=_SEVERITY.index)
        detail = "" if worst in (PASSED, SKIPPED) else f"see {folder}"
        merged[name] = Outcome(worst, detail=detail)
    return merged
