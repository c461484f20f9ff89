"""Programs of random shapes with STRETTO_SPLIT and without, on two hosts with a 1 Gb/s link between them: is
one ever slower for being split?

Programs are those of `chunked_programs`. Each is measured in turns on three jobs: split, whole, and whole
once more, which is the control; each turn begins with another of them. Ratios are of medians. Where they are
below ``--least`` the shape is measured again with three times the turns, and that counts. Which shapes are
split at all, the table of costs decides; of those that are not, both are the same program, and they are
measured like the others. Printed are the slowest ten and all that were split, ``parts`` of each collective.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from chunked import jobs
from harness import Contender, console
from two_hosts import hosts_and_costs

Case = dict[str, Any]


def random_case(rng: np.random.Generator) -> Case:
    """A program whose compute takes some milliseconds, or less."""
    program = str(rng.choice(["gather", "scatter", "experts"], p=[0.4, 0.4, 0.2]))
    case: Case = {"program": program, "part": "step", "calls": 8}
    if program == "experts":
        return case | {"size": 32 * int(rng.integers(1, 17))}
    rows, width, size = (int(2 ** rng.uniform(low, 10)) for low in (2, 4, 4))
    return case | {"rows": rows, "width": width, "size": size}


def ratios(contenders: Sequence[Contender], case: Case, turns: int) -> tuple[float, float]:
    """How many times as fast as whole: split, and the control. ``contenders``: split, whole, control."""
    times: dict[str, list[float]] = {job.name: [] for job in contenders}
    for turn in range(turns + 1):
        first = turn % len(contenders)
        for job in (*contenders[first:], *contenders[:first]):
            value = job.run(case)
            if turn:
                times[job.name].append(value)
    split, whole, control = (statistics.median(times[job.name]) for job in contenders)
    return whole / split, whole / control


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=200, help="shapes")
    parser.add_argument("--skip", type=int, default=0, help="so many shapes are left out first")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--least", type=float, default=0.97, help="ratio below which to measure again"
    )
    parser.add_argument("--seconds", type=float, default=600, help="begin no shape after so long")
    parser.add_argument("--rate", type=float, default=1000.0, help="of the link, in Mb/s")
    parser.add_argument("--costs", type=Path, help="table of costs (default: made here)")
    parser.add_argument("--json", type=Path, help="write the ratios there too")
    args = parser.parse_args()
    with ExitStack() as stack:
        prepared = hosts_and_costs(stack, args.rate, args.costs)
        if prepared is None:
            return 0
        hosts, costs = prepared
        contenders = jobs(stack, hosts, costs, {"split": True, "whole": False, "control": False})
        rng = np.random.default_rng(0)
        began, found = time.monotonic(), []
        for _ in range(args.skip):
            random_case(rng)
        while len(found) < args.n and time.monotonic() - began < args.seconds:
            case = random_case(rng)
            ratio, control = ratios(contenders, case, args.turns)
            if min(ratio, control) < args.least:
                ratio, control = ratios(contenders, case, 3 * args.turns)
            parts = contenders[0].answers(case | {"parts": True})[0]
            found.append(case | {"ratio": ratio, "control": control, "parts": parts})
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    split = [case for case in found if case["parts"]]
    for whose, cases in (("all", found), ("split", split)):
        for what in ("ratio", "control"):
            values = sorted(case[what] for case in cases) or [1.0]
            slow = sum(v < args.least for v in values)
            console.print(
                f"{what} of {whose}: {len(cases)} shapes, least {values[0]:.3f}, median "
                f"{statistics.median(values):.3f}, most {values[-1]:.3f}; {slow} below {args.least}",
                markup=False,
            )
    slowest = sorted(found, key=lambda case: case["ratio"])[:10]
    for case in [*slowest, *(case for case in split if case not in slowest)]:
        console.print(json.dumps(case), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
