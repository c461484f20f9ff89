"""The floor is one: no plan goes below it, with more search, other limits, or parts of the planner off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from frontend_support import compiled
from overlap_support import DOT, FAR, NEAR, judged, module, planned, table
from random_programs import draw
from random_schedules import policy_of

from stretto.hlo_frontend.overlap import apply, staged
from stretto.hlo_frontend.overlap.buckets import Bucketed
from stretto.hlo_frontend.overlap.export import to_json


def no_buckets(graph, first, costs, scheduler, memory_limit=float("inf")):
    return Bucketed(graph, first, [(task.index,) for task in graph.tasks])


LEFT_OUT = {
    "nothing": [],
    "buckets": [(apply, "bucket", no_buckets), (staged, "bucket", no_buckets)],
    "refined buckets": [(m, "refine", lambda graph, found, *_: found) for m in (apply, staged)],
    "slack": [(apply, "loosen", lambda graph, found, launch: found)],
    "taking apart": [(apply, "uncombine", lambda block, costs: None)],
    "loops": [(apply, "_stage", lambda block, loop, policy, inner: [])],
}


@pytest.mark.thorough
@pytest.mark.parametrize("what", LEFT_OUT)
def test_no_plan_of_a_random_program_goes_below_it(what, monkeypatch) -> None:
    for name in ("1/0", "1/3", "1/4", "1/7", "1/9", "1/15"):
        program, policy = draw(name), policy_of(name)
        found = compiled(
            program.function, *program.arguments, num_devices=program.over.devices.size
        )
        if found.source is None:
            continue
        floors = set()
        with monkeypatch.context() as patched:
            for where, attribute, instead in LEFT_OUT[what]:
                patched.setattr(where, attribute, instead)
            eager = replace(policy, least_gain=-10.0)
            for each in (eager, replace(eager, budget=10 * policy.budget, memory_factor=100.0)):
                data = to_json(found.source.explained(each))
                judged(data)  # that it is not below, with all the rest
                floors.add(data["summary"]["floor_ms"])
        assert len(floors) == 1, "it is not a matter of the plan"


def test_merging_pays_latency_once_for_each_link_of_a_chain() -> None:
    """Two reductions one after the other, and two gathers that nothing orders: three latencies of 10 s."""
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %v = f32[32] parameter(1)
        %w = f32[32] parameter(2)
        %r1 = f32[8,8] all-reduce(%x), {NEAR}, to_apply=%sum
        %a = f32[8,8] dot(%r1, %x), {DOT}
        %r2 = f32[8,8] all-reduce(%a), {NEAR}, to_apply=%sum
        %g = f32[64] all-gather(%v), {NEAR}, dimensions={{0}}
        %h = f32[64] all-gather(%w), {NEAR}, dimensions={{0}}
        ROOT %out = (f32[8,8], f32[64], f32[64]) tuple(%r2, %g, %h)
        """
    )
    plan, data, _ = planned(found, table(latency_s=10.0), memory_factor=10.0)
    assert data["summary"]["buckets"] == 1
    # An all-reduce of 256 bytes sends 256, a gather of 256 sends 128; 128 bytes take a second.
    assert plan.floor.seconds == 3 * 10.0 + 2 * 2.0 + 2 * 1.0
    assert plan.timeline.seconds == plan.floor.seconds


def test_a_way_through_two_streams_is_not_shortened_by_merging() -> None:
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %r1 = f32[8,8] all-reduce(%x), {NEAR}, to_apply=%sum
        %a = f32[8,8] dot(%r1, %x), {DOT}
        ROOT %r2 = f32[8,8] all-reduce(%a), {FAR}, to_apply=%sum
        """
    )
    plan, _, _ = planned(found, table(latency_s=10.0), memory_factor=10.0)
    assert plan.floor.seconds == plan.timeline.seconds == 12.0 + 1.0 + 12.0
