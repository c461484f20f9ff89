"""Draws steps of training at random, and compares them in a schedule with what is written, bit for bit.

    cd tests/hlo_frontend && XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python -m random_steps --count 500 --schedule 1f1b [--seed 0]

Prints what was refused, with the reason, and what was not equal; the last line counts: ``equal`` bit for bit,
``rounds`` where it is not and the report on the step says so, ``differs`` where the report promises that it
is, ``refused``. With ``--stacked`` the stages are one array, under `vmap`, which XLA partitions. The suite
runs some.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from dataclasses import dataclass

import jax
import numpy as np
from frontend_support import same, shards
from interpreter import Interpreter
from training_steps import Draw, draw, draw_stacked, program

from stretto.hlo_frontend.compile import CompiledModule, CompileSpec, compile_stablehlo
from stretto.hlo_frontend.passes.valid import ValidPolicy

DEAD_ONLY = ValidPolicy(dead_only=True)


def compiled(function, arguments, devices: int, schedule: str, **how) -> CompiledModule:
    text = function.trace(*arguments).lower().as_text()
    return compile_stablehlo(text, CompileSpec(1, devices), schedule=schedule, **how)


def bits(array: np.ndarray) -> np.ndarray:
    """So that NaNs are equal, and zeros of different signs are not."""
    return np.ascontiguousarray(array).view(np.uint8)


@dataclass(frozen=True)
class Found:
    """``whys``: the reasons of what was refused. ``differs``: results that are not equal on a device, with
    the largest difference. ``ran``: what interpreted the step in its schedule."""

    module: CompiledModule
    whys: tuple[str, ...]
    differs: tuple[str, ...] = ()
    ran: Interpreter | None = None


def compare(d: Draw, schedule: str, *, with_jax: bool = True) -> Found:
    """Run a step in a schedule and as it is written. What is received where a transfer is left out is NaN."""
    function, arguments, specs, over = program(d)
    devices = over.devices.size
    module = compiled(function, arguments, devices, schedule, valid=DEAD_ONLY)
    whys = tuple(report.why for report in module.interleaved if report.why)
    if whys:
        assert (
            module.program
            == compiled(function, arguments, devices, "gpipe", valid=DEAD_ONLY).program
        )
        return Found(module, whys)
    given = [shards(a, over, s) for a, s in zip(jax.tree.leaves(arguments), specs, strict=True)]
    ran = Interpreter(module.program, skipped=np.nan)
    found = ran.run(*given)
    written = Interpreter(compiled(function, arguments, devices, "gpipe").program).run(*given)
    reference, _ = jax.tree.flatten_with_path(function(*arguments))
    differs = []
    for result, expected, (path, array) in zip(found, written, reference, strict=True):
        by_device = {s.device: np.asarray(s.data) for s in array.addressable_shards}
        for n, device in enumerate(over.devices.flat):
            if not np.array_equal(bits(result[n]), bits(expected[n])):
                wide = [np.asarray(a, np.float64) for a in (result[n], expected[n])]
                differs.append(
                    f"{jax.tree_util.keystr(path)} on {n}: {np.max(np.abs(wide[0] - wide[1]))}"
                )
            if with_jax and len(by_device) == devices:
                same(result[n], by_device[device])
    return Found(module, (), tuple(differs), ran)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument(
        "--stacked", action="store_true", help="steps whose stages are one array, under vmap"
    )
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        d = (draw_stacked if options.stacked else draw)(random.Random(seed))
        found = compare(d, options.schedule, with_jax=False)
        rounds = any(getattr(report, "rounds", "") for report in found.module.interleaved)
        differs = "rounds" if rounds else "differs"
        verdict = "refused" if found.whys else differs if found.differs else "equal"
        counts[verdict] += 1
        if verdict != "equal":
            print(
                f"{seed}: {verdict} {d}", *(found.whys or found.differs), sep="\n    ", flush=True
            )
    print(dict(counts))
    return int(counts["differs"] > 0)


if __name__ == "__main__":
    sys.exit(main())
