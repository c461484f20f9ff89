"""Draws steps of training at random, and compares them in schedules with what is written, bit for bit.

    cd tests/hlo_frontend && XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python -m random_steps --count 500 --schedule 1f1b,zb_h1,interleaved_1f1b [--seed 0]

Prints what was refused, with the reason, and what was not equal; a line for each step counts, for each
schedule: ``equal`` bit for bit where the report promises that, ``may round`` where they are equal though the
report on the step says that they need not be, ``rounds`` where they are not and it says so, ``differs`` where
they are not though the report promises it, ``refused``. With ``--stacked`` the stages are one array, under
`vmap`, which XLA partitions. A step is partitioned, and run as it is written, once for all schedules; with
``interleaved_1f1b`` among them each device has a multiple of two layers in one loop. The suite runs some.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from frontend_support import P, mesh, same, shards
from interpreter import Interpreter
from training_steps import Draw, draw, draw_stacked, program

from stretto.hlo_frontend.compile import (
    CompiledModule,
    CompileSpec,
    compile_hlo,
    compile_stablehlo,
)
from stretto.hlo_frontend.passes.valid import ValidPolicy
from stretto.hlo_frontend.schema import CompileOptionsProto

INTERLEAVED, CHUNKS = "interleaved_1f1b", 2
DEAD_ONLY = ValidPolicy(dead_only=True)


def compiled(
    function, arguments, devices: int, schedule: str, own: dict[str, int | str] | None = None, **how
) -> CompiledModule:
    """``own``: options of stretto among those of the compiler."""
    text = function.trace(*arguments).lower().as_text()
    proto = CompileOptionsProto()
    for key, value in (own or {}).items():
        field = "string_field" if isinstance(value, str) else "int_field"
        setattr(proto.env_option_overrides.add(key=key).value, field, value)
    spec = CompileSpec(1, devices, proto.SerializeToString())
    return compile_stablehlo(text, spec, schedule=schedule, **how)


def bits(array: np.ndarray) -> np.ndarray:
    """So that NaNs are equal, and zeros of different signs are not."""
    return np.ascontiguousarray(array).view(np.uint8)


@dataclass(frozen=True)
class Found:
    """``whys``: the reasons of what was refused. ``differs``: results that are not equal on a device, with
    the largest difference. ``ran``: what interpreted the step in its schedule; ``results``: what it gave."""

    module: CompiledModule
    whys: tuple[str, ...]
    differs: tuple[str, ...] = ()
    ran: Interpreter | None = None
    results: Sequence[Sequence[np.ndarray]] = ()

    @property
    def verdict(self) -> str:
        """As the docstring of this file has them."""
        if self.whys:
            return "refused"
        if any(getattr(report, "rounds", "") for report in self.module.interleaved):
            return "rounds" if self.differs else "may round"
        return "differs" if self.differs else "equal"


def check_hops(found: Found, d: Draw) -> None:
    """Nothing is sent twice: of one array a microbatch makes a hop to each next stage, and of its gradient as
    many back. Sums behind the loops make up to four messages a stage more."""
    assert found.ran is not None
    hops = 2 * d.microbatches * (d.stages - 1)
    assert 0 <= sum(found.ran.messages.values()) - hops <= 4 * d.stages


class WrittenStep:
    """A step that was partitioned, and is run as it is written once, when that is first asked for.

    ``function``: jitted, with its ``arguments``, their ``specs`` and its mesh ``over``."""

    def __init__(self, function: Any, arguments: Any, specs: Any, over: jax.sharding.Mesh) -> None:
        self.function, self.arguments, self.over = function, arguments, over
        self.devices = self.over.devices.size
        self.module = compiled(self.function, self.arguments, self.devices, "gpipe")
        leaves = zip(jax.tree.leaves(self.arguments), specs, strict=True)
        self.given = [shards(a, self.over, s) for a, s in leaves]

    @cached_property
    def written(self) -> list[list[np.ndarray]]:
        return Interpreter(self.module.program).run(*self.given)

    @cached_property
    def paths(self) -> list[str]:
        """The names of results."""
        shapes = jax.eval_shape(self.function, *self.arguments)
        return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(shapes)]

    def in_schedule(self, schedule: str, **how: Any) -> CompiledModule:
        assert self.module.source is not None
        hlo = self.module.source.hlo
        how = {"rewrites": True, "valid": DEAD_ONLY, "schedule": schedule} | how
        return compile_hlo(hlo, 1, self.devices, **how)

    def compare(self, schedule: str, **how: Any) -> Found:
        """Run it in a schedule. What is received where a transfer is left out is NaN."""
        module = self.in_schedule(schedule, **how)
        whys = tuple(report.why for report in module.interleaved if report.why)
        if whys:
            assert module.program == self.in_schedule("gpipe").program
            return Found(module, whys)
        ran = Interpreter(module.program, skipped=np.nan)
        results = ran.run(*self.given)
        differs = []
        for path, result, expected in zip(self.paths, results, self.written, strict=True):
            for n, (own, other) in enumerate(zip(result, expected, strict=True)):
                if not np.array_equal(bits(own), bits(other)):
                    wide = [np.asarray(a, np.float64) for a in (own, other)]
                    differs.append(f"{path} on {n}: {np.max(np.abs(wide[0] - wide[1]))}")
        return Found(module, (), tuple(differs), ran, results)

    def judged(self, schedule: str, **how: Any) -> Found:
        """`compare`, of a step that must be accepted: equal bit for bit, or where its report says that it may
        be rounded otherwise, which depends on the machine, nearly."""
        found = self.compare(schedule, **how)
        assert found.whys == (), schedule
        assert found.verdict != "differs", found.differs
        for path, result, expected in zip(self.paths, found.results, self.written, strict=True):
            most = 5e-2 if result[0].dtype.itemsize < 4 else 1e-4
            for pair in zip(result, expected, strict=True):
                own, other = (np.asarray(a, np.float64) for a in pair)
                scale = max(1.0, float(np.max(np.abs(other), initial=0.0)))
                np.testing.assert_allclose(
                    own, other, 0, most * scale, err_msg=f"{path}, {schedule}"
                )
        return found

    def check_bits(self, hlo: bytes) -> None:
        """A module gives the bits of the one that is written."""
        ran = Interpreter(compile_hlo(hlo, 1, self.devices).program).run(*self.given)
        for own, other in zip(ran, self.written, strict=True):
            assert [bits(a).tolist() for a in own] == [bits(a).tolist() for a in other]

    def check_written(self) -> None:
        """What is written gives what JAX's CPU backend gives."""
        arrays = jax.tree.leaves(self.function(*self.arguments))
        for result, array in zip(self.written, arrays, strict=True):
            by_device = {s.device: np.asarray(s.data) for s in array.addressable_shards}
            if len(by_device) == self.devices:
                for n, device in enumerate(self.over.devices.flat):
                    same(result[n], by_device[device])


def gradient_step(
    local: Any, stages: int, weights: Sequence[int], xs: Sequence[int]
) -> WrittenStep:
    """The gradient in the weights of the sum of what ``local(weights, xs)`` gives on each device.
    ``weights``: the shape of those of all stages, which are divided by its first dimension; ``xs``: of
    microbatches, which all stages have. Both are f32."""
    over, specs = mesh(stages), (P("x"), P())
    mapped = jax.shard_map(local, mesh=over, in_specs=specs, out_specs=P("x"), check_vma=False)
    rng = np.random.default_rng(0)
    given = tuple(rng.standard_normal(shape).astype(np.float32) for shape in (weights, xs))
    function = jax.jit(jax.grad(lambda weights, xs: mapped(weights, xs).sum()))
    return WrittenStep(function, given, list(specs), over)


class Step(WrittenStep):
    """One that is drawn."""

    def __init__(self, d: Draw) -> None:
        super().__init__(*program(d))


def compare(d: Draw, schedule: str, **how: Any) -> Found:
    """Run a step in a schedule, as it is written, and on JAX's CPU backend."""
    step = Step(d)
    found = step.compare(schedule, **how)
    if not found.whys:
        step.check_written()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--schedule", default="1f1b", help="one, or several with commas between them"
    )
    parser.add_argument(
        "--stacked", action="store_true", help="steps whose stages are one array, under vmap"
    )
    for what in ("shift", "again", "head"):
        parser.add_argument(
            f"--{what}", default="", help="of these: in the place of what is drawn, see `Draw`"
        )
    options = parser.parse_args()
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    schedules = options.schedule.split(",")
    for seed in range(options.seed, options.seed + options.count):
        d = (draw_stacked if options.stacked else draw)(random.Random(seed))
        d = replace(d, again=options.again or d.again, head=options.head or d.head)
        if options.stacked:
            d = replace(d, shift=options.shift or d.shift)
        if INTERLEAVED in schedules:  # which divides the layers of a loop
            d = replace(d, layers=d.layers + d.layers % CHUNKS, stage="scan")
        step = Step(d)
        for schedule in schedules:
            how = {"interleave": CHUNKS} if schedule == INTERLEAVED else {}
            found = step.compare(schedule, **how)
            counts[schedule][found.verdict] += 1
            if found.verdict not in ("equal", "may round"):
                lines = *found.whys, *found.differs
                print(f"{seed}: {schedule} {found.verdict} {d}", *lines, sep="\n    ", flush=True)
        print(
            f"{seed}:", *(f"{schedule} {dict(own)}" for schedule, own in counts.items()), flush=True
        )
    return int(any(own["differs"] for own in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
