"""Programs with other people's packages (`users/`): compiling, the first run and later ones.

diffrax, flax and NetKet on 8 devices of one process beside JAX's CPU backend, and on 4 ranks, NetKet on 2 as
well, beside JAX's CPU backend over gloo. NetKet's energies must be the same. Contenders start afresh in every
round, since compiling and a first run happen once in a process; the first round counts too.
`users/requirements.txt` says how the packages are installed. ``python
user_programs.py`` compares, ``python user_programs.py NAME`` is one process of one runtime.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from harness import PLATFORMS, console, options, serve, show, start, time_calls
from two_ranks import free_address, initialize_gloo

# By package: the module in users/, and its programs.
PROGRAMS = {
    "diffrax": ("ode", ("diffrax solve", "diffrax gradient", "diffrax shard_map")),
    "flax": ("decoder", ("flax decoder",)),
    "netket": ("vmc", ("netket step",)),
}
DEVICES = 8
# On how many ranks each package's programs run; 1 is one process of `DEVICES`.
RANKS = {"diffrax": (1, 4), "flax": (1, 4), "netket": (1, 2, 4)}
# Results of the same steps differ by rounding alone.
TOLERANCE = 1e-4


def contender(name: str) -> None:
    """Answer cases ``{"module": m, "program": p, "figure": f, "calls": c}`` with seconds.

    Compile comes before first run, first run before run. A program that is jitted in parts is not compiled by
    itself: -1. The figure "result" is no time: what a program with an attribute ``result`` has come to.
    """
    import jax

    ranks = int(os.environ["BENCH_RANKS"])
    if name == "cpu" and ranks > 1:
        initialize_gloo()
    wanted = DEVICES if ranks == 1 else ranks
    if (jax.process_count(), jax.device_count()) != (ranks, wanted):
        raise RuntimeError(f"{jax.process_count()} processes, {jax.device_count()} devices")
    built = functools.cache(lambda module: importlib.import_module(f"users.{module}").programs())
    compiled: dict[str, Any] = {}

    def measure(case: dict[str, Any]) -> float:
        program = case["program"]
        function, arguments = built(case["module"])[program]
        if case["figure"] == "compile":
            compiled[program] = function
            if not hasattr(function, "lower"):
                return -1
            lowered = function.lower(*arguments)
            began = time.perf_counter()
            compiled[program] = lowered.compile()
            return time.perf_counter() - began
        if case["figure"] == "result":
            return float(function.result()) if hasattr(function, "result") else float("nan")
        call = lambda: jax.block_until_ready(compiled[program](*arguments))  # noqa: E731
        if case["figure"] == "run":
            return time_calls(call, case["calls"])
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    serve(jax.process_index(), measure)


def begin(stack: ExitStack, name: str, ranks: int) -> Any:
    """Start a contender, closed with the stack."""
    more = {"JAX_PLATFORMS": "stretto,cpu" if name == "stretto" else "cpu"}
    devices = DEVICES if ranks == 1 else 1
    more |= {"STRETTO_LOCAL_DEVICES": str(devices), "JAX_NUM_CPU_DEVICES": str(devices)}
    if name == "cpu" and ranks > 1:
        more |= {"BENCH_COORDINATOR": free_address()}
    launcher = "mpi" if name == "stretto" and ranks > 1 else "plain"
    begun = start(name, "user_programs.py", ranks, launcher, **more)
    stack.callback(begun.close)
    for s in begun.sockets:
        s.settimeout(300)  # first runs compile
    return begun


def compare(
    ranks: int, module: str, program: str, quick: bool
) -> dict[str, dict[str, list[float]]]:
    """Seconds by ``"PROGRAM: FIGURE"`` and contender. ``RuntimeError`` where results are not the same."""
    rows: dict[str, dict[str, list[float]]] = {}
    for _ in range(1 if quick else 3):
        with ExitStack() as stack:
            contenders = {name: begin(stack, name, ranks) for name in PLATFORMS}
            for figure, turns in (("compile", 1), ("first run", 1), ("run", 3 if quick else 5)):
                case = {"module": module, "program": program, "figure": figure, "calls": 3}
                for turn in range(turns):
                    for name, runtime in contenders.items():
                        value = runtime.run(case)
                        # The second and third call of a program may still compile, so a turn is dropped.
                        if value >= 0 and not (figure == "run" and turn == 0):
                            row = rows.setdefault(f"{program}: {figure}", {})
                            row.setdefault(PLATFORMS[name], []).append(value)
            case = {"module": module, "program": program, "figure": "result"}
            results = {name: runtime.run(case) for name, runtime in contenders.items()}
            if abs(results["stretto"] - results["cpu"]) > TOLERANCE * abs(results["cpu"]):
                raise RuntimeError(f"results differ: {results}")
    return rows


def main() -> None:
    args = options(__doc__ or "")
    for ranks in sorted({r for some in RANKS.values() for r in some}):
        rows: dict[str, dict[str, list[float]]] = {}
        for package, (module, programs) in PROGRAMS.items():
            if ranks not in RANKS[package]:
                continue
            if find_spec(package) is None:
                console.print(f"{package} is not installed: its rows are left out")
                continue
            for program in programs:
                try:
                    rows |= compare(ranks, module, program, args.quick)
                except RuntimeError as e:
                    console.print(f"{program}, {ranks} ranks: {e}", markup=False)
        if not rows:
            continue
        where = f"{DEVICES} devices of one process" if ranks == 1 else f"{ranks} ranks, gloo"
        goals = dict.fromkeys(rows, "stretto ≤ 1.1x" if ranks == 1 else "gloo ≥ 2x")
        target = args.json and args.json.with_stem(f"{args.json.stem}_{ranks}")
        show(f"users' programs, {where}", rows, PLATFORMS["stretto"], goals, target=target)


if __name__ == "__main__":
    known = [name for name in sys.argv[1:] if name in PLATFORMS]
    if known:
        contender(known[0])
    else:
        main()
