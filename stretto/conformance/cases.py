"""All that `stretto conform` tries of an engine, and what becomes of it.

Three groups: ``protocol``, the engine by itself (`stretto.engine_check`), in a process of its own;
``programs``, JAX programs on eight devices of one or several ranks (`programs`), whose results are compared
with JAX's CPU backend or with numpy (`judge`); ``faults``, jobs in which a rank fails. A case that crashes
or hangs ends its process, and the others go on in another one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from stretto import engine_check

from . import judge
from .pattern import fits
from .programs import PROGRAMS

PASS, FAIL, UNSUPPORTED = "PASS", "FAIL", "UNSUPPORTED"
PROTOCOL, PROGRAM, FAULT = "protocol/", "programs/", "faults/"  # groups
DEVICES = 8  # of all programs
SECONDS = 60.0  # for one case
# What says that something is absent, not broken: JAX without a rule for the platform, a plugin without the
# function.
_ABSENT = re.compile(
    r"NotImplementedError|UNIMPLEMENTED|not supported on \w+ backend|not found for platform"
)
_FAULTS = {
    "dies": r"rank \d+ \(pid \d+ on \S+\) died|KILLED BY SIGNAL: 9|SIGNAL: Killed|signal 9",
    "raises": "ValueError: what this rank says",
    "stalls": r"timed out after \S+ s \(STRETTO_TIMEOUT\): rank \d+ did not reach it",
}


@dataclass(frozen=True)
class Verdict:
    """What became of a case. ``text``: what failed, what was seen and what is right; or what is absent."""

    name: str
    status: str
    text: str = ""
    seconds: float = 0.0

    def reason(self) -> str:
        """The line that says what is absent, or the last one."""
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return ([line for line in lines if _ABSENT.search(line)] or lines or [""])[-1]


def names_of(ranks: int = 1, only: str = "*") -> list[str]:
    """The cases for so many ranks. Raises ``ValueError`` for a number that does not divide 8."""
    if ranks < 1 or DEVICES % ranks:
        raise ValueError(f"{ranks} ranks: programs are for {DEVICES} devices, as many on each rank")
    form = "1x8" if ranks == 1 else "8x1" if ranks == DEVICES else "2x4"
    programs = [
        f"{PROGRAM}{name}"
        for name, program in PROGRAMS.items()
        if form in program.forms and not program.only_full
    ]
    faults = [f"{FAULT}{name}" for name in _FAULTS] if ranks > 1 else []
    checks = [f"{PROTOCOL}{name}" for name in engine_check.names_of()]
    return [name for name in [*checks, *programs, *faults] if fits(name, only)]


def conform(
    engine: str,
    chosen: Sequence[str],
    ranks: int = 1,
    devices: int = 0,
    begins: Callable[[str], None] = lambda name: None,
    seconds: float = SECONDS,
) -> Iterator[Verdict]:
    """Try the cases of these names (`names_of`), on ``ranks`` processes with ``8 / ranks`` devices each.

    ``engine`` is what STRETTO_ENGINE is set to. ``devices``: how many it has in each process, where these
    are fewer; programs share them. ``begins`` is told what is tried next; no case may take longer than
    ``seconds``. Raises ``FileNotFoundError`` where there is no mpiexec for several ranks.
    """
    if ranks > 1 and judge.find_mpiexec() is None:
        raise FileNotFoundError(
            "no mpiexec, neither beside this Python nor on PATH: pip install 'stretto[mpi]'"
        )
    checks = [name.removeprefix(PROTOCOL) for name in chosen if name.startswith(PROTOCOL)]
    if checks:
        begins(checks[0])
        yield from _protocol(engine, devices, checks, begins, seconds)
    if 0 < devices < DEVICES // ranks:
        engine = f"shared:{devices}:{engine}"
    programs = [name.removeprefix(PROGRAM) for name in chosen if name.startswith(PROGRAM)]
    if programs:
        begins("programs")
        yield from _programs(engine, ranks, programs, seconds)
    for name in chosen:
        if name.startswith(FAULT):
            begins(name)
            yield _fault(engine, ranks, name, seconds)


def _protocol(
    engine: str, devices: int, names: Sequence[str], begins: Callable[[str], None], seconds: float
) -> Iterator[Verdict]:
    left = list(names)
    module = "stretto.conformance.protocol"
    while left:
        with subprocess.Popen(
            [sys.executable, "-m", module, engine, str(devices), str(seconds), *left],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(log := tempfile.TemporaryFile()),
            text=True,
        ) as process:
            assert process.stdout is not None
            made = False
            for line in process.stdout:
                said = json.loads(line)
                made = made or "made" in said
                if "begins" in said:
                    begins(PROTOCOL + said["begins"])
                elif "ends" in said:
                    assert said["ends"] == left.pop(0)
                    name, text = PROTOCOL + said["ends"], said["text"]
                    yield _verdict(name, said["status"], text, said["seconds"])
        log.seek(0)
        ended = log.read().decode(errors="replace")[-3000:]
        text = f"the process ended with exit status {process.returncode}\n{ended}"
        if made and left:
            yield _verdict(PROTOCOL + left.pop(0), FAIL, text)
        elif left:
            for name in left:
                yield _verdict(PROTOCOL + name, FAIL, f"the engine cannot be made: {text}")
            return


def _programs(
    engine: str, ranks: int, programs: Sequence[str], seconds: float
) -> Iterator[Verdict]:
    """JAX's CPU backend computes the references beside them."""
    form = judge.Form("engine", ranks, DEVICES // ranks, settings=(("STRETTO_ENGINE", engine),))
    referred = [name for name in programs if PROGRAMS[name].expected is None]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside:
        out = Path(folder)
        references = beside.submit(judge.run_programs, judge.REFERENCE, referred, out)
        outcomes = judge.run_programs(form, programs, out, seconds)
        for name in programs:
            yield _judged(name, outcomes[name], references.result().get(name))


def _judged(name: str, outcome: judge.Outcome, reference: judge.Outcome | None) -> Verdict:
    program, full = PROGRAMS[name], PROGRAM + name
    if outcome.problem:
        return _verdict(full, FAIL, outcome.problem, outcome.seconds)
    if program.expected is not None:
        want = dict(program.expected())
    elif reference is None or reference.problem:
        said = reference.problem if reference else "not run"
        return _verdict(full, UNSUPPORTED, f"JAX's CPU backend does not run it: {said}")
    else:
        want = judge.assemble(reference.load())
    found = judge.differences(want, outcome.load(), program.exact, program.rtol)
    return _verdict(full, FAIL if found else PASS, "\n".join(found[:8]), outcome.seconds)


def _fault(engine: str, ranks: int, name: str, seconds: float) -> Verdict:
    """The job must end by itself, and say what has happened."""
    case = name.removeprefix(FAULT)
    settings = (("STRETTO_ENGINE", engine), ("STRETTO_TIMEOUT", "10"), ("STRETTO_GRACE", "2"))
    form = judge.Form("faults", ranks, DEVICES // ranks, settings=settings)
    process = subprocess.Popen(
        judge.command(form, ["-m", "stretto.conformance.faults", case]),
        env=judge.environment(form),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        judge.end_session(process)
        return _verdict(name, FAIL, f"the job had not ended after {seconds:g} s")
    if process.returncode == 0:
        return _verdict(name, FAIL, f"the job ended as if nothing had happened\n{said[-2000:]}")
    if f"the last rank {case}" not in said:
        return _verdict(name, FAIL, f"the job failed before the fault\n{said[-2000:]}")
    if not re.search(_FAULTS[case], said):
        return _verdict(name, FAIL, f"nobody says what has happened\n{said[-2000:]}")
    return _verdict(name, PASS)


def _verdict(name: str, status: str, text: str = "", seconds: float = 0.0) -> Verdict:
    """What is absent has not failed."""
    if status == FAIL and _ABSENT.search(text):
        status = UNSUPPORTED
    return Verdict(name, status, text, seconds)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What has changed from one report to another, a line each; both as `report` gives them."""
    before, after = (
        {case["name"]: case["status"] for case in report["cases"]} for report in (old, new)
    )
    lines = []
    for name in [*after, *(n for n in before if n not in after)]:
        was, is_ = before.get(name, "absent"), after.get(name, "absent")
        if was != is_:
            lines.append(f"{name}: {was}, now {is_}")
    return lines


def report(engine: str, ranks: int, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """All of it as data, for JSON."""
    totals = {s: sum(v.status == s for v in verdicts) for s in (PASS, FAIL, UNSUPPORTED)}
    versions = {name: version(name) for name in ("stretto", "jax", "jaxlib")}
    cases = [asdict(verdict) for verdict in verdicts]
    return {"engine": engine, "ranks": ranks, **versions, "totals": totals, "cases": cases}
