"""Runs every benchmark, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness import options

NAMES = (
    "dispatch",
    "psum_two_ranks",
    "data_parallel",
    "psum_under_load",
    "loop_psum",
    "loop_sizes",
    "many_results",
    "small_steps",
    "large_arrays",
    "everyday",
    "programs",
    "science",
    "user_programs",
    "pjrt_engine",
    "order_cost",
    "compile_time",
    "memory",
    "overlap",
    "pipeline",
    "two_hosts",
    "chunked",
    "interleave",
    "schedules",
    "schedules_simulated",
)


def main() -> int:
    flags = ["--quick"] if options(__doc__ or "").quick else []
    here = Path(__file__).parent
    codes = [subprocess.call([sys.executable, str(here / f"{n}.py"), *flags]) for n in NAMES]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
