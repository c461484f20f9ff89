"""The steps of ci/gpu, each within a time limit: none spoils the next. Table and logs in gpu-report/.

Exit code 1 if a step failed. A step's log has all that it printed; the table its last line.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "gpu-report"


@dataclass(frozen=True)
class Step:
    """A command with the most seconds that it may take; ``variables`` of its environment."""

    name: str
    seconds: int
    command: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()


def pytest(name: str, seconds: int, chosen: str, **variables: str) -> Step:
    command = (sys.executable, "-m", "pytest", "-q", "tests/gpu", "-k", chosen)
    return Step(name, seconds, command, tuple(variables.items()))


# What collectives between GPUs are to use: NCCL, the host's memory, or MPI on the GPUs' memory.
WAYS = {"nccl": ("1", "0"), "staged": ("0", "0"), "direct": ("0", "1")}


def conformance(form: str, way: str, seconds: int) -> Step:
    """``direct+auto``: on GPUs, where MPI's library must say that it can."""
    way, _, asked = way.partition("+")
    nccl, by_mpi = WAYS[way]
    variables = {
        "STRETTO_TEST_FORM": form,
        "STRETTO_TEST_NCCL": nccl,
        "STRETTO_TEST_CUDA_MPI": asked or by_mpi,
    }
    return pytest(f"{form}-{way}", seconds, "test_program", **variables)


def host() -> Step:
    """The host's time for a step; on the fake the environment is made by the test support."""
    step = pytest("host", 200, "host_time")
    return replace(step, command=(*step.command, "-s"))  # with what it prints


DOCTOR = (sys.executable, "-m", "stretto.cli", "doctor")
FIRST = (
    pytest("protocol", 400, "conforms or ahead or more_devices or on_one_device or deleted"),
    pytest("waits", 200, "do_not_wait or meanwhile"),
    pytest("loops", 200, "code_on_gpus"),
    pytest("faults", 400, "fault or without_nccl"),
    pytest("lending", 200, "lent or traces"),
    pytest("races", 900, "reused"),
)
# Needs no device.
COMPILE = pytest("compile", 900, "compile")
# On the fake, conformance on all forms; the fewest processes first.
FAKE = (
    *FIRST,
    pytest("direct", 200, "mpi_moves"),
    COMPILE,
    host(),
    *(
        conformance(form, way, 3600)
        for form in ("1x8", "2x4", "4x2", "8x1")
        for way in ("nccl", "staged", "direct")
        if (form, way) != ("1x8", "direct")  # one process has no MPI
    ),
)


def real() -> tuple[Step, ...]:
    """On GPUs. Processes share them where there are not eight."""
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    gpus = listed.stdout.count("GPU ")
    forms = ("8x1", "1x8", "2x4") if gpus >= 8 else ("8x1",)
    measure = (sys.executable, "benchmarks/gpu.py")
    return (
        Step(
            "doctor",
            120,
            DOCTOR,
            (("STRETTO_ENGINE", "xla:cuda"), ("JAX_PLATFORMS", "stretto")),
        ),
        *FIRST,
        Step("measure", 590, measure),
        host(),
        *(
            conformance(form, way, 590)
            for form in forms
            for way in ("staged", "nccl", "direct+auto")
        ),
    )


def run(step: Step, log: Path, environment: dict[str, str]) -> tuple[str, float]:
    """How it ended: ``ok``, its exit code, or that it took too long; and seconds."""
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            step.command,
            cwd=ROOT,
            env=environment | dict(step.variables),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(step.seconds)
            ended = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"not over after {step.seconds} s"
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return ended, time.monotonic() - began


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return (lines or [""])[-1].strip("= ").replace("|", "/")[:150]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fake", action="store_true", help="on the fake CUDA driver")
    parser.add_argument("steps", nargs="*", help="names of steps; all by default")
    arguments = parser.parse_args()
    steps = FAKE if arguments.fake else real()
    unknown = set(arguments.steps) - {step.name for step in steps}
    if unknown:
        parser.error(f"no step {unknown.pop()}; there are {', '.join(s.name for s in steps)}")
    REPORT.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k != "STRETTO_ENGINE"}
    environment["STRETTO_TEST_GPU"] = "fake" if arguments.fake else "real"
    what = "a fake CUDA driver and a fake NCCL" if arguments.fake else "this machine's GPUs"
    rows = [
        f"On {what}:",
        "",
        "| step | ended | seconds | last line |",
        "| --- | --- | --- | --- |",
    ]
    failed = False
    for step in steps:
        if arguments.steps and step.name not in arguments.steps:
            continue
        print(f"== {step.name}, at most {step.seconds} s", flush=True)
        log = REPORT / f"{step.name}.log"
        ended, seconds = run(step, log, environment)
        failed |= ended != "ok"
        rows.append(f"| {step.name} | {ended} | {seconds:.0f} | {last_line(log)} |")
        print(rows[-1], flush=True)
        (REPORT / "table.md").write_text("\n".join(rows) + "\n")  # what is there so far
    return failed


if __name__ == "__main__":
    sys.exit(main())
