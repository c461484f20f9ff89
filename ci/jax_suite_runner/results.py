"""What the tests of a file did on a platform."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

PASSED, FAILED, SKIPPED, CRASHED = "passed", "failed", "skipped", "crashed"

# Names of what went wrong outside of any test; no test has such a name.
EXIT, COLLECTION = "(end of process)", "(collection)"


@dataclass(frozen=True)
class Outcome:
    """What one test did: passed, failed, skipped, or crashed, which also means that it hung."""

    outcome: str
    seconds: float = 0.0
    detail: str = ""


@dataclass
class FileResult:
    """Outcomes by test, ``Class::test``, and the seconds that the file took: by the clock, and of processors.

    The latter say more on a machine that does other things too.
    """

    tests: dict[str, Outcome] = field(default_factory=dict)
    seconds: float = 0.0
    processor_seconds: float = 0.0

    def count(self, outcome: str) -> int:
        return sum(1 for test in self.tests.values() if test.outcome == outcome)

    def named(self, outcome: str) -> set[str]:
        return {name for name, test in self.tests.items() if test.outcome == outcome}

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def load(path: Path) -> FileResult:
        stored = json.loads(path.read_text())
        tests = {name: Outcome(**outcome) for name, outcome in stored["tests"].items()}
        return FileResult(tests, stored["seconds"], stored["processor_seconds"])
