"""What scheduling for overlap costs where it gains nothing: programs of the test suite, with and without it.

Two ranks with four devices each on one host, whose cores compute and move the data, so that there is next to
nothing to hide. The table of costs is ``--costs``, or what `stretto bench --calibrate` finds here. Every call
of a jitted function that a program makes is recorded and then repeated, those that give up their arguments
left out. The goal is that no program takes more than 1.03 times as long as without.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness import HERE, clean_environment, console, in_turns, mpiexec, serve, show, start

FAMILIES = ("model/", "loops/", "branches/", "divergence/", "many/", "grad/", "partitioned/")
GOAL = 1.03
SETTINGS = ("without", "overlap")
SECONDS = 0.05  # of calls in a turn


class Recorded:
    """The calls of jitted functions that a program makes, to be repeated."""

    def __init__(self, run: Any) -> None:
        import jax

        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        jit = jax.jit

        def recording(*of: Any, **options: Any) -> Any:
            if not of:
                return lambda f: recording(f, **options)
            jitted = jit(*of, **options)
            if {"donate_argnums", "donate_argnames"} & set(options):
                return jitted

            def call(*arguments: Any, **named: Any) -> Any:
                leaves = jax.tree.leaves((arguments, named))
                if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
                    self.calls.append((jitted, arguments, named))
                return jitted(*arguments, **named)

            return call

        jax.jit = recording
        try:
            jax.block_until_ready(list(run().values()))
        finally:
            jax.jit = jit
        began = time.perf_counter()
        self.repeat()
        self.repeats = max(1, round(SECONDS / max(time.perf_counter() - began, 1e-6)))

    def repeat(self) -> None:
        import jax

        jax.block_until_ready([f(*arguments, **named) for f, arguments, named in self.calls])


def worker() -> None:
    sys.path.insert(0, str(HERE.parent / "tests"))
    import jax
    from programs import PROGRAMS

    recorded: dict[str, Recorded] = {}

    def measure(case: dict[str, Any]) -> float:
        name = case["program"]
        if name not in recorded:
            recorded[name] = Recorded(PROGRAMS[name].run)
        made = recorded[name]
        repeats = case.get("repeats", made.repeats)
        if case.get("ask"):
            return repeats if made.calls else 0
        made.repeat()
        began = time.perf_counter()
        for _ in range(repeats):
            made.repeat()
        return (time.perf_counter() - began) / repeats

    serve(jax.process_index(), measure)


def names_of(families: list[str]) -> list[str]:
    sys.path.insert(0, str(HERE.parent / "tests"))
    from programs import PROGRAMS

    chosen = tuple(families)
    return [
        name
        for name, program in PROGRAMS.items()
        if name.startswith(chosen)
        and "2x4" in program.forms
        and not program.only_full
        and not program.x64
    ]


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] in SETTINGS:
        worker()
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: a look, not a figure")
    parser.add_argument("--json", type=Path, help="write the medians there too")
    parser.add_argument("--costs", type=Path, help="table of costs (default: measured here)")
    parser.add_argument("--programs", nargs="*", default=list(FAMILIES), help="beginnings of names")
    args = parser.parse_args()
    rows: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as directory:
        env = {"JAX_PLATFORMS": "stretto,cpu", "STRETTO_LOCAL_DEVICES": "4"}
        costs = args.costs
        if costs is None:
            costs = Path(directory, "costs.json")
            stretto = str(Path(sys.executable).with_name("stretto"))
            command = [stretto, "bench", "--calibrate", "-o", str(costs)]
            subprocess.run(
                [mpiexec(), "-n", "2", *command],
                env=clean_environment(**env, XDG_CACHE_HOME=directory),
                stdout=subprocess.DEVNULL,
                check=True,
            )
        contenders = []
        for name, setting in zip(
            SETTINGS,
            ({"STRETTO_OVERLAP": "0"}, {"STRETTO_COSTS": str(costs.resolve())}),
            strict=True,
        ):
            contender = start(name, "overlap_tax.py", 2, "mpi", **env, **setting)
            stack.callback(contender.close)
            contenders.append(contender)
        for name in names_of(args.programs):
            asked = [int(c.run({"program": name, "ask": True})) for c in contenders]
            if not all(asked):
                continue
            case = {"program": name, "repeats": min(asked)}
            rows |= in_turns(contenders, {name: case}, 3 if args.quick else 9)
    ratios = {
        name: statistics.median(row["overlap"]) / statistics.median(row["without"])
        for name, row in rows.items()
    }
    ordered = dict(sorted(rows.items(), key=lambda item: -ratios[item[0]]))
    show("programs of the test suite", ordered, "without", target=args.json)
    worst = next(iter(ordered), None)
    if worst is not None:
        over = sum(ratio > GOAL for ratio in ratios.values())
        console.print(f"worst: {worst} {ratios[worst]:.2f}x; {over} of {len(ratios)} over {GOAL}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
