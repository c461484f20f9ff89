"""The command ``ci/jax_suite``."""

from __future__ import annotations

import argparse
import hashlib
import resource
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from . import environment, judge, several, single
from .results import COLLECTION, CRASHED, EXIT, FAILED, PASSED, FileResult
from .selection import YARDSTICK, Selection, chosen, full

_LAUNCH_LIMIT = 300.0  # seconds for a file for several processes


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _leave)
    checkout = arguments.checkout.resolve()
    try:
        jax = arguments.jax or environment.version_of(checkout)
        env = environment.make(checkout, jax)
        verdicts = [
            verdict
            for selection in _selections(arguments, checkout)
            for verdict in _verdicts(env, selection, arguments)
        ]
    except (environment.SetupError, judge.KnownFailuresError) as error:
        print(error, file=sys.stderr)
        return 2
    text, good = judge.report(verdicts)
    print(f"\n{text}")
    return 0 if good else 1


def _leave(number: int, _frame: object) -> None:
    """End by way of the clauses that end what runs: tests are in a session of their own, which no signal
    to this process reaches. ``timeout`` sends two, the second of which must not interrupt them."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/jax_suite",
        description="Run JAX's own tests on stretto, judged by what JAX's CPU backend passes.",
    )
    parser.add_argument("checkout", type=Path, help="a checkout of JAX's repository")
    parser.add_argument("--set", choices=("yardstick", "full"), default="yardstick")
    parser.add_argument(
        "--files", nargs="+", metavar="FILE", help="only these, such as pjit or multiprocess/array"
    )
    parser.add_argument("--jax", help="release to test with, if the checkout does not tell")
    parser.add_argument(
        "--residue", type=int, help="take another part of the files that are sampled"
    )
    parser.add_argument("--modulus", type=int, help="sample every file: one test in this many")
    parser.add_argument(
        "--cases", type=int, help="cases of one parameterized test, where JAX draws them"
    )
    parser.add_argument(
        "--stretto-first",
        action="store_true",
        help="run on CPU only what does not pass on stretto: half the time, which is not compared",
    )
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one test (120)")
    return parser.parse_args()


def _selections(arguments: argparse.Namespace, checkout: Path) -> tuple[Selection, ...]:
    selections = YARDSTICK if arguments.set == "yardstick" else full(checkout)
    if arguments.files:
        selections = chosen(selections, arguments.files)
    missing = [s.file for s in selections if not (checkout / s.file).exists()]
    if missing:
        raise environment.SetupError(f"{checkout} lacks {', '.join(missing)}")
    if arguments.modulus is not None:
        selections = tuple(replace(s, modulus=arguments.modulus) for s in selections)
    if arguments.cases is not None:
        selections = tuple(replace(s, cases=arguments.cases) for s in selections)
    if arguments.residue is not None:
        selections = tuple(replace(s, residue=arguments.residue % s.modulus) for s in selections)
    return selections


def _verdicts(
    env: environment.Environment, selection: Selection, arguments: argparse.Namespace
) -> list[judge.Verdict]:
    known = judge.known_failures(selection.name)
    if arguments.stretto_first and not selection.several_processes:
        found = _run(env, selection, "stretto", arguments.limit, "")
        cpu = judge.completed(_of_the_others(env, selection, arguments.limit, found), found)
        return [judge.Verdict(selection.name, cpu, found, known)]
    if not selection.several_processes:
        cpu = _baseline(env, selection, arguments.limit)
        found = _run(env, selection, "stretto", arguments.limit, "")
        return [judge.Verdict(selection.name, cpu, found, known)]
    cpu = _baseline(env, selection, arguments.limit)
    return [
        judge.Verdict(
            f"{selection.name} ({how})", cpu, _run(env, selection, "stretto", 0, how), known
        )
        for how in (several.LAUNCHER, several.MPIEXEC)
    ]


def _of_the_others(
    env: environment.Environment, selection: Selection, limit: float, found: FileResult
) -> FileResult:
    """What the tests that did not pass do on JAX's CPU backend; all tests, if none could be collected."""
    if COLLECTION in found.tests:
        return _baseline(env, selection, limit)
    others = frozenset(found.tests) - found.named(PASSED) - {EXIT}
    if not others:
        return FileResult()
    return _run(env, replace(selection, only=others), "cpu", limit, "")


def _baseline(env: environment.Environment, selection: Selection, limit: float) -> FileResult:
    """What the tests do on JAX's CPU backend; kept until file or selection change.

    A run in which a test crashed or took too long is not kept, since a busy machine does that too, and what
    does not pass on CPU is not asked of stretto.
    """
    source = (env.checkout / selection.file).read_bytes()
    form = repr(FileResult())  # results of an older form are of no use
    key = hashlib.sha256(f"{selection}{form}".encode() + source).hexdigest()[:16]
    path = env.baselines / f"{selection.name.replace('/', '.')}.{key}.json"
    if path.exists():
        return FileResult.load(path)
    result = _run(env, selection, "cpu", limit, several.LAUNCHER)
    if not result.count(CRASHED):
        result.save(path)
    return result


def _run(
    env: environment.Environment, selection: Selection, platform: str, limit: float, how: str
) -> FileResult:
    title = f"{selection.name} on {platform}"
    logs = env.folder / "logs"
    used = _processor_seconds()
    if selection.several_processes:
        title += f", {how}"
        print(f"== {title}", flush=True)
        result = several.run(env, selection, platform, logs, _LAUNCH_LIMIT, how)
    else:
        print(f"== {title}", flush=True)
        result = single.run(env, selection, platform, logs, limit, _Progress())
    result.processor_seconds = _processor_seconds() - used
    counts = ", ".join(
        f"{result.count(outcome)} {outcome}"
        for outcome in (PASSED, FAILED, CRASHED)
        if result.count(outcome) or outcome == PASSED
    )
    print(f"   {counts} in {result.seconds:.0f} s", flush=True)
    return result


def _processor_seconds() -> float:
    """Of all processes that were started here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class _Progress:
    """Prints failures as they come, and every few seconds how far the file is."""

    def __init__(self, every: float = 10.0) -> None:
        self._every = every
        self._last = time.monotonic()
        self._seen: set[str] = set()

    def __call__(self, result: FileResult, total: int) -> None:
        for name in sorted((result.named(FAILED) | result.named(CRASHED)) - self._seen):
            self._seen.add(name)
            print(f"   {result.tests[name].outcome}: {name}", flush=True)
        if time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            print(f"   {len(result.tests)} of {total}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
