"""What the benchmarks share: contenders that take turns, medians, tables, facts about the machine.

Contenders of one comparison are alive together and measured in turns (A, B, A, B, …), so that a drift of
the machine meets all of them alike. A contender is one or more processes, each connected to the benchmark
by a socket on which it sleeps until told to run: an idle contender uses no CPU, whatever its runtime does
while it waits inside a collective.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
# Wide enough for a table when the output is a file.
console = Console(width=None if sys.stdout.isatty() else 140)


def options(description: str, **numbers: int) -> argparse.Namespace:
    """The command line of every benchmark; ``numbers``: further options, with their defaults."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: a look, not a figure")
    parser.add_argument("--json", type=Path, help="write the medians there too")
    return parser.parse_args()


def on_both_platforms(devices: int) -> None:
    """Start this process anew, if need be, with stretto and JAX's CPU backend on so many devices each."""
    if os.environ.get("JAX_PLATFORMS") != "stretto,cpu":
        env = clean_environment(
            JAX_PLATFORMS="stretto,cpu",
            JAX_NUM_CPU_DEVICES=str(devices),
            STRETTO_LOCAL_DEVICES=str(devices),
        )
        os.execve(sys.executable, [sys.executable, *sys.argv], env)


def installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def machine() -> str:
    """CPU, cores and versions, in one line."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")
        ]
        model = names[0].split(":", 1)[1].strip() if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = " ".join(f"{p} {metadata.version(p)}" for p in ("jax", "stretto") if installed(p))
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{model}, {cores} cores{load}, Python {platform.python_version()}, {versions}"


def seconds(value: float) -> str:
    """A duration with three digits and its unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def show(
    title: str,
    rows: Mapping[str, Mapping[str, Sequence[float]]],
    base: str,
    goals: Mapping[str, str] | None = None,
    unit: Callable[[float], str] = seconds,
    target: Path | None = None,
) -> None:
    """Print medians of ``rows[case][contender]`` (± half the middle half) and ratios to ``base``.

    A ratio above 1 says how many times as much as ``base`` the contender takes.
    """
    contenders = list(dict.fromkeys(c for row in rows.values() for c in row))
    table = Table(title=title, caption=machine())
    table.add_column("")
    for name in contenders:
        table.add_column(name, justify="right")
        if name != base:
            table.add_column(f"÷ {base}", justify="right", style="bold")
    if goals:
        table.add_column("goal")
    medians: dict[str, dict[str, float]] = {}
    for case, row in rows.items():
        cells = [case]
        medians[case] = {name: statistics.median(values) for name, values in row.items()}
        for name in contenders:
            values = sorted(row.get(name, ()))
            if not values:
                cells += ["—"] if name == base else ["—", "—"]
                continue
            low, high = values[len(values) // 4], values[-1 - len(values) // 4]
            spread = (high - low) / 2 / medians[case][name]
            cells.append(f"{unit(medians[case][name])} [dim]±{spread:.0%}[/]")
            if name != base:
                known = base in medians[case]
                cells.append(f"{medians[case][name] / medians[case][base]:.2f}x" if known else "—")
        table.add_row(*cells, *([goals.get(case, "")] if goals else []))
    console.print(table)
    if target:
        target.write_text(
            json.dumps({"title": title, "machine": machine(), "median": medians}, indent=2)
        )


@dataclass
class Contender:
    """One runtime under measurement: its processes and the sockets they sleep on."""

    name: str
    processes: list[subprocess.Popen[bytes]]
    sockets: list[socket.socket] = field(default_factory=list)

    def run(self, case: Mapping[str, Any]) -> float:
        """Have every process run the case; the time that the first one measured, seconds a call."""
        return float(self.answers(case)[0])

    def answers(self, case: Mapping[str, Any]) -> list[Any]:
        """Have every process run the case; what each of them measured, by rank."""
        for s in self.sockets:
            s.sendall(json.dumps(case).encode() + b"\n")
        answers = [json.loads(_line(s)) for s in self.sockets]
        failed = [a["error"] for a in answers if "error" in a]
        if failed:
            raise RuntimeError(f"{self.name}: {failed[0]}")
        return [a["measured"] for a in answers]

    def close(self) -> None:
        """Tell the processes to end, and end those that do not."""
        for s in self.sockets:
            s.close()
        for p in self.processes:
            try:
                p.wait(15)
            except subprocess.TimeoutExpired:
                p.kill()
                p.wait()


def _line(s: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        more = s.recv(65536)
        if not more:
            raise RuntimeError("a contender ended before it answered")
        data += more
    return data


def mpiexec() -> str:
    """mpiexec beside this interpreter, or on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        sys.exit("mpiexec: neither beside this Python nor on PATH; install stretto[mpi]")
    return found


def clean_environment(**changes: str) -> dict[str, str]:
    """This environment without settings of JAX, XLA, stretto or a launcher, plus ``changes``."""
    dropped = ("STRETTO_", "XLA_", "JAX_", "PMI")
    return {k: v for k, v in os.environ.items() if not k.startswith(dropped)} | changes


def start(
    name: str,
    script: str,
    ranks: int,
    launcher: str,
    prefixes: Sequence[Sequence[str]] = (),
    **env: str,
) -> Contender:
    """Start ``ranks`` processes of ``script NAME`` and wait until each has connected and warmed up.

    ``launcher``: ``mpi`` (under mpiexec) or ``plain`` (separate processes, told rank and size in BENCH_…).
    ``prefixes``: for each rank a command that starts what follows it. Raises RuntimeError with the output's
    tail if one ends first.
    """
    listener = socket.socket(socket.AF_UNIX)  # reaches into other network namespaces
    place = tempfile.TemporaryDirectory()
    listener.bind(f"{place.name}/s")
    listener.listen()
    listener.settimeout(1.0)
    token = secrets.token_hex(8)
    env = clean_environment(
        **env, BENCH_SOCKET=f"{place.name}/s", BENCH_TOKEN=token, BENCH_RANKS=str(ranks)
    )
    argv = [sys.executable, str(HERE / script), name]
    prefixes = prefixes or [()] * ranks
    log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the processes)
    if launcher == "mpi":
        command = [mpiexec()]
        for rank, prefix in enumerate(prefixes):
            command += [*([":"] if rank else []), "-n", "1", *prefix, *argv]
        commands = [(command, env)]
    else:
        commands = [
            ([*prefix, *argv], env | {"BENCH_RANK": str(i)}) for i, prefix in enumerate(prefixes)
        ]
    contender = Contender(
        name,
        [
            subprocess.Popen(c, env=e, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            for c, e in commands
        ],
    )
    connected: dict[int, socket.socket] = {}
    deadline = time.monotonic() + 120
    while len(connected) < ranks:
        if any(p.poll() is not None for p in contender.processes) or time.monotonic() > deadline:
            contender.close()
            log.seek(0)
            raise RuntimeError(
                f"{name} did not start:\n{log.read().decode(errors='replace')[-2000:]}"
            )
        try:
            s, _ = listener.accept()
        except TimeoutError:
            continue
        s.settimeout(120)
        hello = json.loads(_line(s))
        if hello.get("token") == token:
            connected[hello["rank"]] = s
    listener.close()
    place.cleanup()
    contender.sockets = [connected[i] for i in sorted(connected)]
    return contender


def serve(rank: int, measure: Callable[[dict[str, Any]], Any]) -> None:
    """The contender's side: connect, then answer cases until the benchmark closes the connection.

    ``measure`` gives seconds a call, or what JSON can say for `Contender.answers`.
    """
    s = socket.socket(socket.AF_UNIX)
    s.connect(os.environ["BENCH_SOCKET"])
    s.sendall(json.dumps({"token": os.environ["BENCH_TOKEN"], "rank": rank}).encode() + b"\n")
    lines = s.makefile("r")
    for line in lines:
        try:
            answer: dict[str, Any] = {"measured": measure(json.loads(line))}
        except Exception as e:
            answer = {"error": f"{type(e).__name__}: {e}"}
        s.sendall(json.dumps(answer).encode() + b"\n")


def time_calls(call: Callable[[], Any], calls: int) -> float:
    """Seconds a call, after one call to warm up (and, between ranks, to line up)."""
    call()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


# By platform, what it is called.
PLATFORMS = {"stretto": "stretto", "cpu": "JAX CPU"}


def platforms_in_turns(
    runs: Mapping[str, Callable[[], Any]], turns: int, calls: int
) -> dict[str, list[float]]:
    """Seconds a call on each of `PLATFORMS` in this process, under what it is called there.

    ``runs``: by platform, what to call; its first device is the default one meanwhile. The first two turns
    do not count.
    """
    import jax

    times: dict[str, list[float]] = {PLATFORMS[name]: [] for name in runs}
    for turn in range(turns):
        for name, run in runs.items():
            jax.config.update("jax_default_device", jax.devices(name)[0])
            value = time_calls(run, calls)
            if turn > 1:
                times[PLATFORMS[name]].append(value)
    return times


def in_turns(
    contenders: Sequence[Contender], cases: Mapping[str, Mapping[str, Any]], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Measure every case on every contender ``repeats`` times, in turns. The first turn does not count."""
    times: dict[str, dict[str, list[float]]] = {}
    for label, case in cases.items():
        times[label] = {c.name: [] for c in contenders}
        for turn in range(repeats + 1):
            for c in contenders:
                value = c.run(case)
                if turn:
                    times[label][c.name].append(value)
    return times
