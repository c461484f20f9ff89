"""Training steps on two hosts with a 1 Gb/s link between them: stretto, with and without overlap, and gloo.

A stack of transformer blocks, one device a host (`sharded_steps`): (a) fully sharded weights, gathered and
scattered by hand and by shardings of `jit`, (b) tensor parallel, (c) data parallel. The hosts are network
namespaces (`link`); without the rights to make them there is nothing to measure, and it says so.

stretto schedules by a table of costs, ``--costs`` or what `stretto bench --calibrate` finds here. With
``--split`` it runs with STRETTO_SPLIT=1, but where overlap is off. With ``--profile`` stretto also runs with
STRETTO_PROFILE=1: compute is then what it was measured to be, in a job before the one that counts. The batch
is chosen so that compute takes as long as messages, both measured alone on stretto. The table's
last columns are these two: no step can take less than the longer one, and none needs more than both.

Then each program runs once more with STRETTO_TRACE, for what was predicted of it, by the same table of costs,
beside what the trace has measured: the step, and how much of it is exposed.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from harness import Contender, clean_environment, console, in_turns, mpiexec, show, start
from link import Host, Unavailable, two_hosts

from stretto.commands.trace import read_folder
from stretto.commands.trace_totals import report
from stretto.runtime.recording.trace_events import measure

OVERLAP, NO_OVERLAP, GLOO = "stretto", "stretto, no overlap", "JAX CPU (gloo)"
PROFILED = "stretto, measured"
TRACED_CALLS = 30
PROFILED_CALLS = 10  # after which its times are kept
TITLES = {
    "sharded": "(a) sharded weights",
    "plain": "(a) the same by `jit`",
    "tensor": "(b) tensor parallel",
    "data": "(c) data parallel",
}
GOALS = {
    "sharded": "no overlap ≥ 1.45x, gloo ≥ 2x",
    "plain": "gloo ≥ 2x",
    "data": "gloo ≥ 2x",
}
MOST_SEQUENCES = 64
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def calibrate(hosts: tuple[Host, Host], target: Path) -> None:
    """Have the two hosts measure their table of costs, one rank each, as `stretto bench --calibrate` does."""
    command = [mpiexec()]
    for rank, host in enumerate(hosts):
        pinned = ("taskset", "--cpu-list", ",".join(map(str, host.cores)))
        stretto = str(Path(sys.executable).with_name("stretto"))
        bench = (stretto, "bench", "--calibrate", "-o", str(target))
        command += [*([":"] if rank else []), "-n", "1", *host.prefix, *pinned, *bench]
    env = clean_environment(
        JAX_PLATFORMS="stretto,cpu",
        STRETTO_CONTROL_HOST=hosts[0].address,
        XDG_CACHE_HOME=str(target.parent),
        **ONE_THREAD,
    )
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"calibration failed:\n{done.stdout}{done.stderr}")
    console.print(done.stdout, markup=False, highlight=False)


def contenders(
    hosts: tuple[Host, Host], planned: dict[str, str], stack: ExitStack
) -> list[Contender]:
    """Two ranks of each runtime, one on each host. ``planned``: the environment that plans are made by."""
    first = hosts[0].address
    prefixes = [host.prefix for host in hosts]
    common = ONE_THREAD
    stretto = common | {"JAX_PLATFORMS": "stretto,cpu", "STRETTO_CONTROL_HOST": first}
    settings: dict[str, tuple[str, dict[str, str]]] = {
        OVERLAP: ("mpi", stretto | {"STRETTO_OVERLAP": "1"} | planned),
        NO_OVERLAP: ("mpi", stretto | {"STRETTO_OVERLAP": "0"}),
        GLOO: (
            "plain",
            common
            | {
                "JAX_PLATFORMS": "cpu",
                "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
                "BENCH_COORDINATOR": f"{first}:29400",
            },
        ),
    }
    made = []
    for name, (launcher, env) in settings.items():
        script_name = "gloo" if name == GLOO else "stretto"
        contender = start(script_name, "host_ranks.py", 2, launcher, prefixes, **env)
        stack.callback(contender.close)
        contender.name = name
        for s in contender.sockets:
            s.settimeout(600)
        made.append(contender)
    return made


def profiled(
    hosts: tuple[Host, Host], planned: dict[str, str], case: dict[str, Any], stack: ExitStack
) -> Contender:
    """A job that plans by what another one before it has measured of this program."""
    kept = stack.enter_context(tempfile.TemporaryDirectory())
    env = {"JAX_PLATFORMS": "stretto,cpu", "STRETTO_CONTROL_HOST": hosts[0].address, **ONE_THREAD}
    env |= planned | {"STRETTO_PROFILE": "1", "XDG_CACHE_HOME": kept}
    prefixes = [host.prefix for host in hosts]
    with closing(start("stretto", "host_ranks.py", 2, "mpi", prefixes, **env)) as first:
        first.run(case | {"calls": PROFILED_CALLS})
    contender = start("stretto", "host_ranks.py", 2, "mpi", prefixes, **env)
    stack.callback(contender.close)
    contender.name = PROFILED
    for s in contender.sockets:
        s.settimeout(600)
    return contender


def told(
    hosts: tuple[Host, Host], planned: dict[str, str], case: dict[str, Any], calls: int
) -> dict[str, float] | None:
    """What `stretto trace` has of a program among its ``programs``; None where nothing was predicted."""
    with tempfile.TemporaryDirectory() as folder:
        env = {"JAX_PLATFORMS": "stretto,cpu", "STRETTO_CONTROL_HOST": hosts[0].address}
        env |= planned | {"STRETTO_TRACE": folder, **ONE_THREAD}
        prefixes = [host.prefix for host in hosts]
        contender = start("stretto", "host_ranks.py", 2, "mpi", prefixes, **env)
        try:
            contender.run(case | {"calls": calls})
        finally:
            contender.close()
        found = report([measure(trace) for trace in read_folder(Path(folder))], None)
    return next(iter(found["programs"]), None)


def batch_for(
    contender: Contender, program: str, sizes: dict[str, int], calls: int
) -> tuple[int, dict[str, float]]:
    """Sequences of a batch with which compute takes as long as messages, and what both take then."""

    def alone(part: str, batch: int) -> float:
        case: dict[str, Any] = {"program": program, "part": part, "calls": calls, **sizes}
        return statistics.median(contender.run(case | {"batch": batch}) for _ in range(3))

    batch = 4
    compute, messages = alone("compute", batch), alone("messages", batch)
    if program != "tensor":  # there both grow with the batch
        batch = 2 * max(1, min(MOST_SEQUENCES // 2, round(batch * messages / compute / 2)))
        compute, messages = alone("compute", batch), alone("messages", batch)
    return batch, {"compute alone": compute, "messages alone": messages}


def hosts_and_costs(
    stack: ExitStack, rate: float, costs: Path | None
) -> tuple[tuple[Host, Host], Path] | None:
    """Two hosts with a link of so many Mb/s, and the table of costs, calibrated if it is not there; None,
    which is said, where hosts cannot be made. Both last as long as ``stack``."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces outlive who made them
    try:
        hosts = stack.enter_context(two_hosts(f"{rate:g}mbit"))
    except Unavailable as why:
        console.print(f"skipped: two hosts cannot be made here: {why}", markup=False)
        return None
    if costs is None:
        costs = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "costs.json"
    if not costs.exists():
        calibrate(hosts, costs)
    return hosts, costs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: a look, not a figure")
    parser.add_argument("--json", type=Path, help="write the medians there too")
    parser.add_argument("--rate", type=float, default=1000.0, help="of the link, in Mb/s")
    parser.add_argument("--costs", type=Path, help="table of costs (default: made here)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--programs", nargs="*", choices=TITLES, default=list(TITLES))
    parser.add_argument("--split", action="store_true", help="with collectives in parts")
    parser.add_argument("--profile", action="store_true", help="stretto with STRETTO_PROFILE=1 too")
    args = parser.parse_args()
    sizes = {"layers": args.layers, "width": args.width}
    repeats, calls = (3, 2) if args.quick else (11, 3)
    with ExitStack() as stack:
        prepared = hosts_and_costs(stack, args.rate, args.costs)
        if prepared is None:
            return 0
        hosts, costs = prepared
        planned = {"STRETTO_COSTS": str(costs.resolve()), "STRETTO_SPLIT": str(int(args.split))}
        runtimes = contenders(hosts, planned, stack)
        rows: dict[str, dict[str, list[float]]] = {}
        goals: dict[str, str] = {}
        kept: dict[str, dict[str, list[float]]] = {}
        for program in args.programs:
            batch, alone = batch_for(runtimes[0], program, sizes, calls)
            title = f"{TITLES[program]}, {batch} sequences"
            case = {"program": program, "part": "step", "batch": batch, "calls": calls, **sizes}
            with ExitStack() as own:
                more = [profiled(hosts, planned, case, own)] if args.profile else []
                rows |= in_turns([*runtimes, *more], {title: case}, repeats)
            rows[title] |= {name: [value] for name, value in alone.items()}
            goals[title] = GOALS.get(program, "")
            entry = told(hosts, planned, case, TRACED_CALLS)
            for what, key in (("step", ""), ("exposed", "exposed_")) if entry else ():
                kept[f"{title}: {what}"] = {
                    name: [entry[f"{name}_{key}ms"] * 1e-3] for name in ("measured", "predicted")
                }
    show(
        f"steps of {args.layers} blocks of width {args.width}, {args.rate:g} Mb/s between two hosts",
        rows,
        OVERLAP,
        goals,
        target=args.json,
    )
    if kept:
        title = "what a trace measures, and what was predicted"
        show(title, kept, "measured", unit=milliseconds)
    return 0


def milliseconds(value: float) -> str:
    return f"{value * 1e3:.1f} ms"


if __name__ == "__main__":
    sys.exit(main())
