"""Compares what stretto's tests did with what JAX's CPU backend's did, and with what is known to fail.

``ci/jax_known_failures/<file>.txt`` lists accepted failures of a file, one a line: ``Class::test  # reason``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .environment import ROOT
from .results import CRASHED, FAILED, PASSED, SKIPPED, FileResult, Outcome

KNOWN = ROOT / "ci/jax_known_failures"


class KnownFailuresError(Exception):
    """A list of known failures cannot be read."""


def known_failures(name: str, folder: Path = KNOWN) -> dict[str, str]:
    """Test to reason, for a file such as ``pjit_test`` or ``multiprocess/pjit_test``.

    Raises `KnownFailuresError` for a line without a reason.
    """
    path = folder / f"{name.replace('/', '.')}.txt"
    known = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else (), 1):
        test, mark, reason = (part.strip() for part in line.partition("#"))
        if not test:
            continue
        if not mark or not reason:
            raise KnownFailuresError(
                f"{path}:{number}: `{line}` gives no reason (Class::test  # why)"
            )
        known[test] = reason
    return known


def completed(cpu: FileResult, stretto: FileResult) -> FileResult:
    """The CPU backend's result where it ran only what does not pass on stretto.

    What does is taken to pass there. There are no seconds, which would be those of a few tests.
    """
    return FileResult({name: Outcome(PASSED) for name in stretto.named(PASSED)} | cpu.tests)


@dataclass(frozen=True)
class Verdict:
    """One file: both results, and what follows from them."""

    name: str
    cpu: FileResult
    stretto: FileResult
    known: dict[str, str] = field(default_factory=dict)

    @property
    def missed(self) -> list[str]:
        """What passes on CPU and not on stretto, and what brought stretto down."""
        passed = self.cpu.named(PASSED) - self.stretto.named(PASSED)
        return sorted(passed | self.stretto.named(CRASHED))

    @property
    def unexpected(self) -> list[str]:
        """Misses that are not accepted."""
        return [name for name in self.missed if name not in self.known]

    @property
    def accepted(self) -> list[str]:
        return [name for name in self.missed if name in self.known]

    @property
    def outdated(self) -> list[str]:
        """Accepted failures that pass."""
        return sorted(set(self.known) & self.stretto.named(PASSED))

    @property
    def scored(self) -> tuple[int, int]:
        """Of how many tests that pass on CPU, how many pass on stretto."""
        on_cpu = self.cpu.named(PASSED)
        return len(on_cpu & self.stretto.named(PASSED)), len(on_cpu)

    def why(self, test: str) -> str:
        """In one line, what a missed test did."""
        outcome = self.stretto.tests.get(test)
        if outcome is None:
            return "was not reached"
        text = " ".join(outcome.detail.split())
        return f"{outcome.outcome}: {text[:200]}" if text else outcome.outcome


# By the clock, and of processors; the last of each pair is the CPU backend's.
_SECONDS = ("s", "CPU s", "proc s", "CPU proc s")


def table(verdicts: list[Verdict]) -> str:
    """One line a file, and their sums."""
    head = ("file", "CPU passed", "passed", "skipped", "failed", "crashed", *_SECONDS)
    rows = [
        (
            v.name,
            v.cpu.count(PASSED),
            v.scored[0],
            v.stretto.count(SKIPPED),
            v.stretto.count(FAILED),
            v.stretto.count(CRASHED),
            round(v.stretto.seconds),
            round(v.cpu.seconds),
            round(v.stretto.processor_seconds),
            round(v.cpu.processor_seconds),
        )
        for v in verdicts
    ]
    sums = tuple(sum(int(row[i]) for row in rows) for i in range(1, len(head)))
    lines = [tuple(map(str, row)) for row in (head, *rows, ("all", *sums))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:]))])  # noqa: B905
        for line in lines
    )


def _times(verdicts: list[Verdict]) -> str:
    """How much longer than on the CPU backend the files took, all of which ran there whole."""
    clock = sum(v.stretto.seconds for v in verdicts) / sum(v.cpu.seconds for v in verdicts)
    used = sum(v.stretto.processor_seconds for v in verdicts)
    cpu_used = sum(v.cpu.processor_seconds for v in verdicts)
    return f"{clock:.2f} times the CPU backend's seconds, {used / cpu_used:.2f} times its processor seconds"


def report(verdicts: list[Verdict]) -> tuple[str, bool]:
    """The table, the misses and what they mean; whether all is as it should be."""
    parts = [table(verdicts)]
    passed = sum(v.scored[0] for v in verdicts)
    total = sum(v.scored[1] for v in verdicts)
    if total:
        parts.append(f"{passed} of {total} tests that pass on CPU pass: {passed / total:.2%}")
    if timed := [v for v in verdicts if v.cpu.seconds]:
        parts.append(_times(timed))
    lists = (
        ("not accepted", lambda v: [f"{t}  {v.why(t)}" for t in v.unexpected]),
        ("listed as failing, but pass", lambda v: v.outdated),
        ("accepted", lambda v: [f"{t}  # {v.known[t]}" for t in v.accepted]),
    )
    for title, of in lists:
        lines = [f"  {v.name}  {line}" for v in verdicts for line in of(v)]
        if lines:
            parts.append("\n".join([f"{title}:", *lines]))
    good = total > 0 and not any(v.unexpected or v.outdated for v in verdicts)
    return "\n\n".join(parts), good
