"""Buckets: made where they pay, refused where they expose, cost too much or would form a cycle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from overlap_support import (
    DOT,
    NEAR,
    block,
    check,
    entry_of,
    graphs,
    module,
    order,
    planned,
    table,
)

from stretto.hlo_frontend.overlap.buckets import Bucketed, merge, plan
from stretto.hlo_frontend.overlap.kernels import build
from stretto.hlo_frontend.overlap.model import Graph
from stretto.hlo_frontend.overlap.refine import refine
from stretto.hlo_frontend.overlap.replay import replay, unscheduled
from stretto.hlo_frontend.overlap.search import IssueOrder, search

GATHERS = f"""
    %x = f32[8,8] parameter(0)
    %w1 = f32[32] parameter(1)
    %w2 = f32[32] parameter(2)
    %w3 = f32[32] parameter(3)
    %g1 = f32[64] all-gather(%w1), {NEAR}, dimensions={{0}}
    %g2 = f32[64] all-gather(%w2), {NEAR}, dimensions={{0}}
    %g3 = f32[64] all-gather(%w3), {NEAR}, dimensions={{0}}
    %m1 = f32[8,8] reshape(%g1)
    %m2 = f32[8,8] reshape(%g2)
    %m3 = f32[8,8] reshape(%g3)
"""
SUM_OF_THREE = f"""
    %a = f32[8,8] dot(%m1, %m2), {DOT}
    ROOT %b = f32[8,8] dot(%a, %m3), {DOT}
"""


def buckets(data: dict[str, Any]) -> list[list[str]]:
    return [c["members"] for c in data["collectives"] if len(c["members"]) > 1]


def test_latency_is_paid_once_and_copies_are_charged() -> None:
    found = module(GATHERS + SUM_OF_THREE)
    _, data, replayed = planned(found, table(latency_s=10.0, bytes_per_s=768.0), memory_factor=4.0)
    assert [sorted(members) for members in buckets(data)] == [["g1", "g2", "g3"]]
    copies = 2 * 3 * (128 + 256) / 768.0
    assert entry_of(data, "g1")["seconds"] == 10.0 + 3 * 1.0 + copies
    # Then two dots, each a second of arithmetic or of reading two and writing one f32[8,8].
    assert replayed.seconds == 10.0 + 3.0 + copies + 2.0
    _, data, alone = planned(found, table(latency_s=10.0, bytes_per_s=768.0), memory_factor=1.0)
    assert not buckets(data)
    assert alone.seconds > replayed.seconds


def test_copies_that_cost_more_than_the_latency_are_not_made() -> None:
    found = module(GATHERS + SUM_OF_THREE)
    _, data, _ = planned(found, table(latency_s=1.0, bytes_per_s=768.0), memory_factor=4.0)
    assert not buckets(data)


def test_packed_buffers_take_memory_while_the_bucket_is_in_flight() -> None:
    found = module(GATHERS + SUM_OF_THREE)
    _, data, replayed = planned(found, table(latency_s=10.0, bytes_per_s=1e6), memory_factor=4.0)
    assert buckets(data)
    base = data["summary"]["base_bytes"]
    assert replayed.peak_bytes == base + 3 * 256 + 3 * (128 + 256)


def test_a_collective_needed_at_once_does_not_wait_for_one_that_is_hidden() -> None:
    """g2 is exposed whatever is done. With g1 in one bucket it would come a second later."""
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %w1 = f32[32] parameter(1)
        %w2 = f32[32] parameter(2)
        %g2 = f32[64] all-gather(%w2), {NEAR}, dimensions={{0}}
        %m2 = f32[8,8] reshape(%g2)
        %a = f32[8,8] dot(%x, %m2), {DOT}
        %b = f32[8,8] dot(%a, %x), {DOT}
        %c = f32[8,8] dot(%b, %x), {DOT}
        %g1 = f32[64] all-gather(%w1), {NEAR}, dimensions={{0}}
        %m1 = f32[8,8] reshape(%g1)
        ROOT %d = f32[8,8] dot(%c, %m1), {DOT}
        """
    )
    _, data, replayed = planned(found, table(latency_s=0.5), memory_factor=4.0)
    assert not buckets(data)
    assert entry_of(data, "g1")["exposed"] == 0.0
    assert entry_of(data, "g2")["exposed"] == replayed.exposed_seconds == 1.5


def test_members_that_depend_on_each_other_stay_apart() -> None:
    found = module(
        f"""
        %x = f32[8,8] parameter(0)
        %r1 = f32[8,8] all-reduce(%x), {NEAR}, to_apply=%sum
        %a = f32[8,8] negate(%r1)
        %r2 = f32[8,8] all-reduce(%a), {NEAR}, to_apply=%sum
        ROOT %b = f32[8,8] negate(%r2)
        """
    )
    _, data, _ = planned(found, table(latency_s=100.0), memory_factor=4.0)
    assert not buckets(data)
    assert order(data) == ["start r1", "wait r1", "a", "start r2", "wait r2", "b"]


def test_other_kinds_groups_dtypes_and_reducers_stay_apart() -> None:
    other = NEAR.replace("{0,1},{2,3}", "{0,2},{1,3}")
    largest = "\n%most (p: f32[], q: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n" + (
        "  %q = f32[] parameter(1)\n  ROOT %greater = f32[] maximum(%p, %q)\n}\n"
    )
    found = module(
        f"""
        %x = f32[32] parameter(0)
        %i = s32[32] parameter(1)
        %a = f32[32] all-reduce(%x), {NEAR}, to_apply=%sum
        %b = f32[32] all-reduce(%x), {NEAR}, to_apply=%most
        %c = f32[32] all-reduce(%x), {other}, to_apply=%sum
        %d = f32[64] all-gather(%x), {NEAR}, dimensions={{0}}
        %e = s32[64] all-gather(%i), {NEAR}, dimensions={{0}}
        ROOT %out = (f32[32], f32[32], f32[32], f32[64], s32[64]) tuple(%a, %b, %c, %d, %e)
        """,
        largest,
    )
    _, data, _ = planned(found, table(latency_s=100.0), memory_factor=4.0)
    assert not buckets(data)


@given(graphs(10))
@settings(max_examples=60, deadline=None)
def test_merged_graphs_have_no_cycles_and_all_that_the_members_had(graph: Graph) -> None:
    for task in graph.tasks:
        task.latency_s = 5.0 if task.is_collective else 0.0
    own = IssueOrder(unscheduled(graph), replay(graph, unscheduled(graph)))
    costs = table()
    groups = plan(graph, own, costs, 1e9)
    merged, members = merge(graph, groups, costs)
    check(merged, unscheduled(merged))
    assert sorted(i for group in members for i in group) == list(range(len(graph.tasks)))
    home = {i: new for new, group in enumerate(members) for i in group}
    for task in graph.tasks:
        for before in task.before:
            assert home[before] in merged.tasks[home[task.index]].before
    for task, group in zip(merged.tasks, members, strict=True):
        assert set(task.writes) == {b for i in group for b in graph.tasks[i].writes}
        assert set(task.reads) == {b for i in group for b in graph.tasks[i].reads}


def test_a_graph_without_buckets_is_the_same_graph() -> None:
    graph = build(block(module(GATHERS + SUM_OF_THREE)), table())
    merged, members = merge(graph, [], table())
    assert [t.before for t in merged.tasks] == [t.before for t in graph.tasks]
    assert members == [(i,) for i in range(len(graph.tasks))]


@pytest.mark.parametrize(
    ("latency_s", "launch_s", "schedules"), [(1.0, 0.0, 1), (1e-3, 0.0, 0), (1e-3, 1e-2, 1)]
)
def test_joins_that_save_less_than_the_least_step_are_not_scheduled(
    latency_s: float, launch_s: float, schedules: int
) -> None:
    """Of a program of some 5 s, with a schedule that no other beats: there is nothing but joins to try."""
    costs = table(latency_s=latency_s, launch_s=launch_s)
    graph = build(block(module(GATHERS + SUM_OF_THREE)), costs)
    first = search(graph, launch_s=launch_s)
    found = Bucketed(graph, first, [(task.index,) for task in graph.tasks])
    scheduled: list[int] = []

    def scheduler(tried: Graph) -> IssueOrder:
        scheduled.append(sum(task.is_collective for task in tried.tasks))
        return IssueOrder(first.steps, first.timeline)

    budget = len(graph.tasks)  # for one step
    refine(graph, found, costs, scheduler, float("inf"), budget)
    assert scheduled == [2] * schedules
