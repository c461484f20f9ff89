"""`stretto bench --calibrate`: measure the table of costs of these machines, and keep it.

Under mpiexec all ranks measure together and rank 0 writes. The table is kept in the user's cache directory
for this set of machines, where jobs on the same machines find it, and is written to ``-o FILE``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from stretto.runtime.engines.engine import create_engine
from stretto.runtime.errors import StrettoError
from stretto.runtime.job import cost_tables
from stretto.runtime.job.world import bootstrap

from .calibration import calibrate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibrate",
        action="store_true",
        required=True,
        help="measure links between devices and the rates of compute",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write the table there, too"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, help="calls whose median counts (default: 20)"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(arguments: argparse.Namespace) -> int:
    if arguments.rounds < 1:
        print("stretto bench: --rounds must be at least 1", file=sys.stderr)
        return 2
    try:
        world = bootstrap()
        engine = create_engine(
            world.options.engine, world.local_devices, cores=world.cores, place=world.place
        )
    except (StrettoError, LookupError) as error:
        print(f"stretto bench: {error}", file=sys.stderr)
        return 1
    try:
        table = calibrate(world, engine, arguments.rounds)
    except StrettoError as error:
        if world.size > 1:
            raise
        print(f"stretto bench: {error}", file=sys.stderr)
        return 1
    if world.rank != 0:
        return 0
    text = json.dumps(table, indent=1) + "\n"
    hosts = [peer.host for peer in world.peers]
    code, kept = 0, []
    try:
        paths = [cost_tables.measured_path(hosts, world.local_devices, world.engines)]
    except RuntimeError as error:  # nobody's home directory
        print(f"stretto bench: the table is not kept: {error}", file=sys.stderr)
        paths, code = [], 1
    for path in [*paths, *([arguments.output] if arguments.output else [])]:
        try:
            cost_tables.keep(path, text)
            kept.append(str(path))
        except OSError as error:
            print(f"stretto bench: the table is not written: {error}", file=sys.stderr)
            code = 1
    print(text if arguments.json else summary(table, kept), end="", flush=True)
    return code


def summary(table: dict[str, Any], kept: list[str]) -> str:
    compute = table["compute"]
    lines = [
        f"compute {compute['flops_per_s'] / 1e9:.1f} Gflop/s, memory "
        f"{compute['bytes_per_s'] / 1e9:.2f} GB/s, launch {compute['launch_s'] * 1e6:.1f} us",
        *(
            f"stride {link['axis_stride']:4} x {link['group_size']:4}: latency "
            f"{link['latency_s'] * 1e6:9.1f} us, {link['bytes_per_s'] / 1e9:8.3f} GB/s, "
            f"busy {link['busy']:.2f}"
            for link in table["links"]
        ),
        *(f"written: {path}" for path in kept),
    ]
    return "\n".join(lines) + "\n"
