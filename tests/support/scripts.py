"""Running a script on stretto that leaves a report of each process as a JSON file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .mpi import run_ranks


def reports_of(
    folder: Path, text: str, devices: int, ranks: int = 1, **environment: str
) -> tuple[list[Any], str]:
    """Run a script with ``devices`` devices in all, in this many processes.

    It gets the folder as its argument, where each process writes one ``….json``. Gives these reports, by
    name, and what was written to standard error. ``environment`` is added to that of the processes.
    """
    script = folder / "script.py"
    script.write_text(text)
    env = {
        "JAX_PLATFORMS": "stretto",
        "STRETTO_LOCAL_DEVICES": str(devices // ranks),
        **environment,
    }
    if ranks > 1:
        done = run_ranks(ranks, [str(script), str(folder)], env=env)
    else:
        done = subprocess.run(
            [sys.executable, str(script), str(folder)],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert len(reports) == ranks
    return reports, done.stderr
