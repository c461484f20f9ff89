"""Collectives in parts, on two hosts with a 1 Gb/s link between them: products around an all-gather, a
reduce-scatter and two all-to-alls, dense or ragged (`chunked_programs`), with STRETTO_SPLIT and without.

Compute w and messages c are measured by themselves; sizes are chosen so that c / w is about what is asked
for. Messages take the share b of the core's time (``busy`` of the table of costs), so no order is faster than
max(w + b c, c): the last column is that bound as a share of the time with splits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from chunked_programs import PROGRAMS, flops
from harness import Contender, in_turns, show, start
from link import Host
from two_hosts import ONE_THREAD, hosts_and_costs

SPLIT, WHOLE = "split", "whole"
RATIOS = {
    "gather": (0.5, 1.0, 1.6),
    "scatter": (0.5, 1.0, 1.6),
    "experts": (0.5, 1.6),
    "ragged": (0.5, 1.6),
}


def jobs(
    stack: ExitStack, hosts: Sequence[Host], costs: Path, splits: Mapping[str, bool]
) -> list[Contender]:
    """Jobs of `chunked_ranks` on both hosts, by name, with collectives in parts or whole."""
    env = {
        "JAX_PLATFORMS": "stretto,cpu",
        "STRETTO_CONTROL_HOST": hosts[0].address,
        "STRETTO_COSTS": str(costs.resolve()),
        **ONE_THREAD,
    }
    made = []
    for name, split in splits.items():
        prefixes, on = [host.prefix for host in hosts], str(int(split))
        job = start(name, "chunked_ranks.py", 2, "mpi", prefixes, STRETTO_SPLIT=on, **env)
        stack.callback(job.close)
        for s in job.sockets:
            s.settimeout(600)
        made.append(job)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: a look, not a figure")
    parser.add_argument("--json", type=Path, help="write the medians there too")
    parser.add_argument("--rate", type=float, default=1000.0, help="of the link, in Mb/s")
    parser.add_argument("--costs", type=Path, help="table of costs (default: made here)")
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    args = parser.parse_args()
    repeats, calls = (3, 2) if args.quick else (11, 3)
    with ExitStack() as stack:
        prepared = hosts_and_costs(stack, args.rate, args.costs)
        if prepared is None:
            return 0
        hosts, costs = prepared
        busy = max(link["busy"] for link in json.loads(costs.read_text())["links"])
        runtimes = jobs(stack, hosts, costs, {SPLIT: True, WHOLE: False})
        rows: dict[str, dict[str, list[float]]] = {}
        shares: dict[str, str] = {}
        for program in args.programs:
            for ratio in RATIOS[program]:
                size, w, c = _sized(runtimes[1], program, ratio, calls)
                title = f"{program}, c/w = {c / w:.2f}"
                case = {"program": program, "part": "step", "size": size, "calls": calls}
                rows |= in_turns(runtimes, {title: case}, repeats)
                bound = max(w + busy * c, c)
                took = statistics.median(rows[title][SPLIT])
                rows[title] |= {"compute alone": [w], "messages alone": [c], "bound": [bound]}
                shares[title] = f"{bound / took:.0%} of the bound"
    show(
        f"products around collectives, {args.rate:g} Mb/s between two hosts, b = {busy:.2f}",
        rows,
        SPLIT,
        shares,
        target=args.json,
    )
    return 0


def _sized(whole: Contender, program: str, ratio: float, calls: int) -> tuple[int, float, float]:
    """The size with which messages take about ``ratio`` times as long as compute; and what both take."""

    def alone(part: str, size: int) -> float:
        case: dict[str, Any] = {"program": program, "part": part, "size": size, "calls": calls}
        return statistics.median(whole.run(case) for _ in range(3))

    first = 256
    compute, messages = alone("compute", first), alone("messages", first)
    rate = flops(program) * first / compute
    size = max(64, round(messages / ratio * rate / flops(program) / 64) * 64)
    return size, alone("compute", size), messages


if __name__ == "__main__":
    sys.exit(main())
