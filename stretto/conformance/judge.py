"""Runs conformance programs on JAX's CPU backend and on stretto, and compares.

One launch runs many programs. A program that crashes or hangs its launch is named by the progress files;
the others are started again without it. Results are judged shard by shard: the shards of all ranks must
cover what the reference covers, agree with it, and carry its dtype and global shape.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers the names of the narrow dtypes with numpy)
import numpy as np

WORKER = ("-m", "stretto.conformance.worker")
PROGRAM_SECONDS = 60.0
MAX_LAUNCHES = 8

# Relative to the largest element: a sum of a few hundred products, in any order.
TOLERANCE = {
    "float64": 1e-11,
    "complex128": 1e-11,
    "float32": 2e-5,
    "complex64": 2e-5,
    "float16": 1e-2,
    "bfloat16": 4e-2,
}
NARROW_TOLERANCE = 0.26


@dataclass(frozen=True)
class Form:
    """``processes`` ranks with ``devices`` each; ``platform`` is JAX_PLATFORMS.

    ``settings``: further variables of the environment.
    """

    name: str
    processes: int
    devices: int
    platform: str = "stretto,cpu"
    settings: tuple[tuple[str, str], ...] = ()


REFERENCE = Form("reference", 1, 8, "cpu")
FORMS = {f.name: f for f in (Form("1x8", 1, 8), Form("2x4", 2, 4), Form("8x1", 8, 1))}

Result = Mapping[str, Mapping[str, Any]]


@dataclass
class Outcome:
    """What one program did: per-rank results, or why there are none."""

    ranks: dict[int, Path] = field(default_factory=dict)
    problem: str | None = None
    seconds: float = 0.0

    def load(self) -> list[Result]:
        return [pickle.loads(path.read_bytes()) for path in self.ranks.values()]


def find_mpiexec() -> str | None:
    """mpiexec beside this interpreter, or on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def command(form: Form, arguments: Sequence[str]) -> list[str]:
    """The command line that starts the form's processes."""
    python = [sys.executable, "-u", *arguments]
    if form.processes == 1:
        return python
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise FileNotFoundError("mpiexec: neither beside this Python nor on PATH")
    return [mpiexec, "-n", str(form.processes), *python]


def environment(form: Form) -> dict[str, str]:
    """The launch's environment: one platform, its devices, nothing inherited that changes numbers."""
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("STRETTO_", "XLA_", "JAX_", "PMI"))
    }
    env["JAX_PLATFORMS"] = form.platform
    env["OMP_NUM_THREADS"] = "1"
    if form.platform == "cpu":
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={form.devices}"
    else:
        env["STRETTO_LOCAL_DEVICES"] = str(form.devices)
        env["STRETTO_TIMEOUT"] = "30"
    return env | dict(form.settings)


def run_programs(
    form: Form,
    names: Sequence[str],
    directory: Path,
    seconds: float = PROGRAM_SECONDS,
    library: str = "stretto.conformance.programs",
) -> dict[str, Outcome]:
    """Run programs of a library; each gets an outcome. ``seconds`` bounds one program."""
    outcomes: dict[str, Outcome] = {}
    left = list(names)
    for launch in range(MAX_LAUNCHES):
        if not left:
            break
        out = directory / f"{form.name}.{launch}"
        out.mkdir(parents=True)
        ended = launch_once(form, [library, str(out), str(seconds), *left], out, seconds)
        done = collect(form, left, out)
        if not done:
            outcomes.update({n: Outcome(problem=f"the launch failed\n{ended}") for n in left})
            return outcomes
        for name, outcome in done.items():
            if outcome.problem == CUT_OFF:
                outcome.problem = (
                    f"the launch ended in the middle of {name}\n{ended}\n{stacks(out)}"
                )
        outcomes.update(done)
        left = [n for n in left if n not in done]
    for name in left:
        outcomes[name] = Outcome(problem=f"not run: {MAX_LAUNCHES} launches ended early before it")
    return outcomes


CUT_OFF = "cut off"


def launch_once(form: Form, arguments: Sequence[str], out: Path, seconds: float) -> str:
    """One launch, to its end; returns how it ended (exit status and the tail of its output)."""
    log = out / "output.txt"
    # Whoever gives one program more time than usual expects all of them to take longer.
    each = 3.0 * max(1.0, seconds / PROGRAM_SECONDS)
    limit = 60 + seconds * 2 + each * len(arguments) * (form.processes if form.processes > 2 else 1)
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command(form, [*WORKER, *arguments]),
            env=environment(form),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            how = f"exit status {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            how = f"killed after {limit:.0f} s"
        finally:
            end_session(process)
    return f"{how}; last output:\n{log.read_text(errors='replace')[-3000:]}"


def end_session(process: subprocess.Popen[Any]) -> None:
    """Kill what is left of the launch: the process and, through its session, its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def collect(form: Form, names: Sequence[str], out: Path) -> dict[str, Outcome]:
    """Outcomes of the programs that the launch reached, by its progress files.

    They end with the first one that broke the world: what other ranks met after it is not to be blamed.
    """
    reached: dict[str, Outcome] = {}
    fatal: set[str] = set()
    ended: dict[str, int] = {}
    for rank in range(form.processes):
        path = out / f"progress.{rank}.jsonl"
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        for line in lines:
            if line["event"] == "start":
                reached.setdefault(line["name"], Outcome())
            elif line["event"] == "end":
                outcome = reached[line["name"]]
                ended[line["name"]] = ended.get(line["name"], 0) + 1
                outcome.seconds = max(outcome.seconds, line["seconds"])
                if line["fatal"]:
                    fatal.add(line["name"])
                if line["error"]:
                    outcome.problem = outcome.problem or f"rank {rank}: {line['error']}"
                else:
                    outcome.ranks[rank] = out / str(rank) / f"{line['name'].replace('/', '~')}.pkl"
    for name, outcome in reached.items():
        if ended.get(name, 0) < form.processes and outcome.problem is None:
            outcome.problem = CUT_OFF
    order = [name for name in names if name in reached]
    last = next((i for i, name in enumerate(order) if name in fatal), len(order))
    return {name: reached[name] for name in order[: last + 1]}


def stacks(out: Path) -> str:
    """Where the threads stood, for a program that did not end in time."""
    texts = {p.name: p.read_text() for p in sorted(out.glob("stacks.*.txt"))}
    return "\n".join(f"{name}:\n{text[-2500:]}" for name, text in texts.items() if text)


def differences(
    reference: Mapping[str, np.ndarray], ranks: Sequence[Result], exact: bool, rtol: float | None
) -> list[str]:
    """Every way in which the ranks' results differ from the reference; empty when they agree.

    A process without a device of the program's mesh returns nothing, hence names may be missing in
    some ranks but not in all.
    """
    problems: list[str] = []
    seen = {name for rank in ranks for name in rank}
    if seen != set(reference):
        problems.append(f"results {sorted(seen)}, expected {sorted(reference)}")
    for name in sorted(seen & set(reference)):
        whole = reference[name]
        covered = np.zeros(whole.shape, bool)
        for number, rank in enumerate(ranks):
            if name not in rank:
                continue
            entry = rank[name]
            if tuple(entry["shape"]) != whole.shape or entry["dtype"] != str(whole.dtype):
                problems.append(
                    f"{name}: rank {number} has {entry['dtype']}{list(entry['shape'])}, "
                    f"expected {whole.dtype}{list(whole.shape)}"
                )
                continue
            for spans, data in entry["shards"]:
                index = tuple(slice(*s) for s in spans)
                covered[index] = True
                problem = mismatch(whole[index], data, exact, rtol)
                if problem:
                    problems.append(f"{name}{list(spans)} on rank {number}: {problem}")
        if not covered.all():
            problems.append(f"{name}: {covered.size - covered.sum()} elements on no rank")
    return problems


def mismatch(want: np.ndarray, got: np.ndarray, exact: bool, rtol: float | None) -> str | None:
    """How two arrays differ, or None. NaN equals NaN."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"shard {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}"
    if want.size == 0:
        return None
    floating = want.dtype.kind in "fc" or want.dtype.name.startswith(("bfloat", "float"))
    if not floating:
        bad = np.asarray(want != got, bool)
        worst = ""
    else:
        wide = np.complex128 if want.dtype.kind == "c" else np.float64
        a, b = want.astype(wide), got.astype(wide)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        if exact:
            bad = ~same
        else:
            tolerance = rtol or TOLERANCE.get(want.dtype.name, NARROW_TOLERANCE)
            finite = np.abs(a[np.isfinite(a)])
            scale = float(finite.max()) if finite.size else 1.0
            with np.errstate(invalid="ignore"):
                bad = ~(same | (np.abs(a - b) <= tolerance * max(scale, 1e-30)))
        with np.errstate(invalid="ignore"):
            gaps = np.abs(a - b)
        worst = f", largest difference {np.nanmax(gaps):.3g}" if np.isfinite(gaps).any() else ""
    if not bad.any():
        return None
    first = tuple(int(i) for i in np.argwhere(bad)[0]) if bad.ndim else ()
    return (
        f"{int(bad.sum())} of {bad.size} differ, first at {first}: "
        f"{got[first]!s}, expected {want[first]!s}{worst}"
    )


def assemble(ranks: Sequence[Result]) -> dict[str, np.ndarray]:
    """Whole arrays from the shards of all ranks."""
    arrays: dict[str, np.ndarray] = {}
    for rank in ranks:
        for name, entry in rank.items():
            for spans, data in entry["shards"]:
                whole = arrays.setdefault(name, np.zeros(entry["shape"], data.dtype))
                whole[tuple(slice(*s) for s in spans)] = data
    return arrays
