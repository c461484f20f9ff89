"""Compares the results that runs of examples/train_digits.py printed; exit code 1 if they differ.

Arguments: one file a run, whose last line is the JSON object. Checked: at least 97% test accuracy, less
than a minute of training, and one final loss, up to what the order of float additions explains.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

RELATIVE = 2e-3
MIN_ACCURACY = 0.97
MAX_SECONDS = 60.0


def main(paths: list[str]) -> int:
    runs = [json.loads(Path(path).read_text().strip().splitlines()[-1]) for path in paths]
    problems = []
    for run in runs:
        name = f"{run['platform']} on {run['processes']} process(es)"
        spent = (
            f", {run['communication_ms']} ms of it communication"
            if "communication_ms" in run
            else ""
        )
        print(
            f"{name}: loss {run['loss']:.6f}, accuracy {run['accuracy']:.4f}, "
            f"{run['train_seconds']} s, step {run['step_ms']} ms{spent}"
        )
        if run["accuracy"] < MIN_ACCURACY:
            problems.append(f"{name}: accuracy {run['accuracy']:.4f} is below {MIN_ACCURACY}")
        if run["train_seconds"] > MAX_SECONDS:
            problems.append(f"{name}: training took {run['train_seconds']} s")
        if not math.isclose(run["loss"], runs[0]["loss"], rel_tol=RELATIVE):
            problems.append(f"{name}: loss {run['loss']} differs from {runs[0]['loss']}")
    print("\n".join(problems) if problems else f"the {len(runs)} runs agree")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
