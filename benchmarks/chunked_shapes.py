"""Programs of random shapes with STRETTO_SPLIT and without, on two hosts with a 1 Gb/s link between them: is
one ever slower for being split?

Programs are those of `chunked_programs`. Each is measured in turns on three jobs: split, whole, and whole
once more, which is the control; each turn begins with another of them. Ratios are of medians. Where they are
below ``--least`` the shape is measured again with three times the turns, and that counts. Which shapes are
split at all, the table of costs decides; of those that are not, both are the same program, and they are
measured like the others.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from harness import Contender, console, start
from link import Unavailable, two_hosts
from two_hosts import ONE_THREAD, calibrate

Case = dict[str, Any]


def random_case(rng: np.random.Generator) -> Case:
    """A program whose compute takes some milliseconds, or less."""
    program = str(rng.choice(["gather", "scatter", "experts"], p=[0.4, 0.4, 0.2]))
    case: Case = {"program": program, "part": "step", "calls": 8}
    if program == "experts":
        return case | {"size": 32 * int(rng.integers(1, 17))}
    rows, width, size = (int(2 ** rng.uniform(low, 10)) for low in (2, 4, 4))
    return case | {"rows": rows, "width": width, "size": size}


def ratios(jobs: Sequence[Contender], case: Case, turns: int) -> tuple[float, float]:
    """How many times as fast as whole: split, and the control. ``jobs``: split, whole, control."""
    times: dict[str, list[float]] = {job.name: [] for job in jobs}
    for turn in range(turns + 1):
        first = turn % len(jobs)
        for job in (*jobs[first:], *jobs[:first]):
            value = job.run(case)
            if turn:
                times[job.name].append(value)
    split, whole, control = (statistics.median(times[job.name]) for job in jobs)
    return whole / split, whole / control


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="shapes")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--least", type=float, default=0.97, help="ratio below which to measure again"
    )
    parser.add_argument("--seconds", type=float, default=600, help="begin no shape after so long")
    parser.add_argument("--rate", type=float, default=1000.0, help="of the link, in Mb/s")
    parser.add_argument("--costs", type=Path, help="table of costs (default: made here)")
    parser.add_argument("--json", type=Path, help="write the ratios there too")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces outlive who made them
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts(f"{args.rate:g}mbit"))
        except Unavailable as why:
            console.print(f"skipped: two hosts cannot be made here: {why}", markup=False)
            return 0
        costs = args.costs
        if costs is None:
            costs = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "costs.json"
        if not costs.exists():
            calibrate(hosts, costs)
        env = {
            "JAX_PLATFORMS": "stretto,cpu",
            "STRETTO_CONTROL_HOST": hosts[0].address,
            "STRETTO_COSTS": str(costs.resolve()),
            **ONE_THREAD,
        }
        jobs = []
        for name, on in (("split", "1"), ("whole", "0"), ("control", "0")):
            prefixes = [host.prefix for host in hosts]
            made = start(name, "chunked_ranks.py", 2, "mpi", prefixes, STRETTO_SPLIT=on, **env)
            stack.callback(made.close)
            jobs.append(made)
            for s in made.sockets:
                s.settimeout(600)
        rng = np.random.default_rng(0)
        began, found = time.monotonic(), []
        while len(found) < args.n and time.monotonic() - began < args.seconds:
            case = random_case(rng)
            ratio, control = ratios(jobs, case, args.turns)
            if min(ratio, control) < args.least:
                ratio, control = ratios(jobs, case, 3 * args.turns)
            found.append(case | {"ratio": ratio, "control": control})
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    for what in ("ratio", "control"):
        values = sorted(case[what] for case in found)
        slow = sum(v < args.least for v in values)
        console.print(
            f"{what}: {len(values)} shapes, least {values[0]:.3f}, median "
            f"{statistics.median(values):.3f}, most {values[-1]:.3f}; {slow} below {args.least}",
            markup=False,
        )
    for case in sorted(found, key=lambda case: case["ratio"])[:10]:
        console.print(json.dumps(case), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
