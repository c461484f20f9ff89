"""What scheduling for overlap costs where it gains nothing: programs of the test suite, with and without it.

Two ranks with four devices each on one host, whose cores compute and move the data, so that there is next
to nothing to hide. Costs are what `stretto bench --calibrate` finds here, or what ``--costs`` says. Every
call of a jitted function that a program makes is recorded and then repeated; arguments are not donated, so
that they can be.

A program is compiled three times in the same two processes: without the pass, without it again (the
*control*, which tells what equal programs differ by here), and with it. Calls of the three take turns of
some milliseconds. The figure is the median over turns of the time by that of the turn without the pass, with
the interval in which that median lies at 95% (by order statistics). Programs that the pass leaves as they
were are told from the others by their text; with ``--changed`` only the others are measured. The goal is
that no program takes more than 1.03 times as long as without.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

from harness import (
    HERE,
    Contender,
    clean_environment,
    console,
    machine,
    mpiexec,
    seconds,
    serve,
    start,
)
from rich.table import Table

FAMILIES = ("model/", "loops/", "branches/", "divergence/", "many/", "grad/", "partitioned/")
GOAL = 1.03
VARIANTS = ("without", "control", "overlap")
SECONDS = 0.02  # of calls in a turn


class Recorded:
    """The calls of jitted functions that a program makes, to be repeated, and the programs that they run."""

    def __init__(self, run: Callable[[], Any]) -> None:
        import jax

        from stretto.plugin.client import clients
        from stretto.runtime.recording.instrument import Instrument

        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.programs: list[Any] = []
        jit = jax.jit

        class Watcher(Instrument):
            def program_loaded(watcher, program: Any, local: Any) -> None:  # noqa: N805
                self.programs.append(program)

        def recording(*of: Any, **options: Any) -> Any:
            if not of:
                return lambda f: recording(f, **options)
            # A function of its own, or JAX would find what was compiled for another variant.
            f = functools.wraps(of[0])(functools.partial(of[0]))
            kept = {k: v for k, v in options.items() if not k.startswith("donate_")}
            jitted = jit(f, *of[1:], **kept)

            def call(*arguments: Any, **named: Any) -> Any:
                leaves = jax.tree.leaves((arguments, named))
                if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                    self.calls.append((jitted, arguments, named))
                return jitted(*arguments, **named)

            return call

        (client,) = clients
        end = client.observe(Watcher())
        known = len(self.programs)  # those that were loaded before
        jax.jit = recording
        try:
            jax.block_until_ready(list(run().values()))
        finally:
            jax.jit = jit
            end()
        self.programs = self.programs[known:]
        self.repeat()
        began = time.perf_counter()
        self.repeat()
        self.repeats = max(1, round(SECONDS / max(time.perf_counter() - began, 1e-6)))

    def repeat(self) -> None:
        import jax

        jax.block_until_ready([f(*arguments, **named) for f, arguments, named in self.calls])

    @property
    def text(self) -> list[str]:
        """The programs that communicate: the pass changes no others."""
        from stretto.runtime.program import Start, instructions

        return [
            str(p) for p in self.programs if any(isinstance(i, Start) for i in instructions(p.body))
        ]


def worker() -> None:
    sys.path.insert(0, str(HERE.parent / "tests"))
    import jax

    from stretto.conformance.programs import PROGRAMS
    from stretto.plugin.client import clients

    rank = jax.process_index()
    (client,) = clients
    policy = client.overlap
    assert policy is not None, "no table of costs"
    recorded: dict[str, Recorded] = {}

    def measure(case: dict[str, Any]) -> float:
        name = case["program"]
        if case["do"] == "record":
            variant = case["variant"]
            client.overlap = policy if variant == "overlap" else None
            made = recorded[variant] = Recorded(PROGRAMS[name].run)
            return float(made.repeats if made.calls else 0)
        if case["do"] == "compare":
            texts = recorded["without"].text, recorded["overlap"].text
            if texts[0] != texts[1] and "show" in case and rank == 0:
                for variant, text in zip(("without", "overlap"), texts, strict=True):
                    file = Path(case["show"], f"{name.replace('/', '_')}.{variant}")
                    file.write_text("\n".join(text))
            return float(texts[0] != texts[1])
        made, repeats = recorded[case["variant"]], case["repeats"]
        made.repeat()
        began = time.perf_counter()
        for _ in range(repeats):
            made.repeat()
        return (time.perf_counter() - began) / repeats

    serve(rank, measure)


@dataclass(frozen=True)
class Ratio:
    """The median of ratios and the interval in which it lies at 95%."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(times: Iterable[float], base: Iterable[float]) -> Ratio:
        ratios = sorted(a / b for a, b in zip(times, base, strict=True))
        count = len(ratios)
        # The k-th smallest and the k-th largest enclose it but for twice the chance of k heads or fewer.
        below, k = 0.0, 0
        while (below := below + comb(count, k) / 2**count) < 0.025:
            k += 1
        k = max(0, k - 1)
        return Ratio(statistics.median(ratios), ratios[k], ratios[-1 - k])

    def __str__(self) -> str:
        return f"{self.median:.3f}x [dim]{self.low:.2f} to {self.high:.2f}[/]"


@dataclass(frozen=True)
class Result:
    program: str
    changed: bool
    without: float
    control: Ratio
    overlap: Ratio

    @property
    def verdict(self) -> str:
        if self.overlap.median <= GOAL:
            return "" if self.overlap.high <= GOAL else "≤ goal, within noise"
        if self.overlap.low > max(GOAL, self.control.high):
            return "over"
        return "over, within noise"


def names_of(families: Sequence[str]) -> list[str]:
    sys.path.insert(0, str(HERE.parent / "tests"))
    from stretto.conformance.programs import PROGRAMS

    chosen = tuple(families)
    return [
        name
        for name, program in PROGRAMS.items()
        if name.startswith(chosen)
        and "2x4" in program.forms
        and not program.only_full
        and not program.x64
    ]


def measured(contender: Contender, name: str, args: argparse.Namespace) -> Result | None:
    """None where there is nothing to repeat, or nothing that `--changed` asks for."""

    def record(variant: str) -> int:
        return int(contender.run({"do": "record", "program": name, "variant": variant}))

    repeats = record("overlap")
    if not repeats:
        return None
    record("without")
    show = {"show": str(args.show)} if args.show else {}
    changed = bool(contender.run({"do": "compare", "program": name} | show))
    if args.changed and not changed:
        return None
    record("control")
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    turns = args.turns or (15 if args.quick else 61)
    for turn in range(turns + 1):
        # Each comes right behind each other one as often as the others do.
        for position in range(len(VARIANTS)):
            variant = VARIANTS[(position * (1 + turn % 2) + turn // 2) % len(VARIANTS)]
            value = contender.run(
                {"do": "time", "program": name, "variant": variant, "repeats": repeats}
            )
            if turn:
                times[variant].append(value)
    base = times["without"]
    return Result(
        name,
        changed,
        statistics.median(base),
        Ratio.of(times["control"], base),
        Ratio.of(times["overlap"], base),
    )


def report(results: Sequence[Result], target: Path | None) -> None:
    table = Table(title="programs of the test suite", caption=machine())
    for column in ("", "without", "control ÷ without", "overlap ÷ without", "program", ""):
        table.add_column(column, justify="right" if "without" in column else "left")
    for result in sorted(results, key=lambda r: -r.overlap.median):
        table.add_row(
            result.program,
            seconds(result.without),
            str(result.control),
            str(result.overlap),
            "changed" if result.changed else "the same",
            result.verdict,
        )
    console.print(table)
    counts = [sum(r.verdict == v for r in results) for v in ("over", "over, within noise")]
    console.print(
        f"{len(results)} programs, {sum(r.changed for r in results)} changed by the pass; over {GOAL}x: "
        f"{counts[0]}, and {counts[1]} within noise"
    )
    if target:
        rows = [
            {
                "program": r.program,
                "changed": r.changed,
                "without": r.without,
                "control": vars(r.control),
                "overlap": vars(r.overlap),
                "verdict": r.verdict,
            }
            for r in results
        ]
        target.write_text(json.dumps({"machine": machine(), "programs": rows}, indent=2))


def main() -> int:
    if sys.argv[1:] == ["worker"]:
        worker()
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns: a look, not a figure")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    parser.add_argument("--costs", type=Path, help="table of costs (default: measured here)")
    parser.add_argument("--programs", nargs="*", default=list(FAMILIES), help="beginnings of names")
    parser.add_argument("--changed", action="store_true", help="only what the pass changes")
    parser.add_argument("--show", type=Path, help="write the texts of changed programs there")
    parser.add_argument("--turns", type=int, help="turns of each variant")
    args = parser.parse_args()
    results: list[Result] = []
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        env = {"JAX_PLATFORMS": "stretto,cpu", "STRETTO_LOCAL_DEVICES": "4"}
        if args.costs is None:
            # Kept for these machines, as a user would have it: spans without an entry are estimated.
            env["XDG_CACHE_HOME"] = directory
            stretto = str(Path(sys.executable).with_name("stretto"))
            subprocess.run(
                [mpiexec(), "-n", "2", stretto, "bench", "--calibrate"],
                env=clean_environment(**env),
                stdout=subprocess.DEVNULL,
                check=True,
            )
        else:
            env["STRETTO_COSTS"] = str(args.costs.resolve())
        contender = start("worker", "overlap_tax.py", 2, "mpi", **env)
        stack.callback(contender.close)
        for name in names_of(args.programs):
            result = measured(contender, name, args)
            if result is not None:
                results.append(result)
    report(results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
