"""Random programs on random machines: what they compute with a plan and without, and how it is run.

    export XLA_FLAGS=--xla_force_host_platform_device_count=8 PYTHONPATH=.:..   (in the folder of this file)
    python -m random_schedules -n 1000 --seed 1

Program n of a seed is always the same, and so is the table of costs by which it is planned. Results are
judged bit by bit against those without a plan and against JAX's CPU backend; the lowered program is replayed,
and runs on several ranks in one process, whose orders of starts must be equal on each stream.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from time import monotonic
from typing import Any

import jax
import numpy as np
from executed import engine, execute
from frontend_support import compiled, shards
from jax.sharding import NamedSharding
from overlap_support import judged
from random_programs import RandomProgram, draw

from stretto.hlo_frontend.compile import CompiledModule
from stretto.hlo_frontend.overlap.apply import OverlapPolicy, Planned
from stretto.hlo_frontend.overlap.costs import Compute, CostTable, Link
from stretto.hlo_frontend.overlap.export import to_json
from stretto.runtime.execution.executor import Executor
from stretto.runtime.execution.value import Value
from stretto.runtime.program import Program, Run, Start
from stretto.testing import MemoryTransport, MemoryWorld, Recorder, run_processes
from stretto.testing_replay import replay_program


def policy_of(name: str) -> OverlapPolicy:
    """A machine, and how eagerly it is planned for."""
    rng = Random(f"{name}/policy")
    latency, rate = rng.choice((0.0, 1e-6, 1e-4, 1e-2)), rng.choice((1e5, 1e7, 1e9, 1e12))
    links = tuple(
        Link(stride, size, latency * rng.choice((1, 1, 10)), rate * rng.choice((1, 1, 0.1)))
        for stride in range(1, 8)
        for size in range(2, 9)
    )
    compute = Compute(
        rng.choice((1e6, 1e8, 1e10)), rng.choice((1e7, 1e9, 1e12)), rng.choice((0.0, 1e-9, 1e-6))
    )
    return OverlapPolicy(
        CostTable(compute, links, estimates=True),
        least_gain=rng.choice((-10.0, -10.0, -0.1, 0.03)),
        memory_factor=rng.choice((0.9, 1.0, 1.1, 1.1, 10.0)),
        budget=rng.choice((200, 20_000)),
    )


@dataclass
class Verdict:
    """``changed``: whether there was a plan; ``features`` counts what the programs have, for a campaign."""

    changed: bool
    features: Counter[str]


def judge(name: str) -> Verdict:
    """Run a program with and without a plan. Raises `AssertionError` for what differs."""
    program, policy = draw(name), policy_of(name)
    count = program.over.devices.size
    without, found, again = (
        compiled(program.function, *program.arguments, num_devices=count, overlap=p)
        for p in (None, policy, policy)
    )
    assert found.program == again.program, "compiled twice, it is not the same program"
    given = [
        shards(a, program.over, s) for a, s in zip(program.arguments, program.specs, strict=True)
    ]
    seconds = seconds_of(found.program)
    replay_program(found.program, seconds)
    poison = Random(f"{name}/poison").random() < 0.5
    plain, planned = (execute(m.program, given, poison=poison) for m in (without, found))
    if Random(f"{name}/reference").random() < 0.3:
        reference(program, plain.results)
    for i, (a, b) in enumerate(zip(plain.results, planned.results, strict=True)):
        for device, (x, y) in enumerate(zip(a, b, strict=True)):
            assert x.tobytes() == y.tobytes(), f"result {i} on device {device}: {y}, not {x}"
    if count % 2 == 0 and Random(f"{name}/ranks").random() < 0.3:
        on_ranks(found, given, planned.results)
    members = [
        Counter(part for e in run.events if e[0] == "start" for part in e[1].split("+"))
        for run in (plain, planned)
    ]
    if not any("all-reduce" in n for n in members[0]):  # those are taken apart
        assert members[0] == members[1], f"made more or less often: {members}"
    told(found, policy)
    return Verdict(bool(found.overlap and found.overlap.changed), features(found))


def seconds_of(program: Program) -> Callable[[Run | Start], float]:
    return lambda what: 1.0 if isinstance(what, Run) else 1.5


def reference(program: RandomProgram, results: Sequence[Sequence[np.ndarray]]) -> None:
    """Judge by JAX's CPU backend."""
    placed = [
        jax.device_put(a, NamedSharding(program.over, s))
        for a, s in zip(program.arguments, program.specs, strict=True)
    ]
    try:
        found = program.function(*placed)
    except jax.errors.JaxRuntimeError as error:
        assert "all-to-all has operands with different shapes" in str(error)
        return  # XLA gives the operands different layouts, and refuses that
    for i, want in enumerate(found):
        by_device = {s.device: np.asarray(s.data) for s in want.addressable_shards}
        for d, device in enumerate(program.over.devices.flat):
            x, y = by_device[device], results[i][d]
            assert x.dtype == y.dtype and np.array_equal(x, y), f"result {i} on {d} is not JAX's"


def on_ranks(
    module: CompiledModule,
    given: Sequence[Sequence[np.ndarray]],
    results: Sequence[Sequence[np.ndarray]],
) -> None:
    """Run on two ranks in this process, which have the devices of a mesh by halves."""
    program = module.program
    half = program.num_devices // 2

    def main(world: MemoryWorld, transport: MemoryTransport) -> tuple[Any, list[tuple]]:
        recorder = Recorder()
        executor = Executor(
            engine(), world, communicators=transport.communicators(world.rank), instrument=recorder
        )
        loaded = executor.load(
            program,
            range(program.num_devices),
            schedule=module.schedule,
            with_order=module.with_order,
        )
        mine = range(world.rank * half, (world.rank + 1) * half)
        rows = [
            [
                Value.of(engine(), engine().put(np.array(a[d]), t, k), t, k)
                for a, t in zip(given, program.inputs, strict=True)
            ]
            for k, d in enumerate(mine)
        ]
        got = [[np.array(v.host_view()) for v in row] for row in loaded.execute(rows)]
        executor.close()
        return got, [e[1:] for e in recorder.events if e[0] == "start"]

    ranks = run_processes(2, main, local_devices=half)
    for rank, (got, _) in enumerate(ranks):
        for k, row in enumerate(got):
            for i, array in enumerate(row):
                same = array.tobytes() == results[i][rank * half + k].tobytes()
                assert same, f"result {i} of device {k} on rank {rank} is not that of one process"
    orders = []
    for _, started in ranks:
        order: dict[int, list[str]] = defaultdict(list)
        for name, stream in started:
            order[stream].append(name)
        orders.append(order)
    if all(len(c.groups) == 1 for c in program.collectives):
        assert orders[0] == orders[1], f"ranks start in different orders: {orders}"


def told(module: CompiledModule, policy: OverlapPolicy) -> None:
    """`stretto explain` of the module: what it says is replayed, and is what was decided for the program."""
    if module.source is None:
        return
    data = to_json(module.source.explained(policy))
    judged(data)
    summary = data["summary"]
    predicted = module.program.predicted
    if predicted is not None:
        assert (
            abs(summary["predicted_ms"] - predicted.seconds * 1e3) <= 0.01 * summary["predicted_ms"]
        ), summary


def features(module: CompiledModule) -> Counter[str]:
    found: Counter[str] = Counter()
    for c in module.program.collectives:
        found[str(c.kind)] += 1
        found["bucket"] += "+" in c.name
    found["streams"] += module.program.num_streams

    def walk(planned: Planned) -> None:
        found["planned block"] += planned.steps is not None
        for report in planned.loops:
            found["early"] += len(report.early)
            found["late"] += len(report.late)
        for plans in planned.inner.values():
            for p in plans:
                walk(p)

    if module.overlap is not None:
        walk(module.overlap)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m random_schedules", description=__doc__)
    parser.add_argument("-n", type=int, default=100, help="how many programs")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    bad, began = 0, monotonic()
    for index in range(arguments.first, arguments.first + arguments.n):
        if monotonic() - began > arguments.seconds:
            break
        name = f"{arguments.seed}/{index}"
        try:
            verdict = judge(name)
            total += verdict.features
            total["programs"] += 1
            total["changed"] += verdict.changed
        except Exception as error:
            bad += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"{name}: {type(error).__name__} at {where.filename}:{where.lineno}: {str(error)[:600]}",
                flush=True,
            )
    print(f"{index + 1}: {bad} bad in {monotonic() - began:.0f} s: {dict(total)}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
