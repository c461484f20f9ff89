"""A slice of the fuzzer's inputs; `python -m fuzz` in this folder runs as many as one likes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

INPUTS = 400


def test_every_input_ends_in_a_result_or_a_clear_error() -> None:
    """In a process of its own, which forks: this one has threads."""
    done = subprocess.run(
        [sys.executable, "-m", "fuzz", "-n", str(INPUTS), "--seed", "77", "--json"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert sum(counts.values()) == INPUTS
    # Mutations that leave nothing intact, or nothing broken, would test nothing.
    assert counts["result"] > INPUTS // 20 and counts["error"] > INPUTS // 4
