"""Launches of the conformance programs, in processes of their own.

``python ahead.py FOLDER LANE`` judges the forms that ``FOLDER/LANE.json`` names, one after the other, and
writes ``FOLDER/FORM.pkl``, the outcomes of each. :class:`Launches` starts it and reads what it wrote.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from stretto.conformance import judge


class Launches:
    """Outcomes of programs by form; ``chosen`` names the programs of each form.

    JAX's own CPU backend, the reference, has a lane to itself: it goes on beside the first form.
    """

    def __init__(self, folder: Path, chosen: Mapping[str, Sequence[str]]) -> None:
        self.folder = folder
        self.chosen = chosen
        self._lanes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start what is chosen, once."""
        if self._lanes:
            return
        reference = judge.REFERENCE.name
        lanes = {"references": [reference], "forms": [f for f in self.chosen if f != reference]}
        for lane, forms in lanes.items():
            names = {form: self.chosen[form] for form in forms if self.chosen.get(form)}
            if not names:
                continue
            (self.folder / f"{lane}.json").write_text(json.dumps(names))
            with (self.folder / f"{lane}.txt").open("wb") as log:
                self._lanes[lane] = subprocess.Popen(
                    [sys.executable, __file__, str(self.folder), lane],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def wait(self) -> None:
        """Until nothing that was started runs any more."""
        for process in self._lanes.values():
            process.wait()

    def get(self, form: str) -> dict[str, judge.Outcome]:
        """The form's outcomes, as soon as they are there; RuntimeError when there will be none."""
        self.start()
        lane = "references" if form == judge.REFERENCE.name else "forms"
        found = self.folder / f"{form}.pkl"
        while not found.exists():
            try:
                self._lanes[lane].wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            if not found.exists():
                said = (self.folder / f"{lane}.txt").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the judge of {form} ended without outcomes:\n{said}")
        outcomes: dict[str, judge.Outcome] = pickle.loads(found.read_bytes())
        return outcomes

    def stop(self) -> None:
        """End what still runs, with its ranks."""
        for process in self._lanes.values():
            process.terminate()
        self.wait()


def main(folder: Path, lane: str) -> None:
    # Through `finally`, for the launch under way to be ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    for name, programs in json.loads((folder / f"{lane}.json").read_text()).items():
        form = judge.REFERENCE if name == judge.REFERENCE.name else judge.FORMS[name]
        outcomes = judge.run_programs(form, programs, folder)
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_bytes(pickle.dumps(outcomes))
        os.replace(unfinished, folder / f"{name}.pkl")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
