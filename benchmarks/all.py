"""Runs every benchmark, one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NAMES = ("dispatch", "psum_two_ranks", "loop_psum", "compile_time", "memory")


def main() -> int:
    here = Path(__file__).parent
    codes = [subprocess.call([sys.executable, str(here / f"{n}.py"), *sys.argv[1:]]) for n in NAMES]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
