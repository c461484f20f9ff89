"""Modules and cost tables with round numbers, and checks of schedules against the module itself.

One unit of compute is a dot of two f32[8,8] (1024 operations): a second. Two devices, or four in two
groups. A gather to f32[64] moves 128 bytes: a second. Memory traffic is free unless a test says otherwise.
"""

from __future__ import annotations

from typing import Any

from stretto.hlo_frontend.collectives import CollectiveReader
from stretto.hlo_frontend.flatten import flatten
from stretto.hlo_frontend.graph import Instruction, Module
from stretto.hlo_frontend.overlap.costs import Compute, CostTable, Link
from stretto.hlo_frontend.overlap.ledger import to_json
from stretto.hlo_frontend.overlap.plan import Plan, plan_module
from stretto.hlo_frontend.text import parse_hlo_text
from stretto.hlo_frontend.values import BlockGraph
from stretto.testing_replay import Replayed, replay_steps

SUM = """
%sum (left: f32[], right: f32[]) -> f32[] {
  %left = f32[] parameter(0)
  %right = f32[] parameter(1)
  ROOT %total = f32[] add(%left, %right)
}
"""
NEAR = "channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true"
FAR = "channel_id=1, replica_groups={{0,2},{1,3}}, use_global_device_ids=true"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def table(latency_s: float = 0.0, launch_s: float = 0.0, bytes_per_s: float = 1e30) -> CostTable:
    links = tuple(Link(stride, 2, latency_s, 128.0) for stride in (1, 2))
    return CostTable(Compute(1024.0, bytes_per_s, launch_s), links)


def module(body: str, before: str = "") -> Module:
    """A module whose entry has these lines; ``SUM`` is there for reductions."""
    return Module.parse(parse_hlo_text(f"HloModule m\n{SUM}{before}\nENTRY %main {{\n{body}\n}}\n"))


def block(of: Module, num_partitions: int = 4) -> BlockGraph:
    return flatten(of.entry, CollectiveReader(1, num_partitions))


def planned(of: Module, costs: CostTable, **options: Any) -> tuple[Plan, dict[str, Any], Replayed]:
    """The plan, its JSON, and what the independent replay makes of that, after all checks."""
    plan = plan_module(of, costs, 4, **options)
    data = to_json(plan)
    replayed = replay_steps(data["steps"], costs.compute.launch_s)
    summary = data["summary"]
    assert abs(replayed.seconds * 1e3 - summary["predicted_ms"]) < 1e-6 * summary["predicted_ms"]
    assert abs(replayed.exposed_seconds * 1e3 - summary["exposed_ms"]) < 1e-6 + 1e-6 * abs(
        summary["exposed_ms"]
    )
    assert replayed.peak_bytes + summary["base_bytes"] == summary["peak_bytes"]
    check_dependencies(of, data["steps"])
    return plan, data, replayed


def check_dependencies(of: Module, steps: list[dict[str, Any]]) -> None:
    """Every instruction that a step runs has its operands, through whatever only renames them.

    For modules without loops: names are looked up in the entry computation.
    """
    entry = {i.name: i for i in of.entry.instructions}
    assert all(name in entry for step in steps for name in _names(step))
    assert all(step["name"] in entry for step in steps)
    done: set[str] = set()
    listed = {name for step in steps for name in _names(step)}

    def check(instruction: Instruction, step: dict[str, Any], own: set[str]) -> None:
        for needed in (*instruction.operands, *instruction.control_predecessors):
            if needed.name in own or needed.name in done:
                continue
            assert needed.name not in listed, f"{step['name']} runs before {needed.name}"
            check(needed, step, own)

    for step in steps:
        own = set(_names(step))
        if step["kind"] != "wait":
            for name in own:
                check(entry[name], step, own if step["kind"] == "compute" else set())
        if step["kind"] != "start":
            done |= own


def _names(step: dict[str, Any]) -> list[str]:
    return step["instructions"] if step["kind"] == "compute" else step["members"]


def order(data: dict[str, Any]) -> list[str]:
    """Steps as text: ``start x``, ``wait x``, ``x``."""
    return [
        step["name"] if step["kind"] == "compute" else f"{step['kind']} {step['name']}"
        for step in data["steps"]
    ]


def entry_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in data["collectives"] if name in c["members"])
